"""Turns each step of a slice, as the executor runs it, into one kernel or one copy in GPU memory.

The work goes to a `ReductionStream`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from r2ccl.device.views import address_of, view_of
from r2ccl.gpu.device_reduction import ReductionStream
from r2ccl.kernels.cuda.form import Form
from r2ccl.planning.lowering import Layout, Step
from r2ccl.schedule.ir import OpKind, Space
from r2ccl.types import REDUCTIONS, CallSignature, ReduceOp


class DeviceOperands:
    """`r2ccl.runtime.executor.Operands` in device memory that the transport reaches.

    Parameters
    ----------
    layout : Layout
        As `cleared` returns: only empty slices are eager.
    call : CallSignature
    spaces : sequence of int
        Addresses of input, output and scratch memory, indexed by `Space`.
    nranks : int
    reductions : ReductionStream
    is_bandwidth_sample : bool
    """

    __slots__ = (
        "_by_kind", "_nranks", "_reductions", "_spaces", "is_bandwidth_sample", "layout", "views",
    )  # fmt: skip

    def __init__(
        self,
        layout: Layout,
        call: CallSignature,
        spaces: Sequence[int],
        *,
        nranks: int,
        reductions: ReductionStream,
        is_bandwidth_sample: bool,
    ) -> None:
        self.layout = layout
        self.is_bandwidth_sample = is_bandwidth_sample
        self._spaces = spaces
        self._nranks = nranks
        self._reductions = reductions
        nbytes = layout.count * layout.itemsize
        self.views = tuple(view_of(address, nbytes) for address in spaces)
        self._by_kind = {(form.ninputs, form.is_divided): form for form in forms_of(call)}

    @property
    def computed(self) -> int:
        """See `Operands`."""
        return self._reductions.computed

    def apply(self, step: Step, lo: int, hi: int, received: Any) -> int:
        """See `Operands`."""
        if hi == lo:
            return 0
        out = self._at(step.dst_space, lo)
        sources: tuple[int, ...]
        if step.kind is OpKind.RECV_REDUCE:
            mine, theirs = self._at(step.src_space, lo), address_of(received)
            sources = (theirs, mine) if step.is_left else (mine, theirs)
        elif step.kind is OpKind.REDUCE:
            sources = (out, self._at(step.src_space, lo))
        elif step.kind is OpKind.COPY:
            sources = (self._at(step.src_space, lo),)
        else:
            sources = (out,)
        form = self._by_kind.get((len(sources), step.is_final))
        form = form or self._by_kind.get((len(sources), False))
        if form is not None:
            return self._reductions.run(form, sources, out, hi - lo, self._nranks)
        if sources[0] == out:
            return 0
        return self._reductions.copy(out, sources[0], (hi - lo) * self.layout.itemsize)

    def _at(self, space: Space, element: int) -> int:
        return self._spaces[space] + element * self.layout.itemsize


def forms_of(call: CallSignature) -> Iterator[Form]:
    """Yield the kernels that a collective's slices need.

    Two inputs are reduced; with AVG the last contribution is divided too, or a single input if
    that contribution arrived without a reduction. All other steps copy.
    """
    if call.collective not in REDUCTIONS:
        return
    op = ReduceOp(call.op)
    yield Form(dtype_code=call.dtype, op=op)
    if op is ReduceOp.AVG:
        yield Form(dtype_code=call.dtype, op=op, is_divided=True)
        yield Form(dtype_code=call.dtype, op=op, ninputs=1, is_divided=True)


__all__ = ["DeviceOperands", "forms_of"]

"""Executes the steps of a collective on a GPU, on a `ReductionStream`.

A local step, or an arrived slice, takes at most one kernel or copy.
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
    """Buffers of a collective in device memory; implements `r2ccl.runtime.executor.Operands`.

    Parameters
    ----------
    layout : Layout
        Result of `r2ccl.planning.lowering.cleared`: only empty slices are eager.
    call : CallSignature
    spaces : sequence of int
        Addresses of input, output and scratch memory, indexed by `Space`.
    nranks : int
    reductions : ReductionStream
        Stream that executes the kernels and copies.
    is_bandwidth_sample : bool
        True if the collective measures the bandwidth of the rails.
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
        """Number of the newest work from `apply` known to be done; earlier work is done too."""
        return self._reductions.computed

    def apply(self, step: Step, lo: int, hi: int, received: Any) -> int:
        """Enqueue the work of `step` on elements ``[lo, hi)`` of its output.

        Parameters
        ----------
        step : Step
        lo, hi : int
        received : memoryview or None
            Landing place of the slice if the step reduces received data; ignored otherwise.

        Returns
        -------
        int
            Number of the work, which is done when `computed` has reached it; 0 if there is no work.

        Raises
        ------
        TransportError
            If the device failed.
        """
        if hi == lo:
            return 0
        out = self._at(step.dst_space, lo)
        sources: tuple[int, ...]
        if step.kind is OpKind.RECV_REDUCE:
            mine, theirs = self._at(step.src_space, lo + step.shift), address_of(received)
            sources = (theirs, mine) if step.is_left else (mine, theirs)
        elif step.kind is OpKind.REDUCE:
            sources = (out, self._at(step.src_space, lo + step.shift))
        elif step.kind is OpKind.COPY:
            sources = (self._at(step.src_space, lo + step.shift),)
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
    """Yield the forms of the kernels that a collective's slices need.

    A reduction step combines two inputs. With AVG the final step also divides the result; if that
    step has a single input, it only divides. All other steps copy and need no kernel.
    """
    if call.collective not in REDUCTIONS:
        return
    op = ReduceOp(call.op)
    yield Form(dtype_code=call.dtype, op=op)
    if op is ReduceOp.AVG:
        yield Form(dtype_code=call.dtype, op=op, is_divided=True)
        yield Form(dtype_code=call.dtype, op=op, ninputs=1, is_divided=True)


__all__ = ["DeviceOperands", "forms_of"]

"""Offload: slices in device memory, reduced, divided and copied by a GPU beside the data loop.

`Offload` is a stream and what is known of it: work is numbered in the order it is given, and one
event a turn of the loop tells how far the stream is. `DeviceOperands` is a collective whose memory
is the device's: what the executor says of a slice becomes one kernel.

*Order.* A stream does what it is given one after another, so a kernel needs no host to wait for
those before it, in whatever lane. Everything else is ordered by the host. A NIC reads what a kernel
wrote after the host has seen the kernel's event; a kernel reads what a NIC wrote because it is
launched after the host has polled the completion: "only CUDA synchronization and work submission
APIs provide memory ordering of GPUDirect RDMA operations".

Must not import links or transports; makes no call that waits for the device but `Offload.drain`.
Invariant: work counts as done only once its event was seen to be.

References
----------
NVIDIA, "Developing a Linux kernel module using GPUDirect RDMA", section "Synchronization and
memory ordering".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from r2ccl.device.base import Device, Event, Stream
from r2ccl.device.views import address_of, view_of
from r2ccl.kernels.cuda.form import Form
from r2ccl.lowering import Layout, Step
from r2ccl.schedule.ir import Kind, Space
from r2ccl.types import REDUCTIONS, CallSignature, ReduceOp


class Kernels(Protocol):
    """What gives a device its kernels; see `r2ccl.kernels.cuda.Launcher`."""

    def prepare(self, form: Form) -> object:
        """Load a kernel; may wait for the device."""
        ...

    def launch(
        self,
        form: Form,
        sources: Sequence[int],
        targets: Sequence[int],
        count: int,
        stream: Stream,
        *,
        factor: float = 1.0,
        nranks: int = 1,
    ) -> None:
        """Run a kernel that was prepared."""
        ...


class _Batch(NamedTuple):
    """All work up to ``number`` is done when ``event`` is."""

    number: int
    event: Event


class Offload:
    """Work on one stream of a device; `r2ccl.progress.Computer`.

    Parameters
    ----------
    device : Device
    kernels : Kernels

    Notes
    -----
    Belongs to whoever owns the data loop.
    """

    def __init__(self, device: Device, kernels: Kernels) -> None:
        self._device = device
        self._kernels = kernels
        self._stream = device.make_stream()
        self._begun = 0
        self._computed = 0
        self._batches: deque[_Batch] = deque()
        #: Events that stand for nothing.
        self._events: list[Event] = []

    @property
    def is_busy(self) -> bool:
        """See `Computer`."""
        return self._computed < self._begun

    def run(self, form: Form, sources: Sequence[int], target: int, count: int, nranks: int) -> int:
        """Run a kernel over `count` elements; return its number."""
        self._kernels.launch(form, sources, (target,), count, self._stream, nranks=nranks)
        self._begun += 1
        return self._begun

    def copy(self, target: int, source: int, nbytes: int) -> int:
        """Copy within the device; return the work's number."""
        self._device.copy(target, source, nbytes, self._stream)
        self._begun += 1
        return self._begun

    def mark(self, word: int, value: int) -> int:
        """Write a word in pinned memory after all that was given before; return its number."""
        self._device.write_word(self._stream, word, value)
        self._begun += 1
        return self._begun

    def commit(self) -> None:
        """See `Computer`: one event for all that was given since the last."""
        last = self._batches[-1].number if self._batches else self._computed
        if last < self._begun:
            event = self._events.pop() if self._events else self._device.make_event()
            self._device.record(event, self._stream)
            self._batches.append(_Batch(self._begun, event))

    def poll(self) -> int:
        """See `Computer`."""
        while self._batches and self._device.is_done(self._batches[0].event):
            number, event = self._batches.popleft()
            self._computed = number
            self._events.append(event)
        return self._computed

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that was given is done, at most `timeout_s`; whether it is."""
        self.commit()
        if self._batches and not self._device.synchronize(self._batches[-1].event, timeout_s):
            return False
        self.poll()
        return True

    def close(self) -> None:
        """Free the stream and the events; `drain` has said that all is done."""
        self._device.destroy_stream(self._stream)
        for event in self._events:
            self._device.destroy_event(event)


class DeviceOperands:
    """`r2ccl.executor.Operands` in device memory that the transport reaches.

    Parameters
    ----------
    layout : Layout
        Of no eager slice but empty ones (`cleared`).
    call : CallSignature
    spaces : sequence of int
        Addresses of input, output and scratch memory, by `Space`.
    nranks : int
    offload : Offload
    is_gauge : bool
    """

    __slots__ = (
        "_by_kind", "_nranks", "_offload", "_spaces", "is_gauge", "layout", "views",
    )  # fmt: skip

    def __init__(
        self,
        layout: Layout,
        call: CallSignature,
        spaces: Sequence[int],
        *,
        nranks: int,
        offload: Offload,
        is_gauge: bool,
    ) -> None:
        self.layout = layout
        self.is_gauge = is_gauge
        self._spaces = spaces
        self._nranks = nranks
        self._offload = offload
        nbytes = layout.count * layout.itemsize
        self.views = tuple(view_of(address, nbytes) for address in spaces)
        self._by_kind = {(form.ninputs, form.is_divided): form for form in forms_of(call)}

    def apply(self, step: Step, lo: int, hi: int, received: Any) -> int:
        """See `Operands`."""
        if hi == lo:
            return 0
        out = self._at(step.dst_space, lo)
        sources: tuple[int, ...]
        if step.kind is Kind.RECV_REDUCE:
            mine, theirs = self._at(step.src_space, lo), address_of(received)
            sources = (theirs, mine) if step.is_left else (mine, theirs)
        elif step.kind is Kind.REDUCE:
            sources = (out, self._at(step.src_space, lo))
        elif step.kind is Kind.COPY:
            sources = (self._at(step.src_space, lo),)
        else:
            sources = (out,)
        form = self._by_kind.get((len(sources), step.is_final))
        form = form or self._by_kind.get((len(sources), False))
        if form is not None:
            return self._offload.run(form, sources, out, hi - lo, self._nranks)
        if sources[0] == out:
            return 0
        return self._offload.copy(out, sources[0], (hi - lo) * self.layout.itemsize)

    def _at(self, space: Space, element: int) -> int:
        return self._spaces[space] + element * self.layout.itemsize


def forms_of(call: CallSignature) -> Iterator[Form]:
    """Yield what kernels the slices of a collective take.

    Two inputs are reduced, and those of the last contribution divided with AVG; one input is
    divided alone where the last contribution came otherwise. All other steps copy.
    """
    if call.collective not in REDUCTIONS:
        return
    op = ReduceOp(call.op)
    yield Form(dtype_code=call.dtype, op=op)
    if op is ReduceOp.AVG:
        yield Form(dtype_code=call.dtype, op=op, is_divided=True)
        yield Form(dtype_code=call.dtype, op=op, ninputs=1, is_divided=True)


__all__ = ["DeviceOperands", "Kernels", "Offload", "forms_of"]

"""Reduces, divides and copies slices in GPU memory, asynchronously to the data loop.

`ReductionStream` numbers the work it enqueues on one stream. Each `commit` records an event, by
which the host learns how much of the work is done.

*Order.* Work on the stream runs in order, so the host need not order kernels among each other, even
those of different channels. The host orders kernels and NICs. A NIC reads a kernel's output after
the host has seen that the kernel's event is done. A kernel that reads a NIC's output is launched
after the host has polled the completion: "only CUDA synchronization and work submission APIs
provide memory ordering of GPUDirect RDMA operations". On a device that reorders remote writes, one
flush precedes the first work after each `commit`. That suffices, because the work for a slice is
enqueued after the slice arrived, and a `commit` follows each poll of the transport.

Only `ReductionStream.drain` waits for the device. Invariant: work counts as done only after the
host has seen that its event is done.

References
----------
NVIDIA, "Developing a Linux kernel module using GPUDirect RDMA", section "Synchronization and
memory ordering"; CUDA driver API, ``CUGPUDirectRDMAWritesOrdering``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from r2ccl.device.base import Device, Event, Stream
from r2ccl.kernels.cuda.form import Form


class ReductionKernels(Protocol):
    """Loader and launcher of reduction kernels, such as `r2ccl.kernels.cuda.Launcher`."""

    def prepare(self, form: Form) -> object:
        """Load a kernel; may wait for the device. See `Launcher.prepare` for the errors."""
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
        """Launch a prepared kernel over `count` elements on `stream`."""
        ...


class _Batch(NamedTuple):
    """Work that one `commit` covers: all work up to ``number`` is done when ``event`` is done."""

    number: int
    event: Event


class ReductionStream:
    """Reductions and copies on one stream of a device; implements `Computer` for the data loop.

    Parameters
    ----------
    device : Device
    kernels : ReductionKernels

    Notes
    -----
    Only the thread that owns the data loop may call it, and between collectives only the thread
    that runs them.

    *After failure*: a method that raises has enqueued nothing and used no number. Earlier work may
    run until `drain` returns True.
    """

    def __init__(self, device: Device, kernels: ReductionKernels) -> None:
        self._device = device
        self._kernels = kernels
        self._stream = device.make_stream()
        #: Numbers of the newest work that was enqueued, covered by an event, and completed.
        self._begun = 0
        self._committed = 0
        self._computed = 0
        self._batches: deque[_Batch] = deque()
        #: Unused events.
        self._events: list[Event] = []
        self._is_flushed = False

    @property
    def computed(self) -> int:
        """See `Computer`."""
        return self._computed

    @property
    def is_busy(self) -> bool:
        """True if the host does not know yet that all enqueued work is done."""
        return self._computed < self._begun

    def run(self, form: Form, sources: Sequence[int], target: int, count: int, nranks: int) -> int:
        """Enqueue a kernel over `count` elements; return the work's number."""
        self._flush()
        self._kernels.launch(form, sources, (target,), count, self._stream, nranks=nranks)
        self._begun += 1
        return self._begun

    def copy(self, target: int, source: int, nbytes: int) -> int:
        """Enqueue a copy within the device; return the work's number."""
        self._flush()
        self._device.copy(target, source, nbytes, self._stream)
        self._begun += 1
        return self._begun

    def mark(self, word: int, value: int) -> int:
        """Enqueue a write of the word at address `word` in pinned memory; return its number."""
        self._flush()
        self._device.write_word(self._stream, word, value)
        self._begun += 1
        return self._begun

    def commit(self) -> None:
        """Record one event for all work enqueued since the last `commit`, if there is any."""
        if self._committed < self._begun:
            event = self._events.pop() if self._events else self._device.make_event()
            self._device.record(event, self._stream)
            self._batches.append(_Batch(self._begun, event))
            self._committed = self._begun
        self._is_flushed = False

    def poll(self) -> int:
        """Return the number of the newest work that is done; all earlier work is done too.

        Raises
        ------
        TransportError
            If the device failed.
        """
        while self._batches and self._device.is_done(self._batches[0].event):
            self._computed, event = self._batches.popleft()
            self._events.append(event)
        return self._computed

    def drain(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for all work; return whether it is done.

        Raises
        ------
        TransportError
            If the device failed.
        """
        self.commit()
        if self._batches:
            self._device.synchronize(self._batches[-1].event, timeout_s)
        self.poll()
        return not self.is_busy

    def close(self) -> None:
        """Free the stream and the events; all work must be done."""
        self._device.destroy_stream(self._stream)
        for event in self._events:
            self._device.destroy_event(event)

    def _flush(self) -> None:
        """Make remote writes visible to the work that is enqueued next."""
        if not self._is_flushed:
            if self._device.reorders_remote_writes:
                self._device.flush_remote_writes()
            self._is_flushed = True


__all__ = ["ReductionKernels", "ReductionStream"]

"""Reduces, divides and copies slices in GPU memory, asynchronously to the data loop.

`ReductionStream` numbers the work it enqueues on one stream; an event recorded by each `commit`
tells how far the stream has come.

*Order.* Work on the stream runs in order, so kernels need no host to order them among each other,
whatever the lane. The host orders kernels and NICs. A NIC reads a kernel's output after the host
has seen the kernel's event. A kernel reads a NIC's output because it is launched after the host has
polled the completion: "only CUDA synchronization and work submission APIs provide memory ordering
of GPUDirect RDMA operations". On a device that reorders remote writes they are flushed once, before
the first work after each `commit`: a slice's work is enqueued after the slice arrived, and each
poll of the transport is followed by a `commit`.

Only `ReductionStream.drain` waits for the device. Invariant: work counts as done once its event was
seen to be.

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
    """Loads and launches reduction kernels, as `r2ccl.kernels.cuda.Launcher` does."""

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
        """Launch a prepared kernel."""
        ...


class _Batch(NamedTuple):
    """All work up to ``number`` is done when ``event`` is."""

    number: int
    event: Event


class ReductionStream:
    """Reductions and copies on one stream of a device; a `r2ccl.runtime.progress.Computer`.

    Parameters
    ----------
    device : Device
    kernels : ReductionKernels

    Notes
    -----
    Used by the owner of the data loop; between collectives, by the thread that runs them.

    *After failure*: a call that raises enqueued nothing and used no number; earlier work may
    run until `drain` returns True.
    """

    def __init__(self, device: Device, kernels: ReductionKernels) -> None:
        self._device = device
        self._kernels = kernels
        self._stream = device.make_stream()
        #: Number of the last work that was enqueued, and recorded by an event.
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
        """See `Computer`."""
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
        """Enqueue a write of a word in pinned memory; return the work's number."""
        self._flush()
        self._device.write_word(self._stream, word, value)
        self._begun += 1
        return self._begun

    def commit(self) -> None:
        """See `Computer`: record one event for all work since the last `commit`."""
        if self._committed < self._begun:
            event = self._events.pop() if self._events else self._device.make_event()
            self._device.record(event, self._stream)
            self._batches.append(_Batch(self._begun, event))
            self._committed = self._begun
        self._is_flushed = False

    def poll(self) -> int:
        """See `Computer`."""
        while self._batches and self._device.is_done(self._batches[0].event):
            self._computed, event = self._batches.popleft()
            self._events.append(event)
        return self._computed

    def drain(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for all work; return whether it is done."""
        self.commit()
        if self._batches:
            self._device.synchronize(self._batches[-1].event, timeout_s)
        self.poll()
        return not self.is_busy

    def close(self) -> None:
        """Free the stream and the events; all work is done."""
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

"""ReductionStream: slices in device memory, reduced, divided and copied by a GPU beside the data loop.

`ReductionStream` is one stream and what the host knows of it. Work is numbered in the order it is given;
an event recorded by each `ReductionStream.commit` tells how far the stream is.

*Order.* The stream does its work in order, so a kernel needs no host to wait for those before it,
in whatever lane. The host orders everything else. A NIC reads what a kernel wrote after the host
has seen the kernel's event. A kernel reads what a NIC wrote because it is launched after the host
has polled the completion: "only CUDA synchronization and work submission APIs provide memory
ordering of GPUDirect RDMA operations". A device that reorders remote writes is told to flush them,
once, before the first work after a `commit`: what the work of a slice reads had arrived when it was
given, and each look at the transport is followed by a `commit`.

Must not import links or transports; makes no call that waits for the device but `ReductionStream.drain`.
Invariant: work counts as done only once its event was seen to be.

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


class ReductionStream:
    """Work on one stream of a device; `r2ccl.runtime.progress.Computer`.

    Parameters
    ----------
    device : Device
    kernels : ReductionKernels

    Notes
    -----
    Belongs to the owner of the data loop; between collectives, to the thread that runs them.

    *After failure*: a call that raises has given the device nothing and used no number; what was
    given before may be under way until `drain` says that it is not.
    """

    def __init__(self, device: Device, kernels: ReductionKernels) -> None:
        self._device = device
        self._kernels = kernels
        self._stream = device.make_stream()
        #: Numbers of the last work that was given, that an event stands for, that is done.
        self._begun = 0
        self._committed = 0
        self._computed = 0
        self._batches: deque[_Batch] = deque()
        #: Events that stand for nothing.
        self._events: list[Event] = []
        self._is_flushed = False

    @property
    def is_busy(self) -> bool:
        """See `Computer`."""
        return self._computed < self._begun

    def run(self, form: Form, sources: Sequence[int], target: int, count: int, nranks: int) -> int:
        """Run a kernel over `count` elements; return the work's number."""
        self._flush()
        self._kernels.launch(form, sources, (target,), count, self._stream, nranks=nranks)
        self._begun += 1
        return self._begun

    def copy(self, target: int, source: int, nbytes: int) -> int:
        """Copy within the device; return the work's number."""
        self._flush()
        self._device.copy(target, source, nbytes, self._stream)
        self._begun += 1
        return self._begun

    def mark(self, word: int, value: int) -> int:
        """Write a word in pinned memory after all that was given before; return its number."""
        self._flush()
        self._device.write_word(self._stream, word, value)
        self._begun += 1
        return self._begun

    def commit(self) -> None:
        """See `Computer`: one event for all that was given since the last."""
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
        """Wait until all that was given is done, at most `timeout_s`; return whether it is."""
        self.commit()
        if self._batches:
            self._device.synchronize(self._batches[-1].event, timeout_s)
        self.poll()
        return not self.is_busy

    def close(self) -> None:
        """Free the stream and the events; `drain` has said that all is done."""
        self._device.destroy_stream(self._stream)
        for event in self._events:
            self._device.destroy_event(event)

    def _flush(self) -> None:
        """Make what NICs wrote visible to the work that is given next."""
        if not self._is_flushed:
            if self._device.reorders_remote_writes:
                self._device.flush_remote_writes()
            self._is_flushed = True


__all__ = ["ReductionKernels", "ReductionStream"]

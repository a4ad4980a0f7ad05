"""Reduces, averages and copies slices in GPU memory, asynchronously to the data loop.

`ReductionStream` numbers the work that it enqueues on one stream. After new work, `commit` records
an event; the host queries the event to find out how much of the work is done.

*Order.* Work on the stream runs in order, so the host does not need to order kernels relative to
each other, even kernels of different channels. The host orders kernels relative to NICs. A NIC
reads a kernel's output after the host has seen that the kernel's event is done. A kernel that reads
a NIC's output is launched after the host has polled the completion of the NIC's write: "only CUDA
synchronization and work submission APIs provide memory ordering of GPUDirect RDMA operations". On a
device that reorders remote writes, one flush precedes the first work after each `commit`. One flush
suffices, because the work for a slice is enqueued after the slice arrived, and a `commit` follows
each poll of the transport.

Only `ReductionStream.drain` waits for work on the device. Invariant: work counts as done only after
the host has seen that its event is done.

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
    """Loader and launcher of reduction kernels, such as `r2ccl.kernels.cuda.Launcher`.

    A `Form` specifies what a kernel computes.
    """

    def prepare(self, form: Form) -> object:
        """Load the kernel of `form`, unless it is loaded; may wait for the device.

        Callers ignore the return value.

        Raises
        ------
        InvalidArgument
            If the GPU is too old for the kernel.
        TransportError
            If the kernel cannot be compiled, or the device failed.
        """
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
        """Enqueue the prepared kernel of `form` on `stream`.

        Parameters
        ----------
        form : Form
        sources, targets : sequence of int
            Addresses of the inputs and of the outputs.
        count : int
            Number of elements of each input and output.
        stream : Stream
        factor : float
            Factor of a scaled form.
        nranks : int
            Divisor of a divided form.

        Raises
        ------
        TransportError
            If the device failed.
        """
        ...


class _Batch(NamedTuple):
    """Work that one `commit` covers: all work up to ``number`` is done when ``event`` is done."""

    number: int
    event: Event


class ReductionStream:
    """Reductions and copies on one stream of a device; a `r2ccl.runtime.progress.Computer`.

    A `Form` specifies what a kernel computes.

    Parameters
    ----------
    device : Device
    kernels : ReductionKernels

    Notes
    -----
    Only one thread may use this object at a time: during a collective the thread that owns the
    data loop, otherwise the thread that runs the collectives.

    *After failure*: if `run`, `copy` or `mark` raises, it has enqueued no work and used no number.
    Earlier work may still run until `drain` returns True.
    """

    def __init__(self, device: Device, kernels: ReductionKernels) -> None:
        self._device = device
        self._kernels = kernels
        self._stream = device.make_stream()
        #: Numbers of the newest work enqueued, the newest covered by an event, and the newest known
        #: to be done.
        self._begun = 0
        self._committed = 0
        self._computed = 0
        self._batches: deque[_Batch] = deque()
        #: Unused events.
        self._events: list[Event] = []
        self._is_flushed = False

    @property
    def computed(self) -> int:
        """Number of the newest work known to be done; all earlier work is done too."""
        return self._computed

    @property
    def is_busy(self) -> bool:
        """True if some enqueued work is not yet known to be done."""
        return self._computed < self._begun

    def run(self, form: Form, sources: Sequence[int], target: int, count: int, nranks: int) -> int:
        """Enqueue the kernel of `form`, which must be loaded; return the number of this work.

        Parameters
        ----------
        form : Form
            Form with one output.
        sources : sequence of int
            Addresses of the inputs.
        target : int
            Address of the output.
        count : int
            Number of elements of each input and of the output.
        nranks : int
            Divisor of a divided form.

        Raises
        ------
        TransportError
            If the device failed.
        """
        self._flush()
        self._kernels.launch(form, sources, (target,), count, self._stream, nranks=nranks)
        self._begun += 1
        return self._begun

    def copy(self, target: int, source: int, nbytes: int) -> int:
        """Enqueue a copy of `nbytes` bytes between two addresses; return the number of this work.

        Raises
        ------
        TransportError
            If the device failed.
        """
        self._flush()
        self._device.copy(target, source, nbytes, self._stream)
        self._begun += 1
        return self._begun

    def mark(self, word: int, value: int) -> int:
        """Enqueue a write of `value` to a 32-bit word in pinned memory; return this work's number.

        `word` is the address of the word.

        Raises
        ------
        TransportError
            If the device failed.
        """
        self._flush()
        self._device.write_word(self._stream, word, value)
        self._begun += 1
        return self._begun

    def commit(self) -> None:
        """Record one event after all work enqueued since the last `commit`, for `poll` to query.

        If no work was enqueued since then, record nothing.

        Raises
        ------
        TransportError
            If the device failed.
        """
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
        """Wait up to `timeout_s` seconds for all enqueued work; return whether it is done.

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
        """Make NIC writes visible to later work, unless this was done since the last `commit`."""
        if not self._is_flushed:
            if self._device.reorders_remote_writes:
                self._device.flush_remote_writes()
            self._is_flushed = True


__all__ = ["ReductionKernels", "ReductionStream"]

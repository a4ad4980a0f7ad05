"""The GPU interface: the CUDA driver operations that collectives use.

Work is enqueued on *streams*. Work on one stream runs in the order it was enqueued; work on two
streams runs in any order unless an *event* orders it. The host may rely on the effects of work only
after `is_done` or `synchronize` returned True for an event recorded after that work, or after it
has read a word that `write_word` wrote after that work. In the other direction, a stream can wait
until the host, or a stream of another process, writes a word in pinned memory.

Addresses are integers.

Calls that allocate memory, create streams or load kernels may wait for all work of the device; the
driver decides which of them wait. If a stream waits for a word that the calling thread has yet to
write, such a wait never ends. Make these calls before any stream waits for the calling thread. The
only exceptions are allocations whose need is known only later (`r2ccl.gpu.gpudirect`).

Invariants: a call that the device cannot execute raises `TransportError`; if the driver refused the
call, the ``status`` of the exception is the driver's name of the error. Any thread may make any
call.

References
----------
CUDA driver API, sections on streams, events, stream memory operations and inter-process
communication.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NewType, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

#: The driver's handle of a stream (``CUstream``), which may be a stream of the caller. 0 and 1 are
#: the legacy default stream, 2 is the per-thread default stream.
Stream = NewType("Stream", int)
#: Handles of an event and of a loaded kernel.
Event = NewType("Event", int)
Kernel = NewType("Kernel", int)

#: A kernel argument: a value and its C type.
Argument: TypeAlias = "tuple[int | float, type[ctypes._SimpleCData[Any]]]"


class Device(Protocol):
    """One GPU, as this process uses it."""

    @property
    def ordinal(self) -> int:
        """Number of the GPU in this process."""
        ...

    @property
    def uuid(self) -> bytes:
        """UUID of the GPU, 16 bytes: the same in all processes, and unique among all machines."""
        ...

    @property
    def bus_id(self) -> str:
        """PCI bus ID in the Linux kernel's notation, such as ``0000:1b:00.0``."""
        ...

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability: major and minor version."""
        ...

    @property
    def nsms(self) -> int:
        """Number of streaming multiprocessors."""
        ...

    @property
    def waits_on_memory(self) -> bool:
        """True if `write_word`, `wait_word` and `exchange_words` can be used."""
        ...

    @property
    def reorders_remote_writes(self) -> bool:
        """True if GPU work may miss NIC writes that completed before the work was enqueued.

        `flush_remote_writes` then makes them visible. Read this property after `reach` was called
        for all GPUs that will access this GPU's memory, because `reach` may change it.
        """
        ...

    def current(self) -> AbstractContextManager[None]:
        """Return a context manager that makes this thread's calls cheaper in its ``with`` block.

        The blocks may be nested. Inside a block, no other library may change the CUDA context that
        is current on this thread.
        """
        ...

    # Memory

    def allocate(self, nbytes: int) -> int:
        """Allocate `nbytes` bytes of device memory that `export` accepts; return the address.

        The address is a multiple of 256.
        """
        ...

    def free(self, address: int) -> None:
        """Free the memory that `allocate` returned, after waiting for the work that uses it."""
        ...

    def allocate_pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocate pinned host memory, which every GPU of the process accesses directly.

        The memory is zeroed. The array must not be used after `free_pinned`.
        """
        ...

    def free_pinned(self, memory: npt.NDArray[np.uint8]) -> None:
        """Free an array from `allocate_pinned`, after waiting for the work that uses it."""
        ...

    def pin(self, memory: npt.NDArray[np.uint8]) -> int:
        """Pin existing host memory and return its address on the GPU.

        The memory must consist of whole pages, and must stay allocated until `unpin`.
        """
        ...

    def unpin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Unpin memory that `pin` has pinned."""
        ...

    # Between GPUs and processes

    def reach(self, peer: Device) -> None:
        """Let this GPU access the memory of `peer`, another GPU of this process.

        The access covers existing and future allocations of `peer`, except allocations from memory
        pools and memory mapped from pieces (``cuMemMap``). `peer` does not get access to this GPU's
        memory. The call may wait for either GPU, so make it before any stream waits for a word. If
        `peer` is the same GPU, the call does nothing.
        """
        ...

    def export(self, address: int) -> tuple[bytes, int]:
        """Return the IPC handle of the allocation that contains `address`, and the offset in it.

        The handle has 64 bytes; another process on this machine passes it to `map`. The offset is
        in bytes.

        Raises
        ------
        TransportError
            If the memory has no handle: memory of the stream-ordered pool, managed memory, memory
            mapped from pieces (``cuMemMap``), or memory of another process.
        """
        ...

    def map(self, handle: bytes) -> int:
        """Map an allocation of another process, given by its IPC handle; return its address here.

        The mapping must be ended with `unmap` before the same handle is mapped again.
        """
        ...

    def unmap(self, address: int) -> None:
        """End the mapping that `map` returned, after waiting for the work that uses it."""
        ...

    def buffer_id(self, address: int) -> int:
        """Return the number of the allocation that contains `address`; 0 if there is none.

        No other allocation of this process ever has the same number.
        """
        ...

    # NIC writes

    def flush_remote_writes(self) -> None:
        """Make NIC writes to this GPU's memory visible to work that is enqueued later.

        The flush covers work of this GPU and of the GPUs that access its memory. Call it after
        polling the completions of the writes. It waits for the writes, not for any stream. On a GPU
        that does not reorder NIC writes, it does nothing.
        """
        ...

    # Streams and events

    def make_stream(self, *, waits: bool = False) -> Stream:
        """Create a stream that does not synchronize with the default stream.

        Set `waits` if the stream will wait for words (`wait_word`, `exchange_words`). When streams
        share hardware queues, such a stream does not block the streams that were created without
        `waits`, if the GPU has more than one stream priority.
        """
        ...

    def destroy_stream(self, stream: Stream) -> None:
        """Destroy `stream`; its resources are freed once its work is done."""
        ...

    def is_capturing(self, stream: Stream) -> bool:
        """Return whether `stream` captures a CUDA graph instead of executing work."""
        ...

    def make_event(self) -> Event:
        """Create an event, which counts as done until `record` is called for it."""
        ...

    def destroy_event(self, event: Event) -> None:
        """Destroy `event`; its resources are freed once it is done."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """Record in `event` all work enqueued on `stream` so far."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work on `stream` wait for the work that is recorded in `event` now."""
        ...

    def is_done(self, event: Event) -> bool:
        """Return whether the work recorded in `event` is done and visible to the host.

        Raises
        ------
        TransportError
            If earlier work failed.
        """
        ...

    def synchronize(self, event: Event, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for `event`; return whether it is done.

        Raises
        ------
        TransportError
            If earlier work failed.
        """
        ...

    def write_word(self, stream: Stream, address: int, value: int) -> None:
        """Enqueue a write of `value` to a 32-bit word, which must be 4-byte aligned.

        The word is written after all earlier work on `stream` is visible.
        """
        ...

    def wait_word(self, stream: Stream, address: int, value: int) -> None:
        """Make later work on `stream` wait until a 32-bit word reaches `value`.

        Words are compared modulo 2**32: the word has reached `value` if ``word - value``, as a
        signed 32-bit number, is 0 or more.
        """
        ...

    def exchange_words(
        self, stream: Stream, value: int, written: tuple[int, ...], awaited: tuple[int, ...]
    ) -> None:
        """Enqueue writes of `value` to some words, then a wait until other words reach `value`.

        The call is equivalent to `write_word` for each address in `written`, followed by
        `wait_word` for each address in `awaited`. A device may keep the operations that it prepared
        for a pair of tuples, so a later call with equal tuples may cost less.
        """
        ...

    # Work

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Enqueue a copy of `nbytes` bytes between addresses in device, mapped or pinned memory."""
        ...

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        nbytes: int,
        nrows: int,
        stream: Stream,
    ) -> None:
        """Enqueue a copy of `nrows` rows of `nbytes` bytes each.

        A pitch is the distance in bytes between the starts of consecutive rows.
        """
        ...

    def load(self, ptx: bytes, entry: str) -> Kernel:
        """Load the kernel named `entry` from PTX code; the kernel stays loaded until `close`."""
        ...

    def launch(
        self, kernel: Kernel, nblocks: int, nthreads: int, stream: Stream,
        arguments: Sequence[Argument],
    ) -> None:  # fmt: skip
        """Enqueue a kernel of `nblocks` blocks with `nthreads` threads each, in one dimension."""
        ...

    def close(self) -> None:
        """Wait for the streams and events that this object created, then free all its resources.

        No other call may be in progress. If the work does not end in time, the call raises an error
        and frees nothing; `close` can then be called again. After a success, a further call does
        nothing.
        """
        ...


__all__ = ["Argument", "Device", "Event", "Kernel", "Stream"]

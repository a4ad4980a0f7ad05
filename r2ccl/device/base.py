"""The interface of a GPU: the operations of the CUDA driver that collectives use.

Work goes to *streams*: what one stream is given runs in that order, what two are given runs in any
order unless an *event* orders it. The host sees an effect only once `is_done` said so of an event
recorded after it. Words in pinned memory go the other way: a stream waits at one until the host, or
a stream of another process, has written it.

Addresses are integers. Nothing is allocated, made or loaded while a call is under way: allocation
may wait for the whole device.

Must not import the driver. Invariants: a call that fails raises `TransportError` whose ``status``
is the driver's own name for it; every call may be made from any thread.

References
----------
CUDA driver API, sections on streams, events, stream memory operations and inter-process
communication.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NewType, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

#: A stream's handle as the driver has it (``CUstream``): also one the caller made; 0 is the legacy
#: default stream, 1 the same by name, 2 the per-thread default stream.
Stream = NewType("Stream", int)
#: Handle of an event, of a kernel that was loaded.
Event = NewType("Event", int)
Kernel = NewType("Kernel", int)

#: A kernel's argument: a value and its C type.
Argument: TypeAlias = "tuple[int | float, type[ctypes._SimpleCData[Any]]]"


class Device(Protocol):
    """One GPU, in this process."""

    @property
    def ordinal(self) -> int:
        """Ordinal in this process."""
        ...

    @property
    def uuid(self) -> bytes:
        """16 bytes that identify the GPU in every process and machine."""
        ...

    @property
    def bus_id(self) -> str:
        """PCI bus id as the kernel writes it: ``0000:1b:00.0``."""
        ...

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability."""
        ...

    @property
    def nsms(self) -> int:
        """Number of multiprocessors."""
        ...

    @property
    def waits_on_memory(self) -> bool:
        """True if `write_word` and `wait_word` can be used."""
        ...

    @property
    def reorders_remote_writes(self) -> bool:
        """True if work may miss NIC writes from before it was enqueued: see `flush_remote_writes`.

        Asked for once all GPUs that shall reach this one's memory do.
        """
        ...

    # Memory

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory that other processes may map; aligned to 256 bytes."""
        ...

    def free(self, address: int) -> None:
        """Free what `allocate` returned; waits for the work on it."""
        ...

    def allocate_pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocate host memory that every GPU of the process copies from and to directly.

        Zeroed. `free_pinned` frees it; the array must not be used after that.
        """
        ...

    def free_pinned(self, memory: npt.NDArray[np.uint8]) -> None:
        """Free what `allocate_pinned` returned; waits for the work on it."""
        ...

    def pin(self, memory: npt.NDArray[np.uint8]) -> int:
        """Pin whole pages of host memory that exists, and return the GPU's address of it."""
        ...

    def unpin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Undo `pin`."""
        ...

    # Between GPUs and processes

    def reach(self, peer: Device) -> None:
        """Let work given here use what `peer`, another GPU of this process, allocates.

        And what it has allocated, but not what it allocates from a pool; in this direction only.
        Asked for before any stream waits at a word: it may wait for either GPU. Where both are the
        same GPU there is nothing to do.
        """
        ...

    def export(self, address: int) -> tuple[bytes, int]:
        """Return a handle of the allocation around `address`, and the offset of `address` in it.

        64 bytes, which `map` takes in another process of the machine. Memory of the stream-ordered
        pool, managed memory and memory that another process exported have none.
        """
        ...

    def map(self, handle: bytes) -> int:
        """Map another process's allocation; the same handle once at a time."""
        ...

    def unmap(self, address: int) -> None:
        """Undo `map`; waits for the work on it."""
        ...

    def buffer_id(self, address: int) -> int:
        """Return a number that no other allocation has or will have in this process."""
        ...

    # Written by others

    def flush_remote_writes(self) -> None:
        """Have work given from now on see what NICs have written to this GPU's memory.

        Work of this GPU, and of those that reach it. Asked for once the completions were polled;
        waits for the writes, not for any stream. On a GPU that does not reorder them there is
        nothing to do.
        """
        ...

    # Streams and events

    def make_stream(self, *, waits: bool = False) -> Stream:
        """Make a stream that does not wait for the default stream, nor it for this one.

        ``waits``: it will wait at words of the host. Such streams hold up no others made here,
        where streams have to share the queues of the hardware.
        """
        ...

    def destroy_stream(self, stream: Stream) -> None:
        """Free the stream once its work is done."""
        ...

    def make_event(self) -> Event:
        """Make an event, which has not been recorded: it counts as done."""
        ...

    def destroy_event(self, event: Event) -> None:
        """Free the event once it is done."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """Have `event` stand for all work `stream` has been given so far."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Have what `stream` is given from now on wait for what `event` stands for now."""
        ...

    def is_done(self, event: Event) -> bool:
        """Return whether all work `event` stands for is done; the host sees its effects then."""
        ...

    def synchronize(self, event: Event, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for `event`; return whether it is done."""
        ...

    def write_word(self, stream: Stream, address: int, value: int) -> None:
        """Write a 32-bit word, 4-byte aligned, after all earlier work of `stream` is visible."""
        ...

    def wait_word(self, stream: Stream, address: int, value: int) -> None:
        """Have `stream` wait until the word is `value` or more, as a difference modulo 2**32."""
        ...

    # Work

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy between any two of device memory and pinned memory."""
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
        """Copy `nrows` rows of `nbytes` bytes whose starts lie a pitch apart."""
        ...

    def load(self, ptx: bytes, entry: str) -> Kernel:
        """Load a kernel; it stays until `close`."""
        ...

    def launch(
        self, kernel: Kernel, nblocks: int, nthreads: int, stream: Stream,
        arguments: Sequence[Argument],
    ) -> None:  # fmt: skip
        """Run a kernel with a grid and blocks of one dimension."""
        ...

    def close(self) -> None:
        """Wait for the streams made here, then free them and all else that was made here."""
        ...


__all__ = ["Argument", "Device", "Event", "Kernel", "Stream"]

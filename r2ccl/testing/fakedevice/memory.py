"""Memory of the fake GPU: who may use which addresses, and the bytes behind them.

Device memory has addresses that no processor can use, and that are never given out again. Pinned
memory that the fake allocates has one address for the host and the GPU; memory that is pinned has
another one for the GPU, so that mixing them up is found. Must not know streams.

Invariant: the same bytes have the same `Shadow` and position, whatever the process, the address or
the mapping of a shared file they are reached by.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Container
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from r2ccl.testing.fakedevice.order import Access, Clock, Misuse, Shadow, Stamp

Bytes = npt.NDArray[np.uint8]

#: Not canonical on x86-64, and beyond what user space has elsewhere: to use one is a fault.
_FIRST_ADDRESS = 0xD000_0000_0000
_ALIGNMENT = 256
#: Between two allocations: whoever runs over the end of one is not in the next.
_GAP = 1 << 20
_PAGE = 4096

#: What fills memory that nobody has written.
_UNWRITTEN = 0xC5


class MemoryKind(enum.Enum):
    """How a range of addresses came to be."""

    DEVICE = "device memory"
    POOLED = "memory of a pool"
    MANAGED = "managed memory"
    PINNED = "pinned memory"
    REGISTERED = "registered memory"
    MAPPED = "mapped memory"

    @property
    def is_host(self) -> bool:
        """Whether the host can reach it."""
        return self in (MemoryKind.PINNED, MemoryKind.REGISTERED)


class Span:
    """A range of addresses of one process.

    Parameters
    ----------
    owner : str
        The process.
    card : int
        Number of the card whose memory it is; of host memory, of the one it was made for.
    kind : MemoryKind
    address : int
        Where the GPU finds it.
    memory : ndarray of uint8
    shadow : Shadow
    position : int
        Of its first byte in the shadow.
    number : int
        Of the allocation; no other has it.
    is_callers : bool
        The caller of the library made it, not the library.
    """

    def __init__(
        self, owner: str, card: int, kind: MemoryKind, address: int, memory: Bytes, shadow: Shadow,
        position: int, number: int, is_callers: bool = False,
    ) -> None:  # fmt: skip
        self.owner = owner
        self.card = card
        self.kind = kind
        self.address = address
        self.memory = memory
        self.shadow = shadow
        self.position = position
        self.number = number
        self.is_callers = is_callers
        #: The last use of it by each actor.
        self.uses: dict[int, Stamp] = {}
        #: What it was mapped from, and how often it is mapped elsewhere.
        self.source: Span | None = None
        self.nmappings = 0

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return self.memory.size

    @property
    def is_host(self) -> bool:
        """Whether the host can reach it."""
        return self.kind.is_host

    @property
    def has_memory(self) -> bool:
        """Whether the bytes go when it goes."""
        return self.kind not in (MemoryKind.REGISTERED, MemoryKind.MAPPED)

    def __str__(self) -> str:
        return f"{self.nbytes} bytes of {self.kind.value} at {self.address:#x} of {self.owner}"


class MemoryPiece(msgspec.Struct, frozen=True):
    """Some bytes of a span."""

    span: Span
    offset: int
    nbytes: int

    @property
    def view(self) -> Bytes:
        """The bytes."""
        return self.span.memory[self.offset : self.offset + self.nbytes]

    @property
    def position(self) -> int:
        """Where it begins in the shadow."""
        return self.span.position + self.offset

    def overlaps(self, other: MemoryPiece) -> bool:
        """Whether they share bytes."""
        return self.span.shadow is other.span.shadow and max(self.position, other.position) < min(
            self.position + self.nbytes, other.position + other.nbytes
        )

    def covers(self, other: MemoryPiece) -> bool:
        """Whether all bytes of `other` are in it."""
        return (
            self.span.shadow is other.span.shadow
            and self.position <= other.position
            and other.position + other.nbytes <= self.position + self.nbytes
        )

    def touch(self, access: Access, stamp: Stamp, clock: Clock) -> None:
        """Note an access; see `Shadow.touch`."""
        if self.nbytes:
            self.span.shadow.touch(self.position, self.nbytes, access, stamp, clock)
            self.span.uses[stamp.actor] = stamp

    def __str__(self) -> str:
        at = self.span.address + self.offset
        return f"{self.nbytes} bytes of {self.span.kind.value} at {at:#x} of {self.span.owner}"


class AddressSpace:
    """All spans of the cards of a board, by address."""

    def __init__(self) -> None:
        self._spans: list[Span] = []  # by address
        #: First and last address of what is no more, and what it was.
        self._gone: list[tuple[int, int, str]] = []
        self._next_address = _FIRST_ADDRESS
        self._nspans = 0
        self._device = Shadow()
        #: By device and inode of a shared file; of all other host memory under (0, 0).
        self._host: dict[tuple[int, int], Shadow] = {}

    def allocate(
        self, owner: str, card: int, nbytes: int, kind: MemoryKind, *, is_callers: bool = False
    ) -> Span:
        """Make device memory."""
        if nbytes < 1:
            raise Misuse.of(f"{nbytes} bytes were asked for")
        memory = np.full(nbytes, _UNWRITTEN, np.uint8)
        address = self._reserve(nbytes)
        return self._add(owner, card, kind, address, memory, self._device, address, is_callers)

    def allocate_pinned(self, owner: str, card: int, nbytes: int) -> Span:
        """Make host memory, zeroed, at a page's start, with one address for all."""
        if nbytes < 1:
            raise Misuse.of(f"{nbytes} bytes were asked for")
        room = np.zeros(nbytes + _PAGE, np.uint8)
        start = -room.ctypes.data % _PAGE
        memory = room[start : start + nbytes]
        address = memory.ctypes.data
        shadow = self._host.setdefault((0, 0), Shadow())
        return self._add(owner, card, MemoryKind.PINNED, address, memory, shadow, address)

    def pin(self, owner: str, card: int, memory: Bytes) -> Span:
        """Give all GPUs of a process an address for host memory."""
        at = memory.ctypes.data
        if at % _PAGE or memory.nbytes % _PAGE or not memory.nbytes:
            raise Misuse.of(f"{memory.nbytes} bytes at {at:#x} are not whole pages")
        for span in self.of(owner):
            start = span.memory.ctypes.data
            if span.is_host and at < start + span.nbytes and start < at + memory.nbytes:
                raise Misuse.of(f"{span} is pinned already")
        backing, position = _backing(at)
        shadow = self._host.setdefault(backing, Shadow())
        flat = memory.reshape(-1).view(np.uint8)
        address = self._reserve(flat.size)
        return self._add(owner, card, MemoryKind.REGISTERED, address, flat, shadow, position)

    def map(self, owner: str, card: int, source: Span) -> Span:
        """Give a card in another process an address for device memory."""
        address = self._reserve(source.nbytes)
        span = self._add(
            owner, card, MemoryKind.MAPPED, address, source.memory, source.shadow, source.position
        )  # fmt: skip
        span.source = source
        source.nmappings += 1
        return span

    def _reserve(self, nbytes: int) -> int:
        address = self._next_address
        self._next_address += -(-nbytes // _ALIGNMENT) * _ALIGNMENT + _GAP
        return address

    def _add(
        self, owner: str, card: int, kind: MemoryKind, address: int, memory: Bytes, shadow: Shadow,
        position: int, is_callers: bool = False,
    ) -> Span:  # fmt: skip
        self._nspans += 1
        span = Span(owner, card, kind, address, memory, shadow, position, self._nspans, is_callers)
        bisect.insort(self._spans, span, key=lambda each: each.address)
        return span

    def remove(self, span: Span, why: str) -> None:
        """Take addresses back; memory that no other span reaches is filled with what is wrong."""
        whole = MemoryPiece(span, 0, span.nbytes)
        self._spans.remove(span)
        self._gone.append((span.address, span.address + span.nbytes - 1, f"{span}, {why}"))
        if span.source is not None:
            span.source.nmappings -= 1
        elif not any(MemoryPiece(each, 0, each.nbytes).overlaps(whole) for each in self._spans):
            span.shadow.forget(span.position, span.nbytes)
            if span.has_memory:
                span.memory.fill(_UNWRITTEN)

    def find(self, owner: str, cards: Container[int], address: int, nbytes: int) -> MemoryPiece:
        """Return what a GPU finds at an address for a process: its own memory, that of `cards`."""
        index = bisect.bisect_right(self._spans, address, key=lambda each: each.address) - 1
        span = self._spans[index] if index >= 0 else None
        # The end of a span is a place for nothing at all.
        if span is None or address > span.address + span.nbytes - (nbytes > 0):
            raise Misuse.of(f"{owner} has nothing at {address:#x}{self._memory_of(address)}")
        if span.owner != owner:
            raise Misuse.of(f"{owner} has not mapped {span}")
        if span.card not in cards and not span.is_host:
            raise Misuse.of(f"{span} is of a GPU that this one was not let reach")
        if nbytes < 0 or address + nbytes > span.address + span.nbytes:
            raise Misuse.of(f"{nbytes} bytes at {address:#x} reach beyond {span}")
        return MemoryPiece(span, address - span.address, nbytes)

    def _memory_of(self, address: int) -> str:
        """Say what was, or is, at an address."""
        for first, last, what in reversed(self._gone):
            if first <= address <= last:
                return f" any more: {what}"
        for span in self._spans:
            start = span.memory.ctypes.data
            if span.is_host and start <= address < start + span.nbytes:
                return f": that is the host's address of {span}"
        return ""

    def at_host(self, owner: str, address: int, nbytes: int) -> MemoryPiece | None:
        """Return what a process has pinned at an address of the host."""
        for span in self.of(owner):
            offset = address - span.memory.ctypes.data
            if span.is_host and 0 <= offset <= span.nbytes - nbytes:
                return MemoryPiece(span, offset, nbytes)
        return None

    def of(self, owner: str) -> list[Span]:
        """Return the spans of a process, the last made first."""
        found = [span for span in self._spans if span.owner == owner]
        return sorted(found, key=lambda span: -span.number)

    def sharing(self, piece: MemoryPiece) -> list[MemoryPiece]:
        """Return how each process reaches some bytes."""
        return [
            MemoryPiece(span, piece.position - span.position, piece.nbytes)
            for span in self._spans
            if MemoryPiece(span, 0, span.nbytes).covers(piece)
        ]


def _backing(address: int) -> tuple[tuple[int, int], int]:
    """Return device and inode of the shared file mapped at `address`, and the place in it.

    Memory that only this mapping reaches is (0, 0), at its own address.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        extent, permissions, offset, device, inode, *_ = line.split()
        first, end = (int(each, 16) for each in extent.split("-"))
        if first <= address < end and permissions.endswith("s"):
            major, minor = (int(each, 16) for each in device.split(":"))
            return (major << 32 | minor, int(inode)), int(offset, 16) + address - first
    return (0, 0), address


def as_bytes(view: npt.NDArray[Any]) -> Bytes:
    """View an array's bytes."""
    if not view.flags.c_contiguous:
        raise Misuse.of("an array that is not contiguous stands for no range of memory")
    return view.reshape(-1).view(np.uint8)


__all__ = ["AddressSpace", "Bytes", "MemoryKind", "MemoryPiece", "Span", "as_bytes"]

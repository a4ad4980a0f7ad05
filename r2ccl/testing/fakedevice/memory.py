"""Memory of the fake GPU: address ranges, the processes that may use them, and their bytes.

Addresses of device memory are invalid for the host's CPU and never reused. Pinned memory that the
fake allocates has the same address for host and GPU. Existing host memory that is pinned gets
another address for the GPU, so that confusing the two addresses is detected.

Each byte has one `Shadow`, and one position in this shadow. Both are the same for every process,
address and mapping of a shared file through which the byte is accessed.
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

#: First address of device memory. With four-level page tables such addresses are not canonical on
#: x86-64; elsewhere nothing is mapped there normally. So an access of the host faults.
_FIRST_ADDRESS = 0xD000_0000_0000
_ALIGNMENT = 256
#: Unused bytes between two allocations, to detect accesses beyond the end of one.
_GAP = 1 << 20
_PAGE = 4096

#: Byte that fills new memory of a card, and freed memory.
_UNWRITTEN = 0xC5


class MemoryKind(enum.Enum):
    """Kind of a memory range, by how it was made.

    PINNED memory was allocated by `FakeDevice.allocate_pinned`. REGISTERED memory is host memory
    that `FakeDevice.pin` pinned. MAPPED memory belongs to another process.
    """

    DEVICE = "device memory"
    POOLED = "memory of a pool"
    MANAGED = "managed memory"
    PINNED = "pinned memory"
    REGISTERED = "registered memory"
    MAPPED = "mapped memory"

    @property
    def is_host(self) -> bool:
        """True for memory of the host."""
        return self in (MemoryKind.PINNED, MemoryKind.REGISTERED)


class Span:
    """Address range of one process.

    Parameters
    ----------
    owner : str
        Name of the process.
    card : int
        Number of the card that has the memory. For pinned and registered memory it is the card
        whose device made the span, and for mapped memory the card whose device mapped it.
    kind : MemoryKind
    address : int
        Address that work of the GPU uses.
    memory : ndarray of uint8
        The bytes.
    shadow : Shadow
        Record of the accesses to the bytes.
    position : int
        Position of the first byte in the shadow.
    number : int
        Unique number of the span.
    is_callers : bool
        True if the library's caller made the span, False if the library made it.
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
        #: Stamp of the last use by each actor.
        self.uses: dict[int, Stamp] = {}
        #: Span of another process that this one maps, if any.
        self.source: Span | None = None
        #: Number of spans that map this one.
        self.nmappings = 0

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.memory.size

    @property
    def is_host(self) -> bool:
        """True for memory of the host."""
        return self.kind.is_host

    @property
    def has_memory(self) -> bool:
        """True if the span owns its bytes, which are then freed together with the span."""
        return self.kind not in (MemoryKind.REGISTERED, MemoryKind.MAPPED)

    def __str__(self) -> str:
        return f"{self.nbytes} bytes of {self.kind.value} at {self.address:#x} of {self.owner}"


class MemoryPiece(msgspec.Struct, frozen=True):
    """Part of a span: `nbytes` bytes from byte `offset` on."""

    span: Span
    offset: int
    nbytes: int

    @property
    def view(self) -> Bytes:
        """The bytes, as a writable array."""
        return self.span.memory[self.offset : self.offset + self.nbytes]

    @property
    def position(self) -> int:
        """Position of the first byte in the shadow."""
        return self.span.position + self.offset

    def overlaps(self, other: MemoryPiece) -> bool:
        """Return True if the two pieces share bytes."""
        return self.span.shadow is other.span.shadow and max(self.position, other.position) < min(
            self.position + self.nbytes, other.position + other.nbytes
        )

    def covers(self, other: MemoryPiece) -> bool:
        """Return True if this piece contains all bytes of `other`."""
        return (
            self.span.shadow is other.span.shadow
            and self.position <= other.position
            and other.position + other.nbytes <= self.position + self.nbytes
        )

    def touch(self, access: Access, stamp: Stamp, clock: Clock) -> None:
        """Record an access in the shadow and the span; see `Shadow.touch`."""
        if self.nbytes:
            self.span.shadow.touch(self.position, self.nbytes, access, stamp, clock)
            self.span.uses[stamp.actor] = stamp

    def __str__(self) -> str:
        at = self.span.address + self.offset
        return f"{self.nbytes} bytes of {self.span.kind.value} at {at:#x} of {self.span.owner}"


class AddressSpace:
    """All spans of all processes and cards of a board, sorted by address.

    `allocate`, `allocate_pinned`, `pin` and `find` raise `Misuse` for arguments that a driver
    rejects. The other methods do not check their arguments.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []  # sorted by address
        #: First address, last address and description of each freed span.
        self._gone: list[tuple[int, int, str]] = []
        self._next_address = _FIRST_ADDRESS
        self._nspans = 0
        self._device = Shadow()
        #: Shadows of host memory, by device and inode of a shared file; (0, 0) for private memory.
        self._host: dict[tuple[int, int], Shadow] = {}

    def allocate(
        self, owner: str, card: int, nbytes: int, kind: MemoryKind, *, is_callers: bool = False
    ) -> Span:
        """Allocate memory of a card for process `owner`, and fill it with a nonzero byte."""
        if nbytes < 1:
            raise Misuse.of(f"an allocation needs at least 1 byte, not {nbytes}")
        memory = np.full(nbytes, _UNWRITTEN, np.uint8)
        address = self._reserve(nbytes)
        return self._add(owner, card, kind, address, memory, self._device, address, is_callers)

    def allocate_pinned(self, owner: str, card: int, nbytes: int) -> Span:
        """Allocate zeroed, page-aligned host memory with one address for host and GPU."""
        if nbytes < 1:
            raise Misuse.of(f"an allocation needs at least 1 byte, not {nbytes}")
        room = np.zeros(nbytes + _PAGE, np.uint8)
        start = -room.ctypes.data % _PAGE
        memory = room[start : start + nbytes]
        address = memory.ctypes.data
        shadow = self._host.setdefault((0, 0), Shadow())
        return self._add(owner, card, MemoryKind.PINNED, address, memory, shadow, address)

    def pin(self, owner: str, card: int, memory: Bytes) -> Span:
        """Pin whole pages of host memory: reserve an address for all GPUs of process `owner`."""
        at = memory.ctypes.data
        if at % _PAGE or memory.nbytes % _PAGE or not memory.nbytes:
            raise Misuse.of(f"{memory.nbytes} bytes at {at:#x} to pin are not whole pages")
        for span in self.of(owner):
            start = span.memory.ctypes.data
            if span.is_host and at < start + span.nbytes and start < at + memory.nbytes:
                raise Misuse.of(f"{span} is pinned already")
        backing, position = _backing(at)
        shadow = self._host.setdefault(backing, Shadow())
        flat = as_bytes(memory)
        address = self._reserve(flat.size)
        return self._add(owner, card, MemoryKind.REGISTERED, address, flat, shadow, position)

    def map(self, owner: str, card: int, source: Span) -> Span:
        """Map `source`, device memory of another process, at a new address of process `owner`.

        Work on `card` can use the address.
        """
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
        """Free a span; overwrite its memory if the span owns it and no other span shares it.

        `why` describes the call that freed the span, for messages about later accesses.
        """
        first, end = span.position, span.position + span.nbytes
        self._spans.remove(span)
        self._gone.append((span.address, span.address + span.nbytes - 1, f"{span}, {why}"))
        if span.source is not None:
            span.source.nmappings -= 1
        elif not any(
            each.shadow is span.shadow
            and each.position < end
            and first < each.position + each.nbytes
            for each in self._spans
        ):
            span.shadow.forget(span.position, span.nbytes)
            if span.has_memory:
                span.memory.fill(_UNWRITTEN)

    def find(self, owner: str, cards: Container[int], address: int, nbytes: int) -> MemoryPiece:
        """Return the memory that work of a process accesses at an address.

        Parameters
        ----------
        owner : str
            The process.
        cards : container of int
            Cards whose memory the work can use.
        address, nbytes : int

        Raises
        ------
        Misuse
            If the address is unknown, freed, of another process or of an unreachable GPU, or the
            range exceeds the span.
        """
        index = bisect.bisect_right(self._spans, address, key=lambda each: each.address) - 1
        span = self._spans[index] if index >= 0 else None
        # The end address of a span is valid only for an access of 0 bytes.
        if span is None or address > span.address + span.nbytes - (nbytes > 0):
            raise Misuse.of(f"{owner} has no memory at {address:#x}{self._memory_of(address)}")
        if span.owner != owner:
            raise Misuse.of(f"{owner} has not mapped {span}")
        if span.card not in cards and not span.is_host:
            raise Misuse.of(
                f"{span} is memory of another GPU: call `reach` with that GPU's device first"
            )
        if nbytes < 0 or address + nbytes > span.address + span.nbytes:
            raise Misuse.of(f"{nbytes} bytes at {address:#x} reach beyond {span}")
        return MemoryPiece(span, address - span.address, nbytes)

    def _memory_of(self, address: int) -> str:
        """Return a description of freed or host memory at an invalid address; empty if none."""
        for first, last, what in reversed(self._gone):
            if first <= address <= last:
                return f" any more: {what}"
        for span in self._spans:
            start = span.memory.ctypes.data
            if span.is_host and start <= address < start + span.nbytes:
                return f": that is the host's address of {span}"
        return ""

    def at_host(self, owner: str, address: int, nbytes: int) -> MemoryPiece | None:
        """Return `nbytes` pinned bytes of a process at a host address.

        Return None unless one pinned span contains all of them.
        """
        for span in self.of(owner):
            offset = address - span.memory.ctypes.data
            if span.is_host and 0 <= offset <= span.nbytes - nbytes:
                return MemoryPiece(span, offset, nbytes)
        return None

    def of(self, owner: str) -> list[Span]:
        """Return all spans of process `owner`, newest first."""
        found = [span for span in self._spans if span.owner == owner]
        return sorted(found, key=lambda span: -span.number)

    def sharing(self, piece: MemoryPiece) -> list[MemoryPiece]:
        """Return, for each span that contains all bytes of `piece`, a piece with these bytes."""
        return [
            MemoryPiece(span, piece.position - span.position, piece.nbytes)
            for span in self._spans
            if MemoryPiece(span, 0, span.nbytes).covers(piece)
        ]


def _backing(address: int) -> tuple[tuple[int, int], int]:
    """Return (device, inode) of the shared file mapped at `address`, and the offset in the file.

    For private memory, return (0, 0) and the address itself.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        extent, permissions, offset, device, inode, *_ = line.split()
        first, end = (int(each, 16) for each in extent.split("-"))
        if first <= address < end and permissions.endswith("s"):
            major, minor = (int(each, 16) for each in device.split(":"))
            return (major << 32 | minor, int(inode)), int(offset, 16) + address - first
    return (0, 0), address


def as_bytes(view: npt.NDArray[Any]) -> Bytes:
    """Return a flat uint8 view of a contiguous array; raise Misuse if it is not contiguous."""
    if not view.flags.c_contiguous:
        raise Misuse.of("the array is not contiguous: pass one range of memory, or a copy")
    return view.reshape(-1).view(np.uint8)


__all__ = ["AddressSpace", "Bytes", "MemoryKind", "MemoryPiece", "Span", "as_bytes"]

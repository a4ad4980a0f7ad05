"""Memory of the GPUs of a node, as one rank sees it: which allocations the ranks have mapped.

Every rank has an *area*, which all others map when the ranks join. An array in memory that the
others have not mapped is copied through the area, so every kind of memory works.

An allocation that is used a second time is *offered* in the message of that call. The other ranks
map it before one of their next calls, while none of their streams waits for a call, because mapping
may wait for the device. Once all of them have, calls use the array itself. Each rank has a limited
number of slots for offers. When the owner finds that an allocation is gone, it tells the other
ranks, which unmap it; an offer for a slot in use replaces its allocation.

Invariant: a rank uses an allocation of its own directly only if all other ranks have mapped it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from r2ccl.device.base import Device
from r2ccl.errors import TransportError
from r2ccl.gpu.ipc_board import NSLOTS, IpcBoard

_log = logging.getLogger(__name__)

#: Slots of arrays that are copied through the area, and of arrays that a rank does not have.
COPIED, ABSENT = -1, -2
#: Number of allocations that are remembered because they were used once or cannot be exported.
_MOST_SEEN = 256


class ArrayPlace(NamedTuple):
    """Location of a rank's array: slot of its allocation, `COPIED` or `ABSENT`; and the offset."""

    slot: int
    offset: int


class AllocationOffer(NamedTuple):
    """An allocation that other ranks shall map: its slot, number and IPC handle.

    Numbers count the offers of a rank from 1; 0 means no offer.
    """

    slot: int
    number: int
    handle: bytes


class _Export(msgspec.Struct):
    """An allocation of this rank that was offered; ``used`` is the time of its last use."""

    allocation: int
    base: int
    number: int
    used: int


class _Change(NamedTuple):
    """A slot of a rank whose allocation is replaced; it is only unmapped if the offer is None."""

    peer: int
    slot: int
    offer: AllocationOffer | None


class PeerMemory:
    """Areas and mapped allocations of the ranks of a node.

    Parameters
    ----------
    device : Device
    rank : int
        Rank to name in messages.
    board : IpcBoard
        Board shared by all ranks of the node.
    areas : sequence of int
        Addresses of all ranks' areas in this process; `close` unmaps those of the others.
    area_nbytes : int
        Size in bytes of each half of an area: the first is for inputs, the second for outputs.
    """

    def __init__(
        self, device: Device, rank: int, board: IpcBoard, areas: Sequence[int], area_nbytes: int
    ) -> None:
        self.board = board
        self.areas = tuple(areas)
        self.area_nbytes = area_nbytes
        self._device = device
        self._rank = rank
        self._at = board.index
        self._exports: dict[int, _Export] = {}
        self._slot_of: dict[int, int] = {}
        self._noffers = 0
        #: Time in uses of allocations.
        self._now = 0
        #: Allocations used once (True), and those that cannot be exported (False).
        self._seen: dict[int, bool] = {}
        self._offer = _NO_OFFER
        self._gone = 0
        #: Mapped addresses of other ranks' allocations, by rank and slot.
        self._mapped: dict[tuple[int, int], int] = {}
        #: Changes that are still to be made. The worker appends them.
        self._changes: list[_Change] = []

    # Arrays of this rank; called in the caller's thread

    def place_of(self, address: int) -> ArrayPlace:
        """Return the place of an array of this rank; 0 stands for an array that it does not have.

        The second use of an allocation offers it to the other ranks; see `take_news`.
        """
        if not address:
            return ArrayPlace(ABSENT, 0)
        allocation = self._device.buffer_id(address)
        slot = self._slot_of.get(allocation)
        if slot is None:
            self._consider(allocation, address)
            return ArrayPlace(COPIED, 0)
        export = self._exports[slot]
        self._now += 1
        export.used = self._now
        if self.board.is_mapped(slot, export.number):
            return ArrayPlace(slot, address - export.base)
        return ArrayPlace(COPIED, 0)

    def take_news(self) -> tuple[AllocationOffer, int]:
        """Return the offer and the bit mask of slots to unmap, for the message of a call."""
        news = self._offer, self._gone
        self._offer, self._gone = _NO_OFFER, 0
        return news

    def _consider(self, allocation: int, address: int) -> None:
        """Offer an allocation if it can be exported and was used before."""
        if not self._seen.get(allocation, True) or self._offer.number or not allocation:
            return
        if self._seen.pop(allocation, None) is None:
            self._remember(allocation, True)
            return
        try:
            handle, offset = self._device.export(address)
        except TransportError as exc:
            _log.info(
                "rank %d: an array is copied, because other ranks cannot map it: %s",
                self._rank, exc,
            )  # fmt: skip
            self._remember(allocation, False)
            return
        self._drop_gone()
        slot = self._free_slot()
        self._noffers += 1
        self._now += 1
        self._exports[slot] = _Export(allocation, address - offset, self._noffers, self._now)
        self._slot_of[allocation] = slot
        self._offer = AllocationOffer(slot, self._noffers, handle)

    def _remember(self, allocation: int, is_exportable: bool) -> None:
        while len(self._seen) >= _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        self._seen[allocation] = is_exportable

    def _drop_gone(self) -> None:
        """Forget allocations that their owner freed."""
        for slot, export in tuple(self._exports.items()):
            if self._device.buffer_id(export.base) != export.allocation:
                self._forget(slot)
                self._gone |= 1 << slot

    def _free_slot(self) -> int:
        free = next((slot for slot in range(NSLOTS) if slot not in self._exports), None)
        if free is None:
            free = min(self._exports, key=lambda slot: self._exports[slot].used)
            self._forget(free)
        return free

    def _forget(self, slot: int) -> None:
        del self._slot_of[self._exports.pop(slot).allocation]

    # Arrays of other ranks

    def learn(self, peer: int, offer: AllocationOffer, gone: int) -> None:
        """Note the news of a rank's message, in the order of its messages; called in the worker."""
        self._changes += [_Change(peer, slot, None) for slot in range(NSLOTS) if gone >> slot & 1]
        if offer.number:
            self._changes.append(_Change(peer, offer.slot, offer))

    @property
    def is_change_due(self) -> bool:
        """True if there is news for `map_news`."""
        return bool(self._changes)

    def map_news(self) -> None:
        """Map what other ranks have offered, and unmap what is gone or replaced.

        The worker must be idle, and the work of all earlier calls done: the device may be waited
        for. An allocation that cannot be mapped, for example because it was freed in the meantime,
        is not; its owner continues to copy it.

        Raises
        ------
        TransportError
            If the device failed.
        """
        for peer, slot, offer in self._changes:
            known = self._mapped.pop((peer, slot), None)
            if known is not None:
                self._device.unmap(known)
            if offer is None:
                continue
            try:
                self._mapped[peer, slot] = self._device.map(offer.handle)
            except TransportError as exc:
                _log.info(
                    "rank %d: an array of another rank is copied, because it cannot be mapped: %s",
                    self._rank, exc,
                )  # fmt: skip
            else:
                self.board.mark_mapped(peer, slot, offer.number)
        self._changes.clear()

    def address(self, peer: int, place: ArrayPlace) -> int:
        """Return the address in this process of an array that is in a slot of rank `peer`."""
        return self._mapped[peer, place.slot] + place.offset

    def close(self) -> None:
        """Unmap the memory of the other ranks; nothing may use it.

        This rank's area stays until the device is closed: other ranks may still have it mapped.

        Raises
        ------
        TransportError
            If the device failed; not all memory was unmapped.
        """
        for address in self._mapped.values():
            self._device.unmap(address)
        self._mapped.clear()
        for at, address in enumerate(self.areas):
            if at != self._at:
                self._device.unmap(address)


_NO_OFFER = AllocationOffer(0, 0, b"")

__all__ = ["ABSENT", "COPIED", "AllocationOffer", "ArrayPlace", "PeerMemory"]

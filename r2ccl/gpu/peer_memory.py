"""GPU memory that the ranks of a node share by CUDA IPC, as one rank sees it.

Each rank allocates an *area* of fixed size, which all other ranks of the node map when backends are
selected. An array in an allocation that the other ranks have not mapped is copied to or from its
owner's area, so every kind of memory works.

When an allocation is used for the second time, its rank *offers* it to the other ranks: the rank's
message for this call contains the IPC handle of the allocation. A message has room for one offer; a
further allocation is offered at its next use. The other ranks map the allocation before a later
call, while none of their streams waits for a call, because mapping may wait for the device. When
all other ranks have mapped the allocation, collectives use arrays in it without a copy.

Each rank has `NSLOTS` slots, and an offer names the slot of its allocation. If all slots are in
use, the offer takes the slot of the least recently used allocation. When the owner finds that an
allocation was freed, it tells the other ranks, which then unmap it.

Invariant: a collective uses an allocation without a copy only if all ranks of the node except the
owner have mapped it.
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

#: Values of `ArrayPlace.slot`: the array is copied through the area; the rank has no such array.
COPIED, ABSENT = -1, -2
#: Largest number of allocations that are remembered because they were used once or cannot be
#: exported.
_MOST_SEEN = 256


class ArrayPlace(NamedTuple):
    """Location of a rank's array, in the form that is sent to the other ranks.

    ``slot`` is the slot of the allocation, `COPIED` or `ABSENT`. ``offset`` is the distance in
    bytes from the start of the allocation to the array; it is 0 for `COPIED` and `ABSENT`.
    """

    slot: int
    offset: int


class AllocationOffer(NamedTuple):
    """Request to the other ranks of the node to map an allocation of this rank.

    ``slot`` is the slot of the allocation, ``number`` counts the offers of a rank from 1, and
    ``handle`` is the IPC handle from `Device.export`. The number 0 means that there is no offer.
    """

    slot: int
    number: int
    handle: bytes


class _Export(msgspec.Struct):
    """An allocation of this rank that was offered.

    ``allocation`` is the `Device.buffer_id` of the allocation, ``base`` the address of the
    allocation, ``number`` the number of the offer, and ``used`` the value of `PeerMemory._now` when
    the allocation was last used.
    """

    allocation: int
    base: int
    number: int
    used: int


class _Change(NamedTuple):
    """A change of the allocation that this rank has mapped for ``slot`` of member ``peer``.

    The present allocation of the slot, if any, is unmapped. Then the allocation of ``offer`` is
    mapped, unless ``offer`` is None.
    """

    peer: int
    slot: int
    offer: AllocationOffer | None


class PeerMemory:
    """Areas and mapped allocations of the ranks of a node.

    A parameter `peer` is a member index: the position of a rank in the node, as in `IpcBoard`.

    Parameters
    ----------
    device : Device
    rank : int
        Number of this rank in the communicator; used only in messages.
    board : IpcBoard
        Memory shared by all ranks of the node.
    areas : sequence of int
        Addresses in this process of the areas of all ranks, by member index. `close` unmaps the
        areas of the other ranks.
    area_nbytes : int
        Size in bytes of each half of an area: the first half is for inputs, the second for outputs.
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
        #: Number of uses of offered allocations so far; serves as the time of the newest use.
        self._now = 0
        #: Allocations used once (True), and those that cannot be exported (False).
        self._seen: dict[int, bool] = {}
        self._offer = _NO_OFFER
        self._gone = 0
        #: Mapped addresses of other ranks' allocations, by member index and slot.
        self._mapped: dict[tuple[int, int], int] = {}
        #: Changes that are still to be made. The worker thread appends them (`learn`).
        self._changes: list[_Change] = []

    # Arrays of this rank; called in the caller's thread

    def place_of(self, address: int) -> ArrayPlace:
        """Return the place of this rank's array at `address`, for the message of a call.

        Pass 0 for an array that this rank does not have; the slot is `ABSENT` then. Until all other
        ranks have mapped the array's allocation, the slot is `COPIED`. The second use of an
        allocation prepares an offer, which `take_news` returns. A use does not count while the
        offer of another allocation waits for `take_news`.

        Raises
        ------
        TransportError
            If the device failed.
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
        """Return the new offer and the freed slots of this rank, for its next message.

        The result covers the time since the last call of this method.

        Returns
        -------
        AllocationOffer
            An allocation for the other ranks to map; its ``number`` is 0 if there is none.
        int
            Slots whose allocations were freed, for the other ranks to unmap: bit ``1 << slot`` for
            each.
        """
        news = self._offer, self._gone
        self._offer, self._gone = _NO_OFFER, 0
        return news

    def _consider(self, allocation: int, address: int) -> None:
        """Prepare the offer of an allocation, if it was used before and can be exported.

        At its first use, only remember it. Do nothing if another offer still waits for `take_news`.
        """
        if not self._seen.get(allocation, True) or self._offer.number or not allocation:
            return
        if self._seen.pop(allocation, None) is None:
            self._remember(allocation, True)
            return
        try:
            handle, offset = self._device.export(address)
        except TransportError as exc:
            _log.info(
                "rank %d: collectives copy an array on the GPU, because other ranks cannot map its "
                "memory: %s",
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
        """Forget allocations that the user has freed, and mark their slots for `take_news`."""
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
        """Store the offer and the freed slots from a message of `peer` until `map_news` is called.

        Only the worker thread calls this method, for the messages of each rank in their order.

        Parameters
        ----------
        peer : int
        offer : AllocationOffer
        gone : int
            Slots to unmap, in the form that `take_news` returns.
        """
        self._changes += [_Change(peer, slot, None) for slot in range(NSLOTS) if gone >> slot & 1]
        if offer.number:
            self._changes.append(_Change(peer, offer.slot, offer))

    @property
    def is_change_due(self) -> bool:
        """True if `learn` stored an offer or a freed slot that `map_news` has not handled yet."""
        return bool(self._changes)

    def map_news(self) -> None:
        """Map the allocations that other ranks have offered; unmap freed or replaced allocations.

        The worker must be idle, and the device must have finished all earlier calls, because this
        method may wait for the device. An allocation that cannot be mapped, for example because it
        was freed after the offer, is left out: its owner continues to copy any arrays in it.

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
                    "rank %d: collectives copy a GPU array of another rank of this node, because "
                    "this rank cannot map the memory of that array: %s",
                    self._rank, exc,
                )  # fmt: skip
            else:
                self.board.mark_mapped(peer, slot, offer.number)
        self._changes.clear()

    def address(self, peer: int, place: ArrayPlace) -> int:
        """Return the address in this process of the array of `peer` at `place`.

        `place` must come from a message of `peer`, and its slot must not be `COPIED` or `ABSENT`.
        """
        return self._mapped[peer, place.slot] + place.offset

    def close(self) -> None:
        """Unmap the memory of the other ranks; no work on the device may still use it.

        This rank's area is not freed before the device is closed, because other ranks may still
        have it mapped.

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

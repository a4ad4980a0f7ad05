"""Relay: slots of memory beside a NIC, and the copies between them and a GPU's own memory.

The slots lie in the memory of the GPU beside the NIC, the copies go over NVLink. Each direction has
a stream, on which copies end in the order they were begun. Must not know paths or transports.
Invariants: a slot is free only once it was given back and nothing is copied to or from it; a copy
counts as over only once its event was seen to be, or the device failed.

*Who copies.* What is copied may have been written by a NIC: slots always, the GPU's own memory
where a slice arrived directly and is passed on. Such writes are in order, or flushed, for the GPU
whose memory it is, and need not be for others. So that GPU copies from it.

*A device that fails.* Whatever of the driver's calls it is that fails, the relay then hands out no
slot any more. A copy that could not be begun has failed; where the device does not say whether one
is over, all that are under way on it have. What failed counts as over too: errors of work that was
begun are those after which the driver runs nothing more in the process's context.

References
----------
CUDA driver API, ``CUresult``: ``CUDA_ERROR_ILLEGAL_ADDRESS`` and its like "leave the process in an
inconsistent state and any further CUDA work will return the same error";
``CUGPUDirectRDMAWritesOrdering``, where ``OWNER`` is less than ``ALL_DEVICES``.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from r2ccl.device.base import Device, Event
from r2ccl.device.views import address_of, view_of
from r2ccl.errors import TransportError


class Slot:
    """Memory for one slice; ``owner`` is what its taker likes, for `Relay.collect`.

    ``is_copying`` tells whether a copy to or from it is under way, ``error`` why the last failed.
    """

    __slots__ = ("_whole", "address", "error", "is_copying", "is_given", "owner", "relay")

    def __init__(self, relay: Relay, address: int, nbytes: int) -> None:
        self.relay = relay
        self.address = address
        self.owner: Any = None
        self.is_copying = False
        #: Given back by its owner.
        self.is_given = True
        self.error: TransportError | None = None
        self._whole = view_of(address, nbytes)

    def view(self, nbytes: int) -> memoryview:
        """Return a view of its first bytes."""
        return self._whole[:nbytes]


class Relay:
    """Slots in a row, and the streams on which they are filled and emptied.

    Parameters
    ----------
    device : Device
        The GPU that has the slots; it reaches the memory they stand in for.
    base_address : int
        Of the first slot. The memory is whoever's made the relay, registered with every NIC.
    slot_nbytes, nslots : int
    home : Device, optional
        The GPU that has the slices; it reaches the slots. Default: `device` has them too.

    Raises
    ------
    TransportError
        A device refused a stream or an event.

    Notes
    -----
    Belongs to whoever owns the data loop. Whoever made it closes it, and frees the memory, when
    the transport that uses it is closed, or all paths are fenced and it is used no more.
    """

    def __init__(
        self,
        device: Device,
        base_address: int,
        slot_nbytes: int,
        nslots: int,
        home: Device | None = None,
    ) -> None:
        self.nslots = nslots
        #: The first failure of a device: no slot is handed out any more.
        self.error: TransportError | None = None
        self._slot_nbytes = slot_nbytes
        self._inwards = _CopyStream(home or device, nslots)
        try:
            self._outwards = _CopyStream(device, nslots)
        except BaseException:
            self._inwards.close()
            raise
        self._slots = [
            Slot(self, base_address + number * slot_nbytes, slot_nbytes) for number in range(nslots)
        ]
        self._free = self._slots[::-1]

    @property
    def nfree(self) -> int:
        """How many slots are free."""
        return len(self._free)

    @property
    def is_busy(self) -> bool:
        """Whether a copy is not known to be over."""
        return bool(self._inwards.copying or self._outwards.copying)

    def take(self, nbytes: int) -> Slot | None:
        """Return a free slot of `nbytes` bytes or more, if there is one; else None."""
        if not self._free or nbytes > self._slot_nbytes or self.error is not None:
            return None
        slot = self._free.pop()
        slot.is_given = False
        return slot

    def give(self, slot: Slot) -> None:
        """Give a slot back; it is free when its copy is over, and never if that failed."""
        slot.is_given = True
        self._release(slot)

    def copy_in(self, slot: Slot, view: memoryview) -> None:
        """Begin to copy what a view of device memory holds to a slot.

        Raises
        ------
        TransportError
            The device failed.
        """
        self._copy(self._inwards, slot, slot.address, address_of(view), len(view))

    def copy_out(self, slot: Slot, region: memoryview) -> None:
        """Begin to copy what a slot holds to a region of device memory; as `copy_in`."""
        self._copy(self._outwards, slot, address_of(region), slot.address, len(region))

    def collect(self) -> list[Slot]:
        """Return the slots whose copies are over, or failed, since the last time; never waits."""
        over: list[Slot] = []
        for stream in (self._inwards, self._outwards):
            try:
                while (slot := stream.next_over()) is not None:
                    over.append(slot)
            except TransportError as exc:
                failed = stream.abandon()
                for slot in failed:
                    self._note(slot, exc)
                over += failed
        for slot in over:
            slot.is_copying = False
            self._release(slot)
        return over

    def drain(self, timeout_s: float) -> bool:
        """Wait until every copy is over, at most `timeout_s` a direction; then `collect`.

        Returns
        -------
        bool
            Whether they are.
        """
        is_filled = self._inwards.drain(timeout_s)
        return self._outwards.drain(timeout_s) and is_filled

    def close(self) -> None:
        """Free the streams and the events; no copy is under way."""
        self._inwards.close()
        self._outwards.close()

    def _copy(self, stream: _CopyStream, slot: Slot, target: int, source: int, nbytes: int) -> None:
        try:
            stream.begin(slot, target, source, nbytes)
        except TransportError as exc:
            self._note(slot, exc)
            raise
        slot.is_copying = True

    def _note(self, slot: Slot, error: TransportError) -> None:
        slot.error = error
        self.error = self.error or error

    def _release(self, slot: Slot) -> None:
        if slot.is_given and not slot.is_copying and slot.error is None:
            self._set_free(slot)

    def _set_free(self, slot: Slot) -> None:
        self._free.append(slot)


class _CopyStream:
    """Copies of one direction, by the GPU that has what is copied; at most `ncopies` at once."""

    def __init__(self, device: Device, ncopies: int) -> None:
        self.copying: deque[tuple[Slot, Event]] = deque()
        self._device = device
        self._stream = device.make_stream()
        self._events: list[Event] = []
        try:
            for _ in range(ncopies):
                self._events.append(device.make_event())
        except BaseException:
            self.close()
            raise
        #: Events that stand for nothing.
        self._idle = list(self._events)

    def begin(self, slot: Slot, target: int, source: int, nbytes: int) -> None:
        """Begin a copy for a slot that has none under way."""
        device = self._device
        if device.reorders_remote_writes:
            device.flush_remote_writes()
        device.copy(target, source, nbytes, self._stream)
        device.record(self._idle[-1], self._stream)
        self.copying.append((slot, self._idle.pop()))

    def next_over(self) -> Slot | None:
        """Take the slot of the oldest copy, if that is over."""
        if not self.copying or not self._device.is_done(self.copying[0][1]):
            return None
        slot, event = self.copying.popleft()
        self._idle.append(event)
        return slot

    def abandon(self) -> list[Slot]:
        """Take the slots of all copies: the device failed."""
        slots = [slot for slot, _ in self.copying]
        self.copying.clear()
        return slots

    def drain(self, timeout_s: float) -> bool:
        """Wait for the copies, at most `timeout_s`; whether they are over, also by a failure."""
        if not self.copying:
            return True
        try:
            return self._device.synchronize(self.copying[-1][1], timeout_s)
        except TransportError:
            return True  # as it will tell whoever collects

    def close(self) -> None:
        """Free the stream and the events; no copy is under way."""
        for event in self._events:
            self._device.destroy_event(event)
        self._device.destroy_stream(self._stream)


__all__ = ["Relay", "Slot"]

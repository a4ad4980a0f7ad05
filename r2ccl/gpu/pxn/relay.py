"""Slots of memory beside a NIC, and the copies between them and a GPU's own memory.

The slots are in the memory of the GPU beside the NIC, and the copies use NVLink. Each direction has
a stream, on which copies finish in the order they were begun. Invariants: a slot is free only after
it was returned and no copy uses it; a copy counts as done once its event was seen to be done, or
the device failed.

*Which GPU copies.* The source may have been written by a NIC: always for slots, and for the GPU's
own memory where a slice that arrived directly is passed on. Remote writes are ordered, or flushed,
for the GPU that owns the memory, but perhaps not for others. So the owner of the source copies.

*Device failure.* After any failed driver call the relay hands out no slot. A copy that could not be
begun has failed; if the device does not tell whether one is done, all copies in progress on it
have failed. Failed copies count as done too: after an error of enqueued work, the driver runs
nothing more in the process's context.

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
    """Memory for one slice; ``owner`` is for the caller of `Relay.take`.

    ``is_copying``: a copy to or from it is in progress. ``error``: why the last copy failed.
    """

    __slots__ = ("_whole", "address", "error", "is_copying", "is_given", "owner", "relay")

    def __init__(self, relay: Relay, address: int, nbytes: int) -> None:
        self.relay = relay
        self.address = address
        self.owner: Any = None
        self.is_copying = False
        #: Returned by `Relay.give`.
        self.is_given = True
        self.error: TransportError | None = None
        self._whole = view_of(address, nbytes)

    def view(self, nbytes: int) -> memoryview:
        """Return a view of its first bytes."""
        return self._whole[:nbytes]


class Relay:
    """Contiguous slots, and the streams on which they are filled and emptied.

    Parameters
    ----------
    device : Device
        The GPU that has the slots; it accesses the memory of `home`.
    base_address : int
        Of the first slot. The memory is borrowed, and registered with every NIC.
    slot_nbytes, nslots : int
    home : Device, optional
        The GPU that has the slices; it accesses the slots. Default: `device`.

    Raises
    ------
    TransportError
        A device could not create a stream or an event.

    Notes
    -----
    Used by the owner of the data loop. Its creator closes it and frees the memory after the
    transport was closed, or after all paths were fenced and the transport stopped using it.
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
        #: First failure of a device, after which `take` returns None.
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
        """Number of free slots."""
        return len(self._free)

    @property
    def is_busy(self) -> bool:
        """True if a copy may be in progress."""
        return bool(self._inwards.copying or self._outwards.copying)

    def take(self, nbytes: int) -> Slot | None:
        """Return a free slot of at least `nbytes` bytes; None: there is none."""
        if not self._free or nbytes > self._slot_nbytes or self.error is not None:
            return None
        slot = self._free.pop()
        slot.is_given = False
        return slot

    def give(self, slot: Slot) -> None:
        """Return a slot; it is free when its copy is done, and never if that failed."""
        slot.is_given = True
        self._release(slot)

    def copy_in(self, slot: Slot, view: memoryview) -> None:
        """Begin a copy from a view of device memory to a slot.

        Raises
        ------
        TransportError
            The device failed.
        """
        self._copy(self._inwards, slot, slot.address, address_of(view), len(view))

    def copy_out(self, slot: Slot, region: memoryview) -> None:
        """Begin a copy from a slot to a region of device memory; see `copy_in`."""
        self._copy(self._outwards, slot, address_of(region), slot.address, len(region))

    def collect(self) -> list[Slot]:
        """Return the slots whose copies ended since the last call; does not wait."""
        over: list[Slot] = []
        for stream in (self._inwards, self._outwards):
            try:
                while (slot := stream.pop_done()) is not None:
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
        """Wait for all copies, up to `timeout_s` a direction; call `collect` then.

        Returns
        -------
        bool
            Whether they are done.
        """
        is_filled = self._inwards.drain(timeout_s)
        return self._outwards.drain(timeout_s) and is_filled

    def close(self) -> None:
        """Free the streams and the events; no copy is in progress."""
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
    """Copies of one direction, by the GPU that has the source; at most `ncopies` at once."""

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
        #: Unused events.
        self._idle = list(self._events)

    def begin(self, slot: Slot, target: int, source: int, nbytes: int) -> None:
        """Begin a copy for a slot that has none in progress."""
        device = self._device
        if device.reorders_remote_writes:
            device.flush_remote_writes()
        device.copy(target, source, nbytes, self._stream)
        device.record(self._idle[-1], self._stream)
        self.copying.append((slot, self._idle.pop()))

    def pop_done(self) -> Slot | None:
        """Remove and return the slot of the oldest copy, if that is done."""
        if not self.copying or not self._device.is_done(self.copying[0][1]):
            return None
        slot, event = self.copying.popleft()
        self._idle.append(event)
        return slot

    def abandon(self) -> list[Slot]:
        """Remove and return the slots of all copies: the device failed."""
        slots = [slot for slot, _ in self.copying]
        self.copying.clear()
        return slots

    def drain(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the copies; return whether they ended or failed."""
        if not self.copying:
            return True
        try:
            return self._device.synchronize(self.copying[-1][1], timeout_s)
        except TransportError:
            return True  # `collect` reports it

    def close(self) -> None:
        """Free the stream and the events; no copy is in progress."""
        for event in self._events:
            self._device.destroy_event(event)
        self._device.destroy_stream(self._stream)


__all__ = ["Relay", "Slot"]

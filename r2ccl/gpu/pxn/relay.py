"""Memory slots near a NIC, and the copies between these slots and the memory of another GPU.

The slots are in the memory of the GPU near the NIC, and the copies use NVLink. Each direction has a
stream, on which copies finish in the order in which they were begun. Invariants: a slot becomes
free only after it was given back with `Relay.give` and no copy uses it; a copy counts as done after
the host has seen that its event is done, or after the device failed.

*The GPU that copies.* A NIC has written the source of a copy if the source is a slot, or if a slice
that arrived directly is sent on from the GPU's own memory. NIC writes are ordered, or flushed, for
the GPU that owns the memory, but perhaps not for other GPUs. Therefore the GPU that owns the source
executes the copy.

*Device failure.* After a driver call has failed, the relay provides no more slots. A copy that
could not be begun has failed. If the state of a copy cannot be queried, all copies in progress in
its direction count as failed. Failed copies count as done: after enqueued work has failed, the
driver runs no more work in the process's context.

References
----------
CUDA driver API, ``CUresult``: ``CUDA_ERROR_ILLEGAL_ADDRESS`` and similar errors "leave the process
in an inconsistent state and any further CUDA work will return the same error";
``CUGPUDirectRDMAWritesOrdering``, where ``OWNER`` is less than ``ALL_DEVICES``.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from r2ccl.device.base import Device, Event
from r2ccl.device.views import address_of, view_of
from r2ccl.errors import TransportError


class Slot:
    """Memory for one slice.

    ``relay`` is the `Relay` of the slot, and ``address`` is the address of the slot on the device.
    ``owner`` is set and read only by the code that took the slot. ``is_copying`` is True while a
    copy to or from the slot is in progress. ``error`` is the error of the last copy; None unless
    the copy failed.
    """

    __slots__ = ("_whole", "address", "error", "is_copying", "is_given", "owner", "relay")

    def __init__(self, relay: Relay, address: int, nbytes: int) -> None:
        self.relay = relay
        self.address = address
        self.owner: Any = None
        self.is_copying = False
        #: True after `Relay.give` and before the next `Relay.take`.
        self.is_given = True
        self.error: TransportError | None = None
        self._whole = view_of(address, nbytes)

    def view(self, nbytes: int) -> memoryview:
        """Return a view of the first `nbytes` bytes of the slot, in device memory."""
        return self._whole[:nbytes]


class Relay:
    """Contiguous slots, and the streams for the copies to and from the slots.

    Parameters
    ----------
    device : Device
        GPU that has the slots. It must be able to access the memory of `home`.
    base_address : int
        Address of the first slot. The memory of the slots is borrowed and must be registered with
        every NIC.
    slot_nbytes, nslots : int
        Size of a slot in bytes, and number of slots.
    home : Device, optional
        GPU that has the slices. It must be able to access the slots. Default: `device`.

    Raises
    ------
    TransportError
        If a device could not create a stream or an event.

    Notes
    -----
    Only the thread that owns the data loop may call the methods. The creator closes the relay and
    frees the memory after the transport was closed, or after the transport stopped using the relay
    and no slice in progress uses a slot.
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
        #: First error of a device; `take` returns None after it.
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
        """Return a free slot of at least `nbytes` bytes, which the caller returns with `give`.

        Return None if no slot is free, if slots are smaller, or after an error of a device.
        """
        if not self._free or nbytes > self._slot_nbytes or self.error is not None:
            return None
        slot = self._free.pop()
        slot.is_given = False
        return slot

    def give(self, slot: Slot) -> None:
        """Return `slot` to the relay.

        The slot becomes free at once or, if it has a copy in progress, when `collect` returns it.
        It never becomes free if its last copy failed.
        """
        slot.is_given = True
        self._release(slot)

    def copy_in(self, slot: Slot, view: memoryview) -> None:
        """Begin to copy all bytes of `view`, which is in the memory of `home`, to `slot`.

        `collect` returns the slot when the copy has ended. The slot must have no copy in progress.

        Raises
        ------
        TransportError
            If the device failed.
        """
        self._copy(self._inwards, slot, slot.address, address_of(view), len(view))

    def copy_out(self, slot: Slot, region: memoryview) -> None:
        """Begin to fill `region`, which is in the memory of `home`, with a copy from `slot`.

        `collect` returns the slot when the copy has ended. The slot must have no copy in progress.

        Raises
        ------
        TransportError
            If the device failed.
        """
        self._copy(self._outwards, slot, address_of(region), slot.address, len(region))

    def collect(self) -> list[Slot]:
        """Return the slots whose copies have ended or failed since the last `collect`.

        The method does not wait. A slot whose copy failed has an ``error``.
        """
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
        """Wait up to `timeout_s` seconds per direction for all copies.

        The copies still count as in progress until `collect` returns their slots.

        Returns
        -------
        bool
            True if all copies are done or failed.
        """
        is_filled = self._inwards.drain(timeout_s)
        return self._outwards.drain(timeout_s) and is_filled

    def close(self) -> None:
        """Free the streams and the events; no copy may be in progress."""
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
    """Copies in one direction, which `device` executes; at most `ncopies` at once."""

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
        """Begin a copy of `nbytes` bytes from address `source` to address `target`.

        One of the two addresses is in `slot`, which must have no copy in progress.
        """
        device = self._device
        if device.reorders_remote_writes:
            device.flush_remote_writes()
        device.copy(target, source, nbytes, self._stream)
        device.record(self._idle[-1], self._stream)
        self.copying.append((slot, self._idle.pop()))

    def pop_done(self) -> Slot | None:
        """Remove and return the slot of the oldest copy if the copy is done, else return None."""
        if not self.copying or not self._device.is_done(self.copying[0][1]):
            return None
        slot, event = self.copying.popleft()
        self._idle.append(event)
        return slot

    def abandon(self) -> list[Slot]:
        """Remove and return the slots of all copies, after the device failed."""
        slots = [slot for slot, _ in self.copying]
        self.copying.clear()
        return slots

    def drain(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for all copies; return whether they ended or failed."""
        if not self.copying:
            return True
        try:
            return self._device.synchronize(self.copying[-1][1], timeout_s)
        except TransportError:
            return True  # `collect` reports the error

    def close(self) -> None:
        """Free the stream and the events; no copy may be in progress."""
        for event in self._events:
            self._device.destroy_event(event)
        self._device.destroy_stream(self._stream)


__all__ = ["Relay", "Slot"]

"""A transport that passes slices of some rails through another GPU's memory (NCCL's PXN).

`PxnTransport` wraps another `TransportPart`. On rails for which `use` set a `Relay`, an outgoing
slice of device memory is copied to a slot near the NIC and sent from the slot; an incoming slice
lands in a slot and is copied to its landing place. All other slices and calls are forwarded.

Theory of operation
-------------------
``isend``: the slice is copied to a slot. When the copy is done, the inner transport sends the
slot's view. Later sends on the path wait behind it, in order. `Sent` frees the slot.

``irecv``: the inner transport announces a slot to the peer. The `Arrived` event of the slot, and
every later event of the path, is held until the slot was copied to the landing place. `Fenced` is
held until no copy of the path is in progress, including copies of slices that were dropped.

If no slot is free or large enough, a slice travels directly. Each end of a path decides this
independently, for each slice.

*Confirmations.* A copy from a slot may fail. The inner transport must therefore not confirm by
itself a slice that lands in a slot. The same applies to a direct slice that is announced while an
earlier slice still has to be copied from its slot. For such slices `irecv` does not pass on
``ack``. Every slice that the inner transport confirmed has thus arrived, and the arrival of this
slice is always reported.

*A failed copy* is reported as the path's `Failed`, with the device's status. Nothing is lost: the
slice was not sent, or its arrival was not reported, and it is replayed as after any failure of a
path. The relay provides no more slots, so the path sends directly when it is up again. (An
exception would end the communicator, although it can continue without the PXN route.)

Invariants: the events of a path keep their order; after `Fenced` no copy of the path accesses
memory; a slot is returned exactly once.

References
----------
NVIDIA, "Doubling all2all Performance with NVIDIA Collective Communication Library 2.12", 2022.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from r2ccl.device.views import is_device_view
from r2ccl.errors import TransportError
from r2ccl.gpu.pxn.relay import Relay, Slot
from r2ccl.transport.base import (
    Arrived,
    Endpoint,
    Event,
    Failed,
    Fenced,
    Frame,
    MemoryUse,
    Registered,
    Sent,
)
from r2ccl.transport.mixed import TransportPart
from r2ccl.types import PathKey, ProbeKey

_log = logging.getLogger(__name__)

#: Longest wait of `close` for copies, in seconds. A copy takes well under a millisecond.
_CLOSE_TIMEOUT_S = 1.0


class _Send(NamedTuple):
    """An ``isend`` that waits for its copy to ``slot`` or, if that is None, for earlier sends."""

    frame: Frame
    view: memoryview
    token: object
    is_replay: bool
    slot: Slot | None


class _Landed(NamedTuple):
    """A slice that arrived in a slot and is being copied to its landing place."""

    event: Arrived
    slot: Slot


#: Channel and number of a slice.
_Name: TypeAlias = "tuple[int, int]"


class _PathState:
    """Slices in progress on one path."""

    __slots__ = ("has_failed", "held", "landing", "ncopies", "path", "sending", "waiting")

    def __init__(self, path: PathKey) -> None:
        self.path = path
        #: Sends that wait for a copy or for earlier sends, in order.
        self.waiting: deque[_Send] = deque()
        #: Slots that the NIC reads; slots that the NIC writes, with the regions to copy to.
        self.sending: dict[_Name, Slot] = {}
        self.landing: dict[_Name, tuple[Slot, memoryview]] = {}
        #: Events that cannot be reported yet, in order.
        self.held: deque[Event | _Landed] = deque()
        #: Copies in progress, including those of dropped slices.
        self.ncopies = 0
        #: True if `Failed` was reported, or is in ``held``.
        self.has_failed = False

    @property
    def is_idle(self) -> bool:
        """True if no slice, copy or event of the path is pending, and the path has not failed."""
        busy = self.waiting or self.sending or self.landing or self.held
        return not (busy or self.ncopies or self.has_failed)

    def drop(self) -> None:
        """Drop all waiting sends, and give their slots back to the relays."""
        for item in self.waiting:
            if item.slot is not None:
                item.slot.relay.give(item.slot)
        self.waiting.clear()

    def give_back(self) -> None:
        """Return to the relays the slots that the inner transport used; called after the fence."""
        for slot in (*self.sending.values(), *(slot for slot, _ in self.landing.values())):
            slot.relay.give(slot)
        self.sending.clear()
        self.landing.clear()


class PxnTransport:
    """A `TransportPart` that wraps another part, and relays some slices through another GPU.

    Parameters
    ----------
    inner : TransportPart
        Wrapped transport, which `close` closes. The memory of slices and slots must be registered
        with its NICs.

    Notes
    -----
    As long as no rail has a relay, all calls are forwarded to `inner` unchanged.
    """

    def __init__(self, inner: TransportPart) -> None:
        self.nrails = inner.nrails
        self._inner = inner
        self._relays: dict[int, Relay] = {}
        self._states: dict[PathKey, _PathState] = {}
        #: Relays with copies in progress; paths whose held events or waiting sends may continue.
        self._copying: dict[Relay, None] = {}
        self._touched: dict[_PathState, None] = {}

    def use(self, rail: int, relay: Relay | None) -> None:
        """Relay slices of `rail` through `relay` from now on; None stops relaying.

        Slices in progress are not affected. Call this method only in the data loop. Several rails
        may use the same relay. The relay is borrowed until `close`, or until no rail uses it and no
        slice in progress uses its slots.
        """
        if relay is not None:
            self._relays[rail] = relay
            return
        self._relays.pop(rail, None)
        # The next `poll` removes the states of idle paths.
        self._touched.update(
            (state, None) for path, state in self._states.items() if path.rail == rail
        )

    @property
    def is_busy(self) -> bool:
        """True if `poll` has work that no file descriptor signals, such as the end of a copy."""
        return bool(self._copying or self._touched)

    # Slices

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: object, is_replay: bool = False
    ) -> None:
        """Implement `Transport.isend`; relay a slice in device memory if a slot is free.

        A replayed slice overtakes slices that the inner transport has queued, but not sends that
        wait for a copy. Nothing is sent on a path that has failed.
        """
        state = self._states.get(path)
        slot = None
        if token is not None and path.rail in self._relays and self.is_open(path):
            slot = self._take(path.rail, view)
        if slot is not None:
            state = self._state(path)
            if not self._begin(state, slot, view, is_filling=True):
                return
        elif state is None or (not state.waiting and not state.has_failed):
            self._inner.isend(path, frame, view, token, is_replay)
            return
        if not state.has_failed:
            state.waiting.append(_Send(frame, view, token, is_replay, slot))

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        """Implement `Transport.irecv`; relay a slice for device memory if a slot is free.

        The slice is not announced on a path that has failed.
        """
        state = self._states.get(path)
        slot = None
        if path.rail in self._relays and self.is_open(path):
            slot = self._take(path.rail, region)
        if slot is not None:
            state = self._state(path)
            state.landing[frame.channel, frame.seq] = (slot, region)
            self._inner.irecv(path, frame, slot.view(len(region)))
        elif state is None:
            self._inner.irecv(path, frame, region, ack)
        elif not state.has_failed:
            # `ack` would confirm earlier slices too, whose copies may fail.
            is_proof = not state.landing and not state.held
            self._inner.irecv(path, frame, region, ack if is_proof else 0)

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """Implement `Transport.confirm`; do nothing on a path that has failed."""
        state = self._states.get(path)
        if state is None or not state.has_failed:
            self._inner.confirm(path, channel, ack)

    def flush(self) -> None:
        """Forward `Transport.flush`."""
        self._inner.flush()

    def _take(self, rail: int, memory: memoryview) -> Slot | None:
        """Return a slot for the slice in `memory`; None if the slice cannot be relayed now."""
        if not len(memory) or not is_device_view(memory):
            return None
        return self._relays[rail].take(len(memory))

    def _state(self, path: PathKey) -> _PathState:
        state = self._states.get(path)
        if state is None:
            state = self._states[path] = _PathState(path)
        return state

    def _begin(
        self, state: _PathState, slot: Slot, memory: memoryview, *, is_filling: bool
    ) -> bool:
        """Begin a copy between `memory` and `slot`; if the device fails, fail the path.

        With `is_filling` copy to the slot, otherwise from it. Return whether the copy was begun.
        """
        relay = slot.relay
        slot.owner = state
        try:
            if is_filling:
                relay.copy_in(slot, memory)
            else:
                relay.copy_out(slot, memory)
        except TransportError as exc:
            relay.give(slot)
            self._fail(state, exc)
            return False
        state.ncopies += 1
        self._copying[relay] = None
        return True

    # Paths

    def is_open(self, path: PathKey) -> bool:
        """Implement `Transport.is_open`; return False also after a copy for the path failed."""
        state = self._states.get(path)
        return (state is None or not state.has_failed) and self._inner.is_open(path)

    def fence(self, path: PathKey) -> None:
        """Implement `Transport.fence`; drop the sends that wait for a copy."""
        state = self._states.get(path)
        if state is not None:
            state.drop()
        self._inner.fence(path)

    def _fail(self, state: _PathState, error: TransportError) -> None:
        """Report a failed copy if the path is still open; in any case, drop the waiting sends."""
        if self.is_open(state.path):
            state.has_failed = True
            detail = (
                f"the copy through another GPU's memory failed ({error}); the path will not use "
                "that GPU again; check the driver's messages about it (dmesg, Xid)"
            )
            state.held.append(Failed(state.path, error.status, detail))
            self._touched[state] = None
        state.drop()

    # Polling

    def poll(self, timeout_s: float) -> list[Event]:
        """Implement `Transport.poll`; do not sleep while `is_busy` is True."""
        if not self._states:
            return self._inner.poll(timeout_s)
        if self._copying:
            self._collect()
        events: list[Event] = []
        for event in self._inner.poll(0.0 if self.is_busy else timeout_s):
            path: Any = getattr(event, "path", None)  # events of rails and probes have no path
            state = self._states.get(path)
            if state is None:
                events.append(event)
            else:
                self._hold(state, event)
        touched, self._touched = self._touched, {}
        for state in touched:
            self._release(state, events)
        return events

    def _collect(self) -> None:
        """Collect finished copies, and send the slices that waited for them."""
        for relay in tuple(self._copying):
            for slot in relay.collect():
                slot.owner.ncopies -= 1
                self._touched[slot.owner] = None
            if not relay.is_busy:
                del self._copying[relay]
        has_sent = False
        for state in tuple(self._touched):
            has_sent |= self._send_waiting(state)
        if has_sent:
            self._inner.flush()  # the caller's own flush came before these sends

    def _send_waiting(self, state: _PathState) -> bool:
        """Send slices up to the first whose copy is in progress or failed.

        A failed copy fails the path. If the path is not open, drop all slices. Return whether any
        slice was sent.
        """
        if not self.is_open(state.path):
            state.drop()
        has_sent = False
        while state.waiting and not (state.waiting[0].slot and state.waiting[0].slot.is_copying):
            frame, view, token, is_replay, slot = state.waiting.popleft()
            if slot is not None:
                if slot.error is not None:
                    slot.relay.give(slot)
                    self._fail(state, slot.error)
                    break
                state.sending[frame.channel, frame.seq] = slot
                view = slot.view(len(view))
            self._inner.isend(state.path, frame, view, token, is_replay)
            has_sent = True
        return has_sent

    def _hold(self, state: _PathState, event: Any) -> None:
        """Append an event of the inner transport to the held events of its path.

        Begin the copy of a slice that arrived in a slot, and free the slots of slices sent. Drop a
        `Failed` event if the path has failed already.
        """
        self._touched[state] = None
        kind = type(event)
        if kind is Arrived:
            name = event.frame.channel, event.frame.seq
            if event.payload is None and name in state.landing:
                slot, region = state.landing.pop(name)
                if self._begin(state, slot, region, is_filling=False):
                    state.held.append(_Landed(event, slot))
                return
            if event.payload is not None and state.held:
                event.payload = memoryview(bytes(event.payload))  # borrowed until the next poll
        elif kind is Sent:
            sent = state.sending.pop((event.channel, event.seq), None)
            if sent is not None:
                sent.relay.give(sent)
        elif kind is Failed:
            state.drop()
            if state.has_failed:
                return
            state.has_failed = True
        elif kind is Fenced:
            state.give_back()
        state.held.append(event)

    def _release(self, state: _PathState, events: list[Event]) -> None:
        """Append to `events` the held events of a path that can be reported now."""
        held = state.held
        while held:
            event = held[0]
            if isinstance(event, _Landed):
                if event.slot.is_copying:
                    return
                held.popleft()
                event.slot.relay.give(event.slot)
                if event.slot.error is None:
                    events.append(event.event)
                else:
                    self._fail(state, event.slot.error)
                continue
            if type(event) is Fenced:
                if state.ncopies:
                    return
                del self._states[state.path]
                self._touched.pop(state, None)
            events.append(event)
            held.popleft()
        if state.path.rail not in self._relays and state.is_idle and state.path in self._states:
            del self._states[state.path]

    # Forwarded unchanged

    def joins(self, rail: int) -> bool:
        """Forward `Transport.joins`."""
        return self._inner.joins(rail)

    def offer(self, key: PathKey | ProbeKey) -> Endpoint:
        """Forward `Transport.offer`."""
        return self._inner.offer(key)

    def open(self, path: PathKey, endpoint: Any) -> None:
        """Forward `Transport.open`."""
        self._inner.open(path, endpoint)

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Forward `Transport.allocate`."""
        return self._inner.allocate(nbytes)

    def register(self, memory: npt.NDArray[np.uint8]) -> Registered:
        """Forward `Transport.register`."""
        return self._inner.register(memory)

    def register_device(self, address: int, nbytes: int) -> Registered:
        """Forward `Transport.register_device`."""
        return self._inner.register_device(address, nbytes)

    def wake(self) -> None:
        """Forward `Transport.wake`."""
        self._inner.wake()

    def memory_use(self) -> MemoryUse:
        """Forward `Transport.memory_use`."""
        return self._inner.memory_use()

    def has_unsent(self) -> bool:
        """Forward `Transport.has_unsent`."""
        return self._inner.has_unsent()

    def is_stuck(self, path: PathKey) -> bool:
        """Forward `Transport.is_stuck`."""
        return self._inner.is_stuck(path)

    def probe(self, key: ProbeKey) -> None:
        """Forward `Transport.probe`."""
        self._inner.probe(key)

    def fileno(self) -> int:
        """Forward `TransportPart.fileno`."""
        return self._inner.fileno()

    def arm(self) -> None:
        """Forward `TransportPart.arm`."""
        self._inner.arm()

    def limit_s(self, timeout_s: float) -> float:
        """Implement `TransportPart.limit_s`; return 0 while `is_busy` is True."""
        return 0.0 if self.is_busy else self._inner.limit_s(timeout_s)

    def descriptors(self) -> list[int]:
        """Forward `Transport.descriptors`."""
        return self._inner.descriptors()

    def close(self) -> None:
        """Close the inner transport, then wait up to 1 s per relay and direction for copies.

        The relays can be freed afterwards, unless a warning was logged that copies did not end.
        """
        for state in self._states.values():
            state.drop()
        self._inner.close()
        # `sum`, unlike `all`, also waits for the relays behind one that hangs.
        nhanging = sum(not relay.drain(_CLOSE_TIMEOUT_S) for relay in self._copying)
        if nhanging:
            _log.warning(
                "copies through another GPU's memory did not end within %g s after the paths were "
                "closed: a GPU may hang; end the process, and check dmesg for driver errors (Xid)",
                _CLOSE_TIMEOUT_S,
            )
        self._collect()


__all__ = ["PxnTransport"]

"""A transport whose slices take the way through another GPU's memory: NCCL's PXN.

`RelayedTransport` is a `TransportPart` around another one. On rails it was told to, slices of
device memory are copied to a slot of a `Relay`, beside the NIC, and sent from there, or land there
and are copied on; all else passes unchanged. Must not import sockets, verbs or a device's driver.

Theory of operation
-------------------
``isend``: a slot is filled; once the copy is known to be done, the inner transport gets the slot's
view. What is sent on the path meanwhile waits behind it, in order. `Sent` gives the slot back.

``irecv``: the inner transport names a slot to the peer. Its `Arrived` is held until the slot was
copied to the region, and with it every later event of the path. `Fenced` is held until no copy of
the path is under way, those of slices that were dropped included.

Where no slot is free or large enough, slices go directly: both ends of a path decide on their own,
for each slice.

*Confirmations.* The inner transport may not confirm by itself what lands in a slot, nor what lands
directly behind such a slice, since a copy may fail: ``ack`` is withheld from it then. So what it
did confirm has arrived, and is always handed on.

*A copy that fails* is the path's `Failed`, with the device's status. Nothing is lost: what was to
be sent was not, what arrived is not reported, and both are replayed like all slices of a path that
broke. The relay is used no more, so that the path is back, directly, after its repair. To raise
instead would end the communicator for the loss of a way that it can do without.

Invariants: the events of a path keep their order; after `Fenced` no copy of the path reads or
writes anything; a slot is given back once, whatever becomes of its slice.

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
    Registered,
    Sent,
)
from r2ccl.transport.mixed import TransportPart
from r2ccl.types import PathKey, ProbeKey

_log = logging.getLogger(__name__)

#: How long `close` waits for copies, which take well under a millisecond each.
_PATIENCE_S = 1.0


class _Send(NamedTuple):
    """An ``isend`` that waits; ``slot`` None: for those before it alone."""

    frame: Frame
    view: memoryview
    token: object
    is_replay: bool
    slot: Slot | None


class _Landed(NamedTuple):
    """A slice that arrived in a slot, and is copied on."""

    event: Arrived
    slot: Slot


#: Channel and number of a slice.
_Name: TypeAlias = "tuple[int, int]"


class _Way:
    """What is relayed on one path."""

    __slots__ = ("has_failed", "held", "landing", "ncopies", "path", "sending", "waiting")

    def __init__(self, path: PathKey) -> None:
        self.path = path
        #: Slices in their order, from the first whose copy is under way.
        self.waiting: deque[_Send] = deque()
        #: Slots the NIC reads, and slots it writes, with the regions they stand in for.
        self.sending: dict[_Name, Slot] = {}
        self.landing: dict[_Name, tuple[Slot, memoryview]] = {}
        #: Events in their order, from the first that cannot be handed on.
        self.held: deque[Event | _Landed] = deque()
        #: Copies under way, also of slices that were dropped.
        self.ncopies = 0
        #: `Failed` was reported, or is in ``held``.
        self.has_failed = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is left."""
        busy = self.waiting or self.sending or self.landing or self.held
        return not (busy or self.ncopies or self.has_failed)

    def drop(self) -> None:
        """Forget what waits to be sent."""
        for item in self.waiting:
            if item.slot is not None:
                item.slot.relay.give(item.slot)
        self.waiting.clear()

    def give_back(self) -> None:
        """The inner transport knows of no slot any more."""
        for slot in (*self.sending.values(), *(slot for slot, _ in self.landing.values())):
            slot.relay.give(slot)
        self.sending.clear()
        self.landing.clear()


class RelayedTransport:
    """`TransportPart` around another, some of whose slices are relayed.

    Parameters
    ----------
    inner : TransportPart
        Owned. All memory concerned is registered with its NICs: the slices', and the slots'.

    Notes
    -----
    Until `use` is called, and after what was under way when a use ended, calls only pass.
    """

    def __init__(self, inner: TransportPart) -> None:
        self.nrails = inner.nrails
        self._inner = inner
        self._relays: dict[int, Relay] = {}
        self._ways: dict[PathKey, _Way] = {}
        #: Relays with copies under way; ways on which something may go on.
        self._copying: dict[Relay, None] = {}
        self._touched: dict[_Way, None] = {}

    def use(self, rail: int, relay: Relay | None) -> None:
        """Relay the slices of `rail` from now on; None: no more.

        What is under way ends as it began. For the owner of the data loop. `relay` may serve
        several rails. Whoever made it frees it after `close`, or after a fence of all the paths
        it was used on, if its use has ended.
        """
        if relay is not None:
            self._relays[rail] = relay
            return
        self._relays.pop(rail, None)
        # One that is idle is forgotten, so that nothing is looked at any more.
        self._touched.update((way, None) for path, way in self._ways.items() if path.rail == rail)

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do of which no descriptor tells: a copy ends silently."""
        return bool(self._copying or self._touched)

    # Slices

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: object, is_replay: bool = False
    ) -> None:
        """See `Transport.isend`; a replay overtakes what the inner transport has not sent yet."""
        way = self._ways.get(path)
        slot = None
        if token is not None and path.rail in self._relays and self.is_open(path):
            slot = self._take(path.rail, view)
        if slot is not None:
            way = self._way(path)
            if not self._begin(way, slot, view, is_filling=True):
                return
        elif way is None or (not way.waiting and not way.has_failed):
            self._inner.isend(path, frame, view, token, is_replay)
            return
        if not way.has_failed:
            way.waiting.append(_Send(frame, view, token, is_replay, slot))

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        """See `Transport.irecv`."""
        way = self._ways.get(path)
        slot = None
        if path.rail in self._relays and self.is_open(path):
            slot = self._take(path.rail, region)
        if slot is not None:
            way = self._way(path)
            way.landing[frame.channel, frame.seq] = (slot, region)
            self._inner.irecv(path, frame, slot.view(len(region)))
        elif way is None:
            self._inner.irecv(path, frame, region, ack)
        elif not way.has_failed:
            # A confirmation is for the slices before it too, whose copies may fail.
            is_proof = not way.landing and not way.held
            self._inner.irecv(path, frame, region, ack if is_proof else 0)

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """See `Transport.confirm`."""
        way = self._ways.get(path)
        if way is None or not way.has_failed:
            self._inner.confirm(path, channel, ack)

    def flush(self) -> None:
        """See `Transport.flush`."""
        self._inner.flush()

    def _take(self, rail: int, memory: memoryview) -> Slot | None:
        """Take a slot for a slice, if it can be relayed now."""
        if not len(memory) or not is_device_view(memory):
            return None
        return self._relays[rail].take(len(memory))

    def _way(self, path: PathKey) -> _Way:
        way = self._ways.get(path)
        if way is None:
            way = self._ways[path] = _Way(path)
        return way

    def _begin(self, way: _Way, slot: Slot, memory: memoryview, *, is_filling: bool) -> bool:
        """Begin a copy; False if it failed, the path with it."""
        relay = slot.relay
        slot.owner = way
        try:
            if is_filling:
                relay.copy_in(slot, memory)
            else:
                relay.copy_out(slot, memory)
        except TransportError as exc:
            relay.give(slot)
            self._fail(way, exc)
            return False
        way.ncopies += 1
        self._copying[relay] = None
        return True

    # Paths

    def is_open(self, path: PathKey) -> bool:
        """See `Transport.is_open`."""
        way = self._ways.get(path)
        return (way is None or not way.has_failed) and self._inner.is_open(path)

    def fence(self, path: PathKey) -> None:
        """See `Transport.fence`."""
        way = self._ways.get(path)
        if way is not None:
            way.drop()
        self._inner.fence(path)

    def _fail(self, way: _Way, error: TransportError) -> None:
        """Report a copy's failure, unless the path is out of use already."""
        if self.is_open(way.path):
            way.has_failed = True
            detail = (
                f"the copy through another GPU's memory failed ({error}); the path will go without "
                "it; look at the driver's messages (dmesg, Xid) about that GPU"
            )
            way.held.append(Failed(way.path, error.status, detail))
            self._touched[way] = None
        way.drop()

    # Polling

    def poll(self, timeout_s: float) -> list[Event]:
        """See `Transport.poll`; does not sleep while copies are under way."""
        if not self._ways:
            return self._inner.poll(timeout_s)
        if self._copying:
            self._collect()
        events: list[Event] = []
        for event in self._inner.poll(0.0 if self.is_busy else timeout_s):
            path: Any = getattr(event, "path", None)  # of rails and probes there is none
            way = self._ways.get(path)
            if way is None:
                events.append(event)
            else:
                self._sort(way, event)
        touched, self._touched = self._touched, {}
        for way in touched:
            self._hand_on(way, events)
        return events

    def _collect(self) -> None:
        """See which copies are over, and send what waited for them."""
        for relay in tuple(self._copying):
            for slot in relay.collect():
                slot.owner.ncopies -= 1
                self._touched[slot.owner] = None
            if not relay.is_busy:
                del self._copying[relay]
        has_sent = False
        for way in tuple(self._touched):
            has_sent |= self._send_waiting(way)
        if has_sent:
            self._inner.flush()  # the caller's own came before

    def _send_waiting(self, way: _Way) -> bool:
        """Give the inner transport what is copied, up to the first that is not."""
        if not self.is_open(way.path):
            way.drop()
        has_sent = False
        while way.waiting and not (way.waiting[0].slot and way.waiting[0].slot.is_copying):
            frame, view, token, is_replay, slot = way.waiting.popleft()
            if slot is not None:
                if slot.error is not None:
                    slot.relay.give(slot)
                    self._fail(way, slot.error)
                    break
                way.sending[frame.channel, frame.seq] = slot
                view = slot.view(len(view))
            self._inner.isend(way.path, frame, view, token, is_replay)
            has_sent = True
        return has_sent

    def _sort(self, way: _Way, event: Any) -> None:
        """Take an event of the inner transport behind those of its path that are held."""
        self._touched[way] = None
        kind = type(event)
        if kind is Arrived:
            name = event.frame.channel, event.frame.seq
            if event.payload is None and name in way.landing:
                slot, region = way.landing.pop(name)
                if self._begin(way, slot, region, is_filling=False):
                    way.held.append(_Landed(event, slot))
                return
            if event.payload is not None and way.held:
                event.payload = memoryview(bytes(event.payload))  # borrowed for one poll alone
        elif kind is Sent:
            sent = way.sending.pop((event.channel, event.seq), None)
            if sent is not None:
                sent.relay.give(sent)
        elif kind is Failed:
            way.drop()
            if way.has_failed:
                return
            way.has_failed = True
        elif kind is Fenced:
            way.give_back()
        way.held.append(event)

    def _hand_on(self, way: _Way, events: list[Event]) -> None:
        """Add what may be reported of a way."""
        held = way.held
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
                    self._fail(way, event.slot.error)
                continue
            if type(event) is Fenced:
                if way.ncopies:
                    return
                del self._ways[way.path]
                self._touched.pop(way, None)
            events.append(event)
            held.popleft()
        if way.path.rail not in self._relays and way.is_idle and way.path in self._ways:
            del self._ways[way.path]

    # What only passes

    def joins(self, rail: int) -> bool:
        """See `Transport.joins`."""
        return self._inner.joins(rail)

    def offer(self, key: PathKey | ProbeKey) -> Endpoint:
        """See `Transport.offer`."""
        return self._inner.offer(key)

    def open(self, path: PathKey, endpoint: Any) -> None:
        """See `Transport.open`."""
        self._inner.open(path, endpoint)

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """See `Transport.allocate`."""
        return self._inner.allocate(nbytes)

    def register(self, memory: npt.NDArray[np.uint8]) -> Registered:
        """See `Transport.register`."""
        return self._inner.register(memory)

    def register_device(self, address: int, nbytes: int) -> Registered:
        """See `Transport.register_device`."""
        return self._inner.register_device(address, nbytes)

    def wake(self) -> None:
        """See `Transport.wake`."""
        self._inner.wake()

    def has_unsent(self) -> bool:
        """See `Transport.has_unsent`."""
        return self._inner.has_unsent()

    def is_stuck(self, path: PathKey) -> bool:
        """See `Transport.is_stuck`."""
        return self._inner.is_stuck(path)

    def probe(self, key: ProbeKey) -> None:
        """See `Transport.probe`."""
        self._inner.probe(key)

    def fileno(self) -> int:
        """See `TransportPart.fileno`."""
        return self._inner.fileno()

    def arm(self) -> None:
        """See `TransportPart.arm`."""
        self._inner.arm()

    def limit_s(self, timeout_s: float) -> float:
        """See `TransportPart.limit_s`: nothing sleeps while copies are under way."""
        return 0.0 if self.is_busy else self._inner.limit_s(timeout_s)

    def descriptors(self) -> list[int]:
        """See `Transport.descriptors`."""
        return self._inner.descriptors()

    def close(self) -> None:
        """See `Transport.close`; waits for the copies, so that relays may be freed after it."""
        for way in self._ways.values():
            way.drop()
        self._inner.close()
        if not all(relay.drain(_PATIENCE_S) for relay in self._copying):
            _log.warning(
                "copies through another GPU's memory are not over %g s after the paths were "
                "closed; the GPU hangs: end the process, and look at dmesg",
                _PATIENCE_S,
            )
        self._collect()


__all__ = ["RelayedTransport"]

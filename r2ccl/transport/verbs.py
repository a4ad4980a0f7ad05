"""Verbs transport: reliable queue pairs over RDMA NICs, one device a rail.

Every device is a rail; a path is one queue pair (`r2ccl.transport.queuepair`). Slices go from
registered memory into registered memory; memory that is not registered is copied through buffers
that are. One completion queue a device is polled while there is work; when there is none, its
channel and the device's async events wake an epoll.

Fencing takes the queue pair to ERR and waits for the markers behind everything posted: only then
no late write can land. A device that never returns them loses the queue pair at a deadline.

Sees no pyverbs itself. Invariant: nothing is reported of a path after its `Fenced`, and what
completed before it was fenced counts.
"""

from __future__ import annotations

import enum
import logging
import os
import select
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from r2ccl.clock import Clock, monotonic
from r2ccl.errors import TransportError
from r2ccl.transport.base import (
    Arrived,
    Cleared,
    Confirmed,
    Event,
    Failed,
    Fenced,
    Frame,
    Joined,
    RailChanged,
    Sent,
)
from r2ccl.transport.device import BATCH, Device
from r2ccl.transport.queuepair import ALIGN, NLANDINGS, NMESSAGES, QueuePair, Tag, Work
from r2ccl.transport.registration import Registration, RegistrationCache
from r2ccl.transport.ring import COUNT_MODULUS
from r2ccl.transport.status import describe_status, event_name, status_name
from r2ccl.types import PathKey

_log = logging.getLogger(__name__)

#: kind, flags, channel, nbytes, seq, ack, op, signature, credit, number, address, rkey
_HEADER = struct.Struct("<BBHIQQQQIIQI")
_HEADER_NBYTES = _HEADER.size
_EAGER, _CLEAR, _CONFIRM = 1, 2, 3
#: Largest eager messages the ring of one direction holds.
_RING_MESSAGES = 8
#: Consumed messages, and the part of the ring they take, that are told at once, without a message
#: of this end's to carry it: the largest message must always find room in what is left.
_CREDIT_EVERY = NMESSAGES // 4
_CREDIT_PART = 4
#: A queue pair that has not returned its markers by then is destroyed.
_DRAIN_TIMEOUT_S = 1.0
_PORT_EVENTS = {"PORT_ERR": False, "DEVICE_FATAL": False, "PORT_ACTIVE": True}

Array = npt.NDArray[np.uint8]
#: Where a peer lets a slice land: its number, address and key.
Token = tuple[int, int, int]


class _State(enum.Enum):
    JOINING = "joining"
    LIVE = "live"
    FAILED = "failed"
    DRAINING = "draining"


class _Reach(NamedTuple):
    """How a NIC reaches a slice: in its own memory, pinned, or in a buffer in its place."""

    address: int
    lkey: int
    rkey: int
    registration: Registration
    buffer: Array | None


class _Place:
    """A landing place."""

    __slots__ = ("frame", "reach", "region")

    def __init__(self, frame: Frame, region: memoryview, reach: _Reach) -> None:
        self.frame = frame
        self.region = region
        self.reach = reach


class _Outgoing:
    """A slice that waits for room in the send queue."""

    __slots__ = ("frame", "token", "view")

    def __init__(self, frame: Frame, view: memoryview, token: Token) -> None:
        self.frame = frame
        self.view = view
        self.token = token


class VerbsEndpoint:
    """One end of a path, with everything under way on it; `Endpoint`."""

    def __init__(self, transport: VerbsTransport, path: PathKey, qp: QueuePair) -> None:
        self.path = path
        self.qp = qp
        self.card = qp.card
        self.state = _State.JOINING
        #: Landing places by number; numbers not in use.
        self.places: dict[int, _Place] = {}
        self.numbers = deque(range(NLANDINGS))
        #: What waits for room: messages, landing places for a number, slices.
        self.small: deque[tuple[bytes | memoryview, ...]] = deque()
        self.unnamed: deque[tuple[Frame, memoryview]] = deque()
        self.bulk: deque[_Outgoing] = deque()
        #: Slices being written, by count.
        self.writing: dict[int, tuple[Frame, _Reach]] = {}
        #: Messages consumed, told, and lent until the next poll with their payload.
        self.consumed = 0
        self.told = 0
        self.lent = 0
        #: Bytes of the ring they take: consumed but not told, and lent.
        self.untold_nbytes = 0
        self.lent_nbytes = 0
        self.is_dirty = False
        #: Confirmation last told, by channel.
        self.acked: dict[int, int] = {}
        #: Events of an end that is not in use yet.
        self.held: list[Event] = []
        self.markers = 0
        self.give_up_s = 0.0
        self._transport = transport

    def join(self, card: bytes, is_caller: bool) -> None:
        """See `Endpoint.join`."""
        self.qp.join(card)
        if is_caller:
            self.qp.hello()

    def close(self) -> None:
        """See `Endpoint.close`."""
        self._transport.discard(self)


class VerbsTransport:
    """`Transport` over RDMA NICs.

    Parameters
    ----------
    rank : int
        This rank, for error messages.
    devices : sequence of Device
        One a rail. Owned.
    registrations : RegistrationCache
        Over the same devices, in the same order.
    eager_nbytes : int
        Largest eager payload.
    timeout, retry_cnt : int
        Of every queue pair, in verbs' own units.
    first_rail : int
        Rail of ``devices[0]``, where other transports have rails too.
    """

    def __init__(
        self,
        rank: int,
        devices: Sequence[Device],
        registrations: RegistrationCache,
        *,
        eager_nbytes: int,
        timeout: int,
        retry_cnt: int,
        first_rail: int = 0,
        clock: Clock = monotonic,
    ) -> None:
        self.nrails = len(devices)
        self._first_rail = first_rail
        self._rank = rank
        self._devices = devices
        self._registrations = registrations
        self._eager_nbytes = eager_nbytes
        self._ring_nbytes = -(-_RING_MESSAGES * (_HEADER_NBYTES + eager_nbytes) // 4096) * 4096
        self._timeout = timeout
        self._retry_cnt = retry_cnt
        self._clock = clock
        self._by_number: list[dict[int, VerbsEndpoint]] = [{} for _ in devices]
        self._by_path: dict[PathKey, VerbsEndpoint] = {}
        self._draining: list[VerbsEndpoint] = []
        self._dirty: list[VerbsEndpoint] = []
        self._lending: list[VerbsEndpoint] = []
        self._buffers: dict[int, list[Array]] = {}
        self._events: list[Event] = []
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._by_fd: dict[int, tuple[int, bool]] = {}
        for rail, device in enumerate(devices):
            for fd, is_async in ((device.channel_fd, False), (device.async_fd, True)):
                self._by_fd[fd] = (rail, is_async)
                self._epoll.register(fd, select.EPOLLIN)

    # Paths

    def joins(self, rail: int) -> bool:
        """Always."""
        return True

    def offer(self, path: PathKey) -> VerbsEndpoint:
        """See `Transport.offer`."""
        device = self._devices[path.rail - self._first_rail]
        device.refresh()
        if not device.is_active():
            raise TransportError(
                f"rank {self._rank}: port {device.port} of {device.name} is not ACTIVE",
                rank=self._rank, peer=path.peer, rail=path.rail, status="PORT_DOWN",
            )  # fmt: skip
        qp = QueuePair(
            device, ring_nbytes=self._ring_nbytes,
            timeout=self._timeout, retry_cnt=self._retry_cnt,
        )  # fmt: skip
        endpoint = VerbsEndpoint(self, path, qp)
        self._by_number[path.rail - self._first_rail][qp.number] = endpoint
        return endpoint

    def open(self, path: PathKey, endpoint: VerbsEndpoint) -> None:
        """Take a joined endpoint into use as `path`."""
        endpoint.state = _State.LIVE
        self._by_path[path] = endpoint
        held, endpoint.held = endpoint.held, []
        self._events += held

    def is_open(self, path: PathKey) -> bool:
        """Whether `path` was opened and not yet failed or fenced."""
        return self._live(path) is not None

    def fence(self, path: PathKey) -> None:
        """Begin to take the local end of `path` out of use."""
        endpoint = self._by_path.pop(path, None)
        if endpoint is None:
            return
        endpoint.state = _State.DRAINING
        endpoint.give_up_s = self._clock() + _DRAIN_TIMEOUT_S
        for queue in (endpoint.small, endpoint.unnamed, endpoint.bulk):
            queue.clear()
        self._draining.append(endpoint)
        try:
            endpoint.qp.flush()
        except TransportError as exc:
            _log.warning("rank %d: %s; it is destroyed", self._rank, exc)
            endpoint.give_up_s = 0.0

    def discard(self, endpoint: VerbsEndpoint) -> None:
        """Free an endpoint's queue pair."""
        if (
            self._by_number[endpoint.path.rail - self._first_rail].pop(endpoint.qp.number, None)
            is not None
        ):
            endpoint.qp.close()
            for place in endpoint.places.values():
                self._release(place.reach)
            for _, reach in endpoint.writing.values():
                self._release(reach)
            endpoint.places.clear()
            endpoint.writing.clear()

    def is_stuck(self, path: PathKey) -> bool:
        """Never: a queue pair that only retransmits breaks by itself."""
        return False

    def close(self) -> None:
        """Destroy every queue pair, then close the devices."""
        for ends in self._by_number:
            for endpoint in list(ends.values()):
                self.discard(endpoint)
        self._by_path.clear()
        self._registrations.close()
        for device in self._devices:
            device.close()
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._wake_fd)

    # Sending

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: Any,
        is_replay: bool = False,
    ) -> None:  # fmt: skip
        """Queue a slice; a replay goes ahead of the slices queued before it."""
        end = self._live(path)
        if end is None:
            return
        if token is None:
            end.small.append((self._header(end, _EAGER, frame, len(view)), view))
            self._events.append(Sent(path, frame.channel, frame.seq))
        else:
            if frame.ack > end.acked.get(frame.channel, 0):  # a slice has no header to carry it
                end.small.append((self._header(end, _CONFIRM, frame, 0),))
            item = _Outgoing(frame, view, token)
            if is_replay:
                end.bulk.appendleft(item)
            else:
                end.bulk.append(item)
        self._mark(end)

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        """Name where slice ``frame.seq`` lands; it is confirmed by the caller alone."""
        end = self._live(path)
        if end is not None:
            end.unnamed.append((frame, region))
            self._mark(end)

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """Confirm the peer's slices of `channel` below `ack`."""
        end = self._live(path)
        if end is not None:
            frame = Frame(channel, 0, ack, 0, 0)
            end.small.append((self._header(end, _CONFIRM, frame, 0),))
            self._mark(end)

    def flush(self) -> None:
        """Post what is queued, as far as the queues have room."""
        dirty, self._dirty = self._dirty, []
        for end in dirty:
            end.is_dirty = False
            if end.state is _State.LIVE:
                try:
                    self._post(end)
                except TransportError as exc:
                    self._fail(end, exc.status, str(exc))

    def allocate(self, nbytes: int) -> Array:
        """Return memory registered with every NIC, for as long as it lives."""
        made = np.empty(max(1, nbytes), np.uint8)
        self._registrations.register(made.ctypes.data, made.nbytes, made)
        return made[:nbytes]

    def register(self, memory: Array) -> Registration:
        """See `Transport.register`."""
        return self._registrations.register(memory.ctypes.data, memory.nbytes, memory)

    def _post(self, end: VerbsEndpoint) -> None:
        while end.unnamed and end.numbers:
            self._name(end, *end.unnamed.popleft())
        while end.small:
            if not end.qp.write_message(end.small[0]):
                return
            end.small.popleft()
        while end.bulk and end.qp.has_room():
            self._write(end, end.bulk.popleft())
        if self._is_credit_due(end) and end.qp.write_credit(end.consumed):
            self._told(end)

    def _name(self, end: VerbsEndpoint, frame: Frame, region: memoryview) -> None:
        """Send the landing place of a slice: the region itself if it is registered."""
        number = end.numbers.popleft()
        reach = self._reach(end, region)
        # What the slice will say of itself; it carries no confirmation of the opposite link.
        expected = Frame(frame.channel, frame.seq, 0, frame.op, frame.signature)
        end.places[number] = _Place(expected, region, reach)
        header = self._header(end, _CLEAR, frame, len(region), number, reach.address, reach.rkey)
        end.small.append((header,))

    def _write(self, end: VerbsEndpoint, item: _Outgoing) -> None:
        reach = self._reach(end, item.view)
        if reach.buffer is not None:
            reach.buffer[: len(item.view)] = np.frombuffer(item.view, np.uint8)
        number, target, rkey = item.token
        source = (reach.address, len(item.view), reach.lkey)
        count = end.qp.write_slice(source, (target, rkey), number)
        end.writing[count] = (item.frame, reach)

    def _reach(self, end: VerbsEndpoint, view: memoryview) -> _Reach:
        """Pin the memory of `view`, or a buffer for it where it is not registered."""
        address = np.frombuffer(view, np.uint8).ctypes.data if len(view) else 0
        found = self._registrations.find(address, len(view)) if len(view) else None
        buffer = None
        if found is None:
            buffer = self._take(len(view))
            address = buffer.ctypes.data
            found = self._registrations.find(address, buffer.nbytes)
            assert found is not None, "buffers stay registered"
        found.pin()
        keys = found.keys(end.path.rail - self._first_rail)
        return _Reach(address + keys.iova_base, keys.lkey, keys.rkey, found, buffer)

    def _release(self, reach: _Reach) -> None:
        reach.registration.unpin()
        if reach.buffer is not None:
            self._buffers.setdefault(reach.buffer.nbytes, []).append(reach.buffer)

    def _take(self, nbytes: int) -> Array:
        size = 1 << max(12, (nbytes - 1).bit_length())
        free = self._buffers.get(size)
        return free.pop() if free else self.allocate(size)

    def _header(
        self, end: VerbsEndpoint, kind: int, frame: Frame, nbytes: int,
        number: int = 0, address: int = 0, rkey: int = 0,
    ) -> bytes:  # fmt: skip
        self._told(end)
        if frame.ack:
            end.acked[frame.channel] = max(frame.ack, end.acked.get(frame.channel, 0))
        return _HEADER.pack(
            kind, 0, frame.channel, nbytes, frame.seq, frame.ack, frame.op, frame.signature,
            end.consumed & 0xFFFFFFFF, number, address, rkey,
        )  # fmt: skip

    # Polling

    def poll(self, timeout_s: float) -> list[Event]:
        """Collect what completed; sleeps up to `timeout_s` if nothing has."""
        self._return_lent()
        self._registrations.drain()
        self._complete()
        if timeout_s > 0 and not self._events:
            self.arm()
            self._complete()  # what came before the notification was asked for
            if self._draining:
                timeout_s = min(timeout_s, _DRAIN_TIMEOUT_S / 10)
        if self._listen(0.0 if self._events else timeout_s):
            self._complete()
        if self._draining:
            self._reap()
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """End a sleeping `poll`, from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def arm(self) -> None:
        """Have `fileno` become readable at the next completion; then poll once more."""
        for device in self._devices:
            device.arm()

    def fileno(self) -> int:
        """Descriptor of all the devices' events."""
        return self._epoll.fileno()

    def _listen(self, timeout_s: float) -> bool:
        """Take what the descriptors announce; True if that was anything."""
        ready = self._epoll.poll(timeout_s)
        for fd, _ in ready:
            if fd == self._wake_fd:
                os.eventfd_read(fd)
                continue
            rail, is_async = self._by_fd[fd]
            if is_async:
                self._on_async(rail)
            else:
                self._devices[rail].disarm()
        return bool(ready)

    def _return_lent(self) -> None:
        """Payloads lent until this poll are consumed."""
        lending, self._lending = self._lending, []
        for end in lending:
            end.consumed += end.lent
            end.untold_nbytes += end.lent_nbytes
            end.lent = end.lent_nbytes = 0
            if self._is_credit_due(end):
                self._mark(end)

    def _is_credit_due(self, end: VerbsEndpoint) -> bool:
        is_many = end.consumed - end.told >= _CREDIT_EVERY
        return is_many or end.untold_nbytes * _CREDIT_PART >= self._ring_nbytes

    def _told(self, end: VerbsEndpoint) -> None:
        end.told = end.consumed
        end.untold_nbytes = 0

    def _complete(self) -> None:
        for device, ends in zip(self._devices, self._by_number, strict=True):
            batch = device.completions()
            while batch:
                self._take_batch(ends, batch)
                batch = device.completions() if len(batch) == BATCH else []

    def _take_batch(self, ends: dict[int, VerbsEndpoint], batch: list[Any]) -> None:
        fresh: dict[VerbsEndpoint, int] = {}
        for completion in batch:
            end = ends.get(completion.qp_num)
            if end is None:
                continue  # of a queue pair that was destroyed
            if completion.status:
                self._on_error(end, completion)
            elif completion.opcode & _RECEIVED:
                fresh[end] = fresh.get(end, 0) + 1
                self._on_received(end, completion.imm_data)
            else:
                self._on_sent(end, completion.wr_id)
        for end, count in fresh.items():
            if end.state in (_State.LIVE, _State.JOINING):
                end.qp.receive(count)

    def _on_sent(self, end: VerbsEndpoint, number: int) -> None:
        work, count = end.qp.retire(number)
        if work is Work.SLICE:
            frame, reach = end.writing.pop(count)
            self._release(reach)
            self._report(end, Sent(end.path, frame.channel, frame.seq))
        elif work is Work.HELLO:
            self._events.append(Joined(end.path))
        if end.small or end.bulk or end.unnamed:
            self._mark(end)

    def _on_received(self, end: VerbsEndpoint, imm_data: int) -> None:
        tagged = end.qp.untag(imm_data)
        if tagged is None:
            self._fail(end, "EBADMSG", f"immediate data {imm_data:#x} is not of this queue pair")
            return
        tag, value = tagged
        if tag is Tag.MESSAGE:
            self._on_message(end, value * ALIGN)
        elif tag is Tag.CREDIT:
            end.qp.credit(value)
            self._mark(end)
        else:
            place = end.places.pop(value, None)
            if place is None:
                self._fail(end, "EBADMSG", f"a slice for landing place {value}, which is not named")
                return
            end.numbers.append(value)
            if place.reach.buffer is not None:
                place.region[:] = place.reach.buffer[: len(place.region)].data
            self._release(place.reach)
            self._report(end, Arrived(end.path, place.frame, None, self._clock()))
            if end.unnamed:
                self._mark(end)

    def _on_message(self, end: VerbsEndpoint, offset: int) -> None:
        if offset + _HEADER_NBYTES > self._ring_nbytes:
            self._fail(end, "EBADMSG", f"message at offset {offset} of the ring")
            return
        (kind, _, channel, nbytes, seq, ack, op, signature, credit, number, address,
         rkey) = _HEADER.unpack_from(end.qp.inbox, offset)  # fmt: skip
        end.qp.credit(credit % COUNT_MODULUS)
        if end.small:
            self._mark(end)
        if not end.lent:
            self._lending.append(end)
        end.lent += 1
        payload_nbytes = nbytes if kind == _EAGER else 0
        end.lent_nbytes += -(-(_HEADER_NBYTES + payload_nbytes) // ALIGN) * ALIGN
        event: Event
        if kind == _EAGER and nbytes <= self._eager_nbytes:
            start = offset + _HEADER_NBYTES
            payload = end.qp.inbox[start : start + nbytes]
            event = Arrived(end.path, Frame(channel, seq, ack, op, signature), payload,
                            self._clock())  # fmt: skip
        elif kind == _CLEAR:
            frame = Frame(channel, seq, ack, op, signature)
            event = Cleared(end.path, frame, nbytes, (number, address, rkey))
        elif kind == _CONFIRM:
            event = Confirmed(end.path, channel, ack)
        else:
            self._fail(end, "EBADMSG", f"message of kind {kind} with {nbytes} bytes")
            return
        self._report(end, event)

    def _on_error(self, end: VerbsEndpoint, completion: Any) -> None:
        status, number = completion.status, completion.wr_id
        if end.state is _State.DRAINING:
            if number >> _MARKER_SHIFT == Work.MARKER:
                end.markers += 1
                if end.markers == 2:
                    self._drained(end)
            return
        detail = describe_status(status, completion.vendor_err)
        if end.state is _State.JOINING:
            self._events.append(Joined(end.path, detail))
            end.state = _State.FAILED
        else:
            self._fail(end, status_name(status), detail)

    def _on_async(self, rail: int) -> None:
        for number in self._devices[rail].port_events():
            name = event_name(number)
            _log.info("rank %d: %s: %s", self._rank, self._devices[rail].name, name)
            if name in _PORT_EVENTS:
                is_up = _PORT_EVENTS[name]
                self._events.append(RailChanged(self._first_rail + rail, is_up))

    def _fail(self, end: VerbsEndpoint, status: str, detail: str) -> None:
        if end.state is _State.LIVE:
            end.state = _State.FAILED
            self._events.append(Failed(end.path, status, detail))

    def _reap(self) -> None:
        """Destroy queue pairs that do not return their markers."""
        now = self._clock()
        for end in [end for end in self._draining if now >= end.give_up_s]:
            self._drained(end)

    def _drained(self, end: VerbsEndpoint) -> None:
        self._draining.remove(end)
        self.discard(end)
        self._events.append(Fenced(end.path))

    def _report(self, end: VerbsEndpoint, event: Event) -> None:
        (end.held if end.state is _State.JOINING else self._events).append(event)

    def _live(self, path: PathKey) -> VerbsEndpoint | None:
        end = self._by_path.get(path)
        return end if end is not None and end.state is _State.LIVE else None

    def _mark(self, end: VerbsEndpoint) -> None:
        if not end.is_dirty:
            end.is_dirty = True
            self._dirty.append(end)


#: Bit of verbs' opcodes that marks a receive; where a request's kind is in its number.
_RECEIVED = 1 << 7
_MARKER_SHIFT = 54

__all__ = ["VerbsEndpoint", "VerbsTransport"]

"""Verbs transport: reliable queue pairs over RDMA NICs, one device per rail.

Each end of a path is one queue pair (`r2ccl.transport.verbs.queuepair`). The NIC writes cleared
slices from registered memory to registered memory; slices in other host memory are copied through
registered buffers. Each device has one completion queue, which is polled while there is work. While
there is none, ``poll`` waits in epoll for the completion channels and async events of all devices.

A fence takes the queue pair to ERR and waits for two markers, the last requests of its send queue
and of its receive queue: once both have completed, no late write can land. If a device
does not complete them by a deadline, the queue pair is destroyed.

Invariants: after `Fenced`, no event of the fenced connection is reported. A slice whose transfer
completed before the fence, or during it, is still reported, unless the queue pair is destroyed.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, overload

import numpy as np

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
    MemoryUse,
    RailChanged,
    Sent,
)
from r2ccl.transport.verbs import messages
from r2ccl.transport.verbs.cuda import BindingsDriver, CudaDriver
from r2ccl.transport.verbs.device import BATCH, Completion, RdmaDevice
from r2ccl.transport.verbs.endpoint import EndpointState, LandingPlace, Outgoing, VerbsEndpoint
from r2ccl.transport.verbs.messages import CLEAR, CONFIRM, EAGER, HEADER_NBYTES, Token, VerbsMessage
from r2ccl.transport.verbs.probe import ProbeEnd, VerbsProber
from r2ccl.transport.verbs.queuepair import QueuePair, RequestKind, Tag
from r2ccl.transport.verbs.registration import Registration, RegistrationCache
from r2ccl.transport.verbs.ring import ALIGN, COUNT_MODULUS
from r2ccl.transport.verbs.staging import Array, Staging
from r2ccl.transport.verbs.status import describe_event, describe_status, event_name, status_name
from r2ccl.transport.wakeup import Wakeup
from r2ccl.types import PathKey, ProbeKey

_log = logging.getLogger(__name__)

#: Size of a ring, as a number of eager messages of the largest size.
_RING_MESSAGES = 8
#: A fence destroys the queue pair if its two markers have not completed after this time.
_DRAIN_TIMEOUT_S = 1.0
#: Async events that report a new state of a port; True if the port is then up.
_PORT_EVENTS = {"PORT_ERR": False, "PORT_ACTIVE": True}
#: After this event all ports of the device are unusable.
_DEVICE_FATAL = "DEVICE_FATAL"
#: After this event the device reports no more completions, so its queue pairs are unusable.
_LOST_COMPLETIONS = "CQ_ERR"
#: Bit of verbs' opcodes that marks a receive.
_RECEIVED = 1 << 7


class VerbsTransport:
    """`Transport` over RDMA NICs.

    Parameters
    ----------
    rank : int
        This rank, for errors and the log.
    devices : sequence of RdmaDevice
        One per rail. Owned.
    registrations : RegistrationCache
        Cache for the NICs of `devices`, in the same order. Owned.
    eager_nbytes : int
        Largest eager payload accepted from a peer, in bytes; determines the size of the rings.
    timeout, retry_cnt : int
        Attributes of every queue pair of a path: an unacknowledged packet is retransmitted after
        4.096 us times 2^timeout, at most `retry_cnt` times.
    probe_timeout_s : float
        Time in which a probe must be answered, in seconds.
    first_rail : int
        Rail number of ``devices[0]``; above 0 if other transports have the first rails.
    clock : Clock
    open_cuda : callable
        Opens the CUDA driver; called when device memory is first registered.
    """

    def __init__(
        self,
        rank: int,
        devices: Sequence[RdmaDevice],
        registrations: RegistrationCache,
        *,
        eager_nbytes: int,
        timeout: int,
        retry_cnt: int,
        probe_timeout_s: float,
        first_rail: int = 0,
        clock: Clock = monotonic,
        open_cuda: Callable[[], CudaDriver] = BindingsDriver,
    ) -> None:
        self.nrails = len(devices)
        self._first_rail = first_rail
        self._rank = rank
        self._devices = devices
        self._staging = Staging(registrations, open_cuda)
        self._eager_nbytes = eager_nbytes
        self._ring_nbytes = -(-_RING_MESSAGES * (HEADER_NBYTES + eager_nbytes) // 4096) * 4096
        self._timeout = timeout
        self._retry_cnt = retry_cnt
        self._clock = clock
        self._prober = VerbsProber(devices, probe_timeout_s, clock)
        self._by_number: list[dict[int, VerbsEndpoint]] = [{} for _ in devices]
        self._by_path: dict[PathKey, VerbsEndpoint] = {}
        #: NICs that lost completions or cannot report any: their rails are down for good.
        self._broken: set[int] = set()
        self._spare: list[list[QueuePair]] = [[] for _ in devices]
        #: Batches of completions taken off each NIC's queue by `fence`, oldest first.
        self._aside: list[list[list[Completion]]] = [[] for _ in devices]
        self._draining: list[VerbsEndpoint] = []
        self._dirty: list[VerbsEndpoint] = []
        #: Ends with messages whose memory the events of the last poll borrow.
        self._lending: list[VerbsEndpoint] = []
        #: Ends opened since the last poll whose held events borrow memory of messages. The next
        #: poll reports these events.
        self._opened: list[VerbsEndpoint] = []
        #: Ends with messages that wait for room in the send queue or in the peer's ring.
        self._waiting: set[VerbsEndpoint] = set()
        self._events: list[Event] = []
        self._epoll = select.epoll()
        self._wakeup = Wakeup()
        self._epoll.register(self._wakeup.number, select.EPOLLIN)
        self._by_fd: dict[int, tuple[int, bool]] = {}
        for rail, device in enumerate(devices):
            for fd, is_async in ((device.channel_fd, False), (device.async_fd, True)):
                self._by_fd[fd] = (rail, is_async)
                self._epoll.register(fd, select.EPOLLIN)

    # Paths

    def joins(self, rail: int) -> bool:
        """Return True: all connections are made by `offer` and `Endpoint.join`."""
        return True

    @overload
    def offer(self, key: PathKey) -> VerbsEndpoint: ...

    @overload
    def offer(self, key: ProbeKey) -> ProbeEnd: ...

    def offer(self, key: PathKey | ProbeKey) -> VerbsEndpoint | ProbeEnd:
        """Make this rank's end of a new connection, for a path or for probes.

        Raises
        ------
        TransportError
            If the port is down or has no GID, or if the NIC refuses or no longer reports
            completions.
        """
        rail = key.via if isinstance(key, ProbeKey) else key.rail
        nic = rail - self._first_rail
        device = self._devices[nic]
        if nic in self._broken:
            raise TransportError(
                f"rank {self._rank}: {device.name} (rail {rail}, to rank {key.peer}) no "
                "longer reports completions and cannot be used until the job is restarted",
                rank=self._rank, peer=key.peer, rail=rail, status=_LOST_COMPLETIONS,
            )  # fmt: skip
        if not device.is_active():
            raise TransportError(
                f"rank {self._rank}: port {device.port} of {device.name} (rail {rail}, to rank "
                f"{key.peer}) is not ACTIVE; check its cable, its switch port and `ip link`",
                rank=self._rank, peer=key.peer, rail=rail, status="PORT_DOWN",
            )  # fmt: skip
        device.refresh()
        if isinstance(key, ProbeKey):
            return self._prober.offer(key, nic)
        qp = self._take(nic, key)
        endpoint = VerbsEndpoint(key, nic, qp, self._discard)
        self._by_number[nic][qp.number] = endpoint
        return endpoint

    def open(self, path: PathKey, endpoint: VerbsEndpoint) -> None:
        """Begin to use `endpoint`, which has joined, as `path`.

        The next `poll` reports the slices and messages that arrived at `endpoint` before this call,
        and a failure of `endpoint` that occurred between its `join` and this call.
        """
        if endpoint.state is EndpointState.JOINING:
            endpoint.state = EndpointState.LIVE
        endpoint.is_opened = True
        self._by_path[path] = endpoint
        if endpoint.lent:
            self._opened.append(endpoint)
        held, endpoint.held = endpoint.held, []
        self._events += held

    def is_open(self, path: PathKey) -> bool:
        """Return True if `path` was opened and has neither failed nor been fenced since."""
        return self._live(path) is not None

    def fence(self, path: PathKey) -> None:
        """Stop the queue pair of `path`; `poll` reports `Fenced` once its requests have completed.

        If that takes more than `_DRAIN_TIMEOUT_S`, or the device refuses, the queue pair is
        destroyed, and `Fenced` is reported then. Does nothing if `path` was not opened since its
        last fence.
        """
        endpoint = self._by_path.pop(path, None)
        if endpoint is None:
            return
        endpoint.state = EndpointState.DRAINING
        endpoint.give_up_s = self._clock() + _DRAIN_TIMEOUT_S
        endpoint.forget_waiting()
        self._waiting.discard(endpoint)
        self._draining.append(endpoint)
        try:
            endpoint.qp.flush()
        except TransportError as exc:
            self._log_destroyed(path, exc)
            endpoint.give_up_s = 0.0
        # Many paths may be fenced in sequence: make room in the completion queue for the next.
        self._set_aside(endpoint.nic)

    def memory_use(self) -> MemoryUse:
        """Implement `Transport.memory_use`."""
        rings = len(self._by_path) * 2 * self._ring_nbytes
        return MemoryUse(rings, self._staging.nbytes, self._staging.registered_nbytes)

    def has_unsent(self) -> bool:
        """Return True if a message waits for room in a send queue or in a peer's ring."""
        return bool(self._waiting)

    def is_stuck(self, path: PathKey) -> bool:
        """Return False: a queue pair that delays data fails by itself when its retries run out."""
        return False

    def probe(self, key: ProbeKey) -> None:
        """Start a probe by an RDMA write of 0 bytes on a separate queue pair, see `VerbsProber`."""
        self._prober.probe(key)

    def descriptors(self) -> list[int]:
        """Return the descriptors of epoll, wakeup and devices; empty after `close`."""
        if self._epoll.closed:
            return []
        own = [self._epoll.fileno(), self._wakeup.number]
        return own + [fd for device in self._devices for fd in device.descriptors()]

    def close(self) -> None:
        """Destroy every queue pair, then close the devices. Idempotent.

        If one step raises, the others still run; if Ctrl-C interrupts the call, the next
        call repeats all steps.
        """
        # First, so that nothing is posted to a destroyed queue pair.
        self._by_path.clear()
        for ends in (self._dirty, self._lending, self._opened, self._waiting, self._draining):
            ends.clear()
        with ExitStack() as steps:  # callbacks run last to first
            steps.callback(self._close_descriptors)
            for device in self._devices:
                steps.callback(device.close)
            steps.callback(self._staging.close)
            steps.callback(self._destroy_all)
            steps.callback(self._prober.close)

    def _destroy_all(self) -> None:
        for ends, spare in zip(self._by_number, self._spare, strict=True):
            for qp in [*(end.qp for end in ends.values()), *spare]:
                qp.close()
            ends.clear()
            spare.clear()

    def _close_descriptors(self) -> None:
        # Both are idempotent: a close that Ctrl-C interrupted between them is repeated.
        self._epoll.close()
        self._wakeup.close()

    # Sending

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: Any,
        is_replay: bool = False,
    ) -> None:  # fmt: skip
        """Queue a slice; queued replays are sent before other queued cleared slices."""
        end = self._live(path)
        if end is None:
            return
        if token is None:
            self._queue(end, EAGER, frame, len(view), payload=view)
            self._events.append(Sent(path, frame.channel, frame.seq))
        else:
            if frame.ack > end.acked.get(frame.channel, 0):  # a cleared slice has no header
                self._queue(end, CONFIRM, frame)
            (end.replays if is_replay else end.bulk).append(Outgoing(frame, view, token))
        self._mark(end)

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        """Queue the announcement of `region` as the landing place of slice ``frame.seq``.

        `ack` is ignored: this transport never confirms a slice on its own.
        """
        end = self._live(path)
        if end is not None:
            end.unnamed.append((frame, region))
            self._mark(end)

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """Queue a message that confirms the peer's slices of `channel` numbered below `ack`."""
        end = self._live(path)
        if end is not None:
            frame = Frame(channel, 0, ack, 0, 0)
            self._queue(end, CONFIRM, frame)
            self._mark(end)

    def flush(self) -> None:
        """Post queued messages and slices, as far as the send queues and peers' rings have room."""
        dirty, self._dirty = self._dirty, []
        for end in dirty:
            end.is_dirty = False
            if end.state is EndpointState.LIVE:
                try:
                    self._post(end)
                except TransportError as exc:
                    self._fail(end, exc.status, str(exc))

    def allocate(self, nbytes: int) -> Array:
        """Return `nbytes` bytes of memory that is registered with every NIC until it is freed."""
        return self._staging.allocate(nbytes)

    def register(self, memory: Array) -> Registration:
        """Register host memory with every NIC, until `Registration.close`."""
        return self._staging.register(memory)

    def register_device(self, address: int, nbytes: int) -> Registration:
        """Register device memory with every NIC until `Registration.close`.

        The NICs access it by dma-buf or nvidia_peermem.
        """
        return self._staging.register_device(address, nbytes)

    def _post(self, end: VerbsEndpoint) -> None:
        while end.unnamed and end.numbers:
            self._name(end, *end.unnamed.popleft())
        while end.small:
            header, payload = end.small[0]
            messages.stamp(header, end.consumed)
            if not end.qp.write_message(header, payload):
                break
            end.told()  # only now: a queued message does not carry its credit to the peer yet
            end.small.popleft()
        (self._waiting.add if end.small else self._waiting.discard)(end)
        while (queue := end.replays or end.bulk) and not end.small and end.qp.has_room():
            self._write(end, queue.popleft())
        # Even if messages wait for the peer's credits: the peer may be waiting for this credit.
        if end.is_credit_due and end.qp.write_credit(end.consumed):
            end.told()

    def _name(self, end: VerbsEndpoint, frame: Frame, region: memoryview) -> None:
        """Queue a clear-to-send for a slice.

        The slice lands in `region` if `region` is registered, else in a staging buffer.
        """
        number = end.numbers.popleft()
        reach = self._staging.reach(region, end.nic)
        # Frame of the slice's `Arrived`; ack is 0, as a cleared slice carries no confirmation.
        expected = Frame(frame.channel, frame.seq, 0, frame.op, frame.signature)
        end.places[number] = LandingPlace(expected, region, reach)
        token = (number, reach.address, reach.rkey)
        self._queue(end, CLEAR, frame, len(region), token)

    def _write(self, end: VerbsEndpoint, item: Outgoing) -> None:
        reach = self._staging.reach(item.view, end.nic)
        if reach.buffer is not None:
            reach.buffer[: len(item.view)] = np.frombuffer(item.view, np.uint8)
        number, target, rkey = item.token
        source = (reach.address, len(item.view), reach.lkey)
        try:
            count = end.qp.write_slice(source, (target, rkey), number)
        except TransportError:
            self._staging.release(reach)
            raise
        end.writing[count] = (item.frame, reach)

    @staticmethod
    def _queue(
        end: VerbsEndpoint, kind: int, frame: Frame, nbytes: int = 0, token: Token = (0, 0, 0),
        payload: bytes | memoryview = b"",
    ) -> None:  # fmt: skip
        if frame.ack:
            end.acked[frame.channel] = max(frame.ack, end.acked.get(frame.channel, 0))
        end.small.append((messages.write(kind, frame, nbytes, token), payload))

    # Polling

    def poll(self, timeout_s: float) -> list[Event]:
        """Return new events; if there are none, wait for one up to `timeout_s` seconds."""
        self._return_lent()
        self._staging.drain()
        self._complete()
        if timeout_s > 0 and not self._events:
            self.arm()
            self._complete()  # completions from before `arm` cause no notification
            timeout_s = self.limit_s(timeout_s)
        if self._listen(0.0 if self._events else timeout_s):
            self._complete()
        if self._draining:
            self._reap()
        if self._prober.is_busy:
            self._events += self._prober.advance()
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """Make a waiting `poll` return; any thread may call this."""
        self._wakeup.wake()

    def limit_s(self, timeout_s: float) -> float:
        """Return the time until `poll` must be called, at most `timeout_s`, in seconds."""
        if self._draining:
            timeout_s = min(timeout_s, _DRAIN_TIMEOUT_S / 10)
        return self._prober.limit_s(timeout_s)

    def arm(self) -> None:
        """Make the descriptor of `fileno` become readable at the next completion.

        A completion that occurred before this call need not make the descriptor readable. So call
        `poll` once more between `arm` and the wait.
        """
        for nic, device in enumerate(self._devices):
            if nic not in self._broken:
                try:
                    device.arm()
                except TransportError as exc:
                    self._lose_completions(nic, str(exc))

    def fileno(self) -> int:
        """Return the descriptor of an epoll set, readable when an event occurs after `arm`."""
        return self._epoll.fileno()

    def _listen(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for a ready descriptor; return False if none was ready.

        Consume the notifications of completions, and handle async events.
        """
        ready = self._epoll.poll(timeout_s)
        for fd, _ in ready:
            if fd == self._wakeup.number:
                self._wakeup.clear()
                continue
            nic, is_async = self._by_fd[fd]
            try:
                if is_async:
                    self._on_async(nic)
                else:
                    self._devices[nic].disarm()
            except TransportError as exc:
                self._epoll.unregister(fd)  # it stays readable
                self._lose_completions(nic, str(exc))
        return bool(ready)

    def _return_lent(self) -> None:
        """Count as consumed the messages whose memory the events of the last poll borrowed."""
        lending, self._lending, self._opened = self._lending, self._opened, []
        for end in lending:
            end.consume_lent()
            if end.is_credit_due:
                self._mark(end)

    def _set_aside(self, nic: int) -> None:
        """Take completions off the NIC's queue and keep them until the next poll handles them."""
        while batch := self._completions(nic):
            self._aside[nic].append(batch)

    def _complete(self) -> None:
        for nic in range(len(self._devices)):
            aside, self._aside[nic] = self._aside[nic], []
            for batch in aside:
                self._take_batch(nic, batch)
            batch = self._completions(nic)
            while batch:
                is_full = self._take_batch(nic, batch) or len(batch) == BATCH
                batch = self._completions(nic) if is_full else []

    def _completions(self, nic: int) -> list[Completion]:
        """Take completions off the NIC's queue; if the device refuses, report its rail as down."""
        try:
            return self._devices[nic].completions()
        except TransportError as exc:
            self._lose_completions(nic, str(exc))
            return []

    def _lose_completions(self, nic: int, why: str) -> None:
        """Report once that the rail of a NIC is down for good; `why` is the cause."""
        if nic not in self._broken:
            self._broken.add(nic)
            self._events.append(RailChanged(self._first_rail + nic, False, why))

    def _take_batch(self, nic: int, batch: list[Completion]) -> bool:
        """Handle completions; return True if any of them failed.

        A batch omits repeated flush errors. So if a completion failed, the queue may have further
        completions even though the batch has fewer than `BATCH`.
        """
        has_failed = False
        ends = self._by_number[nic]
        fresh: dict[VerbsEndpoint, int] = {}
        for number, status, opcode, vendor_err, imm_data, qp_num in batch:
            has_failed |= status != 0
            end = ends.get(qp_num)
            if end is None:  # of a probe, or of a queue pair that was reset or destroyed
                self._prober.on_completion(nic, qp_num, number, status, vendor_err)
                continue
            if not end.qp.owns(number):
                continue  # the request is from an earlier life of the queue pair
            if status:
                self._on_error(end, number, status, vendor_err)
            elif opcode & _RECEIVED:
                fresh[end] = fresh.get(end, 0) + 1
                self._on_received(end, imm_data)
            else:
                self._on_sent(end, number)
        for end, count in fresh.items():
            if end.state in (EndpointState.LIVE, EndpointState.JOINING):
                self._receive(end, count)
        return has_failed

    def _receive(self, end: VerbsEndpoint, count: int) -> None:
        try:
            end.qp.receive(count)
        except TransportError as exc:
            self._fail(end, exc.status, str(exc))

    def _on_sent(self, end: VerbsEndpoint, number: int) -> None:
        work, count = end.qp.retire(number)
        if work is RequestKind.SLICE:
            frame, reach = end.writing.pop(count)
            self._staging.release(reach)
            self._report(end, Sent(end.path, frame.channel, frame.seq))
        elif work is RequestKind.HELLO:
            self._events.append(Joined(end.path, end))
        if end.has_waiting or end.is_credit_due:
            self._mark(end)

    def _on_received(self, end: VerbsEndpoint, imm_data: int) -> None:
        tagged = end.qp.untag(imm_data)
        if tagged is None:
            self._fail(end, "EBADMSG", f"the peer wrote invalid immediate data {imm_data:#x}")
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
                self._fail(
                    end,
                    "EBADMSG",
                    f"a slice arrived for landing place {value}, which was not announced",
                )
                return
            end.numbers.append(value)
            if place.reach.buffer is not None:
                place.region[:] = place.reach.buffer[: len(place.region)].data
            self._staging.release(place.reach)
            self._report(end, Arrived(end.path, place.frame, None, self._clock()))
            if end.unnamed:
                self._mark(end)

    def _on_message(self, end: VerbsEndpoint, offset: int) -> None:
        message = VerbsMessage.read(end.qp.inbox, offset, self._eager_nbytes)
        if message is None:
            self._fail(end, "EBADMSG", f"the message at offset {offset} of the ring is malformed")
            return
        kind, frame, nbytes, credit, token, size = message
        end.qp.credit(credit % COUNT_MODULUS)
        if end.small:
            self._mark(end)
        # Before the end is opened its events are held, and with them the borrowed memory.
        if end.lend(size) and end.is_opened:
            self._lending.append(end)
        if kind == EAGER:
            start = offset + HEADER_NBYTES
            payload = end.qp.inbox[start : start + nbytes]
            self._report(end, Arrived(end.path, frame, payload, self._clock()))
        elif kind == CLEAR:
            self._report(end, Cleared(end.path, frame, nbytes, token))
        else:
            self._report(end, Confirmed(end.path, frame.channel, frame.ack))

    def _on_error(self, end: VerbsEndpoint, number: int, status: int, vendor_err: int) -> None:
        if end.state is EndpointState.DRAINING:
            if QueuePair.work_of(number) is RequestKind.MARKER:
                end.markers += 1
                if end.markers == 2:
                    self._drained(end)
            return
        self._fail(end, status_name(status), describe_status(status, vendor_err))

    def _on_async(self, nic: int) -> None:
        for number in self._devices[nic].port_events():
            _log.info(
                "rank %d: %s: %s", self._rank, self._devices[nic].name, describe_event(number)
            )
            is_up = _PORT_EVENTS.get(event_name(number))
            if event_name(number) == _LOST_COMPLETIONS:
                self._lose_completions(nic, describe_event(number))
            elif event_name(number) == _DEVICE_FATAL:
                why = describe_event(number)
                self._events.append(RailChanged(self._first_rail + nic, False, why))
            elif is_up is not None and not self._devices[nic].is_of_other_port(is_up):
                self._events.append(RailChanged(self._first_rail + nic, is_up))

    def _fail(self, end: VerbsEndpoint, status: str, detail: str) -> None:
        """Report the first failure of an end; do nothing for a later failure, or a fenced end.

        An open end reports the failure as `Failed`. An end that is not open yet reports it as
        `Joined`.
        """
        if end.state is EndpointState.LIVE:
            self._events.append(Failed(end.path, status, detail))
        elif end.state is EndpointState.JOINING:
            self._events.append(Joined(end.path, end, detail))
            end.held.append(Failed(end.path, status, detail))  # if it is opened all the same
        else:
            return
        end.state = EndpointState.FAILED
        self._waiting.discard(end)

    def _reap(self) -> None:
        """Destroy the fenced queue pairs that were not flushed in time, or could not be flushed."""
        now = self._clock()
        for end in [end for end in self._draining if now >= end.give_up_s]:
            if end.give_up_s:  # 0: the device refused the flush, which `fence` has logged
                _log.warning(
                    "rank %d: %s did not flush the queue pair of rail %d to rank %d in %g s (%d of "
                    "its 2 queues are empty); the queue pair is destroyed",
                    self._rank, self._devices[end.nic].name, end.path.rail, end.path.peer,
                    _DRAIN_TIMEOUT_S, end.markers,
                )  # fmt: skip
            self._destroy(end)
            self._fenced(end)

    def _drained(self, end: VerbsEndpoint) -> None:
        """Finish a fence: both markers completed, so no request is in flight."""
        self._discard(end)
        self._fenced(end)

    def _fenced(self, end: VerbsEndpoint) -> None:
        self._draining.remove(end)
        self._events.append(Fenced(end.path))

    def _take(self, nic: int, path: PathKey) -> QueuePair:
        """Return an unconnected queue pair for `path`: a spare that is renewed, or a new one."""
        while self._spare[nic]:
            qp = self._spare[nic].pop()
            try:
                qp.renew()
            except TransportError as exc:
                self._log_destroyed(path, exc)
                qp.close()
            else:
                return qp
        return QueuePair(
            self._devices[nic], ring_nbytes=self._ring_nbytes,
            timeout=self._timeout, retry_cnt=self._retry_cnt,
        )  # fmt: skip

    def _discard(self, end: VerbsEndpoint) -> None:
        """Reset an end's queue pair for reuse and release the memory of its requests in flight.

        A queue pair that cannot be reset is destroyed. A second call for an end does nothing.
        """
        if self._by_number[end.nic].get(end.qp.number) is not end:
            return
        try:
            end.qp.reset()
        except TransportError as exc:
            self._log_destroyed(end.path, exc)
            self._destroy(end)
        else:
            self._forget(end)
            self._spare[end.nic].append(end.qp)

    def _log_destroyed(self, path: PathKey, why: TransportError) -> None:
        _log.warning(
            "rank %d: rail %d to rank %d: %s; the queue pair is destroyed",
            self._rank, path.rail, path.peer, why,
        )  # fmt: skip

    def _destroy(self, end: VerbsEndpoint) -> None:
        # The device may reuse the number: drop completions that still carry it.
        self._aside[end.nic] = [
            [each for each in batch if each[-1] != end.qp.number] for batch in self._aside[end.nic]
        ]
        end.qp.close()
        self._forget(end)

    def _forget(self, end: VerbsEndpoint) -> None:
        del self._by_number[end.nic][end.qp.number]
        for reach in end.take_back():
            self._staging.release(reach)

    def _report(self, end: VerbsEndpoint, event: Event) -> None:
        (self._events if end.is_opened else end.held).append(event)

    def _live(self, path: PathKey) -> VerbsEndpoint | None:
        end = self._by_path.get(path)
        return end if end is not None and end.state is EndpointState.LIVE else None

    def _mark(self, end: VerbsEndpoint) -> None:
        if not end.is_dirty:
            end.is_dirty = True
            self._dirty.append(end)


__all__ = ["VerbsTransport"]

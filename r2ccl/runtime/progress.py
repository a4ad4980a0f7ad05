"""The data loop: links on one side, a transport on the other, and nothing that blocks.

`Progress.step` polls the transport, advances the link tables, hands slices to the collective that
wants them (a `Consumer`), confirms what was consumed and flushes. It holds no thread and no lock:
whoever calls it owns it (`r2ccl.runtime.engine`). Failures are handled beside it, in
`r2ccl.failover.migration.driver`.

Must not import sockets or verbs, and touches slices, never bytes. Invariant: a view given to the
transport stays referenced by its link until the slice is released.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from r2ccl.bootstrap.base import ControlPort
from r2ccl.clock import Clock
from r2ccl.config import Config
from r2ccl.dtypes import dtype_of
from r2ccl.errors import InternalError
from r2ccl.failover.migration.driver import Recovery, Revoke
from r2ccl.failover.migration.link import Landing, LinkReport, RecvLink, SendLink, Slice
from r2ccl.failover.migration.path import Path
from r2ccl.transport.base import (
    Arrived,
    Cleared,
    Confirmed,
    Failed,
    Fenced,
    Frame,
    Joined,
    Probed,
    RailChanged,
    Sent,
    Transport,
)
from r2ccl.types import REDUCTIONS, ROOTED, CallSignature, Collective, PathKey, ReduceOp


class Consumer(Protocol):
    """A part of a running collective that owns slices.

    ``is_gauge`` says whether these show what the rails carry.
    """

    is_gauge: bool

    def on_slice(self, landing: Landing, payload: memoryview | bytes | None) -> None:
        """Take a slice, in link order; ``payload`` is borrowed, None: it is in the region."""
        ...

    def on_released(self, index: int) -> None:
        """One more slice of send op `index` was released."""
        ...

    def on_retired(self, index: int) -> None:
        """One more slice of send op `index` is no longer read by the transport."""
        ...

    def advance(self) -> None:
        """Post what has become possible."""
        ...


class Computer(Protocol):
    """Where the work of a collective's slices is done that is not done in the loop."""

    @property
    def is_busy(self) -> bool:
        """Whether there is work that is not known to be done."""
        ...

    def commit(self) -> None:
        """Have `poll` tell of all that was begun until now."""
        ...

    def poll(self) -> int:
        """Return the number of the last work that is done, as all before it is; never waits.

        Raises
        ------
        TransportError
            The device failed.
        """
        ...


class Progress:
    """Everything one rank has under way on its links.

    Parameters
    ----------
    rank, nranks : int
    transport : Transport
    control : ControlPort
    config : Config
    clock : Clock
    nwires : int
        Rails that add bandwidth to one another.
    last_resorts : frozenset of int
        Rails that are used only where two ranks have nothing else.
    """

    def __init__(
        self,
        rank: int,
        nranks: int,
        *,
        transport: Transport,
        control: ControlPort,
        config: Config,
        clock: Clock,
        nwires: int = 1,
        last_resorts: frozenset[int] = frozenset(),
    ) -> None:
        self.rank = rank
        self.nranks = nranks
        self.transport = transport
        self.config = config
        self.clock = clock
        self.nwires = nwires
        self.last_resorts = last_resorts
        self.senders: dict[tuple[int, int], SendLink] = {}
        self.receivers: dict[tuple[int, int], RecvLink] = {}
        self.recovery = Recovery(self, control)
        self._balance = self.recovery.balance
        #: When the events under way were taken: what comes together counts as one instant.
        self._polled_s = 0.0
        #: Number and packed signature of the collective that runs, or ran last.
        self.op = 0
        self.signature = 0
        #: Number of the last work that is done of what the collective has given away.
        self.computed = 0
        self._computer: Computer | None = None
        self._consumers: Mapping[int, Consumer] = {}
        self._dirty: list[Consumer] = []
        self._unconfirmed: dict[RecvLink, None] = {}  # ordered, unlike a set: runs repeat
        #: Signatures of the last collectives; those seen of coming ones, and at which peer first.
        self._history: dict[int, int] = {}
        self._ahead: dict[int, dict[int, int]] = {}
        self._confirm_after = max(1, config.eager_slots // 2)
        self._handlers = {
            Arrived: self._on_arrived,
            Cleared: self._on_cleared,
            Confirmed: self._on_confirmed,
            Sent: self._on_sent,
            Failed: self.recovery.on_failed,
            Fenced: self.recovery.on_fenced,
            Joined: self.recovery.on_joined,
            RailChanged: self.recovery.on_rail,
            Probed: self.recovery.on_probed,
        }

    # What a collective calls

    def begin(
        self,
        signature: int,
        consumers: Mapping[int, Consumer],
        computer: Computer | None = None,
    ) -> None:
        """Start the next collective: `consumers` by channel, who may give work to `computer`."""
        self.op += 1
        self._computer = computer
        self.computed = 0
        self.signature = signature
        self._history[self.op] = signature
        self._history.pop(self.op - _HISTORY, None)
        self._consumers = consumers
        for seen, peer in self._ahead.pop(self.op, {}).items():
            self._compare(peer, self.op, seen)

    def finish(self) -> None:
        """The collective is done: none of its slices is wanted or unreleased any more."""
        self._consumers = {}
        self._computer = None

    def forget(self) -> None:
        """Let go of all memory that slices were in; once no path is in use any more."""
        self.finish()
        self._dirty.clear()
        self._unconfirmed.clear()
        self.senders.clear()
        self.receivers.clear()

    def send_link(self, peer: int, channel: int) -> SendLink:
        """Return the link to `peer` of `channel`, made on first use."""
        link = self.senders.get((peer, channel))
        return link if link is not None else self._make_links(peer, channel)[0]

    def recv_link(self, peer: int, channel: int) -> RecvLink:
        """Return the link from `peer` of `channel`, made on first use."""
        link = self.receivers.get((peer, channel))
        return link if link is not None else self._make_links(peer, channel)[1]

    def send(
        self, link: SendLink, view: memoryview, is_eager: bool, consumer: Consumer, index: int
    ) -> None:
        """Post a slice; `link.can_post` must hold. An eager `view` must be the link's to keep."""
        if not is_eager:
            _, nbytes, _ = link.clears[link.posted]
            if nbytes != len(view):
                raise InternalError(
                    f"rank {link.peer} named {nbytes} bytes for slice {link.posted} of channel "
                    f"{link.channel}, this rank sends {len(view)}"
                )
        item, token = link.post(view, is_eager, self.op, self.signature, consumer, index)
        if item.path is not None:
            self._count_sent(item.path, item)
            self.transport.isend(item.path, self._frame(link, item), view, token)

    def recv(
        self, link: RecvLink, region: memoryview | None, consumer: Consumer, index: int,
        is_last: bool = False,
    ) -> None:  # fmt: skip
        """Want the next slice, in `region` (named to the peer) or, None, with its payload.

        `is_last` says that none follows it on this link in this call.
        """
        landing = link.post(region, self.op, self.signature, consumer, index, is_last)
        if landing.path is not None:
            self.name(link, landing)
        if link.arrivals:
            self._deliver(link)

    def consume(self, link: RecvLink, is_eager: bool) -> None:
        """The slice delivered next is used up: it may be confirmed."""
        link.consume()
        if not is_eager or link.consumed - link.acked >= self._confirm_after:
            self._unconfirmed[link] = None

    # The loop

    def step(self, timeout_s: float = 0.0) -> bool:
        """Go once round; True if anything happened. Sleeps up to `timeout_s` if nothing does."""
        events = self.transport.poll(timeout_s)
        if events and self._balance is not None:
            self._polled_s = self.clock()
        for event in events:
            self._handlers[type(event)](event)  # type: ignore[operator]
        has_computed = self._computer is not None and self._take_computed(self._computer)
        self.advance()
        return bool(events) or has_computed

    def advance(self) -> None:
        """Let the collective post what became possible, confirm, and flush."""
        while self._dirty:
            dirty, self._dirty = self._dirty, []
            for consumer in dirty:
                consumer.advance()
        if self._computer is not None:
            self._computer.commit()
        if self._unconfirmed:
            self.confirm_all(self._unconfirmed)
            self._unconfirmed.clear()
        self.transport.flush()

    @property
    def is_computing(self) -> bool:
        """Whether the collective waits for work that no event of the transport tells of."""
        return self._computer is not None and self._computer.is_busy

    def _take_computed(self, computer: Computer) -> bool:
        """Have whoever gave work away advanced if some of it is done."""
        computed = computer.poll()
        if computed == self.computed:
            return False
        self.computed = computed
        for consumer in self._consumers.values():
            self.touch(consumer)
        return True

    def touch(self, consumer: Consumer) -> None:
        """Have `consumer` advanced before the loop sleeps."""
        if consumer not in self._dirty:
            self._dirty.append(consumer)

    def confirm_all(self, links: object = None) -> None:
        """Confirm what was consumed, also eager slices not worth a frame of their own yet."""
        ways: dict[int, PathKey] = {}
        for link in self.receivers.values() if links is None else links:  # type: ignore[attr-defined]
            if link.acked < link.consumed and link.route is not None:
                link.acked = link.consumed
                # Confirmations may take any path: those of all channels share one.
                way = ways.setdefault(link.peer, link.route)
                self.transport.confirm(way, link.channel, link.acked)

    def is_drained(self) -> bool:
        """Whether every slice ever posted is confirmed."""
        return all(link.confirmed == link.posted for link in self.senders.values())

    def is_drained_to(self, peer: int) -> bool:
        """Whether every slice ever posted to `peer` is confirmed."""
        return all(
            link.confirmed == link.posted for (to, _), link in self.senders.items() if to == peer
        )

    # Used by recovery

    def name(self, link: RecvLink, landing: Landing) -> None:
        """Name a landing place on its path."""
        assert landing.path is not None
        assert landing.region is not None
        link.acked = link.consumed
        frame = Frame(link.channel, landing.seq, link.acked, landing.op, landing.signature)
        # With mode 0 nobody waits for a confirmation.
        ack = link.early_ack(landing) if self.config.is_resilient else 0
        self.transport.irecv(landing.path, frame, landing.region, ack)

    def write_again(self, link: SendLink, item: Slice, token: object) -> None:
        """Write a slice that was posted before."""
        assert item.path is not None
        frame = self._frame(link, item)
        self._count_sent(item.path, item)
        self.transport.isend(item.path, frame, item.view, token, is_replay=True)

    def resume(self, link: SendLink, path: PathKey, report: LinkReport) -> None:
        """Both ends of `path` are fenced, and the peer's report of `link` is here."""
        under_way = [item for item in link.outstanding if item.path == path and not item.is_eager]
        self.release(link.resume(path, report))
        nlost = sum(item.path is None and item.owner.is_gauge for item in under_way)
        if nlost and self._balance is not None:
            self._balance.dropped(path.rail, self._polled_s, nlost)
        # The report is a confirmation too, and credits let a call post.
        self.touch_channel(link.channel)

    def release(self, slices: list[Slice]) -> None:
        """Tell their owners that slices were released."""
        balance = self._balance
        for item in slices:
            if not item.is_eager:
                item.owner.on_released(item.index)
                self.touch(item.owner)
                if balance is not None and item.path is not None and item.owner.is_gauge:
                    balance.confirmed(item.path.rail, self._polled_s, len(item.view))

    def note_retired(self, link: SendLink) -> None:
        """Tell the owners of slices the transport is done with."""
        for item in link.newly_retired():
            if not item.is_eager:
                item.owner.on_retired(item.index)
                self.touch(item.owner)

    def touch_channel(self, channel: int) -> None:
        """Have whoever runs on `channel` advanced."""
        consumer = self._consumers.get(channel)
        if consumer is not None:
            self.touch(consumer)

    # Events

    def _on_arrived(self, event: Arrived) -> None:
        path, frame = event.path, event.frame
        state = self._seen(path, frame)
        if frame.signature != self.signature or frame.op != self.op:
            self._compare(path.peer, frame.op, frame.signature)
            if self.recovery.error is not None:
                return
        link = self.recv_link(path.peer, frame.channel)
        state.nslices_received += 1
        state.nbytes_received += _nbytes(link, event)
        if frame.ack > self.send_link(path.peer, frame.channel).confirmed:
            self._confirmed(path.peer, frame.channel, frame.ack)
        if self.recovery.open_repairs:
            self.recovery.note_arrival(event)
        payload: memoryview | bytes | None = event.payload
        is_wanted_now = frame.seq == link.delivered and frame.seq in link.landings
        if payload is not None and not is_wanted_now:
            payload = bytes(payload)
        if event.is_confirmed:
            link.acked = max(link.acked, frame.seq + 1)
        if link.arrived(frame.seq, payload):
            self._deliver(link)

    def _deliver(self, link: RecvLink) -> None:
        taken = link.take()
        while taken is not None:
            landing, payload = taken
            if landing.signature == self.signature:
                landing.owner.on_slice(landing, payload)
                self.touch(landing.owner)
            taken = link.take()

    def _on_cleared(self, event: Cleared) -> None:
        path, frame = event.path, event.frame
        self._seen(path, frame)
        if frame.signature != self.signature or frame.op != self.op:
            self._compare(path.peer, frame.op, frame.signature)
            if self.recovery.error is not None:
                return
        link = self.send_link(path.peer, frame.channel)
        if frame.ack > link.confirmed:
            self._confirmed(path.peer, frame.channel, frame.ack)
        again = link.cleared(path, frame.seq, event.nbytes, event.token)
        if again is not None:
            self.recovery.log.replayed(again.lost_on, len(again.view))
            self.write_again(link, again, event.token)
        self.touch_channel(frame.channel)

    def _on_confirmed(self, event: Confirmed) -> None:
        self.recovery.paths[event.path].activity += 1
        self._confirmed(event.path.peer, event.channel, event.ack)

    def _confirmed(self, peer: int, channel: int, ack: int) -> None:
        released = self.send_link(peer, channel).confirm(ack)
        if released:
            self.release(released)
        self.touch_channel(channel)

    def _on_sent(self, event: Sent) -> None:
        self.recovery.paths[event.path].activity += 1
        link = self.send_link(event.path.peer, event.channel)
        released = link.retired(event.path, event.seq)
        self.note_retired(link)
        if released:
            self.release(released)

    # The ledger

    def _seen(self, key: PathKey, frame: Frame) -> Path:
        """Note a sign of life, and which collective the peer is in."""
        path = self.recovery.paths[key]
        path.activity += 1
        if frame.op > path.op:
            path.op = frame.op
        return path

    def _count_sent(self, key: PathKey, item: Slice) -> None:
        path = self.recovery.paths[key]
        path.nslices_sent += 1
        path.nbytes_sent += len(item.view)
        if self._balance is not None and not item.is_eager and item.owner.is_gauge:
            self._balance.posted(key.rail, key.peer, self.clock())

    # Agreement on the call

    def _compare(self, peer: int, op: int, signature: int) -> None:
        """Hold a peer's call against this rank's of the same number."""
        if op > self.op:
            self._ahead.setdefault(op, {}).setdefault(signature, peer)
            return
        mine = self._history.get(op, signature)
        if mine != signature:
            self.recovery.revoke(
                Revoke(
                    "InvalidArgument",
                    f"call {op} differs between ranks: rank {self.rank} called {describe(mine)}, "
                    f"rank {peer} called {describe(signature)}; "
                    "all ranks must pass the same collective, dtype, op, root, count and schedule",
                    self.rank,
                )
            )

    def _frame(self, link: SendLink, item: Slice) -> Frame:
        back = self.receivers[link.peer, link.channel]
        back.acked = back.consumed
        return Frame(link.channel, item.seq, back.acked, item.op, item.signature)

    def _make_links(self, peer: int, channel: int) -> tuple[SendLink, RecvLink]:
        sender = SendLink(
            peer, channel, self.config.eager_slots, is_confirmed=self.config.is_resilient
        )
        receiver = RecvLink(peer, channel)
        self.senders[peer, channel] = sender
        self.receivers[peer, channel] = receiver
        self.recovery.routes.begin(peer, channel)
        return sender, receiver


def _nbytes(link: RecvLink, event: Arrived) -> int:
    """Size of a slice that arrived; of one that was here before and has no place any more, 0."""
    if event.payload is not None:
        return len(event.payload)
    landing = link.landings.get(event.frame.seq)
    return len(landing.region) if landing is not None and landing.region is not None else 0


def describe(signature: int) -> str:
    """Spell a packed signature for a message."""
    call = CallSignature.unpack(signature)
    name = Collective(call.collective).name.lower()
    if call.collective == Collective.BARRIER:
        return f"{name}()"
    parts = [f"count={call.count}", f"dtype={dtype_of(call.dtype).name}"]
    if call.collective in REDUCTIONS:
        parts.append(f"op={ReduceOp(call.op).name}")
    if call.collective in ROOTED:
        parts.append(f"root={call.root}")
    elif call.root:
        parts.append(f"schedule={call.root:03x}")
    return f"{name}({', '.join(parts)})"


#: Collectives a rank can be behind another and still have its call compared.
_HISTORY = 64

__all__ = ["Computer", "Consumer", "Progress", "describe"]

"""The data loop: links on one side, a transport on the other, and nothing that blocks.

`Progress.step` polls the transport, advances the links, hands slices to the collective that wants
them (a `Consumer`), confirms what was consumed and flushes. It holds no thread and no lock: whoever
calls it owns it (`r2ccl.runtime.engine`). Failures go to handlers of `r2ccl.failover`.

Must not import sockets or verbs, and touches slices, never bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from r2ccl.dtypes import dtype_of
from r2ccl.errors import InternalError
from r2ccl.failover.context import RankContext
from r2ccl.failover.failover import Failover
from r2ccl.failover.migration.link import RecvLink, SendLink
from r2ccl.failover.migration.links import Consumer, Links
from r2ccl.failover.migration.path import Path
from r2ccl.failover.revocation import Revoke
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
)
from r2ccl.types import REDUCTIONS, ROOTED, CallSignature, Collective, PathKey, ReduceOp


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
    """The loop of one rank, and the collective it carries.

    Parameters
    ----------
    context : RankContext
    links : Links
    failover : Failover
        Gets the events of failures, and new links to route.
    """

    def __init__(self, context: RankContext, links: Links, failover: Failover) -> None:
        self.rank = context.rank
        self.config = context.config
        self._transport = context.transport
        self._clock = context.clock
        self._links = links
        self._paths = links.paths
        self._is_measured = links.balance is not None
        self._migration = failover.migration
        self._revocation = failover.revocation
        self._repairs = self._migration.log
        #: Number and packed signature of the collective that runs, or ran last.
        self.op = 0
        self.signature = 0
        #: Number of the last work that is done of what the collective has given away.
        self.computed = 0
        self._computer: Computer | None = None
        self._unconfirmed: dict[RecvLink, None] = {}  # ordered, unlike a set: runs repeat
        #: Signatures of the last collectives; those seen of coming ones, and at which peer first.
        self._history: dict[int, int] = {}
        self._ahead: dict[int, dict[int, int]] = {}
        self._confirm_after = max(1, context.config.eager_slots // 2)
        self._handlers = {
            Arrived: self._on_arrived,
            Cleared: self._on_cleared,
            Confirmed: self._on_confirmed,
            Sent: self._on_sent,
            Failed: self._migration.on_failed,
            Fenced: self._migration.on_fenced,
            Joined: failover.on_joined,
            RailChanged: failover.on_rail,
            Probed: failover.on_probed,
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
        self._links.consumers = consumers
        for seen, peer in self._ahead.pop(self.op, {}).items():
            self._compare(peer, self.op, seen)

    def finish(self) -> None:
        """The collective is done: none of its slices is wanted or unreleased any more."""
        self._links.consumers = {}
        self._computer = None

    def forget(self) -> None:
        """Let go of all memory that slices were in; once no path is in use any more."""
        self.finish()
        self._unconfirmed.clear()
        self._links.forget()

    def send_link(self, peer: int, channel: int) -> SendLink:
        """Return the link to `peer` of `channel`, made on first use."""
        link = self._links.senders.get((peer, channel))
        if link is None:
            self._migration.add_links(peer, channel)
            link = self._links.senders[peer, channel]
        return link

    def recv_link(self, peer: int, channel: int) -> RecvLink:
        """Return the link from `peer` of `channel`, made on first use."""
        link = self._links.receivers.get((peer, channel))
        if link is None:
            self._migration.add_links(peer, channel)
            link = self._links.receivers[peer, channel]
        return link

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
            self._links.write(link, item, token)

    def recv(
        self, link: RecvLink, region: memoryview | None, consumer: Consumer, index: int,
        is_last: bool = False,
    ) -> None:  # fmt: skip
        """Want the next slice, in `region` (named to the peer) or, None, with its payload.

        `is_last` says that none follows it on this link in this call.
        """
        landing = link.post(region, self.op, self.signature, consumer, index, is_last)
        if landing.path is not None:
            self._links.name(link, landing)
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
        events = self._transport.poll(timeout_s)
        if events and self._is_measured:
            self._links.polled_s = self._clock()
        for event in events:
            self._handlers[type(event)](event)  # type: ignore[operator]
        has_computed = self._computer is not None and self._take_computed(self._computer)
        self.advance()
        return bool(events) or has_computed

    def advance(self) -> None:
        """Let the collective post what became possible, confirm, and flush."""
        links = self._links
        while links.touched:
            touched, links.touched = links.touched, []
            for consumer in touched:
                consumer.advance()
        if self._computer is not None:
            self._computer.commit()
        if self._unconfirmed:
            links.confirm_all(self._unconfirmed)
            self._unconfirmed.clear()
        self._transport.flush()

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
        for consumer in self._links.consumers.values():
            self._links.touch(consumer)
        return True

    # Events

    def _on_arrived(self, event: Arrived) -> None:
        path, frame = event.path, event.frame
        state = self._seen(path, frame)
        if frame.signature != self.signature or frame.op != self.op:
            self._compare(path.peer, frame.op, frame.signature)
            if self._revocation.error is not None:
                return
        link = self.recv_link(path.peer, frame.channel)
        state.nslices_received += 1
        state.nbytes_received += _nbytes(link, event)
        if frame.ack > self.send_link(path.peer, frame.channel).confirmed:
            self._confirmed(path.peer, frame.channel, frame.ack)
        if self._repairs.open:
            self._migration.note_arrival(event)
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
                self._links.touch(landing.owner)
            taken = link.take()

    def _on_cleared(self, event: Cleared) -> None:
        path, frame = event.path, event.frame
        self._seen(path, frame)
        if frame.signature != self.signature or frame.op != self.op:
            self._compare(path.peer, frame.op, frame.signature)
            if self._revocation.error is not None:
                return
        link = self.send_link(path.peer, frame.channel)
        if frame.ack > link.confirmed:
            self._confirmed(path.peer, frame.channel, frame.ack)
        again = link.cleared(path, frame.seq, event.nbytes, event.token)
        if again is not None:
            self._repairs.replayed(again.lost_on, len(again.view))
            self._links.write(link, again, event.token, is_replay=True)
        self._links.touch_channel(frame.channel)

    def _on_confirmed(self, event: Confirmed) -> None:
        self._paths[event.path].activity += 1
        self._confirmed(event.path.peer, event.channel, event.ack)

    def _confirmed(self, peer: int, channel: int, ack: int) -> None:
        released = self.send_link(peer, channel).confirm(ack)
        if released:
            self._links.release(released)
        self._links.touch_channel(channel)

    def _on_sent(self, event: Sent) -> None:
        self._paths[event.path].activity += 1
        link = self.send_link(event.path.peer, event.channel)
        released = link.retired(event.path, event.seq)
        self._links.note_retired(link)
        if released:
            self._links.release(released)

    def _seen(self, key: PathKey, frame: Frame) -> Path:
        """Note a sign of life, and which collective the peer is in."""
        path = self._paths[key]
        path.activity += 1
        if frame.op > path.op:
            path.op = frame.op
        return path

    # Agreement on the call

    def _compare(self, peer: int, op: int, signature: int) -> None:
        """Hold a peer's call against this rank's of the same number."""
        if op > self.op:
            self._ahead.setdefault(op, {}).setdefault(signature, peer)
            return
        mine = self._history.get(op, signature)
        if mine != signature:
            self._revocation.revoke(
                Revoke(
                    "InvalidArgument",
                    f"call {op} differs between ranks: rank {self.rank} called {describe(mine)}, "
                    f"rank {peer} called {describe(signature)}; "
                    "all ranks must pass the same collective, dtype, op, root, count and schedule",
                    self.rank,
                )
            )


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

__all__ = ["Computer", "Progress", "describe"]

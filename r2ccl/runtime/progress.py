"""The data loop: moves slices between the links and the transport.

`Progress.step` polls the transport, updates the links, delivers each slice to its `Consumer` (a
lane of a collective, a message, or the envelopes of messages), confirms consumed slices and flushes
the transport. Failure events go to handlers of `r2ccl.failover`. The data loop has no thread and no
lock: `r2ccl.runtime.data_loop` ensures that one thread at a time calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from r2ccl.dtypes import dtype_name
from r2ccl.errors import InvalidArgument
from r2ccl.failover.context import RankContext
from r2ccl.failover.failover import Failover
from r2ccl.failover.migration.calls import CONTEXT_SHIFT, Calls
from r2ccl.failover.migration.link import Landing, RecvLink
from r2ccl.failover.migration.links import Consumer, Links
from r2ccl.failover.migration.path import Path
from r2ccl.failover.revocation import Revoke
from r2ccl.transport.base import (
    Arrived,
    Cleared,
    Confirmed,
    Event,
    Failed,
    Fenced,
    Frame,
    Joined,
    Probed,
    RailChanged,
    Sent,
    Transport,
)
from r2ccl.types import (
    PAIRWISE,
    PARTED,
    REDUCTIONS,
    ROOTED,
    USER_OP,
    CallSignature,
    Collective,
    PathKey,
    ReduceOp,
)


class Computer(Protocol):
    """Executor that works on slices outside the data loop, asynchronously and in order."""

    @property
    def computed(self) -> int:
        """Sequence number of the last work known to be done; all earlier work is done too."""
        ...

    @property
    def is_busy(self) -> bool:
        """True if some work is not yet known to be done."""
        ...

    def commit(self) -> None:
        """Make `poll` see the end of all work begun so far.

        Raises
        ------
        TransportError
            If the device failed.
        """
        ...

    def poll(self) -> int:
        """Update and return `computed`, without waiting.

        Raises
        ------
        TransportError
            If the device failed.
        """
        ...


class Recorder(Protocol):
    """Interface of the object that takes the transport's place in `Progress.replay`.

    The object sends nothing.

    Attributes
    ----------
    events : list of Event
        Events that the posted slices cause at once; the data loop handles and removes them.
    """

    events: list[Event]

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: object, is_replay: bool = False
    ) -> None:
        """Record a slice that `Transport.isend` would send."""
        ...

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        """Record a landing place that `Transport.irecv` would announce."""
        ...

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """Ignore a confirmation that `Transport.confirm` would send."""
        ...

    def flush(self) -> None:
        """Do nothing where `Transport.flush` would write data."""
        ...


class Progress:
    """Data loop of one rank.

    Parameters
    ----------
    context : RankContext
    links : Links
    failover : Failover
        Handles failure events.
    """

    def __init__(self, context: RankContext, links: Links, failover: Failover) -> None:
        self.rank = context.rank
        self.config = context.config
        self._transport: Any = context.transport
        self._clock = context.clock
        self._links = links
        self._paths = links.paths
        self._is_measured = links.balance is not None
        self._migration = failover.migration
        self._revocation = failover.revocation
        self._repairs = self._migration.log
        links.on_later_call(self._on_later_call)
        #: Executors of the work that running calls have deferred.
        self._computers: dict[Calls[Consumer], Computer] = {}
        self._handlers: dict[Any, Callable[..., None]] = {
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

    # Called by the engine

    def begin(self, calls: Calls[Consumer], computer: Computer | None = None) -> None:
        """Prepare the data loop for the call that `Links.begin` started.

        If a peer is known to have started a different call with this number, revoke the
        communicator. The caller need not call this method if there is no `computer` and
        ``calls.ahead`` is empty.

        Parameters
        ----------
        calls : Calls
        computer : Computer, optional
            Executes the work that consumers defer.
        """
        if computer is not None:
            self._computers[calls] = computer
        for seen, peer, is_sent in calls.ahead.pop(calls.op, ()):
            self._compare(calls, peer, calls.op, seen, is_sent)

    def finish(self, calls: Calls[Consumer]) -> None:
        """End a call that has failed, or whose slices are all done."""
        calls.finish()
        self._computers.pop(calls, None)

    def forget(self) -> None:
        """Drop all references to slices; all paths must be out of use before this call."""
        self._computers.clear()
        self._links.forget()

    # The loop

    def step(self, timeout_s: float = 0.0) -> bool:
        """Run the loop once; return whether an event arrived or deferred work was done.

        If no event is pending, wait up to `timeout_s` seconds for one.
        """
        events = self._transport.poll(timeout_s)
        if events and self._is_measured:
            self._links.polled_s = self._clock()
        for event in events:
            self._handlers[type(event)](event)
        has_computed = bool(self._computers) and self._take_computed()
        self.advance()
        return bool(events) or has_computed

    def advance(self) -> None:
        """Advance the consumers in `Links.touched`, send due confirmations, flush the transport.

        Work that the consumers have deferred is committed (`Computer.commit`).
        """
        links = self._links
        while links.touched:
            touched, links.touched = links.touched, []
            for consumer in touched:
                consumer.advance()
        for computer in self._computers.values():
            computer.commit()
        if links.unconfirmed:
            links.confirm_all(links.unconfirmed)
            links.unconfirmed.clear()
        self._transport.flush()

    def replay(
        self, begin: Sequence[Callable[[], None]], events: Iterable[Event], recorder: Recorder
    ) -> None:
        """Pass the events that compiled code handled to the links and consumers of a call.

        Nothing is sent: the links and consumers only reach the state that they would have if the
        call had run here.

        Parameters
        ----------
        begin : sequence of callable
            Functions that post the first sends and receives of the call.
        events : iterable of Event
            The events, in the order in which compiled code handled them.
        recorder : Recorder
            Used by consumers and links instead of the transport. Its ``events`` are handled, too.
        """
        own: Transport = self._transport
        self._transport = recorder
        balance = self._links.begin_replay(recorder)
        try:
            for post in begin:
                post()
            self.advance()
            self._handle(recorder)
            for event in events:
                self._handlers[type(event)](event)
                self.advance()
                self._handle(recorder)
        finally:
            self._transport = own
            self._links.end_replay(own, balance)

    def _handle(self, recorder: Recorder) -> None:
        while recorder.events:
            events, recorder.events = recorder.events, []
            for event in events:
                self._handlers[type(event)](event)
            self.advance()

    @property
    def is_computing(self) -> bool:
        """True if a call waits for deferred work, whose end causes no transport event."""
        return any(computer.is_busy for computer in self._computers.values())

    def _take_computed(self) -> bool:
        """Let `advance` run the consumers of each call whose deferred work has progressed.

        Return True if there is at least one such call.
        """
        has_computed = False
        for calls, computer in self._computers.items():
            before = computer.computed
            if computer.poll() != before:
                has_computed = True
                for consumer in calls.consumers.values():
                    self._links.touch(consumer)
        return has_computed

    # Events

    def _on_arrived(self, event: Arrived) -> None:
        path, frame = event.path, event.frame
        state = self._seen(path, frame)
        if state is None:
            return
        links, channel = self._links, frame.channel
        link = links.receivers.get((path.peer, channel)) or links.receiver(path.peer, channel)
        payload: memoryview | bytes | None = event.payload
        state.nslices_received += 1
        state.nbytes_received += _nbytes(link, frame.seq) if payload is None else len(payload)
        if frame.ack > links.senders[path.peer, channel].confirmed:
            self.confirmed(path.peer, channel, frame.ack)
        if self._repairs.open:
            self._migration.note_arrival(event)
        is_wanted_now = frame.seq == link.delivered and frame.seq in link.landings
        if payload is not None and not is_wanted_now:
            payload = bytes(payload)
        if event.is_confirmed:
            link.acked = max(link.acked, frame.seq + 1)
        if link.arrived(frame.seq, payload, frame.op):
            links.deliver(link)

    def _on_cleared(self, event: Cleared) -> None:
        path, frame = event.path, event.frame
        if self._seen(path, frame, is_sent=True) is None:
            return
        link = self._links.sender(path.peer, frame.channel)
        if frame.ack > link.confirmed:
            self.confirmed(path.peer, frame.channel, frame.ack)
        again = link.cleared(path, frame.seq, event.nbytes, event.token)
        if again is not None:
            item, lost = again
            self._links.write_again(link, item, lost, event.token)
            self._repairs.replayed(item.lost_on, len(item.view))
        self._links.touch_channel(frame.channel)

    def _on_confirmed(self, event: Confirmed) -> None:
        self._paths[event.path].activity += 1
        self.confirmed(event.path.peer, event.channel, event.ack)

    def confirmed(self, peer: int, channel: int, ack: int) -> None:
        """Handle the confirmation of the slices to `peer` on `channel` numbered below `ack`."""
        released = self._links.sender(peer, channel).confirm(ack)
        if released:
            self._links.release(released)
        self._links.touch_channel(channel)

    def _on_sent(self, event: Sent) -> None:
        self._paths[event.path].activity += 1
        links, key = self._links, (event.path.peer, event.channel)
        link = links.senders.get(key) or links.sender(*key)
        released = link.retired(event.path, event.seq)
        self._links.note_retired(link)
        if released:
            self._links.release(released)

    def _seen(self, key: PathKey, frame: Frame, *, is_sent: bool = False) -> Path | None:
        """Record that `frame` arrived: count it as activity of its path, and note the peer's call.

        `is_sent` is True if the frame concerns a slice that this rank sends. Return the path, or
        None if the frame does not belong to the current call and the communicator has ended, for
        example because the peer and this rank have made different calls.
        """
        links = self._links
        path = self._paths[key]
        path.activity += 1
        context_id = frame.channel >> CONTEXT_SHIFT
        calls = links.calls.get(context_id) or links.calls_of(context_id)
        if frame.op > calls.seen.get(key.peer, 0):
            calls.seen[key.peer] = frame.op
        if frame.signature != calls.signature or frame.op != calls.op:
            self._compare(calls, key.peer, frame.op, frame.signature, is_sent)
            if self._revocation.error is not None:
                return None
        return path

    # Agreement on the call

    def _compare(
        self, calls: Calls[Consumer], peer: int, op: int, signature: int, is_sent: bool
    ) -> None:
        """Revoke the communicator if the calls numbered `op` of a peer and this rank differ.

        `signature` is the peer's, for slices from the peer or, if `is_sent`, to the peer. If
        this rank has not started the call, keep the signature for `begin`. If this rank has no
        signature of the call (see ``Calls.signatures``), do nothing.
        """
        if op > calls.op:
            calls.ahead.setdefault(op, {})[signature, peer, is_sent] = None
            return
        mine = calls.signatures.get(op, signature)
        if CallSignature.unpack(mine).collective in PAIRWISE:
            # The counts of earlier collectives are not kept, and not needed: a collective ends only
            # if the counts of all its slices are equal.
            pairs = calls.pairs if op == calls.op else None
            mine = (pairs or {}).get((peer, is_sent)) or _with_count_of(mine, signature)
        if mine != signature:
            self._revocation.revoke(self._difference(peer, op, mine, signature, is_sent))

    def _on_later_call(self, peer: int, landing: Landing) -> None:
        """Revoke the communicator: a slice of a later call of `peer` has arrived for `landing`.

        The slices of a link are numbered over all calls. In the call of `landing`, `peer` has
        therefore sent fewer slices than this rank expects.
        """
        rank, mine = self.rank, describe(landing.signature)
        self._revocation.revoke(
            Revoke(
                "InvalidArgument",
                f"call {landing.op} differs between ranks: rank {rank} called {mine}, rank {peer} "
                f"called a collective that sends less to rank {rank}; all ranks must pass the same "
                "collective, dtype, op, root, count, counts and schedule",
                rank,
            )
        )

    def _difference(self, peer: int, op: int, mine: int, theirs: int, is_sent: bool) -> Revoke:
        """Return the `Revoke` that describes how the calls of this rank and of `peer` differ."""
        own, other = CallSignature.unpack(mine), CallSignature.unpack(theirs)
        if own.collective in PAIRWISE and other == msgspec.structs.replace(own, count=other.count):
            source, target = (self.rank, peer) if is_sent else (peer, self.rank)
            sent, wanted = (own, other) if is_sent else (other, own)
            return Revoke(
                "InvalidArgument",
                f"call {op}, {describe(mine)}: rank {source} passes {sent.count} "
                f"elements for rank {target}, rank {target} expects {wanted.count} elements from "
                f"rank {source}; pass equal counts on both ranks",
                self.rank,
            )
        return Revoke(
            "InvalidArgument", str(difference(op, self.rank, peer, mine, theirs)), self.rank
        )


def _nbytes(link: RecvLink, seq: int) -> int:
    """Return the size in bytes of a cleared slice that arrived; 0 for a duplicate."""
    landing = link.landings.get(seq)
    return len(landing.region) if landing is not None and landing.region is not None else 0


def _with_count_of(signature: int, other: int) -> int:
    """Return packed `signature` with the count of packed signature `other`."""
    count = CallSignature.unpack(other).count
    return msgspec.structs.replace(CallSignature.unpack(signature), count=count).pack()


def is_other_call(signature: int, other: int) -> bool:
    """Return whether two packed signatures differ in more than the count.

    The counts of ranks that exchange no slices may differ: each GPU of a node reduces a different
    part of the data, together with the GPUs of the same number on the other nodes.
    """
    return _with_count_of(signature, other) != other


def describe(signature: int) -> str:
    """Return a packed call signature as text, such as ``allreduce(count=8, ...)``."""
    call = CallSignature.unpack(signature)
    name = Collective(call.collective).name.lower()
    if call.collective == Collective.BARRIER:
        return f"{name}()"
    parts = [] if call.collective in PAIRWISE else [f"count={call.count}"]
    parts.append(f"dtype={dtype_name(call.dtype)}")
    if call.collective in REDUCTIONS:
        is_user = call.op >= USER_OP
        parts.append(f"op=user_op {call.user:03x}" if is_user else f"op={ReduceOp(call.op).name}")
    if call.collective in ROOTED:
        parts.append(f"root={call.root}")
    elif call.root:
        what = "counts" if call.collective in PARTED else "counts or schedule"
        parts.append(f"{what}={call.root:03x}")
    return f"{name}({', '.join(parts)})"


def difference(
    op: int, rank: int, peer: int, mine: int, theirs: int, *, is_earlier: bool = False
) -> InvalidArgument:
    """Return the error for call `op`, whose packed signatures differ between `rank` and `peer`.

    If `is_earlier`, an earlier call may be the one that differs.
    """
    which = f"{op} or an earlier one" if is_earlier else str(op)
    return InvalidArgument(
        f"call {which} differs between ranks: rank {rank} called {describe(mine)}, "
        f"rank {peer} called {describe(theirs)}; "
        "all ranks must pass the same collective, dtype, op, root, count, counts and schedule"
    )


def closed_early(rank: int, own: int, peer: int, op: int) -> InvalidArgument:
    """Return the error for `rank`, which closed after call `own` although `peer` made call `op`."""
    return InvalidArgument(
        f"rank {rank} called close() after call {own}, but rank {peer} made call {op}: "
        "all ranks must make the same calls before close()"
    )


__all__ = ["Computer", "Progress", "closed_early", "describe", "difference", "is_other_call"]

"""Paths and links of one rank: posts slices, writes them to the transport, and releases them.

The executor posts slices and landing places here, the data loop passes on slices that arrive, and
migration resumes links on other paths. `Links` also keeps the `Calls` of every communicator (every
`Frame` carries the number and signature of its call), and passes the times of slices to the
bandwidth measurement. Only the thread that owns the data loop may modify a `Links`.

Invariant: a view given to the transport stays referenced by its link until the slice is released,
or until `Links.forget` drops it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from r2ccl.errors import InternalError
from r2ccl.failover.bandwidth.protocol import Balance
from r2ccl.failover.context import RankContext
from r2ccl.failover.migration.calls import (
    CONTEXT_SHIFT,
    HISTORY,
    Calls,
    context_of,
    is_of_messages,
)
from r2ccl.failover.migration.link import Landing, LinkReport, RecvLink, SendLink, Slice
from r2ccl.failover.migration.path import Path, PathState
from r2ccl.transport.base import Frame, Transport
from r2ccl.types import BYPASS, PathKey


class Consumer(Protocol):
    """User of `Links`: one channel of a running call, one message, or the envelopes of messages."""

    #: True if the slices serve to measure the bandwidth of the rails.
    is_bandwidth_sample: bool

    def on_slice(self, landing: Landing, payload: memoryview | bytes | None) -> None:
        """Handle a slice; the slices of each link are passed in the order of their numbers.

        Parameters
        ----------
        landing : Landing
            Receive that was posted for the slice.
        payload : memoryview or bytes or None
            Data of the slice, borrowed during this call; None: the data is in ``landing.region``.
        """
        ...

    def on_released(self, index: int) -> None:
        """Handle the release of one more cleared slice: its memory is free.

        `index` is the `Slice.index` of the slice.
        """
        ...

    def on_retired(self, index: int) -> None:
        """Handle one more retired cleared slice: only a replay may still read its memory.

        `index` is the `Slice.index` of the slice.
        """
        ...

    def advance(self) -> None:
        """Post all sends and receives that are possible now."""
        ...


class Links:
    """Paths and links of one rank.

    Parameters
    ----------
    context : RankContext
    """

    def __init__(self, context: RankContext) -> None:
        self._transport = context.transport
        self._clock = context.clock
        self._is_resilient = context.config.is_resilient
        self._neager = context.config.eager_slots
        self._rails = range(context.nrails)
        self._has_bypasses = context.has_bypasses
        #: Ranks that this rank has, had or will have data paths to.
        self.peers: set[int] = set()
        #: The ranks in `peers` whose paths are not closed as idle.
        self.connected: set[int] = set()
        #: Value of `ncalls` when the paths to each peer were last requested.
        self._wanted: dict[int, int] = {}
        #: Paths on rails, without bypasses.
        self.on_rails: dict[PathKey, Path] = {}
        #: All paths: those on rails and the bypasses.
        self.paths: dict[PathKey, Path] = {}
        self._paths_to: dict[int, tuple[Path, ...]] = {}
        #: Number of calls begun, of all communicators.
        self.ncalls = 0
        for peer in context.first_peers:
            self.add_peer(peer)
        #: Links by (peer, channel).
        self.senders: dict[tuple[int, int], SendLink] = {}
        self.receivers: dict[tuple[int, int], RecvLink] = {}
        #: Bandwidth measurement of this rank's rails; None if bandwidth is not measured.
        self.balance = Balance(context.homes) if context.is_measured else None
        #: Clock reading of the last poll with events, which count as simultaneous; for `balance`.
        self.polled_s = 0.0
        #: Calls of the communicators of this rank, by context id.
        self.calls: dict[int, Calls[Consumer]] = {0: Calls(0)}
        #: Consumers that the data loop must advance before it sleeps.
        self.touched: list[Consumer] = []
        #: Links with consumed slices to confirm. A dict, not a set: its order is deterministic, so
        #: simulated runs can be repeated.
        self.unconfirmed: dict[RecvLink, None] = {}
        self._confirm_after = context.config.confirm_after
        self._on_added: Callable[[int, int], None] | None = None
        self._on_later_call: Callable[[int, Landing], None] | None = None
        self._drops_messages = False

    def add_peer(self, peer: int) -> list[Path]:
        """Create the paths to `peer`, all down; return the paths on rails, without the bypass."""
        self.peers.add(peer)
        self.note_connected(peer)
        added = [Path(PathKey(peer, rail)) for rail in self._rails]
        self.on_rails.update({path.key: path for path in added})
        self.paths.update({path.key: path for path in added})
        bypasses = [Path(PathKey(peer, BYPASS))] if self._has_bypasses else []
        self.paths.update({path.key: path for path in bypasses})
        self._paths_to[peer] = (*added, *bypasses)
        return added

    def paths_to(self, peer: int) -> tuple[Path, ...]:
        """Return the paths to `peer`, in the order of their rails, the bypass last.

        Empty if this rank never had paths to `peer`.
        """
        return self._paths_to.get(peer, ())

    def note_connected(self, peer: int) -> None:
        """Add `peer` to `connected`, and record that its paths are used now."""
        self.connected.add(peer)
        self._wanted[peer] = self.ncalls

    def on_added(self, route: Callable[[int, int], None]) -> None:
        """Register ``route(peer, channel)``, called whenever a pair of links is created.

        The pair is the sending and the receiving end for `channel` to and from `peer`.
        """
        self._on_added = route

    def on_later_call(self, report: Callable[[int, Landing], None]) -> None:
        """Register ``report(peer, receive)``, called for a slice of a later call; see `deliver`."""
        self._on_later_call = report

    def sender(self, peer: int, channel: int) -> SendLink:
        """Return the sending end of the link to `peer` on `channel`; create it on first use."""
        return self.senders.get((peer, channel)) or self._add(peer, channel)[0]

    def receiver(self, peer: int, channel: int) -> RecvLink:
        """Return the receiving end of the link from `peer` on `channel`; create it on first use."""
        return self.receivers.get((peer, channel)) or self._add(peer, channel)[1]

    def _add(self, peer: int, channel: int) -> tuple[SendLink, RecvLink]:
        sender = SendLink(peer, channel, self._neager, is_confirmed=self._is_resilient)
        receiver = RecvLink(peer, channel)
        self.senders[peer, channel] = sender
        self.receivers[peer, channel] = receiver
        if self._on_added is not None:
            self._on_added(peer, channel)
        return sender, receiver

    def calls_of(self, context_id: int) -> Calls[Consumer]:
        """Return the `Calls` of communicator `context_id`; create the object on first use.

        A peer may use a new communicator before this rank has made it.
        """
        calls = self.calls.get(context_id)
        if calls is None:
            calls = self.calls[context_id] = Calls(context_id)
            if self._drops_messages and is_of_messages(context_id):
                calls.on_unposted = self._drop
        return calls

    def begin(
        self,
        calls: Calls[Consumer],
        signature: int,
        pairs: Mapping[tuple[int, bool], int] | None = None,
    ) -> None:
        """Start the next call of the communicator of `calls`.

        Parameters
        ----------
        calls : Calls
        signature : int
            Packed signature of the call.
        pairs : mapping of (int, bool) to int, optional
            Signatures per pair of ranks; see `Calls`.
        """
        self.ncalls += 1
        op = calls.op = calls.op + 1
        calls.signature = signature
        calls.pairs = pairs
        calls.signatures[op] = signature
        calls.signatures.pop(op - HISTORY, None)

    def forget(self) -> None:
        """Drop all links and their slices; all paths must be fenced, or the transport closed."""
        for calls in self.calls.values():
            calls.finish()
        self.touched.clear()
        self.unconfirmed.clear()
        # Compiled programs may still refer to the links.
        for sender in self.senders.values():
            sender.outstanding.clear()
        for receiver in self.receivers.values():
            receiver.landings.clear()
            receiver.arrivals.clear()
        self.senders.clear()
        self.receivers.clear()

    def begin_replay(self, recorder: Any) -> Balance | None:
        """Begin to handle events that compiled code has handled already (`Progress.replay`).

        Until `end_replay`, slices are passed to `recorder` instead of the transport, and no
        bandwidth is measured. Return the bandwidth measurement, for `end_replay`; None if there is
        none.
        """
        self._transport = recorder
        balance, self.balance = self.balance, None
        return balance

    def end_replay(self, transport: Transport, balance: Balance | None) -> None:
        """Pass slices to `transport` again, and measure bandwidth with `balance`."""
        self._transport = transport
        self.balance = balance

    def senders_to(self, peer: int) -> list[SendLink]:
        """Return the sending ends of all links to `peer`."""
        return [link for (to, _), link in self.senders.items() if to == peer]

    def receivers_from(self, peer: int) -> list[RecvLink]:
        """Return the receiving ends of all links from `peer`."""
        return [link for (of, _), link in self.receivers.items() if of == peer]

    def awaited_peers(self) -> set[int]:
        """Return the peers from which a slice or a confirmation is expected.

        The slice or confirmation may arrive on any path, because each end chooses its routes
        independently. Therefore this end cannot know which path to the peer has failed.
        """
        awaited = {peer for (peer, _), link in self.senders.items() if link.outstanding}
        awaited.update(peer for (peer, _), link in self.receivers.items() if link.landings)
        return awaited

    def last_op_of(self, peer: int) -> int:
        """Return the number of the last collective for which a frame has arrived from `peer`.

        Only collectives of the job's first communicator count; 0: no frame has arrived.
        """
        return self.calls_of(0).seen.get(peer, 0)

    def eager_nbytes(self) -> int:
        """Return the total bytes of the unreleased eager slices; any thread may call this."""
        return sum(
            len(item.view)
            for link in self.senders.copy().values()
            for item in tuple(link.outstanding)
            if item.is_eager
        )

    def idle_peers(self) -> list[int]:
        """Return the connected peers with whom no slice is under way, least recently used first.

        Peers are left out if a message needs the paths to them (`Calls.busy`), if no path to them
        on a rail is up, if a path to them is being repaired, or if a bypass to them is up.
        """
        idle = self.connected.difference(*(calls.busy for calls in self.calls.values()))
        # Only slices and receives posted here count as use: a confirmation may be of an old call.
        last_used = self._wanted.copy()
        for sender in self.senders.values():
            if sender.outstanding or sender.confirmed != sender.posted:
                idle.discard(sender.peer)
            last_used[sender.peer] = max(last_used[sender.peer], sender.last_used)
        for receiver in self.receivers.values():
            if receiver.landings or receiver.arrivals or receiver.acked != receiver.consumed:
                idle.discard(receiver.peer)
            last_used[receiver.peer] = max(last_used[receiver.peer], receiver.last_used)
        lit = set()
        for key, path in self.paths.items():
            is_up = path.state is PathState.UP
            if is_up and not key.is_bypass:
                lit.add(key.peer)
            elif is_up or path.state is not PathState.DOWN:
                idle.discard(key.peer)
        return sorted(idle & lit, key=lambda peer: (last_used[peer], peer))

    def is_drained(self) -> bool:
        """Return whether every slice ever posted is confirmed."""
        return all(link.confirmed == link.posted for link in self.senders.values())

    def is_drained_to(self, peer: int) -> bool:
        """Return whether every slice ever posted to `peer` is confirmed."""
        return all(link.confirmed == link.posted for link in self.senders_to(peer))

    # Slices of the current calls

    def send(
        self, link: SendLink, view: memoryview, is_eager: bool, consumer: Consumer, index: int
    ) -> None:
        """Post a slice of a call or message; ``link.can_post`` must be True.

        Parameters
        ----------
        link : SendLink
        view : memoryview
            Data of the slice, borrowed until the slice is released. It must be a copy if the slice
            is eager, because the consumer is not told when an eager slice is released.
        is_eager : bool
        consumer : Consumer
            Notified when a cleared slice is retired, and when it is released.
        index : int
            See `Slice`.

        Raises
        ------
        InternalError
            If the size of the landing place that the peer announced differs from that of `view`.
        """
        if not is_eager:
            _, nbytes, _ = link.clears[link.posted]
            if nbytes != len(view):
                raise InternalError(
                    f"rank {link.peer} announced a landing place of {nbytes} bytes for slice "
                    f"{link.posted} of channel {link.channel}, but the slice has {len(view)} bytes"
                )
        calls = self.calls[link.channel >> CONTEXT_SHIFT]
        link.last_used = self.ncalls
        signature = calls.pairs[link.peer, True] if calls.pairs else calls.signature
        item, token = link.post(view, is_eager, calls.op, signature, consumer, index)
        if item.path is not None:
            self.write(link, item, token)

    def recv(
        self, link: RecvLink, region: memoryview | None, consumer: Consumer, index: int,
        is_last: bool = False,
    ) -> None:  # fmt: skip
        """Post a receive of one slice of a call or message.

        Parameters
        ----------
        link : RecvLink
        region : memoryview or None
            Landing place, which is announced to the peer; borrowed until the slice is delivered.
            None if the slice is eager.
        consumer : Consumer
            Receives the slice.
        index : int
            See `Landing`.
        is_last : bool
            True for the last receive on the link in this call.
        """
        calls = self.calls[link.channel >> CONTEXT_SHIFT]
        link.last_used = self.ncalls
        signature = calls.pairs[link.peer, False] if calls.pairs else calls.signature
        landing = link.post(region, calls.op, signature, consumer, index, is_last)
        if landing.path is not None:
            self.name(link, landing)
        if link.arrivals:
            self.deliver(link)

    def deliver(self, link: RecvLink) -> None:
        """Pass the slices that have arrived and have a posted receive to their consumers, in order.

        Slices of a call that has ended are dropped. For a slice without a posted receive,
        `Calls.on_unposted` is called; if that is None, the slice waits. If the peer sent a slice in
        a later call than the call of the receive, the slice is dropped and reported
        (`on_later_call`): the peer has sent less in the call of the receive than this rank expects.
        """
        calls = self.calls[link.channel >> CONTEXT_SHIFT]
        while link.delivered in link.arrivals:
            taken = link.take()
            if taken is not None:
                landing, op, payload = taken
                if op > landing.op and self._on_later_call is not None:
                    self._on_later_call(link.peer, landing)
                elif landing.op == calls.op:
                    landing.owner.on_slice(landing, payload)
                    self.touch(landing.owner)
            elif calls.on_unposted is None:
                return
            else:
                calls.on_unposted(link)

    def expect(self, link: RecvLink, consumer: Consumer) -> None:
        """Post the receive of an eager slice that has already arrived.

        The index of the receive (`Landing.index`) is the number of the peer.
        """
        link.last_used = self.ncalls
        calls = self.calls[link.channel >> CONTEXT_SHIFT]
        link.post(None, calls.op, calls.signature, consumer, link.peer)

    def consume(self, link: RecvLink, is_eager: bool) -> None:
        """Mark the oldest unconsumed of the delivered slices as consumed.

        A cleared slice is confirmed when the data loop advances next (`Progress.advance`). An eager
        slice is confirmed with the next frame of its channel to the peer, by `confirm_all`, or once
        ``config.confirm_after`` slices of the link are consumed but not confirmed.
        """
        link.consume()
        if not is_eager or link.consumed - link.acked >= self._confirm_after:
            self.unconfirmed[link] = None

    def drop_messages(self) -> None:
        """Drop messages for closed communicators from now on, so that senders do not wait.

        Also drop messages for communicators that this rank never made.
        """
        self._drops_messages = True
        for calls in self.calls.values():
            if is_of_messages(calls.context_id) and calls.on_unposted is None:
                calls.on_unposted = self._drop
        for link in tuple(self.receivers.values()):
            if is_of_messages(context_of(link.channel)):
                self.deliver(link)

    def _drop(self, link: RecvLink) -> None:
        link.post(None, 0, 0, None, 0)
        link.take()
        self.consume(link, False)

    # To the transport

    def write(self, link: SendLink, item: Slice, token: object, *, is_replay: bool = False) -> None:
        """Send a posted slice on its path, together with a confirmation for the opposite link.

        Parameters
        ----------
        link : SendLink
        item : Slice
        token : object
            Token of the landing place; None sends the slice eagerly.
        is_replay : bool
            If True, a cleared slice is sent ahead of queued slices that are not replays; see
            `Transport.isend`.
        """
        key = item.path
        assert key is not None
        back = self.receivers[link.peer, link.channel]
        back.acked = back.consumed
        path = self.paths[key]
        path.nslices_sent += 1
        path.nbytes_sent += len(item.view)
        if self.balance is not None and not item.is_eager and item.owner.is_bandwidth_sample:
            self.balance.posted(key.rail, key.peer, self._clock())
        frame = Frame(link.channel, item.seq, back.acked, item.op, item.signature)
        self._transport.isend(key, frame, item.view, token, is_replay=is_replay)

    def name(self, link: RecvLink, landing: Landing) -> None:
        """Pass a landing place to the transport, which announces it to the peer.

        The announcement also confirms the consumed slices of the link.
        """
        assert landing.path is not None
        assert landing.region is not None
        link.acked = link.consumed
        frame = Frame(link.channel, landing.seq, link.acked, landing.op, landing.signature)
        # In mode failstop, slices are not replayed, so no rank waits for a confirmation.
        ack = link.early_ack(landing) if self._is_resilient else 0
        self._transport.irecv(landing.path, frame, landing.region, ack)

    def confirm_all(self, links: Iterable[RecvLink] | None = None) -> None:
        """Confirm all consumed slices of `links` (default: all links) that are not confirmed yet.

        This includes eager slices whose confirmation is being delayed to save frames. Links without
        a route are left out.
        """
        ways: dict[int, PathKey] = {}
        for link in self.receivers.values() if links is None else links:
            if link.acked < link.consumed and link.route is not None:
                link.acked = link.consumed
                # A confirmation may take any path, so those of all channels to a peer share one.
                way = ways.setdefault(link.peer, link.route)
                self._transport.confirm(way, link.channel, link.acked)

    def write_again(self, link: SendLink, item: Slice, lost: PathKey | None, token: object) -> None:
        """Send a lost slice to its new landing place.

        Parameters
        ----------
        link : SendLink
        item : Slice
        lost : PathKey or None
            Path on which the slice was lost, if `resume` has not been called for this path yet; see
            `SendLink.cleared`. `resume` will no longer find the slice, so this call records the
            loss.
        token : object
            Token of the new landing place.
        """
        if lost is not None:
            item.lost_on = (lost, self.paths[lost].epoch)
            self._note_lost(lost, [item])
        self.write(link, item, token, is_replay=True)

    # Release of slices

    def resume(self, link: SendLink, path: PathKey, report: LinkReport) -> None:
        """Apply `report`, the peer's report on `link`, after the loss of `path`.

        Release the slices that the report confirms. Slices of `path` that are missing in the report
        wait to be sent again. Both ends of `path` must be fenced.
        """
        under_way = [item for item in link.outstanding if item.path == path and not item.is_eager]
        self.release(link.resume(path, self.paths[path].epoch, report))
        self._note_lost(path, [item for item in under_way if item.path is None])
        # The report also confirms slices, which frees slots, so the collective may post more.
        self.touch_channel(link.channel)

    def _note_lost(self, path: PathKey, slices: list[Slice]) -> None:
        """Record in `balance` that the cleared `slices` are no longer in flight on `path`."""
        nlost = sum(item.owner.is_bandwidth_sample for item in slices)
        if nlost and self.balance is not None:
            self.balance.dropped(path.rail, self.polled_s, nlost)

    def release(self, slices: list[Slice]) -> None:
        """Notify the consumers of the cleared slices in `slices` that these slices are released.

        Also record in `balance` the slices that belong to a bandwidth sample and were not lost with
        a path.
        """
        balance = self.balance
        for item in slices:
            if not item.is_eager:
                item.owner.on_released(item.index)
                self.touch(item.owner)
                if balance is not None and item.path is not None and item.owner.is_bandwidth_sample:
                    balance.confirmed(item.path.rail, self.polled_s, len(item.view))

    def note_retired(self, link: SendLink) -> None:
        """Notify the consumers of the cleared slices of `link` that have just been retired."""
        for item in link.newly_retired():
            if not item.is_eager:
                item.owner.on_retired(item.index)
                self.touch(item.owner)

    def touch(self, consumer: Consumer) -> None:
        """Mark `consumer` to be advanced before the data loop sleeps."""
        if consumer not in self.touched:
            self.touched.append(consumer)

    def touch_channel(self, channel: int) -> None:
        """Mark the consumer of `channel`, if any, to be advanced before the data loop sleeps."""
        consumer = self.calls_of(channel >> CONTEXT_SHIFT).consumers.get(channel)
        if consumer is not None:
            self.touch(consumer)


__all__ = ["Consumer", "Links"]

"""Paths and links of one rank: slices are posted, written to the transport and released here.

The state that the data loop and the repair of paths share. The executor posts slices and landing
places, the data loop passes on what arrives, the repair resumes links on other paths. Frames carry
the number and the signature of the collective, so both are kept here. Bandwidth samples are taken
here. Owned by one caller at a time; handles slices, never bytes.

Invariant: a view given to the transport stays referenced by its link until the slice is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from r2ccl.errors import InternalError
from r2ccl.failover.bandwidth.protocol import Balance
from r2ccl.failover.context import RankContext
from r2ccl.failover.migration.link import Landing, LinkReport, RecvLink, SendLink, Slice
from r2ccl.failover.migration.path import Path
from r2ccl.transport.base import Frame
from r2ccl.types import BYPASS, PathKey


class Consumer(Protocol):
    """A part of a running collective that owns slices.

    ``is_bandwidth_sample`` says whether these show what the rails carry.
    """

    is_bandwidth_sample: bool

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
        #: Ranks this one has data paths to, or will have.
        self.peers: set[int] = set()
        #: Paths on rails; and all paths, with the bypasses.
        self.on_rails: dict[PathKey, Path] = {}
        self.paths: dict[PathKey, Path] = {}
        for peer in context.first_peers:
            self.add_peer(peer)
        self.senders: dict[tuple[int, int], SendLink] = {}
        self.receivers: dict[tuple[int, int], RecvLink] = {}
        #: What this rank's rails are measured at, where there are several.
        self.balance = Balance(context.homes) if context.is_measured else None
        #: Clock reading of the last poll: events of one poll count as simultaneous.
        self.polled_s = 0.0
        #: Number and packed signature of the current collective, or of the last one.
        self.op = 0
        self.signature = 0
        #: Signatures of the last `_HISTORY` collectives, by number.
        self.signatures: dict[int, int] = {}
        #: Consumers of the current collective by channel, and those to advance before sleeping.
        self.consumers: Mapping[int, Consumer] = {}
        self.touched: list[Consumer] = []
        #: Links whose consumed slices are to be confirmed; ordered, unlike a set: runs repeat.
        self.unconfirmed: dict[RecvLink, None] = {}
        self._confirm_after = max(1, context.config.eager_slots // 2)
        self._on_added: Callable[[int, int], None] | None = None

    def add_peer(self, peer: int) -> list[Path]:
        """Create the paths to another rank, all down; return those on rails."""
        self.peers.add(peer)
        added = [Path(PathKey(peer, rail)) for rail in self._rails]
        self.on_rails.update({path.key: path for path in added})
        self.paths.update({path.key: path for path in added})
        if self._has_bypasses:
            key = PathKey(peer, BYPASS)
            self.paths[key] = Path(key)
        return added

    def on_added(self, route: Callable[[int, int], None]) -> None:
        """Call ``route(peer, channel)`` whenever a pair of links is created."""
        self._on_added = route

    def sender(self, peer: int, channel: int) -> SendLink:
        """Return the link to `peer` on `channel`, created on first use."""
        return self.senders.get((peer, channel)) or self._add(peer, channel)[0]

    def receiver(self, peer: int, channel: int) -> RecvLink:
        """Return the link from `peer` on `channel`, created on first use."""
        return self.receivers.get((peer, channel)) or self._add(peer, channel)[1]

    def _add(self, peer: int, channel: int) -> tuple[SendLink, RecvLink]:
        sender = SendLink(peer, channel, self._neager, is_confirmed=self._is_resilient)
        receiver = RecvLink(peer, channel)
        self.senders[peer, channel] = sender
        self.receivers[peer, channel] = receiver
        if self._on_added is not None:
            self._on_added(peer, channel)
        return sender, receiver

    def begin(self, signature: int) -> None:
        """Start the next collective."""
        self.op += 1
        self.signature = signature
        self.signatures[self.op] = signature
        self.signatures.pop(self.op - _HISTORY, None)

    def finish(self) -> None:
        """End the collective: all its slices were delivered and released."""
        self.consumers = {}

    def forget(self) -> None:
        """Drop all references to slices, when no path is in use any more."""
        self.finish()
        self.touched.clear()
        self.unconfirmed.clear()
        self.senders.clear()
        self.receivers.clear()

    def senders_to(self, peer: int) -> list[SendLink]:
        """Return the links to `peer`."""
        return [link for (to, _), link in self.senders.items() if to == peer]

    def receivers_from(self, peer: int) -> list[RecvLink]:
        """Return the links from `peer`."""
        return [link for (of, _), link in self.receivers.items() if of == peer]

    def awaited_peers(self) -> set[int]:
        """Peers from which a slice or a confirmation should come.

        It may come on any path: the ends choose their routes on their own, so this end cannot
        know which of them is the one that went silent.
        """
        awaited = {peer for (peer, _), link in self.senders.items() if link.outstanding}
        awaited.update(peer for (peer, _), link in self.receivers.items() if link.landings)
        return awaited

    def last_op_of(self, peer: int) -> int:
        """Return the last collective of `peer` that was seen."""
        ops = (path.op for key, path in self.paths.items() if key.peer == peer)
        return max(ops, default=0)

    def is_drained(self) -> bool:
        """Whether every slice ever posted is confirmed."""
        return all(link.confirmed == link.posted for link in self.senders.values())

    def is_drained_to(self, peer: int) -> bool:
        """Whether every slice ever posted to `peer` is confirmed."""
        return all(link.confirmed == link.posted for link in self.senders_to(peer))

    # Slices of the current collective

    def send(
        self, link: SendLink, view: memoryview, is_eager: bool, consumer: Consumer, index: int
    ) -> None:
        """Post a slice of send op `index`; ``link.can_post`` must be True.

        Parameters
        ----------
        link : SendLink
        view : memoryview
            Borrowed until the slice is released; of an eager slice, the link's to keep.
        is_eager : bool
        consumer : Consumer
            Notified when the slice is released.
        index : int

        Raises
        ------
        InternalError
            If the landing place that the peer named has another size.
        """
        if not is_eager:
            _, nbytes, _ = link.clears[link.posted]
            if nbytes != len(view):
                raise InternalError(
                    f"rank {link.peer} named {nbytes} bytes for slice {link.posted} of channel "
                    f"{link.channel}, this rank sends {len(view)}"
                )
        item, token = link.post(view, is_eager, self.op, self.signature, consumer, index)
        if item.path is not None:
            self.write(link, item, token)

    def recv(
        self, link: RecvLink, region: memoryview | None, consumer: Consumer, index: int,
        is_last: bool = False,
    ) -> None:  # fmt: skip
        """Post a receive of op `index`.

        Parameters
        ----------
        link : RecvLink
        region : memoryview or None
            Landing place, which is named to the peer; None: the slice is eager.
        consumer : Consumer
            Gets the slice.
        index : int
        is_last : bool
            No receive follows on this link in this collective.
        """
        landing = link.post(region, self.op, self.signature, consumer, index, is_last)
        if landing.path is not None:
            self.name(link, landing)
        if link.arrivals:
            self.deliver(link)

    def deliver(self, link: RecvLink) -> None:
        """Hand over the slices that arrived and are wanted, in order."""
        taken = link.take()
        while taken is not None:
            landing, payload = taken
            if landing.signature == self.signature:
                landing.owner.on_slice(landing, payload)
                self.touch(landing.owner)
            taken = link.take()

    def consume(self, link: RecvLink, is_eager: bool) -> None:
        """Count the oldest delivered slice as consumed: it may be confirmed."""
        link.consume()
        if not is_eager or link.consumed - link.acked >= self._confirm_after:
            self.unconfirmed[link] = None

    # To the transport

    def write(self, link: SendLink, item: Slice, token: object, *, is_replay: bool = False) -> None:
        """Write a slice that was posted, on its path."""
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
        """Name a landing place on its path."""
        assert landing.path is not None
        assert landing.region is not None
        link.acked = link.consumed
        frame = Frame(link.channel, landing.seq, link.acked, landing.op, landing.signature)
        # In mode failstop nobody waits for a confirmation.
        ack = link.early_ack(landing) if self._is_resilient else 0
        self._transport.irecv(landing.path, frame, landing.region, ack)

    def confirm_all(self, links: Iterable[RecvLink] | None = None) -> None:
        """Confirm what was consumed, also eager slices not worth a frame of their own yet."""
        ways: dict[int, PathKey] = {}
        for link in self.receivers.values() if links is None else links:
            if link.acked < link.consumed and link.route is not None:
                link.acked = link.consumed
                # Confirmations may take any path: those of all channels share one.
                way = ways.setdefault(link.peer, link.route)
                self._transport.confirm(way, link.channel, link.acked)

    # Slices that are done with, and their owners

    def resume(self, link: SendLink, path: PathKey, report: LinkReport) -> None:
        """Both ends of `path` are fenced, and the peer's report of `link` is here."""
        under_way = [item for item in link.outstanding if item.path == path and not item.is_eager]
        self.release(link.resume(path, report))
        nlost = sum(item.path is None and item.owner.is_bandwidth_sample for item in under_way)
        if nlost and self.balance is not None:
            self.balance.dropped(path.rail, self.polled_s, nlost)
        # The report is a confirmation too, and credits let a call post.
        self.touch_channel(link.channel)

    def release(self, slices: list[Slice]) -> None:
        """Tell their owners that slices were released."""
        balance = self.balance
        for item in slices:
            if not item.is_eager:
                item.owner.on_released(item.index)
                self.touch(item.owner)
                if balance is not None and item.path is not None and item.owner.is_bandwidth_sample:
                    balance.confirmed(item.path.rail, self.polled_s, len(item.view))

    def note_retired(self, link: SendLink) -> None:
        """Tell the owners of slices the transport is done with."""
        for item in link.newly_retired():
            if not item.is_eager:
                item.owner.on_retired(item.index)
                self.touch(item.owner)

    def touch(self, consumer: Consumer) -> None:
        """Have `consumer` advanced before the loop sleeps."""
        if consumer not in self.touched:
            self.touched.append(consumer)

    def touch_channel(self, channel: int) -> None:
        """Have whoever runs on `channel` advanced."""
        consumer = self.consumers.get(channel)
        if consumer is not None:
            self.touch(consumer)


#: Collectives a rank can be behind another and still have its call compared.
_HISTORY = 64

__all__ = ["Consumer", "Links"]

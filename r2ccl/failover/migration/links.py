"""The paths of one rank, and its links over them: what is posted, confirmed, written again.

What the data loop and the repair of paths have in common: the loop posts slices and takes them,
the repair has links resumed on other paths. Frames go to the transport from here, and the rates of
rails are counted here. Owned by one caller at a time; touches slices, never bytes.

Invariant: a view given to the transport stays referenced by its link until the slice is released.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

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
        rails = range(context.nrails)
        #: Paths on rails; and all, with the bypasses.
        self.on_rails = {
            key: Path(key)
            for key in (PathKey(peer, rail) for peer in context.peers for rail in rails)
        }
        self.paths = dict(self.on_rails)
        if context.has_bypasses:
            self.paths.update(
                {key: Path(key) for key in (PathKey(to, BYPASS) for to in context.peers)}
            )
        self.senders: dict[tuple[int, int], SendLink] = {}
        self.receivers: dict[tuple[int, int], RecvLink] = {}
        #: What this rank's rails are measured at, where there are several.
        self.balance = Balance(context.homes) if context.is_measured else None
        #: When the events under way were taken: what comes together counts as one instant.
        self.polled_s = 0.0
        #: Who runs on which channel, and who has to be advanced before the loop sleeps.
        self.consumers: Mapping[int, Consumer] = {}
        self.touched: list[Consumer] = []

    def add(self, peer: int, channel: int) -> None:
        """Make the two links with `peer` of `channel`; they have no route yet."""
        key = (peer, channel)
        self.senders[key] = SendLink(peer, channel, self._neager, is_confirmed=self._is_resilient)
        self.receivers[key] = RecvLink(peer, channel)

    def forget(self) -> None:
        """Let go of all memory that slices were in; once no path is in use any more."""
        self.consumers = {}
        self.touched.clear()
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
        return max(path.op for key, path in self.paths.items() if key.peer == peer)

    def is_drained(self) -> bool:
        """Whether every slice ever posted is confirmed."""
        return all(link.confirmed == link.posted for link in self.senders.values())

    def is_drained_to(self, peer: int) -> bool:
        """Whether every slice ever posted to `peer` is confirmed."""
        return all(link.confirmed == link.posted for link in self.senders_to(peer))

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


__all__ = ["Consumer", "Links"]

"""Link: the directed, ordered, exactly-once stream of slices of one channel.

Theory of operation
-------------------
Slices are numbered by ``seq``, per (sender, receiver, channel), for the life of a communicator. A
slice is identified by its number, never by the path it rode, so any slice may travel on any live
path and a link changes path without a handshake of its own. Each end chooses only what it must:

* An *eager* slice is copied by the sender and rides the sender's ``route``.
* A *cleared* slice rides the path on which the receiver named its landing place.

Three numbers describe the sender (``confirmed <= posted``) and three the receiver
(``consumed <= received <= posted``)::

    sender    confirmed ........ posted        slices between may have to be replayed
    receiver  consumed .. received .. posted   received, not yet consumed | landing places named

When a path is fenced at both ends the receiver's report (``received`` and the slices that came
early over another path) decides what the sender replays: exactly its slices of that path that are
not in the report. A slice torn by the failure is not in it and is sent again whole.

Memory of a cleared slice is released when the peer confirmed it *and* its request is retired (the
transport reported it sent, or its path was fenced): a confirmation does not stop a network card's
retransmission, and a retired request does not prove the peer saw the data.

Pure tables: no I/O, no clock, no threads. Invariants, held by the property tests: a slice is
delivered once, in order, whole; nothing below ``confirmed`` is read again.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Any

import msgspec

from r2ccl.errors import InternalError
from r2ccl.types import PathKey


class LinkReport(msgspec.Struct, frozen=True, gc=False):
    """What the receiving end of one link holds when a path is fenced.

    ``early`` lists slices at or above ``received`` that came over another path.
    """

    channel: int
    consumed: int
    received: int
    early: tuple[int, ...] = ()


class SliceState(enum.IntEnum):
    """Where a posted slice is, seen by its sender."""

    WAITING = 0  #: on no path: needs a route or a new landing place
    WRITING = 1  #: given to a path; the transport reads its view
    RETIRED = 2  #: the transport is done with the view
    HELD = 3  #: retired, and the receiver reported that it holds the slice


class Slice:
    """One posted slice; ``owner`` and ``index`` are the executor's, returned when released."""

    __slots__ = (
        "index", "is_eager", "lost_on", "op", "owner", "path", "seq", "signature", "state", "view",
    )  # fmt: skip

    def __init__(
        self, seq: int, view: memoryview, is_eager: bool, op: int, signature: int, owner: Any,
        index: int,
    ) -> None:  # fmt: skip
        self.seq = seq
        self.view = view
        self.is_eager = is_eager
        self.op = op
        self.signature = signature
        self.owner = owner
        self.index = index
        self.path: PathKey | None = None
        #: The fenced path it rode in vain.
        self.lost_on: PathKey | None = None
        self.state = SliceState.WAITING


class SendLink:
    """The sender's half of a link.

    Parameters
    ----------
    peer, channel : int
    slots : int
        Unconfirmed eager slices allowed under way.
    is_confirmed : bool
        False for the fail-stop baseline: cleared slices are released once they are retired.
    """

    __slots__ = (
        "channel", "clears", "confirmed", "is_confirmed", "outstanding", "peer", "posted",
        "retired_below", "route", "slots",
    )  # fmt: skip

    def __init__(self, peer: int, channel: int, slots: int, *, is_confirmed: bool = True) -> None:
        self.peer = peer
        self.channel = channel
        self.slots = slots
        self.is_confirmed = is_confirmed
        #: Path eager slices ride; None while no path to the peer is up.
        self.route: PathKey | None = None
        self.posted = 0
        self.confirmed = 0
        #: Every slice below it is retired, in order.
        self.retired_below = 0
        #: Slices not yet released, contiguous in ``seq``.
        self.outstanding: deque[Slice] = deque()
        #: Landing places the peer named for slices not posted yet.
        self.clears: dict[int, tuple[PathKey, int, object]] = {}

    def can_post(self, is_eager: bool) -> bool:
        """Whether the next slice may be posted: a free slot, or a named landing place."""
        if is_eager:
            return self.posted - self.confirmed < self.slots
        return self.posted in self.clears

    def post(
        self, view: memoryview, is_eager: bool, op: int, signature: int, owner: Any, index: int
    ) -> tuple[Slice, object]:
        """Number a slice; the caller writes it now if its state is WRITING, with the token."""
        seq = self.posted
        self.posted = seq + 1
        item = Slice(seq, view, is_eager, op, signature, owner, index)
        self.outstanding.append(item)
        token: object = None
        if is_eager:
            item.path = self.route
        else:
            item.path, _, token = self.clears.pop(seq)
        if item.path is not None:
            item.state = SliceState.WRITING
        return item, token

    def cleared(self, path: PathKey, seq: int, nbytes: int, token: object) -> Slice | None:
        """Note a landing place; returns the slice to write now if it was already posted."""
        if seq >= self.posted:
            self.clears[seq] = (path, nbytes, token)
            return None
        item = self._find(seq)
        if item is None or item.is_eager or item.state == SliceState.HELD:
            raise InternalError(
                f"link to rank {self.peer}, channel {self.channel}: landing place named on rail "
                f"{path.rail} for slice {seq}, which needs none "
                f"(confirmed {self.confirmed}, posted {self.posted})"
            )
        item.path = path
        item.state = SliceState.WRITING
        return item

    def retired(self, path: PathKey, seq: int) -> list[Slice]:
        """The transport no longer reads the view; returns the slices released by that."""
        item = self._find(seq)
        if item is not None and item.path == path and item.state == SliceState.WRITING:
            item.state = SliceState.RETIRED
        return self._release()

    def newly_retired(self) -> list[Slice]:
        """Take the slices that are retired, as all before them are, for the first time."""
        found = []
        while self.retired_below < self.posted:
            item = self._find(self.retired_below)
            if item is not None and item.state < SliceState.RETIRED:
                break
            if item is not None:
                found.append(item)
            self.retired_below += 1
        return found

    def confirm(self, ack: int) -> list[Slice]:
        """Slices below `ack` were consumed; returns the slices released by that.

        Raises
        ------
        InternalError
            The peer confirmed a slice that was never posted.
        """
        if ack <= self.confirmed:
            return []
        if ack > self.posted:
            raise InternalError(
                f"rank {self.peer} confirmed slice {ack - 1} of channel {self.channel}, "
                f"posted are {self.posted}"
            )
        self.confirmed = ack
        return self._release()

    def fenced(self, path: PathKey) -> list[Slice]:
        """The local end of `path` is drained: its requests are retired, its clears void.

        Returns the slices released by that.
        """
        for item in self.outstanding:
            if item.path == path and item.state == SliceState.WRITING:
                item.state = SliceState.RETIRED
        for seq in [seq for seq, clear in self.clears.items() if clear[0] == path]:
            del self.clears[seq]
        return self._release()

    def resume(self, path: PathKey, report: LinkReport) -> list[Slice]:
        """Both ends of `path` are fenced; the report says what arrived. Returns the released.

        What is lost becomes WAITING: an eager slice for a route (`waiting` takes it), a cleared
        one for the landing place the receiver names next.

        Raises
        ------
        InternalError
            The report names slices that were never posted.
        """
        if report.received > self.posted:
            raise InternalError(
                f"rank {self.peer} resumes channel {self.channel} at slice {report.received}, "
                f"posted are {self.posted}"
            )
        # Confirmations on healthy paths overtake the report, which may be older than `confirmed`;
        # about slices of the fenced path it is final.
        released = self.confirm(report.consumed)
        held_below = max(report.received, self.confirmed)
        for item in self.outstanding:
            if item.path == path:
                item.path, item.lost_on = None, path
                is_held = item.seq < held_below or item.seq in report.early
                item.state = SliceState.HELD if is_held else SliceState.WAITING
        return released + self._release()

    def waiting(self) -> list[Slice]:
        """Take the eager slices that have no path, now that there is a route, to write them."""
        found = [
            item
            for item in self.outstanding
            if item.is_eager and item.path is None and item.state == SliceState.WAITING
        ]
        for item in found:
            item.path = self.route
            item.state = SliceState.WRITING
        return found

    def _find(self, seq: int) -> Slice | None:
        if not self.outstanding:
            return None
        index = seq - self.outstanding[0].seq
        return self.outstanding[index] if 0 <= index < len(self.outstanding) else None

    def _release(self) -> list[Slice]:
        released: list[Slice] = []
        queue = self.outstanding
        while queue and queue[0].state >= SliceState.RETIRED:
            if self.is_confirmed and queue[0].seq >= self.confirmed:
                break
            released.append(queue.popleft())
        return released


class Landing:
    """Where one slice is wanted; ``region`` None: eager, it comes with its payload."""

    __slots__ = (
        "index", "is_last", "op", "owner", "path", "region", "seq", "signature", "was_lost",
    )  # fmt: skip

    def __init__(
        self, seq: int, region: memoryview | None, op: int, signature: int, owner: Any, index: int,
        is_last: bool = False,
    ) -> None:  # fmt: skip
        self.seq = seq
        #: Nothing follows it on this link in its call: its sender waits for the confirmation.
        self.is_last = is_last
        #: It was named on a path that failed: its slice will be a replay.
        self.was_lost = False
        self.region = region
        self.op = op
        self.signature = signature
        self.owner = owner
        self.index = index
        self.path: PathKey | None = None


class RecvLink:
    """The receiver's half of a link."""

    __slots__ = (
        "acked", "arrivals", "channel", "consumed", "delivered", "duplicates", "landings", "peer",
        "posted", "received", "replay_from", "route",
    )  # fmt: skip

    def __init__(self, peer: int, channel: int) -> None:
        self.peer = peer
        self.channel = channel
        #: Path landing places are named on; None while no path to the peer is up.
        self.route: PathKey | None = None
        self.posted = 0
        self.received = 0
        self.delivered = 0
        self.consumed = 0
        #: The ``consumed`` the peer was last told.
        self.acked = 0
        self.landings: dict[int, Landing] = {}
        #: Slices here but not delivered: payload of eager ones, None for cleared ones.
        self.arrivals: dict[int, memoryview | bytes | None] = {}
        self.duplicates = 0

    def post(
        self, region: memoryview | None, op: int, signature: int, owner: Any, index: int,
        is_last: bool = False,
    ) -> Landing:  # fmt: skip
        """Want the next slice; the caller names cleared ones on ``route``."""
        seq = self.posted
        self.posted = seq + 1
        landing = Landing(seq, region, op, signature, owner, index, is_last)
        self.landings[seq] = landing
        if region is not None:
            landing.path = self.route
        return landing

    def early_ack(self, landing: Landing) -> int:
        """What the transport may confirm by itself once `landing`'s slice is safe; 0: nothing.

        A confirmation is for all slices before it too, and a path keeps only its own in order:
        every slice still expected must come on the path of `landing`. A replay overtakes what is
        queued, so it proves nothing about the others.
        """
        if not landing.is_last or landing.was_lost:
            return 0
        is_alone = all(other.path == landing.path for other in self.landings.values())
        return landing.seq + 1 if is_alone else 0

    def arrived(self, seq: int, payload: memoryview | bytes | None) -> bool:
        """Note a slice; False for one that was here before (dropped and counted)."""
        if seq < self.received or seq in self.arrivals:
            self.duplicates += 1
            return False
        self.arrivals[seq] = payload
        while self.received in self.arrivals:
            self.received += 1
        return True

    def take(self) -> tuple[Landing, memoryview | bytes | None] | None:
        """Next slice to deliver, in order, or None."""
        seq = self.delivered
        if seq not in self.arrivals or seq not in self.landings:
            return None
        self.delivered = seq + 1
        return self.landings.pop(seq), self.arrivals.pop(seq)

    def consume(self) -> None:
        """The executor is done with the next delivered slice; it may be confirmed."""
        self.consumed += 1
        if self.consumed > self.delivered:
            raise InternalError(f"link from rank {self.peer}: consumed more than was delivered")

    def report(self) -> LinkReport:
        """What this end holds; compute it only after the path is fenced."""
        early = tuple(sorted(seq for seq in self.arrivals if seq >= self.received))
        return LinkReport(self.channel, self.consumed, self.received, early)

    def is_awaiting(self, path: PathKey) -> bool:
        """Whether the first slice not received is wanted, and may have been lost on `path`."""
        landing = self.landings.get(self.received)
        return landing is not None and (landing.region is None or landing.path == path)

    def resume(self, path: PathKey) -> None:
        """Both ends of `path` are fenced: the landing places named on it need a new one."""
        for seq, landing in self.landings.items():
            if landing.path == path and seq not in self.arrivals:
                landing.path = None
                landing.was_lost = True

    def unnamed(self) -> list[Landing]:
        """Take the landing places that have no path, now that there is a route, to name them."""
        found = [
            landing
            for seq, landing in sorted(self.landings.items())
            if landing.region is not None and landing.path is None and seq not in self.arrivals
        ]
        for landing in found:
            landing.path = self.route
        return found


__all__ = ["Landing", "LinkReport", "RecvLink", "SendLink", "Slice", "SliceState"]

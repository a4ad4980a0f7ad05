"""Link: the directed, ordered, exactly-once stream of slices of one channel.

Theory of operation
-------------------
Slices are numbered by ``seq``, per (sender, receiver, channel), for the life of a communicator. A
slice is identified by its number, never by the path it travels on. Any slice may therefore travel
on any path that is up, and a link changes its path without a handshake:

* An *eager* slice is copied by the sender and travels on the sender's ``route``.
* A *cleared* slice travels on the path on which the receiver announced its landing place.

Two counts describe the sender (``confirmed <= posted``) and three the receiver
(``consumed <= delivered <= received``)::

    sender    confirmed .............. posted     slices between may have to be replayed
    receiver  consumed .. delivered .. received   passed on, still in use | waiting for a receive

All slices with numbers below ``received`` have arrived. The receiver's ``posted`` counts its posted
receives; eager slices may arrive before their receive is posted.

When a path is fenced at both ends, the receiver's report (``received`` and the slices that arrived
ahead of a missing one) decides what the sender replays: exactly its slices of that path that are
not in the report. A slice that the failure interrupted is not in the report; it is sent again
completely.

Memory of a cleared slice is released when the peer has confirmed the slice *and* the send request
is retired (the transport reported it sent, or its path was fenced). Both are needed: a
confirmation does not stop a NIC's retransmission, and a retired request does not prove that the
peer received the data. Without confirmations (the fail-stop baseline), retirement is enough.

Invariants, checked by the property tests: every slice is delivered once, in order and whole; no
slice below ``confirmed`` is replayed.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Any

import msgspec

from r2ccl.errors import InternalError
from r2ccl.types import PathKey


class LinkReport(msgspec.Struct, frozen=True, gc=False):
    """Slices that the receiving end of the link of ``channel`` has when a path is fenced.

    All slices with numbers below ``consumed`` are consumed, all below ``received`` have arrived.
    Slice ``received`` is missing; ``early`` lists the slices above it that have arrived.
    """

    channel: int
    consumed: int
    received: int
    early: tuple[int, ...] = ()


class SliceState(enum.IntEnum):
    """State of a posted slice at its sender."""

    WAITING = 0  #: on no path: needs a route (eager) or a new landing place (cleared)
    WRITING = 1  #: given to a path; the transport may read its view
    RETIRED = 2  #: the transport reported it sent, or its path was fenced
    HELD = 3  #: retired, and the receiver reported that it has the slice


class Slice:
    """One posted slice.

    ``view`` is the payload. ``op`` and ``signature`` are the number and the packed signature of the
    call that the slice belongs to; both are 0 for a message. ``owner`` is the `Consumer` that
    posted the slice. ``index`` is the number of the send op that the slice belongs to; 0 for a
    message, which has no ops.
    """

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
        #: Last fenced path on which the slice was in flight, and the epoch that its fence ended;
        #: None if there was none.
        self.lost_on: tuple[PathKey, int] | None = None
        self.state = SliceState.WAITING


class SendLink:
    """Sending end of a link.

    A slice is *retired* when the transport has reported it sent or its path was fenced. The
    transport then no longer reads a cleared slice, unless the slice is replayed. A slice is
    *released* when, in addition, the receiver has confirmed it: its memory may then be used again.

    Parameters
    ----------
    peer, channel : int
        Receiving rank, and channel of the link.
    slots : int
        An eager slice may be posted while fewer than this many slices are unconfirmed.
    is_confirmed : bool
        If False (the fail-stop baseline), slices are released once retired, without confirmation.
    """

    __slots__ = (
        "channel", "clears", "confirmed", "is_confirmed", "last_used", "outstanding", "peer",
        "posted", "retired_below", "route", "slots",
    )  # fmt: skip

    def __init__(self, peer: int, channel: int, slots: int, *, is_confirmed: bool = True) -> None:
        self.peer = peer
        self.channel = channel
        self.slots = slots
        self.is_confirmed = is_confirmed
        #: Path that eager slices travel on. None while no path to the peer is up, and usually from
        #: the loss of the route until both ends of the lost path are fenced.
        self.route: PathKey | None = None
        self.posted = 0
        self.confirmed = 0
        #: `Links.ncalls` when a slice was last posted; 0: none was.
        self.last_used = 0
        #: Number of the slice from which the next call of `newly_retired` continues.
        self.retired_below = 0
        #: Slices not yet released, contiguous in ``seq``, oldest first.
        self.outstanding: deque[Slice] = deque()
        #: Landing places announced for slices not posted yet: seq -> (path, bytes, token).
        self.clears: dict[int, tuple[PathKey, int, object]] = {}

    def can_post(self, is_eager: bool) -> bool:
        """Return whether the next slice may be posted.

        An eager slice needs a free slot, a cleared slice a landing place.
        """
        if is_eager:
            return self.posted - self.confirmed < self.slots
        return self.posted in self.clears

    def post(
        self, view: memoryview, is_eager: bool, op: int, signature: int, owner: Any, index: int
    ) -> tuple[Slice, object]:
        """Post the next slice; return it and the token of its landing place (None if eager).

        `can_post` must be True. The caller writes the slice now if its state is WRITING. The
        parameters are the attributes of `Slice`.
        """
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

    def cleared(
        self, path: PathKey, seq: int, nbytes: int, token: object
    ) -> tuple[Slice, PathKey | None] | None:
        """Record a landing place of `nbytes` that the peer announced on `path` for slice `seq`.

        `token` is passed back to the transport with the slice. If the slice is not posted yet,
        return None. Otherwise return the slice, which the caller writes now, and the path on which
        the slice was lost. This path is None if the slice was not lost, or if `resume` has already
        been called for the path. `resume` may be called later, because the peer's report may arrive
        after the new landing place.

        Raises
        ------
        InternalError
            If slice `seq` needs no landing place: it is released or eager, or the peer has it.
        """
        if seq >= self.posted:
            self.clears[seq] = (path, nbytes, token)
            return None
        item = self._find(seq)
        if item is None or item.is_eager or item.state == SliceState.HELD:
            raise InternalError(
                f"link to rank {self.peer}, channel {self.channel}: the peer announced a landing "
                f"place on rail {path.rail} for slice {seq}, which needs none "
                f"(confirmed {self.confirmed}, posted {self.posted})"
            )
        lost, item.path = item.path, path
        item.state = SliceState.WRITING
        return item, lost

    def retired(self, path: PathKey, seq: int) -> list[Slice]:
        """Record that the transport reported slice `seq` sent on `path`.

        Return the slices that are released as a result.
        """
        item = self._find(seq)
        if item is not None and item.path == path and item.state == SliceState.WRITING:
            item.state = SliceState.RETIRED
        return self._release()

    def newly_retired(self) -> list[Slice]:
        """Return the slices that became retired since the last call, in order.

        The list stops before the first slice that is not retired. Released slices are left out.
        """
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
        """Record that the peer confirmed every slice below `ack`; return the slices released.

        Raises
        ------
        InternalError
            If the peer confirmed a slice that was never posted.
        """
        if ack <= self.confirmed:
            return []
        if ack > self.posted:
            raise InternalError(
                f"rank {self.peer} confirmed {ack} slices of channel {self.channel}, "
                f"but only {self.posted} were posted to it"
            )
        self.confirmed = ack
        return self._release()

    def fenced(self, path: PathKey) -> list[Slice]:
        """Retire the slices in flight on `path`, and drop the landing places announced on it.

        Call it once the local end of `path` is fenced. Return the slices that are released as a
        result.
        """
        for item in self.outstanding:
            if item.path == path and item.state == SliceState.WRITING:
                item.state = SliceState.RETIRED
        for seq in [seq for seq, clear in self.clears.items() if clear[0] == path]:
            del self.clears[seq]
        return self._release()

    def resume(self, path: PathKey, epoch: int, report: LinkReport) -> list[Slice]:
        """Apply the peer's report for `path`, fenced at both ends; return the slices released.

        `epoch` is the epoch of the path that the fences end. A slice that was lost with the path
        becomes WAITING. An eager slice stays WAITING until `waiting` returns it, a cleared slice
        until the receiver announces a new landing place.

        Raises
        ------
        InternalError
            If the report counts more slices as received than were posted.
        """
        if report.received > self.posted:
            raise InternalError(
                f"rank {self.peer} resumes channel {self.channel} at slice {report.received}, "
                f"but only {self.posted} slices were posted to it"
            )
        # Confirmations on healthy paths may overtake the report, so `confirmed` may be newer than
        # the report. For slices of the fenced path the report is final.
        released = self.confirm(report.consumed)
        held_below = max(report.received, self.confirmed)
        for item in self.outstanding:
            if item.path == path:
                item.path, item.lost_on = None, (path, epoch)
                is_held = item.seq < held_below or item.seq in report.early
                item.state = SliceState.HELD if is_held else SliceState.WAITING
        return released + self._release()

    def waiting(self) -> list[Slice]:
        """Assign the link's route to the eager slices that are WAITING, and return these slices.

        The caller writes them now. The route must not be None.
        """
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
    """Posted receive of one slice.

    ``region`` is the landing place; None for an eager slice, whose payload arrives in a buffer of
    the transport. ``op`` and ``signature`` are the number and the packed signature of the call that
    the slice belongs to; both are 0 for a message. ``owner`` is the `Consumer` that posted the
    receive. ``index`` is the number of the receive op that the slice belongs to or, for a message,
    a number that ``owner`` defines.
    """

    __slots__ = (
        "index", "is_last", "op", "owner", "path", "region", "seq", "signature", "was_lost",
    )  # fmt: skip

    def __init__(
        self, seq: int, region: memoryview | None, op: int, signature: int, owner: Any, index: int,
        is_last: bool = False,
    ) -> None:  # fmt: skip
        self.seq = seq
        #: True for the last slice of the call on this link: its sender waits for the confirmation.
        self.is_last = is_last
        #: True if the path that the landing place was announced on has been fenced before the slice
        #: arrived: the slice may be a replay.
        self.was_lost = False
        self.region = region
        self.op = op
        self.signature = signature
        self.owner = owner
        self.index = index
        self.path: PathKey | None = None


class RecvLink:
    """Receiving end of a link.

    A slice is *received* when it and all earlier slices have arrived, *delivered* when it was
    passed to its `Consumer`, and *consumed* when the consumer no longer needs it.
    """

    __slots__ = (
        "acked", "arrivals", "channel", "consumed", "delivered", "duplicates", "landings",
        "last_used", "peer", "posted", "received", "route",
    )  # fmt: skip

    def __init__(self, peer: int, channel: int) -> None:
        self.peer = peer
        self.channel = channel
        #: Path on which landing places are announced; None at the same times as `SendLink.route`.
        self.route: PathKey | None = None
        #: Number of receives posted, and the counts of slices that the module describes.
        self.posted = 0
        self.received = 0
        self.delivered = 0
        self.consumed = 0
        #: Number of slices confirmed to the peer: the last value of ``consumed`` that was sent, or
        #: more if the transport has confirmed slices itself.
        self.acked = 0
        #: `Links.ncalls` when a receive was last posted; 0: none was.
        self.last_used = 0
        #: Receives posted whose slices are not delivered, by number.
        self.landings: dict[int, Landing] = {}
        #: Slices that arrived but are not delivered: seq -> number of the peer's call, and payload
        #: if eager, None if cleared.
        self.arrivals: dict[int, tuple[int, memoryview | bytes | None]] = {}
        self.duplicates = 0

    def post(
        self, region: memoryview | None, op: int, signature: int, owner: Any, index: int,
        is_last: bool = False,
    ) -> Landing:  # fmt: skip
        """Post a receive of the next slice; the parameters are the attributes of `Landing`.

        If ``path`` of the returned landing is not None, the caller announces the landing place on
        that path.
        """
        seq = self.posted
        self.posted = seq + 1
        landing = Landing(seq, region, op, signature, owner, index, is_last)
        self.landings[seq] = landing
        if region is not None:
            landing.path = self.route
        return landing

    def early_ack(self, landing: Landing) -> int:
        """Return the count that the transport may confirm as soon as it has the slice of `landing`.

        0 means that the transport must not confirm by itself. A confirmation also covers all
        earlier slices, and only slices on one path keep their order. The count is therefore 0
        unless every slice still expected travels on the path of `landing`. The count is also 0 for
        a slice that is not the last of its call, and for a slice that may be a replay: a replay
        overtakes queued slices, so its arrival does not prove that these slices arrived.
        """
        if not landing.is_last or landing.was_lost:
            return 0
        is_alone = all(other.path == landing.path for other in self.landings.values())
        return landing.seq + 1 if is_alone else 0

    def arrived(self, seq: int, payload: memoryview | bytes | None, op: int = 0) -> bool:
        """Record the arrival of slice `seq`; return False if it is a duplicate, which is dropped.

        `payload` is the data of an eager slice, None for a cleared one. `op` is the number of the
        call in which the peer sent the slice; 0 for a message.
        """
        if seq < self.received or seq in self.arrivals:
            self.duplicates += 1
            return False
        self.arrivals[seq] = op, payload
        while self.received in self.arrivals:
            self.received += 1
        return True

    def take(self) -> tuple[Landing, int, memoryview | bytes | None] | None:
        """Remove the next slice in order; return its posted receive, the call and the payload.

        The call is the number of the call in which the peer sent the slice. The payload is None if
        the data is in the landing place. Return None instead if the slice has not arrived or has no
        posted receive.
        """
        seq = self.delivered
        if seq not in self.arrivals or seq not in self.landings:
            return None
        self.delivered = seq + 1
        return self.landings.pop(seq), *self.arrivals.pop(seq)

    def consume(self) -> None:
        """Mark the oldest unconsumed of the delivered slices as consumed; it may now be confirmed.

        Raises
        ------
        InternalError
            If no delivered slice is left.
        """
        self.consumed += 1
        if self.consumed > self.delivered:
            raise InternalError(
                f"link from rank {self.peer}, channel {self.channel}: more slices were consumed "
                f"than delivered ({self.delivered})"
            )

    def report(self) -> LinkReport:
        """Return a report of the slices that have arrived.

        Call it only after this rank's end of the lost path is fenced, when no further slice can
        arrive over the path.
        """
        early = tuple(sorted(seq for seq in self.arrivals if seq >= self.received))
        return LinkReport(self.channel, self.consumed, self.received, early)

    def is_awaiting(self, path: PathKey) -> bool:
        """Return whether the first missing slice is expected and may have been lost on `path`."""
        landing = self.landings.get(self.received)
        return landing is not None and (landing.region is None or landing.path == path)

    def resume(self, path: PathKey) -> None:
        """Mark as lost the landing places announced on `path` whose slices have not arrived.

        Call it once both ends of `path` are fenced.
        """
        for seq, landing in self.landings.items():
            if landing.path == path and seq not in self.arrivals:
                landing.path = None
                landing.was_lost = True

    def unnamed(self) -> list[Landing]:
        """Assign the link's route to the landing places without a path, and return these places.

        The caller announces them now. Landing places whose slices have arrived are left out. The
        route must not be None.
        """
        found = [
            landing
            for seq, landing in sorted(self.landings.items())
            if landing.region is not None and landing.path is None and seq not in self.arrivals
        ]
        for landing in found:
            landing.path = self.route
        return found


__all__ = ["Landing", "LinkReport", "RecvLink", "SendLink", "Slice", "SliceState"]

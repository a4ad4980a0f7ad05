"""Desync check: finds the ranks that have not called the collective in which this rank waits.

Slices carry the number and the signature of the sender's collective, but a rank exchanges slices
only with some other ranks, and ranks that wait for each other in different collectives exchange
none. The first rank whose call makes no progress therefore asks all ranks: it sends the number of
its collective to its neighbors in the overlay network, which pass the number on. Each rank answers
its neighbors with the number and the signature of the last collective that it has called, and
answers again for each later collective that it calls over the network, until it has called the
collective asked for. Answers are passed on to all ranks, several in one message. No messages are
sent while calls make progress, unless half of a call's timeout has passed.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from r2ccl.bootstrap.base import Post
from r2ccl.bootstrap.overlay import without_session


class Calling(msgspec.Struct, frozen=True, tag="calling"):
    """Control message that asks which ranks have not called collective ``op``, and carries reports.

    ``op`` is the highest number of a collective in which, as far as the sender knows, a rank waits.
    ``last`` has the reports: a rank, the number of the last collective that the rank has called,
    and the packed signature of this collective, or None if the rank no longer knows the signature.
    """

    op: int
    last: tuple[tuple[int, int, int | None], ...]


class DesyncCheck:
    """Desync check of one rank: the last collective that each other rank has reported.

    Parameters
    ----------
    rank : int
        This rank. All ranks are numbered as in the communicator.
    peers : iterable of int
        All other ranks of the communicator.
    patience_s : float
        Time without progress, in seconds, after which a call asks the other ranks.
    control : Post
    """

    def __init__(self, rank: int, peers: Iterable[int], patience_s: float, control: Post) -> None:
        #: Number of the last collective that each peer has reported; 0: none.
        self.said = dict.fromkeys(peers, 0)
        #: Highest collective that a rank is known to have asked for; 0: none.
        self.asked_op = 0
        self._rank = rank
        self._patience_s = patience_s
        self._control = control
        #: Number and packed signature of the collectives in `said`; None: not known.
        self._signatures: dict[int, tuple[int, int | None]] = dict.fromkeys(self.said, (0, None))
        #: Number of the last collective that this rank has reported, or will report, as called, and
        #: its signature.
        self._own = 0
        self._own_signature: int | None = None
        #: Ranks whose last report this rank has not passed on.
        self._unspread: set[int] = set()
        #: Collective and activity at `_quiet_since_s`, the time of the last progress.
        self._mark = (0, 0)
        self._quiet_since_s = 0.0

    def on_calling(self, message: Calling, op: int, signature: int | None) -> None:
        """Store the reports of a neighbor; if its question is new, pass the question on.

        `op` is the number of the last collective that this rank has called, and `signature` the
        packed signature of this collective; None: not known.
        """
        for rank, theirs, what in message.last:
            if theirs > self.said.get(rank, theirs):
                self._signatures[rank] = (theirs, what)  # first: other threads read both
                self.said[rank] = theirs
                self._unspread.add(rank)
        if message.op > self.asked_op:
            self._ask(message.op, op, signature)

    def called(self, op: int, signature: int) -> None:
        """Record that this rank has called `op`, so that `spread` reports it.

        `op` must be at most ``asked_op``, because no rank has asked for later collectives.
        """
        self._own, self._own_signature = op, signature
        self._unspread.add(self._rank)

    def answer(self, op: int, signature: int) -> None:
        """Report collective `op` once (see `called`) if a rank has asked for it or a later one."""
        if self._own < op <= self.asked_op:
            self.called(op, signature)

    def look(self, now: float, op: int, signature: int, activity: int, is_late: bool) -> None:
        """Ask all ranks for their last collective if this rank's call is late or makes no progress.

        Do nothing if a rank has already asked for collective `op` or a later one.

        Parameters
        ----------
        now : float
            Reading of the clock, in seconds.
        op, signature : int
            Number and packed signature of the collective that this rank waits in.
        activity : int
            Counter of events on this rank's paths; an unchanged count means no progress.
        is_late : bool
            True if half of the call's timeout has passed; the ranks are then asked even if the
            call makes progress.
        """
        if self.asked_op >= op:
            return
        if self._mark != (op, activity):
            self._mark = (op, activity)
            self._quiet_since_s = now
        if is_late or now - self._quiet_since_s >= self._patience_s:
            self._ask(op, op, signature)

    def elsewhere(self, op: int, signature: int) -> list[int]:
        """Return the peers that have reported a later call than `op`, or a different call `op`.

        Call `op` of a peer is different if its packed signature is known and is not `signature`,
        that of call `op` of this rank. Any thread may call this method.
        """
        found = []
        for peer, last in self.said.copy().items():
            if last == op:
                reported, theirs = self._signatures[peer]
                if reported == op and theirs not in (None, signature):
                    found.append(peer)
            elif last > op:
                found.append(peer)
        return found

    def spread(self) -> None:
        """Send this rank's new report to all neighbors, and pass on new reports of other ranks.

        A report is not passed on to a neighbor that has a session with the reporting rank. Call
        this method at intervals, so that one message carries several reports.
        """
        news, self._unspread = self._unspread, set()
        if not news:
            return
        for peer in self._control.neighbors:
            unheard = without_session(news - {self._rank}, peer, len(self.said) + 1)
            last = [(rank, *self._signatures[rank]) for rank in unheard]
            if self._rank in news:
                last.append((self._rank, self._own, self._own_signature))
            if last:
                self._control.send(peer, Calling(self.asked_op, tuple(last)))

    def _ask(self, asked_op: int, op: int, signature: int | None) -> None:
        """Ask all neighbors for collective `asked_op`; report this rank's last collective, `op`."""
        self.asked_op = asked_op
        self._own, self._own_signature = op, signature
        self._control.gossip(Calling(asked_op, ((self._rank, op, signature),)))


__all__ = ["Calling", "DesyncCheck"]

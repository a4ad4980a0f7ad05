"""Desync check: finds the ranks that have not called the collective that this rank waits in.

Slices carry the number of the sender's collective, but only to the ranks that exchange slices with
it. The first rank whose call makes no progress therefore asks all ranks: its neighbors in the
overlay network receive the number of its collective and pass it on. Each rank answers its neighbors
with the number of the last collective that it has called, and again for each call until it has
called the collective asked for. Answers are passed on to all ranks, several in one message. While
calls make progress and are not late, no messages are sent.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from r2ccl.bootstrap.base import ControlPort
from r2ccl.bootstrap.overlay import without_session


class Calling(msgspec.Struct, frozen=True, tag="calling"):
    """Control message: a rank waits in collective ``op``, and what some ranks have called.

    ``last`` has pairs of a rank and the number of the last collective that the rank has called.
    """

    op: int
    last: tuple[tuple[int, int], ...]


class DesyncCheck:
    """Last collective of every rank, as the ranks have reported it to each other.

    Parameters
    ----------
    rank : int
    peers : iterable of int
        All other ranks.
    patience_s : float
        Time without progress, in seconds, after which a call asks the other ranks.
    control : ControlPort
    """

    def __init__(
        self, rank: int, peers: Iterable[int], patience_s: float, control: ControlPort
    ) -> None:
        #: Number of the last collective that each peer has reported; 0: none.
        self.said = dict.fromkeys(peers, 0)
        #: Highest collective that any rank has asked for; 0: none.
        self.asked_op = 0
        self._rank = rank
        self._patience_s = patience_s
        self._control = control
        self._own = 0
        #: Ranks whose last report this rank has not passed on.
        self._unspread: set[int] = set()
        self._mark = (0, 0)
        self._quiet_since_s = 0.0

    def on_calling(self, message: Calling, op: int) -> None:
        """Handle a message of a neighbor; `op` is the last collective that this rank has called."""
        for rank, theirs in message.last:
            if theirs > self.said.get(rank, theirs):
                self.said[rank] = theirs
                self._unspread.add(rank)
        if message.op > self.asked_op:
            self._ask(message.op, op)

    def called(self, op: int) -> None:
        """Answer that this rank has called `op`, which is `asked_op` or an earlier collective."""
        self._own = op
        self._unspread.add(self._rank)

    def look(self, now: float, op: int, activity: int, is_late: bool) -> None:
        """Ask all ranks, unless one has done so, if the call makes no progress or is late.

        Parameters
        ----------
        now : float
            Reading of the clock, in seconds.
        op : int
            Number of the collective that this rank waits in.
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
            self._ask(op, op)

    def spread(self) -> None:
        """Pass the reports on; called from time to time, so that one message has several."""
        news, self._unspread = self._unspread, set()
        if not news:
            return
        for peer in self._control.neighbors:
            unheard = without_session(news - {self._rank}, peer, len(self.said) + 1)
            last = [(rank, self.said[rank]) for rank in unheard]
            if self._rank in news:
                last.append((self._rank, self._own))
            if last:
                self._control.send(peer, Calling(self.asked_op, tuple(last)))

    def _ask(self, asked_op: int, op: int) -> None:
        """Pass the question for `asked_op` on, with the last collective of this rank."""
        self.asked_op = asked_op
        self._own = op
        self._control.gossip(Calling(asked_op, ((self._rank, op),)))


__all__ = ["Calling", "DesyncCheck"]

"""Desync check: finds the ranks that have not called the collective that this rank waits in.

Slices carry the number of the sender's collective, but only to the ranks that exchange slices with
it. A rank whose call makes no progress therefore sends its collective number to the other ranks,
once per call. They answer with the number of the last collective that they called. A rank that has
not called this collective yet answers again when it calls it. While calls make progress and are not
late, no messages are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec


class Calling(msgspec.Struct, frozen=True, tag="calling"):
    """Control message: `op` is the number of the last collective that the sender has called."""

    op: int


class DesyncCheck:
    """Last collective of every rank, as this rank and its peers have reported it to each other.

    Parameters
    ----------
    peers : iterable of int
    patience_s : float
        Time without progress, in seconds, after which a call asks the other ranks.
    send : callable
        ``send(peer, message)`` sends a control message.
    """

    def __init__(
        self, peers: Iterable[int], patience_s: float, send: Callable[[int, object], None]
    ) -> None:
        #: Number of the last collective that each peer has reported; 0: none.
        self.said = dict.fromkeys(peers, 0)
        #: Peers that wait for this rank to call a collective, and the number of that collective.
        self.askers: dict[int, int] = {}
        self._patience_s = patience_s
        self._send = send
        self._told = dict.fromkeys(self.said, 0)
        self._asked_op = 0
        self._mark = (0, 0)
        self._quiet_since_s = 0.0

    def on_calling(self, peer: int, theirs: int, mine: int) -> None:
        """Handle a message of `peer` in collective `theirs`, while this rank is in `mine`."""
        self.said[peer] = max(self.said[peer], theirs)
        if mine < theirs:
            self.askers[peer] = theirs
        if self._told[peer] < min(mine, theirs):
            self._tell(peer, mine)

    def called(self, op: int) -> None:
        """Answer the peers that wait for this rank to call collective `op` or an earlier one."""
        for peer, theirs in list(self.askers.items()):
            if op >= theirs:
                del self.askers[peer]
                self._tell(peer, op)

    def look(
        self, now: float, op: int, activity: int, is_late: bool, absent: Callable[[], Iterable[int]]
    ) -> None:
        """Ask the absent ranks, once per call, if the call makes no progress or is late.

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
        absent : callable
            Returns the ranks not known to have called `op`.
        """
        if self._asked_op >= op:
            return
        if self._mark != (op, activity):
            self._mark = (op, activity)
            self._quiet_since_s = now
        if is_late or now - self._quiet_since_s >= self._patience_s:
            self._asked_op = op
            for peer in absent():
                self._tell(peer, op)

    def _tell(self, peer: int, op: int) -> None:
        self._told[peer] = op
        self._send(peer, Calling(op))


__all__ = ["Calling", "DesyncCheck"]

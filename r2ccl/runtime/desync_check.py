"""Roll call: which ranks have called the collective this rank waits in.

Slices show where a peer is, but only to the ranks that exchange slices with it. So a rank whose
call stands still asks the others, once a call. They answer with the last collective they called;
who has not called this one does so again when it has. Nothing is said while calls run.

No I/O and no clock. Invariant: a peer is never told the same twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec


class Calling(msgspec.Struct, frozen=True, tag="calling"):
    """Control message: the sender is in its collective number `op`, or was."""

    op: int


class DesyncCheck:
    """What this rank and its peers told each other.

    Parameters
    ----------
    peers : iterable of int
    patience_s : float
        A call in which nothing happens for this long asks.
    send : callable
        ``send(peer, message)``.
    """

    def __init__(
        self, peers: Iterable[int], patience_s: float, send: Callable[[int, object], None]
    ) -> None:
        #: The last collective each peer said it is in; 0: none.
        self.said = dict.fromkeys(peers, 0)
        #: Peers that wait for this rank, and the collective they are in.
        self.askers: dict[int, int] = {}
        self._patience_s = patience_s
        self._send = send
        self._told = dict.fromkeys(self.said, 0)
        self._asked_op = 0
        self._mark = (0, 0)
        self._quiet_since_s = 0.0

    def on_calling(self, peer: int, theirs: int, mine: int) -> None:
        """`peer` is in collective `theirs`, this rank in `mine`."""
        self.said[peer] = max(self.said[peer], theirs)
        if mine < theirs:
            self.askers[peer] = theirs
        if self._told[peer] < min(mine, theirs):
            self._tell(peer, mine)

    def called(self, op: int) -> None:
        """Answer those who wait for this rank, now that it calls `op`."""
        for peer, theirs in list(self.askers.items()):
            if op >= theirs:
                del self.askers[peer]
                self._tell(peer, op)

    def look(
        self, now: float, op: int, activity: int, is_late: bool, absent: Callable[[], Iterable[int]]
    ) -> None:
        """Ask the `absent` once if the call stands still, or is late anyway.

        `activity` counts what happened on this rank's paths.
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

"""The end of a communicator: which error, who is told, and who may leave before.

As in ULFM, a communicator of which one rank has an error that cannot be repaired is revoked: all
ranks raise, with the same reason, and it stays of no use. Ranks that leave in order say so first,
and their going is no error then.

Invariant: the first reason wins, on this rank, and is told to whoever waits for another.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from r2ccl.errors import (
    CommunicatorRevoked,
    InvalidArgument,
    NoHealthyRail,
    PeerLost,
    R2cclError,
)
from r2ccl.failover.context import RankContext
from r2ccl.failover.migration.links import Links


class Revoke(msgspec.Struct, frozen=True, tag="revoke"):
    """Control message: the communicator is of no use any more, and why.

    ``kind`` is the name of the error, ``rank`` who found it, ``peer`` whom it concerns (-1: all).
    ``text`` is the error's, or of a `PeerLost` why: whoever hears of it makes the same error.
    """

    kind: str
    text: str
    rank: int
    peer: int = -1


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """Control message: the sender has all its data and may go once everybody says so."""


class Spared(msgspec.Struct, frozen=True, tag="spared"):
    """Control message: `rank` is lost, but it had left the sender in order, which lives on."""

    rank: int


class Revocation:
    """Whether, and why, the communicator of one rank has ended.

    Parameters
    ----------
    context : RankContext
    links : Links
        Asked which slices are not confirmed, and which call each peer was in.
    fence_all : callable
        Called once, at the end: no path may be left over which a peer could still write.
    no_rail : callable
        ``no_rail(peer)``: this rank's own error for a peer that says it has no rail to this one;
        None: there is one.
    """

    def __init__(
        self,
        context: RankContext,
        links: Links,
        *,
        fence_all: Callable[[], None],
        no_rail: Callable[[int], NoHealthyRail | None],
    ) -> None:
        self._rank = context.rank
        self._peers = context.peers
        self._hosts = context.hosts
        self._control = context.control
        self._links = links
        self._fence_all = fence_all
        self._no_rail = no_rail
        #: First error that ended the communicator, and what tells others of it.
        self.error: R2cclError | None = None
        self.reason: Revoke | None = None
        #: Every slice of this rank is confirmed, and it says so.
        self.is_leaving = False
        #: Ranks that said that they leave.
        self.left: set[int] = set()
        #: Ranks whose loss others live on with.
        self._spared: set[int] = set()

    # Found by this rank

    def revoke(self, message: Revoke, error: R2cclError | None = None) -> None:
        """End the communicator on every rank, here with `error` if given.

        One that has ended already was ended everywhere: its first reason must not be overtaken.
        """
        if self.error is not None:
            return
        self._control.broadcast(message)
        if error is None:
            self.on_revoke(message)
        else:
            self.end(error, message)

    def give_up(self, error: R2cclError, kind: str = "", peer: int = -1) -> None:
        """End it because of `peer`; the others are told if a `kind` of error is given."""
        text = error.why if isinstance(error, PeerLost) else str(error)
        message = Revoke(kind or type(error).__name__, text, self._rank, peer)
        if self.error is None and kind:
            self._control.broadcast(message)
        self.end(error, message)

    def end(self, error: R2cclError, message: Revoke) -> None:
        """Keep the first reason, and leave no path over which a peer could still write."""
        if self.error is None:
            self.error, self.reason = error, message
            self._fence_all()

    def spares(self, peer: int) -> bool:
        """Whether the loss of `peer` is no error: it left in order, and has all it needs.

        What it did not confirm then it never will. Ranks that have not left may still want
        something of it, and end; then this rank, which waits for them, has to hear of it.
        """
        if peer not in self.left or not self._links.is_drained_to(peer):
            return False
        for other in self._peers:
            if other != peer and other not in self.left:
                self._control.send(other, Spared(peer))
        return True

    def lose(self, peer: int, why: str, last_heard_s: float | None) -> None:
        """The control plane gave `peer` up: the end."""
        # Else every rank gives it up by itself, and says so with the same error.
        is_news = peer in self.left or peer in self._spared
        error = self._loss(peer, why, last_heard_s)
        self.give_up(error, "PeerLost" if is_news else "", peer)

    # Said by others

    def on_goodbye(self, peer: int) -> None:
        """`peer` closed its end; without having left it ends the job for all."""
        if peer not in self.left:
            self._end_by(Revoke("", _LEFT, peer))

    def on_spared(self, peer: int, rank: int) -> None:
        """`peer` lives on without `rank`; it is told if this rank does not."""
        self._spared.add(rank)
        if self.reason is not None:
            self._control.send(peer, self.reason)

    def on_revoke(self, message: Revoke) -> None:
        """Make the error that another rank has made."""
        if message.kind == "InvalidArgument":
            self.end(InvalidArgument(message.text), message)
        elif message.kind == "NoHealthyRail" and message.peer == self._rank and self.error is None:
            error = self._no_rail(message.rank)
            if error is None:
                self._end_by(message)
            else:
                self.give_up(error, "NoHealthyRail", message.rank)
        elif message.kind == "PeerLost" and message.peer in self._peers:
            why = f"rank {message.rank} says: {message.text}"
            self.end(self._loss(message.peer, why, None), message)
        else:
            self._end_by(message)

    def _loss(self, peer: int, why: str, last_heard_s: float | None) -> PeerLost:
        return PeerLost(
            rank=self._rank,
            peer=peer,
            last_heard_s=last_heard_s,
            why=why,
            host=self._hosts[peer] if self._hosts else "",
            last_op=self._links.last_op_of(peer),
        )

    def _end_by(self, message: Revoke) -> None:
        error = CommunicatorRevoked(f"rank {message.rank} gave up: {message.text}")
        self.end(error, message)


#: Reason given for a rank that said Goodbye without Leaving.
_LEFT = "it left, and other ranks had not"

__all__ = ["Leaving", "Revocation", "Revoke", "Spared"]

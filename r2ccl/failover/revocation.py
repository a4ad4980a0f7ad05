"""Revocation: ends a communicator on all ranks, and tracks the ranks that leave.

An error at one rank that cannot be repaired revokes the communicator (compare ``MPIX_Comm_revoke``
of ULFM): all ranks raise an error, and the communicator cannot be used again. A rank that calls
`close()` sends `Leaving` first, so that its disconnection is not an error.

Each rank passes what it learns from these messages on to its neighbors in the overlay of the
control plane (`r2ccl.bootstrap.overlay`), so all ranks learn it.

Invariant: a rank keeps the first reason that it learns. Ranks may therefore keep different reasons
if several errors occur at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from r2ccl.bootstrap.overlay import without_session
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
    """Control message that revokes the communicator and gives the reason.

    ``kind`` is the name of the error's class (empty: ``rank`` closed the communicator too early).
    ``rank`` is the rank that found or caused the error, and ``peer`` is the rank that the error
    concerns (-1: no particular rank). ``text`` is the error's message, or the cause of a
    `PeerLost`, cut to `_MAX_TEXT` characters.

    The class of the receiver's error depends on ``kind``:

    - ``InvalidArgument``: `InvalidArgument`;
    - ``PeerLost``: `PeerLost`, unless the receiver is ``peer`` itself;
    - ``NoHealthyRail``: the receiver's own `NoHealthyRail`, if the receiver is ``peer``, has begun
      to connect paths to ``rank``, and all these paths are down;
    - in all other cases: `CommunicatorRevoked` with ``text``.
    """

    kind: str
    text: str
    rank: int
    peer: int = -1

    def __post_init__(self) -> None:
        if len(self.text) > _MAX_TEXT:
            msgspec.structs.force_setattr(self, "text", self.text[: _MAX_TEXT - 1] + "…")


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """Control message: ranks that called `close()` and whose slices are all confirmed.

    Bit r of the little-endian integer in ``ranks`` is set for rank r.
    """

    ranks: bytes

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Leaving:
        """Return the message that names `ranks`, each given once."""
        bits = sum(1 << rank for rank in ranks)
        return cls(bits.to_bytes((bits.bit_length() + 7) // 8, "little"))

    def members(self, nranks: int) -> set[int]:
        """Return the ranks below `nranks` that the message names."""
        bits = int.from_bytes(self.ranks, "little")
        return {rank for rank in range(nranks) if bits >> rank & 1}


class Spared(msgspec.Struct, frozen=True, tag="spared"):
    """Control message: some rank continues after the loss of `rank`, because `rank` was leaving."""

    rank: int


class Revocation:
    """State of one rank's communicator: in use, leaving, or ended with an error.

    Parameters
    ----------
    context : RankContext
    links : Links
        Read for peers, unconfirmed slices, and the last collective of each peer.
    fence_all : callable
        Called once, when the communicator ends: begins to fence all paths.
    no_rail : callable
        ``no_rail(peer)`` returns this rank's error if no path to `peer` is up, else None; `peer` is
        one of ``links.peers``.
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
        #: Error that ended the communicator, and the message about it; None until then.
        self.error: R2cclError | None = None
        self.reason: Revoke | None = None
        #: True once this rank leaves: all its slices are confirmed, and it has sent `Leaving`.
        self.is_leaving = False
        #: Other ranks that are leaving.
        self.left: set[int] = set()
        #: Members of `left` that this rank has not passed on to its neighbors.
        self._unspread: set[int] = set()
        #: Called when the communicator ends.
        self.on_end: list[Callable[[], None]] = []
        #: Lost ranks without which this or other ranks continue.
        self._spared: set[int] = set()

    # Errors found by this rank

    def revoke(self, message: Revoke, error: R2cclError | None = None) -> None:
        """End the communicator on every rank; do nothing if it has ended already.

        Parameters
        ----------
        message : Revoke
            Sent to all ranks.
        error : R2cclError, optional
            Error of this rank; default: the error that `message` causes at its receivers.
        """
        if self.error is not None:
            return
        if error is None:
            self.on_revoke(self._rank, message)
        else:
            self._control.gossip(message)
            self.end(error, message)

    def give_up(self, error: R2cclError, kind: str = "", peer: int = -1) -> None:
        """End the communicator on this rank with `error`; unless `kind` is empty, on all ranks.

        Do nothing if the communicator has ended already.

        Parameters
        ----------
        error : R2cclError
            Error of this rank.
        kind : str
            ``Revoke.kind`` of the message to the other ranks; empty: send no message.
        peer : int
            Rank that the error concerns; -1: no particular rank.
        """
        text = error.why if isinstance(error, PeerLost) else str(error)
        message = Revoke(kind or type(error).__name__, text, self._rank, peer)
        if self.error is None and kind:
            self._control.gossip(message)
        self.end(error, message)

    def end(self, error: R2cclError, message: Revoke) -> None:
        """Store `error`, call `on_end` and begin to fence all paths; later calls do nothing."""
        if self.error is None:
            self.error, self.reason = error, message
            for act in tuple(self.on_end):
                act()
            self._fence_all()

    def spares(self, peer: int) -> bool:
        """Return whether the loss of `peer` is no error for this rank; if so, send `Spared`.

        The loss is no error if this rank knows that `peer` was leaving, and `peer` has confirmed
        all slices of this rank.
        """
        if peer not in self.left or not self._links.is_drained_to(peer):
            return False
        self._spared.add(peer)
        self._control.gossip(Spared(peer))
        return True

    def lose(self, peer: int, why: str, last_heard_s: float | None) -> None:
        """End the communicator because the control plane reports the loss of `peer`.

        Parameters
        ----------
        peer : int
        why : str
            Evidence of the loss.
        last_heard_s : float or None
            Seconds since the last sign of life of `peer`; None: not known.
        """
        # Ranks that could continue without `peer` (`spares`) must learn that this rank does not. In
        # all other cases the control plane reports the loss to every rank, so all raise one error.
        is_news = peer in self.left or peer in self._spared
        error = self._loss(peer, why, last_heard_s)
        self.give_up(error, "PeerLost" if is_news else "", peer)

    # Leaving

    def leave(self) -> None:
        """Tell all ranks that this rank is leaving; called when all its slices are confirmed."""
        self.is_leaving = True
        self._announce(Leaving.of([self._rank]))

    def tell_why(self) -> None:
        """If the communicator has ended, send the reason on all control sessions of this rank.

        Each rank calls this before it closes its control sessions. Otherwise its `Goodbye` could
        reach a peer before the `Revoke` of another rank, and the peer would report a wrong reason.
        """
        if self.reason is not None:
            self._announce(self.reason)

    def spread(self) -> None:
        """Send each neighbor a `Leaving` with the ranks that became known since the last call.

        A message omits its receiver and the neighbors of its receiver, which have informed the
        receiver themselves. Called at every tick, so that one message names several ranks, and
        before this rank closes its control sessions.
        """
        news, self._unspread = self._unspread, set()
        if not news:
            return
        nranks = len(self._peers) + 1
        for peer in self._control.neighbors:
            unheard = without_session(news, peer, nranks)
            if unheard:
                self._control.send(peer, Leaving.of(unheard))

    def _announce(self, message: object) -> None:
        """Send `message` to all ranks that this rank has a control session with."""
        self._control.gossip(message)
        for peer in self._links.peers - self._control.neighbors:
            self._control.send(peer, message)

    # Messages of other ranks

    def on_leaving(self, message: Leaving) -> None:
        """Record ranks that are leaving; `spread` passes them on."""
        news = message.members(len(self._peers) + 1) - self.left - {self._rank}
        self.left |= news
        self._unspread |= news

    def on_goodbye(self, peer: int) -> None:
        """Handle the `Goodbye` of `peer`; revoke the communicator unless `peer` was leaving."""
        if peer not in self.left:
            self.revoke(Revoke("", _LEFT, peer))

    def on_spared(self, peer: int, rank: int) -> None:
        """Handle `Spared` from `peer`: some rank continues without `rank`. Pass the message on.

        If the communicator has ended at this rank, also send the reason to the neighbors: the ranks
        that continue must learn that this rank does not.
        """
        if rank in self._spared:
            return
        self._spared.add(rank)
        self._control.gossip(Spared(rank), peer)
        if self.reason is not None:
            self._control.gossip(self.reason)

    def on_revoke(self, peer: int, message: Revoke) -> None:
        """End the communicator with the error that `message` causes, and pass the message on.

        Do nothing if the communicator has ended already. `peer` sent the message to this rank;
        ``message.rank`` may be another rank. See `Revoke` for the class of the error.
        """
        if self.error is None:
            self._control.gossip(message, peer)
        if message.kind == "InvalidArgument":
            self.end(InvalidArgument(message.text), message)
        elif (
            message.kind == "NoHealthyRail"
            and message.peer == self._rank
            # This rank may not have received the message to connect paths to that rank.
            and message.rank in self._links.peers
            and self.error is None
        ):
            error = self._no_rail(message.rank)
            if error is None:
                self._end_by(message)
            else:
                self.give_up(error, "NoHealthyRail", message.rank)
        elif message.kind == "PeerLost" and message.peer in self._peers:
            why = f"rank {message.rank} reports: {message.text}"
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
        error = CommunicatorRevoked(
            f"rank {self._rank}: rank {message.rank} ended the communicator: {message.text}"
        )
        self.end(error, message)


#: Maximum length of the text of a `Revoke`, in characters.
_MAX_TEXT = 10_000
#: Reason for a rank that sent Goodbye without Leaving.
_LEFT = "it closed the communicator while other ranks still used it"

__all__ = ["Leaving", "Revocation", "Revoke", "Spared"]

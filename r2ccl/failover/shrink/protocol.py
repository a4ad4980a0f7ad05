"""Shrink protocol: the surviving ranks agree on the members of the new communicator.

Theory of operation
-------------------
Every rank that calls ``shrink()`` keeps a set of ranks that are *gone*: they have died, do not
answer or have closed the communicator. The set only grows. Building (connecting) the new
communicator may fail although no rank is gone; all survivors then make another attempt. `attempt`
counts these repetitions and only grows. Each rank sends its set and attempt to all other ranks in a
`View`, with its addresses for the new communicator (`info`). It merges the Views that it receives,
and sends a new View whenever its set or attempt has grown. When every rank outside the set has sent
the same set and attempt, both are *agreed*. Another loss or a failure to build can interrupt the
remaining steps::

    event                                   action
    ---------------------------------------------------------------------------------------------
    set or attempt has grown                send View(gone, attempt, info)
    all others sent the same View           build the new communicator, then send Built
    all others sent the same Built          send Done, use the new communicator
    Done for the communicator built here    send Done, use the new communicator
    build failed and no rank is gone        attempt + 1
    a member is gone, or could not build    send the larger View; keep the communicator built here
                                            until that View is agreed: another rank may use it

A rank that uses the new communicator sends no further View, and a larger set that counts this rank
as alive cannot be agreed without a View of this rank. Therefore either all ranks alive use the
communicator that was agreed on, or none does: a rank that has built the communicator receives
``Done`` from every rank that used it earlier, unless the receiver counts the sender as gone. If a
rank dies too late to be excluded, its loss is the first failure of the new communicator, which can
be shrunk again. No rank uses the new communicator before all members have built it, so a rank that
failed to build is not left behind.

A rank that receives a View in which it is listed as gone counts the sender as gone too, whether or
not the sender was right. A stopped process that resumes, and the smaller side of a partition,
therefore end without a quorum. Messages from a rank that is gone are ignored.

There is no I/O and no clock here; the bytes of `info` are not interpreted. Messages from one rank
must arrive in order, and none after the loss of that rank. Invariant: if two ranks use a new
communicator and each counts the other as a survivor, both have the same set and attempt.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from r2ccl.errors import InternalError, InvalidArgument


def has_quorum(nranks: int, alive: Collection[int], quorum: str = "majority") -> bool:
    """Return whether the ranks `alive` of `nranks` may continue without the others.

    The other ranks may be alive on the far side of a network partition and make the same decision.
    "majority" therefore lets at most one group continue: more than half of the ranks, or exactly
    half of them including rank 0.

    Parameters
    ----------
    nranks : int
        Number of ranks of the communicator that is shrunk.
    alive : collection of int
        Ranks that would continue.
    quorum : {"majority", "any"}
        "any" accepts every group that is not empty. It is safe only if the caller knows that no
        other group is alive.

    Raises
    ------
    InvalidArgument
        If `quorum` is unknown or `alive` contains a rank that does not exist.
    """
    if quorum not in ("majority", "any"):
        raise InvalidArgument(f"quorum={quorum!r}; allowed is 'majority' or 'any'")
    ranks = set(alive)
    if not ranks <= set(range(nranks)):
        raise InvalidArgument(f"alive={sorted(ranks)}: allowed are ranks 0 to {nranks - 1}")
    if quorum == "any":
        return bool(ranks)
    return 2 * len(ranks) > nranks or (2 * len(ranks) == nranks and 0 in ranks)


class View(msgspec.Struct, frozen=True, tag="shrink.view"):
    """Control message: the sender is in ``shrink()`` and counts the ranks `gone` as gone.

    `gone` is sorted, as in all messages. `attempt` is the number of repeated attempts to build,
    from 0. `info` contains the sender's addresses for the new communicator, as an encoded
    `PeerInfo`.
    """

    gone: tuple[int, ...]
    info: bytes
    attempt: int = 0


class Built(msgspec.Struct, frozen=True, tag="shrink.built"):
    """Control message: the sender has connected the communicator of all ranks except `gone`."""

    gone: tuple[int, ...]
    attempt: int = 0


class Done(msgspec.Struct, frozen=True, tag="shrink.done"):
    """Control message: from now on, the sender uses the communicator of all ranks except `gone`.

    All members of that communicator have connected it.
    """

    gone: tuple[int, ...]
    attempt: int = 0


#: Messages of the shrink protocol.
Message = View | Built | Done


class _Terms(NamedTuple):
    """The set of gone ranks, and the attempt, that survivors agree on; both only grow."""

    gone: tuple[int, ...]
    attempt: int


def _terms(message: Message) -> _Terms:
    return _Terms(message.gone, message.attempt)


class ShrinkStep(enum.Enum):
    """Next step that the driver must execute."""

    TELL = "tell"  #: send to all ranks the View that `Shrinking.tell` returns
    BUILD = "build"  #: connect the ranks that `Shrinking.begin_building` returns
    WAIT = "wait"  #: wait for a message or a loss
    GO_ON = "go on"  #: send to all ranks the Done that `Shrinking.go_on` returns, and finish
    STOP = "stop"  #: give up: too few ranks survive


class Shrinking:
    """State machine of one rank in shrink: takes losses and messages, and decides the next step.

    Parameters
    ----------
    rank, nranks : int
        This rank, and the number of ranks, in the communicator that is shrunk.
    quorum : {"majority", "any"}
        Rule that decides which groups of survivors may continue; see `has_quorum`.

    Attributes
    ----------
    gone : dict of int to str
        Ranks that are gone, each with the reason.
    attempt : int
        Number of repeated attempts to build the new communicator, from 0.

    Raises
    ------
    InvalidArgument
        If `quorum` is unknown or `rank` does not exist.
    """

    def __init__(self, rank: int, nranks: int, quorum: str = "majority") -> None:
        has_quorum(nranks, [rank], quorum)  # checks the arguments before any message is sent
        self.rank = rank
        self.nranks = nranks
        self.gone: dict[int, str] = {}
        self.attempt = 0
        self._quorum = quorum
        self._told: _Terms | None = None
        self._views: dict[int, View] = {}
        self._built: dict[int, _Terms] = {}
        #: Terms of the last build that this rank began, and of the one it has sent Built for.
        self._begun: _Terms | None = None
        self._held: _Terms | None = None
        self._is_done_elsewhere = False

    # Events

    def lost(self, peer: int, why: str) -> None:
        """Count `peer` as gone, for the reason `why`; the first reason of a rank is kept."""
        self.gone.setdefault(peer, why)

    def heard(self, peer: int, message: Message) -> None:
        """Handle a message from `peer`; ignore it if `peer` counts as gone."""
        if peer in self.gone:
            return
        if isinstance(message, Built):
            self._built[peer] = _terms(message)
        elif isinstance(message, Done):
            if _terms(message) == self._held:
                self._is_done_elsewhere = True
        elif self.rank in message.gone:
            self.lost(peer, f"it counts rank {self.rank} as gone")
        else:
            self._views[peer] = message
            self.attempt = max(self.attempt, message.attempt)
            for other in message.gone:
                self.lost(other, f"reported gone by rank {peer}")

    def not_built(self) -> None:
        """Begin the next attempt, after a failure to connect that no loss explains.

        Do nothing if the set or the attempt has grown since this rank began to build, or if this
        rank has built the communicator.
        """
        if self._begun == self._now() and self._held is None:
            self.attempt += 1

    # Steps

    @property
    def step(self) -> ShrinkStep:
        """Next step to execute; it may change with every event."""
        if self._may_go_on():
            return ShrinkStep.GO_ON
        if not has_quorum(self.nranks, self.alive, self._quorum):
            return ShrinkStep.STOP
        if self._told != self._now():
            return ShrinkStep.TELL
        if self._begun != self._told and not self.undecided():
            return ShrinkStep.BUILD
        return ShrinkStep.WAIT

    def tell(self, info: bytes) -> View:
        """Return the `View` to send to all other ranks, with the addresses `info` of this rank."""
        self._told = self._now()
        return View(self._told.gone, info, self._told.attempt)

    def begin_building(self) -> dict[int, bytes]:
        """Return the agreed survivors in ascending order, each with its encoded `PeerInfo`.

        The bytes of this rank are empty. If this rank has built a communicator before, the caller
        must now close it: after this agreement, no rank can use it.

        Raises
        ------
        InternalError
            If `step` is not ``BUILD``.
        """
        if self.step is not ShrinkStep.BUILD:
            raise InternalError(f"rank {self.rank}: begin_building() was called at {self.step}")
        self._begun = self._told
        self._held = None
        self._is_done_elsewhere = False
        return {rank: b"" if rank == self.rank else self._views[rank].info for rank in self.alive}

    def built(self) -> Built:
        """Record that this rank has connected the communicator; return the `Built` to send.

        Raises
        ------
        InternalError
            If `begin_building` was not called before.
        """
        if self._begun is None:
            raise InternalError(f"rank {self.rank}: built() was called before begin_building()")
        self._held = self._begun
        return Built(*self._held)

    def go_on(self) -> Done:
        """Return the `Done` to send to all other ranks before the new communicator is used.

        Raises
        ------
        InternalError
            If `step` is not ``GO_ON``.
        """
        if not self._may_go_on() or self._held is None:
            raise InternalError(f"rank {self.rank}: go_on() was called at {self.step}")
        return Done(*self._held)

    # Ranks by state

    @property
    def alive(self) -> list[int]:
        """Ranks that are not gone, including this one, in ascending order."""
        return [rank for rank in range(self.nranks) if rank not in self.gone]

    def absent(self) -> list[int]:
        """Return the other ranks that are not gone and from which no View has arrived."""
        return [rank for rank in self._others() if rank not in self._views]

    def undecided(self) -> list[int]:
        """Return the other ranks that are not gone and do not agree with this rank yet.

        The last View of such a rank is missing, or differs from this rank's set and attempt.
        """
        now = self._now()
        return [
            rank
            for rank in self._others()
            if rank not in self._views or _terms(self._views[rank]) != now
        ]

    def unbuilt(self) -> list[int]:
        """Return the other ranks that are not gone and not known to have built the communicator.

        Such a rank has sent no Built, or its last Built differs from this rank's last View.
        """
        return [rank for rank in self._others() if self._built.get(rank) != self._told]

    def _others(self) -> list[int]:
        return [rank for rank in self.alive if rank != self.rank]

    def _now(self) -> _Terms:
        return _Terms(tuple(sorted(self.gone)), self.attempt)

    def _may_go_on(self) -> bool:
        """Return whether this rank may use the communicator that it has built.

        This rank may do so if another member already uses the communicator, or if all members have
        built it and this rank has sent no View since they agreed on it. A rank that was lost after
        this rank sent its last View still counts as a member.
        """
        if self._held is None:
            return False
        if self._is_done_elsewhere:
            return True
        members = set(range(self.nranks)) - {self.rank, *self._held.gone}
        return self._held == self._told and all(
            self._built.get(rank) == self._held for rank in members
        )


__all__ = ["Built", "Done", "Message", "ShrinkStep", "Shrinking", "View", "has_quorum"]

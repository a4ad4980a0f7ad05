"""Shrinking: the survivors of a communicator agree on who they are.

Theory of operation
-------------------
Every rank that calls ``shrink()`` keeps a set of ranks that are *gone*: dead, silent, or left. It
only grows. Building the new communicator may fail although nobody is gone, so that all have to meet
once more; `attempt` counts these meetings, and only grows too. Each rank tells both to all others
(`View`), with its next addresses (`info`), takes in what it is told, and tells
again whenever its set or attempt has grown. When every rank that is not in the set has told the
same set and attempt, they are *agreed*, and what is left is done in three steps, any of which a
further death, or a failure to build, may interrupt::

    set or attempt grown             ->  tell View(gone, attempt, info)
    all others told the same         ->  build the new communicator; then tell Built
    all others have built            ->  tell Done, go on with it
    Done for what is built here      ->  tell Done, go on with it
    not to be built, nobody is gone  ->  attempt + 1
    a rank of the new one is gone,   ->  tell the larger View; keep what is built until that is
    or could not build it                agreed, for it may turn out to be in use

A rank that goes on never tells a View again, and nothing larger that leaves it in is agreed without
its View. So either nobody alive goes on with what was agreed, or everybody alive does: a rank that
has built hears ``Done`` from whoever went on before, unless that one is gone by its own finding.
Deaths that come too late for that are the new communicator's first failure, and it can be shrunk
again. Nobody goes on before all have built, so one that could not does not part from the others.

A rank whose View leaves this one out has given it up, rightly or not; the two are gone for each
other. So a stopped process that wakes, and a side of a partition, end without a quorum. What a rank
that is gone says counts for nothing.

Pure: no I/O, no clock; `info` is opaque. Channels must be first in, first out, and silent once a
rank was reported gone. Invariant: of two ranks that go on, each in the other's set of survivors,
both have the same set and attempt.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from r2ccl.errors import InternalError, InvalidArgument


def has_quorum(nranks: int, alive: Collection[int], quorum: str = "majority") -> bool:
    """Whether the ranks `alive` of `nranks` may go on without the others.

    Others may be alive behind a partition and ask the same, so that at most one group is allowed
    to: one of more than half of the ranks, or the half with rank 0.

    Parameters
    ----------
    nranks : int
    alive : collection of int
        The ranks that go on.
    quorum : {"majority", "any"}
        "any" allows every group, for those who know that no other is left.

    Raises
    ------
    InvalidArgument
        An unknown `quorum`, or ranks that do not exist.
    """
    if quorum not in ("majority", "any"):
        raise InvalidArgument(f"quorum={quorum!r}; allowed is 'majority' or 'any'")
    ranks = set(alive)
    if not ranks <= set(range(nranks)):
        raise InvalidArgument(f"ranks {sorted(ranks)} alive; there are 0 to {nranks - 1}")
    if quorum == "any":
        return bool(ranks)
    return 2 * len(ranks) > nranks or (2 * len(ranks) == nranks and 0 in ranks)


class View(msgspec.Struct, frozen=True, tag="shrink.view"):
    """Control message: the sender is in shrink(); `gone` is sorted, `info` is where to meet it."""

    gone: tuple[int, ...]
    info: bytes
    attempt: int = 0


class Built(msgspec.Struct, frozen=True, tag="shrink.built"):
    """Control message: the communicator of all ranks but `gone` is connected at the sender."""

    gone: tuple[int, ...]
    attempt: int = 0


class Done(msgspec.Struct, frozen=True, tag="shrink.done"):
    """Control message: it is connected everywhere, and the sender goes on with it."""

    gone: tuple[int, ...]
    attempt: int = 0


#: Everything ranks say to each other here.
Message = View | Built | Done


class _Terms(NamedTuple):
    """What survivors agree on; of two that one rank told, the later is the larger."""

    gone: tuple[int, ...]
    attempt: int


def _terms(message: Message) -> _Terms:
    return _Terms(message.gone, message.attempt)


class ShrinkStep(enum.Enum):
    """What a rank has to do next."""

    TELL = "tell"  #: send `Shrinking.tell`'s View to all
    BUILD = "build"  #: build for `Shrinking.begin_building`'s ranks
    WAIT = "wait"  #: for what others say, or for a loss
    GO_ON = "go on"  #: send `Shrinking.go_on`'s Done to all: it is over
    STOP = "stop"  #: too few are left


class Shrinking:
    """One rank's part.

    Parameters
    ----------
    rank, nranks : int
        Of the communicator that is shrunk.
    quorum : {"majority", "any"}
        See `has_quorum`.

    Attributes
    ----------
    gone : dict of int to str
        Who is, and why.
    attempt : int
        How often the survivors had to meet again, from 0.

    Raises
    ------
    InvalidArgument
        An unknown `quorum`.
    """

    def __init__(self, rank: int, nranks: int, quorum: str = "majority") -> None:
        has_quorum(nranks, [rank], quorum)  # refuses nonsense before anyone hears of this rank
        self.rank = rank
        self.nranks = nranks
        self.gone: dict[int, str] = {}
        self.attempt = 0
        self._quorum = quorum
        self._told: _Terms | None = None
        self._views: dict[int, View] = {}
        self._built: dict[int, _Terms] = {}
        #: For what this rank has begun to build last, and for what it has told Built.
        self._begun: _Terms | None = None
        self._held: _Terms | None = None
        self._is_done_elsewhere = False

    # What happens

    def lost(self, peer: int, why: str) -> None:
        """`peer` is dead, silent or has left."""
        self.gone.setdefault(peer, why)

    def heard(self, peer: int, message: Message) -> None:
        """Take what `peer` says."""
        if peer in self.gone:
            return
        if isinstance(message, Built):
            self._built[peer] = _terms(message)
        elif isinstance(message, Done):
            if _terms(message) == self._held:
                self._is_done_elsewhere = True
        elif self.rank in message.gone:
            self.lost(peer, "it has given this rank up")
        else:
            self._views[peer] = message
            self.attempt = max(self.attempt, message.attempt)
            for other in message.gone:
                self.lost(other, f"says rank {peer}")

    def not_built(self) -> None:
        """Connecting failed, and nobody has turned out to be gone: all have to meet again.

        Nothing happens if that is known already, or this rank has built.
        """
        if self._begun == self._now() and self._held is None:
            self.attempt += 1

    # What to do

    @property
    def step(self) -> ShrinkStep:
        """What to do next; look again after every event."""
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
        """Return what all others have to hear now; `info` is where this rank is met for it."""
        self._told = self._now()
        return View(self._told.gone, info, self._told.attempt)

    def begin_building(self) -> dict[int, bytes]:
        """Return the survivors agreed on, in order, and their `PeerInfo` (this rank's own: empty).

        What was built before is in use nowhere, from here on for certain: drop it.
        """
        if self.step is not ShrinkStep.BUILD:
            raise InternalError(f"rank {self.rank}: nothing to build at {self.step}")
        self._begun = self._told
        self._held = None
        self._is_done_elsewhere = False
        return {rank: b"" if rank == self.rank else self._views[rank].info for rank in self.alive}

    def built(self) -> Built:
        """It is connected here; return what all others have to hear."""
        if self._begun is None:
            raise InternalError(f"rank {self.rank}: built before it was agreed for whom")
        self._held = self._begun
        return Built(*self._held)

    def go_on(self) -> Done:
        """Return what all others have to hear before this rank leaves them."""
        if not self._may_go_on() or self._held is None:
            raise InternalError(f"rank {self.rank}: goes on at {self.step}")
        return Done(*self._held)

    # Who is where

    @property
    def alive(self) -> list[int]:
        """Ranks that are not gone, this one among them."""
        return [rank for rank in range(self.nranks) if rank not in self.gone]

    def absent(self) -> list[int]:
        """Ranks that are there and have not called shrink()."""
        return [rank for rank in self._others() if rank not in self._views]

    def undecided(self) -> list[int]:
        """Ranks that have not told the set and attempt this rank tells."""
        now = self._now()
        return [
            rank
            for rank in self._others()
            if rank not in self._views or _terms(self._views[rank]) != now
        ]

    def unbuilt(self) -> list[int]:
        """Ranks that have not built for the set and attempt this rank tells."""
        return [rank for rank in self._others() if self._built.get(rank) != self._told]

    def _others(self) -> list[int]:
        return [rank for rank in self.alive if rank != self.rank]

    def _now(self) -> _Terms:
        return _Terms(tuple(sorted(self.gone)), self.attempt)

    def _may_go_on(self) -> bool:
        """Whether all of those told of last have built, or one of them went on.

        A rank that is gone since, but not by what this rank has told, does not change that.
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

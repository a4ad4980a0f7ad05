"""Path: one rail between two ranks; when it may be used, and what its loss sets in motion.

Theory of operation
-------------------
Both ends of a path run the table below. Whoever finds out first fences its own end and announces;
the announcement fences the other end, which announces in turn. An end computes what it has
received only after its own fence, so no late write can change the answer; it resumes only when it
holds the peer's announcement, so the peer's end is fenced too. Failures at both ends at once are
the same exchange. Each completed exchange ends an *epoch*: announcements of earlier ones are
stale, and a path comes back only under the next epoch's number, bound into its authentication.

::

    state    event     -> state    actions
    -------------------------------------------------------------------
    UP       FAILED    -> FENCING  fence            evidence found here
    UP       ANNOUNCED -> FENCING  fence            evidence found by the peer
    FENCING  FENCED    -> FENCED   announce         what this end received
    FENCED   ANNOUNCED -> DOWN     resume, redial   epoch + 1
    DOWN     OPENED    -> UP       use
    DOWN     ANNOUNCED -> DOWN     announce, resume, redial
                                   the peer's end was open, this one not yet (or no more)

An announcement that arrives while this end is FENCING is kept until the fence is done. The lower
rank's announcement also proposes the new route of every channel that rode the path; the higher
rank follows it as far as the proposed path is up there. Routes that differ are harmless: slices
are known by number (`r2ccl.failover.migration.link`).

Pure tables: no I/O, no clock. Invariant: no action ever asks for the use of a path that is not UP.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from r2ccl.errors import InternalError
from r2ccl.failover.migration.link import LinkReport
from r2ccl.types import PathKey


class PathState(enum.Enum):
    """Where a path is in its life."""

    UP = "up"
    FENCING = "fencing"
    FENCED = "fenced"
    DOWN = "down"


class PathEvent(enum.Enum):
    """What can happen to a path."""

    FAILED = "failed"
    ANNOUNCED = "announced"
    FENCED = "fenced"
    OPENED = "opened"


class PathAction(enum.Enum):
    """What the owner of the table must do, in the order given."""

    FENCE = "fence"
    ANNOUNCE = "announce"
    RESUME = "resume"
    REDIAL = "redial"
    USE = "use"


class Announcement(msgspec.Struct, frozen=True, tag="announcement"):
    """Control message: this end of the path is fenced, and this is what it received.

    ``routes`` maps the channels that rode the path to the rails the sender of this message
    proposes; only the lower rank's proposal counts.
    """

    rail: int
    epoch: int
    cause: str
    links: tuple[LinkReport, ...]
    routes: dict[int, int] = {}


class Path:
    """State of one path at this end."""

    __slots__ = (
        "activity", "announcement", "cause", "epoch", "key", "nbytes_received", "nbytes_sent",
        "nslices_received", "nslices_sent", "op", "since_s", "state",
    )  # fmt: skip

    def __init__(self, key: PathKey) -> None:
        self.key = key
        self.state = PathState.DOWN
        self.epoch = 0
        #: Why it went down last.
        self.cause = "not connected yet"
        #: The peer's announcement of this epoch, once it is here.
        self.announcement: Announcement | None = None
        #: Counts events on the path: a stalled path is one whose count stands still.
        self.activity = 0
        #: Since when it is in use, or out of use; a reading of its owner's clock.
        self.since_s = 0.0
        #: Last collective of the peer that was seen on it.
        self.op = 0
        #: Payload given to it and taken from it, what came or went twice included.
        self.nslices_sent = 0
        self.nslices_received = 0
        self.nbytes_sent = 0
        self.nbytes_received = 0


S, E, A = PathState, PathEvent, PathAction

#: (state, event) -> (next state, actions); pairs that are missing change nothing.
TRANSITIONS: dict[tuple[PathState, PathEvent], tuple[PathState, tuple[PathAction, ...]]] = {
    (S.UP, E.FAILED): (S.FENCING, (A.FENCE,)),
    (S.UP, E.ANNOUNCED): (S.FENCING, (A.FENCE,)),
    (S.FENCING, E.FENCED): (S.FENCED, (A.ANNOUNCE,)),
    (S.FENCED, E.ANNOUNCED): (S.DOWN, (A.RESUME, A.REDIAL)),
    (S.DOWN, E.OPENED): (S.UP, (A.USE,)),
    (S.DOWN, E.ANNOUNCED): (S.DOWN, (A.ANNOUNCE, A.RESUME, A.REDIAL)),
}


def step(path: Path, event: PathEvent) -> tuple[PathAction, ...]:
    """Advance `path` by one event and return what to do.

    After RESUME the owner calls `ended` to begin the next epoch.
    """
    entry = TRANSITIONS.get((path.state, event))
    if entry is None:
        return ()
    path.state, actions = entry
    if path.state is S.FENCED and path.announcement is not None:
        return actions + step(path, E.ANNOUNCED)
    return actions


def announced(path: Path, announcement: Announcement) -> tuple[PathAction, ...]:
    """Take the peer's announcement; a stale one changes nothing.

    Raises
    ------
    InternalError
        The announcement is from an epoch this end has not reached.
    """
    if announcement.epoch < path.epoch or path.announcement is not None:
        return ()
    if announcement.epoch > path.epoch:
        raise InternalError(
            f"rank {path.key.peer} announced epoch {announcement.epoch} of rail {path.key.rail}, "
            f"this end is at {path.epoch}"
        )
    path.announcement = announcement
    if path.state in (S.UP, S.DOWN):
        path.cause = f"reported by rank {path.key.peer}: {announcement.cause}"
    return step(path, E.ANNOUNCED) if path.state is not S.FENCING else ()


def ended(path: Path) -> None:
    """Both ends are fenced and resumed: the next epoch begins."""
    path.epoch += 1
    path.announcement = None


def choose_routes(
    channels: Iterable[int],
    candidates: Sequence[PathKey],
    load: Mapping[PathKey, int],
    weight: Callable[[PathKey], float],
    crowd: Mapping[PathKey, int] | None = None,
) -> dict[int, PathKey]:
    """Spread `channels` over the paths that are up, in proportion to their weight.

    Each channel goes where the load after it, divided by the weight, is least; ties go to the
    heavier path, then to the one with the smaller `crowd`, then to the lower rail. Empty when
    there is no candidate.
    """
    others = crowd or {}
    count = {path: load.get(path, 0) for path in candidates}
    routes: dict[int, PathKey] = {}
    for channel in sorted(channels) if candidates else ():
        best = min(
            candidates,
            key=lambda path: (
                (count[path] + 1) / weight(path),
                -weight(path),
                others.get(path, 0),
                path.rail,
            ),
        )
        count[best] += 1
        routes[channel] = best
    return routes


__all__ = [
    "TRANSITIONS",
    "Announcement",
    "Path",
    "PathAction",
    "PathEvent",
    "PathState",
    "announced",
    "choose_routes",
    "ended",
    "step",
]

"""Path: the connection of two ranks over one rail, and the state machine of each of its ends.

Theory of operation
-------------------
Both ends of a path run the table below. The end that is first to detect the failure fences itself
and announces which slices it received. Its announcement makes the other end do the same.
An end determines what it has received only after its own fence, so no late write can change the
result. It resumes only when it has the peer's announcement, so the peer's end is fenced too. If
both ends detect the failure at the same time, the exchange is the same. Each completed exchange
ends an *epoch*: announcements of earlier epochs are stale, and the path is connected again only
under the number of the next epoch, which the handshake of the new connection includes.

The events are:

- FAILED: this end found evidence of a failure.
- ANNOUNCED: the peer's announcement arrived.
- FENCED: the fence of this end is done.
- OPENED: this end is connected.
- CLOSED: this rank closes the path because it is idle, with the same exchange as after a failure.

::

    state    event     -> state    actions
    -------------------------------------------------------------------
    UP       FAILED    -> FENCING  fence
    UP       ANNOUNCED -> FENCING  fence            the peer has fenced its end
    UP       CLOSED    -> FENCING  fence
    FENCING  FENCED    -> FENCED   announce         what this end received
    FENCED   ANNOUNCED -> DOWN     resume, redial   the next epoch begins
    DOWN     OPENED    -> UP       use
    DOWN     ANNOUNCED -> DOWN     announce, resume, redial
                                   this end was not open in the epoch
    DOWN     CLOSED    -> FENCED   announce         connections of this epoch are refused

An announcement that arrives while this end is FENCING is kept until the fence is done. The lower
rank's announcement also proposes a new rail for every channel without a route, if a path is up. The
higher rank uses each proposed path that is up at its end. The two ends may use different paths,
because slices are identified by number (`r2ccl.failover.migration.link`).

Invariant: a path is taken into use only when its state becomes UP.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from r2ccl.errors import InternalError
from r2ccl.failover.migration.link import LinkReport
from r2ccl.types import PathKey


class PathState(enum.Enum):
    """State of one end of a path."""

    UP = "up"
    FENCING = "fencing"
    FENCED = "fenced"
    DOWN = "down"


class PathEvent(enum.Enum):
    """Event in the state table of a path."""

    FAILED = "failed"
    ANNOUNCED = "announced"
    FENCED = "fenced"
    OPENED = "opened"
    CLOSED = "closed"


class PathAction(enum.Enum):
    """Action in the state table of a path; the owner of the path carries it out."""

    FENCE = "fence"
    ANNOUNCE = "announce"
    RESUME = "resume"
    REDIAL = "redial"
    USE = "use"


class Announcement(msgspec.Struct, frozen=True, tag="announcement"):
    """Control message: the sender has fenced its end of a path, and reports the received slices.

    ``cause`` is the sender's `Path.cause`. ``links`` has one report for each link on which the
    receiver of this message sends slices to the sender. ``routes`` maps each channel without a
    route to the rail that the sender proposes for the channel. ``routes`` is empty if the sender
    has the higher rank or no path is up. ``is_idle`` is True if the path did not fail, but was
    closed because it was idle.
    """

    rail: int
    epoch: int
    cause: str
    links: tuple[LinkReport, ...]
    routes: dict[int, int] = {}
    is_idle: bool = False


class ConnectPaths(msgspec.Struct, frozen=True, tag="connect_paths"):
    """Control message: the sender connects data paths to the receiver, which must do so too."""


class ClosePaths(msgspec.Struct, frozen=True, tag="close_paths"):
    """Control message: asks the receiver to close its idle paths to the sender."""


class Path:
    """State, epoch and counters of this rank's end of a path."""

    __slots__ = (
        "activity", "announcement", "cause", "epoch", "is_idle", "key", "nbytes_received",
        "nbytes_sent", "nslices_received", "nslices_sent", "since_s", "state",
    )  # fmt: skip

    def __init__(self, key: PathKey) -> None:
        self.key = key
        self.state = PathState.DOWN
        self.epoch = 0
        #: Reason why the path is, or last was, out of use; empty if it was closed as idle and is up
        #: again.
        self.cause = "not connected yet"
        #: True from the decision to close the path because it is idle until it is in use again.
        self.is_idle = False
        #: The peer's announcement of this epoch; None until it arrives.
        self.announcement: Announcement | None = None
        #: Number of events on the path. A path with work whose count does not change is stalled.
        self.activity = 0
        #: Time when the path last came into or went out of use or, before its first use, when its
        #: connection was begun, in seconds of its owner's clock.
        self.since_s = 0.0
        #: Slices and payload bytes sent and received on the path, with replays and duplicates. The
        #: bytes of a cleared slice that arrives again after its delivery are not counted.
        self.nslices_sent = 0
        self.nslices_received = 0
        self.nbytes_sent = 0
        self.nbytes_received = 0


S, E, A = PathState, PathEvent, PathAction

#: (state, event) -> (next state, actions). Pairs that are not listed change nothing.
TRANSITIONS: dict[tuple[PathState, PathEvent], tuple[PathState, tuple[PathAction, ...]]] = {
    (S.UP, E.FAILED): (S.FENCING, (A.FENCE,)),
    (S.UP, E.ANNOUNCED): (S.FENCING, (A.FENCE,)),
    (S.UP, E.CLOSED): (S.FENCING, (A.FENCE,)),
    (S.FENCING, E.FENCED): (S.FENCED, (A.ANNOUNCE,)),
    (S.FENCED, E.ANNOUNCED): (S.DOWN, (A.RESUME, A.REDIAL)),
    (S.DOWN, E.OPENED): (S.UP, (A.USE,)),
    (S.DOWN, E.ANNOUNCED): (S.DOWN, (A.ANNOUNCE, A.RESUME, A.REDIAL)),
    (S.DOWN, E.CLOSED): (S.FENCED, (A.ANNOUNCE,)),
}


def step(path: Path, event: PathEvent) -> tuple[PathAction, ...]:
    """Advance `path` by one event and return the actions to carry out, in order.

    The action RESUME ends with a call of `ended`, which begins the next epoch.
    """
    entry = TRANSITIONS.get((path.state, event))
    if entry is None:
        return ()
    path.state, actions = entry
    if path.state is S.FENCED and path.announcement is not None:
        return actions + step(path, E.ANNOUNCED)
    return actions


def announced(path: Path, announcement: Announcement) -> tuple[PathAction, ...]:
    """Handle the peer's announcement and return the actions; if it is stale or repeated, none.

    Raises
    ------
    InternalError
        If the announcement's epoch is later than that of this end.
    """
    if announcement.epoch < path.epoch or path.announcement is not None:
        return ()
    if announcement.epoch > path.epoch:
        raise InternalError(
            f"rank {path.key.peer} announced epoch {announcement.epoch} of rail {path.key.rail}, "
            f"but the receiver of the announcement is at epoch {path.epoch}"
        )
    path.announcement = announcement
    if path.state in (S.UP, S.DOWN):
        path.cause = f"reported by rank {path.key.peer}: {announcement.cause}"
    return step(path, E.ANNOUNCED) if path.state is not S.FENCING else ()


def ended(path: Path) -> None:
    """Begin the next epoch of `path`; called after this end has resumed."""
    path.epoch += 1
    path.announcement = None


def choose_routes(
    channels: Iterable[int],
    candidates: Sequence[PathKey],
    load: Mapping[PathKey, int],
    weight: Callable[[PathKey], float],
    crowd: Mapping[PathKey, int] | None = None,
) -> dict[int, PathKey]:
    """Assign `channels` to paths, in proportion to the weights of the paths.

    Each channel goes to the path with the least (load + 1) / weight. A tie goes to the path with
    the larger weight, then with the smaller crowd, then with the lower rail.

    Parameters
    ----------
    channels : iterable of int
        Channels that need a route.
    candidates : sequence of PathKey
        Paths that are up.
    load : mapping of PathKey to int
        Number of channels on a path that count as its load; a missing path has 0.
    weight : callable
        Relative bandwidth of a path; above 0.
    crowd : mapping of PathKey to int, optional
        Number of further channels on a path, which only break ties.

    Returns
    -------
    dict of int to PathKey
        Route of each channel; empty if there is no candidate.
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
    "ClosePaths",
    "ConnectPaths",
    "Path",
    "PathAction",
    "PathEvent",
    "PathState",
    "announced",
    "choose_routes",
    "ended",
    "step",
]

"""The path table: every row, every epoch, and every interleaving of two ends."""

import itertools
from collections import deque

import pytest

from r2ccl.errors import InternalError
from r2ccl.failover.migration.path import (
    TRANSITIONS,
    Announcement,
    Path,
    PathAction,
    PathEvent,
    PathState,
    announced,
    choose_routes,
    ended,
    step,
)
from r2ccl.types import PathKey

KEY = PathKey(1, 0)


def make(state: PathState, epoch: int = 0) -> Path:
    path = Path(KEY)
    path.state = state
    path.epoch = epoch
    return path


def announcement(epoch: int, cause: str = "EIO") -> Announcement:
    return Announcement(KEY.rail, epoch, cause, ())


@pytest.mark.parametrize(("state", "event"), list(itertools.product(PathState, PathEvent)))
def test_every_pair_of_state_and_event(state: PathState, event: PathEvent) -> None:
    path = make(state)
    actions = step(path, event)
    expected_state, expected = TRANSITIONS.get((state, event), (state, ()))
    assert (path.state, actions) == (expected_state, expected)


def test_the_table_is_the_one_documented() -> None:
    assert {
        (state.name, event.name): (after.name, " ".join(action.name for action in actions))
        for (state, event), (after, actions) in TRANSITIONS.items()
    } == {
        ("UP", "FAILED"): ("FENCING", "FENCE"),
        ("UP", "ANNOUNCED"): ("FENCING", "FENCE"),
        ("UP", "CLOSED"): ("FENCING", "FENCE"),
        ("FENCING", "FENCED"): ("FENCED", "ANNOUNCE"),
        ("FENCED", "ANNOUNCED"): ("DOWN", "RESUME REDIAL"),
        ("DOWN", "OPENED"): ("UP", "USE"),
        ("DOWN", "ANNOUNCED"): ("DOWN", "ANNOUNCE RESUME REDIAL"),
        ("DOWN", "CLOSED"): ("FENCED", "ANNOUNCE"),
    }


@pytest.mark.parametrize("state", PathState)
def test_a_stale_announcement_changes_nothing(state: PathState) -> None:
    path = make(state, epoch=3)
    assert announced(path, announcement(2)) == ()
    assert (path.state, path.announcement) == (state, None)


@pytest.mark.parametrize("state", PathState)
def test_an_announcement_from_the_future_is_a_broken_invariant(state: PathState) -> None:
    with pytest.raises(InternalError, match="announced epoch 4"):
        announced(make(state, epoch=3), announcement(4))


def test_a_second_announcement_of_an_epoch_changes_nothing() -> None:
    path = make(PathState.UP)
    assert announced(path, announcement(0)) == (PathAction.FENCE,)
    assert announced(path, announcement(0)) == ()
    assert path.state is PathState.FENCING


def test_an_announcement_while_fencing_waits_for_the_fence() -> None:
    path = make(PathState.UP)
    assert step(path, PathEvent.FAILED) == (PathAction.FENCE,)
    assert announced(path, announcement(0)) == ()
    assert path.state is PathState.FENCING
    assert step(path, PathEvent.FENCED) == (
        PathAction.ANNOUNCE,
        PathAction.RESUME,
        PathAction.REDIAL,
    )
    assert path.state is PathState.DOWN


def test_a_reported_failure_names_its_reporter_and_our_own_cause() -> None:
    path = make(PathState.UP)
    announced(path, announcement(0, "EIO: cable"))
    assert path.cause == "reported by rank 1: EIO: cable"
    path = make(PathState.UP)
    path.cause = "PORT_ERR"
    step(path, PathEvent.FAILED)
    announced(path, announcement(0, "EIO: cable"))
    assert path.cause == "PORT_ERR"


def test_ended_begins_the_next_epoch() -> None:
    path = make(PathState.DOWN, epoch=3)
    path.announcement = announcement(3)
    ended(path)
    assert (path.epoch, path.announcement) == (4, None)


# Both ends, every interleaving. A state is everything that matters of them and of what is under
# way between them; a move is one event at one end.


#: Request to close an idle path, in the place of an announced epoch.
CLOSE = -1


class Pair:
    """Two ends of one path, the session between them and the dialer's connection."""

    def __init__(self, max_epoch: int) -> None:
        self.max_epoch = max_epoch
        self.ends = (make(PathState.DOWN), make(PathState.DOWN))
        #: Epochs announced and requests to close, per receiving end.
        self.sent: tuple[deque[int], deque[int]] = (deque(), deque())
        #: Epochs of connections that will reach an end.
        self.opening: tuple[list[int], list[int]] = ([], [])
        self.has_announced = [-1, -1]

    def state(self) -> tuple[object, ...]:
        return (
            *((p.state, p.epoch, p.announcement is not None) for p in self.ends),
            *(tuple(queue) for queue in self.sent),
            *(tuple(queue) for queue in self.opening),
            *self.has_announced,
        )

    @classmethod
    def at(cls, state: tuple[object, ...], max_epoch: int) -> "Pair":
        pair = cls(max_epoch)
        for path, (phase, epoch, has_announcement) in zip(pair.ends, state[:2], strict=True):  # type: ignore[misc]
            path.state, path.epoch = phase, epoch
            path.announcement = announcement(epoch) if has_announcement else None
        pair.sent = (deque(state[2]), deque(state[3]))  # type: ignore[arg-type]
        pair.opening = (list(state[4]), list(state[5]))  # type: ignore[arg-type]
        pair.has_announced = list(state[6:])  # type: ignore[arg-type]
        return pair

    def moves(self) -> list[tuple[str, int]]:
        found = []
        for end, path in enumerate(self.ends):
            if path.state is PathState.UP and path.epoch < self.max_epoch:
                found.append(("fail", end))
            if path.state is PathState.FENCING:
                found.append(("fenced", end))
            is_open = path.state in (PathState.UP, PathState.DOWN)
            if is_open and path.epoch < self.max_epoch and CLOSE not in self.sent[1 - end]:
                found.append(("close", end))
            if self.sent[end]:
                found.append(("receive", end))
            if self.opening[end]:
                found.append(("open", end))
                found.append(("lose", end))
        low, high = self.ends
        is_dialing = low.state is PathState.DOWN and low.epoch <= self.max_epoch
        is_dialing = is_dialing and not self.opening[0]
        if is_dialing and high.epoch == low.epoch and not self.opening[1]:
            found.append(("connect", 0))
        return found

    def move(self, what: str, end: int) -> None:
        path = self.ends[end]
        if what == "fail":
            self.apply(end, step(path, PathEvent.FAILED))
        elif what == "fenced":
            self.apply(end, step(path, PathEvent.FENCED))
        elif what == "close":
            self.sent[1 - end].append(CLOSE)
            if path.state is PathState.DOWN:
                self.apply(end, step(path, PathEvent.CLOSED))
        elif what == "receive" and self.sent[end][0] == CLOSE:
            self.sent[end].popleft()
            self.apply(end, step(path, PathEvent.CLOSED))
        elif what == "receive":
            self.apply(end, announced(path, announcement(self.sent[end].popleft())))
        elif what == "connect":
            for other in (0, 1):
                self.opening[other].append(self.ends[0].epoch)
        elif what == "lose":
            self.opening[end].pop(0)
        else:
            epoch = self.opening[end].pop(0)
            if path.state is PathState.DOWN and path.epoch == epoch:
                self.apply(end, step(path, PathEvent.OPENED))
            elif path.epoch == epoch and path.state is PathState.UP:
                self.apply(end, step(path, PathEvent.FAILED))  # the peer dialed again

    def apply(self, end: int, actions: tuple[PathAction, ...]) -> None:
        path, peer = self.ends[end], self.ends[1 - end]
        for action in actions:
            if action is PathAction.ANNOUNCE:
                assert path.state not in (PathState.UP, PathState.FENCING)
                self.has_announced[end] = path.epoch
                self.sent[1 - end].append(path.epoch)
            elif action is PathAction.RESUME:
                # What rule 1 asks for: nothing of this epoch is in use at the other end, ever.
                assert self.has_announced[1 - end] >= path.epoch
                assert peer.epoch > path.epoch or peer.state in (
                    PathState.FENCED,
                    PathState.DOWN,
                )
                ended(path)
            elif action is PathAction.USE:
                assert path.state is PathState.UP


def test_no_interleaving_sticks_or_resumes_before_both_fences() -> None:
    max_epoch = 4
    seen = {Pair(max_epoch).state()}
    frontier = list(seen)
    nquiet = 0
    while frontier:
        state = frontier.pop()
        moves = Pair.at(state, max_epoch).moves()
        for move in moves:
            pair = Pair.at(state, max_epoch)
            pair.move(*move)  # raises InternalError or AssertionError where a rule is broken
            after = pair.state()
            if after not in seen:
                seen.add(after)
                frontier.append(after)
        if not moves:
            nquiet += 1
            low, high = Pair.at(state, max_epoch).ends
            assert low.epoch == high.epoch
            assert low.state is PathState.UP or low.epoch > max_epoch
            # The higher end's handshake may be lost after the lower end's succeeded: then the
            # transport of the lower end finds nobody there and reports it.
            assert high.state in (PathState.UP, PathState.DOWN)
    assert nquiet >= 1
    assert len(seen) > 200, len(seen)


# Routes

P = [PathKey(1, rail) for rail in range(4)]


def test_routes_spread_evenly() -> None:
    routes = choose_routes(range(12), P, {}, lambda path: 1.0)
    assert sorted(routes) == list(range(12))
    assert [list(routes.values()).count(path) for path in P] == [3, 3, 3, 3]


def test_routes_of_a_lost_rail_spread_over_the_others() -> None:
    load = {P[0]: 3, P[1]: 3, P[2]: 3}
    routes = choose_routes([3, 7, 11], P[:3], load, lambda path: 1.0)
    assert sorted(routes.values()) == P[:3]


def test_routes_follow_weight_and_load() -> None:
    weights = dict(zip(P, (4.0, 1.0, 1.0, 2.0), strict=True))
    routes = choose_routes(range(8), P, {}, weights.__getitem__)
    assert [list(routes.values()).count(path) for path in P] == [4, 1, 1, 2]
    routes = choose_routes(range(2), P, {P[0]: 100}, weights.__getitem__)
    assert P[0] not in routes.values()


def test_ties_go_to_the_heavier_then_the_lower_rail() -> None:
    assert choose_routes([0], P, {}, lambda path: 1.0) == {0: P[0]}
    weights = dict(zip(P, (1.0, 2.0, 2.0, 1.0), strict=True))
    load = {P[0]: 0, P[1]: 1, P[2]: 1, P[3]: 0}
    assert choose_routes([0], P, load, weights.__getitem__) == {0: P[1]}


def test_both_ends_choose_alike_whatever_the_order_of_channels() -> None:
    mine = choose_routes([5, 1, 3], P, {}, lambda path: 1.0)
    theirs = choose_routes([3, 5, 1], P, {}, lambda path: 1.0)
    assert mine == theirs


def test_no_candidate_no_route() -> None:
    assert choose_routes([0, 1], [], {}, lambda path: 1.0) == {}

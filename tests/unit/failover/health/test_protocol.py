"""The health agreement: no two ranks plan one collective from different versions, ever.

A `World` is all ranks and what is under way between them. A schedule is what happens in it, two
bytes each: a message arrives, a collective starts, a rank reports, time passes. Random schedules
look for a violation with several ranks, and must find one in every broken protocol; an exhaustive
search goes through every interleaving of two ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from unittest import mock

import msgspec
import pytest
from hypothesis import strategies as st
from support.slow import given, slow_but

from r2ccl.errors import CommunicatorRevoked, InternalError, InvalidArgument
from r2ccl.failover.health.protocol import (
    Action,
    Agreement,
    HealthAgreed,
    HealthKnown,
    Late,
    Send,
)
from r2ccl.failover.health.rounds import (
    AgreementLimits,
    Commit,
    Coordinator,
    ExcludeRails,
    Member,
    Message,
    Prepare,
    Promise,
    RailsExcluded,
    Report,
    Subtree,
)
from r2ccl.failover.health.table import WHOLE, Findings, Health, RailShare

NRAILS = 2
NEVER_REST = AgreementLimits(rest_s=0.0)
DOWN, SLOW, UP = 0, 4, WHOLE
_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(Message).decode


class World:
    """All ranks of a communicator; sessions deliver once and in order, pair by pair."""

    def __init__(self, nranks: int, limits: AgreementLimits = NEVER_REST, version: int = 0) -> None:
        initial = msgspec.structs.replace(Health.whole(nranks, NRAILS), version=version)
        self.ranks = [Agreement(rank, initial, limits) for rank in range(nranks)]
        self.window = limits.window
        self.now = 0.0
        #: Encoded messages under way, per (sender, receiver).
        self.queues: dict[tuple[int, int], deque[bytes]] = {
            pair: deque() for pair in itertools.permutations(range(nranks), 2)
        }
        #: What any rank was told to plan a collective with: the first answer binds all.
        self.plans: dict[int, int] = {}
        self.words: dict[tuple[int, int], dict[int, int]] = {}

    # What can happen

    def deliver(self, pair: tuple[int, int]) -> None:
        sender, receiver = pair
        message = _decode(self.queues[pair].popleft())
        self._act(receiver, self.ranks[receiver].on_message(self.now, sender, message))

    def start(self, rank: int) -> None:
        """Start the next collective, if the rank may."""
        agreement = self.ranks[rank]
        op = agreement.started + 1
        if agreement.may_start(op):
            self._planned(op, agreement.start(op))
            self._bind(rank)

    def report(self, rank: int, *news: RailShare) -> None:
        for target, rail, share, _ in news:
            self.words.setdefault((target, rail), {})[rank] = share
        self._act(rank, self.ranks[rank].report(self.now, news))

    def tick(self, rank: int, seconds: float = 0.0) -> None:
        self.now += seconds
        self._act(rank, self.ranks[rank].tick(self.now))

    def settle(self) -> None:
        """Nothing new happens, and everything under way arrives."""
        for _ in range(1000):
            for pair, queue in self.queues.items():
                while queue:
                    self.deliver(pair)
            self.tick(0, 1.0)
            if not any(self.queues.values()):
                return
        raise AssertionError("rounds without end")

    # What must hold

    def check_settled(self) -> None:
        """All hold one version with all that was said, none waits, and all plan with it."""
        held = {agreement.held for agreement in self.ranks}
        assert len(held) == 1
        (health,) = held
        for (rank, rail), words in self.words.items():
            assert health.share(rank, rail) == min(words.values())
        last = max(agreement.started for agreement in self.ranks) + self.window + 1
        for rank, agreement in enumerate(self.ranks):
            assert agreement.waits_for() == ()
            while agreement.started < last:
                before = agreement.started
                self.start(rank)
                assert agreement.started == before + 1, f"rank {rank} may not go on"
        assert self.plans[last] == health.version

    def _planned(self, op: int, health: Health) -> None:
        version = self.plans.setdefault(op, health.version)
        assert version == health.version, f"collective {op}: versions {version}, {health.version}"

    def _bind(self, rank: int) -> None:
        """Count the collectives that the rank may start now without asking as planned."""
        agreement = self.ranks[rank]
        if agreement.steady is not None:
            for op in range(agreement.started + 1, agreement.started + self.window + 1):
                self._planned(op, agreement.steady)

    def _act(self, rank: int, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(peer, message):
                    self.queues[rank, peer].append(_encode(message))
                case Late(version, ranks):
                    waits_for = self.ranks[rank].waits_for()
                    assert (version, ranks) == (self.ranks[rank].held.version, waits_for)
                case HealthKnown(health):
                    assert health == self.ranks[rank].held
                case HealthAgreed():
                    assert self.ranks[rank].may_start(self.ranks[rank].started + 1)
        self._bind(rank)


def play(world: World, schedule: bytes) -> World:
    """Let `schedule` happen, then everything that is still under way."""
    nranks = len(world.ranks)
    for low, high in zip(schedule[::2], schedule[1::2], strict=False):
        rank = high % nranks
        match low % 8:
            case 0 | 1 | 2 | 3:
                waiting = [pair for pair, queue in world.queues.items() if queue]
                if waiting:
                    world.deliver(waiting[high % len(waiting)])
            case 4 | 5:
                world.start(rank)
            case 6:
                target = (rank + (high >> 4) % 2) % nranks
                share = (DOWN, SLOW, UP)[(high >> 5) % 3]
                world.report(rank, RailShare(target, high >> 7, share))
            case 7:
                world.tick(rank, 0.004)
    world.settle()
    world.check_settled()
    return world


# Random schedules


@given(
    100,
    300,
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.02]),
    st.binary(max_size=100) | st.binary(min_size=300, max_size=600),
)
def test_no_two_ranks_plan_a_collective_from_different_versions(
    nranks: int, window: int, rest_s: float, schedule: bytes
) -> None:
    play(World(nranks, AgreementLimits(window=window, rest_s=rest_s)), schedule)


def random_schedule(seed: int, nbytes: int = 400) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@pytest.mark.parametrize(
    ("nranks", "nschedules"),
    slow_but([(2, 60), (3, 60), (11, 15)], [(2, 60), (3, 60), (11, 15), (6, 60), (11, 60)]),
)
def test_long_schedules_of_many_rounds(nranks: int, nschedules: int) -> None:
    versions = 0
    for seed in range(nschedules):
        schedule = random_schedule(seed, 200 * nranks)
        versions += play(World(nranks), schedule).ranks[0].held.version
    assert versions > 5 * nschedules, "the schedules must make the ranks agree often"


# Every interleaving of two ranks

#: What the ranks report, in this order: each the moment it is next and chosen to happen.
TOLD = ((1, RailShare(1, 0, DOWN)), (0, RailShare(0, 1, DOWN)))


class SmallWorld(World):
    """Two ranks that report `TOLD` and start `nops` collectives, in any order."""

    def __init__(self, nops: int) -> None:
        super().__init__(2)
        self.nops = nops
        self.told = 0

    def moves(self) -> list[Callable[[], None]]:
        """Everything that can happen now; of equal worlds the same, in the same order."""
        found: list[Callable[[], None]] = [partial(self.tick, 0)]
        if self.told < len(TOLD):
            found.append(self.tell)
        found += [
            partial(self.start, rank)
            for rank, agreement in enumerate(self.ranks)
            if agreement.started < self.nops and agreement.may_start(agreement.started + 1)
        ]
        found += [partial(self.deliver, pair) for pair, queue in self.queues.items() if queue]
        return found

    def tell(self) -> None:
        rank, news = TOLD[self.told]
        self.told += 1
        self.report(rank, news)


@pytest.mark.parametrize(
    ("nops", "least_states", "least_ends"),
    slow_but([(3, 1500, 60)], [(3, 1500, 60), (5, 5000, 200)]),
)
def test_every_interleaving_of_two_ranks_reports_and_collectives(
    nops: int, least_states: int, least_ends: int
) -> None:
    first = pickle.dumps(SmallWorld(nops))
    seen, todo, ends = {first}, [first], 0
    while todo:
        state = todo.pop()
        world = pickle.loads(state)
        nmoves = len(world.moves())
        for number in range(nmoves):
            if number:
                world = pickle.loads(state)
            world.moves()[number]()
            after = pickle.dumps(world)
            if after not in seen:
                seen.add(after)
                todo.append(after)
        if nmoves == 1:  # only time can pass
            ends += 1
            world = pickle.loads(state)
            world.settle()
            world.check_settled()
    assert ends > least_ends
    assert len(seen) > least_states, "too few states for every interleaving"


# Broken protocols: the schedules above must find them


def _promise_of(choose: Callable[[Subtree, int, int], int]) -> Callable[..., Promise | None]:
    """A rank that promises what `choose` makes of what was reached before and now."""

    def promise(self: Subtree, rank: int, message: Promise) -> Promise | None:
        if message.version < self._version or rank not in self.missing:
            return None
        is_first = len(self.missing) == len(self.children) + 1
        before = message.reached if is_first else self._reached
        self._reached = choose(self, before, message.reached)
        self.missing -= {rank}
        return None if self.missing else Promise(self._version, self._reached)

    return promise


def _of_some(is_enough: Callable[[int, int], bool]) -> Callable[..., Promise | None]:
    """A rank that promises for its subtree once `is_enough` of it has promised."""

    def promise(self: Subtree, rank: int, message: Promise) -> Promise | None:
        if message.version < self._version or rank not in self.missing:
            return None
        self._reached = max(self._reached, message.reached)
        self.missing -= {rank}
        everyone = len(self.children) + 1
        if not is_enough(everyone - len(self.missing), everyone):
            return None
        self.missing = frozenset()
        return Promise(self._version, self._reached)

    return promise


def _believe(self: Member, message: Commit) -> bool:
    """Take any commit, so that the plans themselves must show what is wrong with it."""
    if message.version != self.held.version or self.limit is None:
        return False
    self.limit = None
    self._plans = [plan for plan in self._plans if plan[0] < message.first_op]
    self._plans.append((message.first_op, self.held))
    return True


def _too_early(self: Coordinator, now: float, promise: Promise) -> Commit:
    self._is_running = False
    return Commit(promise.version, promise.reached + 1)


def _reached_when_done(self: Member, message: Prepare) -> Promise | None:
    """A collective counts as reached when it ends, not when it starts."""
    self.held, self.limit = message.health, self.started + self._window
    return Promise(message.health.version, max(0, self.started - 1))


def _planned_with_held(self: Member, op: int) -> Health:
    self.started = op
    return self.held


def _deaf_in_a_round(self: Coordinator, reporter: int, news: tuple[RailShare, ...]) -> None:
    if not self._is_running:
        self._findings.note(reporter, news)
        self._has_news = True


def _last_word_wins(self: Findings, reporter: int, news: tuple[RailShare, ...]) -> None:
    for rank, rail, share, _ in news:
        self._words[rank, rail] = {reporter: RailShare(rank, rail, share)}


MISTAKES: dict[str, dict[tuple[type, str], Callable[..., object]]] = {
    "committed before the window ends": {
        (Coordinator, "end"): _too_early,
        (Member, "commit"): _believe,
    },
    "committed from the least reach on": {
        (Subtree, "promise"): _promise_of(lambda self, before, now: min(before, now)),
        (Member, "commit"): _believe,
    },
    "committed from the first reach on": {
        (Subtree, "promise"): _promise_of(lambda self, before, now: before),
        (Member, "commit"): _believe,
    },
    "committed by a majority": {
        (Subtree, "promise"): _of_some(lambda number, everyone: 2 * number > everyone),
        (Member, "commit"): _believe,
    },
    "promised without the children": {
        (Subtree, "promise"): _of_some(lambda number, everyone: True),
        (Member, "commit"): _believe,
    },
    "promise not held": {(Member, "may_start"): lambda self, op: True},
    "reached counted at the end": {
        (Member, "prepare"): _reached_when_done,
        (Member, "commit"): _believe,
    },
    "planned with what is held": {(Member, "start"): _planned_with_held},
    "news of a round forgotten": {(Coordinator, "report"): _deaf_in_a_round},
    "last word wins": {(Findings, "note"): _last_word_wins},
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_broken_protocol_is_found(name: str) -> None:
    with contextlib.ExitStack() as stack:
        for (owner, method), wrong in MISTAKES[name].items():
            stack.enter_context(mock.patch.object(owner, method, wrong))
        assert any(_is_found(seed) for seed in range(60)), "the same schedules as above"


def _is_found(seed: int) -> bool:
    try:
        play(World(6), random_schedule(seed))
    except AssertionError:
        return True
    return False


# The round, step by step


def make(rank: int, nranks: int = 3, **limits: float) -> Agreement:
    bounds = AgreementLimits(**limits)  # type: ignore[arg-type]
    return Agreement(rank, Health.whole(nranks, NRAILS, "abc"), bounds)


def next_health(version: int = 1, nranks: int = 3, nrails: int = NRAILS) -> Health:
    health = Health.whole(nranks, nrails, "abc").changed([RailShare(1, 0, DOWN)])
    return msgspec.structs.replace(health, version=version)


NEWS = RailShare(1, 0, DOWN)


def test_a_round_from_report_to_commit() -> None:
    first, second = make(0), make(1)
    assert second.report(0.0, [NEWS]) == [Send(0, Report((NEWS,), 1))]
    health = next_health()
    assert first.on_message(0.0, 1, Report((NEWS,))) == [
        Send(1, Prepare(health)),
        Send(2, Prepare(health)),
        HealthKnown(health),
    ]
    first_held, second_held = first.held, second.held
    assert (first_held, second_held.version) == (health, 0)
    for op in (1, 2, 3):
        second.start(op)
    assert second.on_message(0.0, 0, Prepare(health)) == [
        HealthKnown(health),
        Send(0, Promise(1, 3)),
    ]
    assert (second.held, second.waits_for(), first.waits_for()) == (health, (0,), (1, 2))
    assert first.on_message(0.0, 1, Promise(1, 3)) == []
    commit = Commit(1, 5)
    assert first.on_message(0.0, 2, Promise(1, 0)) == [
        Send(1, commit),
        Send(2, commit),
        HealthAgreed(1, 5),
    ]
    assert second.on_message(0.0, 0, commit) == [HealthAgreed(1, 5)]
    assert [second.start(op).version for op in (4, 5, 6)] == [0, 1, 1]


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_promise_allows_the_window_only_until_the_commit(window: int) -> None:
    agreement = make(1, window=window)
    agreement.start(1)
    agreement.on_message(0.0, 0, Prepare(next_health()))
    for op in range(2, 2 + window):
        assert agreement.may_start(op)
        assert agreement.start(op).version == 0
    blocked = 2 + window
    assert not agreement.may_start(blocked)
    with pytest.raises(InternalError, match=f"collective {blocked} started after"):
        agreement.start(blocked)
    agreement.on_message(0.0, 0, Commit(1, blocked))
    assert agreement.start(blocked).version == 1


def test_all_ranks_hold_the_news_after_one_round_trip() -> None:
    world = World(4)
    world.report(3, NEWS)
    world.deliver((3, 0))
    for pair in ((0, 1), (0, 2), (2, 3)):
        world.deliver(pair)
    assert {agreement.held.share(1, 0) for agreement in world.ranks} == {DOWN}


def test_one_rank_alone_agrees_with_itself_at_once() -> None:
    agreement = make(0, nranks=1)
    agreement.start(1)
    actions = agreement.report(0.0, [RailShare(0, 1, SLOW)])
    assert actions == [HealthKnown(agreement.held), HealthAgreed(1, 3)]
    assert [agreement.start(op).version for op in (2, 3)] == [0, 1]


def test_a_report_that_changes_nothing_begins_no_round() -> None:
    agreement = make(0)
    assert agreement.report(0.0, []) == []
    assert agreement.report(0.0, [RailShare(0, 0, UP)]) == []
    assert agreement.on_message(0.0, 2, Report((RailShare(2, 1, UP),))) == []
    assert agreement.tick(1.0) == []
    assert agreement.waits_for() == ()


def test_news_of_a_round_under_way_come_in_the_next_one_merged() -> None:
    world = World(3)
    world.report(1, NEWS)
    world.deliver((1, 0))
    world.report(2, RailShare(2, 0, SLOW))
    world.report(1, RailShare(1, 0, UP))
    world.report(1, RailShare(1, 1, DOWN))
    for pair in ((2, 0), (1, 0), (1, 0)):
        world.deliver(pair)
    assert world.ranks[0].held.version == 1
    world.settle()
    world.check_settled()
    assert world.ranks[0].held.version == 2, "three reports, one more round"


def test_a_report_that_another_one_overtook_is_ignored() -> None:
    first, second = make(0), make(1)
    down, up = (
        second.report(0.0, [RailShare(1, 0, share), RailShare(2, rail, SLOW)])[0]
        for rail, share in enumerate((DOWN, UP))
    )
    assert isinstance(down, Send)
    assert isinstance(up, Send)
    first.on_message(0.0, 1, up.message)
    first.on_message(0.0, 1, down.message)
    for rank in (1, 2):
        first.on_message(0.0, rank, Promise(1, 0))
    first.tick(1.0)
    assert first.held.version == 2
    assert first.held.share(1, 0) == UP
    assert [first.held.share(2, rail) for rail in range(2)] == [SLOW, SLOW]


def test_a_rail_back_before_the_round_ends_costs_only_one_plan() -> None:
    world = World(3)
    world.report(1, NEWS)
    world.report(1, RailShare(1, 0, UP))
    world.settle()
    world.check_settled()
    assert world.ranks[0].held.version == 2
    assert world.ranks[0].held.degraded() == ()


def test_ranks_far_apart_plan_alike() -> None:
    world = World(3)
    for _ in range(50):
        world.start(2)
    world.report(1, NEWS)
    world.settle()
    for rank in (0, 1):
        for _ in range(60):
            world.start(rank)
    assert (world.plans[51], world.plans[52]) == (0, 1)
    world.check_settled()


def test_of_versions_that_begin_together_only_the_newest_is_left() -> None:
    world = World(2)
    for share in (DOWN, SLOW, UP, DOWN):
        world.report(1, RailShare(1, 0, share))
        world.settle()
    world.start(0)
    world.start(0)
    assert world.plans[2] == 4
    assert len(world.ranks[0]._member._plans) == 1
    world.check_settled()


def test_a_communicator_may_begin_with_the_version_of_another() -> None:
    world = World(3, version=57)
    world.report(1, NEWS)
    world.settle()
    world.check_settled()
    assert {agreement.held.version for agreement in world.ranks} == {58}


def test_a_call_that_failed_before_any_byte_keeps_its_number() -> None:
    agreement = make(1)
    agreement.start(1)
    agreement.on_message(0.0, 0, Prepare(next_health()))
    agreement.on_message(0.0, 0, Commit(1, 3))
    assert agreement.start(1).version == 0
    assert agreement.started == 1


def test_only_the_next_collective_starts() -> None:
    agreement = make(1)
    with pytest.raises(InternalError, match="collective 2 started after 0"):
        agreement.start(2)
    assert [agreement.start(op).version for op in (1, 2)] == [0, 0]


# Time


def test_rounds_rest_and_what_comes_meanwhile_is_merged() -> None:
    agreement = make(0, nranks=1, rest_s=0.5)
    assert agreement.report(10.0, [RailShare(0, 0, DOWN)]) != []
    assert agreement.report(10.1, [RailShare(0, 0, UP)]) == []
    assert agreement.report(10.2, [RailShare(0, 1, SLOW)]) == []
    assert agreement.tick(10.4) == []
    assert agreement.held.version == 1
    assert [type(action) for action in agreement.tick(10.5)] == [HealthKnown, HealthAgreed]
    assert (agreement.held.version, agreement.held.shares) == (2, bytes([UP, SLOW]))
    assert agreement.tick(11.5) == []


def test_an_endlessly_flapping_rail_does_not_starve_collectives() -> None:
    """Messages take 1 ms, collectives 0.1 ms, and a rank reports a change with each of them."""
    world = World(3, AgreementLimits())
    shares = itertools.cycle((DOWN, UP))
    attempts = 5000
    for step in range(attempts):
        world.now = 1e-4 * step
        world.report(2, RailShare(2, 0, next(shares)))
        if step % 10 == 0:
            for pair in list(world.queues):
                for _ in range(len(world.queues[pair])):
                    world.deliver(pair)
        world.tick(0)
        for rank in range(3):
            world.start(rank)
    rounds = world.ranks[0].held.version
    assert 5 < rounds <= 0.5 / AgreementLimits().rest_s, "a round per rest at most"
    assert min(agreement.started for agreement in world.ranks) > 0.85 * attempts


def test_each_round_lets_every_rank_start_one_more_without_rest() -> None:
    world = World(3)
    shares = itertools.cycle((DOWN, UP))
    while world.ranks[0].held.version < 50:
        world.report(2, RailShare(2, 0, next(shares)))
        for pair in world.queues:
            while world.queues[pair]:
                world.deliver(pair)
                for rank in range(3):
                    world.start(rank)
    assert min(agreement.started for agreement in world.ranks) >= 49


def test_a_long_round_keeps_naming_who_has_not_promised() -> None:
    agreement = make(0, nranks=4, late_s=1.0)
    agreement.on_message(5.0, 1, Report((NEWS,)))
    found = {step: agreement.tick(5.0 + 0.25 * step) for step in range(1, 13)}
    late = [Late(1, (1, 2))]
    assert {step: actions for step, actions in found.items() if actions} == {
        4: late,
        8: late,
        12: late,
    }
    agreement.on_message(8.1, 1, Promise(1, 0))
    assert agreement.waits_for() == (2,)
    agreement.on_message(8.1, 2, Promise(1, 0))
    assert [agreement.tick(8.1 + 0.25 * step) for step in range(12)] == [[]] * 12


def test_an_inner_rank_passes_on_and_promises_for_its_subtree() -> None:
    agreement = make(2, nranks=4)
    health = next_health(nranks=4)
    prepare = Prepare(health)
    agreement.start(1)
    assert agreement.on_message(0.0, 0, prepare) == [Send(3, prepare), HealthKnown(health)]
    assert agreement.waits_for() == (3,)
    assert agreement.on_message(0.0, 3, Promise(1, 5)) == [Send(0, Promise(1, 5))]
    assert agreement.waits_for() == (0,)
    commit = Commit(1, 7)
    assert agreement.on_message(0.0, 0, commit) == [Send(3, commit), HealthAgreed(1, 7)]
    assert agreement.waits_for() == ()


def test_a_rank_that_waits_for_the_commit_names_the_coordinator() -> None:
    agreement = make(2, late_s=1.0)
    agreement.on_message(0.0, 0, Prepare(next_health()))
    found = [agreement.tick(0.1 * step) for step in range(1, 12)]
    assert [actions for actions in found if actions] == [[Late(1, (0,))]]


def test_a_rank_that_was_away_itself_does_not_call_others_late() -> None:
    agreement = make(0, late_s=1.0)
    agreement.report(0.0, [NEWS])
    assert agreement.tick(0.1) == []
    assert agreement.tick(60.0) == []
    assert agreement.tick(60.1) == []


@pytest.mark.parametrize(
    "limits", [{"window": 0}, {"window": -1}, {"rest_s": -0.1}, {"late_s": 0.0}]
)
def test_limits_out_of_range_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument, match="window must be at least 1"):
        AgreementLimits(**limits)  # type: ignore[arg-type]


# The end, and what must not come


@pytest.mark.parametrize("lost", [0, 2])
def test_after_a_loss_nothing_moves_and_it_says_so(lost: int) -> None:
    agreement = make(1)
    agreement.start(1)
    agreement.on_message(0.0, 0, Prepare(next_health()))
    agreement.peer_lost(lost)
    agreement.peer_lost(7)
    assert agreement.lost == lost
    assert not agreement.may_start(2)
    with pytest.raises(
        CommunicatorRevoked, match=f"rank {lost} is lost.*continue with the surviving ranks"
    ):
        agreement.start(2)
    assert agreement.report(1.0, [NEWS]) == []
    assert agreement.on_message(1.0, 0, Commit(1, 3)) == []
    assert agreement.tick(100.0) == []
    assert agreement.held.version == 1, "what is held can still be read"


def test_messages_of_older_versions_change_nothing() -> None:
    agreement = make(1)
    for version in (1, 2):
        agreement.on_message(0.0, 0, Prepare(next_health(version)))
        agreement.on_message(0.0, 0, Commit(version, 2 * version))
    before = pickle.dumps(agreement)
    for message in (Prepare(next_health(1)), Prepare(next_health(2)), Commit(1, 9), Commit(2, 9)):
        assert agreement.on_message(0.0, 0, message) == []
    assert pickle.dumps(agreement) == before
    first = make(0)
    first.on_message(0.0, 1, Report((NEWS,)))
    assert first.on_message(0.0, 1, Promise(0, 5)) == []
    assert first.waits_for() == (1, 2)
    first.on_message(0.0, 1, Promise(1, 5))
    assert first.on_message(0.0, 1, Promise(1, 5)) == []
    assert first.waits_for() == (2,)


def _promised() -> Agreement:
    agreement = make(1)
    agreement.on_message(0.0, 0, Prepare(next_health()))
    return agreement


@pytest.mark.parametrize(
    ("agreement", "peer", "message", "complaint"),
    [
        (make(0), 3, Report((NEWS,)), "Report from rank 3, but the sender must be another rank"),
        (make(0), -1, Report((NEWS,)), "rank 0: received Report from rank -1"),
        (make(1), 1, Promise(0, 0), "rank 1: received Promise from rank 1"),
        (make(1), 2, Report((NEWS,)), "Report from rank 2, but only rank 0 receives"),
        (make(0, 4), 3, Promise(1, 0), "rank 0: received Promise from rank 3, but"),
        (make(1), 0, Promise(1, 0), "rank 1: received Promise from rank 0, but"),
        (make(1), 2, Prepare(next_health()), "rank 1: received Prepare from rank 2, but"),
        (make(0), 1, Commit(1, 2), "rank 0: received Commit from rank 1, but"),
        (make(1), 2, ExcludeRails(1, ((0, 0),), True), "received ExcludeRails from rank 2, but"),
        (make(1), 2, RailsExcluded(1, 1), "rank 1: received RailsExcluded from rank 2, but"),
        (make(0), 1, ExcludeRails(1, ((3, 0),), True), "ExcludeRails of rank 1: rail 0 of rank 3"),
        (make(0), 1, Report((RailShare(3, 0, 0),)), "Report of rank 1: rail 0 of rank 3"),
        (make(0), 1, Report((RailShare(0, 0, 99),)), "Report of rank 1: share 99"),
        (make(0), 1, Promise(1, 0), "promised health version 1, but the newest"),
        (make(1), 0, Prepare(next_health(2)), "version 2 prepared, but version 0 is held"),
        (_promised(), 0, Prepare(next_health(2)), "1 is held and not committed"),
        (make(1), 0, Prepare(next_health(nrails=3)), "of 3 ranks, 3 rails"),
        (make(1), 0, Prepare(next_health(nranks=4)), "of 4 ranks, 2 rails"),
        (
            make(1), 0,
            Prepare(msgspec.structs.replace(next_health(), config="xyz")),
            "'xyz'; expected 3 ranks, 2 rails, configuration 'abc'",
        ),
        (make(1), 0, Commit(1, 2), "2 on, but the newest version prepared is 0"),
        (_promised(), 0, Commit(1, 1), "may take effect before collective 2"),
    ],
)  # fmt: skip
def test_what_breaks_the_protocol_is_refused_by_name(
    agreement: Agreement, peer: int, message: Message, complaint: str
) -> None:
    with pytest.raises(InternalError) as caught:
        agreement.on_message(0.0, peer, message)
    assert complaint in str(caught.value)


def test_a_version_does_not_begin_before_the_one_before_it() -> None:
    agreement = _promised()
    agreement.on_message(0.0, 0, Commit(1, 40))
    agreement.on_message(0.0, 0, Prepare(next_health(2)))
    with pytest.raises(InternalError, match="may take effect before collective 40"):
        agreement.on_message(0.0, 0, Commit(2, 39))


def test_a_rank_does_not_report_what_does_not_exist() -> None:
    with pytest.raises(InvalidArgument, match="rail 9 of rank 1"):
        make(1).report(0.0, [RailShare(1, 9, DOWN)])
    with pytest.raises(
        InvalidArgument, match="rank 3 is not in the health table, which has 3 ranks"
    ):
        make(3)


def test_collectives_are_counted_late_only_in_idle_times() -> None:
    member = Member(1, Health.whole(2, 1), 1)
    whole = member.steady
    assert whole is member.held
    member.skip_to(7)
    assert member.started == 7
    with pytest.raises(InternalError, match="cannot count collectives up to"):
        member.skip_to(6)
    promise = member.prepare(Prepare(whole.changed([RailShare(0, 0, 3)])))
    assert promise == Promise(1, 7)
    assert member.steady is None
    with pytest.raises(InternalError, match="cannot count collectives up to"):
        member.skip_to(8)
    assert member.commit(Commit(1, 9))
    assert member.steady is None, "8 is planned with the old one, 9 with the new"
    member.start(8)
    assert member.start(9) is member.steady

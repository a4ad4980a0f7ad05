"""Councils of several ranks, with a control plane that delivers when it is told to."""

import logging
from collections import deque

import pytest

from r2ccl.errors import InvalidArgument
from r2ccl.failover.health.driver import HealthAgreement
from r2ccl.failover.health.table import WHOLE, Health

#: The peer that rank 1 measures each rail by.
TOWARD = {0: 2, 1: 2}


class Mail:
    """One rank's control plane: a queue to every other rank."""

    def __init__(self, world: "World", rank: int) -> None:
        self._world = world
        self._rank = rank

    def send(self, peer: int, message: object) -> None:
        self._world.queue.append((self._rank, peer, message))

    def broadcast(self, message: object) -> None:
        for peer in range(len(self._world.agreements)):
            if peer != self._rank:
                self.send(peer, message)


class World:
    def __init__(
        self, nranks: int = 3, nrails: int = 2, excluded: tuple[tuple[int, int], ...] = ()
    ) -> None:
        self.now = 0.0
        self.queue: deque[tuple[int, int, object]] = deque()
        whole = Health.whole(nranks, nrails, "same", excluded)
        #: Rails that each rank was told to exclude, and to include.
        self.told: list[list[tuple[set[tuple[int, int]], set[tuple[int, int]]]]] = []
        self.agreements: list[HealthAgreement] = []
        for rank in range(nranks):
            mail = Mail(self, rank)
            told: list[tuple[set[tuple[int, int]], set[tuple[int, int]]]] = []
            self.told.append(told)
            self.agreements.append(
                HealthAgreement(
                    rank,
                    whole,
                    control=mail,
                    clock=lambda: self.now,
                    on_excluded=lambda out, back, told=told: told.append((set(out), set(back))),  # type: ignore[misc]
                )
            )

    def deliver(self, most: int = 1_000) -> None:
        while self.queue and most:
            source, target, message = self.queue.popleft()
            self.agreements[target].on_message(source, message)  # type: ignore[arg-type]
            most -= 1
        assert most or not self.queue, "the ranks talk without end"

    def versions(self) -> list[int]:
        return [agreement.known.health.version for agreement in self.agreements]


def test_what_one_rank_doubts_all_ranks_know_and_when() -> None:
    world = World()
    world.now = 7.0
    world.agreements[2].report_down(2, 1)
    world.deliver()
    for agreement in world.agreements:
        assert agreement.known.health.share(2, 1) == 0
        assert agreement.known.since_s == 7.0


def test_a_doubt_is_told_once_and_taken_back_once() -> None:
    world = World()
    agreement = world.agreements[1]
    agreement.report_up(1, 0)
    assert not world.queue, "there is nothing to take back"
    for _ in range(2):
        agreement.report_down(1, 0)
    assert len(world.queue) == 1
    world.deliver()
    world.now += 1.0
    for _ in range(2):
        agreement.report_up(1, 0)
    assert len(world.queue) == 1
    world.deliver()
    assert world.versions() == [2, 2, 2]
    assert world.agreements[0].known.health.share(1, 0) == WHOLE


def test_who_else_doubts_a_rail_must_take_it_back_too() -> None:
    world = World()
    for agreement in world.agreements[1:]:
        agreement.report_down(1, 0)
    world.deliver()
    world.now += 1.0
    world.agreements[0].tick(world.now)
    world.agreements[1].report_up(1, 0)
    world.deliver()
    assert world.agreements[0].known.health.share(1, 0) == 0


def test_what_a_rank_measures_of_its_rails_all_ranks_plan_with() -> None:
    world = World()
    world.agreements[1].report_bandwidth({0: 16, 1: 4}, TOWARD)
    world.deliver()
    assert [agreement.known.health.share(1, 1) for agreement in world.agreements] == [4, 4, 4]
    world.agreements[1].report_bandwidth({0: 16, 1: 4}, TOWARD)
    assert not world.queue, "nothing is new"
    world.now += 1.0
    world.agreements[1].report_bandwidth({0: 16, 1: 16}, TOWARD)
    world.deliver()
    assert world.agreements[0].known.health.degraded() == ()


def test_a_slow_rail_that_went_down_is_slow_when_it_is_back() -> None:
    world = World()
    agreement = world.agreements[1]
    shares = []
    for news in (
        lambda: agreement.report_bandwidth({0: 16, 1: 4}, TOWARD),
        lambda: agreement.report_down(1, 1),
        lambda: agreement.report_bandwidth({0: 16, 1: 8}, TOWARD),
        lambda: agreement.report_up(1, 1),
        lambda: agreement.report_bandwidth({0: 16, 1: 16}, TOWARD),
    ):
        news()
        world.deliver()
        world.now += 1.0
        for each in world.agreements:
            each.tick(world.now)
        world.deliver()
        shares.append(world.agreements[2].known.health.share(1, 1))
    assert shares == [4, 0, 0, 8, 16]


def test_a_collective_held_by_a_promise_says_for_whom_it_waits() -> None:
    world = World()
    for agreement in world.agreements:
        assert agreement.enter(1) is not None
    world.agreements[0].report_down(0, 0)  # the coordinator has promised; nobody else has yet
    agreement = world.agreements[0]
    assert agreement.enter(2) is not None
    assert agreement.enter(3) is None
    assert agreement.waits_for() == (1, 2)
    world.deliver()
    health = agreement.enter(3)
    assert health is not None
    assert health.share(0, 0) == 0
    assert agreement.waits_for() == ()


def test_collectives_started_in_idle_times_are_in_the_promise() -> None:
    """Of 1,000 calls that cost one comparison each, all count when a round begins."""
    world = World()
    for op in range(1, 1_001):
        for agreement in world.agreements:
            assert agreement.enter(op) is not None
    world.agreements[0].enter(1_001)
    world.agreements[2].report_down(2, 0)
    world.deliver()
    plans = [
        [agreement.enter(op) for op in (1_001, 1_002, 1_003)] for agreement in world.agreements[1:]
    ]
    plans.append([plans[0][0], *(world.agreements[0].enter(op) for op in (1_002, 1_003))])
    versions = [[health.version for health in each if health is not None] for each in plans]
    assert versions == [[0, 0, 1]] * 3


def test_a_call_that_failed_before_any_byte_may_be_entered_again() -> None:
    agreement = World().agreements[0]
    assert agreement.enter(1) == agreement.enter(1)


def test_after_a_lost_rank_nothing_starts_and_all_can_be_read() -> None:
    world = World()
    agreement = world.agreements[1]
    agreement.peer_lost(0)
    assert agreement.enter(1) is None
    agreement.report_down(1, 0)
    assert not world.queue
    assert agreement.known.health.version == 0


def test_a_round_that_takes_long_is_reported_with_who_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    world.agreements[0].report_down(0, 0)
    with caplog.at_level(logging.INFO, "r2ccl.failover.health.driver"):
        for _ in range(60):
            world.now += 0.02
            world.agreements[0].tick(world.now)
    (record,) = caplog.records
    assert record.levelno == logging.INFO, "no data is lost, and the job goes on"
    assert "waiting for ranks [1, 2]" in record.getMessage()


# Excluded rails

OUT = (1, 0)


def order(world: World, by: int, *ports: tuple[int, int], is_excluded: bool = True) -> list[str]:
    """Have rank `by` exclude or include rails; return the list that its answer goes to."""
    answers: list[str] = []
    world.agreements[by].exclude(ports or (OUT,), answers.append, is_excluded=is_excluded)
    return answers


def pause(world: World) -> None:
    """Let the pause between two rounds pass."""
    world.now += 1.0
    world.agreements[0].tick(world.now)
    world.deliver()


@pytest.mark.parametrize("by", range(3))
def test_an_exclusion_is_answered_once_all_ranks_know(by: int) -> None:
    world = World()
    answers = order(world, by)
    while world.queue:
        source, target, message = world.queue.popleft()
        world.agreements[target].on_message(source, message)  # type: ignore[arg-type]
        assert not answers or all(world.versions()), "an answer before all ranks know"
    assert answers == [""]
    assert world.told == [[({OUT}, set())]] * 3
    for agreement in world.agreements:
        assert agreement.known.health.excluded == (OUT,)
        assert agreement.known.health.share(*OUT) == 0


def test_any_rank_may_include_what_another_has_excluded() -> None:
    world = World()
    order(world, 1)
    world.deliver()
    answers = order(world, 2, is_excluded=False)
    pause(world)
    assert answers == [""]
    assert world.told == [[({OUT}, set()), (set(), {OUT})]] * 3
    assert world.agreements[0].known.health.share(*OUT) == WHOLE


def test_an_order_that_changes_nothing_needs_no_round() -> None:
    world = World()
    answers = order(world, 2, is_excluded=False)
    world.deliver()
    assert (answers, world.versions()) == ([""], [0, 0, 0])


def test_an_order_undone_before_its_round_is_still_answered() -> None:
    world = World(nrails=3)
    world.agreements[0].report_down(2, 1)
    world.deliver()
    first, second = order(world, 0), order(world, 1, is_excluded=False)
    world.deliver()
    assert (first, second) == ([], []), "the pause after a round is not over"
    pause(world)
    assert (first, second) == ([""], [""])
    assert world.versions() == [2, 2, 2]
    assert world.agreements[1].known.health.excluded == ()


def test_an_order_during_a_round_waits_for_the_next_one() -> None:
    world = World(nrails=3)
    world.agreements[0].report_down(2, 1)
    answers = order(world, 0)
    world.deliver()
    assert (answers, world.versions()) == ([], [1, 1, 1])
    pause(world)
    assert (answers, world.versions()) == ([""], [2, 2, 2])


def test_rails_are_excluded_together_or_not_at_all() -> None:
    world = World()
    refused = order(world, 2, (0, 0), (0, 1))
    world.deliver()
    assert refused == ["rank 0 would have no rail left"]
    assert world.versions() == [0, 0, 0]
    order(world, 2, (0, 0))
    refused = order(world, 1, (1, 1))
    world.deliver()
    assert refused == ["ranks 1 and 0 would have no common rail left"]
    assert world.agreements[1].known.health.excluded == ((0, 0),)


def test_a_pair_without_a_rail_prevents_no_exclusion() -> None:
    world = World(nrails=3)
    world.agreements[0].report_down(0, 0)
    world.agreements[1].report_down(1, 1)
    world.agreements[1].report_down(1, 2)
    world.deliver()
    pause(world)
    answers = order(world, 2, (0, 1))
    pause(world)
    assert answers == [""], "ranks 0 and 1 use a bypass, rank 2 has rail 2 to rank 0"


def test_an_included_rail_is_down_until_a_path_is_up() -> None:
    world = World(excluded=(OUT,))
    assert order(world, 0, is_excluded=False) == []
    world.deliver()
    health = world.agreements[2].known.health
    assert (health.excluded, health.share(*OUT)) == ((), 0)
    world.agreements[1].report_up(*OUT)
    pause(world)
    assert world.agreements[2].known.health.share(*OUT) == WHOLE


def test_an_order_about_no_rail_is_refused_at_once() -> None:
    world = World()
    with pytest.raises(InvalidArgument, match="rail 7 of rank 1"):
        order(world, 2, (1, 7))
    assert not world.queue
    assert not world.agreements[2]._asked


def test_a_health_that_is_adopted_brings_its_excluded_rails() -> None:
    world = World(excluded=((2, 1),))
    agreement = world.agreements[0]
    health = agreement.known.health
    agreement.adopt(health.changed((), [OUT]))
    world.deliver()
    assert [each.known.health.excluded for each in world.agreements] == [(OUT,)] * 3
    agreement.adopt(Health.whole(3, 2))
    pause(world)
    assert world.agreements[2].known.health.degraded() == ()


def test_a_rank_whose_port_is_down_reports_no_other_port() -> None:
    world = World()
    agreement = world.agreements[1]
    agreement.report_down(2, 0)
    agreement.report_down(2, 1)
    world.deliver()
    world.now += 1.0
    agreement.report_down(1, 0)
    agreement.report_down(0, 0)
    world.deliver()
    health = world.agreements[0].known.health
    assert [health.share(rank, 0) for rank in range(3)] == [WHOLE, 0, WHOLE]
    assert health.share(2, 1) == 0, "rail 1 works at rank 1, so its report on that rail stays"


def test_the_owner_still_reports_a_port_if_others_cannot() -> None:
    world = World()
    for rank in (1, 2):
        world.agreements[rank].report_down(2, 0)
    world.agreements[1].report_down(1, 0)
    world.deliver()
    world.now += 1.0
    world.agreements[0].tick(world.now)
    world.deliver()
    health = world.agreements[0].known.health
    assert [health.share(rank, 0) for rank in range(3)] == [WHOLE, 0, 0]


def test_all_reports_on_a_peer_are_withdrawn_at_once() -> None:
    world = World()
    agreement = world.agreements[1]
    for rank, rail in ((2, 0), (2, 1), (0, 1)):
        agreement.report_down(rank, rail)
    world.deliver()
    world.now += 1.0
    world.agreements[0].tick(world.now)
    world.deliver()
    world.now += 1.0
    for _ in range(2):
        agreement.withdraw(2)
    assert len(world.queue) == 1
    world.deliver()
    health = world.agreements[0].known.health
    assert [health.share(rank, 1) for rank in range(3)] == [0, WHOLE, WHOLE]
    assert health.share(2, 0) == WHOLE

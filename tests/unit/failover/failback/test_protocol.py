"""Failback: how soon a path is probed, when it may return, and what flapping costs it."""

import math
import random

import pytest
from hypothesis import strategies as st
from support.slow import given

from r2ccl.failover.failback.protocol import DEFAULT, Policy, Quarantine

#: A policy without memory: K good probes and no more.
FORGETFUL = Policy(hold_unit_s=1e-9)
STEP_S = 0.01


class Rail:
    """A path that is up or down, probed as its quarantine asks; an answer takes a millisecond."""

    def __init__(self, policy: Policy = DEFAULT) -> None:
        self.quarantine = Quarantine(0.0, policy)
        self.now = 0.0
        self.is_up = True
        self.probes: list[float] = []
        self.migrations: list[float] = []
        self.returns: list[float] = []

    def set(self, is_up: bool, has_carrier_event: bool = True) -> None:
        was_up, self.is_up = self.is_up, is_up
        if was_up and not is_up:
            if self.quarantine.is_in_use:
                self.migrations.append(self.now)
            self.quarantine.failed(self.now)
        elif is_up and not was_up and has_carrier_event:
            self.quarantine.carrier_up(self.now)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            quarantine = self.quarantine
            if quarantine.due(self.now):
                self.probes.append(self.now)
                quarantine.asked()
                answer = quarantine.good if self.is_up else quarantine.bad
                answer(self.now + 0.001)
            if quarantine.may_return(self.now):
                quarantine.returned(self.now)
                self.returns.append(self.now)

    def fail_for(self, down_s: float, up_s: float) -> None:
        self.set(False)
        self.run(down_s)
        self.set(True)
        self.run(up_s)


@pytest.mark.parametrize("down_s", [0.05, 0.5, 5.0, 120.0])
def test_the_first_failure_returns_soon_after_the_carrier(down_s: float) -> None:
    rail = Rail()
    rail.run(600.0)
    rail.set(False)
    rail.run(down_s)
    rail.set(True)
    up_s = rail.now
    rail.run(2.0)
    assert len(rail.returns) == 1
    assert rail.returns[0] - up_s < 0.3


def test_without_a_carrier_event_the_cap_bounds_the_delay() -> None:
    rail = Rail()
    rail.set(False)
    rail.run(60.0)
    rail.set(True, has_carrier_event=False)
    up_s = rail.now
    rail.run(3.0)
    assert rail.returns[0] - up_s < DEFAULT.cap_s + 0.3


def test_a_down_path_is_probed_for_ever_ever_more_seldom() -> None:
    rail = Rail()
    rail.set(False)
    rail.run(1000.0)
    pauses = [b - a for a, b in zip(rail.probes, rail.probes[1:], strict=False)]
    assert pauses[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8], abs=2 * STEP_S)
    assert pauses[-100:] == pytest.approx([DEFAULT.cap_s] * 100, abs=2 * STEP_S)
    assert rail.now - rail.probes[-1] <= DEFAULT.cap_s + 2 * STEP_S


@pytest.mark.parametrize("event", ["carrier_up", "good"])
def test_a_sign_of_life_makes_the_pauses_short_again(event: str) -> None:
    rail = Rail()
    rail.set(False)
    rail.run(30.0)
    quarantine = rail.quarantine
    getattr(quarantine, event)(rail.now)
    quarantine.bad(rail.now)
    assert quarantine.next_s - rail.now == pytest.approx(DEFAULT.spacing_s)


def test_a_failure_after_an_early_return_is_probed_soon_again() -> None:
    rail = Rail()
    rail.set(False)
    rail.run(60.0)
    rail.quarantine.returned(rail.now)  # the only path to its peer, so it need not be good
    rail.quarantine.failed(rail.now)
    rail.probes.clear()
    rail.run(1.0)
    first, second, third, *_ = rail.probes
    assert second - first == pytest.approx(DEFAULT.spacing_s, abs=2 * STEP_S)
    assert third - second == pytest.approx(2 * DEFAULT.spacing_s, abs=2 * STEP_S)


def test_it_takes_all_good_probes_in_a_row() -> None:
    quarantine = Quarantine(0.0)
    quarantine.failed(10.0)
    now = 10.0
    for answers in ("ggb", "bggb", "ggg"):
        for answer in answers:
            now = quarantine.next_s
            assert not quarantine.may_return(now)
            quarantine.asked()
            (quarantine.good if answer == "g" else quarantine.bad)(now)
    assert quarantine.may_return(now)


def test_an_impossible_probe_breaks_no_row_and_is_made_again() -> None:
    quarantine = Quarantine(0.0)
    quarantine.failed(10.0)
    for answer in (quarantine.good, quarantine.unasked, quarantine.good, quarantine.good):
        now = quarantine.next_s
        assert not quarantine.may_return(now)
        quarantine.asked()
        answer(now)
    assert quarantine.may_return(now)


def test_impossible_probes_are_tried_ever_more_seldom() -> None:
    quarantine = Quarantine(0.0)
    quarantine.failed(10.0)
    pauses, now = [], quarantine.next_s
    for _ in range(8):
        quarantine.asked()
        quarantine.unasked(now)
        pauses.append(quarantine.next_s - now)
        now = quarantine.next_s
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(DEFAULT.spacing_s)
    assert pauses[-1] == pytest.approx(DEFAULT.cap_s)


def test_a_probe_under_way_is_not_asked_again() -> None:
    quarantine = Quarantine(0.0)
    quarantine.failed(1.0)
    assert not quarantine.due(1.05)
    assert quarantine.due(1.1)
    quarantine.asked()
    assert not quarantine.due(5.0)
    assert quarantine.next_s == math.inf
    quarantine.carrier_up(5.0)
    assert not quarantine.due(5.0)
    quarantine.bad(5.05)
    assert quarantine.due(5.15)


def test_each_failure_in_a_row_holds_longer_up_to_the_cap() -> None:
    rail = Rail()
    holds = []
    for _ in range(14):
        rail.fail_for(0.5, 0.0)
        holds.append(rail.quarantine.hold_s)
        rail.run(holds[-1] + 2.0)
        assert rail.quarantine.is_in_use
    assert holds[0] == 0.0
    assert holds[1:5] == pytest.approx([1, 3, 7, 15], rel=0.35)
    assert holds == sorted(holds)
    assert holds[-1] <= DEFAULT.hold_cap_s
    assert holds[-1] > 0.9 * DEFAULT.hold_cap_s


def test_healthy_time_is_forgiven_time_out_of_use_is_not() -> None:
    def hold_after(healthy_s: float, idle_s: float) -> float:
        quarantine = Quarantine(0.0)
        now = 0.0
        for pause_s in (0.0, 0.0, 0.0, healthy_s):
            quarantine.failed(now)
            now += quarantine.hold_s + idle_s
            for _ in range(DEFAULT.nprobes):
                quarantine.good(now)
            now += quarantine.hold_s
            quarantine.good(now)
            quarantine.returned(now)
            now += pause_s
        quarantine.failed(now)
        return quarantine.hold_s

    assert hold_after(0.0, 0.0) == pytest.approx(15.0)
    assert hold_after(0.0, 1000.0) == pytest.approx(15.0)
    assert hold_after(DEFAULT.half_life_s, 0.0) == pytest.approx(3.0)
    assert hold_after(20 * DEFAULT.half_life_s, 0.0) < 0.001


def test_carrier_up_hurries_the_probes_and_forgives_nothing() -> None:
    rail = Rail()
    for _ in range(3):
        rail.fail_for(0.5, 5.0)
    rail.set(False)
    rail.run(30.0)
    hold_s = rail.quarantine.hold_s
    rail.set(True)
    up_s = rail.now
    rail.run(0.05)
    assert rail.probes[-1] >= up_s
    assert rail.quarantine.hold_s == hold_s > 5.0
    rail.run(hold_s + 1.0)
    assert rail.returns[-1] - up_s == pytest.approx(hold_s, abs=0.2)


def test_a_break_in_quarantine_restarts_the_hold_with_no_strike() -> None:
    rail = Rail()
    for _ in range(3):
        rail.fail_for(0.5, 5.0)
    rail.fail_for(0.5, 5.0)
    hold_s = rail.quarantine.hold_s
    assert not rail.quarantine.is_in_use
    rail.fail_for(0.5, hold_s - 0.5)
    assert rail.quarantine.hold_s == hold_s
    assert not rail.quarantine.is_in_use
    rail.run(1.0)
    assert rail.quarantine.is_in_use


def test_good_probes_of_long_ago_do_not_count() -> None:
    quarantine = Quarantine(0.0)
    quarantine.failed(1.0)
    for step in range(3):
        quarantine.good(2.0 + step / 10)
    assert quarantine.may_return(2.2)
    assert not quarantine.may_return(60.0)
    quarantine.good(60.0)
    assert quarantine.may_return(60.0)


def test_a_path_may_be_used_early_and_remembers_its_strikes() -> None:
    quarantine = Quarantine(0.0)
    for _ in range(3):
        quarantine.failed(1.0)
        quarantine.returned(1.0)
        assert quarantine.is_in_use
        assert not quarantine.may_return(2.0)
    quarantine.failed(1.0)
    assert quarantine.hold_s == pytest.approx(7.0)


def flap(seed: int, policy: Policy) -> list[int]:
    """Flap at random for a minute; returns the migrations of each ten seconds."""
    draw = random.Random(seed)
    rail = Rail(policy)
    while rail.now < 60.0:
        rail.fail_for(draw.uniform(0.2, 2.0), draw.uniform(0.2, 3.0))
    return [sum(10 * i <= at < 10 * i + 10 for at in rail.migrations) for i in range(6)]


def test_a_flapping_rail_migrates_ever_more_seldom() -> None:
    runs = [flap(seed, DEFAULT) for seed in range(20)]
    total = [sum(run[i] for run in runs) for i in range(6)]
    assert total[0] > 2 * total[1] > 4 * sum(total[3:]) / 3
    for run in runs:
        assert sum(run[:3]) > sum(run[3:])
    # Without memory it would go on for as long as the rail flaps.
    forgetful = [sum(run) for run in zip(*(flap(s, FORGETFUL) for s in range(20)), strict=True)]
    assert min(forgetful) > 0.6 * max(forgetful)
    assert sum(forgetful[3:]) > 10 * sum(total[3:])


events = st.lists(
    st.tuples(
        st.sampled_from(["failed", "carrier_up", "good", "bad", "unasked", "asked", "returned"]),
        st.floats(0.0, 100.0),
    ),
    max_size=60,
)


@given(100, 300, events)
def test_any_order_of_events_keeps_the_invariants(history: list[tuple[str, float]]) -> None:
    quarantine = Quarantine(0.0)
    now, ngood = 0.0, 0
    for event, gap_s in history:
        now += gap_s
        if event == "returned":
            if not quarantine.may_return(now):
                continue
            assert ngood >= DEFAULT.nprobes
            quarantine.returned(now)
        elif event == "asked":
            quarantine.asked()
        else:
            getattr(quarantine, event)(now)
        ngood = {"good": ngood + 1, "bad": 0, "failed": 0}.get(event, ngood)
        assert 0.0 <= quarantine.hold_s <= DEFAULT.hold_cap_s
        if quarantine.is_in_use:
            assert not quarantine.may_return(now)
            assert not quarantine.due(now)
            assert quarantine.next_s == math.inf
        elif quarantine.next_s != math.inf:  # no probe is under way
            assert quarantine.next_s <= now + DEFAULT.cap_s
            assert quarantine.due(quarantine.next_s)

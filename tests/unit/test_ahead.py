"""Plans for a health that is being agreed on are made beside the calls, and are the same."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from healths import health

from r2ccl.ahead import PlanAhead
from r2ccl.config import Config
from r2ccl.plans import Plans
from r2ccl.prediction import Fabric, Rates
from r2ccl.resilience.health import RailShare
from r2ccl.types import CallSignature, Collective, ReduceOp

RATES = Rates(100_000, 25_000_000)
WAIT_S = 10.0


def call(count: int) -> CallSignature:
    return CallSignature(Collective.ALLREDUCE, 8, ReduceOp.SUM, count)


@pytest.fixture
def plans() -> Plans:
    return Plans(1, 4, Fabric(range(4), 4, (), RATES), Config())


class Slow:
    """Stands in a planner's way until it is let go, and counts what is planned."""

    def __init__(self, plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_in = threading.Event()
        self.go = threading.Event()
        self.planned: list[tuple[CallSignature, int]] = []
        make = plans._make

        def slowly(call: CallSignature, health: Any, *more: Any) -> Any:
            self.planned.append((call, health.version))
            if threading.current_thread() is not threading.main_thread():
                self.is_in.set()
                assert self.go.wait(WAIT_S)
            return make(call, health, *more)

        monkeypatch.setattr(plans, "_make", slowly)


def test_what_ran_last_is_planned_for_the_new_health(plans: Plans) -> None:
    for count in range(1, 12):
        plans(call(count << 20), health(), 5)
    ahead = PlanAhead(plans, "test")
    lost = health(r1n0=0)
    ahead.begin(lost)
    while ahead._thread is not None:
        ahead._thread.join(WAIT_S)
    made = {key[1].count >> 20 for key in plans._plans if key[0] == lost.version}
    assert made == set(range(4, 12)), "the last eight"
    fresh = Plans(1, 4, plans.fabric, Config())
    for op in (6, 7, 40):  # measuring ones, and others
        found = plans(call(11 << 20), lost, op)
        again = fresh(call(11 << 20), lost, op)
        assert (found.signature, found.layout, found.is_gauge) == (
            again.signature, again.layout, again.is_gauge,
        )  # fmt: skip


def test_calls_go_on_while_it_plans(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    before = plans(call(1 << 20), health(), 5)
    slow = Slow(plans, monkeypatch)
    ahead = PlanAhead(plans, "test")
    ahead.begin(health(r1n0=0))
    assert slow.is_in.wait(WAIT_S)
    assert plans(call(1 << 20), health(), 6) is before
    slow.go.set()
    ahead.close(WAIT_S)


def test_a_newer_health_overtakes(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (1, 2, 3):
        plans(call(count << 20), health(), 5)
    slow = Slow(plans, monkeypatch)
    ahead = PlanAhead(plans, "test")
    first = health(r1n0=0)
    second = first.changed([RailShare(2, 0, 0)])
    ahead.begin(first)
    assert slow.is_in.wait(WAIT_S)
    ahead.begin(second)
    slow.go.set()
    while ahead._thread is not None:
        ahead._thread.join(WAIT_S)
    counts = {each.count >> 20 for each, version in slow.planned if version == second.version}
    assert counts == {1, 2, 3}
    assert len({each for each, version in slow.planned if version == first.version}) == 1


def test_closing_waits_for_the_plan_under_way_and_drops_the_rest(
    plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (1, 2, 3):
        plans(call(count << 20), health(), 5)
    slow = Slow(plans, monkeypatch)
    ahead = PlanAhead(plans, "test")
    ahead.begin(health(r1n0=0))
    assert slow.is_in.wait(WAIT_S)
    threading.Timer(0.1, slow.go.set).start()
    ahead.close(WAIT_S)
    assert len({each for each, _ in slow.planned}) == 1

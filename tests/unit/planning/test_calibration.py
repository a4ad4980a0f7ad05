"""Rates follow from times: neither latency nor what disturbs is taken for bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest

from r2ccl.algos import recursive_doubling, ring
from r2ccl.planning.calibration import calibrate
from r2ccl.planning.cost_model import UNMEASURED, Choice
from r2ccl.planning.placement import Placement
from r2ccl.schedule.ir import Schedule

LOAD = Fraction(3, 8)
ALPHA_NS = 50_000


def choice(nbytes: int) -> Choice:
    schedule = recursive_doubling.allreduce(4) if nbytes < 65536 else ring.allreduce(4)
    return choice_of(schedule)


def choice_of(schedule: Schedule) -> Choice:
    return Choice(schedule.name, schedule, Placement((0,), (1,)), 1 << 20, LOAD)


def network(
    beta: int, seen: list[int] | None = None, of: Callable[[int], Choice] = choice
) -> Callable[[int, int], int]:
    def time_ns(nbytes: int, ntimes: int) -> int:
        if seen is not None:
            seen.append(nbytes)
        steps = of(nbytes).schedule.cost.steps
        return steps * ALPHA_NS + int(LOAD * nbytes * 10**9 / beta)

    return time_ns


@pytest.mark.parametrize("beta", [10**6, 25 * 10**6, 10**9, 25 * 10**9])
def test_what_a_network_gives_is_found(beta: int) -> None:
    rates = calibrate(network(beta), choice)
    assert rates.alpha_ns == pytest.approx(ALPHA_NS, rel=0.1)
    assert rates.beta == pytest.approx(beta, rel=0.01)


def test_the_steps_of_the_measured_schedule_count() -> None:
    """Not those of the schedule of a larger allreduce."""

    def of(nbytes: int) -> Choice:
        many, few = ring.allreduce(400), ring.allreduce(4)
        return choice_of(many if nbytes > 1 << 20 else few)

    beta = 5 * 10**6
    assert calibrate(network(beta, of=of), of).beta == pytest.approx(beta, rel=0.01)


def test_slow_networks_are_measured_with_less_data_than_fast() -> None:
    sizes: dict[int, list[int]] = {10**6: [], 10**9: []}
    for beta, seen in sizes.items():
        calibrate(network(beta, seen), choice)
    assert max(sizes[10**6]) == 1 << 20 < max(sizes[10**9]) <= 64 << 20


def test_without_a_common_rail_nothing_is_measured() -> None:
    def apart(nbytes: int) -> Choice:
        return choice(nbytes)._replace(load=Fraction(0), has_way=False)

    assert calibrate(network(10**9, of=apart), apart) == UNMEASURED


def test_a_time_that_does_not_repeat_is_measured_again() -> None:
    """A segment that was lost makes calls after one another 200 ms longer."""
    honest = network(25_000_000)
    calls = []

    def time_ns(nbytes: int, ntimes: int) -> int:
        calls.append(nbytes)
        is_disturbed = nbytes > 1 << 20 and calls.count(nbytes) == 2
        return honest(nbytes, ntimes) + (200_000_000 if is_disturbed else 0)

    assert calibrate(time_ns, choice).beta == pytest.approx(25_000_000, rel=0.01)


def test_noise_alone_gives_rates_that_can_be_planned_with() -> None:
    rates = calibrate(lambda nbytes, ntimes: 1000, choice)
    assert rates.alpha_ns == 500
    assert rates.beta > 0

"""Rates follow from times: neither latency nor noise is taken for bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest

from r2ccl.calibration import calibrate

LOAD = Fraction(3, 8)
ALPHA_NS = 50_000


def network(beta: int, most: list[int] | None = None) -> Callable[[int, int], int]:
    def time_ns(nbytes: int, ntimes: int) -> int:
        if most is not None:
            most.append(nbytes)
        return 2 * ALPHA_NS + int(LOAD * nbytes * 10**9 / beta)

    return time_ns


@pytest.mark.parametrize("beta", [10**6, 25 * 10**6, 10**9, 50 * 10**9])
def test_what_a_network_gives_is_found(beta: int) -> None:
    rates = calibrate(network(beta), 2, lambda nbytes: LOAD)
    assert rates.alpha_ns == pytest.approx(ALPHA_NS, rel=0.1)
    assert rates.beta == pytest.approx(beta, rel=0.001)


def test_a_slow_network_is_measured_with_little_and_a_fast_one_with_much_data() -> None:
    sizes: dict[int, list[int]] = {10**6: [], 10**9: []}
    for beta, seen in sizes.items():
        calibrate(network(beta, seen), 2, lambda nbytes: LOAD)
    assert max(sizes[10**6]) == 1 << 20 < max(sizes[10**9]) <= 64 << 20


def test_noise_alone_gives_rates_that_can_be_planned_with() -> None:
    rates = calibrate(lambda nbytes, ntimes: 1000, 3, lambda nbytes: LOAD)
    assert rates.alpha_ns == 333
    assert rates.beta > 0

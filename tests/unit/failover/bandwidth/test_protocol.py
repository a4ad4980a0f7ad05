"""Measured bandwidth on simulated rails, and shares of work that follow it."""

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import slow

from r2ccl.errors import InternalError
from r2ccl.failover.bandwidth.protocol import Balance, shares
from r2ccl.failover.bandwidth.trains import Meter
from r2ccl.failover.health.table import WHOLE
from r2ccl.schedule.chunks import cut

MIB = 1 << 20
SECOND = 1e9


class SimRail:
    """A rail that serves slices one after another; confirmations are late and seen by polls.

    ``rate`` gives bytes/s at a time; ``noise_s`` is the most a confirmation is late beyond
    ``latency_s``; a poll sees, every ``poll_s``, what has come by then.
    """

    def __init__(
        self, rate: Callable[[float], float], *, latency_s: float = 20e-6, noise_s: float = 0.0,
        poll_s: float = 0.0, seed: int = 0,
    ) -> None:  # fmt: skip
        self.rate = rate
        self._latency_s, self._noise_s, self._poll_s = latency_s, noise_s, poll_s
        self._draw = random.Random(seed)
        self._free_s = self._seen_s = 0.0
        #: Until then nobody looks.
        self.hidden_until_s = 0.0

    def post(self, now: float, nbytes: int) -> float:
        """Take a slice; returns when its confirmation is seen."""
        began_s = max(now, self._free_s)
        self._free_s = began_s + nbytes / self.rate(began_s)
        late_s = self._latency_s + self._draw.uniform(0, self._noise_s)
        self._seen_s = max(self._seen_s, self._free_s + late_s, self.hidden_until_s)
        if not self._poll_s:
            return self._seen_s
        return -(-self._seen_s // self._poll_s) * self._poll_s


class Job:
    """Operations whose rails each carry their share, with so many slices under way on each."""

    def __init__(self, rails: Sequence[SimRail], *, window: int = 2, nbytes: int = MIB) -> None:
        self.rails = rails
        self.balance = Balance(range(len(rails)))
        self.now = 0.0
        self._window, self._nbytes = window, nbytes

    def operation(self, nslices: int, weights: Sequence[int] | None = None) -> float:
        """Run one that is shared out by the weights in use; returns how long it took."""
        began_s, balance = self.now, self.balance
        given = weights or [balance.weights[rail] for rail in range(len(self.rails))]
        left = [hi - lo for lo, hi in pairwise(cut(nslices, given))]
        events: list[tuple[float, int]] = []

        def post(rail: int) -> None:
            if left[rail]:
                left[rail] -= 1
                balance.posted(rail, 1, self.now)
                seen_s = self.rails[rail].post(self.now, self._nbytes)
                heapq.heappush(events, (seen_s, rail))

        for rail in range(len(self.rails)):
            for _ in range(self._window):
                post(rail)
        while events:
            self.now, rail = heapq.heappop(events)
            balance.confirmed(rail, self.now, self._nbytes)
            post(rail)
            balance.update(self.now)
        return self.now - began_s

    def rate(self, rail: int = 0) -> float:
        return self.balance.rates()[rail]

    def estimate(self, rail: int) -> float:
        estimate = self.balance.estimates(self.now)[rail]
        assert estimate is not None
        return estimate


def steady(rate: float) -> Callable[[float], float]:
    return lambda _: rate


def step_at(at_s: float, before: float, after: float) -> Callable[[float], float]:
    return lambda now: before if now < at_s else after


# The meter


def confirm(meter: Meter, times: Iterable[float], nbytes: int = MIB) -> float | None:
    """Confirm a slice at each time; returns the rate of the trains together, if there were any."""
    trains = [train for now in times if (train := meter.confirmed(now, nbytes)) is not None]
    if not trains:
        return None
    return sum(train.nbytes for train in trains) / sum(train.length_s for train in trains)


def posted(nslices: int) -> Meter:
    meter = Meter()
    for _ in range(nslices):
        meter.posted()
    return meter


def test_a_train_is_what_a_busy_rail_confirmed_in_between() -> None:
    times = (7.0 + 0.01 * i for i in range(10))
    assert confirm(posted(10), times) == pytest.approx(MIB / 0.01)


@pytest.mark.parametrize("nslices", [9, 12, 21])
def test_what_is_confirmed_together_counts_as_one(nslices: int) -> None:
    # Three at a time, every 30 ms: neither end of the train lies in the midst of a burst.
    times = (0.03 * (i // 3) for i in range(nslices))
    assert confirm(posted(nslices), times) == pytest.approx(MIB / 0.01)


def test_one_slice_at_a_time_measures_latency_and_hence_nothing() -> None:
    meter = Meter()
    for i in range(100):
        meter.posted()
        assert meter.confirmed(0.01 * i, MIB) is None


def test_small_operations_measure_nothing() -> None:
    meter = Meter()
    for call in range(50):
        for _ in range(6):
            meter.posted()
        assert confirm(meter, (call + 0.01 * i for i in range(6)), 4096) is None


def test_slices_that_were_dropped_end_the_train_and_no_more() -> None:
    meter = posted(12)
    assert confirm(meter, (0.01 * i for i in range(6))) is None
    meter.dropped(2)
    assert confirm(meter, (5.0 + 0.02 * i for i in range(4))) == pytest.approx(MIB / 0.02)
    assert meter.under_way == 0


def test_more_ends_than_beginnings_are_a_broken_invariant() -> None:
    meter = Meter()
    with pytest.raises(InternalError, match="none in flight"):
        meter.confirmed(0.0, MIB)
    with pytest.raises(InternalError, match="1 slices were dropped on a rail that has 0"):
        meter.dropped(1)


# The estimate, on simulated rails

rails = st.builds(
    dict,
    rate=st.floats(50e6, 2 * SECOND),
    latency_s=st.floats(1e-6, 200e-6),
    noise=st.floats(0.0, 1.0),
    poll=st.sampled_from([0.0, 0.1, 0.37, 1.0]),
    seed=st.integers(0, 99),
)


def make_rail(shape: dict[str, float], rate: Callable[[float], float] | None = None) -> SimRail:
    """Noise and poll interval are given in half service times of a slice."""
    service_s = MIB / shape["rate"]
    return SimRail(
        rate or steady(shape["rate"]),
        latency_s=min(shape["latency_s"], service_s / 4),
        noise_s=shape["noise"] * service_s / 2,
        poll_s=shape["poll"] * service_s / 2,
        seed=int(shape["seed"]),
    )


@slow.given(50, 150, rails, st.integers(3, 8))
def test_thirty_slices_give_the_rate_within_15_percent(
    shape: dict[str, float], window: int
) -> None:
    job = Job([make_rail(shape)], window=window)
    job.operation(30)
    assert job.rate() == pytest.approx(shape["rate"], rel=0.15)


@slow.given(10, 40, rails, st.sampled_from([0.25, 4.0]))
def test_a_change_is_followed_within_a_second_of_traffic(
    shape: dict[str, float], factor: float
) -> None:
    job = Job([make_rail(shape, step_at(1.0, shape["rate"], factor * shape["rate"]))], window=4)
    while job.now < 2.0:
        job.operation(64)
    assert job.rate() == pytest.approx(factor * shape["rate"], rel=0.15)


@slow.given(20, 60, rails, st.lists(st.floats(0.0, 10.0), min_size=3, max_size=3))
def test_idle_time_and_short_operations_keep_the_estimate(
    shape: dict[str, float], gaps_s: list[float]
) -> None:
    job = Job([make_rail(shape)], window=4)
    for gap_s in gaps_s:
        job.operation(40)
        job.now += gap_s
        for _ in range(5):
            job.operation(1)
            job.now += gap_s
    assert job.rate() == pytest.approx(shape["rate"], rel=0.15)


def test_a_rail_that_waits_for_another_is_not_slow() -> None:
    # Its slices come one every four service times, as from a rail at a quarter of its rate.
    meter, rail = Meter(), SimRail(steady(SECOND))
    service_s = MIB / SECOND
    meter.posted()
    seen_s = [rail.post(0.0, MIB)]
    trains = []
    for i in range(1, 400):
        posted_s = 4 * service_s * i
        # Every tenth comes with two more behind it: then, the rail shows what it can do.
        burst = 4 if i % 10 == 0 else 1
        trains += [train for at_s in seen_s if (train := meter.confirmed(at_s, MIB)) is not None]
        for _ in range(burst):
            meter.posted()
        seen_s = [rail.post(posted_s, MIB) for _ in range(burst)]
    assert trains
    for train in trains:
        assert train.nbytes / train.length_s == pytest.approx(SECOND, rel=0.01)


# Weights


def four_rails(slow: Callable[[float], float], *, noise_s: float = 1e-3) -> Job:
    return Job(
        [
            SimRail(slow if i == 3 else steady(0.1 * SECOND), noise_s=noise_s, seed=i)
            for i in range(4)
        ]
    )


def test_a_slow_rail_is_weighted_down_and_up_again() -> None:
    fast = 0.1 * SECOND
    job = four_rails(lambda now: fast / 4 if 2.0 <= now < 8.0 else fast)
    changes = []
    while job.now < 14.0:
        before = job.balance.weights
        job.operation(64)
        if job.balance.weights != before:
            changes.append((job.now, [job.balance.weights[rail] for rail in range(4)]))
    assert [weights for _, weights in changes][-1] == [WHOLE] * 4
    assert [weights[:3] for _, weights in changes] == [[WHOLE] * 3] * len(changes)
    adapted_s = next(now for now, weights in changes if weights[3] in (4, 5))
    assert adapted_s < 4.5
    assert changes[-1][0] < 10.0


@slow.given(
    12,
    60,
    st.lists(st.tuples(st.floats(0.3, 3.0), st.floats(0.01, 0.4)), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_a_process_that_stalls_makes_no_rail_slow(
    stalls: list[tuple[float, float]], idle: int
) -> None:
    """What comes in meanwhile is seen when it is over, on all rails; one had nothing to do."""
    job = four_rails(steady(0.1 * SECOND), noise_s=0.0)
    job.operation(400)
    for gap_s, stall_s in stalls:
        until_s = job.now + gap_s
        while job.now < until_s:
            job.operation(64)
        over_s = job.now + stall_s
        for rail in job.rails:
            rail.hidden_until_s = over_s
        job.operation(64, [0 if rail == idle else 1 for rail in range(4)])
        job.operation(64)
        assert set(job.balance.weights.values()) == {WHOLE}


def test_the_slow_end_of_a_long_operation_is_not_compared() -> None:
    """Two rails of four are slow: when the others are done, they are as good as each other."""
    fast = 0.1 * SECOND
    rails = [SimRail(steady(fast if rail < 2 else fast / 4)) for rail in range(4)]
    job = Job(rails)
    for _ in range(4):
        job.operation(1200, [1, 1, 1, 1])
        assert job.balance.weights[2] in (4, 5)
        assert job.balance.weights[3] in (4, 5)


def all_rails(rate: Callable[[float], float]) -> Job:
    job = Job([SimRail(rate, noise_s=1e-3, seed=rail) for rail in range(4)])
    job.balance.set_nominal_rate(int(0.1 * SECOND))
    return job


def test_rails_that_are_all_slow_are_so_by_the_networks_rate() -> None:
    fast = 0.1 * SECOND
    job = all_rails(lambda now: fast / 4 if 2.0 <= now < 8.0 else fast)
    seen = []
    while job.now < 14.0:
        job.operation(64)
        seen.append((job.now, tuple(job.balance.weights.values())))
    assert {share for now, row in seen if now < 2.0 for share in row} == {WHOLE}
    assert {share for now, row in seen if 5.0 < now < 8.0 for share in row} <= {4, 5}
    assert {share for now, row in seen if now > 10.0 for share in row} == {WHOLE}


def test_of_slow_rails_one_may_be_slower() -> None:
    fast = 0.1 * SECOND
    job = all_rails(steady(fast / 2))
    job.rails[3] = SimRail(steady(fast / 8))
    while job.now < 6.0:
        job.operation(64)
    assert list(job.balance.weights.values())[:3] == [8] * 3
    assert job.balance.weights[3] in (2, 3)


def test_rails_that_give_most_of_the_networks_rate_are_whole() -> None:
    job = all_rails(steady(0.08 * SECOND))
    while job.now < 4.0:
        job.operation(64)
        assert set(job.balance.weights.values()) == {WHOLE}


@pytest.mark.parametrize("slices", [128, 512])
def test_with_one_slow_rail_of_four_nearly_all_the_rest_is_used(slices: int) -> None:
    fast = 0.1 * SECOND
    job = four_rails(steady(fast / 4))
    even_s = job.operation(slices, [1, 1, 1, 1])
    while job.now < 10.0:
        job.operation(slices)
    adapted_s = job.operation(slices)
    possible_s = slices * MIB / (3.25 * fast)
    assert adapted_s < possible_s / 0.9
    assert even_s > possible_s / 0.4


def test_equal_rails_keep_equal_weights_whatever_the_noise() -> None:
    job = four_rails(steady(0.1 * SECOND), noise_s=5e-3)
    for _ in range(100):
        job.operation(64)
        assert set(job.balance.weights.values()) == {WHOLE}


def test_a_rail_too_little_used_to_be_measured_is_tried_again() -> None:
    job = four_rails(steady(0.1 * SECOND), noise_s=0.0)
    job.operation(400)
    slow = SimRail(steady(0.001 * SECOND))
    healthy, job.rails = job.rails, [*job.rails[:3], slow]
    for _ in range(3):
        job.operation(64)
    assert job.balance.weights[3] == 1
    # It is well again, but one slice at a time does not show it.
    job.rails = healthy
    began_s = job.now
    while job.balance.weights[3] < WHOLE:
        job.operation(30)
        assert job.now < began_s + 30.0


def test_a_rail_tried_again_counts_for_no_more_than_the_best() -> None:
    fast = 0.2 * SECOND
    job = Job([SimRail(steady(fast)), SimRail(steady(fast / 8))])
    job.operation(100, [8, 1])
    assert job.estimate(1) / job.estimate(0) == pytest.approx(1 / 8, rel=0.05)
    while job.now < 30.0:
        job.operation(64, [1, 0])
    assert job.estimate(1) == pytest.approx(1.0)


def test_idle_time_makes_no_rail_stale() -> None:
    job = four_rails(steady(0.025 * SECOND))
    for _ in range(10):
        job.operation(64)
    before = job.balance.estimates(job.now)
    assert job.balance.weights[3] == 4
    assert job.balance.estimates(job.now + 3600.0) == before


def test_a_proposal_that_does_not_last_changes_nothing() -> None:
    balance = Balance(range(2))
    now = 0.0

    def train(rate: float, lasts_s: float) -> None:
        nonlocal now
        service_s = MIB / rate
        end_s = now + lasts_s
        while now < end_s:
            for rail in (0, 1):
                for _ in range(10):
                    balance.posted(rail, 1, now)
            for i in range(1, 11):
                balance.confirmed(0, now + i * service_s / 4, MIB)
            for i in range(3, 13):
                balance.confirmed(1, now + i * service_s, MIB)
            now += 12 * service_s
            balance.update(now)

    train(0.4 * SECOND, 0.4)
    assert balance.weights == {0: WHOLE, 1: WHOLE}
    train(0.4 * SECOND, 0.4)
    assert balance.weights == {0: WHOLE, 1: 4}


def test_rails_that_are_not_compared_may_carry_work_too() -> None:
    balance = Balance([1, 2])
    balance.posted(0, 1, 1.0)
    balance.posted(0, 1, 1.0)
    balance.confirmed(0, 2.0, MIB)
    balance.dropped(0, 3.0, 1)
    assert balance.active_s(4.0) == 0.0
    assert set(balance.estimates(4.0)) == {1, 2}


def test_dropped_slices_leave_the_balance_even() -> None:
    balance = Balance(range(2))
    for _ in range(5):
        balance.posted(0, 1, 1.0)
    balance.dropped(0, 3.0, 5)
    assert balance.active_s(100.0) == 2.0
    assert balance.estimates(100.0) == {0: None, 1: None}
    assert not balance.update(100.0)


# Shares


@pytest.mark.parametrize(
    ("rates", "previous", "expected"),
    [
        ((100.0, 100.0), None, (16, 16)),
        ((100.0, 25.0), None, (16, 4)),
        ((100.0, 0.1), None, (16, 1)),
        ((None, None), None, (16, 16)),
        ((100.0, None), (16, 7), (16, 7)),
        ((100.0, 82.0), (16, 16), (16, 16)),
        ((100.0, 80.0), (16, 16), (16, 13)),
        ((100.0, 90.0), (16, 13), (16, 13)),
        ((100.0, 95.0), (16, 14), (16, 14)),
        ((100.0, 98.0), (16, 14), (16, 16)),
        ((100.0, 94.0), None, (16, 16)),
        ((100.0, 29.0), (16, 4), (16, 4)),
        ((100.0, 31.0), (16, 4), (16, 4)),
        ((100.0, 32.0), (16, 4), (16, 5)),
        ((100.0, 25.0), (16, 16), (16, 4)),
        ((0.0, 0.0), (16, 4), (16, 4)),
        ((), None, ()),
    ],
)
def test_quantised_shares(
    rates: tuple[float | None, ...], previous: tuple[int, ...] | None, expected: tuple[int, ...]
) -> None:
    old = None if previous is None else dict(enumerate(previous))
    assert shares(dict(enumerate(rates)), old) == dict(enumerate(expected))


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=8), st.sampled_from([None, 1.0]))
def test_a_rail_better_than_whole_is_whole(rates: list[float], nominal: float | None) -> None:
    """As one beside slow rails that has recovered, while the level is still theirs."""
    found = shares(dict(enumerate(rates)), {0: 4}, nominal)
    assert all(1 <= share <= WHOLE for share in found.values())


@given(st.lists(st.floats(1.0, 1e12), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_shares_are_stable_and_close(rates: list[float], draw: random.Random) -> None:
    given_rates = dict(enumerate(rates))
    weights = shares(given_rates)
    best = max(rates)
    for rail, weight in weights.items():
        assert 1 <= weight <= WHOLE
        assert abs(weight - WHOLE * rates[rail] / best) <= 1.5
    noisy = {rail: rate * draw.uniform(0.96, 1.0) for rail, rate in given_rates.items()}
    assert shares(noisy, weights) == weights


def test_nothing_is_compared_again_without_a_new_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    balance = Balance([0, 1])
    balance.posted(0, 1, 0.0)
    balance.confirmed(0, 0.5, MIB)
    assert not balance.update(1.0)
    compared: list[float] = []
    estimates = Balance.estimates

    def counted(self: Balance, now: float) -> dict[int, float | None]:
        compared.append(now)
        return estimates(self, now)

    monkeypatch.setattr(Balance, "estimates", counted)
    balance.update(2.0)
    assert compared == []
    balance.posted(0, 1, 3.0)
    balance.update(3.5)
    balance.set_nominal_rate(1000)
    balance.confirmed(0, 4.0, MIB)
    balance.update(4.0)
    assert compared == [3.5, 4.0]

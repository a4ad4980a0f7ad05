"""A training step: what compute hides, what it does not, and how buckets become final."""

from __future__ import annotations

import doctest
import random

import pytest

from r2ccl.errors import InvalidArgument
from r2ccl.flowsim import training
from r2ccl.flowsim.training import TrainingJob, compute_s, step


def at_rate(rate: float, latency: float = 0.0) -> training.AllreduceTime:
    return lambda nbytes: latency + nbytes / rate


def test_one_bucket_is_exposed_as_a_whole() -> None:
    found = step(TrainingJob(compute_s=3.0, gradient_nbytes=100), at_rate(50.0))
    assert found == (3.0, 2.0, 2.0)
    assert found.time_s == 5.0


def test_without_gradients_a_step_is_its_compute() -> None:
    assert (
        step(TrainingJob(compute_s=3.0, gradient_nbytes=0, bucket_nbytes=8), at_rate(1.0)).time_s
        == 3.0
    )


def test_buckets_are_all_of_the_gradients() -> None:
    assert TrainingJob(compute_s=1.0, gradient_nbytes=10, bucket_nbytes=4).buckets == (4, 4, 2)
    assert TrainingJob(compute_s=1.0, gradient_nbytes=10).buckets == (10,)
    assert TrainingJob(compute_s=1.0, gradient_nbytes=10, bucket_nbytes=64).buckets == (10,)


def test_a_network_that_keeps_up_leaves_the_last_bucket_exposed() -> None:
    found = step(TrainingJob(compute_s=3.0, gradient_nbytes=100, bucket_nbytes=10), at_rate(100.0))
    assert found.communication_s == pytest.approx(1.0)
    assert found.exposed_s == pytest.approx(0.1)


def test_a_slow_network_hides_what_runs_beside_the_backward() -> None:
    # The first of ten buckets is final 0.2 s into the backward of 2 s; then all follow, 4 s in all.
    found = step(TrainingJob(compute_s=3.0, gradient_nbytes=100, bucket_nbytes=10), at_rate(25.0))
    assert found.exposed_s == pytest.approx(4.0 - 1.8)


def test_only_the_last_of_several_backwards_hides_anything() -> None:
    job = TrainingJob(compute_s=3.0, gradient_nbytes=100, bucket_nbytes=10, nmicrobatches=4)
    assert step(job, at_rate(25.0)).exposed_s == pytest.approx(4.0 - 0.45)


def test_finer_buckets_pay_the_latency_more_often() -> None:
    times = [
        step(
            TrainingJob(compute_s=1.0, gradient_nbytes=1000, bucket_nbytes=size),
            at_rate(2000.0, 0.1),
        )
        for size in (100, 10)
    ]
    assert times[0].time_s < times[1].time_s


def test_a_step_is_between_its_compute_and_the_sum_of_its_parts() -> None:
    chance = random.Random(7)
    for _ in range(200):
        job = TrainingJob(
            compute_s=chance.uniform(0, 2),
            gradient_nbytes=chance.randrange(1, 1000),
            bucket_nbytes=chance.randrange(100),
            nmicrobatches=chance.randrange(1, 5),
        )
        found = step(job, at_rate(chance.uniform(10, 1000), chance.uniform(0, 0.1)))
        last = found.communication_s / len(job.buckets) if len(set(job.buckets)) == 1 else 0.0
        assert job.compute_s + last <= found.time_s * (1 + 1e-12)
        assert found.time_s <= (job.compute_s + found.communication_s) * (1 + 1e-12)


def test_compute_is_six_operations_a_parameter_and_token() -> None:
    assert compute_s(1e9, 1000, 3e12) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"compute_s": -1.0},
        {"compute_s": float("nan")},
        {"gradient_nbytes": -1},
        {"bucket_nbytes": -1},
        {"nmicrobatches": 0},
    ],
)
def test_impossible_jobs_are_refused(fields) -> None:
    [name] = fields
    with pytest.raises(InvalidArgument, match=rf"training: {name}="):
        TrainingJob(**{"compute_s": 1.0, "gradient_nbytes": 8} | fields)


def test_a_processor_that_does_not_compute_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="flops_per_s=0"):
        compute_s(1e9, 1, 0.0)


def test_examples() -> None:
    assert doctest.testmod(training).failed == 0

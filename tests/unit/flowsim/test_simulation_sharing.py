"""The approximate ways to share ports stay close to the exact one."""

from __future__ import annotations

import pytest

from r2ccl.algos import packed_trees, ring, tree
from r2ccl.flowsim import Network, simulate


def networks(n):
    whole = Network.uniform(n, 4, 1e6)
    return {
        "whole": whole,
        "straggler": whole.degraded(1, 0.6),
        "two stragglers": whole.degraded(1, 0.5).degraded(2, 0.75),
        "lost on the way": whole.without(3, 0, time_s=0.2),
    }


def schedules(n):
    bandwidths = [16] * n
    bandwidths[1] = 10
    return {
        "ring": ring.allreduce(n, 12),
        "double binary trees": tree.allreduce(tree.double_binary(n) * 2),
        "packed trees": packed_trees.allreduce(bandwidths, 12),
    }


@pytest.mark.parametrize("node_ports", [True, False])
@pytest.mark.parametrize("network", networks(8))
@pytest.mark.parametrize("schedule", schedules(8))
def test_fair_queues_are_within_four_per_cent_of_max_min(schedule, network, node_ports) -> None:
    exact, fair = (
        simulate(
            schedules(8)[schedule],
            1_200_000,
            networks(8)[network],
            nslices=16,
            node_ports=node_ports,
            sharing=sharing,
            tolerance=0.0,
        ).time_s
        for sharing in ("max_min", "fair_queue")
    )
    assert fair == pytest.approx(exact, rel=0.04)


@pytest.mark.parametrize("network", networks(8))
@pytest.mark.parametrize("schedule", schedules(8))
@pytest.mark.parametrize("tolerance", [1e-3, 1e-2])
def test_what_a_batch_gives_slices_is_less_than_its_tolerance(schedule, network, tolerance) -> None:
    outcomes = [
        simulate(
            schedules(8)[schedule], 1_200_000, networks(8)[network], nslices=16, tolerance=each
        )
        for each in (0.0, tolerance)
    ]
    exact, batched = outcomes
    assert batched.time_s == pytest.approx(exact.time_s, rel=tolerance)
    assert batched.nbatches <= exact.nbatches
    # Each link owes less than that share of a slice in the end: a 16th of what it carried.
    most = max(float(use.utilisation.max()) for use in (batched.egress, batched.ingress))
    assert most <= 1 + tolerance / 16

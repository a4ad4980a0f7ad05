"""The planner's choices in the simulator: on the rails of the engine, with detours."""

from __future__ import annotations

import numpy as np
import pytest

from r2ccl.flowsim.choices import rails_of, simulate_choice
from r2ccl.planning.cluster import ClusterShape
from r2ccl.planning.cost_model import Rates
from r2ccl.types import CallSignature, Collective, ReduceOp

RATES = Rates(5_000, 10**9)
WHOLE = ((16, 16), (16, 16), (16, 16))
LOST = ((16, 0), (16, 16), (16, 16))
NBYTES = 48 << 20


def ring_on(rows: tuple[tuple[int, ...], ...], ranks_per_node: int = 1):
    cluster = ClusterShape(rows, ranks_per_node, RATES)
    ring, *_ = cluster.planner.compare(NBYTES, cluster.health, ["ring"])
    return cluster, ring


def test_a_ring_on_two_rails_takes_the_time_of_its_data() -> None:
    cluster, ring = ring_on(WHOLE)
    assert simulate_choice(cluster, ring, NBYTES) == pytest.approx(4 / 3 * NBYTES / 2e9, rel=0.05)


def test_links_of_a_lost_rail_take_the_other() -> None:
    cluster, ring = ring_on(WHOLE)
    src, dst = np.array([0, 0, 1, 1]), np.array([1, 1, 2, 2])
    channels = np.array([0, 1, 0, 1])
    whole, ingress = rails_of(ring, cluster.rows)(src, dst, channels)
    assert (whole == ingress).all()
    assert set(whole[:2]) == set(whole[2:]) == {0, 1}
    lost, _ = rails_of(ring, LOST)(src, dst, channels)
    assert list(lost[:2]) == [0, 0]
    assert list(lost[2:]) == list(whole[2:])


def test_undivided_parts_of_an_alltoall_take_all_rails() -> None:
    cluster = ClusterShape(WHOLE, 1, RATES)
    call = CallSignature(Collective.ALLTOALL, 0, ReduceOp.SUM, NBYTES)
    choice = cluster.planner.plan(call, NBYTES, cluster.health)
    src, dst = np.array([0, 0, 1]), np.array([1, 2, 2])
    assert list(rails_of(choice, cluster.rows)(src, dst, src * 0)[0]) == [1, 0, 1]


def test_a_lost_rail_makes_a_ring_slower() -> None:
    whole = simulate_choice(*ring_on(WHOLE), NBYTES)
    assert simulate_choice(*ring_on(LOST), NBYTES) > 1.4 * whole


def test_ranks_of_a_node_share_its_ports() -> None:
    cluster, ring = ring_on(WHOLE, 2)
    assert cluster.teams == [range(2), range(2, 4), range(4, 6)]
    assert cluster.nodes == [0, 0, 1, 1, 2, 2]
    assert ring.schedule.nranks == 6
    assert simulate_choice(cluster, ring, NBYTES) > 4 / 3 * NBYTES / 2e9


@pytest.mark.parametrize("collective", [each for each in Collective if each != Collective.BARRIER])
def test_the_options_of_a_call_include_its_choice(collective: Collective) -> None:
    for rows in (WHOLE, LOST):
        cluster = ClusterShape(rows, 1, RATES)
        planner, health = cluster.planner, cluster.health
        for nbytes in (1024, NBYTES):
            call = CallSignature(collective, 0, ReduceOp.SUM, nbytes)
            options = planner.options(call, nbytes, health)
            assert planner.plan(call, nbytes, health).name in {each.name for each in options}

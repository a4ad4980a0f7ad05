"""Ports that die, come back or change their speed while slices are under way."""

from __future__ import annotations

import pytest

from r2ccl.algos import ring, tree
from r2ccl.errors import InvalidArgument
from r2ccl.flowsim import Change, Network, simulate
from r2ccl.schedule.ir import Cost, Op, OpKind, Schedule, Space

IN, OUT = Space.INPUT, Space.OUTPUT

both_ways = pytest.mark.parametrize("sharing", ["max_min", "fair_queue"])


def flows(nchannels, nranks=2):
    """Rank 0 sends its share to rank 1 on every channel."""
    programs = (
        ((Op(OpKind.SEND, 1, IN, 0, OUT, -1),),) * nchannels,
        ((Op(OpKind.RECV, 0, OUT, -1, OUT, 0),),) * nchannels,
        *[((),) * nchannels] * (nranks - 2),
    )
    return Schedule(
        name="flows",
        collective="allreduce",
        nranks=nranks,
        nchunks=(1,) * nchannels,
        cost=Cost(0, 0, 0, 0),
        generate=lambda rank: programs[rank],
    )


@pytest.mark.parametrize(
    ("nslices", "sharing"), [(1, "max_min"), (10, "max_min"), (10, "fair_queue")]
)
def test_a_port_that_slows_down_is_slower_from_then_on(nslices, sharing) -> None:
    network = Network.uniform(2, 1, 10.0).changed(Change(4.0, 1, 0, 5.0), Change(8.0, 1, 0, 20.0))
    outcome = simulate(flows(1), 100, network, nslices=nslices, sharing=sharing)
    # 40 bytes, then 20, then the rest at the sender's 10.
    assert outcome.time_s == pytest.approx(12)
    assert outcome.ingress.capacity_nbytes[1, 0] == pytest.approx(4 * 10 + 4 * 5 + 4 * 20)
    assert outcome.bottleneck[:3] == (0, 0, True)


@both_ways
def test_what_a_dead_rail_had_under_way_goes_again_by_the_others(sharing) -> None:
    """Slices of 10 bytes: at 4.5 s half of one is lost, and 60 bytes of that channel are left."""
    network = Network.uniform(2, 2, 10.0).without(1, 0, time_s=4.5)
    outcome = simulate(flows(2), 200, network, nslices=10, sharing=sharing)
    assert outcome.time_s == pytest.approx(4.5 + (60 + 55) / 10)
    assert outcome.egress.nbytes[0] == pytest.approx([45, 160])
    assert outcome.egress.busy_s[0] == pytest.approx([4.5, 16])
    assert outcome.egress.capacity_nbytes[0] == pytest.approx([160, 160])
    assert outcome.ingress.capacity_nbytes[1] == pytest.approx([45, 160])


@both_ways
def test_a_rail_that_comes_back_is_used_again_at_once(sharing) -> None:
    network = Network.uniform(2, 2, 10.0).without(0, 0).changed(Change(4.0, 0, 0, 10.0))
    outcome = simulate(flows(2), 200, network, nslices=1, sharing=sharing)
    # Both on rail 1 at 5 until 4 s, then each on its own: nothing is sent twice.
    assert outcome.time_s == pytest.approx(4 + 80 / 10)
    assert outcome.egress.nbytes[0] == pytest.approx([80, 120])


@both_ways
def test_slices_wait_for_a_rail_where_all_are_dead(sharing) -> None:
    network = Network.uniform(2, 2, 10.0).without(1, 0, 1, time_s=5.0)
    again = network.changed(Change(50.0, 1, 1, 10.0))
    outcome = simulate(flows(1), 100, again, nslices=1, sharing=sharing)
    assert outcome.time_s == pytest.approx(50 + 100 / 10)
    with pytest.raises(InvalidArgument, match="both rank 0 and rank 1"):
        simulate(flows(1), 100, network, nslices=1, sharing=sharing)


@both_ways
def test_as_one_port_a_node_loses_a_rails_share_and_no_slice(sharing) -> None:
    network = Network.uniform(2, 4, 10.0).without(0, 2, time_s=1.0)
    outcome = simulate(flows(1), 400, network, nslices=1, node_ports=True, sharing=sharing)
    assert outcome.time_s == pytest.approx(1 + 360 / 30)
    assert outcome.egress.nbytes.tolist() == [[400], [0]]


@both_ways
def test_what_happens_after_the_end_does_not_matter(sharing) -> None:
    network = Network.uniform(2, 1, 10.0)
    later = network.without(0, 0, time_s=10.5)
    at_once = simulate(flows(1), 100, network, nslices=4, sharing=sharing)
    outcome = simulate(flows(1), 100, later, nslices=4, sharing=sharing)
    assert outcome.time_s == at_once.time_s
    assert (outcome.egress.capacity_nbytes == at_once.egress.capacity_nbytes).all()


@both_ways
@pytest.mark.parametrize(
    "schedule",
    [ring.allreduce(6, 6), tree.allreduce(tree.double_binary(6) * 3)],
    ids=["ring", "tree"],
)
def test_a_failure_half_way_costs_between_nothing_and_the_whole(schedule, sharing) -> None:
    whole = Network.uniform(6, 3, 1e6)
    whole_s, lost_s = (
        simulate(schedule, 360_000, network, nslices=16, sharing=sharing).time_s
        for network in (whole, whole.without(2, 0))
    )
    half = whole.without(2, 0, time_s=whole_s / 2)
    half_s = simulate(schedule, 360_000, half, nslices=16, sharing=sharing).time_s
    assert half_s == pytest.approx((whole_s + lost_s) / 2, rel=0.05)

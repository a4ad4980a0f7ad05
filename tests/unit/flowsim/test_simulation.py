"""What the simulator must say where a formula says it too."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from r2ccl.algos import recursive_doubling, ring, tree
from r2ccl.errors import InvalidArgument, ScheduleError
from r2ccl.flowsim import Change, Network, compile_schedule, simulate
from r2ccl.schedule.cost import wire_nbytes
from r2ccl.schedule.ir import Cost, Op, OpKind, Schedule, Space

#: Bytes/s.
B = 1e6

IN, OUT = Space.INPUT, Space.OUTPUT

both_ways = pytest.mark.parametrize("sharing", ["max_min", "fair_queue"])


def send(peer, after=(), chunk=0):
    return Op(OpKind.SEND, peer, IN, chunk, OUT, -1, after)


def recv(peer, after=(), chunk=0):
    return Op(OpKind.RECV, peer, OUT, -1, OUT, chunk, after)


def recv_reduce(peer, after=(), chunk=0):
    return Op(OpKind.RECV_REDUCE, peer, IN, chunk, OUT, chunk, after)


def schedule_of(*programs, nchunks=(), weights=()):
    """A schedule of what each rank does, one tuple a channel."""
    return Schedule(
        name="made",
        collective="allreduce",
        nranks=len(programs),
        nchunks=nchunks or (1,) * len(programs[0]),
        weights=weights,
        cost=Cost(0, 0, 0, 0),
        generate=lambda rank: programs[rank],
    )


# Rings


@both_ways
@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("nslices", [1, 4])
def test_a_ring_takes_the_bandwidth_optimal_time(n, nslices, sharing) -> None:
    nbytes = 2 * n * 4 * 1000
    outcome = simulate(
        ring.allreduce(n, 2), nbytes, Network.uniform(n, 2, B), nslices=nslices, sharing=sharing
    )
    assert outcome.time_s == pytest.approx(2 * (n - 1) / n * nbytes / (2 * B))
    assert outcome.bottleneck.utilisation == pytest.approx(1)


@both_ways
@pytest.mark.parametrize("alpha_s", [1e-5, 1e-3, 0.1])
@pytest.mark.parametrize("nslices", [1, 4, 10])
def test_latency_shows_where_slices_do_not_hide_it(nslices, alpha_s, sharing) -> None:
    n, nbytes = 4, 4 * 40 * 1000
    network = Network.uniform(n, 1, B, alpha_s=alpha_s)
    outcome = simulate(ring.allreduce(n), nbytes, network, nslices=nslices, sharing=sharing)
    chunk_s = nbytes / n / B
    # A slice of the next step follows the link's last one, or its own landing.
    step_s = max(chunk_s, chunk_s / nslices + alpha_s)
    steps = 2 * (n - 1)
    assert outcome.time_s == pytest.approx((steps - 1) * step_s + chunk_s + alpha_s)


@both_ways
@pytest.mark.parametrize("kept", [0.25, 0.5, 2 / 3])
@pytest.mark.parametrize("node_ports", [False, True])
def test_a_ring_is_as_slow_as_its_slowest_node(kept, node_ports, sharing) -> None:
    n, nslices, nbytes = 6, 4, 3 * 6 * 4 * 1000
    outcome = simulate(
        ring.allreduce(n, 3),
        nbytes,
        Network.uniform(n, 3, B).degraded(2, kept),
        nslices=nslices,
        sharing=sharing,
        node_ports=node_ports,
    )
    whole_s = 2 * (n - 1) / n * nbytes / (3 * B)
    slice_s = nbytes / (3 * n * nslices) / B / kept
    assert whole_s / kept <= outcome.time_s * (1 + 1e-9)
    assert outcome.time_s <= whole_s / kept + 2 * slice_s
    assert outcome.bottleneck.node == 2


def test_a_lost_rail_costs_its_share_where_channels_spread() -> None:
    """Three rails, two channels on each: those of the dead one go to one of the others each."""
    n, nbytes = 4, 6 * 4 * 4000
    schedule = ring.allreduce(n, 6)
    whole = simulate(schedule, nbytes, Network.uniform(n, 3, B), nslices=8)
    lost = simulate(schedule, nbytes, Network.uniform(n, 3, B).without(1, 0), nslices=8)
    assert lost.time_s == pytest.approx(1.5 * whole.time_s, rel=0.02)
    assert lost.egress.nbytes[1, 0] == lost.ingress.nbytes[1, 0] == 0
    assert lost.egress.nbytes[1, 1] == pytest.approx(lost.egress.nbytes[1, 2])


# Other patterns


@both_ways
@pytest.mark.parametrize("nslices", [1, 3, 16])
def test_recursive_doubling_sends_the_data_once_a_step(nslices, sharing) -> None:
    nbytes = 48_000
    schedule = recursive_doubling.allreduce(8)
    outcome = simulate(schedule, nbytes, Network.uniform(8, 1, B), nslices=nslices, sharing=sharing)
    assert outcome.time_s == pytest.approx(3 * nbytes / B)


def test_recursive_doubling_of_small_data_takes_its_latency() -> None:
    network = Network.uniform(8, 1, B, alpha_s=0.5)
    outcome = simulate(recursive_doubling.allreduce(8), 8, network, nslices=1)
    assert outcome.time_s == pytest.approx(3 * (0.5 + 8 / B))


@both_ways
def test_two_flows_into_one_port_get_half_of_it_each(sharing) -> None:
    schedule = schedule_of(
        ((recv(1),), (recv(2),)), ((send(0),), ()), ((), (send(0),))
    )  # fmt: skip
    outcome = simulate(schedule, 2000, Network.uniform(3, 1, 10.0), nslices=5, sharing=sharing)
    assert outcome.time_s == pytest.approx(200)
    assert outcome.ingress.nbytes.tolist() == [[2000], [0], [0]]
    assert outcome.ingress.utilisation[0, 0] == pytest.approx(1)
    assert outcome.egress.utilisation[1, 0] == pytest.approx(0.5)
    assert outcome.ingress.busy_s[0, 0] == pytest.approx(200)
    assert outcome.bottleneck[:3] == (0, 0, False)
    assert str(outcome.bottleneck) == "into node 0, rail 0: 100.0% of what it could carry"


@both_ways
def test_what_a_slow_port_leaves_goes_to_the_others(sharing) -> None:
    """A sends to B and to C, where D sends too: B's flow gets what C's port does not take."""
    schedule = schedule_of(
        ((send(1),), (send(2),), ()),
        ((recv(0),), (), ()),
        ((), (recv(0),), (recv(3),)),
        ((), (), (send(2),)),
        weights=(8, 1, 1),
    )
    rates = ((10.0,), (10.0,), (4.0,), (10.0,))
    network = Network(egress=((10.0,),) * 4, ingress=rates)
    # 8 + 2 out of A until 5 s, when C has its 20 bytes; then 10.
    assert simulate(schedule, 100, network, nslices=1, sharing=sharing).time_s == pytest.approx(9)


def test_a_receive_that_may_not_be_landed_in_holds_the_slice_up() -> None:
    """Rank 1 overwrites what rank 0 sends only when it has what rank 2 sends."""
    schedule = schedule_of(
        ((send(1, chunk=1),),),
        ((recv(2), recv(0, (0,), 1)),),
        ((send(1),),),
        nchunks=(2,),
    )
    network = Network(egress=((10.0,),) * 3, ingress=((20.0,),) * 3)
    assert simulate(schedule, 200, network, nslices=4).time_s == pytest.approx(20)
    free = schedule_of(
        ((send(1, chunk=1),),),
        ((recv(2), recv_reduce(0, (0,), 1)),),
        ((send(1),),),
        nchunks=(2,),
    )
    assert simulate(free, 200, network, nslices=4).time_s == pytest.approx(10)


def test_a_send_is_released_when_it_has_landed() -> None:
    schedule = schedule_of(((send(1), recv(1, (0,))),), ((recv(0), send(0)),))
    network = Network.uniform(2, 1, 10.0, alpha_s=3.0)
    assert simulate(schedule, 100, network, nslices=1).time_s == pytest.approx(2 * 13)


@pytest.mark.parametrize("nslices", [1, 5, 20])
@pytest.mark.parametrize("rate", [4.0, 10.0, 50.0])
def test_reductions_follow_their_slices_one_at_a_time(nslices, rate) -> None:
    schedule = schedule_of(((send(1),),), ((recv_reduce(0),),))
    network = Network.uniform(2, 1, 10.0, reduction_rate=rate)
    on_wire_s, reducing_s = 100 / nslices / 10.0, 100 / nslices / rate
    wanted = on_wire_s + (nslices - 1) * max(on_wire_s, reducing_s) + reducing_s
    assert simulate(schedule, 100, network, nslices=nslices).time_s == pytest.approx(wanted)


def test_local_reductions_take_time_and_copies_none() -> None:
    local = tuple(
        Op(kind, -1, IN, 0, OUT, 0, after)
        for kind, after in ((OpKind.COPY, ()), (OpKind.REDUCE, (0,)))
    )
    network = Network.uniform(1, 1, 10.0, reduction_rate=20.0)
    assert simulate(schedule_of((local,)), 100, network, nslices=4).time_s == pytest.approx(5)


def test_a_lane_reduces_for_all_its_links_in_turn() -> None:
    schedule = schedule_of(
        ((recv_reduce(1), recv_reduce(2, (), 1)),),
        ((send(0),),),
        ((send(0, (), 1),),),
        nchunks=(2,),
    )
    network = Network(egress=((10.0,),) * 3, ingress=((100.0,),) * 3, reduction_rate=5.0)
    # The first two slices of 25 bytes land at 2.5 s; then 100 bytes are reduced without a gap.
    assert simulate(schedule, 100, network, nslices=2).time_s == pytest.approx(2.5 + 20)


# Nodes of several ranks, rails


def test_ranks_of_a_node_share_its_ports_and_not_the_way_inside() -> None:
    one_way = schedule_of(((send(2),), ()), ((), (send(3),)), ((recv(0),), ()), ((), (recv(1),)))
    network = Network.uniform(2, 1, 10.0, ranks_per_node=2, alpha_s=1.0)
    assert simulate(one_way, 100, network, nslices=1).time_s == pytest.approx(11)
    inside = schedule_of(((send(1),),), ((recv(0),),), ((),), ((),))
    assert simulate(inside, 100, network, nslices=1).time_s == 0
    slower = msgspec.structs.replace(network, inside_bandwidth=50.0, inside_alpha_s=0.5)
    outcome = simulate(inside, 100, slower, nslices=4)
    assert outcome.time_s == pytest.approx(2.5)
    assert not outcome.egress.nbytes.any()


def test_links_use_the_rails_they_are_given() -> None:
    def crossed(src, dst, channel):
        return np.ones_like(src), np.zeros_like(dst)

    schedule, network = ring.allreduce(3, 2), Network.uniform(3, 2, B)
    outcome = simulate(schedule, 12_000, network, nslices=1, rails=crossed)
    assert not outcome.egress.nbytes[:, 0].any()
    assert not outcome.ingress.nbytes[:, 1].any()
    assert outcome.time_s == pytest.approx(2 * 2 / 3 * 12_000 / B)


# Sizes


@pytest.mark.parametrize("schedule", [ring.allreduce(5, 3), tree.allreduce(tree.double_binary(5))])
def test_ports_carry_the_bytes_the_schedule_sends(schedule) -> None:
    outcome = simulate(schedule, 10_007, Network.uniform(5, 2, B), nslices=3)
    sent, received = wire_nbytes(schedule, 10_007, 1)
    assert outcome.egress.nbytes.sum(1) == pytest.approx(sent)
    assert outcome.ingress.nbytes.sum(1) == pytest.approx(received)


def test_slices_are_cut_by_bytes_or_by_number() -> None:
    schedule, network = ring.allreduce(4), Network.uniform(4, 1, B, alpha_s=1e-4)
    by_number = simulate(schedule, 4 * 4096, network, nslices=4)
    by_nbytes = simulate(schedule, 4 * 4096, network, slice_nbytes=1024)
    # Nothing cuts an element.
    by_elements = simulate(schedule, 4 * 4096, network, itemsize=8, slice_nbytes=1031)
    assert by_number.nslices == by_nbytes.nslices == by_elements.nslices == 4 * 6 * 4
    assert by_number.time_s == by_nbytes.time_s == by_elements.time_s


def test_an_empty_chunk_travels_all_the_same() -> None:
    network = Network.uniform(4, 1, B, alpha_s=1.0)
    assert simulate(ring.allreduce(4), 0, network, nslices=3).time_s == pytest.approx(6)


def test_one_rank_alone_needs_no_time() -> None:
    outcome = simulate(ring.allreduce(1, 2), 1000, Network.uniform(1, 1, B), nslices=2)
    assert (outcome.time_s, outcome.nslices, outcome.bottleneck.utilisation) == (0, 0, 0)


def test_channels_can_be_given_other_weights() -> None:
    schedule, network = ring.allreduce(3, 2), Network.uniform(3, 2, B)
    outcome = simulate(schedule, 12_000, network, nslices=2, weights=(3, 1))
    assert outcome.time_s == pytest.approx(4 / 3 * 9000 / B)


# The simulation itself


@both_ways
def test_a_long_way_can_hold_any_number_of_slices(sharing) -> None:
    schedule = schedule_of(((send(1),),), ((recv(0),),))
    network = Network.uniform(2, 1, 10.0, alpha_s=1000.0)
    outcome = simulate(schedule, 1000, network, nslices=500, sharing=sharing)
    assert outcome.time_s == pytest.approx(100 + 1000)
    # The more follow each other from 30 s on, while others are on their way.
    network = Network.uniform(2, 1, 10.0, alpha_s=1.0).changed(
        Change(30.0, 0, 0, 100.0), Change(30.0, 1, 0, 100.0)
    )
    outcome = simulate(schedule, 1000, network, nslices=500, sharing=sharing)
    assert outcome.time_s == pytest.approx(30 + 7 + 1)


@both_ways
def test_equal_arguments_give_equal_outcomes(sharing) -> None:
    schedule = tree.allreduce(tree.double_binary(9) + tree.double_binary(9))
    network = Network.uniform(9, 3, B, alpha_s=1e-5).degraded(4, 0.3).without(2, 1, time_s=0.01)
    program = compile_schedule(schedule)
    outcomes = [
        simulate(each, 90_000, network, nslices=7, sharing=sharing)
        for each in (schedule, schedule, program, program)
    ]
    for other in outcomes[1:]:
        assert all(map(np.array_equal, outcomes[0], other))


def test_ops_that_wait_for_each_other_are_named() -> None:
    circle = schedule_of(
        ((), (recv_reduce(1), send(1, (0,)))), ((), (recv_reduce(0), send(0, (0,))))
    )
    with pytest.raises(ScheduleError, match=r"RECV_REDUCE of chunk 0: slice 0 waits") as caught:
        simulate(circle, 100, Network.uniform(2, 1, B), nslices=2)
    assert (caught.value.rank, caught.value.channel, caught.value.op) == (0, 1, 0)


def test_ranks_that_share_no_rail_are_named() -> None:
    network = Network.uniform(3, 2, B).without(0, 0).without(1, 1)
    with pytest.raises(InvalidArgument, match="both rank 0 and rank 1"):
        simulate(ring.allreduce(3), 1000, network, nslices=1)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"nslices": 0}, r"\(slice_nbytes, nslices\)=\(0, 0\); allowed is one above 0"),
        ({"slice_nbytes": 8}, r"\(8, 1\)"),
        ({"nslices": -1}, r"\(0, -1\)"),
        ({"itemsize": 0}, "itemsize=0"),
        ({"nbytes": -4}, "nbytes=-4"),
        ({"itemsize": 3}, "nbytes=1000; allowed is a multiple of itemsize=3"),
        ({"counts": (1,)}, r"counts=\(1,\); allowed is .*, 1000 elements in all"),
        ({"counts": (0, 500, 500)}, r"counts=\(0, 500, 500\); allowed is .* of the 1 parts"),
        ({"network": Network.uniform(4, 1, B)}, "network.nranks=4; allowed is 3"),
        ({"nbytes": 2**40, "slice_nbytes": 1, "nslices": 0}, "give a larger slice_nbytes"),
        ({"sharing": "fifo"}, "sharing='fifo'; allowed is max_min or fair_queue"),
        ({"tolerance": 1.0}, "tolerance=1.0"),
        ({"tolerance": math.nan}, "tolerance=nan"),
        ({"weights": (1, 2)}, "give 1 integers"),
        ({"rails": lambda src, dst, channel: (src, dst)}, "at its destination, 0 to 0"),
        ({"rails": lambda src, dst, channel: (src[:1] * 0, dst * 0)}, "arrays of 3 elements"),
        ({"rails": lambda src, dst, channel: (src * 0,)}, "two integer arrays of 3"),
        (
            {"rails": lambda src, dst, channel: (src * 0.0, dst * 0)},
            "must return two integer arrays",
        ),
    ],
)
def test_nonsense_is_refused_with_what_was_given(given, why) -> None:
    arguments = {"nbytes": 1000, "network": Network.uniform(3, 1, B), "nslices": 1, **given}
    with pytest.raises(InvalidArgument, match=why):
        simulate(ring.allreduce(3), arguments.pop("nbytes"), arguments.pop("network"), **arguments)

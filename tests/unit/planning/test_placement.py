"""Which rails channels go to, and how much each carries: alike on all ranks, nothing wasted."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.healths import health

from r2ccl.algos import leaf_ring, packed_trees, ring, tree
from r2ccl.errors import InvalidArgument
from r2ccl.failover.health.table import WHOLE, Health
from r2ccl.planning.placement import place, place_edges, port_time
from r2ccl.planning.planner import full_channels
from r2ccl.schedule.interpret import interpret
from r2ccl.schedule.ir import Schedule


@pytest.mark.parametrize("nchannels", [1, 3, 12])
def test_channels_of_a_whole_network_keep_numbers_and_weights(nchannels: int) -> None:
    placement = place(nchannels, range(4), health())
    assert placement.channels == tuple(range(nchannels))
    assert set(placement.weights) == {WHOLE}


def load(nchannels: int, homes: list[int], of: Health) -> dict[int, int]:
    """Weight on every rail's own channels."""
    found = dict.fromkeys(homes, 0)
    placement = place(nchannels, homes, of)
    for channel, weight in zip(placement.channels, placement.weights, strict=True):
        found[homes[channel % len(homes)]] += weight
    return found


def test_a_slow_port_slows_its_rail_by_its_share() -> None:
    assert load(12, [0, 1, 2, 3], health(r2n1=4)) == {0: 48, 1: 48, 2: 12, 3: 48}
    assert load(12, [0, 1, 2, 3], health(r2n1=4, r2n3=2)) == {0: 48, 1: 48, 2: 6, 3: 48}


def test_a_dead_port_does_not_hide_a_slow_one() -> None:
    assert load(12, [0, 1, 2, 3], health(r0n0=0, r0n1=4)) == {0: 12, 1: 48, 2: 48, 3: 48}


def test_a_dead_port_does_not_slow_its_rail_elsewhere() -> None:
    assert load(12, [0, 1, 2, 3], health(r2n1=0)) == dict.fromkeys(range(4), 48)


def test_a_small_call_takes_the_best_rails() -> None:
    assert place(1, [0, 1, 2, 3], health(r0n1=0, r1n2=4)).channels == (2,)
    assert place(3, [0, 1, 2, 3], health(r0n1=0, r1n2=4)).channels == (2, 3, 1)


def test_rails_that_are_nobodys_home_get_nothing() -> None:
    assert load(4, [2, 3], health(r0n0=1)) == {2: 32, 3: 32}


def test_with_every_rail_dead_somewhere_all_weigh_the_same() -> None:
    dead = health(2, 2, r0n0=0, r1n1=0)
    assert set(place(2, [0, 1], dead).weights) == {WHOLE}


def test_there_must_be_a_home() -> None:
    with pytest.raises(InvalidArgument, match="no home rails"):
        place(1, [], health())


tables = st.lists(st.integers(0, WHOLE), min_size=12, max_size=12)


@given(tables, st.integers(1, 12))
def test_each_links_channel_is_used_once_and_carries_something(
    shares: list[int], nchannels: int
) -> None:
    placement = place(nchannels, [0, 1, 2, 3], Health(1, 4, bytes(shares)))
    assert len(set(placement.channels)) == nchannels
    assert all(1 <= weight <= WHOLE for weight in placement.weights)
    used = {channel % 4 for channel in placement.channels}
    assert len(used) == min(nchannels, 4)


@given(tables)
def test_the_result_is_the_same_bit_for_bit_whatever_the_shares(shares: list[int]) -> None:
    draw = np.random.default_rng(7)
    inputs = [draw.standard_normal(1000).astype(np.float32) for _ in range(3)]
    [plain, *_] = interpret(ring.allreduce(3), inputs, np.add)
    nchannels = full_channels(4, 4)
    weights = place(nchannels, [0, 1, 2, 3], Health(1, 4, bytes(shares))).weights
    for result in interpret(ring.allreduce(3, nchannels), inputs, np.add, weights=weights):
        assert np.array_equal(result.view(np.uint32), plain.view(np.uint32))


# Edges


def port_loads(schedule: Schedule, of: Health) -> dict[tuple[int, int], int]:
    """Edges on each port, by rank and rail; every edge of every tree once."""
    placement = place_edges(schedule, range(of.nrails), of)
    placed = [edge[:3] for edge in placement.edges]
    wanted = {
        (channel, min(rank, op.peer), max(rank, op.peer))
        for rank in range(of.nranks)
        for channel, ops in enumerate(schedule.program(rank).channels)
        for op in ops
        if op.peer >= 0
    }
    assert sorted(placed) == sorted(wanted)
    found: dict[tuple[int, int], int] = {}
    for edge in placement.edges:
        for rank in (edge.low, edge.high):
            port = (rank, edge.number % of.nrails)
            found[port] = found.get(port, 0) + 1
    return found


def packed(of: Health, ntrees: int) -> Schedule:
    return packed_trees.allreduce([of.capacity(rank) for rank in range(of.nranks)], ntrees)


def test_edges_are_shared_out_evenly_on_a_whole_network() -> None:
    assert set(port_loads(packed(health(), 16), health()).values()) == {6}


def test_no_edge_is_on_a_dead_port_and_the_others_share_them() -> None:
    of = health(r1n0=0)
    loads = port_loads(packed(of, 20), of)
    assert (0, 1) not in loads
    # The lower bound: 2 (n - 1) times the data through 15 ports.
    assert set(loads.values()) == {8}


def test_a_slow_port_has_fewer_edges() -> None:
    of = health(r2n1=8)
    loads = port_loads(packed(of, 24), of)
    assert loads[1, 2] <= max(loads.values()) / 2 + 1


def test_the_busiest_port_decides() -> None:
    homes = range(4)
    rings = ring.allreduce(4, 12)
    spread = place(12, homes, health())
    assert port_time(rings, spread, homes, health()) == Fraction(3, 2) / 64
    of = health(r1n0=0)
    trees = packed(of, 20)
    placed = place_edges(trees, homes, of)
    bound = packed_trees.lower_bound([of.capacity(rank) for rank in range(4)])
    assert port_time(trees, placed, homes, of) == bound
    leaves = leaf_ring.allreduce([of.capacity(rank) for rank in range(4)], nchannels=8)
    time = port_time(leaves, place_edges(leaves, homes, of), homes, of)
    assert bound <= time <= bound * Fraction(9, 8) * Fraction(101, 100)


@given(tables, st.integers(1, 8))
def test_every_lane_has_links_of_its_own(shares: list[int], ntrees: int) -> None:
    of = Health(1, 4, bytes(shares))
    placement = place_edges(packed_trees.allreduce([1, 1, 1], ntrees), range(4), of)
    owners: dict[int, int] = {}
    for edge in placement.edges:
        assert owners.setdefault(edge.number, edge.channel) == edge.channel
    for rank in range(3):
        for (channel, peer), number in placement.numbers(rank, 3).items():
            assert placement.numbers(peer, 3)[channel, rank] == number


def test_edges_need_a_home_too() -> None:
    with pytest.raises(InvalidArgument, match="no home rails"):
        place_edges(ring.allreduce(2), [], health())


@pytest.mark.parametrize("width", [1, 2, 3])
def test_packed_edges_keep_rails_and_use_the_lowest_numbers(width: int) -> None:
    trees = packed_trees.pack([width * 3] * 4, 3 * width)
    placement = place_edges(tree.allreduce(trees), range(width), health())
    packed = placement.packed(width)
    used: dict[int, set[int]] = {}
    for before, after in zip(placement.edges, packed.edges, strict=True):
        assert before[:3] == after[:3]
        assert before.number % width == after.number % width
        used.setdefault(after.number, set()).add(after.channel)
    assert all(len(channels) == 1 for channels in used.values())
    for at in range(width):
        turns = sorted(number // width for number in used if number % width == at)
        assert turns == list(range(len(turns)))

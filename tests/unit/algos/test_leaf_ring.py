"""Leaf ring: right for any core and any relays, and as near the bound as its roles promise."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import strategies as st
from support import slow
from support.schedules import float_results
from support.slow import slow_but

from r2ccl.algos import leaf_ring, packed_trees
from r2ccl.algos.blend import BlendPart, blend
from r2ccl.algos.roles import Roles, choose, deal
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure, wire_nbytes
from r2ccl.schedule.interpret import interpret
from r2ccl.schedule.ir import Schedule

bandwidths = st.lists(st.sampled_from([1, 3, 4, 6, 7, 8, 8, 8]), min_size=1, max_size=9)


@st.composite
def parts(draw: st.DrawFn) -> BlendPart:
    """Any core, up to three leaves, up to nine segments in which any of them relay."""
    order = draw(st.integers(1, 8).flatmap(lambda n: st.permutations(range(n))))
    nleaves = draw(st.integers(0, min(3, len(order) - 1)))
    core, leaves = order[nleaves:], order[:nleaves]
    most = min(nleaves, len(core) - 1)
    relays = st.permutations(leaves).flatmap(
        lambda some: st.integers(0, most).map(lambda number: tuple(some[:number]))
    )
    return leaf_ring.part(len(order), core, draw(st.lists(relays, min_size=1, max_size=9)))


def alone(part: BlendPart) -> Schedule:
    return blend("leaf_ring", [part], [Fraction(1)], [1])


@slow.given(15, 60, parts())
def test_any_part_is_accepted_and_costs_what_it_says(part: BlendPart) -> None:
    schedule = alone(part)
    check(schedule)
    assert measure(schedule) == schedule.cost


@slow.given(10, 25, parts(), st.booleans())
def test_any_part_sums(part: BlendPart, in_place: bool) -> None:
    n = len(part.sent)
    inputs = [np.random.default_rng(rank).integers(-999, 999, 100) for rank in range(n)]
    for output in interpret(alone(part), inputs, np.add, in_place):
        np.testing.assert_array_equal(output, sum(inputs))


@slow.given(10, 25, parts())
def test_floats_agree_bit_for_bit_on_all_ranks_and_in_both_modes(part: BlendPart) -> None:
    assert len(float_results(alone(part))) == 1


@slow.given(10, 40, bandwidths, st.integers(1, 9))
def test_any_bandwidths_are_accepted(of: list[int], nsegments: int) -> None:
    schedule = leaf_ring.allreduce(of, nsegments)
    check(schedule)
    assert measure(schedule) == schedule.cost


@pytest.mark.parametrize(("n", "nsegments"), slow_but([(16, 8)], [(16, 8), (33, 3), (64, 2)]))
def test_many_ranks(n: int, nsegments: int) -> None:
    schedule = leaf_ring.allreduce([5, 7, *[8] * (n - 2)], nsegments)
    check(schedule)
    assert measure(schedule) == schedule.cost


@slow.given(10, 25, parts())
def test_every_rank_carries_what_its_part_says(part: BlendPart) -> None:
    count = part.nchunks << 12
    schedule = alone(part)
    for found, said in zip(
        wire_nbytes(schedule, count, 1), (part.sent, part.received), strict=True
    ):
        assert [Fraction(int(each), count) for each in found] == list(said)


@pytest.mark.parametrize("n", range(2, 20))
def test_with_one_straggler_roles_reach_the_bound(n: int) -> None:
    for left in range(1, 9):
        of = [left, *[8] * (n - 1)]
        assert choose(of).time == packed_trees.lower_bound(of), left


@slow.given(40, 100, st.lists(st.integers(1, 7), max_size=4))
def test_with_some_stragglers_among_many_roles_reach_the_bound(lost: list[int]) -> None:
    of = [*lost, *[8] * (16 - len(lost))]
    assert choose(of).time == packed_trees.lower_bound(of)


@slow.given(40, 100, bandwidths)
def test_the_time_is_that_of_the_busiest(of: list[int]) -> None:
    n = len(of)
    roles = choose(of)
    ntransfers = {leaf: 1 + share for leaf, share in roles.relaying.items()}
    rest = (2 * (n - 1) - sum(ntransfers.values())) / Fraction(len(roles.core))
    ntransfers |= dict.fromkeys(roles.core, rest)
    assert sorted(ntransfers) == list(range(n))
    assert all(1 <= ntransfers[leaf] <= 2 for leaf in roles.relaying)
    assert roles.time == max(ntransfers[rank] / of[rank] for rank in range(n))
    assert roles.time >= packed_trees.lower_bound(of)


def test_equal_ranks_are_a_plain_ring() -> None:
    assert choose([3, 3, 3]) == Roles((0, 1, 2), {}, Fraction(4, 9))
    assert leaf_ring.allreduce([3, 3, 3]).nchunks == (3,)


@slow.given(40, 100, bandwidths, st.integers(1, 40))
def test_relaying_is_dealt_evenly(of: list[int], nsegments: int) -> None:
    roles = choose(of)
    dealt = deal(roles, nsegments)
    assert all(len(each) < max(len(roles.core), 2) for each in dealt)
    for leaf, share in roles.relaying.items():
        for end in range(nsegments + 1):
            number = sum(leaf in each for each in dealt[:end])
            # A segment's places are taken by as many as there are: one more may have to wait.
            assert abs(number - share * end) <= Fraction(3, 2)


@pytest.mark.parametrize("core", [(), (0, 0), (0, 4), (-1,)])
def test_a_core_is_made_of_ranks(core: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="give one or more different ranks, 0 to 3"):
        leaf_ring.part(4, core)


@pytest.mark.parametrize("relays", [[], [(0,)], [(3,), (9,)], [(3, 3)], [(4, 3, 5)]])
def test_relays_are_leaves_and_few(relays: list[tuple[int, ...]]) -> None:
    with pytest.raises(
        InvalidArgument, match=r"fewer than 3 different ranks out of the leaves \(3, 4, 5\)"
    ):
        leaf_ring.part(6, (0, 1, 2), relays)


@pytest.mark.parametrize(("nsegments", "nchannels"), [(0, 1), (1, 0)])
def test_numbers_below_one_are_refused(nsegments: int, nchannels: int) -> None:
    with pytest.raises(InvalidArgument, match="give 1 or more"):
        leaf_ring.allreduce([3, 4, 4], nsegments, nchannels)

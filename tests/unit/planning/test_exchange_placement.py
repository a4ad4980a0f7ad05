"""Placement of direct exchanges: what each port carries, with equal and unequal parts."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r2ccl.algos import direct_exchange
from r2ccl.errors import InvalidArgument
from r2ccl.failover.health.table import WHOLE, Health
from r2ccl.planning.cost_model import Fabric, Placed
from r2ccl.planning.edge_loads import flows_of
from r2ccl.planning.exchange_placement import flows_of_exchange, place_exchange
from r2ccl.schedule.check import check
from r2ccl.types import DIRECT, PAIRWISE, Collective

Rows = list[tuple[int, ...]]
UNIFORM = sorted(DIRECT - PAIRWISE)


def placed(collective: Collective, rows: Rows, root: int = 0, nchannels: int = 0) -> Placed:
    nrails = len(rows[0])
    health = Health(1, nrails, bytes(share for row in rows for share in row))
    return place_exchange(collective, root, nchannels, Fabric(range(nrails), nrails), health)


def bound(collective: Collective, rows: Rows, root: int = 0) -> Fraction:
    """Return the lower bound for equal parts of a buffer of size 1 over whole rails of 1."""
    ranks = range(len(rows))
    sizes = [
        [
            collective == Collective.ALLTOALL or root == (j if "GATHER" in collective.name else i)
            for j in ranks
        ]
        for i in ranks
    ]
    return direct_exchange.lower_bound(sizes, rows) * WHOLE / len(rows)


@pytest.mark.parametrize("collective", UNIFORM)
@pytest.mark.parametrize("nranks", [2, 3, 8])
def test_a_whole_network_is_used_to_the_bound(collective: Collective, nranks: int) -> None:
    rows: Rows = [(WHOLE,) * 4] * nranks
    found = placed(collective, rows)
    check(found.candidate.schedule)
    assert found.load == bound(collective, rows)


@pytest.mark.parametrize("collective", UNIFORM)
@pytest.mark.parametrize(
    "odd",
    [
        {1: (0, 16, 16, 16)},
        {0: (0, 16, 16, 16), 1: (16, 0, 16, 16)},
        {2: (16, 8, 16, 4)},
        {0: (0, 0, 16, 16), 3: (0, 16, 16, 0), 5: (16, 16, 16, 1)},
    ],
    ids=str,
)
def test_a_degraded_network_is_used_nearly_to_the_bound(
    collective: Collective, odd: dict[int, tuple[int, ...]]
) -> None:
    rows: Rows = [odd.get(rank, (WHOLE,) * 4) for rank in range(8)]
    found = placed(collective, rows)
    assert found.load <= bound(collective, rows) * Fraction(112, 100)
    for edge in found.placement.edges:
        at = edge.number % 4
        assert rows[edge.low][at] > 0
        assert rows[edge.high][at] > 0


@pytest.mark.parametrize("collective", sorted(PAIRWISE))
def test_every_pair_divides_an_unequal_part_by_what_both_have(collective: Collective) -> None:
    rows: Rows = [(WHOLE,) * 4, (0, 16, 16, 8), *[(WHOLE,) * 4] * 3]
    edges = placed(collective, rows).placement.edges
    rails = Counter(number % 4 for c, low, high, number in edges if c and (low, high) == (0, 1))
    assert sum(rails.values()) == 8
    assert rails[0] == 0
    assert max(Fraction(rails[at], rows[1][at]) for at in (1, 2, 3)) == Fraction(4, 16)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(*[st.sampled_from([0, 3, WHOLE])] * 3).filter(any), min_size=2, max_size=6),
    st.sampled_from(sorted(DIRECT)),
    st.integers(0, 3),
)
def test_links_have_own_numbers_and_flows_are_those_of_the_ops(
    rows: Rows, collective: Collective, nchannels: int
) -> None:
    found = placed(collective, rows, len(rows) - 1, nchannels)
    schedule, placement = found.candidate.schedule, found.placement
    known, counted = flows_of_exchange(schedule), flows_of(schedule)
    assert [flow for flow in counted.flows if flow.up or flow.down] == [
        flow._replace(
            up=flow.up * counted.unit // known.unit, down=flow.down * counted.unit // known.unit
        )
        for flow in known.flows
    ]
    for rank in range(len(rows)):
        numbers: dict[int, set[int]] = {}
        for channel, ops in enumerate(schedule.program(rank).channels):
            for op in ops:
                if op.peer >= 0:
                    number = placement.numbers(rank, len(rows)).get((channel, op.peer))
                    number = placement.channels[channel] if number is None else number
                    numbers.setdefault(channel, set()).add(number)
        used = [number for found in numbers.values() for number in found]
        assert len(used) == len(set(used)), "two lanes of a call share a link channel"


def test_the_bound_counts_ports_and_pairs() -> None:
    rows = [(2, 2), (2, 2), (2, 0)]
    assert direct_exchange.lower_bound([[0, 4, 4], [4, 0, 4], [4, 4, 0]], rows) == 4
    assert direct_exchange.lower_bound([[9, 8, 0], [0, 0, 0], [0, 0, 0]], rows) == 2
    assert direct_exchange.lower_bound([[5]], [(1,)]) == 0
    with pytest.raises(InvalidArgument, match="rank 0 exchanges data, but has no rail"):
        direct_exchange.lower_bound([[0, 1], [1, 0]], [(1, 0), (0, 1)])

"""Time of an alltoall of many pairs: that of its flows, which are too many to list."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r2ccl.failover.health.table import WHOLE, Health
from r2ccl.planning import exchange_placement
from r2ccl.planning.cost_model import Fabric
from r2ccl.planning.exchange_placement import flows_of_exchange, place_exchange
from r2ccl.planning.exchange_time import alltoall_time
from r2ccl.planning.placement import Edge, mean_time, port_time
from r2ccl.types import Collective

SHARES = st.sampled_from([0, 0, 1, 5, 7, 8, WHOLE, WHOLE, WHOLE])


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(*[SHARES] * 4), min_size=1, max_size=9),
    st.lists(st.integers(0, 3), min_size=9, max_size=9),
    st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
    st.integers(1, 9),
    st.booleans(),
)
def test_the_times_are_those_of_all_flows(
    rows: list[tuple[int, ...]], nodes: list[int], homes: list[int], nchannels: int, apart: bool
) -> None:
    n, width = len(rows), len(homes)
    health = Health(1, 4, bytes(share for row in rows for share in row))
    fabric = Fabric(homes, width, () if apart else nodes[:n])
    found = alltoall_time(nchannels, homes, health, fabric.nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_placement, "_MOST_EDGES_PLACED", 0)
        placed = place_exchange(Collective.ALLTOALL, 0, nchannels, fabric, health)
    schedule, placement = placed.candidate.schedule, placed.placement
    flows = flows_of_exchange(schedule)
    assert found[0] == port_time(schedule, placement, homes, health, fabric.nodes, flows)
    assert found[1] == mean_time(flows, homes, health, fabric.nodes)
    assert placed.has_way == (found[0] is not None)
    assert (placed.load, placed.mean) == ((found[0] or 0) * WHOLE, found[1] * WHOLE)


def test_many_pairs_are_not_listed() -> None:
    """With 512 ranks and a lost NIC, a plan took 20 s; with 1,024, its edges took 50 MB."""
    health = Health(1, 8, bytes([0, *[WHOLE] * 8191]))
    placed = place_exchange(Collective.ALLTOALL, 0, 0, Fabric(range(8), 8), health)
    assert placed.placement.edges == ()
    assert placed.load == Fraction(1023, 1024) / 7
    assert placed.mean == Fraction(1023, 1024) * 1024 / 8191


def test_small_parts_of_many_pairs_are_spread_over_all_rails() -> None:
    health = Health.whole(9, 4)
    placement = place_exchange(Collective.ALLTOALL, 0, 0, Fabric(range(4), 4), health).placement
    numbers = placement.numbers(3, 9)
    assert numbers == {(0, peer): (3 + peer) % 4 for peer in range(9) if peer != 3}
    assert [placement.number(c, 3, 5) for c in range(5)] == [0, 4, 9, 14, 19]
    one = placement._replace(edges=(Edge(1, 3, 5, 6),))
    assert one.numbers(3, 9) == numbers | {(1, 5): 6}

"""The study of random clusters: a part of it, and checks of its bounds and its verdicts."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
from support.slow import slow_but

from r2ccl.algos import ring
from r2ccl.types import Collective


@pytest.fixture
def clusters(bench: Callable[[str], ModuleType]) -> ModuleType:
    return bench("clusters")


@pytest.mark.parametrize(
    ("ranks_per_node", "ndrawn"), slow_but([(1, 2), (2, 4)], [(1, 2), (2, 4), (1, 12), (2, 12)])
)
def test_choices_have_routes_and_come_close_to_the_bound(
    clusters: ModuleType, ranks_per_node: int, ndrawn: int
) -> None:
    for number in range(ndrawn):
        drawn = clusters.draw(11, number, ranks_per_node, 12)
        row = clusters.examine(drawn, has_others=True)
        assert not row["without_route"], row["is"]
        assert not row["refused"], row["is"]
        assert row["over_best"] < 1.25, row["is"]
        if drawn.nbytes >= clusters.LARGE_NBYTES:
            assert row["over_bound"] < 1.3, row["is"]


def test_a_draw_is_the_same_again(clusters: ModuleType) -> None:
    assert clusters.draw(3, 7, 1, 64) == clusters.draw(3, 7, 1, 64)
    assert clusters.draw(3, 7, 1, 64) != clusters.draw(3, 8, 1, 64)


def test_messages_without_a_rail_are_counted(clusters: ModuleType) -> None:
    rows = ((16, 0), (0, 16), (16, 16))
    apart = clusters.Cluster("", rows, 1, clusters.FABRICS[0], 1 << 20)
    assert clusters.without_route(ring.allreduce(3), apart) > 0
    assert clusters.is_joined(rows)
    assert not clusters.is_joined(rows[:2])


def test_the_bound_counts_what_a_port_can_use(clusters: ModuleType) -> None:
    """Rail 1 of node 0 has no peer."""
    rows = ((16, 16), (16, 0), (16, 0))
    drawn = clusters.Cluster("", rows, 1, clusters.FABRICS[0], 1 << 20)
    beta = clusters.FABRICS[0].beta
    assert list(map(sum, drawn.usable)) == [beta, beta, beta]
    assert drawn.bound_s(Collective.ALLREDUCE, 3 * beta) == pytest.approx(4)
    assert drawn.bound_s(Collective.BROADCAST, 3 * beta) == pytest.approx(3)


@pytest.mark.parametrize(
    "rows",
    [
        ((0, 2), (0, 14), (0, 8)),  # one rail, and no edge to spare
        ((16, 0), (16, 16), (0, 16)),
    ],
)
def test_rails_without_an_edge_to_spare_have_a_bound(
    clusters: ModuleType, rows: tuple[tuple[int, ...], ...]
) -> None:
    drawn = clusters.Cluster("", rows, 1, clusters.FABRICS[0], 1 << 20)
    whole = clusters.FABRICS[0].beta
    for collective in Collective:
        if collective != Collective.BARRIER:
            assert drawn.bound_s(collective, whole) > 0


def test_the_bound_of_two_whole_rails_in_a_chain(clusters: ModuleType) -> None:
    chain = clusters.Cluster("", ((16, 0), (16, 16), (0, 16)), 1, clusters.FABRICS[0], 1)
    whole = clusters.FABRICS[0].beta
    assert chain.bound_s(Collective.ALLREDUCE, whole) == pytest.approx(1)

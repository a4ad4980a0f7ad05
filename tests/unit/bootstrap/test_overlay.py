"""The overlay: few neighbors, short routes, and what is left of it when ranks are lost."""

from __future__ import annotations

import random

import pytest
from support.slow import slow_but

from r2ccl.bootstrap.overlay import Overlay, children, neighbors, parent
from r2ccl.errors import InvalidArgument


def hops(overlays: list[Overlay], start: int, destination: int) -> list[int] | None:
    """Return the route of a message by the ranks' own decisions; None if one knows no way."""
    route = [start]
    while route[-1] != destination:
        step = overlays[route[-1]].next_hop(destination)
        if step is None:
            return None
        assert step in overlays[route[-1]].neighbors
        route.append(step)
        assert len(route) - 1 <= overlays[start].max_hops
    return route


@pytest.mark.parametrize("nranks", range(1, 6))
def test_few_ranks_are_all_neighbors(nranks: int) -> None:
    for rank in range(nranks):
        assert neighbors(rank, nranks) == set(range(nranks)) - {rank}


@pytest.mark.parametrize("nranks", [7, 8, 31, 64, 1000])
def test_neighbors_are_few_and_mutual(nranks: int) -> None:
    near = [neighbors(rank, nranks) for rank in range(nranks)]
    assert all(len(each) <= 2 * nranks.bit_length() for each in near)
    assert all(rank in near[peer] for rank in range(nranks) for peer in near[rank])


@pytest.mark.parametrize("nranks", [2, 7, 8, 33, 64, 100])
def test_routes_have_at_most_log2_hops(nranks: int) -> None:
    overlays = [Overlay(rank, nranks) for rank in range(nranks)]
    for start in range(nranks):
        for destination in range(nranks):
            route = hops(overlays, start, destination)
            assert route is not None
            assert len(route) - 1 <= (nranks - 1).bit_length()


@pytest.mark.parametrize("nranks", [1, 2, 5, 8, 33, 64, 1000])
def test_the_tree_joins_neighbors_and_has_depth_log2(nranks: int) -> None:
    seen = {0}
    for rank in range(nranks):
        assert rank in seen
        for child in children(rank, nranks):
            assert parent(child) == rank
            assert child in neighbors(rank, nranks)
            seen.add(child)
        assert rank.bit_count() <= (nranks - 1).bit_length()
    assert seen == set(range(nranks))


@pytest.mark.parametrize("noverlays", slow_but([40], [40, 200]))
def test_routes_avoid_closed_ranks_or_there_is_none(noverlays: int) -> None:
    rng = random.Random(1)
    for _ in range(noverlays):
        nranks = rng.randrange(2, 40)
        lost = set(rng.sample(range(nranks), rng.randrange(nranks - 1)))
        left = set(rng.sample(range(nranks), rng.randrange(nranks - 1))) - lost
        overlays = [Overlay(rank, nranks) for rank in range(nranks)]
        for overlay in overlays:
            for rank in lost:
                overlay.lose(rank)
            for rank in left:
                overlay.leave(rank)
        ready = [rank for rank in range(nranks) if rank not in lost | left]
        for start in ready:
            for destination in ready:
                route = hops(overlays, start, destination)
                if route is not None:
                    assert set(route) <= set(ready)
                else:
                    assert destination in unreachable(nranks, start, lost | left)


def unreachable(nranks: int, start: int, closed: set[int]) -> set[int]:
    reached, border = {start}, [start]
    while border:
        for near in neighbors(border.pop(), nranks) - closed - reached:
            reached.add(near)
            border.append(near)
    return set(range(nranks)) - reached


def test_a_partition_cuts_off_all_of_the_other_side() -> None:
    nranks = 64
    here = set(range(5))
    for rank in here:
        overlay = Overlay(rank, nranks)
        across = {peer for each in here for peer in neighbors(each, nranks)} - here
        for peer in across:
            overlay.lose(peer)
        assert set(overlay.cut_off()) == set(range(nranks)) - here - across
        assert overlay.cut_off() == []


def test_a_single_loss_cuts_nobody_off() -> None:
    for nranks in (3, 8, 100):
        for lost in range(1, nranks):
            overlay = Overlay(0, nranks)
            overlay.lose(lost)
            assert overlay.cut_off() == []


def test_ranks_that_left_cut_nobody_off() -> None:
    overlay = Overlay(0, 64)
    for rank in overlay.neighbors:
        overlay.leave(rank)
    overlay.lose(3)
    assert overlay.cut_off() == []
    assert overlay.next_hop(40) is None
    assert overlay.is_closed(1)
    assert overlay.is_closed(3)
    assert not overlay.is_closed(40)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    with pytest.raises(InvalidArgument, match="allowed is 0 to 3"):
        neighbors(rank, 4)

"""What a port may be sent at once: bounded where several peers send to it, and never nothing."""

from __future__ import annotations

import pytest

from r2ccl.algos import ring, tree
from r2ccl.planning.lowering import Layout, limit_windows, lower
from r2ccl.schedule.ir import Schedule

SLICE = 1000


def layout_of(schedule: Schedule, rank: int) -> Layout:
    return lower(schedule.program(rank), 100_000, 1, slice_nbytes=SLICE, eager_nbytes=0)


def depths(layout: Layout) -> set[int]:
    return {way.depth for lane in layout.lanes for way in lane.recvs}


def test_a_port_that_one_peer_sends_to_is_not_bounded() -> None:
    layout = layout_of(ring.allreduce(4, 6), 1)
    assert limit_windows(layout, 3, SLICE) == layout


@pytest.mark.parametrize(("nbytes", "depth"), [(40 * SLICE, 10), (9 * SLICE, 2), (SLICE, 1)])
def test_links_to_one_port_share_what_it_may_be_sent(nbytes: int, depth: int) -> None:
    """Two chains, in which rank 1 hears from both neighbours: four links to its one port."""
    schedule = tree.allreduce([tree.chain(range(3))] * 2, "chain")
    layout = layout_of(schedule, 1)
    admitted = limit_windows(layout, 1, nbytes)
    assert depths(admitted) == {depth}
    assert [lane.steps for lane in admitted.lanes] == [lane.steps for lane in layout.lanes]
    assert depths(limit_windows(layout_of(schedule, 0), 1, nbytes)) == depths(layout), "a leaf"


def test_ports_are_told_apart_by_the_channels_home() -> None:
    """On two rails each chain has a port of its own: two links, not four."""
    layout = layout_of(tree.allreduce([tree.chain(range(3))] * 2, "chain"), 1)
    assert depths(limit_windows(layout, 2, 8 * SLICE)) == {4}

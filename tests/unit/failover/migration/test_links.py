"""Bandwidth measurement of slices that are lost with a path and sent again."""

import pytest
from support.failover_world import A, B, World

from r2ccl.failover.migration.link import Landing, LinkReport
from r2ccl.failover.migration.path import Announcement
from r2ccl.transport.base import Cleared, Confirmed, Fenced, Frame, Sent
from r2ccl.types import PathKey


class Sample:
    """A consumer whose slices measure the bandwidth."""

    is_bandwidth_sample = True

    def on_slice(self, landing: Landing, payload: memoryview | bytes | None) -> None: ...

    def on_released(self, index: int) -> None: ...

    def on_retired(self, index: int) -> None: ...

    def advance(self) -> None: ...


def clear(world: World, path: PathKey) -> None:
    """Have the peer announce the landing place of slice 0 on `path`."""
    world.transport.events = [Cleared(path, Frame(0, 0, 0, 0, 0), 4, "token")]
    world.progress.step()


@pytest.mark.parametrize("is_cleared_first", [False, True])
def test_a_slice_sent_again_is_in_flight_on_one_rail(is_cleared_first: bool) -> None:
    world = World(nwires=2)
    links, balance = world.links, world.links.balance
    assert balance is not None
    link = links.sender(1, 0)
    clear(world, A)
    links.send(link, memoryview(b"data"), False, Sample(), 0)
    world.fail(A)
    world.migration.on_fenced(Fenced(A))
    # The report comes over the control plane, the new landing place over rail 1.
    report = Announcement(A.rail, 0, "EIO", (LinkReport(0, 0, 0),))
    if is_cleared_first:
        clear(world, B)
        world.failover.on_message(1, report)
    else:
        world.failover.on_message(1, report)
        clear(world, B)
    assert [meter.under_way for meter in balance._meters.values()] == [0, 1]
    assert [repair.nbytes_replayed for repair in world.migration.log.repairs] == [4]
    world.transport.events = [Sent(B, 0, 0), Confirmed(B, 0, 1)]
    world.progress.step()
    assert [meter.under_way for meter in balance._meters.values()] == [0, 0]

"""Where channels ride while their home is down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from r2ccl.failover.migration.path import PathState
from r2ccl.failover.migration.routes import Routes
from r2ccl.types import PathKey

PEER, NRAILS, LOST = 1, 4, 1


def make_routes(channels: list[int]) -> tuple[Routes, Any]:
    """Routes to one peer whose links are made in this order."""
    links: Any = SimpleNamespace(
        senders={
            (PEER, channel): SimpleNamespace(route=None, waiting=list) for channel in channels
        },
        receivers={
            (PEER, channel): SimpleNamespace(route=None, unnamed=list) for channel in channels
        },
        confirm_all=lambda links: None,
    )
    links.paths = {
        key: SimpleNamespace(key=key, state=PathState.DOWN if key.rail == LOST else PathState.UP)
        for key in (PathKey(PEER, rail) for rail in range(NRAILS))
    }
    links.paths_to = lambda peer: tuple(links.paths.values())
    log: Any = None
    routes = Routes(links, homes=range(NRAILS), share=lambda key: 1.0, log=log)
    routes.go_home(PEER)
    return routes, links


def detours(links: Any, channels: range) -> list[int]:
    return sorted(
        links.senders[PEER, channel].route.rail for channel in channels if channel % NRAILS == LOST
    )


def test_a_lost_rails_channels_spread_evenly_over_the_others() -> None:
    _, links = make_routes(list(range(12)))
    assert detours(links, range(12)) == [0, 2, 3]


def test_links_of_schedules_that_ran_before_do_not_crowd_them() -> None:
    """Packed trees use links of high numbers, and some rails more than others."""
    others = [61, 77, 45, 29, 16, 20, 24, 28, 32, 36, 18, 22]
    _, links = make_routes([*others, *range(12)])
    assert detours(links, range(12)) == [0, 2, 3]


def test_a_detour_takes_the_rail_nobody_is_at_home_on() -> None:
    _, links = make_routes([0, 1, 2])
    assert links.senders[PEER, 1].route.rail == 3


def test_a_second_loss_goes_where_the_first_did_not() -> None:
    routes, links = make_routes([1, 2])
    first = links.senders[PEER, 1].route.rail
    assert first == 0
    links.senders[PEER, 2].route = links.receivers[PEER, 2].route = None
    routes.reroute(PEER)
    assert links.senders[PEER, 2].route.rail != first

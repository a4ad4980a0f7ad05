"""The checker accepts every schedule of up to 16 ranks, whatever is left of the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
from support.healths import health
from support.slow import slow_but

from r2ccl.config import ALGOS, Config
from r2ccl.failover.health.table import Health
from r2ccl.planning.allreduce_registry import FAMILIES, Terms, candidates, expand
from r2ccl.planning.collective_registry import collective_candidates
from r2ccl.planning.cost_model import Fabric, Rates
from r2ccl.planning.placement import Placement
from r2ccl.planning.planner import Planner
from r2ccl.schedule.check import check, check_order
from r2ccl.schedule.ir import Schedule
from r2ccl.testing.simulation import SCHEDULES
from r2ccl.types import (
    ORDERED_OP,
    PARTED,
    PREFIXES,
    REDUCTIONS,
    ROOTED,
    CallSignature,
    Collective,
    ReduceOp,
)

RAILS = 3
RATES = Rates(100_000, 25_000_000)
#: Numbers of ranks that always run.
QUICK = [4]
#: Sizes of one eager slice and of several slices.
SIZES = (1000, 1 << 26)


def healths(n: int) -> dict[str, Health]:
    """Return a whole network, and networks in which more and more is lost."""
    found = {
        "whole": health(n, RAILS),
        "a lost NIC": health(n, RAILS, r1n0=0),
        "a slow NIC": health(n, RAILS, **{f"r2n{n - 1}": 5}),
        "a straggler": health(n, RAILS, **{f"r0n{n // 2}": 0, f"r2n{n // 2}": 0}),
        "each lost one": health(n, RAILS, **{f"r{rank % RAILS}n{rank}": 0 for rank in range(n)}),
        "a rank without NICs": health(n, RAILS, r0n0=0, r1n0=0, r2n0=0),
    }
    # Ranks 0 and 1 have no common rail; the others, if any, have one with both.
    apart = {"r0n0": 0, "r1n0": 0, "r2n1": 0} if n > 1 else {}
    return found | {"two ranks apart": health(n, RAILS, **apart)}


def teams(n: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return the ranks of each node, with one rank in a node and, if possible, with two."""
    found: list[tuple[tuple[int, ...], ...]] = [tuple((rank,) for rank in range(n))]
    if n > 1 and n % 2 == 0:
        found.append(tuple((rank, rank + 1) for rank in range(0, n, 2)))
    return found


def terms_of(n: int) -> Iterator[Terms]:
    for of, nodes in product(healths(n).values(), teams(n)):
        shares = tuple(
            tuple(min(of.share(rank, rail) for rank in node) for rail in range(RAILS))
            for node in nodes
        )
        yield Terms(shares, nodes, 6)


class Once:
    """Check of schedules that passes over those it has already accepted."""

    def __init__(self, verify: Callable[[Schedule], None] = check) -> None:
        self._verify = verify
        self._accepted: set[tuple[object, ...]] = set()

    def __call__(self, schedule: Schedule) -> None:
        key = (schedule.digest(), schedule.collective, schedule.root)
        if key not in self._accepted:
            self._verify(schedule)
            self._accepted.add(key)


@pytest.mark.parametrize("n", slow_but(QUICK, range(2, 17)))
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_algorithm_is_accepted(name: str, n: int) -> None:
    for nchannels in (1, 2, 5):
        check(SCHEDULES[name](n, nchannels))


@pytest.mark.parametrize("n", slow_but(QUICK, range(1, 17)))
@pytest.mark.parametrize("name", [*FAMILIES, "spanning_tree"])
def test_every_candidate_of_an_allreduce_is_accepted(name: str, n: int) -> None:
    check_once = Once()
    for terms in terms_of(n):
        for found in candidates(name, terms):
            check_once(found.schedule)
            if found.is_among_nodes:
                check_once(expand(found.schedule, Placement((), ()), terms.teams)[0])


@pytest.mark.parametrize("n", slow_but(QUICK, range(1, 17)))
@pytest.mark.parametrize(
    "collective", sorted((*PARTED, *PREFIXES, Collective.BROADCAST, Collective.REDUCE))
)
def test_every_candidate_of_a_collective_is_accepted(collective: Collective, n: int) -> None:
    check_once = Once()
    for terms, root, keeps_order in product(terms_of(n), roots(collective, n), (False, True)):
        for found in collective_candidates(collective, root, terms, keeps_order=keeps_order):
            check_once(found.schedule)


def roots(collective: Collective, n: int) -> set[int]:
    return {0, n - 1} if collective in ROOTED else {0}


def settings(collective: Collective) -> list[Config]:
    """Return the settings that lead to different choices."""
    found = [Config(mode="balance"), Config(mode="auto")]
    if collective == Collective.ALLREDUCE:
        found += [Config(mode="r2cc"), *(Config(algo=algo) for algo in ALGOS if algo != "auto")]
    return found


def chosen(n: int, collective: Collective, op: int) -> Iterator[Schedule]:
    """Yield the planner's choices for all networks, settings, sizes and roots."""
    # A reduction in rank order has the same schedule whatever the settings.
    configs = [Config()] if op == ORDERED_OP else settings(collective)
    for of, nodes, config in product(healths(n).values(), teams(n), configs):
        of_node = [at for at, node in enumerate(nodes) for _ in node]
        fabric = Fabric(range(RAILS), RAILS, of_node if len(nodes) < n else (), RATES)
        planner = Planner(fabric, config)
        for nbytes, root, is_sample in product(SIZES, roots(collective, n), (False, True)):
            call = CallSignature(collective, 0, op, nbytes, root)
            yield planner.plan(call, nbytes, of, is_bandwidth_sample=is_sample).schedule


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", slow_but(QUICK, range(1, 17)))
@pytest.mark.parametrize("collective", Collective)
def test_every_choice_of_the_planner_is_accepted(collective: Collective, n: int) -> None:
    check_once, check_order_once = Once(), Once(check_order)
    for op in (ReduceOp.SUM, ORDERED_OP)[: 1 + (collective in REDUCTIONS)]:
        for schedule in chosen(n, collective, op):
            check_once(schedule)
            if op == ORDERED_OP:
                check_order_once(schedule)

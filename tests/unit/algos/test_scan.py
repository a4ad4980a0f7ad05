"""Scans: prefixes of the ranks, in rank order, for operations that do not commute."""

from __future__ import annotations

import numpy as np
import pytest
from support.slow import slow_but

from r2ccl.algos import scan
from r2ccl.errors import InvalidArgument
from r2ccl.planning.edge_loads import flows_of, flows_of_prefix_doubling
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure
from r2ccl.schedule.interpret import interpret
from r2ccl.schedule.ir import Schedule

SIZES = slow_but(range(1, 9), [*range(1, 18), 33])
FORMS = [(make, e) for make in (scan.doubling, scan.chain) for e in (False, True)]


@pytest.mark.parametrize(("make", "is_exclusive"), FORMS)
@pytest.mark.parametrize("n", SIZES)
def test_ranks_get_their_prefix_in_order(n: int, make, is_exclusive: bool) -> None:
    schedule: Schedule = make(n, 2, is_exclusive=is_exclusive)
    check(schedule)
    assert measure(schedule) == schedule.cost
    inputs = [np.array([f"{rank}." for _ in range(40)], object) for rank in range(n)]
    for in_place in (False, True)[: 1 + schedule.can_be_in_place]:
        outputs = interpret(schedule, inputs, np.add, in_place)
        for rank in range(int(is_exclusive), n):
            below = range(rank + (not is_exclusive))
            assert set(outputs[rank]) == {"".join(f"{each}." for each in below)}


@pytest.mark.parametrize(
    ("n", "inclusive", "exclusive"), [(2, 1, 1), (3, 1, 2), (4, 2, 2), (9, 3, 4), (16, 4, 5)]
)
def test_doubling_takes_logarithmic_steps(n: int, inclusive: int, exclusive: int) -> None:
    assert scan.doubling(n).cost.steps == inclusive
    assert scan.doubling(n, is_exclusive=True).cost.steps == exclusive
    assert scan.chain(n).cost.steps == n - 1
    assert scan.chain(n).cost.sent == 1


@pytest.mark.parametrize("is_exclusive", [False, True])
@pytest.mark.parametrize("n", range(1, 18))
def test_the_flows_of_doubling_are_those_of_its_ops(n: int, is_exclusive: bool) -> None:
    counted = flows_of(scan.doubling(n, 2, is_exclusive=is_exclusive))
    known = flows_of_prefix_doubling(n, 2, is_exclusive=is_exclusive)
    assert (sorted(known.flows), known.unit) == (list(counted.flows), counted.unit)


@pytest.mark.parametrize(("make", "is_exclusive"), FORMS)
def test_sizes_below_one_are_refused(make, is_exclusive: bool) -> None:
    for n, nchannels, wrong in ((0, 1, "nranks=0"), (-5, 1, "nranks=-5"), (2, 0, r"nchunks=\(\)")):
        with pytest.raises(InvalidArgument, match=wrong):
            make(n, nchannels, is_exclusive=is_exclusive)

"""The time for which a lost NIC interrupts a job does not grow with the ranks, in virtual time.

Ranks of a simulation do not wait for processors, so the times are those of the protocol alone.
"""

from __future__ import annotations

import random
import statistics

import pytest
from support.slow import slow_but

from r2ccl.testing.simulation import CallSpec, FailurePlan, NicDown, Workload, simulate


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("nranks", "nruns"), slow_but([(8, 3)], [(8, 3), (8, 50), (16, 50)]))
def test_an_interruption_does_not_grow_with_the_ranks(nranks: int, nruns: int) -> None:
    few, many = median_s(4, nruns), median_s(nranks, nruns)
    print(f"first replayed byte, median of {nruns}: {1e6 * few:.0f} us with 4 ranks, "
          f"{1e6 * many:.0f} us with {nranks}")  # fmt: skip
    assert many <= 1.2 * few


def median_s(nranks: int, nruns: int) -> float:
    """Return the median time from the loss of a random NIC to the first replayed byte."""
    calls = (CallSpec(200 * nranks, "ring", 2),)
    workload = Workload(nranks=nranks, nrails=2, calls=calls, eager_nbytes=0)
    nevents = simulate(workload).nevents
    draw, found = random.Random(nranks), []
    while len(found) < nruns:
        at = draw.randrange(nevents // 10, nevents * 3 // 4)
        down = NicDown(at, draw.randrange(nranks), draw.randrange(2))
        outcome = simulate(workload, FailurePlan((down,)), seed=at)
        assert outcome.is_clean
        if outcome.interruption_s:
            found.append(outcome.interruption_s)
    return statistics.median(found)

"""Rows of the table "cloudlab": the published run on 3 nodes of 2 ranks and 3 NICs, one lost.

The published ring is flat, over all 6 ranks, though only every other hop leaves a node; its
fault-free time is T0 here. R2CC-AllReduce's partial ring leaves out both ranks of the node that
lost the NIC. If it left out only one of them, that node would carry the partial ring too: the last
rows show the cost of this, which neither the published model nor the published figures include. The
library's own schedules run among nodes (`r2ccl.algos.hierarchy`), so they can be below T0.
"""

from __future__ import annotations

from collections.abc import Iterator

from degraded_cases import (
    LEFT,
    LOST,
    LOST_NIC,
    MEMBERS,
    NICS,
    PUBLISHED,
    PUBLISHED_CHANNELS,
    Case,
    cloudlab,
    cloudlab_bound,
    model_of,
    published,
)
from tables_rows import NBYTES, TOLERANCE, Row

from r2ccl.algos import r2cc_allreduce
from r2ccl.flowsim import Network, simulate
from r2ccl.schedule import Schedule

_SLICES = 64


def cloudlab_rows(quick: bool) -> Iterator[Row]:
    """Simulate the published schedules, and this library's."""
    chunks = (1, 16) if quick else tuple(PUBLISHED)
    cases = list(cloudlab(chunks))
    fault_free_s = _time_s(cases[0].schedule, is_whole=True)
    for case in cases:
        yield _row(case, fault_free_s)
    for k in chunks:
        left = [NICS] * (len(LEFT) * 2 - 1) + [NICS - 1]
        one_out = r2cc_allreduce.allreduce(left, k, LOST, PUBLISHED_CHANNELS)
        yield _row(Case("R2CC, one rank left out", one_out, None, k=k), fault_free_s)


def _row(case: Case, fault_free_s: float) -> Row:
    simulated = _time_s(case.schedule) / fault_free_s
    bound = float(cloudlab_bound())
    return Row(
        table="cloudlab",
        case=f"{LOST} of one node",
        schedule=case.name,
        n=len(LEFT),
        k=case.k,
        trees=case.trees,
        slices=_SLICES,
        bound=bound,
        paper=case.paper,
        source="CloudLab" if case.paper else "",
        model=None if case.model is None else float(case.model),
        simulated=simulated,
        over_bound=simulated / bound,
    )


def _time_s(schedule: Schedule, *, is_whole: bool = False) -> float:
    network = Network.uniform(len(LEFT), NICS, 1.0, ranks_per_node=len(MEMBERS[0]))
    return simulate(
        schedule,
        NBYTES,
        network if is_whole else network.without(*LOST_NIC),
        nslices=_SLICES,
        node_ports=True,
        tolerance=TOLERANCE,
    ).time_s


__all__ = ["cloudlab_rows", "model_of", "published"]

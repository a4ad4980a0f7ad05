"""Rows of the table "netlab": simulation of what `degraded.py` measures on 4 nodes of 4 NICs.

Node ports, no latency and no reduction time, so that only the communication pattern counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from degraded_cases import STRAGGLER, STRAGGLER_NICS, STRAGGLER_NODES, nics_left, straggler
from tables_rows import WHOLE, Row, fault_free, row_of

#: Slices per chunk: about as many as a channel of the planner's schedule has at 64 MiB.
_SLICES = 96


def netlab_rows(quick: bool) -> Iterator[Row]:
    """Simulate ring and packed trees; `quick` makes no difference."""
    for case, lost in STRAGGLER.items():
        bandwidths = [WHOLE // STRAGGLER_NICS * nics for nics in nics_left(lost)]
        for each in straggler(lost):
            yield row_of(
                each.schedule,
                bandwidths,
                slices=_SLICES,
                model=each.model and each.model * fault_free(STRAGGLER_NODES),
                table="netlab",
                case=case,
                schedule=each.name,
                trees=each.trees,
            )


__all__ = ["netlab_rows"]

"""4 nodes of 4 NICs that lose some: what `degraded.py` measures in a netlab, simulated.

Node ports, no latency, no time to reduce: what is left is the pattern itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from degraded_cases import STRAGGLER, STRAGGLER_NICS, STRAGGLER_NODES, nics_left, straggler
from tables_rows import WHOLE, Row, fault_free, row_of

#: About as many as a channel has of the planner's, of 64 MiB.
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

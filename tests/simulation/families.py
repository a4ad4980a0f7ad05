"""Families of failure plans that find each mistake in `mistakes`.

The plans were found at random, shrunk, then swept. A family is swept over time, so that it still
finds its mistake when the library's timing or the simulator's draws change.
"""

from __future__ import annotations

from collections.abc import Sequence

from r2ccl.testing.simulation import (
    CallSpec,
    CutPath,
    FailurePlan,
    Lose,
    NicDown,
    Noise,
    Workload,
)
from r2ccl.types import ReduceOp

_PAIR = Workload(nranks=2, nrails=2, calls=(CallSpec(300, channels=1),))
_LATE = Noise(late=80, late_ms=20)


def _eager(count: int, **others: int) -> Workload:
    call = CallSpec(count, channels=others.pop("channels", 1))
    return Workload(2, 2, (call, call), eager_nbytes=256, **others)  # type: ignore[arg-type]


def _cuts(ats: Sequence[int], **cut: object) -> list[FailurePlan]:
    return [FailurePlan((CutPath(at, 0, 1, at % 2, keep=at % 5, **cut),)) for at in ats]  # type: ignore[arg-type]


FAMILIES: dict[str, tuple[Workload, list[FailurePlan]]] = {
    "no fence": (_PAIR, _cuts(range(150, 500, 7), told=(0, 1), late_us=300)),
    "released when confirmed": (_PAIR, [FailurePlan()]),
    "released when retired": (_PAIR, _cuts(range(150, 500, 17), told=(0, 1))),
    "overwritten while sent": (
        Workload(4, 2, (CallSpec(60, "recursive_doubling", 1),)),
        [FailurePlan()] * 5,
    ),
    # Inner ranks of both trees add the data of two children.
    "reduced as it comes": (
        Workload(4, 2, (CallSpec(12, "double_binary_tree", 2),), slice_nbytes=8, eager_nbytes=0),
        [
            FailurePlan((CutPath(at, at % 4, (at + 1) % 4, at // 4 % 2, (at % 4,)),))
            for at in range(20, 300, 7)
        ],
    ),
    "divided when replayed": (
        Workload(3, 2, (CallSpec(12, op=ReduceOp.AVG),), slice_nbytes=8, eager_nbytes=0),
        [FailurePlan((CutPath(at, 0, 1, at % 2, (0, 1)),)) for at in range(20, 200, 7)],
    ),
    "early slices unreported": (
        Workload(2, 2, (CallSpec(300),), slice_nbytes=32, eager_nbytes=0, fabric="none"),
        [
            FailurePlan(
                (
                    CutPath(at, 0, 1, 0, (0, 1), keep=7, restore_us=50),
                    CutPath(at + 86, 0, 1, 1, (0, 1)),
                    CutPath(at + 212, 0, 1, 0, (0, 1), keep=3, restore_us=100),
                ),
                _LATE,
            )
            for at in range(150, 450, 3)
        ],
    ),
    "confirmations lost without a route": (
        Workload(3, 2, (CallSpec(120),), slice_nbytes=32, eager_nbytes=256, eager_slots=4),
        [
            FailurePlan(
                (CutPath(at, 0, 1, 0, (0, 1), restore_us=150_000),), Noise(late=80, late_ms=200)
            )
            for at in range(30, 100, 3)
        ],
    ),
    "credits of a report unnoticed": (
        _eager(150, eager_slots=1, channels=2),
        _cuts(range(60, 200, 3)),
    ),
    "replay confirmed early": (
        Workload(2, 3, (CallSpec(24, channels=2),), slice_nbytes=8, eager_nbytes=0),
        [
            FailurePlan(
                (CutPath(at, 0, 1, 0, (0,), keep=2), CutPath(at + gap, 0, 1, 2, (0, 1), keep=1))
            )
            for at in range(120, 160, 4)
            for gap in range(60, 90, 2)
        ],
    ),
    "only known routes watched": (
        _eager(300),
        [FailurePlan((CutPath(3, 0, 1, 1, is_stall=True), Lose(n))) for n in range(60, 110)],
    ),
    # The higher rank takes its end into use; the lower rank's dial never gets its answer.
    "stuck paths unwatched": (
        Workload(
            calls=(CallSpec(6, "recursive_doubling", 2), CallSpec(9, channels=2)), eager_nbytes=64
        ),
        [FailurePlan((CutPath(at, 1, 2, at % 2, is_stall=True),)) for at in range(60)],
    ),
    "epoch welcome once": (
        Workload(3, 1, (CallSpec(20, channels=1),), is_loud=False, fabric="none"),
        [FailurePlan((CutPath(at, 0, 2, 0, restore_us=50),)) for at in range(1, 40)],
    ),
    "alone since the last call": (
        Workload(2, 1, (CallSpec(40), CallSpec(40)), busy_ms=(6000, 0)),
        [
            FailurePlan((CutPath(at, 0, 1, 0, (0, 1), restore_us=300_000),))
            for at in range(300, 900, 15)
        ],
    ),
    "report must not be older": (
        Workload(2, 2, (CallSpec(600, channels=6),), slice_nbytes=32, eager_nbytes=64),
        [
            FailurePlan((NicDown(at, 0, at % 2, keep=3, restore_us=200),), _LATE)
            for at in range(300, 1100, 20)
        ],
    ),
}

__all__ = ["FAMILIES"]

"""Rows of the tables "bound" and "optcc": one straggler among n nodes, against the lower bound.

Node ports, no latency and no reduction time, so that only the communication pattern counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple, get_args

from tables_rows import LOSSES, Row, fault_free, row_of, straggler, time_of

from r2ccl.algos import leaf_ring, optcc, packed_trees, r2cc_allreduce, ring
from r2ccl.flowsim import Sharing
from r2ccl.schedule import Schedule

#: Trees and slices of the packing shown for every case.
TREES, SLICES = 28, 96

#: Settings (trees, slices) to search, in order of cost: fewest slices of all trees together first.
_GRID = sorted(
    (
        (trees, slices)
        for trees in (4, 8, 12, 16, 28, 56)
        for slices in (8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256)
    ),
    key=lambda setting: (setting[0] * setting[1], setting),
)


class _Candidate(NamedTuple):
    """Schedule, its closed form in units of D/B, and its parameters."""

    name: str
    schedule: Schedule
    model: Fraction
    slices: int
    k: int | None = None
    paper: str = ""


def limit(lost: Fraction) -> float:
    """Return the largest accepted ratio of packed trees' time to the lower bound."""
    return 1.05 if lost > Fraction(1, 3) else 1.03


def bound_rows(quick: bool) -> Iterator[Row]:
    """Simulate every schedule, for one straggler among 8, 16 and 64 nodes."""
    for n in (8, 16) if quick else (8, 16, 64):
        for lost in (Fraction(1, 3), Fraction(1, 2)) if quick else LOSSES:
            yield from _others(n, lost)
            yield from packed_rows(n, lost)


def packed_rows(n: int, lost: Fraction) -> Iterator[Row]:
    """Simulate packed trees in the fixed setting under either sharing, and in the cheapest one."""
    bandwidths = straggler(n, lost)
    for sharing in get_args(Sharing):
        yield _packed_row(n, lost, "packed trees", (TREES, SLICES), sharing)
    longest = limit(lost) * float(packed_trees.lower_bound(bandwidths))
    for trees, slices in _GRID:
        # Fair queues are a fast first filter; max-min decides.
        schedule = packed_trees.allreduce(bandwidths, trees)
        if time_of(schedule, bandwidths, slices, "fair_queue") > longest:
            continue
        row = _packed_row(n, lost, "packed trees, cheapest", (trees, slices), "max_min")
        if row.over_bound <= limit(lost):
            yield row
            return
    yield _packed_row(n, lost, "packed trees, finest tried", _GRID[-1], "max_min")


def _packed_row(
    n: int, lost: Fraction, name: str, setting: tuple[int, int], sharing: Sharing
) -> Row:
    bandwidths = straggler(n, lost)
    trees, slices = setting
    return row_of(
        packed_trees.allreduce(bandwidths, trees),
        bandwidths,
        slices=slices,
        model=_bound(n, lost),
        sharing=sharing,
        table="bound",
        case=str(lost),
        schedule=name,
        trees=trees,
    )


def optcc_rows(quick: bool) -> Iterator[Row]:
    """Simulate OptCC's own cases: half the bandwidth lost among 8 nodes, up to a third among 16."""
    half = Fraction(1, 2)
    for k in (8, 64) if quick else (1, 2, 4, 8, 16, 32, 64):
        yield _row("optcc", 8, half, _optcc(8, half, k))
    yield from (_row("optcc", 8, half, each) for each in _beside_optcc(8, half))
    for lost in (Fraction(1, 3),) if quick else LOSSES[1:-1]:
        for each in (_optcc(16, lost, 64), *_beside_optcc(16, lost)):
            yield _row("optcc", 16, lost, each)


def _others(n: int, lost: Fraction) -> Iterator[Row]:
    k = _segments(n)
    balance = _Candidate("ring, Balance", ring.allreduce(n), fault_free(n) / (1 - lost), 16)
    for each in (balance, _optcc(n, lost, k), *_beside_optcc(n, lost)):
        yield _row("bound", n, lost, each)


def _row(table: str, n: int, lost: Fraction, each: _Candidate) -> Row:
    return row_of(
        each.schedule,
        straggler(n, lost),
        slices=each.slices,
        model=each.model,
        table=table,
        case=str(lost),
        schedule=each.name,
        k=each.k,
        paper=each.paper,
        source="OptCC" if each.paper else "",
    )


def _optcc(n: int, lost: Fraction, k: int) -> _Candidate:
    # l (k + 1)/k, or the healthy nodes' own load if that is larger.
    model = max(Fraction(k + 1, k) / (1 - lost), Fraction(2 * n - 3, n - 1))
    # The paper reports only its best figures; few segments are here for comparison with the model.
    paper = "1.02-1.06" if lost and k == _segments(n) else ""
    schedule = optcc.allreduce(straggler(n, lost), k)
    return _Candidate("OptCC", schedule, model, _slices(n), k, paper)


def _beside_optcc(n: int, lost: Fraction) -> tuple[_Candidate, _Candidate]:
    k, bandwidths = _segments(n), straggler(n, lost)
    # Channels share a port equally, so their numbers set the shares of both rings.
    nchannels = ((1 - lost).numerator, lost.numerator or 1)
    schedule = r2cc_allreduce.allreduce(bandwidths, k, nchannels=nchannels)
    model = r2cc_allreduce.time_of(n, lost, k, r2cc_allreduce.split(n, lost, k))
    paper = "1.57" if (n, lost) == (8, Fraction(1, 2)) else ""
    leaves = leaf_ring.allreduce(bandwidths, k)
    return (
        _Candidate("R2CC-AllReduce", schedule, model, _slices(n), k, paper),
        _Candidate("leaf ring", leaves, _bound(n, lost), _slices(n), k),
    )


def _bound(n: int, lost: Fraction) -> Fraction:
    """Return T* in units of D/B."""
    return packed_trees.lower_bound(straggler(n, lost)) * straggler(n, Fraction(0))[0]


def _segments(n: int) -> int:
    """Return the number of segments k; a schedule has about k**2 * n ops."""
    return 64 if n <= 16 else 32


def _slices(n: int) -> int:
    """Return the slices per chunk of schedules with k(n - 1) chunks: fewer for larger n."""
    return {8: 16, 16: 8}.get(n, 2)


__all__ = ["SLICES", "TREES", "bound_rows", "limit", "optcc_rows", "packed_rows"]

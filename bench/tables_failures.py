"""Rows of the table "multi-failure": schedules on random patterns of lost NICs.

Node ports, no latency. A pattern depends only on the seed and its number, so the results do not
depend on how patterns are spread over processes.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

from tables_rows import Row, fault_free, time_of

from r2ccl.algos import leaf_ring, nested_rings, packed_trees, ring
from r2ccl.schedule import Schedule

NNODES = 16
NICS = 8

#: Probabilities that a node loses 0, 1, 2, 3 or 4 of its NICs, independent of other nodes.
PROBABILITIES = (0.5, 0.125, 0.125, 0.125, 0.125)

PACKED = "packed trees"


class Setting(NamedTuple):
    """Parameters of a schedule; `build` takes one bandwidth per node."""

    build: Callable[[Sequence[int]], Schedule]
    slices: int
    k: int | None = None
    trees: int | None = None


#: Schedules that adapt to several stragglers, and the ring, which adapts to none. OptCC and
#: R2CC-AllReduce adapt to one only.
SETTINGS = {
    PACKED: Setting(lambda each: packed_trees.allreduce(each, 28), 192, trees=28),
    "leaf ring": Setting(lambda each: leaf_ring.allreduce(each, 32), 4, k=32),
    "nested rings": Setting(lambda each: nested_rings.allreduce(each, nsegments=4), 8, k=4),
    "ring, Balance": Setting(lambda each: ring.allreduce(len(each)), 16),
}


class Verdict(NamedTuple):
    """Result of one pattern.

    Attributes
    ----------
    number : int
        Number of the draw.
    alive : tuple of int
        Number of working NICs of each node.
    times : dict of str to float
        Simulated time of each schedule, as a multiple of the lower bound.
    """

    number: int
    alive: tuple[int, ...]
    times: dict[str, float]

    @property
    def bound(self) -> float:
        """Lower bound T*/T0."""
        return float(packed_trees.lower_bound(self.alive) * NICS / fault_free(NNODES))

    @property
    def best_other(self) -> float:
        """Time of the best schedule besides packed trees, as a multiple of the lower bound."""
        return min(time for name, time in self.times.items() if name != PACKED)

    @property
    def over_other(self) -> float:
        """Packed trees' time divided by that of the best other schedule."""
        return self.times[PACKED] / self.best_other

    def flat(self, seed: int) -> dict[str, Any]:
        """Return the JSON object of this pattern."""
        return {
            "table": "multi-failure pattern",
            "seed": seed,
            "number": self.number,
            "alive": " ".join(map(str, self.alive)),
            "bound": self.bound,
            **{f"{name}, sim/bound": time for name, time in self.times.items()},
            "measured": None,
        }


def draw(seed: int, number: int) -> tuple[int, ...]:
    """Draw a pattern; return the number of working NICs of each node."""
    chance = random.Random(f"{seed}/{number}")
    lost = chance.choices(range(len(PROBABILITIES)), PROBABILITIES, k=NNODES)
    return tuple(NICS - each for each in lost)


def judge(seed: int, number: int) -> Verdict:
    """Simulate every schedule on one pattern."""
    alive = draw(seed, number)
    bound = float(packed_trees.lower_bound(alive))
    times = {
        name: time_of(setting.build(alive), alive, setting.slices) / bound
        for name, setting in SETTINGS.items()
    }
    return Verdict(number, alive, times)


def judge_all(seed: int, numbers: Sequence[int], njobs: int, *, mpi: bool = False) -> list[Verdict]:
    """Simulate patterns in `njobs` processes, in this process if that is 1, or in an MPI job.

    Raises
    ------
    ImportError
        If `mpi` is true and mpi4py is not installed.
    """
    seeds = [seed] * len(numbers)
    if njobs == 1 and not mpi:
        return list(map(judge, seeds, numbers))
    with executor(njobs, mpi=mpi) as pool:
        return list(pool.map(judge, seeds, numbers, chunksize=4))


def executor(njobs: int, *, mpi: bool) -> Executor:
    if mpi:
        from mpi4py.futures import MPIPoolExecutor

        pool: Executor = MPIPoolExecutor()
        return pool
    # Spawned processes: compiled loops and threads may not survive a fork.
    return ProcessPoolExecutor(njobs, mp_context=get_context("spawn"))


def summary(verdicts: Sequence[Verdict]) -> Iterator[Row]:
    """Yield the median and the worst pattern of every schedule."""
    for name, setting in SETTINGS.items():
        ranked = sorted(verdicts, key=lambda verdict: verdict.times[name])
        middle, worst = ranked[(len(ranked) - 1) // 2], ranked[-1]
        yield _row(name, setting, f"median, pattern {middle.number}", middle)
        yield _row(name, setting, f"worst, pattern {worst.number}", worst)


def _row(name: str, setting: Setting, case: str, verdict: Verdict) -> Row:
    return Row(
        table="multi-failure",
        case=case,
        schedule=name,
        n=NNODES,
        k=setting.k,
        trees=setting.trees,
        slices=setting.slices,
        bound=verdict.bound,
        model=_model(name, verdict),
        simulated=verdict.bound * verdict.times[name],
        over_bound=verdict.times[name],
    )


def _model(name: str, verdict: Verdict) -> float | None:
    """Return T/T0 of the closed form, or None if the schedule has none for every pattern."""
    if name == PACKED:
        return verdict.bound
    return NICS / min(verdict.alive) if name == "ring, Balance" else None


def notes(seed: int, verdicts: Sequence[Verdict]) -> list[str]:
    """Describe how patterns were drawn, the worst ones, and where another schedule was faster."""
    worst = max(verdicts, key=lambda verdict: verdict.times[PACKED])
    behind = max(verdicts, key=lambda verdict: verdict.over_other)
    middle = statistics.median(verdict.over_other for verdict in verdicts)
    over = sum(verdict.over_other > 1.03 for verdict in verdicts)
    chances = ", ".join(f"{nics} with {chance}" for nics, chance in enumerate(PROBABILITIES))
    return [
        f"seed {seed}, {len(verdicts)} patterns: each of {NNODES} nodes loses of its {NICS} NICs "
        f"{chances}; every row is one pattern",
        f"packed trees' worst pattern, {worst.number}, NICs left: {' '.join(map(str, worst.alive))}"
        f"; {worst.times[PACKED]:.3f} of the bound",
        f"packed trees over the best other schedule: median {middle:.3f}, "
        f"worst {behind.over_other:.3f}, "
        f"pattern {behind.number}, NICs left: {' '.join(map(str, behind.alive))}; above 1.03 in "
        f"{over} of {len(verdicts)}",
    ]


__all__ = [
    "NICS",
    "NNODES",
    "PROBABILITIES",
    "Verdict",
    "draw",
    "executor",
    "judge",
    "judge_all",
    "notes",
    "summary",
]

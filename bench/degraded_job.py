"""A job of the degraded bench: what its ranks are told, what they say, and what that comes to.

A call's time is from when the last rank begins it until the last one has its result; of calls back
to back, that by their number.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from degraded_cases import Nic

from r2ccl.testing import Action, Fault, FaultPlan
from r2ccl.testing.netlab import Lab

#: The library's own choice, and once more, to see how much two readings of one thing differ.
AUTO, AGAIN = "auto", "auto again"
#: Phases of a job: before NICs are lost, and after.
HEALTHY, DEGRADED = "healthy", "degraded"

_JOB_TIMEOUT_S = 600.0
#: Of what ranks have written when one of them ends with an error.
_LAST_WORDS = 2000


class Failure(Exception):
    """A rank ended with an error."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of a job do.

    Attributes
    ----------
    what : str
        Whose cases the names are.
    sizes : tuple of int
        Bytes of the allreduces.
    rounds : int
        How often each reading is taken.
    batch_nbytes : int
        Calls of a size go on back to back until they have moved so much: the shapers' buckets have
        saved up some bytes while the ranks did something else.
    healthy, degraded : tuple of str
        What runs before NICs are lost, and after.
    lost : tuple of Nic
        Lost after the first part.
    ranks_per_node : int
    """

    what: str
    sizes: tuple[int, ...]
    rounds: int
    batch_nbytes: int
    healthy: tuple[str, ...] = ()
    degraded: tuple[str, ...] = ()
    lost: tuple[Nic, ...] = ()
    ranks_per_node: int = 1

    def ncalls(self, nbytes: int) -> int:
        """Return how many calls of a size one reading is of."""
        return max(1, self.batch_nbytes // nbytes)

    @property
    def ports_lost(self) -> int:
        """Rails that ranks lose."""
        return len(self.lost) * self.ranks_per_node

    @property
    def healthy_ops(self) -> int:
        """Collectives of each rank with all NICs: barriers, calls that do not count, calls."""
        calls = sum(2 + self.rounds * (1 + self.ncalls(nbytes)) for nbytes in self.sizes)
        return len(self.healthy) * calls

    def plan(self) -> FaultPlan | None:
        """Return the faults of the job."""
        faults = [
            Fault(action=Action.NIC_DOWN, node=node, rail=rail, at_op=self.healthy_ops)
            for node, rail in self.lost
        ]
        return FaultPlan(faults) if faults else None


class Reading(msgspec.Struct, frozen=True):
    """What one rank's clock said before and after some calls, and what processor time they took."""

    phase: str
    name: str
    nbytes: int
    begun_s: float
    ended_s: float
    cpu_s: float


class Prediction(msgspec.Struct, frozen=True):
    """What the planner expects of a candidate, and whether it is the one it takes."""

    name: str
    nbytes: int
    seconds: float
    is_choice: bool


class Said(msgspec.Struct, frozen=True):
    """The last line of a rank; ``shares`` is the health it knew in the end."""

    readings: list[Reading]
    predictions: list[Prediction]
    shares: list[int]


class Times(NamedTuple):
    """The times of one thing in a job, round by round.

    Attributes
    ----------
    seconds : list of float
        Of one call.
    cores : list of float
        Processors that the ranks kept busy meanwhile.
    """

    seconds: list[float]
    cores: list[float]

    @property
    def median(self) -> float:
        """Median time of a call."""
        return statistics.median(self.seconds)


class Outcome(NamedTuple):
    """What a job found, by phase, name and size; what rank 0 predicted, and the shares it ended."""

    times: dict[tuple[str, str, int], Times]
    predictions: list[Prediction]
    shares: list[int]


def run_job(lab: Lab, task: Task, env: dict[str, str] | None = None) -> Outcome:
    """Run one job, and give the lab its NICs back.

    Raises
    ------
    Failure
        A rank ended with an error.
    """
    program = str(Path(__file__).with_name("degraded_rank.py"))
    lines: list[str] = []
    plan = task.plan()
    results = lab.run(
        [sys.executable, program, msgspec.json.encode(task).decode()],
        env=env,
        plan=plan,
        timeout_s=_JOB_TIMEOUT_S,
        sink=lines.append,
    )
    lab.restore()
    failed = [each for each in results if each.returncode]
    if failed:
        raise Failure(f"rank {failed[0].rank}: {failed[0].output[-_LAST_WORDS:]}")
    if plan is not None:
        plan.assert_all_fired()
    said = [msgspec.json.decode(each.output.splitlines()[-1], type=Said) for each in results]
    return Outcome(put_together(task, said), said[0].predictions, said[0].shares)


def put_together(task: Task, said: Sequence[Said]) -> dict[tuple[str, str, int], Times]:
    """Make the times of calls of what every rank read."""
    found: dict[tuple[str, str, int], Times] = {}
    for readings in zip(*(each.readings for each in said), strict=True):
        first = readings[0]
        took_s = max(each.ended_s for each in readings) - max(each.begun_s for each in readings)
        times = found.setdefault((first.phase, first.name, first.nbytes), Times([], []))
        times.seconds.append(took_s / task.ncalls(first.nbytes))
        times.cores.append(sum(each.cpu_s for each in readings) / took_s)
    return found


__all__ = [
    "AGAIN",
    "AUTO",
    "DEGRADED",
    "HEALTHY",
    "Failure",
    "Outcome",
    "Prediction",
    "Reading",
    "Said",
    "Task",
    "Times",
    "put_together",
    "run_job",
]

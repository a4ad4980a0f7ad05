"""Run a job of the degraded bench, and combine the readings of its ranks.

The time of a call is from when the last rank begins it until the last rank has its result. For
calls back to back it is the time of all, divided by their number.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from degraded_cases import Nic
from labs import last_lines

from r2ccl.testing import Action, Fault, FaultPlan
from r2ccl.testing.netlab import Lab

#: The library's own choice, measured twice to see how much two series of one schedule differ.
AUTO, AGAIN = "auto", "auto again"
#: Phases of a job: before NICs are lost, and after.
HEALTHY, DEGRADED = "healthy", "degraded"

_JOB_TIMEOUT_S = 600.0


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Work of the ranks of a job.

    Attributes
    ----------
    what : str
        Study that the names of cases belong to.
    sizes : tuple of int
        Bytes of the buffers.
    rounds : int
        Number of readings of each case.
    batch_nbytes : int
        Bytes that the back-to-back calls of a reading move at least. The shapers' buckets fill
        while the ranks do something else; a large batch makes this negligible.
    healthy, degraded : tuple of str
        Cases to run before NICs are lost, and after.
    lost : tuple of Nic
        NICs lost after the first phase.
    ranks_per_node : int
    ops_per_call : int
        Number of collectives of the network that one call counts as.
    """

    what: str
    sizes: tuple[int, ...]
    rounds: int
    batch_nbytes: int
    healthy: tuple[str, ...] = ()
    degraded: tuple[str, ...] = ()
    lost: tuple[Nic, ...] = ()
    ranks_per_node: int = 1
    ops_per_call: int = 1

    def ncalls(self, nbytes: int) -> int:
        """Return the number of calls in one reading of this size."""
        return max(1, self.batch_nbytes // nbytes)

    @property
    def ports_lost(self) -> int:
        """Number of rails lost, summed over all ranks."""
        return len(self.lost) * self.ranks_per_node

    @property
    def healthy_ops(self) -> int:
        """Collectives of each rank while all NICs work: barriers, warm-up and timed calls."""
        barriers = (1 + self.rounds) * len(self.sizes)
        calls = sum(1 + self.rounds * self.ncalls(nbytes) for nbytes in self.sizes)
        calls *= self.ops_per_call
        # Messages are no collectives.
        return sum(barriers + (0 if name == "sendrecv" else calls) for name in self.healthy)

    def plan(self) -> FaultPlan | None:
        """Return the faults of the job."""
        faults = [
            Fault(action=Action.NIC_DOWN, node=node, rail=rail, at_op=self.healthy_ops)
            for node, rail in self.lost
        ]
        return FaultPlan(faults) if faults else None


class Reading(msgspec.Struct, frozen=True):
    """Begin and end of the calls of a reading on one rank's clock, and their processor time."""

    phase: str
    name: str
    nbytes: int
    begun_s: float
    ended_s: float
    cpu_s: float


class Prediction(msgspec.Struct, frozen=True):
    """Predicted time of a candidate, and whether the planner chooses it."""

    name: str
    nbytes: int
    seconds: float
    is_choice: bool


class Said(msgspec.Struct, frozen=True):
    """Last output line of a rank; ``shares`` is the health it knew at the end."""

    readings: list[Reading]
    predictions: list[Prediction]
    shares: list[int]


class Times(NamedTuple):
    """Times of one case in a job, round by round.

    Attributes
    ----------
    seconds : list of float
        Time of one call.
    cores : list of float
        Processors that the ranks kept busy meanwhile.
    """

    seconds: list[float]
    cores: list[float]

    @property
    def median(self) -> float:
        """Median time of a call, in seconds."""
        return statistics.median(self.seconds)


class Outcome(NamedTuple):
    """Times by phase, name and size, predictions of rank 0, and its health shares at the end."""

    times: dict[tuple[str, str, int], Times]
    predictions: list[Prediction]
    shares: list[int]


def run_job(lab: Lab, task: Task, env: dict[str, str] | None = None) -> Outcome:
    """Run one job, then restore the lab's NICs.

    Raises
    ------
    Failure
        If a rank ended with an error.
    """
    program = Path(__file__).with_name("degraded_rank.py")
    lines = last_lines(
        lab, program, msgspec.json.encode(task).decode(),
        env=env, plan=task.plan(), timeout_s=_JOB_TIMEOUT_S,
    )  # fmt: skip
    said = [msgspec.json.decode(line, type=Said) for line in lines]
    return Outcome(put_together(task, said), said[0].predictions, said[0].shares)


def put_together(task: Task, said: Sequence[Said]) -> dict[tuple[str, str, int], Times]:
    """Return the times of calls from the readings of all ranks."""
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
    "Outcome",
    "Prediction",
    "Reading",
    "Said",
    "Task",
    "Times",
    "put_together",
    "run_job",
]

"""Run one rank of the degraded bench: allreduces with all NICs, then without the lost ones.

The first argument is a `degraded_job.Task` in JSON. All calls of a reading run the same schedule.
Schedules and sizes take turns, so that a disturbance of the machine affects all of them. The last
result of every reading is checked, element by element. The last output line is a
`degraded_job.Said`.
"""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from degraded_cases import BALANCE, Nic, cloudlab, straggler
from degraded_job import AGAIN, AUTO, DEGRADED, HEALTHY, Prediction, Reading, Said, Task

import r2ccl
from r2ccl.schedule import Schedule

Array = np.ndarray[Any, np.dtype[np.float32]]
#: Function that runs one allreduce of its first argument into its second.
Run = Callable[[Array, Array], Any]
#: Functions to time, by case name and size in bytes.
Runs = dict[tuple[str, int], Run]

#: Seconds that ranks wait until all know which NICs are lost.
_PATIENCE_S = 20.0
#: Candidates predicted to take more than this many times the choice's time are not run.
_HOPELESS = 1.5


class Bench:
    """Timed calls of one rank, with their readings of the clock.

    Two inputs alternate, so that a lost slice shows as the previous call's result. A misplaced
    slice shows because neighbouring elements differ.
    """

    def __init__(self, comm: r2ccl.Communicator, task: Task) -> None:
        self.readings: list[Reading] = []
        self._comm = comm
        self._task = task
        n, largest = comm.nranks, max(task.sizes)
        ramp = np.arange(largest // 4, dtype=np.float32) % 1021
        self._inputs = [ramp * (comm.rank + 1) + turn for turn in range(2)]
        self._sums = [ramp * (n * (n + 1) // 2) + n * turn for turn in range(2)]
        self._out = np.empty_like(ramp)
        self._turn = 0

    def run_all(self, phase: str, runs: Runs) -> None:
        """Time every run once per round; the first round has one call each and does not count."""
        for number in range(1 + self._task.rounds):
            for (name, nbytes), run in runs.items():
                ncalls = self._task.ncalls(nbytes) if number else 1
                self._comm.barrier()
                reading = self._time(run, nbytes // 4, ncalls)
                if number:
                    self.readings.append(Reading(phase, name, nbytes, *reading))

    def _time(self, run: Run, count: int, ncalls: int) -> tuple[float, float, float]:
        """Run the calls and check the last result; return begin, end and processor time."""
        out = self._out[:count]
        before = _processor_s()
        begun_s = time.monotonic()
        for _ in range(ncalls):
            self._turn ^= 1
            run(self._inputs[self._turn][:count], out)
        ended_s = time.monotonic()
        cpu_s = _processor_s() - before
        wrong = np.flatnonzero(out != self._sums[self._turn][:count])
        if len(wrong):
            raise SystemExit(f"{len(wrong)} of {count} elements are wrong, first index {wrong[0]}")
        return begun_s, ended_s, cpu_s

    def wait_for_loss(self) -> None:
        """Wait until every rank knows the lost NICs of the task, and no others."""
        until_s = time.monotonic() + _PATIENCE_S
        said, heard = np.zeros(2, np.float32), np.zeros(2, np.float32)
        while not heard[0]:
            shares = self._comm.known_health().health.shares
            is_late = time.monotonic() > until_s
            said[:] = shares.count(0) == self._task.ports_lost, not is_late
            self._comm.allreduce(said, heard, r2ccl.ReduceOp.MIN)
            if not heard[1]:
                raise SystemExit(
                    f"the lost NICs are not agreed on after {_PATIENCE_S:g} s; "
                    f"rank {self._comm.rank} knows {shares!r}"
                )


def _processor_s() -> float:
    """Return the processor time of all threads of this process, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def runs_of(
    comm: r2ccl.Communicator, names: Sequence[str], task: Task, lost: Sequence[Nic]
) -> Runs:
    """Return the runs of the cases in `names`, made for the NICs in `lost`."""
    cases = cloudlab() if task.what == "cloudlab" else straggler(lost)
    found = {case.key: own_run(comm, case.schedule) for case in cases}
    if task.what == "straggler":
        found[BALANCE] = comm.allreduce  # R2CC_ALGO makes it run rings
    return {(name, nbytes): found[name] for nbytes in task.sizes for name in names}


def candidates_of(comm: r2ccl.Communicator, task: Task) -> tuple[Runs, list[Prediction]]:
    """Return runs of the planner's choice for each size, twice, and of the other candidates.

    The other candidates are placed edge by edge, rings included. The planner would place a ring as
    a whole.
    """
    runs: Runs = {}
    predictions = []
    for nbytes in task.sizes:
        explanation = comm.explain(nbytes)
        chosen, others = explanation.chosen, explanation.others
        runs[AUTO, nbytes] = runs[AGAIN, nbytes] = comm.allreduce
        predictions.append(Prediction(chosen.name, nbytes, chosen.predicted_ns / 1e9, True))
        for other in others:
            if other.predicted_ns <= _HOPELESS * chosen.predicted_ns:
                runs[other.name, nbytes] = own_run(comm, other.schedule)
                seconds = other.predicted_ns / 1e9
                predictions.append(Prediction(other.name, nbytes, seconds, False))
    return runs, predictions


def own_run(comm: r2ccl.Communicator, schedule: Schedule) -> Run:
    """Return a function that runs `schedule`."""
    return lambda x, out: comm.run_schedule(schedule, x, out)


def main() -> None:
    """Run the task, and print the readings."""
    logging.getLogger("r2ccl").setLevel(logging.ERROR)  # lost rails are intended
    task = msgspec.json.decode(sys.argv[1], type=Task)
    with r2ccl.init() as comm:
        bench = Bench(comm, task)
        bench.run_all(HEALTHY, runs_of(comm, task.healthy, task, ()))
        if task.lost:
            bench.wait_for_loss()
        runs = runs_of(comm, task.degraded, task, task.lost)
        predictions: list[Prediction] = []
        if task.what == "planner":
            runs, predictions = candidates_of(comm, task)
        bench.run_all(DEGRADED, runs)
        shares = list(comm.known_health().health.shares)
    print(msgspec.json.encode(Said(bench.readings, predictions, shares)).decode(), flush=True)


if __name__ == "__main__":
    main()

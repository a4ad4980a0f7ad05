"""Run one rank of the degraded bench: calls with all NICs, then without the lost ones.

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
from typing import Any, NamedTuple

import msgspec
import numpy as np
from degraded_cases import BALANCE, Nic, cloudlab, straggler
from degraded_job import AGAIN, AUTO, DEGRADED, HEALTHY, Prediction, Reading, Said, Task

import r2ccl
from r2ccl.cli.perf.calls import call_of
from r2ccl.cli.perf.cases import (
    UNTOUCHED,
    Array,
    Buffers,
    Case,
    count_different,
    expected,
    make_inputs,
    place,
)
from r2ccl.cli.perf.forms import FORMS
from r2ccl.schedule import Schedule

#: Function that runs one call on its first argument, with its second for the result.
Run = Callable[[Array, Array], Any]
#: Functions to time, by case name and size in bytes.
Runs = dict[tuple[str, int], Run]

#: Studies whose cases are names of collectives.
_DRAWN = ("collectives", "levels")
#: Seconds that ranks wait until all know which NICs are lost.
_PATIENCE_S = 20.0
#: Candidates predicted to take more than this many times the choice's time are not run.
_HOPELESS = 1.5


class Data(NamedTuple):
    """Two inputs of a call, their results, and the memory of the result (None: no result)."""

    inputs: Sequence[Any]
    wanted: Sequence[Any]
    out: Any


class Ramps:
    """Inputs of allreduces of all sizes.

    A lost slice shows as the previous call's result, because two inputs alternate. A misplaced
    slice shows because neighbouring elements differ.
    """

    def __init__(self, comm: r2ccl.Communicator, largest: int) -> None:
        n = comm.nranks
        ramp = np.arange(largest // 4, dtype=np.float32) % 1021
        self._inputs = [ramp * (comm.rank + 1) + turn for turn in range(2)]
        self._sums = [ramp * (n * (n + 1) // 2) + n * turn for turn in range(2)]
        self._out = np.empty_like(ramp)

    def of(self, name: str, nbytes: int) -> Data:
        """Return the data of an allreduce of `nbytes`."""
        count = nbytes // 4
        inputs, sums = ([each[:count] for each in both] for both in (self._inputs, self._sums))
        return Data(inputs, sums, self._out[:count])


class Draws:
    """Random inputs of collectives by name; results are erased before every reading."""

    def __init__(self, comm: r2ccl.Communicator) -> None:
        self._comm = comm
        self._made: dict[tuple[str, int], Data] = {}

    def of(self, name: str, nbytes: int) -> Data:
        """Return the data of a collective on `nbytes`."""
        if (name, nbytes) not in self._made:
            case, rank = case_of(self._comm, name, nbytes), self._comm.rank
            inputs = make_inputs(case, (nbytes,))
            x, out = place(case, rank, inputs[rank], in_place=False)
            wanted = expected(case, inputs, rank)
            if wanted is None and out is not None:
                wanted = out.copy()  # must not change
            self._made[name, nbytes] = Data([x, x], [wanted, wanted], out)
        return self._made[name, nbytes]


def case_of(comm: r2ccl.Communicator, name: str, nbytes: int) -> Case:
    """Return the case of a collective, which sums and has root 0."""
    return Case.of(FORMS[name], comm.nranks, nbytes, np.dtype(np.float32))


class Bench:
    """Timed calls of one rank, with their readings of the clock."""

    def __init__(self, comm: r2ccl.Communicator, task: Task) -> None:
        self.readings: list[Reading] = []
        self._comm = comm
        self._task = task
        self._data = Draws(comm) if task.what in _DRAWN else Ramps(comm, max(task.sizes))
        self._turn = 0

    def run_all(self, phase: str, runs: Runs) -> None:
        """Time every run once per round; the first round has one call each and does not count."""
        for number in range(1 + self._task.rounds):
            for (name, nbytes), run in runs.items():
                ncalls = self._task.ncalls(nbytes) if number else 1
                data = self._data.of(name, nbytes)
                if data.out is not None:
                    data.out.fill(UNTOUCHED)
                self._comm.barrier()
                reading = self._time(run, data, ncalls)
                if number:
                    self.readings.append(Reading(phase, name, nbytes, *reading))

    def _time(self, run: Run, data: Data, ncalls: int) -> tuple[float, float, float]:
        """Run the calls and check the last result; return begin, end and processor time."""
        before = _processor_s()
        begun_s = time.monotonic()
        for _ in range(ncalls):
            self._turn ^= 1
            run(data.inputs[self._turn], data.out)
        ended_s = time.monotonic()
        cpu_s = _processor_s() - before
        if data.out is not None:
            wrong = count_different(data.out, data.wanted[self._turn])
            if wrong:
                raise SystemExit(f"{wrong} of {len(data.out)} elements are wrong")
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
    if task.what in _DRAWN:
        return {
            (name, nbytes): collective_run(comm, name) for nbytes in task.sizes for name in names
        }
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


def collective_run(comm: r2ccl.Communicator, name: str) -> Run:
    """Return a function that runs a collective by name."""

    def run(x: Array, out: Array) -> None:
        nbytes = max(0 if each is None else each.nbytes for each in (x, out))
        call_of(comm, case_of(comm, name, nbytes), Buffers(x, out))()

    return run


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

"""Measures allreduces of ranks that share a GPU: r2ccl and NCCL.

r2ccl runs over CUDA IPC, over TCP rails, and over TCP rails of which one is cut. Each of these
configurations, and NCCL, is a *way*. The ranks of all ways are alive at once; they sleep while
another way is measured. A round measures every way at every size and element type, one after
another; the order changes from round to round. Each measurement begins with an allreduce of fresh
inputs, of which every element is verified. Exact sums and sums of random floats alternate from
round to round.

A measured time is that of a loop of calls in place, divided by the number of calls, on the slowest
rank. With a cut rail, it is the time of one call, during which a rank loses a rail; the rail works
again before the next cut. The result of this call is compared bit for bit with that of the same
inputs without a cut.

Invariant: when `Collectives.measure` returns, all ranks have been ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import msgspec
from gpu_job import Cut, Job, Loop, Measured, Way
from gpu_outcome import Budget
from jobs import Hung, Unavailable

from r2ccl.cli.values import format_size
from r2ccl.config import Config
from r2ccl.testing import Action, Fault, FaultPlan

_NRAILS = 2
#: Settings of both TCP ways. Calls with and without a cut need the same plan to give the same bits:
#: rings, on rails that count as equal.
_RAILS = {
    "R2CC_IPC": "0",
    "R2CC_RAILS": str(_NRAILS),
    "R2CC_ALGO": "ring",
    "R2CC_BALANCE": "0",
    # Use a rail again as soon as it answers, even if it was cut several times.
    "R2CC_QUARANTINE_CAP_S": "0",
}
_SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_DEBUG": "WARN",
}
IPC = Way("r2ccl, CUDA IPC", "r2ccl", {"R2CC_IPC": "1"})
TCP = Way("r2ccl, TCP rails", "r2ccl", _RAILS)
CUT = Way("r2ccl, a rail cut", "r2ccl", _RAILS)
NCCL = Way("NCCL, sockets", "nccl", _SOCKETS)
#: Settings of the interface for NCCL's sockets, tried one after another.
_INTERFACES: tuple[dict[str, str], ...] = ({"NCCL_SOCKET_IFNAME": "lo"}, {})

#: Smallest allreduce during which a rail is cut, in bytes: smaller ones are too short.
_LEAST_CUT_NBYTES = 1 << 20
#: Number of barriers that `gpu_rank.Rank` runs in a measurement with a cut: before the first call,
#: and before the second one.
_NBARRIERS = 2
#: Number of calls in the first loop, which determines the length of later loops; longest loop.
_TRIED_CALLS, _MOST_CALLS = 2, 200


class Cell(NamedTuple):
    """An element type and a size in bytes."""

    dtype: str
    nbytes: int


class Series(msgspec.Struct):
    """Results of a way at a cell: the seconds of a call, one value per round, and error counts.

    ``nwrong`` counts elements that are not the sum, ``ndiffering`` elements whose bits a cut rail
    changed, and ``nrepairs`` repaired paths.
    """

    seconds: list[float] = []
    nwrong: int = 0
    ndiffering: int = 0
    nrepairs: int = 0


#: Results by name of the way and cell.
Found = dict[tuple[str, Cell], Series]


class Collectives:
    """Measurement of several ways (libraries and transports) with a given number of ranks.

    Parameters
    ----------
    nranks : int
    cells : sequence of Cell
    seed : int
        Seed of the inputs.
    loop_s : float
        Desired duration of a loop of calls, in seconds.
    nrounds : int

    Attributes
    ----------
    found : Found
    failures, left_out : list of str
        Measurements of r2ccl, and of NCCL, that were not possible, with the reasons.
    versions : dict of str
        Version of the library, by name of the way.
    """

    def __init__(
        self, nranks: int, cells: Sequence[Cell], *, seed: int, loop_s: float, nrounds: int,
    ) -> None:  # fmt: skip
        self._nranks = nranks
        self._cells = tuple(cells)
        self._seed = seed
        self._loop_s = loop_s
        self._nrounds = nrounds
        self._jobs: dict[str, Job] = {}
        self._ncalls: dict[tuple[str, Cell], int] = {}
        self._nops: dict[Cell, int] = {}
        self.found: Found = {}
        self.failures: list[str] = []
        self.left_out: list[str] = []
        self.versions: dict[str, str] = {}

    def measure(self, ways: Sequence[Way], budget: Budget) -> int:
        """Measure in rounds until the time is used up; return the number of complete rounds.

        In `ways`, `TCP` must precede `CUT`: its calls show how many collectives a call counts as.
        """
        with ExitStack() as stack:
            for way in ways:
                if way.name != CUT.name or self._cut_cells():
                    self._start(way, stack)
            for number in range(self._nrounds):
                if not self._jobs or (number and budget.is_late(number)):
                    return number
                for cell in self._cells:
                    if not budget.left_s:
                        self._leave_out(cell, number)
                        return number
                    self._turn(cell, number)
        return self._nrounds

    # Starting

    def _start(self, way: Way, stack: ExitStack) -> None:
        """Start the ranks of a way; if they cannot start, report the way and leave it out."""
        env = {"BENCH_NBYTES": str(max(cell.nbytes for cell in self._cells))}
        try:
            if way.library == "nccl":
                job = stack.enter_context(self._start_nccl(way, env))
            elif way.name == CUT.name:
                job = stack.enter_context(Job(way, self._nranks, **env, **self._faults()))
            else:
                job = stack.enter_context(Job(way, self._nranks, **env))
        except Unavailable as exc:
            self._lose(way, f"did not start: {exc}")
            return
        self._jobs[way.name] = job
        self.versions[way.name] = job.ready.version
        if way.name == TCP.name:
            self._count_ops(job)

    def _start_nccl(self, way: Way, env: dict[str, str]) -> Job:
        refusals = []
        for interface in _INTERFACES:
            try:
                return Job(way, self._nranks, **env, **interface)
            except Hung:
                raise
            except Unavailable as exc:
                refusals.append(str(exc))
        raise Unavailable("; then with any interface: ".join(dict.fromkeys(refusals)))

    def _count_ops(self, job: Job) -> None:
        """Count the collectives per allreduce, because faults are planned by collective number."""
        try:
            for cell in self._cut_cells():
                measured = job.run(Loop(*cell, 1, self._seed, is_exact=True))
                self._slowest(job, cell, measured)
                self._nops[cell] = measured[0].nops
        except Unavailable as exc:
            self._drop(job, str(exc))

    def _faults(self) -> dict[str, str]:
        if len(self._nops) < len(self._cut_cells()):
            raise Unavailable(f"cuts need the collective counts of {TCP.name}, which did not run")
        plan = cuts(self._nops, self._nrounds, self._nranks, self._jobs[TCP.name].ready.nops)
        return {"BENCH_FAULTS": plan.to_json().decode()}

    def _cut_cells(self) -> list[Cell]:
        return [cell for cell in self._cells if cell.nbytes >= _LEAST_CUT_NBYTES]

    # Measuring

    def _turn(self, cell: Cell, number: int) -> None:
        """Measure every way that has not failed at a cell."""
        jobs = list(self._jobs.values())
        first = number % max(1, len(jobs))
        for job in jobs[first:] + jobs[:first]:
            is_cut = job.way.name == CUT.name
            if is_cut and cell.nbytes < _LEAST_CUT_NBYTES:
                continue
            try:
                seconds = (self._cut if is_cut else self._loop)(job, cell, number)
                self._series(job.way, cell).seconds.append(seconds)
            except Unavailable as exc:
                self._drop(job, f"failed at {cell.dtype}, {format_size(cell.nbytes)}: {exc}")

    def _loop(self, job: Job, cell: Cell, number: int) -> float:
        """Return the seconds of a call, from a loop that takes about `loop_s` seconds."""
        key = job.way.name, cell

        def run(ncalls: int) -> float:
            command = Loop(*cell, ncalls, self._seed + number, is_exact=number % 2 == 0)
            return self._slowest(job, cell, job.run(command))

        if key not in self._ncalls:
            ncalls = round(self._loop_s / run(_TRIED_CALLS))
            self._ncalls[key] = min(_MOST_CALLS, max(_TRIED_CALLS, ncalls))
        return run(self._ncalls[key])

    def _cut(self, job: Job, cell: Cell, number: int) -> float:
        """Return the seconds of the call in which a rail is cut."""
        # Begin with random floats: the bits of exact sums do not depend on the order of additions.
        measured = job.run(Cut(*cell, self._seed + number, is_exact=number % 2 == 1))
        if sum(each.nfired for each in measured) != 1:
            raise Unavailable("no rail was cut: the call ran other collectives than were counted")
        return self._slowest(job, cell, measured)

    def _slowest(self, job: Job, cell: Cell, measured: Sequence[Measured]) -> float:
        """Add the error counts of all ranks to the results; return the slowest rank's seconds."""
        series = self._series(job.way, cell)
        series.nwrong += sum(each.nwrong for each in measured)
        series.ndiffering += sum(each.ndiffering for each in measured)
        series.nrepairs += sum(each.nrepairs for each in measured)
        return max(each.seconds for each in measured)

    def _series(self, way: Way, cell: Cell) -> Series:
        return self.found.setdefault((way.name, cell), Series())

    def _drop(self, job: Job, why: str) -> None:
        job.close()  # its ranks may hold the GPU, or wait for each other
        del self._jobs[job.way.name]
        self._lose(job.way, why)

    def _lose(self, way: Way, why: str) -> None:
        where = self.failures if way.library == "r2ccl" else self.left_out
        where.append(f"{way.name}, {self._nranks} ranks: {why}")

    def _leave_out(self, cell: Cell, number: int) -> None:
        if not number:
            at = self._cells.index(cell)
            names = ", ".join(f"{dtype} {format_size(n)}" for dtype, n in self._cells[at:])
            self.left_out.append(f"{self._nranks} ranks, because of the time limit: {names}")


def cuts(nops: dict[Cell, int], nrounds: int, nranks: int, first_op: int) -> FaultPlan:
    """Plan the cuts of a job that measures every cell once per round.

    Parameters
    ----------
    nops : dict
        Number of collectives per allreduce, by cell, in the order of the measurements.
    nrounds, nranks : int
    first_op : int
        Number of collectives before the first measurement.

    Returns
    -------
    FaultPlan
        Plan in which one rank loses one rail in the middle of the second call of each measurement;
        ranks and rails take turns.
    """
    faults = []
    op = first_op
    for at, (cell, n) in enumerate(list(nops.items()) * nrounds):
        # Number of slices that a rank sends per collective; the last collective may have fewer.
        slices = 2 * (nranks - 1) * cell.nbytes // (nranks * n * Config().slice_nbytes)
        rank, rail = at % nranks, (at // nranks + at) % _NRAILS
        # Both barriers, and the n collectives of the first call, precede the second call.
        middle = op + n + _NBARRIERS + (n - 1) // 2
        faults.append(
            Fault(
                action=Action.NIC_DOWN, node=rank, rank=rank, rail=rail, at_op=middle,
                at_step=slices // 2,
            )
        )  # fmt: skip
        op += 2 * n + _NBARRIERS
    return FaultPlan(faults)


def fitting(
    sizes: Sequence[int], nranks: int, nways: int, free_nbytes: int, context_nbytes: int
) -> list[int]:
    """Return the sizes for which the ranks of all ways fit into the GPU's memory at once."""
    nprocesses = nranks * nways
    return [each for each in sizes if nprocesses * (each + context_nbytes) <= free_nbytes]


def cells_of(sizes: Sequence[int], dtypes: Sequence[str]) -> list[Cell]:
    """List the combinations of size and element type, small sizes first."""
    return [Cell(dtype, nbytes) for nbytes in sorted(sizes) for dtype in dtypes]


__all__ = ["CUT", "IPC", "NCCL", "TCP", "Cell", "Collectives", "Found", "Series", "cells_of",
           "cuts", "fitting"]  # fmt: skip

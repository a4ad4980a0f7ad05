"""Allreduces of ranks that share a GPU: over CUDA IPC, over TCP rails, with a rail cut; and NCCL.

All ways' ranks are alive at once and sleep while another is measured. A round measures every way at
every size and type, one after the other; which goes first changes from round to round. Each reading
begins with an allreduce of fresh inputs, of which every element is verified: in turns sums that are
exact, and sums of random floats.

A reading is a loop of calls in place, back to back, divided by their number, on the slowest rank.
With a cut rail it is one call, in whose middle a rank loses a rail; before the next cut the rail is
back. Its result is compared with that of the same inputs without a cut, bit for bit.

Must not open a GPU. Invariant: ranks of all ways are ended when this is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import msgspec
from common import format_size
from gpu_job import Cut, Job, Loop, Measured, Way
from gpu_outcome import Budget
from jobs import Hung, Unavailable

from r2ccl.config import Config
from r2ccl.testing import Action, Fault, FaultPlan

_NRAILS = 2
#: What a cut rail is compared with must be planned as it is: rings, on rails that count as equal.
_RAILS = {
    "R2CC_IPC": "0",
    "R2CC_RAILS": str(_NRAILS),
    "R2CC_ALGO": "ring",
    "R2CC_BALANCE": "0",
    # A rail that is cut again and again is to be used again as soon as it answers.
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
#: Which interface NCCL's sockets use: what is tried, one after the other.
_INTERFACES: tuple[dict[str, str], ...] = ({"NCCL_SOCKET_IFNAME": "lo"}, {})

#: Smaller allreduces have no middle.
_LEAST_CUT_NBYTES = 1 << 20
#: The barriers of `gpu_rank.Rank` before each of the two calls of a reading with a cut.
_NBARRIERS = 2
_TRIED_CALLS, _MOST_CALLS = 2, 200


class Cell(NamedTuple):
    """An element type and a size in bytes."""

    dtype: str
    nbytes: int


class Series(msgspec.Struct):
    """What was found of a way at a cell: the seconds of a call, one a round, and what was wrong."""

    seconds: list[float] = []
    nwrong: int = 0
    ndiffering: int = 0
    nrepairs: int = 0


#: By way and cell.
Found = dict[tuple[str, Cell], Series]


class Collectives:
    """The ways of a number of ranks, measured in turns.

    Parameters
    ----------
    nranks : int
    cells : sequence of Cell
    seed : int
    loop_s : float
        How long a loop is to take.
    nrounds : int

    Attributes
    ----------
    found : Found
    failures, left_out : list of str
        Of r2ccl, and of NCCL: what could not be measured, and why.
    versions : dict of str
        Version of the library, by way.
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
        """Measure in rounds until time is up; return how many rounds were whole.

        `TCP` must come before `CUT`: it tells how many collectives a call counts as.
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
        """Start a way's ranks; one that cannot be is named, and the others go on."""
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
        """Ask how many collectives an allreduce counts as: faults are planned by their numbers."""
        try:
            for cell in self._cut_cells():
                measured = job.run(Loop(*cell, 1, self._seed, is_exact=True))
                self._slowest(job, cell, measured)
                self._nops[cell] = measured[0].nops
        except Unavailable as exc:
            self._drop(job, str(exc))

    def _faults(self) -> dict[str, str]:
        if len(self._nops) < len(self._cut_cells()):
            raise Unavailable(f"cuts are planned by what {TCP.name} counts, which did not run")
        plan = cuts(self._nops, self._nrounds, self._nranks, self._jobs[TCP.name].ready.nops)
        return {"BENCH_FAULTS": plan.to_json().decode()}

    def _cut_cells(self) -> list[Cell]:
        return [cell for cell in self._cells if cell.nbytes >= _LEAST_CUT_NBYTES]

    # Measuring

    def _turn(self, cell: Cell, number: int) -> None:
        """Measure every way that is left at a cell."""
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
        """Return the seconds of a call, in a loop that takes about as long as is wanted."""
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
        # Random floats first: exact sums have the same bits in every order.
        measured = job.run(Cut(*cell, self._seed + number, is_exact=number % 2 == 1))
        if sum(each.nfired for each in measured) != 1:
            raise Unavailable("no rail was cut: the call has other collectives than were counted")
        return self._slowest(job, cell, measured)

    def _slowest(self, job: Job, cell: Cell, measured: Sequence[Measured]) -> float:
        """Count what was wrong; return the seconds of the slowest rank."""
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
            self.left_out.append(f"{self._nranks} ranks, for want of time: {names}")


def cuts(nops: dict[Cell, int], nrounds: int, nranks: int, first_op: int) -> FaultPlan:
    """Plan the cuts of a job that makes one reading of every cell in every round.

    Parameters
    ----------
    nops : dict
        How many collectives an allreduce counts as, by cell, in the order of the readings.
    nrounds, nranks : int
    first_op : int
        How many collectives come before the first reading.

    Returns
    -------
    FaultPlan
        In each reading another rank loses another rail, in the middle of its second call.
    """
    faults = []
    op = first_op
    for at, (cell, n) in enumerate(list(nops.items()) * nrounds):
        # A rank sends so many in each of them, but for the last, which may be shorter.
        slices = 2 * (nranks - 1) * cell.nbytes // (nranks * n * Config().slice_nbytes)
        rank, rail = at % nranks, (at // nranks + at) % _NRAILS
        # The barrier of the second call comes between.
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
    """Return the sizes whose ranks fit the memory of a GPU all at once."""
    nprocesses = nranks * nways
    return [each for each in sizes if nprocesses * (each + context_nbytes) <= free_nbytes]


def cells_of(sizes: Sequence[int], dtypes: Sequence[str]) -> list[Cell]:
    """List the cells, small ones first."""
    return [Cell(dtype, nbytes) for nbytes in sorted(sizes) for dtype in dtypes]


__all__ = ["CUT", "IPC", "NCCL", "TCP", "Cell", "Collectives", "Found", "Series", "cells_of",
           "cuts", "fitting"]  # fmt: skip

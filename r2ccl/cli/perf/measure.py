"""Measurement of collectives on one rank: time every case, then verify its results.

A loop makes ``-n`` calls, or ``-n`` groups of ``-m`` calls, back to back; the time of a call is the
time of the loop divided by the number of calls. ``-w`` calls or groups run before the loop. With
``-g 1``, the loop also waits for the GPU: after each call or group, or with ``-z 0`` once at its
end. By default the time is averaged over the ranks, as in nccl-tests. Verification runs outside the
loop, on fresh inputs that every rank derives from one seed. The inputs are chosen so that every
partial result is exact in any order of the operations; results are therefore compared bit for bit.
"""

from __future__ import annotations

import shlex
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from r2ccl.cli.perf.calls import PerfMemory, Runner
from r2ccl.cli.perf.cases import Buffers, Case, count_wrong, make_inputs, place
from r2ccl.cli.perf.forms import FORMS, CollectiveForm
from r2ccl.cli.perf.options import DTYPES_BY_NAME, PerfOptions
from r2ccl.cli.perf.report import (
    HEADER,
    describe,
    describe_paths,
    format_line,
    row_of,
    save_results,
    verdict,
)
from r2ccl.cli.results import as_utf8, check_file
from r2ccl.cli.values import size_range
from r2ccl.communicator import Communicator
from r2ccl.dtypes import CODES
from r2ccl.errors import InvalidArgument
from r2ccl.factory import init
from r2ccl.kernels import ON_GPU
from r2ccl.types import ReduceOp

#: File with an ID of the running kernel; all processes on one kernel share `time.monotonic`.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: Seconds by which one rank is late at the barrier that is checked.
_LATE_S = 0.005


class Measured(NamedTuple):
    """Time per call in seconds, and number of wrong elements (None: they were not counted).

    For a barrier, ``wrong`` counts the ranks that left it before the last rank entered it.
    """

    seconds: float
    wrong: int | None


@contextmanager
def _registered(
    comm: Communicator, buffers: Sequence[Buffers], options: PerfOptions
) -> Iterator[None]:
    """Keep the memory of the buffers registered within the ``with`` block, if ``-R`` is 1."""
    with ExitStack() as stack:
        if options.is_registered:
            for x, out in buffers:
                both = [each for each in (x, out) if each is not None and each.size]
                is_shared = len(both) == 2 and np.may_share_memory(*both)
                for each in [max(both, key=len)] if is_shared else both:
                    stack.enter_context(comm.register(each))
        yield


class Measurement:
    """Measurement of cases on one communicator, by one thread.

    Parameters
    ----------
    meeting : threading.Barrier
        Barrier at which the threads of this process wait before a timed loop.
    """

    def __init__(
        self,
        comm: Communicator,
        options: PerfOptions,
        memory: PerfMemory,
        meeting: threading.Barrier,
    ) -> None:
        self._comm = comm
        self._options = options
        self._memory = memory
        self._meeting = meeting

    def measure(self, case: Case, *, in_place: bool) -> Measured:
        """Time a case, verify it ``-c`` times, and return both results."""
        self._memory.use()
        try:
            seconds = self._time(case, in_place=in_place)
        except BaseException:
            self._meeting.abort()  # the other threads must not wait for this one
            raise
        check = self._verify_barrier if case.form.name == "barrier" else self.verify
        wrong: int | None = None
        for number in range(self._options.nchecks):
            seed = (zlib.crc32(repr(case).encode()), int(in_place), number)
            found = check(case, in_place=in_place, seed=seed)
            wrong = None if found is None else (wrong or 0) + found
        return Measured(seconds, wrong)

    def verify(self, case: Case, *, in_place: bool, seed: Sequence[int]) -> int:
        """Make the calls of `case` once, on fresh inputs made from `seed`.

        Return the number of wrong elements over all ranks.
        """
        rank = self._comm.rank
        inputs = [make_inputs(case, (*seed, part)) for part in range(self._options.ngrouped)]
        buffers = [
            place(case, rank, each[rank], in_place=in_place, move=self._memory.move)
            for each in inputs
        ]
        with _registered(self._comm, buffers, self._options):
            self._runner(case, buffers).run(1)
        wrong = sum(
            count_wrong(
                case, rank, given, Buffers(*map(self._memory.fetch, used)), in_place=in_place
            )
            for given, used in zip(inputs, buffers, strict=True)
        )
        return int(self._comm.allreduce(np.array([wrong], np.int64))[0])

    def _verify_barrier(self, case: Case, *, in_place: bool, seed: Sequence[int]) -> int | None:
        """Run a barrier that one rank enters late; count the ranks that left before it entered.

        Return None if the ranks run on several machines, whose clocks cannot be compared.
        """
        comm = self._comm
        if comm.rank == seed[-1] % comm.nranks:
            time.sleep(_LATE_S)
        clock = zlib.crc32(_BOOT_ID.read_bytes())
        entered = time.monotonic()
        comm.barrier()
        seen = comm.allgather(np.array([entered, time.monotonic(), clock]))
        if len(set(seen[:, 2])) > 1:
            return None
        return int(np.count_nonzero(seen[:, 1] < seen[:, 0].max()))

    def _time(self, case: Case, *, in_place: bool) -> float:
        """Return the time of one call in seconds on this rank, averaged over the calls."""
        options, comm = self._options, self._comm
        count = case.sends(comm.rank)
        buffers = []
        for _ in range(options.ngrouped):
            data = None if count is None else np.ones(count, case.dtype)  # maps the pages
            buffers.append(place(case, comm.rank, data, in_place=in_place, move=self._memory.move))
        runner = self._runner(case, buffers)
        with _registered(comm, buffers, options):
            runner.run(options.warmup)
            self._meeting.wait()
            comm.barrier()
            start = time.perf_counter()
            runner.run(options.iterations)
            return (time.perf_counter() - start) / (options.iterations * options.ngrouped)

    def _runner(self, case: Case, buffers: Sequence[Buffers]) -> Runner:
        return Runner(self._comm, case, self._options, self._memory, buffers)


def combine(comm: Communicator, times: Sequence[float], average: int) -> float:
    """Return the time to report: `average`, the value of ``-a``, selects how `times` are combined.

    *Collective*: every rank must call it.
    """
    every = comm.allgather(np.array(times))
    return float((every[0][0], every.mean(), every.min(), every.max())[average])


class PerfJob:
    """Communicators of this rank, one per thread; measures cases on all of them at once."""

    def __init__(self, comm: Communicator, options: PerfOptions, stack: ExitStack) -> None:
        self._comm = comm
        self._options = options
        memory = PerfMemory(options.ngpus)
        meeting = threading.Barrier(options.nthreads)
        more = [comm.dup() for _ in range(options.nthreads - 1)]
        for each in more:
            stack.callback(each.close)
        self._measurements = [Measurement(each, options, memory, meeting) for each in [comm, *more]]

    def measure(self, case: Case, *, in_place: bool) -> Measured | None:
        """Measure a case with every thread; if `in_place` is true but impossible, return None."""
        if in_place and not case.form.can_be_in_place:
            return None
        first, *more = self._measurements
        if not more:
            found = [first.measure(case, in_place=in_place)]
        else:
            with ThreadPoolExecutor(len(self._measurements)) as pool:
                begun = [
                    pool.submit(each.measure, case, in_place=in_place)
                    for each in self._measurements
                ]
            errors = [error for each in begun if (error := each.exception()) is not None]
            for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
                raise error
            found = [each.result() for each in begun]
        seconds = combine(self._comm, [each.seconds for each in found], self._options.average)
        counts = [each.wrong for each in found if each.wrong is not None]
        return Measured(seconds, sum(counts) if counts else None)


def cases(form: CollectiveForm, nranks: int, options: PerfOptions) -> list[Case]:
    """Return the cases to run: every size, for every supported type, operation and root.

    A barrier has a single case.
    """
    if form.name == "barrier":
        return [Case(form, nranks, 0, np.dtype(np.float32))]
    roots = range(nranks) if options.root == -1 else [options.root]
    return [
        Case.of(form, nranks, nbytes, dtype, op=op, root=root)
        for dtype in map(DTYPES_BY_NAME.__getitem__, options.datatypes)
        for op in (options.ops if form.reduces else ["sum"])
        if not form.reduces or ReduceOp[op.upper()] in ON_GPU[CODES[dtype]]
        if not (op == "avg" and form.name in ("scan", "exscan"))
        for root in (roots if form.is_rooted else [0])
        for nbytes in size_range(
            options.minbytes, options.maxbytes, step=options.step, factor=options.factor
        )
    ]


def _problem(comm: Communicator, options: PerfOptions) -> str | None:
    """Return the reason why the ranks cannot measure; None on all ranks if they can measure.

    If the file of ``--json`` cannot be written, only rank 0 returns the reason, and the other ranks
    return an empty string.
    """
    if not -1 <= options.root < comm.nranks:
        return f"-r {options.root}: allowed are 0 to {comm.nranks - 1}, and -1 for every root"
    if options.json is None:
        return None
    problem = ""
    if comm.rank == 0:
        try:
            check_file(options.json)
        except InvalidArgument as exc:
            problem = str(exc)
    is_refused = comm.allreduce(np.array([bool(problem)], np.int64))[0]
    return problem if is_refused else None


def run(options: PerfOptions) -> int:
    """Measure every case on this rank; rank 0 prints.

    Return the exit status: 1 if a result is wrong; 2 if ``-r`` is out of range, or the check before
    the measurement finds that the file of ``--json`` cannot be written; otherwise 0.

    Raises
    ------
    InvalidArgument
        In rank 0, if the results cannot be written to the file of ``--json``.
    R2cclError
        If `r2ccl.init` or a measured call raises it.
    """
    rows: list[dict[str, Any]] = []
    with init() as comm, ExitStack() as stack:
        say = print if comm.rank == 0 else lambda *_, **__: None
        problem = _problem(comm, options)
        if problem is not None:
            say(f"r2ccl bench: {problem}", file=sys.stderr)
            return 2
        say(describe(options, comm.nranks))
        say(describe_paths(comm.health().rails, comm.explain(options.maxbytes)))
        job = PerfJob(comm, options, stack)
        for form in map(FORMS.__getitem__, options.collectives):
            say(f"#\n# collective: {form.name}\n{HEADER}")
            for case in cases(form, comm.nranks, options):
                halves = []
                for placement, in_place in (("out_of_place", False), ("in_place", True)):
                    found = job.measure(case, in_place=in_place)
                    halves.append(found and row_of(case, placement, options, *found))
                rows += [half for half in halves if half is not None]
                say(format_line(case, halves), flush=True)
    wrong = sum(each["wrong"] or 0 for each in rows)
    average = sum(each["busbw_gb_per_s"] for each in rows) / max(1, len(rows))
    say(f"# Out of bounds values : {verdict(rows)}")
    say(f"# Avg bus bandwidth    : {average:g}\n#")
    if options.json is not None and comm.rank == 0:
        save_results(options.json, rows, shlex.join(["r2ccl", *map(as_utf8, sys.argv[1:])]))
    return 1 if wrong else 0


__all__ = ["Measured", "Measurement", "cases", "combine", "run"]

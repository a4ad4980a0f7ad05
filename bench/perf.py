"""Measure a collective with the flags and columns of nccl-tests; verify every result.

Runs under any launcher (``r2ccl launch``, torchrun, mpiexec, netlab). Started without a launcher,
the bench launches ``--nranks`` local processes itself. Exits with 1 if any element is wrong.

The time of a call is the time of a loop of ``-n`` calls, back to back, after ``-w`` warm-up calls,
divided by ``-n`` and averaged over the ranks, as in nccl-tests. Verification runs outside that
loop, on fresh inputs that every rank derives from one seed. The inputs are such that no order of
operations rounds, so results are compared bit for bit.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from calls import call_of, start_of
from collectives import FORMS, Array, Buffers, Case, Form, count_wrong, make_inputs, place
from common import algbw, busbw, size_range, write_json
from perf_options import DTYPES_BY_NAME, NCCL_NAMES, Options, parse_arguments

import r2ccl
from r2ccl.dtypes import CODES
from r2ccl.kernels import ON_GPU

#: Variables that a launcher sets in every process: torchrun and r2ccl, Hydra, PMIx, Open MPI.
_LAUNCHED = ("RANK", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
#: Identifies the running kernel, and with it the clock of `time.monotonic`.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: Seconds by which one rank is late at the barrier that is checked.
_LATE_S = 0.005


class Measured(NamedTuple):
    """Time per call in seconds, and number of wrong elements (None: not checked)."""

    seconds: float
    wrong: int | None


class Memory:
    """Memory that is measured: of the host, or of a GPU."""

    def __init__(self, ngpus: int) -> None:
        self._cuda = None
        if ngpus:
            from numba import cuda

            self._cuda = cuda

    def use(self) -> None:
        """Choose the GPU of this rank for the calling thread."""
        if self._cuda is not None:
            number = int(os.environ.get("LOCAL_RANK", 0)) % len(self._cuda.gpus)
            self._cuda.select_device(number)

    def move(self, block: Array) -> Any:
        """Return `block` in this memory."""
        return block if self._cuda is None else self._cuda.to_device(block)

    def fetch(self, block: Any) -> Array:
        """Return a block of this memory in host memory."""
        host: Array = block if self._cuda is None or block is None else block.copy_to_host()
        return host

    def finish(self) -> None:
        """Wait until all calls have ended that returned before their end."""
        if self._cuda is not None:
            self._cuda.synchronize()


class Runner:
    """Runs the calls of one case as the options say: grouped or not, blocking or not.

    Parameters
    ----------
    buffers : sequence of Buffers
        As many as calls are grouped.
    """

    def __init__(
        self,
        comm: r2ccl.Communicator,
        case: Case,
        options: Options,
        memory: Memory,
        buffers: Sequence[Buffers],
    ) -> None:
        self._comm = comm
        self._memory = memory
        self._calls = [call_of(comm, case, each) for each in buffers]
        self._start = None if options.is_blocking else start_of(comm, case, buffers[0])

    def run(self, iterations: int) -> None:
        """Make `iterations` calls, or groups of calls, and wait for their end."""
        if self._start is not None:
            begun = [each for _ in range(iterations) for each in self._start()]
            for work in begun:
                work.wait()
        elif len(self._calls) == 1:
            [call] = self._calls
            self._repeat(call, iterations)
        else:
            self._repeat(self._grouped, iterations)
        self._memory.finish()

    def _repeat(self, call: Callable[[], Any], iterations: int) -> None:
        for _ in range(iterations):
            call()
            self._memory.finish()

    def _grouped(self) -> None:
        with self._comm.group():
            for call in self._calls:
                call()


@contextmanager
def _registered(
    comm: r2ccl.Communicator, buffers: Sequence[Buffers], options: Options
) -> Iterator[None]:
    """Register the memory of the buffers for the block, with ``-R 1``."""
    with ExitStack() as stack:
        if options.is_registered:
            for x, out in buffers:
                both = [each for each in (x, out) if each is not None and each.size]
                is_shared = len(both) == 2 and np.may_share_memory(*both)
                for each in [max(both, key=len)] if is_shared else both:
                    stack.enter_context(comm.register(each))
        yield


class Bench:
    """Measures cases on one communicator, which one thread uses.

    Parameters
    ----------
    meeting : threading.Barrier
        Where the threads of this process meet before they are timed.
    """

    def __init__(
        self,
        comm: r2ccl.Communicator,
        options: Options,
        memory: Memory,
        meeting: threading.Barrier,
    ) -> None:
        self._comm = comm
        self._options = options
        self._memory = memory
        self._meeting = meeting

    def measure(self, case: Case, *, in_place: bool) -> Measured:
        """Time a case, then verify it ``-c`` times."""
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
        """Make the calls on fresh inputs; return the number of wrong elements over all ranks."""
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
        """Return how many ranks left a barrier before the last entered; None without one clock."""
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


def combine(comm: r2ccl.Communicator, times: Sequence[float], average: int) -> float:
    """Return the time to report from those of all threads and ranks, as ``-a`` says."""
    every = comm.allgather(np.array(times))
    return float((every[0][0], every.mean(), every.min(), every.max())[average])


class Job:
    """Communicators of this rank, one per thread; measures cases on all of them at once."""

    def __init__(self, comm: r2ccl.Communicator, options: Options, stack: ExitStack) -> None:
        self._comm = comm
        self._options = options
        memory = Memory(options.ngpus)
        meeting = threading.Barrier(options.nthreads)
        more = [comm.dup() for _ in range(options.nthreads - 1)]
        for each in more:
            stack.callback(each.close)
        self._benches = [Bench(each, options, memory, meeting) for each in [comm, *more]]

    def measure(self, case: Case, *, in_place: bool) -> Measured | None:
        """Measure a case with every thread; None if it cannot be in place."""
        if in_place and not case.form.can_be_in_place:
            return None
        first, *more = self._benches
        if not more:
            found = [first.measure(case, in_place=in_place)]
        else:
            with ThreadPoolExecutor(len(self._benches)) as pool:
                begun = [
                    pool.submit(bench.measure, case, in_place=in_place) for bench in self._benches
                ]
            errors = [error for each in begun if (error := each.exception()) is not None]
            for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
                raise error
            found = [each.result() for each in begun]
        seconds = combine(self._comm, [each.seconds for each in found], self._options.average)
        counts = [each.wrong for each in found if each.wrong is not None]
        return Measured(seconds, sum(counts) if counts else None)


def cases(form: Form, nranks: int, options: Options) -> list[Case]:
    """Return the cases to run: every size, for every supported type, operation and root."""
    if form.name == "barrier":
        return [Case(form, nranks, 0, np.dtype(np.float32))]
    roots = range(nranks) if options.root == -1 else [options.root]
    return [
        Case.of(form, nranks, nbytes, dtype, op=op, root=root)
        for dtype in map(DTYPES_BY_NAME.__getitem__, options.datatypes)
        for op in (options.ops if form.reduces else ["sum"])
        if not form.reduces or r2ccl.ReduceOp[op.upper()] in ON_GPU[CODES[dtype]]
        if not (op == "avg" and form.name in ("scan", "exscan"))
        for root in (roots if form.is_rooted else [0])
        for nbytes in size_range(
            options.minbytes, options.maxbytes, step=options.step, factor=options.factor
        )
    ]


def row(case: Case, placement: str, options: Options, result: Measured) -> dict[str, Any]:
    """Return the JSON object of one measurement."""
    return {
        "collective": case.form.name,
        "nranks": case.nranks,
        "nthreads": options.nthreads,
        "ngpus": options.ngpus,
        "ngrouped": options.ngrouped,
        "is_blocking": options.is_blocking,
        "nbytes": case.nbytes,
        "count": case.count,
        "dtype": case.dtype.name,
        "op": case.op if case.form.reduces else "none",
        "root": case.root if case.form.is_rooted else -1,
        "placement": placement,
        "time_us": result.seconds * 1e6,
        "algbw_gb_per_s": algbw(case.nbytes, result.seconds),
        "busbw_gb_per_s": busbw(case.form.name, case.nranks, case.nbytes, result.seconds),
        "wrong": result.wrong,
    }


_HALF = f"{'time':>9}{'algbw':>8}{'busbw':>8}{'#wrong':>7}"
_HALF_UNITS = f"{'(us)':>9}{'(GB/s)':>8}{'(GB/s)':>8}{'':>7}"
_HEADER = f"""\
#
#{"":53}{"out-of-place":^32}{"in-place":^32}
#{"size":>12}{"count":>14}{"type":>11}{"redop":>8}{"root":>8}{_HALF}{_HALF}
#{"(B)":>12}{"(elements)":>14}{"":27}{_HALF_UNITS}{_HALF_UNITS}"""


def format_line(case: Case, halves: Sequence[dict[str, Any] | None]) -> str:
    """Format one line of the table, out of place and in place; None: there is no such call."""
    name = NCCL_NAMES.get(case.dtype.name, case.dtype.name)
    op = case.op if case.form.reduces else "none"
    root = case.root if case.form.is_rooted else -1
    line = f" {case.nbytes:>12}{case.count:>14}{name:>11}{op:>8}{root:>8}"
    for half in halves:
        if half is None:
            line += f"{'N/A':>9}{'N/A':>8}{'N/A':>8}{'N/A':>7}"
            continue
        wrong = "N/A" if half["wrong"] is None else half["wrong"]
        line += f"{half['time_us']:>9.{2 if half['time_us'] < 1e4 else 0}f}"
        line += f"{half['algbw_gb_per_s']:>8.2f}{half['busbw_gb_per_s']:>8.2f}{wrong:>7}"
    return line


def _describe(options: Options, nranks: int) -> str:
    step = f"{options.factor:g}(factor)" if options.factor > 1 else f"{options.step}(bytes)"
    return (
        f"# nThread {options.nthreads} nGpus {options.ngpus} nRanks {nranks}"
        f" minBytes {options.minbytes} maxBytes {options.maxbytes} step: {step}"
        f" warmup iters: {options.warmup} iters: {options.iterations}"
        f" agg iters: {options.ngrouped} blocking: {int(options.is_blocking)}"
        f" validation: {options.nchecks}"
    )


def run(options: Options) -> int:
    """Measure every case on this rank; rank 0 prints. Return the exit status."""
    rows: list[dict[str, Any]] = []
    with r2ccl.init() as comm, ExitStack() as stack:
        say = print if comm.rank == 0 else lambda *_, **__: None
        if not -1 <= options.root < comm.nranks:
            say(f"-r {options.root}: allowed are 0 to {comm.nranks - 1}, and -1 for every root")
            return 2
        say(_describe(options, comm.nranks))
        job = Job(comm, options, stack)
        for form in map(FORMS.__getitem__, options.collectives):
            say(f"#\n# collective: {form.name}\n{_HEADER}")
            for case in cases(form, comm.nranks, options):
                halves = []
                for placement, in_place in (("out_of_place", False), ("in_place", True)):
                    found = job.measure(case, in_place=in_place)
                    halves.append(found and row(case, placement, options, found))
                rows += [half for half in halves if half is not None]
                say(format_line(case, halves), flush=True)
    wrong = sum(each["wrong"] or 0 for each in rows)
    average = sum(each["busbw_gb_per_s"] for each in rows) / max(1, len(rows))
    say(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    say(f"# Avg bus bandwidth    : {average:g}\n#")
    if options.json is not None and comm.rank == 0:
        write_json(options.json, rows)
    return 1 if wrong else 0


def main() -> int:
    """Run as a rank, or launch the ranks."""
    options = parse_arguments(sys.argv[1:])
    if not any(name in os.environ for name in _LAUNCHED):
        sys.stdout.flush()
        launch = [sys.executable, "-m", "r2ccl", "launch", "-n", str(options.nranks), "--"]
        os.execv(sys.executable, [*launch, sys.executable, *sys.argv])
    return run(options)


if __name__ == "__main__":
    sys.exit(main())

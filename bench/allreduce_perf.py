"""Measure allreduce performance with the flags and columns of nccl-tests; verify every result.

Runs under any launcher (``r2ccl launch``, torchrun, mpiexec, netlab). Started without a launcher,
the bench launches ``--nranks`` local processes itself. Exits with 1 if any element is wrong.

The time of a call is the time of a loop of ``-n`` calls, back to back, after ``-w`` warm-up calls,
divided by ``-n`` and averaged over the ranks, as in nccl-tests. Verification runs outside that
loop, on fresh inputs that every rank derives from one seed. The inputs are such that no order of
operations rounds, so results are compared bit for bit.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from common import add_json_argument, algbw, busbw, parse_size, size_range, write_json

import r2ccl
from r2ccl.dtypes import CODES, DTYPES
from r2ccl.kernels import ON_GPU
from r2ccl.types import ReduceOp

Array = np.ndarray[Any, np.dtype[Any]]

#: Operations by number of the element type: those of which `make_inputs` can make exact inputs.
_OPS = ON_GPU
#: Names that nccl-tests gives to some types; the other types use NumPy's names.
_NCCL_NAMES = {"float16": "half", "float32": "float", "float64": "double"}
_BY_NAME = {
    name: dtype
    for dtype in map(DTYPES.__getitem__, _OPS)
    for name in (dtype.name, _NCCL_NAMES.get(dtype.name, dtype.name))
}
_OPS_BY_NAME = {op.name.lower(): op for op in sorted(frozenset().union(*_OPS.values()))}
#: Variables that a launcher sets in every process: torchrun and r2ccl, Hydra, PMIx, Open MPI.
_LAUNCHED = ("RANK", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


#: NumPy function that computes the exact result of each operation, in 64-bit integers.
_EXACT = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


@dataclass(frozen=True)
class Case:
    """Line of the table: a buffer size, an element type and an operation."""

    nbytes: int
    dtype: np.dtype[Any]
    op: ReduceOp

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.nbytes // self.dtype.itemsize


class Measured(NamedTuple):
    """Time per call in seconds, and number of wrong elements (None: not checked)."""

    seconds: float
    wrong: int | None


def make_inputs(case: Case, nranks: int, seed: Sequence[int]) -> tuple[list[Array], Array]:
    """Return the inputs of all ranks and the exact result.

    The values are small integers, so that no partial result is rounded in any order of operations:
    no sum leaves the range in which bfloat16 holds integers, and factors are powers of two.
    """
    rng = np.random.default_rng(seed)
    drawn = [_draw(rng, case, rank, nranks) for rank in range(nranks)]
    exact = drawn[0].astype(np.int64)
    for values in drawn[1:]:
        _EXACT[case.op](exact, values, out=exact)
    inputs = [values.astype(case.dtype) for values in drawn]
    if case.op is not ReduceOp.AVG:
        return inputs, exact.astype(case.dtype)
    average = exact / nranks  # rounding twice is harmless: 53 bits hold twice 24 bits and more
    return inputs, (np.trunc(average) if case.dtype.kind in "iu" else average).astype(case.dtype)


def _draw(rng: np.random.Generator, case: Case, rank: int, nranks: int) -> Array:
    if case.op is ReduceOp.PROD:
        # Float16 holds 2**14; further ranks multiply by one.
        return rng.integers(1, 3 if rank < 14 else 2, case.count, np.int8)
    # Bfloat16 holds every integer up to 256; ranks from the 121st on add zero.
    bound = max(1, 120 // nranks) if rank < 120 else 0
    lowest = 0 if case.dtype.kind == "u" else -bound
    return rng.integers(lowest, bound + 1, case.count, np.int8)


def count_wrong(comm: Any, case: Case, *, in_place: bool, seed: Sequence[int]) -> int:
    """Run one allreduce on fresh inputs; return the number of wrong elements over all ranks."""
    inputs, expected = make_inputs(case, comm.nranks, seed)
    mine = inputs[comm.rank]
    before = mine.copy()
    out = mine if in_place else np.full_like(mine, 77)
    comm.allreduce(mine, None if in_place else out, case.op)
    wrong = np.count_nonzero(out != expected)
    if not in_place:
        wrong += np.count_nonzero(mine != before)
    return int(comm.allreduce(np.array([wrong], np.int64))[0])


def time_calls(comm: Any, case: Case, args: argparse.Namespace, *, in_place: bool) -> float:
    """Return the time of one call in seconds, averaged over calls and ranks."""
    x = np.ones(case.count, case.dtype)  # written, so that every page is mapped
    out = None if in_place else np.ones_like(x)
    for _ in range(args.warmup_iters):
        comm.allreduce(x, out, case.op)
    comm.barrier()
    start = time.perf_counter()
    for _ in range(args.iters):
        comm.allreduce(x, out, case.op)
    seconds = (time.perf_counter() - start) / args.iters
    return float(comm.allreduce(np.array([seconds]), op=ReduceOp.AVG)[0])


def measure(comm: Any, case: Case, args: argparse.Namespace, *, in_place: bool) -> Measured:
    """Time a case, in place or out of place, then verify it ``-c`` times."""
    seconds = time_calls(comm, case, args, in_place=in_place)
    if not args.check:
        return Measured(seconds, None)
    wrong = 0
    for check in range(args.check):
        seed = (case.nbytes, CODES[case.dtype], int(case.op), int(in_place), check)
        wrong += count_wrong(comm, case, in_place=in_place, seed=seed)
    return Measured(seconds, wrong)


def cases(args: argparse.Namespace) -> list[Case]:
    """Return the cases to run: every size, for every supported pair of type and operation."""
    dtypes = (
        [DTYPES[code] for code in _OPS] if args.datatype == "all" else [_BY_NAME[args.datatype]]
    )
    ops = list(_OPS_BY_NAME.values()) if args.op == "all" else [_OPS_BY_NAME[args.op]]
    sizes = list(size_range(args.minbytes, args.maxbytes, step=args.step, factor=args.factor))
    return [
        Case(size // dtype.itemsize * dtype.itemsize, dtype, op)
        for dtype in dtypes
        for op in ops
        if op in _OPS[CODES[dtype]]
        for size in sizes
    ]


def row(case: Case, nranks: int, placement: str, result: Measured) -> dict[str, Any]:
    """Return the JSON object of one measurement."""
    return {
        "collective": "allreduce",
        "nranks": nranks,
        "nbytes": case.nbytes,
        "count": case.count,
        "dtype": case.dtype.name,
        "op": case.op.name.lower(),
        "placement": placement,
        "time_us": result.seconds * 1e6,
        "algbw_gb_per_s": algbw(case.nbytes, result.seconds),
        "busbw_gb_per_s": busbw("allreduce", nranks, case.nbytes, result.seconds),
        "wrong": result.wrong,
    }


_HALF = f"{'time':>9}{'algbw':>8}{'busbw':>8}{'#wrong':>7}"
_HALF_UNITS = f"{'(us)':>9}{'(GB/s)':>8}{'(GB/s)':>8}{'':>7}"
_HEADER = f"""\
#
#{"":53}{"out-of-place":^32}{"in-place":^32}
#{"size":>12}{"count":>14}{"type":>11}{"redop":>8}{"root":>8}{_HALF}{_HALF}
#{"(B)":>12}{"(elements)":>14}{"":27}{_HALF_UNITS}{_HALF_UNITS}"""


def print_line(case: Case, halves: Sequence[dict[str, Any]]) -> None:
    """Print one line of the table."""
    name = _NCCL_NAMES.get(case.dtype.name, case.dtype.name)
    line = f" {case.nbytes:>12}{case.count:>14}{name:>11}{case.op.name.lower():>8}{-1:>8}"
    for half in halves:
        wrong = "N/A" if half["wrong"] is None else half["wrong"]
        line += f"{half['time_us']:>9.{2 if half['time_us'] < 1e4 else 0}f}"
        line += f"{half['algbw_gb_per_s']:>8.2f}{half['busbw_gb_per_s']:>8.2f}{wrong:>7}"
    print(line, flush=True)


def _step(args: argparse.Namespace) -> str:
    return f"{args.factor:g}(factor)" if args.factor > 1 else f"{args.step}(bytes)"


def run(args: argparse.Namespace) -> int:
    """Measure every case on this rank; rank 0 prints. Return the exit status."""
    rows: list[dict[str, Any]] = []
    with r2ccl.init() as comm:
        is_first = comm.rank == 0
        if is_first:
            print(
                f"# nThread 1 nRanks {comm.nranks} minBytes {args.minbytes} maxBytes"
                f" {args.maxbytes} step: {_step(args)} warmup iters: {args.warmup_iters}"
                f" iters: {args.iters} validation: {args.check}"
            )
            print(_HEADER)
        for case in cases(args):
            halves = [
                row(case, comm.nranks, placement, measure(comm, case, args, in_place=in_place))
                for placement, in_place in (("out_of_place", False), ("in_place", True))
            ]
            rows += halves
            if is_first:
                print_line(case, halves)
    wrong = sum(each["wrong"] or 0 for each in rows)
    if is_first:
        average = sum(each["busbw_gb_per_s"] for each in rows) / max(1, len(rows))
        print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
        print(f"# Avg bus bandwidth    : {average:g}\n#")
        if args.json:
            write_json(args.json, rows)
    return 1 if wrong else 0


def parse_arguments() -> argparse.Namespace:
    """Parse the flags of nccl-tests and those of this bench."""
    parser = argparse.ArgumentParser(description="Measure allreduce as nccl-tests does.")
    parser.add_argument("-b", "--minbytes", type=parse_size, default="1M")
    parser.add_argument("-e", "--maxbytes", type=parse_size, help="default: --minbytes")
    parser.add_argument("-i", "--step", type=parse_size, default="1M", help="bytes between sizes")
    parser.add_argument(
        "-f", "--factor", type=float, default=1.0, help="between sizes; replaces -i"
    )
    parser.add_argument("-n", "--iters", type=int, default=20, help="calls per timed loop")
    parser.add_argument("-w", "--warmup-iters", "--warmup_iters", type=int, default=5)
    parser.add_argument("-c", "--check", type=int, default=1, help="verifications; 0: none")
    parser.add_argument("-d", "--datatype", choices=[*_BY_NAME, "all"], default="float")
    parser.add_argument("-o", "--op", choices=[*_OPS_BY_NAME, "all"], default="sum")
    parser.add_argument("--nranks", type=int, default=2, help="processes without a launcher")
    add_json_argument(parser)
    args = parser.parse_args()
    if args.maxbytes is None:
        args.maxbytes = args.minbytes
    if args.factor <= 1 and args.step < 1:
        parser.error("--step must be above 0 unless --factor is above 1")
    if args.iters < 1 or args.nranks < 1 or min(args.warmup_iters, args.check) < 0:
        parser.error("--iters and --nranks must be above 0, --warmup-iters and --check at least 0")
    return args


def main() -> int:
    """Run as a rank, or launch the ranks."""
    args = parse_arguments()
    if not any(name in os.environ for name in _LAUNCHED):
        sys.stdout.flush()
        launch = [sys.executable, "-m", "r2ccl", "launch", "-n", str(args.nranks), "--"]
        os.execv(sys.executable, [*launch, sys.executable, *sys.argv])
    return run(args)


if __name__ == "__main__":
    sys.exit(main())

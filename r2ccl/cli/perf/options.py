"""Options of ``r2ccl bench``; values of nccl-tests that have no meaning here are refused."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

from r2ccl.cli.perf.forms import FORMS, OPS
from r2ccl.dtypes import DTYPES
from r2ccl.errors import InvalidArgument
from r2ccl.kernels import ON_GPU

#: Names that nccl-tests gives to some types; the other types use NumPy's names.
NCCL_NAMES = {"float16": "half", "float32": "float", "float64": "double"}
#: Element types by name: those for which `r2ccl.cli.perf.cases.make_inputs` makes exact inputs.
DTYPES_BY_NAME = {
    name: dtype
    for dtype in map(DTYPES.__getitem__, ON_GPU)
    for name in (dtype.name, NCCL_NAMES.get(dtype.name, dtype.name))
}
_ALL_DTYPES = [DTYPES[code].name for code in ON_GPU]
#: Collectives on arrays in the memory of a GPU: all except messages and the barrier.
_ON_GPU = [name for name in FORMS if name not in ("sendrecv", "barrier")]


class PerfOptions(NamedTuple):
    """Parsed command line.

    Attributes
    ----------
    root : int
        Rank of the root; -1 for every rank in turn.
    nthreads : int
        Threads per process, each with its own communicator.
    ngpus : int
        Memory of the buffers: 0 for host memory, 1 for the memory of one GPU.
    ngrouped : int
        Calls per group.
    is_blocking : bool
        False if all calls of a loop are asynchronous.
    average : int
        Reported time: 0 for the time of rank 0's first thread; 1, 2 or 3 for the mean, minimum or
        maximum over all threads of all ranks.
    """

    collectives: list[str]
    minbytes: int
    maxbytes: int
    step: int
    factor: float
    iterations: int
    warmup: int
    nchecks: int
    datatypes: list[str]
    ops: list[str]
    root: int
    nthreads: int
    ngpus: int
    ngrouped: int
    is_blocking: bool
    is_registered: bool
    average: int
    nranks: int
    json: Path | None


def options_of(args: argparse.Namespace) -> PerfOptions:
    """Return the options in the parsed arguments of ``r2ccl bench``.

    Raises
    ------
    InvalidArgument
        If an option is refused, or two options exclude each other.
    """
    problem = _problem(args)
    if problem:
        raise InvalidArgument(problem)
    every = _ON_GPU if args.ngpus else list(FORMS)
    return PerfOptions(
        collectives=every if args.collective == "all" else [args.collective],
        minbytes=args.minbytes,
        maxbytes=args.minbytes if args.maxbytes is None else args.maxbytes,
        step=args.step,
        factor=args.factor,
        iterations=args.iters,
        warmup=args.warmup_iters,
        nchecks=args.check,
        datatypes=_ALL_DTYPES if args.datatype == "all" else [args.datatype],
        ops=list(OPS) if args.op == "all" else [args.op or "sum"],
        root=args.root or 0,
        nthreads=args.nthreads,
        ngpus=args.ngpus,
        ngrouped=args.agg_iters,
        is_blocking=bool(args.blocking),
        is_registered=bool(args.local_register),
        average=args.average,
        nranks=args.nranks,
        json=args.json,
    )


def _problem(args: argparse.Namespace) -> str | None:
    """Return the reason why the arguments are refused, or None."""
    if args.datatype not in (*DTYPES_BY_NAME, "all"):
        return f"-d {args.datatype}: allowed are {', '.join(DTYPES_BY_NAME)}, all"
    if not (math.isfinite(args.factor) and args.factor >= 0):
        return f"--factor {args.factor:g}: allowed is a finite number from 0 on; 2 doubles the size"
    if args.maxbytes is not None and args.maxbytes < args.minbytes:
        return f"--maxbytes {args.maxbytes} is below --minbytes {args.minbytes}: change one of them"
    if args.factor <= 1 and args.step < 1:
        return "--step must be above 0 unless --factor is above 1"
    if min(args.iters, args.nranks, args.nthreads, args.agg_iters) < 1:
        return "-n, -t, -m and --nranks must be above 0"
    if min(args.warmup_iters, args.check) < 0:
        return "-w and -c must be at least 0"
    if args.local_register not in (0, 1):
        return f"-R {args.local_register}: r2ccl has no symmetric memory; -R 1 registers buffers"
    if args.cudagraph:
        return f"-G {args.cudagraph}: CUDA graphs cannot capture calls of r2ccl"
    if not args.blocking and args.agg_iters > 1:
        return "-z 0 with -m: the calls of a group run at its end, which blocks; give only one"
    return _problem_of_collective(args) or _problem_of_gpus(args)


def _problem_of_collective(args: argparse.Namespace) -> str | None:
    name = args.collective
    if name == "all":
        if not args.blocking or args.agg_iters > 1:
            return "-z 0 and -m do not apply to barrier: name one collective, not all"
        return None
    form = FORMS[name]
    if args.root is not None and not form.is_rooted:
        rooted = ", ".join(each.name for each in FORMS.values() if each.is_rooted)
        return f"-r: {name} has no root; collectives with a root are {rooted}"
    if args.op is not None and not form.reduces:
        reductions = ", ".join(each.name for each in FORMS.values() if each.reduces)
        return f"-o: {name} does not reduce; reductions are {reductions}"
    if name == "barrier" and (not args.blocking or args.agg_iters > 1):
        return "-z 0 and -m: a barrier blocks, and cannot be grouped"
    return None


def _problem_of_gpus(args: argparse.Namespace) -> str | None:
    if args.ngpus == 0:
        return None
    if args.ngpus != 1:
        return (
            f"-g {args.ngpus}: a rank of r2ccl is a process, and uses one GPU; "
            "start a rank per GPU, with -g 1"
        )
    if args.collective not in (*_ON_GPU, "all"):
        allowed = ", ".join([*_ON_GPU, "all"])
        return f"-g 1: {args.collective} takes no arrays on a GPU; allowed are {allowed}"
    if args.local_register:
        return "-R 1 with -g 1: only host memory is registered"
    try:
        from numba import cuda

        # Raises an error, with the reason, if there is no driver or GPU.
        if not len(cuda.gpus):
            return "-g 1: there is no GPU here; -g 0 measures host memory"
    except Exception as exc:
        reason = " ".join(str(exc).split()) or type(exc).__name__
        return f"-g 1: no GPU can be used here ({reason}); -g 0 measures host memory"
    return None


__all__ = ["DTYPES_BY_NAME", "NCCL_NAMES", "PerfOptions", "options_of"]

"""``r2ccl bench``: measure collectives with the flags and columns of nccl-tests.

The command runs under a launcher such as ``r2ccl launch``, torchrun, mpiexec or netlab. Without a
launcher, it starts ``--nranks`` ranks on this machine. `r2ccl.cli.perf` measures, and verifies the
results.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

from r2ccl.bootstrap.launchers import find_launcher
from r2ccl.cli.lines import launch_printing
from r2ccl.cli.perf.forms import FORMS, OPS
from r2ccl.cli.values import one_of, parse_size


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``r2ccl bench`` to `parser`; `run` takes the parsed arguments."""
    parser.description = (
        "Measure collectives as nccl-tests does: time, algorithm and bus bandwidth. The results "
        "are verified, unless -c is 0. Sizes above 0 but below one element, or one element per "
        "part, are rounded up to that. Without a launcher, the command starts --nranks ranks. The "
        "exit status is 1 if any element is wrong."
    )
    add = parser.add_argument
    names = [*FORMS, "all"]
    add("--collective", type=one_of(names), choices=names, default="allreduce", metavar="NAME",
        help=f"{', '.join(names)}; default: %(default)s")  # fmt: skip
    add("-b", "--minbytes", type=parse_size, default="1M", help="least size; default: %(default)s")
    add("-e", "--maxbytes", type=parse_size, help="largest size; default: --minbytes")
    add("-i", "--step", "--stepbytes", type=parse_size, default="1M",
        help="bytes between sizes; default: %(default)s")  # fmt: skip
    add("-f", "--factor", "--stepfactor", type=float, default=1.0,
        help="if above 1: factor between sizes, replaces -i; default: %(default)s")  # fmt: skip
    add("-n", "--iters", type=int, default=20,
        help="calls, or groups of calls, per timed loop; default: %(default)s")  # fmt: skip
    add("-w", "--warmup-iters", "--warmup_iters", type=int, default=5,
        help="calls, or groups, before the timed loop; default: %(default)s")  # fmt: skip
    add("-c", "--check", type=int, default=1,
        help="verifications per result; 0: none; default: %(default)s")  # fmt: skip
    add("-d", "--datatype", default="float", metavar="TYPE",
        help="element type of NumPy or nccl-tests, or all; default: %(default)s")  # fmt: skip
    add("-o", "--op", choices=[*OPS, "all"], help="operation of reductions; default: sum")
    add("-r", "--root", type=int, help="root; -1: every root in turn; default: 0")
    add("-t", "--nthreads", type=int, default=1,
        help="threads, each with a communicator; default: %(default)s")  # fmt: skip
    add("-g", "--ngpus", type=int, default=0,
        help="1: arrays on a GPU; 0: in host memory; default: %(default)s")  # fmt: skip
    add("-m", "--agg-iters", "--agg_iters", type=int, default=1,
        help="calls per group; default: %(default)s")  # fmt: skip
    add("-z", "--blocking", type=int, choices=(0, 1), default=1,
        help="0: asynchronous calls; default: %(default)s")  # fmt: skip
    add("-R", "--local-register", "--local_register", type=int, default=0,
        help="1: register the buffers; default: %(default)s")  # fmt: skip
    add("-G", "--cudagraph", type=int, default=0,
        help="only 0: CUDA graphs cannot capture calls; default: %(default)s")  # fmt: skip
    add("-a", "--average", type=int, choices=range(4), default=1,
        help="reported time: 0: rank 0, 1: mean, 2: min, 3: max; default: %(default)s")  # fmt: skip
    add("--nranks", type=int, default=2,
        help="ranks that are started without a launcher; default: %(default)s")  # fmt: skip
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="write an object with machine, command and results to FILE",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure as a rank, or on ranks that this process starts; return the exit status.

    Raises
    ------
    InvalidArgument
        If an option is refused before the ranks connect, or the results cannot be written to the
        file of ``--json``.
    Exception
        If this rank fails (`r2ccl.cli.perf.measure.run`), or a rank that this process starts
        (`r2ccl.cli.lines.launch_printing`).
    """
    from r2ccl.cli.perf import measure  # these import NumPy and r2ccl.runtime
    from r2ccl.cli.perf.options import options_of

    options = options_of(args)
    if "RANK" in os.environ or find_launcher(os.environ) is not None:
        return measure.run(options)
    return max(launch_printing(partial(measure.run, options), options.nranks))


__all__ = ["configure", "run"]

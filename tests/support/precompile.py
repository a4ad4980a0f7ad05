"""Compile the code that many tests need, before they start: ``python tests/support/precompile.py``.

Otherwise each process of a test compiles what is still missing. Each of them imports Numba first,
which takes half of the CPU time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

from r2ccl.algos import ring
from r2ccl.dtypes import DTYPES
from r2ccl.errors import InvalidArgument
from r2ccl.flowsim import Change, Network, simulate
from r2ccl.kernels import host
from r2ccl.kernels.fold import fold_kernel
from r2ccl.runtime.compiled import call
from r2ccl.shm import group
from r2ccl.types import ReduceOp


def compile_loops() -> None:
    """Compile the loops of the simulator, of calls over TCP and of shared memory."""
    network = Network.uniform(2, 1, 10.0).changed(Change(1.0, 0, 0, 5.0))
    for sharing in ("max_min", "fair_queue"):
        simulate(ring.allreduce(2, 1), 100, network, nslices=1, sharing=sharing)
    call.preload()
    group.preload()


def compile_kernels() -> None:
    """Compile the reductions of all dtypes and operations."""
    for code in DTYPES:
        for op in ReduceOp:
            with suppress(InvalidArgument):  # the dtype has no such operation
                fold_kernel(code, op)
                host.reducer(code, op)


def main() -> None:
    """Compile all of it, in two processes."""
    tasks: list[Callable[[], None]] = [compile_loops, compile_kernels]
    with ProcessPoolExecutor(len(tasks)) as pool:
        for task in [pool.submit(each) for each in tasks]:
            task.result()


if __name__ == "__main__":
    main()

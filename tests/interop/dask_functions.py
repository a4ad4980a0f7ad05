"""Functions that Dask workers run as ranks."""

from __future__ import annotations

import os

import numpy as np

from r2ccl import Communicator, R2cclError


def total(comm: Communicator, count: int) -> float:
    return float(comm.allreduce(np.full(count, comm.rank + 1.0))[0])


def timeout_of(comm: Communicator) -> float:
    return comm.config.timeout_s


def fail_on_rank_1(comm: Communicator) -> None:
    if comm.rank == 1:
        raise KeyError("of rank 1")
    comm.barrier()


def lose_rank_2(comm: Communicator) -> tuple[str, float]:
    if comm.rank == 2:
        os._exit(1)
    try:
        comm.barrier()
    except R2cclError as exc:
        with comm.shrink() as survivors:
            return type(exc).__name__, total(survivors, 3)
    raise AssertionError("the barrier did not fail")

"""Functions that Dask workers run as ranks."""

from __future__ import annotations

import os
from typing import Any

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


class EndsWorker:
    """A result that ends the worker when the client fetches it."""

    def __reduce__(self) -> Any:
        os._exit(1)


def lose_result_of_rank_2(comm: Communicator) -> EndsWorker | int:
    return EndsWorker() if comm.rank == 2 else comm.rank


def set_variable(name: str, value: str | None) -> None:
    if value is None:
        del os.environ[name]
    else:
        os.environ[name] = value


def lose_rank_2(comm: Communicator) -> tuple[str, float]:
    if comm.rank == 2:
        os._exit(1)
    try:
        comm.barrier()
    except R2cclError as exc:
        with comm.shrink() as survivors:
            return type(exc).__name__, total(survivors, 3)
    raise AssertionError("the barrier did not fail")


def length_of(comm: Communicator, text: str) -> int:
    return len(text)

"""A rank that only has the variables of a launcher other than r2ccl's."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

import r2ccl


def sum_as(variables: Mapping[str, str], rank_variable: str) -> tuple[int, int, float]:
    """Take rank and size from `variables` alone; return rank, nranks and the sum of all ranks.

    `rank_variable` gets the rank of this process.
    """
    rank = os.environ["RANK"]
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                    "R2CC_PORT", "R2CC_SECRET", "R2CC_LISTEN_FD"):  # fmt: skip
            del os.environ[name]
    os.environ.update({**variables, rank_variable: rank})
    absent: Any = None
    sys.modules["mpi4py"] = absent  # as if it were not installed
    with r2ccl.init() as comm:
        return comm.rank, comm.nranks, float(comm.allreduce(np.full(3, comm.rank + 1.0))[0])


__all__ = ["sum_as"]

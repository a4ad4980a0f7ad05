"""Cases of MPI, which `contract/mpi_rank.py` runs: how they are collected, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

#: Takes the module with the names of MPI and a communicator; returns a result.
Case = Callable[[Any, Any], Any]


class Cases(dict[str, Case]):
    """The cases of one subject, by name."""

    def add(self, function: Case) -> Case:
        """Add a case under the name of its function."""
        self.add_named(**{function.__name__: function})
        return function

    def add_named(self, **variants: Case) -> None:
        """Add cases under the names of the arguments."""
        for name, function in variants.items():
            assert name not in self
            self[name] = function


def ramp(comm: Any, count: int = 6, dtype: str = "f8") -> Any:
    """Small whole numbers, other ones on each rank: no order of additions changes their sum."""
    return (np.arange(count) % 5 + comm.rank + 1).astype(dtype)


#: Takes the module with the names of MPI and an array; returns what is passed to a call.
Form = Callable[[Any, Any], Any]

#: Specifications of an array of six doubles.
FORMS: dict[str, Form] = {
    "array": lambda MPI, x: x,
    "matrix": lambda MPI, x: x.reshape(2, 3),
    "fortran": lambda MPI, x: x.reshape((2, 3), order="F"),
    "memoryview": lambda MPI, x: memoryview(x),
    "datatype": lambda MPI, x: [x, MPI.DOUBLE],
    "tuple": lambda MPI, x: (x, MPI.DOUBLE),
    "code": lambda MPI, x: [x, "d"],
    "count": lambda MPI, x: [x, 6],
    "pair": lambda MPI, x: [x, (6, 0)],
    "count_datatype": lambda MPI, x: [x, 6, MPI.DOUBLE],
    "no_count": lambda MPI, x: [x, None, MPI.DOUBLE],
    "pair_datatype": lambda MPI, x: [x, (6, 0), MPI.DOUBLE],
    "four": lambda MPI, x: [x, 6, 0, MPI.DOUBLE],
    "bytes_as_doubles": lambda MPI, x: [x.view(np.uint8), MPI.DOUBLE],
}

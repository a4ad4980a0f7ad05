"""`Call`: a collective with checked arguments, which the methods of mpi4py start and finish."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import msgspec
from mpi4py import MPI

from r2ccl.interop.mpi.errors import MpiError


def nothing() -> None:
    """Do nothing, to finish a call whose result is where it belongs."""


class Call(msgspec.Struct, frozen=True, eq=False):
    """A collective with checked arguments, which can run once or repeatedly.

    Parameters
    ----------
    start : callable
        Runs the collective; takes ``async_op`` and returns a `Work` if it is true.
    finish : callable
        Copies the result to the caller's memory; called after the collective has finished.
    """

    start: Callable[[bool], Any]
    finish: Callable[[], None] = nothing


def root_of(comm: Any, root: Any) -> int:
    """Return `root` as a rank of `comm`.

    Raises
    ------
    TypeError
        If it is not a whole number.
    MpiError
        ``ERR_ROOT``, if it is not a rank.
    """
    rank = operator.index(root)
    if not 0 <= rank < comm.size:
        raise MpiError(f"root={rank}: allowed is 0 to {comm.size - 1}", MPI.ERR_ROOT)
    return rank


__all__ = ["Call", "nothing", "root_of"]

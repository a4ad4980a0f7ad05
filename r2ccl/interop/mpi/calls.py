"""`Call`: a collective with checked arguments, which the methods of mpi4py start and finish."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from mpi4py import MPI

from r2ccl.interop.mpi.errors import MpiError


class CallOutcome(NamedTuple):
    """What a finished call reports: the message that it received, if it received one.

    Attributes
    ----------
    source, tag, nbytes : int
        As in a status of MPI.
    is_cancelled : bool
    obj : object
        What the lower-case methods return.
    """

    source: int = MPI.ANY_SOURCE
    tag: int = MPI.ANY_TAG
    nbytes: int = 0
    is_cancelled: bool = False
    obj: Any = None

    def write(self, status: Any) -> None:
        """Write it to an ``MPI.Status``, unless that is None."""
        if status is not None:
            status.Set_source(self.source)
            status.Set_tag(self.tag)
            status.Set_error(MPI.SUCCESS)
            status.Set_elements(MPI.BYTE, self.nbytes)
            status.Set_cancelled(self.is_cancelled)


#: CallOutcome of a call that received no message.
EMPTY = CallOutcome()


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

    def run(self) -> CallOutcome:
        """Run the collective and finish it."""
        self.start(False)
        self.finish()
        return EMPTY

    def wait(self, work: Any, timeout_s: float | None = None) -> CallOutcome:
        """Wait for `work`, which `start` returned, and finish the collective.

        Without `timeout_s`, until its own timeout, which begins with its own start.
        """
        work.wait(threading.TIMEOUT_MAX if timeout_s is None else timeout_s)
        self.finish()
        return EMPTY

    def look(self, work: Any) -> CallOutcome:
        """Return the outcome of `work`, which is done, without finishing it."""
        return EMPTY

    def cancel(self, work: Any) -> None:
        """Raise `MpiError`, because a collective cannot be cancelled."""
        raise MpiError(
            "a collective cannot be cancelled: wait for the request instead", MPI.ERR_REQUEST
        )

    def drop(self, work: Any) -> None:
        """Raise `MpiError`, because MPI forbids to free the request of a running collective."""
        raise MpiError(
            "the collective of the request is running: wait for the request before Free()",
            MPI.ERR_REQUEST,
        )


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


__all__ = ["EMPTY", "Call", "CallOutcome", "nothing", "root_of"]

"""`Call`: a collective that is ready to run; `CallOutcome`: the outcome of a call."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from mpi4py import MPI

from r2ccl.interop.mpi.errors import MpiError


class CallOutcome(NamedTuple):
    """Outcome of a finished call: the status of the message that it received, if any.

    Attributes
    ----------
    source, tag, nbytes : int
        Source rank, tag and size of the message, as in ``MPI.Status``. Without a message,
        ``MPI.ANY_SOURCE`` (``MPI.PROC_NULL`` after a receive from it), ``MPI.ANY_TAG`` and 0.
    is_cancelled : bool
        True if the receive was cancelled.
    obj : object
        Python object received, which lower-case methods such as ``recv`` return; otherwise None.
    error : int
        Error class of MPI: the class of the error if the call failed; ``MPI.ERR_PENDING`` if it
        was not completed because an earlier request of a list had failed; else ``MPI.SUCCESS``.
    """

    source: int = MPI.ANY_SOURCE
    tag: int = MPI.ANY_TAG
    nbytes: int = 0
    is_cancelled: bool = False
    obj: Any = None
    error: int = MPI.SUCCESS

    def write(self, status: Any) -> None:
        """Write the outcome to `status`, an ``MPI.Status``; do nothing if `status` is None."""
        if status is not None:
            status.Set_source(self.source)
            status.Set_tag(self.tag)
            status.Set_error(self.error)
            status.Set_elements(MPI.BYTE, self.nbytes)
            status.Set_cancelled(self.is_cancelled)


def require_status(status: Any) -> None:
    """Raise TypeError unless `status` is an ``MPI.Status`` or None; called before a call begins."""
    if not isinstance(status, MPI.Status | None):
        raise TypeError(f"status={status!r}: an MPI.Status or None is needed")


#: Outcome of a call that received no message; a receive from ``MPI.PROC_NULL`` has another outcome.
EMPTY = CallOutcome()


def nothing() -> None:
    """Do nothing; used as `Call.finish` if the result is already in the caller's memory."""


class Call(msgspec.Struct, frozen=True, eq=False):
    """A collective with checked arguments, which can run once or repeatedly.

    Parameters
    ----------
    start : callable
        ``start(async_op)`` runs the collective or, if `async_op` is true, starts it and returns its
        `Work`.
    finish : callable
        Copies the result to the caller's memory; called after the collective has finished.
    """

    start: Callable[[bool], Any]
    finish: Callable[[], None] = nothing

    def run(self) -> CallOutcome:
        """Run the collective, and copy its result to the caller's memory."""
        self.start(False)
        self.finish()
        return EMPTY

    def wait(self, work: Any) -> CallOutcome:
        """Wait for `work`, which `start` returned, and copy the result to the caller's memory.

        The only limit is the collective's own timeout, counted from its start.
        """
        work.wait(threading.TIMEOUT_MAX)
        self.finish()
        return EMPTY

    def look(self, work: Any) -> CallOutcome:
        """Return the outcome of `work`, which must be done, without calling `finish`.

        Raise the error of the collective if it has failed.
        """
        work.wait(0)
        return EMPTY

    def cancel(self, work: Any) -> None:
        """Raise `MpiError`, because a collective cannot be cancelled."""
        raise MpiError(
            "a collective cannot be cancelled: wait for the request instead", MPI.ERR_REQUEST
        )

    def drop(self, work: Any) -> None:
        """Raise `MpiError`, because MPI forbids freeing the active request of a collective."""
        raise MpiError(
            "the request is active, and its call is a collective: wait for it before Free()",
            MPI.ERR_REQUEST,
        )


def root_of(comm: Any, root: Any) -> int:
    """Return `root` as a rank of `comm`.

    Raises
    ------
    TypeError
        If `root` is not an integer.
    MpiError
        ``ERR_ROOT``, if `root` is not a rank of `comm`.
    """
    rank = operator.index(root)
    if not 0 <= rank < comm.size:
        raise MpiError(f"root={rank}: allowed is 0 to {comm.size - 1}", MPI.ERR_ROOT)
    return rank


__all__ = ["EMPTY", "Call", "CallOutcome", "nothing", "require_status", "root_of"]

"""Errors of the interface of mpi4py: what a program catches as ``MPI.Exception``.

Errors in the form of an argument are mpi4py's own: TypeError, ValueError, KeyError, BufferError.
Errors that MPI itself would report are `MpiError`. Both leave the communicator usable. A failed
call is an `MpiError` too, whose ``__cause__`` is the error of r2ccl.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpi4py import MPI

from r2ccl import (
    CommunicatorRevoked,
    InternalError,
    InvalidArgument,
    PeerLost,
    R2cclError,
)

#: Error class of MPI for errors of r2ccl; the first class that fits counts. Others: ERR_OTHER.
_CLASSES: tuple[tuple[type[R2cclError], int], ...] = (
    (InvalidArgument, MPI.ERR_ARG),
    (PeerLost, MPI.ERR_PROC_FAILED),
    (CommunicatorRevoked, MPI.ERR_REVOKED),
    (InternalError, MPI.ERR_INTERN),
)


class MpiError(MPI.Exception):
    """Exception with an error class of MPI, raised by calls that run on r2ccl.

    Parameters
    ----------
    message : str
        Text of the error; `Get_error_string` returns it.
    error_class : int
        Error class of MPI, such as ``MPI.ERR_ROOT``; `Get_error_class` returns it.
    """

    def __new__(cls, message: str, error_class: int) -> MpiError:  # noqa: D102  # see the class
        return super().__new__(cls, error_class)

    def __init__(self, message: str, error_class: int) -> None:
        super().__init__(error_class)
        self._message = message

    def __str__(self) -> str:
        return self._message

    def __repr__(self) -> str:
        return f"MpiError({self._message!r}, {self.Get_error_class()})"

    def Get_error_string(self) -> str:
        """Return the text of the error."""
        return self._message

    @property
    def error_string(self) -> str:
        """Text of the error."""
        return self._message


@contextmanager
def handled(comm: Any) -> Iterator[None]:
    """Translate errors of r2ccl to `MpiError`, and call the error handler of `comm` before raising.

    Parameters
    ----------
    comm : MPI.Comm
        With ``MPI.ERRORS_ARE_FATAL`` as its handler, an error ends the job. A handler of
        ``MPI.Comm.Create_errhandler`` is called with the error class. Then the error is raised.
    """
    try:
        yield
    except MpiError as exc:
        _call_handler(comm, exc)
        raise
    except R2cclError as exc:
        found = (code for kind, code in _CLASSES if isinstance(exc, kind))
        error = MpiError(str(exc), next(found, MPI.ERR_OTHER))
        _call_handler(comm, error)
        raise error from exc


def _call_handler(comm: Any, error: MpiError) -> None:
    if comm != MPI.COMM_NULL:
        comm.Call_errhandler(error.Get_error_class())


__all__ = ["MpiError", "handled"]

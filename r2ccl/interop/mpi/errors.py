"""`MpiError`, which a program catches as ``MPI.Exception``, and the translation of r2ccl's errors.

An argument of a wrong form raises the same error as in mpi4py: TypeError, ValueError, KeyError or
BufferError. An argument that MPI itself would reject raises `MpiError`. Both leave the communicator
usable. A call that fails in r2ccl raises `MpiError` too, whose ``__cause__`` is the error of r2ccl.
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

#: Error class of MPI for each exception of r2ccl; the first match counts. All others: ERR_OTHER.
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

    def __reduce__(self) -> tuple[Any, ...]:
        return MpiError, (self._message, self.Get_error_class())

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
        If its error handler is ``MPI.ERRORS_ARE_FATAL``, the error ends the job. A handler that
        ``MPI.Comm.Create_errhandler`` made is called with the error class, and then the error is
        raised. For ``MPI.COMM_NULL``, no handler is called.
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

"""Interface of mpi4py on top of a `Communicator`.

A program for mpi4py wraps its communicator::

    from r2ccl.interop.mpi import Comm

    comm = Comm(MPI.COMM_WORLD)
    comm.Allreduce(MPI.IN_PLACE, x)

or changes one import, because this package has all names of ``mpi4py.MPI``::

    from r2ccl.interop import mpi as MPI

    comm = MPI.COMM_WORLD

`Comm`, `Intracomm`, `Message`, `MpiError`, `Op`, `Prequest`, `Request` and `COMM_WORLD` are those
of this package; all other names are those of mpi4py. The first use of `COMM_WORLD` connects the
ranks, and is collective. docs/mpi.md lists what runs on r2ccl and what runs on MPI.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from mpi4py import MPI

from r2ccl.interop.mpi.comm import Comm
from r2ccl.interop.mpi.errors import MpiError
from r2ccl.interop.mpi.operations import MpiOp as Op
from r2ccl.interop.mpi.probes import MpiMessage as Message
from r2ccl.interop.mpi.requests import MpiPrequest as Prequest
from r2ccl.interop.mpi.requests import MpiRequest as Request

Intracomm = Comm


def __getattr__(name: str) -> Any:
    return _world() if name == "COMM_WORLD" else getattr(MPI, name)


@cache
def _world() -> Comm:
    return Comm(MPI.COMM_WORLD)


__all__ = ["Comm", "Intracomm", "Message", "MpiError", "Op", "Prequest", "Request"]

"""Communicator of mpi4py whose collectives run on r2ccl.

`Comm` derives from ``MPI.Intracomm`` and has its handle, because windows, files and other libraries
take a communicator as an argument. Each public name of ``MPI.Intracomm`` is in one of four sets:

- carried: defined by `Comm`, and runs on r2ccl
- `NOT_YET`: runs on MPI, until r2ccl has it
- `PASSED`: runs on MPI, because it is not communication of r2ccl's kind
- all others: raise `MpiError`; names that a later mpi4py adds are among them

Invariant: no other communication of a `Comm` than that in `NOT_YET` and `PASSED` uses MPI.
"""

from __future__ import annotations

import atexit
import inspect
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from mpi4py import MPI

from r2ccl import Communicator, init
from r2ccl.interop.mpi import exchanges, objects, reductions
from r2ccl.interop.mpi.calls import Call
from r2ccl.interop.mpi.errors import MpiError, handled
from r2ccl.interop.mpi.requests import MpiPrequest, MpiRequest

#: Communication that runs on MPI because `Communicator` has no method for it yet.
_NOT_YET = """
    Send Isend Send_init send isend Ssend Issend Ssend_init ssend issend
    Bsend Ibsend Bsend_init bsend ibsend Rsend Irsend Rsend_init
    Recv Irecv Recv_init recv irecv
    Sendrecv Isendrecv sendrecv Sendrecv_replace Isendrecv_replace
    Probe Iprobe probe iprobe Mprobe Improbe mprobe improbe
    Psend_init Precv_init
    Attach_buffer Detach_buffer Flush_buffer Iflush_buffer
"""
NOT_YET = frozenset(_NOT_YET.split())

#: Methods and attributes that are not communication of r2ccl's kind: what a communicator is,
#: attributes, error handlers, topologies, intercommunicators and new processes.
_PASSED = """
    Get_rank Get_size Get_group Get_name Set_name Get_info Set_info Compare Is_inter Is_intra
    rank size group name info is_inter is_intra is_topo topology handle
    f2py py2f fromhandle fromint toint
    Get_attr Set_attr Delete_attr Create_keyval Free_keyval
    Get_errhandler Set_errhandler Create_errhandler Call_errhandler
    Get_topology Cart_map Graph_map Create_cart Create_graph Create_dist_graph
    Create_dist_graph_adjacent
    Create_intercomm Accept Connect Join Get_parent Spawn Spawn_multiple
"""
PASSED = frozenset(_PASSED.split())

#: Advice in the error of each refused method, by its name.
_INSTEAD = {
    "Revoke": "call comm.communicator.revoke()",
    "Is_revoked": "catch MPI.Exception: its error class is MPI.ERR_REVOKED",
    "Shrink": "call comm.communicator.shrink(), which returns a Communicator of r2ccl",
    "Idup": "call Dup()",
}


def _forms(make: Callable[..., Call]) -> tuple[Any, Any, Any]:
    """Return the blocking, the nonblocking and the persistent method of a collective."""
    info = inspect.Parameter("info", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=MPI.INFO_NULL)
    plain = inspect.signature(make)
    with_info = plain.replace(parameters=[*plain.parameters.values(), info])

    def blocking(self: Comm, *args: Any, **kwargs: Any) -> None:
        with handled(self.mpi):
            call = make(self, *args, **kwargs)
            call.start(False)
            call.finish()

    def nonblocking(self: Comm, *args: Any, **kwargs: Any) -> MpiRequest:
        with handled(self.mpi):
            return MpiRequest(self, make(self, *args, **kwargs))

    def persistent(self: Comm, *args: Any, **kwargs: Any) -> MpiPrequest:
        given = with_info.bind(self, *args, **kwargs).arguments
        given.pop("info", None)  # hints, which r2ccl has no use for
        with handled(self.mpi):
            return MpiPrequest(self, make(**given))

    return (
        _documented(blocking, make.__doc__, plain),
        _documented(nonblocking, make.__doc__, plain),
        _documented(persistent, make.__doc__, with_info),
    )


def _objects(function: Callable[..., Any]) -> Any:
    """Return the method of a collective on pickled objects."""

    def method(self: Comm, *args: Any, **kwargs: Any) -> Any:
        with handled(self.mpi):
            return function(self, *args, **kwargs)

    return _documented(method, function.__doc__, inspect.signature(function))


def _documented(method: Any, text: str | None, signature: inspect.Signature) -> Any:
    method.__doc__ = text
    method.__signature__ = signature
    return method


class Comm(MPI.Intracomm):
    """``MPI.Intracomm`` whose collectives run on r2ccl and survive the loss of a rail.

    Parameters
    ----------
    comm : MPI.Intracomm
        Provides the ranks, and runs what r2ccl does not carry.
    **options
        Arguments of `r2ccl.init`: settings, and ``faults``.

    Attributes
    ----------
    mpi : MPI.Intracomm
        Communicator of mpi4py with the same ranks, for a call that MPI shall run.
    communicator : Communicator
        Communicator of r2ccl, for `repairs`, `health`, GPU arrays and all else that MPI lacks.

    Raises
    ------
    R2cclError
        For the reasons given in `r2ccl.init`.
    TypeError
        If `comm` is an intercommunicator.

    Notes
    -----
    *Collective*: all ranks of `comm`. The connections are closed by `Free`, or at the end of the
    process; if it ends with an exception, the calls of the other ranks end with an error.
    """

    def __new__(cls, comm: Any, **options: Any) -> Comm:  # noqa: D102  # see the class
        return super().__new__(cls, comm)

    def __init__(self, comm: Any, **options: Any) -> None:
        self.mpi = MPI.Intracomm(comm)
        self._options = {name: value for name, value in options.items() if name != "faults"}
        self._communicator: Communicator | None = init(self.mpi, **options)
        atexit.register(self._leave)

    @property
    def communicator(self) -> Communicator:
        """Communicator of r2ccl that runs the collectives."""
        if self._communicator is None:
            raise MpiError("the communicator was freed: make another one", MPI.ERR_COMM)
        return self._communicator

    Allreduce, Iallreduce, Allreduce_init = _forms(reductions.allreduce)
    Reduce, Ireduce, Reduce_init = _forms(reductions.reduce)
    Reduce_scatter, Ireduce_scatter, Reduce_scatter_init = _forms(reductions.reduce_scatter)
    Reduce_scatter_block, Ireduce_scatter_block, Reduce_scatter_block_init = _forms(
        reductions.reduce_scatter_block
    )
    Scan, Iscan, Scan_init = _forms(reductions.scan)
    Exscan, Iexscan, Exscan_init = _forms(reductions.exscan)

    Barrier, Ibarrier, Barrier_init = _forms(exchanges.barrier)
    Bcast, Ibcast, Bcast_init = _forms(exchanges.bcast)
    Gather, Igather, Gather_init = _forms(exchanges.gather)
    Gatherv, Igatherv, Gatherv_init = _forms(exchanges.gatherv)
    Allgather, Iallgather, Allgather_init = _forms(exchanges.allgather)
    Allgatherv, Iallgatherv, Allgatherv_init = _forms(exchanges.allgatherv)
    Scatter, Iscatter, Scatter_init = _forms(exchanges.scatter)
    Scatterv, Iscatterv, Scatterv_init = _forms(exchanges.scatterv)
    Alltoall, Ialltoall, Alltoall_init = _forms(exchanges.alltoall)
    Alltoallv, Ialltoallv, Alltoallv_init = _forms(exchanges.alltoallv)
    Alltoallw, Ialltoallw, Alltoallw_init = _forms(exchanges.alltoallw)

    barrier = Barrier
    bcast = _objects(objects.bcast)
    gather = _objects(objects.gather)
    allgather = _objects(objects.allgather)
    scatter = _objects(objects.scatter)
    alltoall = _objects(objects.alltoall)
    reduce = _objects(objects.reduce)
    allreduce = _objects(objects.allreduce)
    scan = _objects(objects.scan)
    exscan = _objects(objects.exscan)

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Return the communicator of the ranks with this `color`, ordered by `key` and rank.

        Returns MPI.COMM_NULL if `color` is MPI.UNDEFINED.
        """
        return self._child(self.mpi.Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: Any = MPI.INFO_NULL) -> Any:
        """Return the communicator of the ranks of one kind, such as MPI.COMM_TYPE_SHARED."""
        return self._child(self.mpi.Split_type(split_type, key, info))

    def Dup(self, info: Any = None) -> Any:
        """Return a communicator of the same ranks, whose calls are apart from those of this one."""
        return self._child(self.mpi.Dup(info))

    def Dup_with_info(self, info: Any) -> Any:
        """Return a duplicate as `Dup` with the hints `info`."""
        return self._child(self.mpi.Dup_with_info(info))

    def Clone(self) -> Any:
        """Return a duplicate as `Dup`."""
        return self._child(self.mpi.Clone())

    def Create(self, group: Any) -> Any:
        """Return the communicator of the ranks in `group`; all ranks of this one must call it."""
        return self._child(self.mpi.Create(group))

    def Create_group(self, group: Any, tag: int = 0) -> Any:
        """Return the communicator of the ranks in `group`; only these must call it."""
        return self._child(self.mpi.Create_group(group, tag))

    @classmethod
    def Create_from_group(
        cls,
        group: Any,
        stringtag: str = "org.mpi4py",
        info: Any = MPI.INFO_NULL,
        errhandler: Any = None,
    ) -> Comm:
        """Return a communicator of the ranks in `group`, which all must call it."""
        return cls(MPI.Intracomm.Create_from_group(group, stringtag, info, errhandler))

    def Free(self) -> None:
        """Wait until every rank has received all its data, close r2ccl and free the handle of MPI.

        *Collective*: all ranks. Raises the error of MPI for ``MPI.COMM_WORLD``, which stays usable.
        """
        if self.mpi != MPI.COMM_WORLD and self.mpi != MPI.COMM_SELF:
            with handled(self.mpi):
                communicator, self._communicator = self.communicator, None
                atexit.unregister(self._leave)
                communicator.close()
        super().Free()
        self.mpi = MPI.Intracomm(self)

    def free(self) -> None:
        """Call `Free`."""
        self.Free()

    def Disconnect(self) -> None:
        """Call `Free`, which waits for all communication."""
        self.Free()

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """End the calls of all ranks with an error, then end the processes as MPI does."""
        self.communicator.abort(f"MPI.Comm.Abort({errorcode}) was called")
        super().Abort(errorcode)

    def _child(self, made: Any) -> Any:
        """Return a new communicator of mpi4py as a `Comm` with the settings of this one."""
        if made == MPI.COMM_NULL:
            return made
        with handled(self.mpi):
            return Comm(made, **self._options)

    def _leave(self) -> None:
        """Close r2ccl at the end of the process, or abort it if the program failed."""
        communicator = self.communicator
        if getattr(sys, "last_value", None) is not None:
            communicator.abort(f"the program ended with {sys.last_value!r}")
        else:
            communicator.close()


def _refuse(name: str) -> Any:
    """Return a method that raises `MpiError` with what to do instead."""
    instead = _INSTEAD.get(name, f"call comm.mpi.{name}, which MPI runs")

    def method(self: Comm, *args: Any, **kwargs: Any) -> None:
        with handled(self.mpi):
            raise MpiError(f"r2ccl does not carry {name}: {instead}", MPI.ERR_UNSUPPORTED_OPERATION)

    method.__doc__ = f"Raise `MpiError`: {instead}."
    return method


for _name in dir(MPI.Intracomm):
    if not _name.startswith("_") and _name not in {*vars(Comm), *NOT_YET, *PASSED}:
        setattr(Comm, _name, _refuse(_name))

__all__ = ["NOT_YET", "PASSED", "Comm"]

"""Communicator of mpi4py whose collectives and messages run on r2ccl.

`Comm` derives from ``MPI.Intracomm`` and has an MPI handle, because windows, files and other
libraries take a communicator as an argument. Each public name of ``MPI.Intracomm`` is in one of
three sets:

- defined by `Comm`: runs on r2ccl, or on r2ccl and MPI together, such as `Split` and `Free`
- in `PASSED`: runs on MPI
- all others, including names that a later mpi4py adds: raise `MpiError` when they are called

Invariant: apart from the names in `PASSED`, MPI communicates only to create, free and abort
communicators.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any, Literal, NoReturn

import numpy as np
from mpi4py import MPI

from r2ccl import Communicator, MessageRequest, init
from r2ccl.interop.mpi import exchanges, forms, messages, object_messages, objects, reductions
from r2ccl.interop.mpi.calls import require_status
from r2ccl.interop.mpi.errors import MpiError, handled
from r2ccl.interop.mpi.probes import claim, probe
from r2ccl.interop.mpi.requests import Unfinished

#: Methods and attributes that run on MPI: properties of a communicator, its attributes, error
#: handlers and topology, intercommunicators, new processes, and the memory for buffered messages
#: (r2ccl needs none).
_PASSED = """
    Get_rank Get_size Get_group Get_name Set_name Get_info Set_info Compare Is_inter Is_intra
    rank size group name info is_inter is_intra is_topo topology handle
    f2py py2f fromhandle fromint toint
    Get_attr Set_attr Delete_attr Create_keyval Free_keyval
    Get_errhandler Set_errhandler Create_errhandler Call_errhandler
    Get_topology Cart_map Graph_map Create_cart Create_graph Create_dist_graph
    Create_dist_graph_adjacent
    Create_intercomm Accept Connect Join Get_parent Spawn Spawn_multiple
    Attach_buffer
"""
PASSED = frozenset(_PASSED.split())

#: Advice in the errors of some refused methods. For all others, see `_refuse`.
_INSTEAD = {
    "Revoke": "call comm.communicator.revoke()",
    "Is_revoked": "catch MPI.Exception: its error class is MPI.ERR_REVOKED",
    "Shrink": "call comm.communicator.shrink(), which returns a Communicator of r2ccl",
    "Idup": "call Dup()",
    "Iflush_buffer": "call Flush_buffer()",
    "Psend_init": "call Send_init() for each part",
    "Precv_init": "call Recv_init() for each part",
}


class Connections:
    """Connections of one `Comm`, the *first* `Comm`, and of all communicators made from it.

    Parameters
    ----------
    communicator : Communicator
        Communicator of r2ccl with all ranks of the first `Comm`.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        #: Number of communicators that were made from the first `Comm`, directly or through others,
        #: and are not yet closed, those in `_freed` included.
        self._nchildren = 0
        self._freed: list[tuple[Communicator, Unfinished]] = []
        self._kept: set[MessageRequest] = set()
        self._lock = threading.Lock()
        self._owner = os.getpid()
        atexit.register(self._leave)

    def keep(self, request: MessageRequest) -> None:
        """Hold a buffered message until it is sent or, if it fails, until `flush` raises its error.

        Any thread may call this method.
        """
        with self._lock:
            for each in self._kept:
                if not each.has_succeeded:
                    each.is_done()  # advances all messages
                    break
            self._kept = {each for each in self._kept if not each.has_succeeded} | {request}

    def flush(self) -> None:
        """Wait until all messages that are buffered now are sent; any thread may call this method.

        If a message fails, raise its error, without waiting for the other messages. Later calls do
        not raise this error again.
        """
        with self._lock:  # not during the waits, because `keep` must not block
            kept = list(self._kept)
        for request in kept:
            try:
                request.wait()
            finally:
                with self._lock:
                    self._kept.discard(request)

    def add_child(self) -> None:
        """Count a communicator made from the first `Comm`; any thread may call this method."""
        with self._lock:
            self._nchildren += 1

    def free_child(self, communicator: Communicator, unfinished: Unfinished) -> None:
        """Close a communicator made from the first `Comm`, if it has no unfinished request.

        Otherwise, the communicator is closed by the first call of this method or of `free` after
        its requests have finished.
        """
        with self._lock:
            self._freed.append((communicator, unfinished))
        self._close_finished()

    def _close_finished(self) -> None:
        while (communicator := self._next_finished()) is not None:
            communicator.close()

    def _next_finished(self) -> Communicator | None:
        """Remove and return a freed communicator without unfinished requests, or None."""
        with self._lock:
            for at, (communicator, unfinished) in enumerate(self._freed):
                if not unfinished:
                    del self._freed[at]
                    self._nchildren -= 1
                    return communicator
        return None

    def free(self, unfinished: Unfinished) -> None:
        """Close the connections, unless a rank still uses them.

        A rank uses them while a communicator made from the first `Comm` is open, or a request of
        the first `Comm` is unfinished. Connections left open are closed when the process ends.

        *Collective*: all ranks.
        """
        self._close_finished()
        nusers = self._nchildren + bool(unfinished)
        if not self.communicator.allreduce(np.array([nusers]))[0]:
            atexit.unregister(self._leave)
            self.communicator.close()

    def _leave(self) -> None:
        """Close the connections when the process ends; abort if the program failed.

        Do nothing in a forked child, which does not own the connections.
        """
        if os.getpid() != self._owner:
            return
        if getattr(sys, "last_value", None) is not None:
            self.communicator.abort(f"the program ended with {sys.last_value!r}")
        else:
            self.flush()
            self.communicator.close()


class Comm(MPI.Intracomm):
    """``MPI.Intracomm`` whose communication runs on r2ccl and survives the loss of a rail.

    Parameters
    ----------
    comm : MPI.Intracomm
        Provides the ranks of the `Comm`, and runs the methods in `PASSED`.
    **options
        Keyword arguments of `r2ccl.init`: fields of `Config`, and ``faults``.

    Attributes
    ----------
    mpi : MPI.Intracomm
        Communicator of mpi4py with the same ranks, for calls that MPI itself must run.
    communicator : Communicator
        Communicator of r2ccl, for `repairs`, `health`, GPU arrays and other features that MPI
        lacks.

    Raises
    ------
    R2cclError
        For the reasons given in `r2ccl.init`.
    TypeError
        If `comm` is an intercommunicator.

    Notes
    -----
    *Collective*: all ranks of `comm`. Communicators made from this `Comm`, by `Split` or `Dup` for
    example, share its connections. `Free` of this `Comm` closes the connections if the
    communicators made from it were freed before, and no request is unfinished; otherwise the
    connections stay open until the process ends. If the process ends with an exception, the calls
    of the other ranks end with an error.
    """

    def __new__(cls, comm: Any, **options: Any) -> Comm:  # noqa: D102  # see the class
        return super().__new__(cls, comm)

    def __init__(self, comm: Any, **options: Any) -> None:
        made = init(MPI.Intracomm(comm), **options)
        self._use(comm, made, Connections(made))

    def _use(self, comm: Any, communicator: Communicator, connections: Connections) -> None:
        self.mpi = MPI.Intracomm(comm)
        self._communicator: Communicator | None = communicator
        self._connections = connections
        self.unfinished = Unfinished()
        #: Lock held while a thread takes a message: `Mprobe` probes and receives it in two steps.
        self.taking = threading.Lock()
        #: ``keep(request)`` holds a buffered message until it is sent.
        self.keep = connections.keep

    @property
    def communicator(self) -> Communicator:
        """Communicator of r2ccl that runs the communication.

        Raises `MpiError` with ``ERR_COMM`` after `Free`.
        """
        if self._communicator is None:
            raise MpiError("the communicator was freed: make another one", MPI.ERR_COMM)
        return self._communicator

    Allreduce, Iallreduce, Allreduce_init = forms.collective(reductions.allreduce)
    Reduce, Ireduce, Reduce_init = forms.collective(reductions.reduce)
    Reduce_scatter, Ireduce_scatter, Reduce_scatter_init = forms.collective(
        reductions.reduce_scatter
    )
    Reduce_scatter_block, Ireduce_scatter_block, Reduce_scatter_block_init = forms.collective(
        reductions.reduce_scatter_block
    )
    Scan, Iscan, Scan_init = forms.collective(reductions.scan)
    Exscan, Iexscan, Exscan_init = forms.collective(reductions.exscan)

    Barrier, Ibarrier, Barrier_init = forms.collective(exchanges.barrier)
    Bcast, Ibcast, Bcast_init = forms.collective(exchanges.bcast)
    Gather, Igather, Gather_init = forms.collective(exchanges.gather)
    Gatherv, Igatherv, Gatherv_init = forms.collective(exchanges.gatherv)
    Allgather, Iallgather, Allgather_init = forms.collective(exchanges.allgather)
    Allgatherv, Iallgatherv, Allgatherv_init = forms.collective(exchanges.allgatherv)
    Scatter, Iscatter, Scatter_init = forms.collective(exchanges.scatter)
    Scatterv, Iscatterv, Scatterv_init = forms.collective(exchanges.scatterv)
    Alltoall, Ialltoall, Alltoall_init = forms.collective(exchanges.alltoall)
    Alltoallv, Ialltoallv, Alltoallv_init = forms.collective(exchanges.alltoallv)
    Alltoallw, Ialltoallw, Alltoallw_init = forms.collective(exchanges.alltoallw)

    barrier = Barrier
    bcast = forms.on_objects(objects.bcast)
    gather = forms.on_objects(objects.gather)
    allgather = forms.on_objects(objects.allgather)
    scatter = forms.on_objects(objects.scatter)
    alltoall = forms.on_objects(objects.alltoall)
    reduce = forms.on_objects(objects.reduce)
    allreduce = forms.on_objects(objects.allreduce)
    scan = forms.on_objects(objects.scan)
    exscan = forms.on_objects(objects.exscan)

    Send, Isend, Send_init = forms.sent(messages.send)
    Ssend, Issend, Ssend_init = forms.sent(messages.ssend)
    Bsend, Ibsend, Bsend_init = forms.sent(messages.bsend)
    Rsend, Irsend, Rsend_init = forms.sent(messages.rsend)
    Recv, Irecv, Recv_init = forms.received(messages.recv)
    Sendrecv = forms.blocking_with_status(messages.sendrecv)
    Isendrecv = forms.nonblocking(messages.sendrecv)
    Sendrecv_replace = forms.blocking_with_status(messages.sendrecv_replace)
    Isendrecv_replace = forms.nonblocking(messages.sendrecv_replace)

    send, isend = forms.blocking(object_messages.send), forms.nonblocking(object_messages.send)
    ssend, issend = forms.blocking(object_messages.ssend), forms.nonblocking(object_messages.ssend)
    bsend, ibsend = forms.blocking(object_messages.bsend), forms.nonblocking(object_messages.bsend)
    recv = forms.blocking_with_status(object_messages.recv)
    irecv = forms.nonblocking(object_messages.irecv)

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: Any = None,
    ) -> Any:
        """Send an object and receive one at the same time, like mpi4py's sendrecv.

        Return the received object.
        """
        require_status(status)
        with handled(self.mpi):
            outcome = object_messages.sendrecv(
                self, sendobj, dest, sendtag, recvbuf, source, recvtag
            )
        outcome.write(status)
        return outcome.obj

    def Probe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None
    ) -> Literal[True]:
        """Wait for a message that `Recv` with these arguments would take; return True."""
        with handled(self.mpi):
            probe(self, source, tag, status, is_blocking=True)
        return True

    def Iprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None
    ) -> bool:
        """Return at once whether there is a message that `Recv` with these arguments would take."""
        with handled(self.mpi):
            return probe(self, source, tag, status, is_blocking=False) is not None

    def Mprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None
    ) -> Any:
        """Wait for a message; return it as a `Message`, which no other receive or probe sees."""
        with handled(self.mpi):
            return claim(self, source, tag, status, is_blocking=True)

    def Improbe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None
    ) -> Any:
        """Return a message like `Mprobe`, or None if none has arrived yet."""
        with handled(self.mpi):
            return claim(self, source, tag, status, is_blocking=False)

    probe, iprobe, mprobe, improbe = Probe, Iprobe, Mprobe, Improbe

    def Flush_buffer(self) -> None:
        """Wait until all buffered messages are sent."""
        with handled(self.mpi):
            self._connections.flush()

    def Detach_buffer(self) -> Any:
        """Wait until all buffered messages are sent; return the memory that was attached."""
        self.Flush_buffer()
        return super().Detach_buffer()

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Return the communicator of the ranks with this `color`, ordered by `key` and rank.

        Returns MPI.COMM_NULL if `color` is MPI.UNDEFINED. *Collective*: all ranks.
        """
        return self._child(self.mpi.Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: Any = MPI.INFO_NULL) -> Any:
        """Return the communicator of the ranks that MPI groups with this rank by `split_type`.

        MPI.COMM_TYPE_SHARED, for example, groups the ranks of one host. Returns MPI.COMM_NULL if
        MPI puts this rank in no group. *Collective*: all ranks.
        """
        return self._child(self.mpi.Split_type(split_type, key, info))

    def Dup(self, info: Any = None) -> Any:
        """Return a communicator of the same ranks; its calls never match calls of this `Comm`.

        *Collective*: all ranks.
        """
        return self._child(self.mpi.Dup(info))

    def Dup_with_info(self, info: Any) -> Any:
        """Return a duplicate like `Dup`, with the hints `info`."""
        return self._child(self.mpi.Dup_with_info(info))

    def Clone(self) -> Any:
        """Return a duplicate like `Dup`."""
        return self._child(self.mpi.Clone())

    def Create(self, group: Any) -> Any:
        """Return the communicator of the ranks in `group`; MPI.COMM_NULL on other ranks.

        *Collective*: all ranks of this communicator.
        """
        return self._child(self.mpi.Create(group))

    def Create_group(self, group: Any, tag: int = 0) -> Any:
        """Return the communicator of the ranks in `group`; MPI.COMM_NULL on other callers.

        *Collective*: only the ranks in `group`.
        """
        made = self.mpi.Create_group(group, tag)
        if made == MPI.COMM_NULL:
            return made
        with handled(self.mpi):
            ranks = _ranks(made, self.mpi)
            return self._joined(made, self.communicator.create_among(ranks, made.allgather))

    @classmethod
    def Create_from_group(
        cls,
        group: Any,
        stringtag: str = "org.mpi4py",
        info: Any = MPI.INFO_NULL,
        errhandler: Any = None,
    ) -> Comm:
        """Return a communicator of the ranks in `group`, with new connections.

        *Collective*: all ranks in `group`.
        """
        return cls(MPI.Intracomm.Create_from_group(group, stringtag, info, errhandler))

    def Free(self) -> None:
        """Wait for the buffered messages, then free the communicator in r2ccl and in MPI.

        As in MPI, requests that are active at that time can still be completed, because r2ccl keeps
        the communicator open for them. See `Comm` for the connections.

        *Collective*: all ranks. For ``MPI.COMM_WORLD`` and ``MPI.COMM_SELF``, this method raises
        the error of MPI, and the communicator stays usable.
        """
        if self.mpi != MPI.COMM_WORLD and self.mpi != MPI.COMM_SELF:
            with handled(self.mpi):
                communicator, connections = self.communicator, self._connections
                connections.flush()  # if this raises, `Free` may be called again
                self._communicator = None
                if communicator is connections.communicator:
                    connections.free(self.unfinished)
                else:
                    connections.free_child(communicator, self.unfinished)
        super().Free()
        self.mpi = MPI.Intracomm(self)

    def free(self) -> None:
        """Call `Free`."""
        self.Free()

    def Disconnect(self) -> None:
        """Call `Free`."""
        self.Free()

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """End the calls of all ranks with an error, then end the processes as MPI does."""
        self.communicator.abort(f"MPI.Comm.Abort({errorcode}) was called")
        super().Abort(errorcode)

    def _child(self, made: Any) -> Any:
        """Return a `Comm` for `made`, a new communicator of mpi4py, on the connections of `self`.

        *Collective*: all ranks of this `Comm`.
        """
        is_in = made != MPI.COMM_NULL
        with handled(self.mpi):
            # The first rank differs for each of the communicators made by one call.
            color, key = (_ranks(made, self.mpi)[0], made.rank) if is_in else (None, 0)
            communicator = self.communicator.split(color, key)
        return made if communicator is None else self._joined(made, communicator)

    def _joined(self, made: Any, communicator: Communicator) -> Comm:
        child = Comm.__new__(Comm, made)
        child._use(made, communicator, self._connections)
        self._connections.add_child()
        return child


def _ranks(made: Any, parent: Any) -> list[int]:
    """Return the rank in `parent` of each rank of `made`."""
    groups = made.Get_group(), parent.Get_group()
    ranks = MPI.Group.Translate_ranks(groups[0], range(made.size), groups[1])
    for each in groups:
        each.Free()
    return [int(rank) for rank in ranks]


def _refuse(name: str) -> Any:
    """Return the method that replaces `name`: it raises `MpiError` and names an alternative."""
    instead = _INSTEAD.get(name, f"call comm.mpi.{name}, which MPI runs")

    def method(self: Comm, *args: Any, **kwargs: Any) -> None:
        with handled(self.mpi):
            raise MpiError(f"r2ccl does not run {name}: {instead}", MPI.ERR_UNSUPPORTED_OPERATION)

    method.__doc__ = f"Raise `MpiError`, because r2ccl does not run this method: {instead}."
    return method


for _name in dir(MPI.Intracomm):
    if not _name.startswith("_") and _name not in {*vars(Comm), *PASSED}:
        setattr(Comm, _name, _refuse(_name))

__all__ = ["PASSED", "Comm", "Connections"]

"""Collectives of mpi4py with their arguments, as calls of a `Communicator`.

Each function takes the communicator of the interface and the arguments of one method of mpi4py,
checks them and returns a `Call`. `Comm` makes the blocking, the nonblocking and the persistent
method of mpi4py from it. The functions for pickled objects run their calls at once.

Invariant: collectives that only move data send bytes, so the ranks of a call may describe the same
elements with different datatypes, as MPI allows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce as fold
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI

from r2ccl.interop.mpi.buffers import Message, is_in_place, message
from r2ccl.interop.mpi.errors import MpiError
from r2ccl.interop.mpi.operations import reduction


def _nothing() -> None:
    pass


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
    finish: Callable[[], None] = _nothing


def allreduce(comm: Any, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Call:
    """Reduce `sendbuf` over all ranks into `recvbuf` on every rank, as mpi4py's Allreduce."""
    received = message(recvbuf, writable=True)
    found, dtype = reduction(op, received.datatype)
    out = received.elements(dtype)
    x = out if is_in_place(sendbuf) else _input(sendbuf, received).elements(dtype)
    return Call(lambda is_async: comm.communicator.allreduce(x, out, found, async_op=is_async))


def reduce(comm: Any, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0) -> Call:
    """Reduce `sendbuf` over all ranks into `recvbuf` on rank `root`, as mpi4py's Reduce."""
    root = _root(comm, root)
    if comm.rank != root:
        sent = message(sendbuf, writable=False)
        found, dtype = reduction(op, sent.datatype)
        x = sent.elements(dtype)
        return Call(
            lambda is_async: comm.communicator.reduce(x, None, found, root, async_op=is_async)
        )
    received = message(recvbuf, writable=True)
    found, dtype = reduction(op, received.datatype)
    out = received.elements(dtype)
    x = out if is_in_place(sendbuf) else _input(sendbuf, received).elements(dtype)
    return Call(lambda is_async: comm.communicator.reduce(x, out, found, root, async_op=is_async))


def reduce_scatter_block(comm: Any, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Call:
    """Reduce `sendbuf`, and give each rank one block of it, as mpi4py's Reduce_scatter_block."""
    in_place = is_in_place(sendbuf)
    received = message(recvbuf, writable=True, nblocks=comm.size if in_place else 1)
    found, dtype = reduction(op, received.datatype)
    if in_place:
        x = received.elements(dtype)
        out = np.empty(received.count, dtype)  # MPI wants it at the start of `x`, r2ccl does not
    else:
        x = _input(sendbuf, received, nblocks=comm.size).elements(dtype)
        out = received.elements(dtype)

    def finish() -> None:
        if in_place:
            x[: out.size] = out

    communicator = comm.communicator
    return Call(
        lambda is_async: communicator.reduce_scatter(x, out, found, async_op=is_async), finish
    )


def bcast(comm: Any, buf: Any, root: int = 0) -> Call:
    """Send `buf` of rank `root` to all ranks, as mpi4py's Bcast."""
    root = _root(comm, root)
    is_root = comm.rank == root
    sent = message(buf, writable=not is_root)
    data = sent.data(writable=True)

    def start(is_async: bool) -> Any:
        if is_root:
            sent.pack(data)
        return comm.communicator.broadcast(data, root=root, async_op=is_async)

    return Call(start, _nothing if is_root else lambda: sent.unpack(data))


def allgather(comm: Any, sendbuf: Any, recvbuf: Any) -> Call:
    """Gather `sendbuf` of every rank in `recvbuf` of every rank, as mpi4py's Allgather."""
    received = message(recvbuf, writable=True, nblocks=comm.size)
    data = received.data(writable=True)
    nbytes = received.block_nbytes
    in_place = is_in_place(sendbuf)
    own = data[comm.rank * nbytes : (comm.rank + 1) * nbytes]
    if in_place:
        sent, x = received, own
    else:
        sent = message(sendbuf, writable=False)
        if sent.block_nbytes != nbytes:
            raise MpiError(
                f"rank {comm.rank}: sendbuf has {sent.block_nbytes} bytes and each of the "
                f"{comm.size} blocks of recvbuf {nbytes}: both must be equal",
                MPI.ERR_TRUNCATE,
            )
        x = sent.data(writable=False)

    def start(is_async: bool) -> Any:
        sent.pack(data if in_place else x)
        return comm.communicator.allgather(x, data, async_op=is_async)

    return Call(start, lambda: received.unpack(data))


def barrier(comm: Any) -> Call:
    """Wait for all ranks, as mpi4py's Barrier."""

    def start(is_async: bool) -> Any:
        # The sum needs every rank, so it is complete only after all ranks have called.
        mark = np.zeros(1, np.uint8)
        communicator = comm.communicator
        return communicator.allreduce(mark, async_op=True) if is_async else communicator.barrier()

    return Call(start)


def bcast_object(comm: Any, obj: Any, root: int = 0) -> Any:
    """Send the object of rank `root` to all ranks, and return it, as mpi4py's bcast."""
    root = _root(comm, root)
    is_root = comm.rank == root
    data = _pickled(obj) if is_root else np.empty(0, np.uint8)
    size = comm.communicator.broadcast(np.array([data.size]), root=root)
    if not is_root:
        data = np.empty(size[0], np.uint8)
    comm.communicator.broadcast(data, root=root)
    return obj if is_root else MPI.pickle.loads(data.data)


def allgather_objects(comm: Any, sendobj: Any) -> list[Any]:
    """Return the objects of all ranks in rank order, as mpi4py's allgather."""
    mine = _pickled(sendobj)
    sizes = comm.communicator.allgather(np.array([mine.size])).reshape(-1).tolist()
    padded = np.zeros(max(sizes), np.uint8)
    padded[: mine.size] = mine
    rows = comm.communicator.allgather(padded)
    return [MPI.pickle.loads(row[:size].data) for row, size in zip(rows, sizes, strict=True)]


def allreduce_objects(comm: Any, sendobj: Any, op: Any = MPI.SUM) -> Any:
    """Reduce the objects of all ranks in rank order with `op`, as mpi4py's allreduce."""
    return fold(op, allgather_objects(comm, sendobj))


def _pickled(obj: Any) -> Any:
    """Return `obj` as bytes made by the pickler of mpi4py, in memory that r2ccl can write to."""
    return np.frombuffer(bytearray(MPI.pickle.dumps(obj)), np.uint8)


def _input(sendbuf: Any, received: Message, nblocks: int = 1) -> Message:
    """Read the input of a reduction, which must have the datatype and block of `received`."""
    sent = message(sendbuf, writable=False, nblocks=nblocks)
    if sent.datatype != received.datatype:
        raise ValueError("mismatch in send and receive MPI datatypes")
    if sent.count != received.count:
        raise ValueError(f"mismatch in send count {sent.count} and receive count {received.count}")
    return sent


def _root(comm: Any, root: Any) -> int:
    rank = operator.index(root)
    if not 0 <= rank < comm.size:
        raise MpiError(f"root={rank}: allowed is 0 to {comm.size - 1}", MPI.ERR_ROOT)
    return rank


__all__ = [
    "Call",
    "allgather",
    "allgather_objects",
    "allreduce",
    "allreduce_objects",
    "barrier",
    "bcast",
    "bcast_object",
    "reduce",
    "reduce_scatter_block",
]

"""Collectives of mpi4py that only move data, as calls of a `Communicator`.

Like the functions of `reductions`, each public function takes a `Comm` and the arguments of one
method of mpi4py, checks them and returns a `Call`. If the name of the function ends in ``v`` or
``w``, each block has its own count and displacement.

Invariant: r2ccl gets bytes, so the ranks of a call may describe the same elements with different
datatypes, as MPI allows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from r2ccl.interop.mpi.buffers import BufferSpec, is_in_place, message
from r2ccl.interop.mpi.calls import Call, nothing, root_of
from r2ccl.interop.mpi.errors import MpiError
from r2ccl.interop.mpi.vectors import VectorSpec, vector, vector_of_datatypes

#: Collective of r2ccl, called with the bytes to send, the bytes to receive, and ``async_op=``.
Run: TypeAlias = Callable[..., Any]


def barrier(comm: Any) -> Call:
    """Wait for all ranks, like mpi4py's Barrier."""

    def start(is_async: bool) -> Any:
        # The sum needs every rank, so it is complete only after all ranks have called.
        mark = np.zeros(1, np.uint8)
        communicator = comm.communicator
        return communicator.allreduce(mark, async_op=True) if is_async else communicator.barrier()

    return Call(start)


def bcast(comm: Any, buf: Any, root: int = 0) -> Call:
    """Send `buf` of rank `root` to all ranks, like mpi4py's Bcast."""
    root = root_of(comm, root)
    is_root = comm.rank == root
    sent = message(buf, writable=not is_root)
    data = sent.data(writable=not is_root)

    def start(is_async: bool) -> Any:
        if is_root:
            sent.pack(data)
        return comm.communicator.broadcast(data, root=root, async_op=is_async)

    return Call(start, nothing if is_root else lambda: sent.unpack(data))


def gather(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
    """Gather `sendbuf` of every rank in `recvbuf` of rank `root`, like mpi4py's Gather."""
    root = root_of(comm, root)
    run = partial(comm.communicator.gather, root=root)
    if comm.rank != root:
        return _sending(sendbuf, run)
    return _gathering(comm, sendbuf, message(recvbuf, writable=True, nblocks=comm.size), run)


def gatherv(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
    """Gather `sendbuf` of every rank in `recvbuf` of rank `root`; the sizes may differ.

    Like mpi4py's Gatherv.
    """
    root = root_of(comm, root)
    run = partial(comm.communicator.gatherv, root=root)
    if comm.rank != root:
        return _sending(sendbuf, run)
    into = vector(recvbuf, writable=True, nblocks=comm.size)
    run = partial(run, counts=into.counts, displs=into.displs)
    return _gathering(comm, sendbuf, into, run)


def allgather(comm: Any, sendbuf: Any, recvbuf: Any) -> Call:
    """Gather `sendbuf` of every rank in `recvbuf` of every rank, like mpi4py's Allgather."""
    into = message(recvbuf, writable=True, nblocks=comm.size)
    return _gathering(comm, sendbuf, into, comm.communicator.allgather)


def allgatherv(comm: Any, sendbuf: Any, recvbuf: Any) -> Call:
    """Gather `sendbuf` of every rank in `recvbuf` of every rank; the sizes may differ.

    Like mpi4py's Allgatherv.
    """
    into = vector(recvbuf, writable=True, nblocks=comm.size)
    run = partial(comm.communicator.allgatherv, counts=into.counts, displs=into.displs)
    return _gathering(comm, sendbuf, into, run)


def scatter(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
    """Send block r of `sendbuf` of rank `root` to rank r, like mpi4py's Scatter."""
    root = root_of(comm, root)
    run = partial(comm.communicator.scatter, root=root)
    if comm.rank != root:
        return _receiving(recvbuf, run)
    return _scattering(comm, message(sendbuf, writable=False, nblocks=comm.size), recvbuf, run)


def scatterv(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
    """Send block r of `sendbuf` of rank `root` to rank r; the sizes may differ.

    Like mpi4py's Scatterv.
    """
    root = root_of(comm, root)
    run = partial(comm.communicator.scatterv, root=root)
    if comm.rank != root:
        return _receiving(recvbuf, run)
    sent = vector(sendbuf, writable=False, nblocks=comm.size)
    run = partial(run, counts=sent.counts, displs=sent.displs)
    return _scattering(comm, sent, recvbuf, run)


def alltoall(comm: Any, sendbuf: Any, recvbuf: Any) -> Call:
    """Send block r of `sendbuf` to rank r, and receive block r of `recvbuf` from rank r.

    Like mpi4py's Alltoall; the blocks have equal sizes.
    """
    into = message(recvbuf, writable=True, nblocks=comm.size)
    sent = into
    if not is_in_place(sendbuf):
        sent = message(sendbuf, writable=False, nblocks=comm.size)
        _require_equal(comm, sent.block_nbytes, into.block_nbytes)
    return _exchanging(sent, into, comm.communicator.alltoall)


def alltoallv(comm: Any, sendbuf: Any, recvbuf: Any) -> Call:
    """Send block r of `sendbuf` to rank r, and receive block r of `recvbuf` from rank r.

    Like mpi4py's Alltoallv; the blocks may have any size.
    """
    return _exchanging_blocks(comm, sendbuf, recvbuf, vector)


def alltoallw(comm: Any, sendbuf: Any, recvbuf: Any) -> Call:
    """Send block r of `sendbuf` to rank r, and receive block r of `recvbuf` from rank r.

    Like mpi4py's Alltoallw; the blocks may have any size and datatype.
    """
    return _exchanging_blocks(comm, sendbuf, recvbuf, vector_of_datatypes)


def _sending(sendbuf: Any, run: Run) -> Call:
    """Return a call in which this rank only sends."""
    sent = message(sendbuf, writable=False)
    x = sent.data(writable=False)

    def start(is_async: bool) -> Any:
        sent.pack(x)
        return run(x, None, async_op=is_async)

    return Call(start)


def _receiving(recvbuf: Any, run: Run) -> Call:
    """Return a call in which this rank only receives."""
    into = message(recvbuf, writable=True)
    out = into.data(writable=True)
    return Call(lambda is_async: run(None, out, async_op=is_async), lambda: into.unpack(out))


def _gathering(comm: Any, sendbuf: Any, into: BufferSpec | VectorSpec, run: Run) -> Call:
    """Return a call that sends `sendbuf` and receives the blocks of all ranks."""
    out = into.data(writable=True)
    own = into.part(out, comm.rank)
    if is_in_place(sendbuf):
        return _exchange(into, out, own, out, into, run)
    sent = message(sendbuf, writable=False)
    _require_equal(comm, sent.block_nbytes, own.size)
    x = sent.data(writable=False)
    return _exchange(sent, x, x, out, into, run)


def _scattering(comm: Any, sent: BufferSpec | VectorSpec, recvbuf: Any, run: Run) -> Call:
    """Return a call that sends one block to each rank and receives the block of this rank."""
    x = sent.data(writable=False)
    own = sent.part(x, comm.rank)
    if is_in_place(recvbuf):
        unused = np.empty(own.size, np.uint8)

        def start(is_async: bool) -> Any:
            sent.pack(x)
            return run(x, unused, async_op=is_async)

        return Call(start)
    into = message(recvbuf, writable=True)
    _require_equal(comm, own.size, into.block_nbytes)
    return _exchange(sent, x, x, into.data(writable=True), into, run)


def _exchanging(sent: BufferSpec | VectorSpec, into: BufferSpec | VectorSpec, run: Run) -> Call:
    """Return a call that sends a block to each rank and receives a block from each."""
    out = into.data(writable=True)
    x = out if sent is into else sent.data(writable=False)
    return _exchange(sent, x, x, out, into, run)


def _exchanging_blocks(
    comm: Any, sendbuf: Any, recvbuf: Any, read: Callable[..., VectorSpec]
) -> Call:
    """Return a call that exchanges blocks of any size; `read` reads the specifications."""
    into = read(recvbuf, writable=True, nblocks=comm.size)
    sent = into
    if not is_in_place(sendbuf):
        sent = read(sendbuf, writable=False, nblocks=comm.size)
    run = partial(
        comm.communicator.alltoallv,
        sendcounts=sent.counts,
        senddispls=sent.displs,
        recvcounts=into.counts,
        recvdispls=into.displs,
    )
    return _exchanging(sent, into, run)


def _exchange(
    sent: BufferSpec | VectorSpec,
    packed: Any,
    x: Any,
    out: Any,
    into: BufferSpec | VectorSpec,
    run: Run,
) -> Call:
    """Return a call that packs `sent`, runs ``run(x, out)``, and unpacks `out` to `into`.

    `sent` is packed into `packed`; `x`, the data to send, is `packed` or a part of it.
    """

    def start(is_async: bool) -> Any:
        sent.pack(packed)
        return run(x, out, async_op=is_async)

    return Call(start, lambda: into.unpack(out))


def _require_equal(comm: Any, sent_nbytes: int, received_nbytes: int) -> None:
    if sent_nbytes != received_nbytes:
        raise MpiError(
            f"rank {comm.rank}: the block to send has {sent_nbytes} bytes, the block to receive "
            f"{received_nbytes}: both must be equal",
            MPI.ERR_TRUNCATE,
        )


__all__ = [
    "allgather",
    "allgatherv",
    "alltoall",
    "alltoallv",
    "alltoallw",
    "barrier",
    "bcast",
    "gather",
    "gatherv",
    "scatter",
    "scatterv",
]

"""Collectives of mpi4py on Python objects, which ``MPI.pickle`` of mpi4py converts to bytes.

The bytes come only from ranks of the job, on connections authenticated with the job's secret.
The functions take a `Comm` and the arguments of one method of mpi4py. A reduction combines the
objects in rank order, on the ranks that get the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold
from typing import Any

import numpy as np
from mpi4py import MPI

from r2ccl.interop.mpi.calls import root_of


def bcast(comm: Any, obj: Any, root: int = 0) -> Any:
    """Send the object of rank `root` to all ranks; return a copy, like mpi4py's bcast."""
    root = root_of(comm, root)
    is_root = comm.rank == root
    data = pickled(obj) if is_root else np.empty(0, np.uint8)
    size = comm.communicator.broadcast(np.array([data.size]), root=root)
    if not is_root:
        data = np.empty(size[0], np.uint8)
    comm.communicator.broadcast(data, root=root)
    return MPI.pickle.loads(data.data)


def gather(comm: Any, sendobj: Any, root: int = 0) -> list[Any] | None:
    """Return the objects of all ranks if this is rank `root`, else None, like mpi4py's gather."""
    root = root_of(comm, root)
    data = pickled(sendobj)
    sizes = comm.communicator.gather(np.array([data.size]), root=root)
    counts = None if sizes is None else sizes.reshape(-1).tolist()
    out = comm.communicator.gatherv(data, root=root, counts=counts)
    return None if counts is None else _loaded(out, counts)


def allgather(comm: Any, sendobj: Any) -> list[Any]:
    """Return the objects of all ranks in rank order, like mpi4py's allgather."""
    data = pickled(sendobj)
    counts = comm.communicator.allgather(np.array([data.size])).reshape(-1).tolist()
    return _loaded(comm.communicator.allgatherv(data, counts=counts), counts)


def scatter(comm: Any, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
    """Return this rank's object of the sequence of rank `root`, like mpi4py's scatter."""
    root = root_of(comm, root)
    if comm.rank != root:
        size = comm.communicator.scatter(None, np.empty(1, int), root)
        data = comm.communicator.scatterv(None, np.empty(size[0], np.uint8), root)
    else:
        pickles = _pickles(comm, sendobj)
        counts = [each.size for each in pickles]
        comm.communicator.scatter(np.array(counts), root=root)
        data = comm.communicator.scatterv(np.concatenate(pickles), root=root, counts=counts)
    return MPI.pickle.loads(data.data)


def alltoall(comm: Any, sendobj: Sequence[Any]) -> list[Any]:
    """Send object r of the sequence to rank r; return the received objects, in rank order.

    Like mpi4py's alltoall.
    """
    pickles = _pickles(comm, sendobj)
    counts = [each.size for each in pickles]
    theirs = comm.communicator.alltoall(np.array(counts), np.empty(comm.size, int)).tolist()
    out = comm.communicator.alltoallv(
        np.concatenate(pickles),
        np.empty(sum(theirs), np.uint8),
        sendcounts=counts,
        recvcounts=theirs,
    )
    return _loaded(out, theirs)


def reduce(comm: Any, sendobj: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
    """Return the reduction of all ranks' objects if this is rank `root`, else None.

    Like mpi4py's reduce.
    """
    objects = gather(comm, sendobj, root)
    return None if objects is None else fold(op, objects)


def allreduce(comm: Any, sendobj: Any, op: Any = MPI.SUM) -> Any:
    """Return the reduction of the objects of all ranks, like mpi4py's allreduce."""
    return fold(op, allgather(comm, sendobj))


def scan(comm: Any, sendobj: Any, op: Any = MPI.SUM) -> Any:
    """Return the reduction of the objects of ranks 0 to this rank, like mpi4py's scan."""
    return fold(op, allgather(comm, sendobj)[: comm.rank + 1])


def exscan(comm: Any, sendobj: Any, op: Any = MPI.SUM) -> Any:
    """Return the reduction of all lower ranks' objects, like mpi4py's exscan; None on rank 0."""
    below = allgather(comm, sendobj)[: comm.rank]
    return fold(op, below) if below else None


def pickled(obj: Any) -> Any:
    """Return the pickle of `obj`, in memory that r2ccl can write to."""
    return np.frombuffer(bytearray(MPI.pickle.dumps(obj)), np.uint8)


def _pickles(comm: Any, objects: Sequence[Any] | None) -> list[Any]:
    """Return the pickle of each object; raise ValueError unless there is one per rank.

    If `objects` is None, the object for each rank is None.
    """
    found = [None] * comm.size if objects is None else list(objects)
    if len(found) != comm.size:
        raise ValueError(f"expecting {comm.size} items, got {len(found)}")
    return [pickled(each) for each in found]


def _loaded(data: Any, counts: list[int]) -> list[Any]:
    """Return the objects whose pickles, of sizes `counts`, follow one another in `data`."""
    ends = np.cumsum(counts).tolist()
    return [
        MPI.pickle.loads(data[end - count : end].data)
        for end, count in zip(ends, counts, strict=True)
    ]


__all__ = [
    "allgather", "allreduce", "alltoall", "bcast", "exscan", "gather", "pickled", "reduce", "scan",
    "scatter",
]  # fmt: skip

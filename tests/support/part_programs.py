"""Programs that exchange parts of any size, and compare them with NumPy."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from support.raising import raises
from support.values import data_of, dtype_of, expected, same, some_ops

import r2ccl


def exchanges(
    comm: r2ccl.Communicator, counts: tuple[int, ...], names: tuple[str, ...]
) -> list[str]:
    """Exchange equal parts and parts of all sizes, in place and with gaps; return the wrong cases.

    `counts` are elements of an equal part; the sizes of others reach from 0 to 1000 times as many.
    """
    wrong = []
    for name, count in itertools.product(names, counts):
        wrong += [f"{case} {name} {count}" for case in _equal_parts(comm, name, count)]
        sizes = [(count, 0, max(1, count // 1000))[rank % 3] for rank in range(comm.nranks)]
        wrong += [f"{case} {name} {sizes}" for case in _unequal_parts(comm, name, sizes)]
        wrong += [f"{case} {name} {count}" for case in _alltoallv(comm, name, count)]
    return wrong


def _equal_parts(comm: r2ccl.Communicator, name: str, count: int) -> Iterator[str]:
    """Yield the collectives of equal parts whose result is wrong."""
    n, rank = comm.nranks, comm.rank
    inputs = [data_of(peer, count * n, name).reshape(n, count) for peer in range(n)]
    mine = inputs[rank]
    every = np.stack([each[rank] for each in inputs])
    x = mine.copy()
    made = comm.alltoall(x)
    out = np.empty_like(x)
    comm.alltoall(x, out, async_op=True).wait()
    is_untouched = same(x, mine)
    comm.alltoall(x, x)
    if not (same(made, every) and same(out, every) and same(x, every) and is_untouched):
        yield "alltoall"
    first = np.concatenate([each[0] for each in inputs])
    out = np.zeros(n * count + 3 * (rank % 2), dtype_of(name))  # larger on some ranks
    comm.allgatherv(mine[0], out, counts=[count] * n)
    if not (
        same(out[: n * count], first) and same(out[n * count :], np.zeros_like(out[n * count :]))
    ):
        yield "allgatherv"
    for root in range(n):
        wanted = np.stack([each[0] for each in inputs])
        made = comm.gather(mine[0], root=root)
        out = np.zeros_like(wanted)
        out[rank] = mine[0]
        comm.gather(out[rank] if rank == root else mine[0], out, root)
        is_right = same(made, wanted) and same(out, wanted) if rank == root else made is None
        x, part = inputs[root].copy(), np.zeros_like(mine[0])
        comm.scatter(x if rank == root else None, part, root=root)
        if rank == root:
            comm.scatter(x, x[rank], root=root)
            is_right = is_right and same(x, mine)
            made = comm.scatter(x, root=root)
            is_right = is_right and same(made, mine[rank])
        else:
            comm.scatter(None, part, root=root)
            comm.scatter(None, part, root=root)
        if not (is_right and same(part, inputs[root][rank])):
            yield f"gather or scatter with root {root}"


def _unequal_parts(comm: r2ccl.Communicator, name: str, sizes: list[int]) -> Iterator[str]:
    """Yield the collectives of parts of `sizes` elements whose result is wrong."""
    n, rank = comm.nranks, comm.rank
    parts = [data_of(peer, sizes[peer], name) for peer in range(n)]
    whole = np.concatenate(parts)
    displs = [sum(sizes[peer + 1 :]) + 3 * (n - peer) for peer in range(n)]  # from the last rank on
    spaced = np.zeros(sum(sizes) + 3 * n + 1, dtype_of(name))
    for at, part in zip(displs, parts, strict=True):
        spaced[at : at + part.size] = part
    out = np.zeros_like(spaced)
    made = comm.allgatherv(parts[rank], counts=sizes)
    comm.allgatherv(parts[rank], out, counts=sizes, displs=displs)
    if not (same(made, whole) and same(out, spaced)):
        yield "allgatherv"
    x = data_of(rank, sum(sizes), name)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    op = some_ops(name)[0]
    wanted = expected(n, sum(sizes), name, op)[mine]
    made = comm.reduce_scatterv(x, counts=sizes, op=op)
    comm.reduce_scatterv(x, x[mine], counts=sizes, op=op)
    if not (same(made, wanted) and same(x[mine], wanted)):
        yield "reduce_scatterv"
    for root in range(n):
        counts = sizes if rank == root else None
        made = comm.gatherv(parts[rank], root=root, counts=counts)
        out = np.zeros_like(spaced)
        comm.gatherv(parts[rank], out, root, counts=counts, displs=displs)
        is_right = same(made, whole) and same(out, spaced) if rank == root else made is None
        part = np.zeros_like(parts[rank])
        comm.scatterv(spaced, part, root, counts=counts, displs=displs)
        if not (is_right and same(part, parts[rank])):
            yield f"gatherv or scatterv with root {root}"


def _alltoallv(comm: r2ccl.Communicator, name: str, count: int) -> Iterator[str]:
    """Yield ``alltoallv`` if its result is wrong with parts of 0 to `count` elements."""
    n, rank = comm.nranks, comm.rank

    def size(source: int, target: int) -> int:
        return (0, count, 1, max(1, count // 1000))[(source + 2 * target) % 4]

    sent = [size(rank, peer) for peer in range(n)]
    received = [size(peer, rank) for peer in range(n)]
    senddispls = [sum(sent[peer:]) - sent[peer] for peer in range(n)]  # in reverse rank order
    recvdispls = [sum(received[:peer]) + peer for peer in range(n)]
    x = np.zeros(sum(sent), dtype_of(name))
    out = np.zeros(sum(received) + n, dtype_of(name))
    wanted = out.copy()
    for peer in range(n):
        part = data_of(n * rank + peer, sent[peer], name)
        x[senddispls[peer] : senddispls[peer] + sent[peer]] = part
        part = data_of(n * peer + rank, received[peer], name)
        wanted[recvdispls[peer] : recvdispls[peer] + received[peer]] = part
    given = {"sendcounts": sent, "recvcounts": received, "senddispls": senddispls}
    made = comm.alltoallv(x, **given)
    comm.alltoallv(x, out, **given, recvdispls=recvdispls)
    packed = np.concatenate([data_of(n * peer + rank, received[peer], name) for peer in range(n)])
    if not (same(out, wanted) and same(made, packed)):
        yield "alltoallv"


def _failure(call: Callable[[r2ccl.Communicator], object]) -> str:
    """Return the error that `call`, or the barrier after it, raises."""
    found = "no error"
    with r2ccl.init() as comm:
        try:
            comm.barrier()  # else the error may reach a rank that is still in init()
            call(comm)
            comm.barrier()
        except r2ccl.R2cclError as exc:
            found = f"{type(exc).__name__}: {exc}"
    return found


def wrong_count(collective: str, nsent: int, nwanted: int) -> str:
    """Exchange a part that has `nsent` elements on its source, `nwanted` on its destination."""

    def call(comm: r2ccl.Communicator) -> None:
        if collective == "gatherv":
            x = np.ones(nsent if comm.rank == 1 else 2)
            comm.gatherv(x, counts=[2, nwanted, *[2] * (comm.nranks - 2)])
        elif collective == "scatterv":
            counts = [2, nsent, *[2] * (comm.nranks - 2)]
            out = np.ones(nwanted if comm.rank == 1 else 2)
            comm.scatterv(np.ones(sum(counts)), out, counts=counts)
        else:
            sent, received = [2] * comm.nranks, [2] * comm.nranks
            if comm.rank == 0:
                sent[1] = nsent
            if comm.rank == 1:
                received[0] = nwanted
            comm.alltoallv(np.ones(sum(sent)), sendcounts=sent, recvcounts=received)

    return _failure(call)


def different_counts() -> str:
    """Pass other counts on rank 1 than on the other ranks, with the same sum."""

    def call(comm: r2ccl.Communicator) -> None:
        counts = [1, 1, 4] if comm.rank == 1 else [1, 2, 3]
        comm.allgatherv(np.ones(counts[comm.rank]), counts=counts)

    return _failure(call)


def usable_after_wrong_parts() -> None:
    """Pass wrong counts, displacements, sizes and arrays; the communicator must still work."""
    x, whole = np.ones(4), np.ones(6)
    overlapping = {"recvcounts": [2, 2], "recvdispls": [0, 1]}
    with r2ccl.init() as comm:
        mine, other = comm.rank, 1 - comm.rank
        own = [3 if rank == mine else 1 for rank in range(2)]
        refused: list[tuple[str, Callable[[], Any]]] = [
            ("counts=None; give 2 integers", lambda: comm.gatherv(x, root=mine)),
            ("counts=.4, -1.; give 2", lambda: comm.scatterv(x, root=mine, counts=[4, -1])),
            ("sendcounts=.4.; give 2", lambda: comm.alltoallv(x, sendcounts=[4], recvcounts=[1])),
            ("displs=.0, 0.5.; give 2", lambda: comm.allgatherv(x, counts=own, displs=[0, 0.5])),  # type: ignore[list-item]
            ("overlap in out", lambda: comm.alltoallv(x, sendcounts=[2, 2], **overlapping)),  # type: ignore[arg-type]
            ("from element 0 on, but x has 4", lambda: comm.scatterv(x, root=mine, counts=[5, 0])),
            ("must be equal", lambda: comm.alltoallv(x, sendcounts=own, recvcounts=[1, 1])),
            ("add up to 9", lambda: comm.reduce_scatterv(x, counts=[4, 5])),
            ("add up to 4", lambda: comm.reduce_scatterv(whole, counts=[2, 2])),
            ("x has 4 elements, out has 7", lambda: comm.gather(x, np.ones(7), root=mine)),
            ("cannot be divided", lambda: comm.alltoall(np.ones(3))),
            ("without out", lambda: comm.scatter(x, root=other)),
            ("overlap in part", lambda: comm.alltoall(whole[:4], whole[2:])),
            ("op=AVG", lambda: comm.scan(x, op=r2ccl.AVG)),
            ("stream", lambda: comm.scan(x, stream=1)),
        ]
        for words, call in refused:
            with raises(r2ccl.InvalidArgument, match=words):
                call()
        assert comm.scan(np.ones(3))[0] == comm.rank + 1


def parts_beyond_4gib() -> bool:
    """Return whether parts that lie beyond 2 GiB and 4 GiB of large arrays are exchanged exactly.

    The arrays are mapped without a reservation, and only the pages of the parts are touched.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    x, out, whole = (np.frombuffer(mmap.mmap(-1, 6 << 30, flags), np.uint8) for _ in range(3))
    with r2ccl.init() as comm:
        n, rank, count = comm.nranks, comm.rank, 200_003
        displs = [((5 - 2 * peer) << 30) + 7 for peer in range(n)]  # 5 GiB, 3 GiB
        for peer, at in enumerate(displs):
            x[at : at + count] = 10 * rank + peer
        counts = [count] * n
        given = {"sendcounts": counts, "recvcounts": counts}
        comm.alltoallv(x, out, **given, senddispls=displs, recvdispls=displs)
        mine = x[displs[rank] : displs[rank] + count]
        comm.allgatherv(mine, whole, counts=counts, displs=displs)
        return all(
            bool((out[at : at + count] == 10 * peer + rank).all())
            and bool((whole[at : at + count] == 11 * peer).all())
            for peer, at in enumerate(displs)
        )


def exchanges_among_some() -> list[str]:
    """Exchange parts of all sizes in communicators of the odd and of the even ranks."""
    with r2ccl.init() as job, job.split(job.rank % 2, -job.rank) as comm:
        wrong = list(_alltoallv(comm, "float32", 100_003))
        sizes = [5, 100_003, 0, 7][: comm.nranks]
        return wrong + list(_unequal_parts(comm, "int64", sizes))

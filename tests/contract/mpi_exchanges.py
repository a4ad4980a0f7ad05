"""Cases of `mpi_rank` for collectives in which each rank has blocks of its own; and scans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from support.mpi_cases import Case, Cases

CASES = Cases()
case = CASES.add


def ramp(comm: Any, count: int) -> Any:
    return np.arange(count) + 100.0 * (comm.rank + 1)


def blank(count: int) -> Any:
    return np.full(count, -1.0)


@case
def gather_to_each_root(MPI: Any, comm: Any) -> Any:
    found = []
    for root in range(comm.size):
        is_root = comm.rank == root
        out = blank(2 * comm.size) if is_root else None
        comm.Gather(ramp(comm, 2), out, root=root)
        exact = blank(3 * comm.size)
        comm.Gather([ramp(comm, 4), 3, MPI.DOUBLE], [exact, 3, MPI.DOUBLE], root)
        own = blank(2 * comm.size)
        own[2 * root : 2 * root + 2] = 7
        comm.Gather(MPI.IN_PLACE if is_root else ramp(comm, 2), own if is_root else None, root)
        found += [out, exact, own]
    return found


@case
def scatter_from_each_root(MPI: Any, comm: Any) -> Any:
    found = []
    for root in range(comm.size):
        is_root = comm.rank == root
        out = blank(2)
        comm.Scatter(ramp(comm, 2 * comm.size) if is_root else None, out, root=root)
        part = blank(4)
        comm.Scatter([ramp(comm, 3 * comm.size), 3, MPI.DOUBLE], [part, 3, MPI.DOUBLE], root)
        kept = blank(2)
        whole = ramp(comm, 2 * comm.size)
        comm.Scatter(whole if is_root else None, MPI.IN_PLACE if is_root else kept, root)
        found += [out, part, kept, whole]
    return found


@case
def scatter_of_read_only_memory(MPI: Any, comm: Any) -> Any:
    out = bytearray(2)
    comm.Scatter(bytes(range(2 * comm.size)) if comm.rank == 0 else None, out)
    comm.Scatter(bytes(range(2 * comm.size)) if comm.rank == 0 else None,
                 MPI.IN_PLACE if comm.rank == 0 else out)  # fmt: skip
    return list(out)


@case
def gather_and_scatter_of_columns(MPI: Any, comm: Any) -> Any:
    n = comm.size
    column = MPI.DOUBLE.Create_vector(4, 1, n).Create_resized(0, 8).Commit()
    matrix = np.zeros((4, n))
    comm.Gather(ramp(comm, 4), [matrix, 1, column], root=1)
    column_of_mine = blank(4)
    comm.Scatter([np.arange(4.0 * n), 1, column], column_of_mine, root=2)
    comm.Alltoall([ramp(comm, 4 * n), 1, column], every := blank(4 * n))
    return matrix, column_of_mine, every


@case
def alltoall_forms(MPI: Any, comm: Any) -> Any:
    n = comm.size
    out, counted, own = blank(2 * n), blank(n + 1), ramp(comm, 2 * n)
    comm.Alltoall(ramp(comm, 2 * n), out)
    comm.Alltoall([ramp(comm, n), 1, MPI.DOUBLE], [counted, (1, 1), MPI.DOUBLE])
    comm.Alltoall(MPI.IN_PLACE, own)
    comm.Alltoall(np.zeros(0), np.zeros(0))
    return out, counted, own


def layouts(MPI: Any, n: int) -> list[Callable[[Any], Any]]:
    """Specifications of blocks of 1, 2, ... elements, in an array of 40."""
    counts = list(range(1, n + 1))
    displs = [10 * (n - 1 - rank) for rank in range(n)]
    return [
        lambda x: [x, counts],
        lambda x: [x, counts, MPI.DOUBLE],
        lambda x: [x, np.array(counts), "d"],
        lambda x: [x, (counts, displs)],
        lambda x: [x, (counts, displs), MPI.DOUBLE],
        lambda x: [x, (counts, np.array(displs)), MPI.DOUBLE],
        lambda x: [x, counts, displs, MPI.DOUBLE],
        lambda x: [x, (counts, None), MPI.DOUBLE],
        lambda x: [x, (counts, 10), MPI.DOUBLE],
        lambda x: x[: sum(counts)] if n == 2 else [x, counts],
    ]


@case
def blocks_of_any_size(MPI: Any, comm: Any) -> Any:
    n, rank = comm.size, comm.rank
    found = []
    for form in layouts(MPI, n):
        gathered, everywhere, scattered = blank(40), blank(40), blank(rank + 1)
        comm.Gatherv(ramp(comm, rank + 1), form(gathered) if rank == 1 else None, root=1)
        comm.Allgatherv(ramp(comm, rank + 1), form(everywhere))
        comm.Scatterv(form(ramp(comm, 40)) if rank == 2 else None, scattered, root=2)
        found += [gathered, everywhere, scattered]
    return found


@case
def blocks_of_one_count(MPI: Any, comm: Any) -> Any:
    n = comm.size
    gathered, everywhere, scattered = blank(5 * n), blank(5 * n), blank(2)
    comm.Gatherv(ramp(comm, 2), [gathered, 2] if comm.rank == 0 else None)
    comm.Allgatherv(ramp(comm, 2), [everywhere, (2, 5), MPI.DOUBLE])
    comm.Scatterv([ramp(comm, 5 * n), (2, 4), MPI.DOUBLE], scattered)
    return gathered, everywhere, scattered


@case
def blocks_whose_counts_are_inferred(MPI: Any, comm: Any) -> Any:
    total = 2 * comm.size + 1  # the first block has one element more
    mine = 3 if comm.rank == 0 else 2
    gathered, everywhere, scattered = blank(total), blank(total), blank(mine)
    comm.Gatherv(ramp(comm, mine), gathered)
    comm.Allgatherv(ramp(comm, mine), [everywhere, MPI.DOUBLE])
    comm.Scatterv(ramp(comm, total), scattered)
    out = blank(total)
    comm.Alltoallv([ramp(comm, mine * comm.size), mine], out)
    return gathered, everywhere, scattered, out


@case
def empty_blocks(MPI: Any, comm: Any) -> Any:
    n, rank = comm.size, comm.rank
    counts = [0] * n
    counts[1] = 4
    mine = ramp(comm, counts[rank])
    gathered, everywhere, scattered = blank(4), blank(4), blank(counts[rank])
    comm.Gatherv(mine, [gathered, counts] if rank == 0 else None)
    comm.Allgatherv(mine, [everywhere, counts])
    comm.Scatterv([ramp(comm, 4), counts] if rank == 0 else None, scattered)
    out = blank(4 * n)
    sent = [4 if to == 0 else 0 for to in range(n)]
    received = [4 if rank == 0 else 0 for _ in range(n)]
    comm.Alltoallv([ramp(comm, 4), sent], [out, received])
    return gathered, everywhere, scattered, out


@case
def empty_blocks_lie_anywhere(MPI: Any, comm: Any) -> Any:
    """MPI does not look at the displacement of a block without elements."""
    rank, counts, displs = comm.rank, [0, 4, 0], [100, 0, -7]
    mine = ramp(comm, counts[rank])
    gathered, everywhere, scattered, out, of_bytes = (blank(4) for _ in range(5))
    comm.Gatherv(mine, [gathered, (counts, displs), MPI.DOUBLE] if rank == 0 else None)
    comm.Allgatherv(mine, [everywhere, counts, displs, MPI.DOUBLE])
    whole = [ramp(comm, 4), (counts, displs), MPI.DOUBLE] if rank == 0 else None
    comm.Scatterv(whole, [scattered, counts[rank], MPI.DOUBLE])
    given = [4 if rank == 1 else 0] * 3
    sent = [ramp(comm, 4), (given, [0 if count else 50 for count in given])]
    comm.Alltoallv(sent, [out, (counts, displs)])
    starts = [8 * each for each in displs]
    every = [MPI.DOUBLE] * 3
    comm.Alltoallw([*sent, every], [of_bytes, (counts, starts), every])
    return gathered, everywhere, scattered, out, of_bytes


@case
def blocks_in_place(MPI: Any, comm: Any) -> Any:
    n, rank = comm.size, comm.rank
    counts, displs = list(range(1, n + 1)), [5 * at for at in range(n)]
    everywhere, gathered = blank(20), blank(20)
    for out in (everywhere, gathered):
        out[displs[rank] : displs[rank] + counts[rank]] = ramp(comm, rank + 1)
    comm.Allgatherv(MPI.IN_PLACE, [everywhere, (counts, displs), MPI.DOUBLE])
    if rank == 0:
        comm.Gatherv(MPI.IN_PLACE, [gathered, (counts, displs), MPI.DOUBLE])
        comm.Scatterv([gathered, (counts, displs), MPI.DOUBLE], MPI.IN_PLACE)
        kept = None
    else:
        comm.Gatherv(ramp(comm, rank + 1), None)
        comm.Scatterv(None, kept := blank(rank + 1))
    own = ramp(comm, 3 * n)
    comm.Alltoallv(MPI.IN_PLACE, [own, ([2] * n, [3 * at for at in range(n)]), MPI.DOUBLE])
    return everywhere, gathered, kept, own


@case
def blocks_between_each_two(MPI: Any, comm: Any) -> Any:
    n, rank = comm.size, comm.rank
    sent = [rank + to + 1 for to in range(n)]
    received = [rank + source + 1 for source in range(n)]
    out, apart = blank(40), blank(60)
    comm.Alltoallv([ramp(comm, 40), sent], [out, received])
    displs = [20 * (n - 1 - at) for at in range(n)]
    comm.Alltoallv(
        [ramp(comm, 60), (sent, displs), MPI.DOUBLE], [apart, (received, displs), MPI.DOUBLE]
    )
    return out, apart


@case
def blocks_of_derived_datatypes(MPI: Any, comm: Any) -> Any:
    n, rank = comm.size, comm.rank
    pairs = MPI.DOUBLE.Create_vector(2, 1, 2).Create_resized(0, 32).Commit()
    counts, displs = list(range(1, n + 1)), [n * at for at in range(n)]
    out, own, mine = blank(40), blank(40), blank(20)
    comm.Allgatherv([ramp(comm, 20), rank + 1, pairs], [out, (counts, displs), pairs])
    own[4 * displs[rank] :][: 4 * (rank + 1)] = ramp(comm, 4 * (rank + 1))
    comm.Allgatherv(MPI.IN_PLACE, [own, (counts, displs), pairs])
    comm.Scatterv([ramp(comm, 40), (counts, displs), pairs], [mine, rank + 1, pairs], root=1)
    every = blank(40)
    comm.Alltoallv([ramp(comm, 40), ([1] * n, displs), pairs], [every, ([1] * n, displs), pairs])
    plain = blank(2 * sum(counts))
    comm.Gatherv(
        [ramp(comm, 20), rank + 1, pairs], [plain, [2 * count for count in counts]], root=2
    )
    return out, own, mine, every, plain


@case
def blocks_of_several_datatypes(MPI: Any, comm: Any) -> Any:
    n = comm.size
    pairs = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    plain = MPI.DOUBLE.Create_contiguous(2).Commit()
    out, whole, own = blank(4 * n), blank(2 * n), ramp(comm, 2 * n)
    comm.Alltoallw(
        [ramp(comm, 4 * n), ([1] * n, [32 * at for at in range(n)]), [pairs] * n],
        [out, ([2] * n, [32 * at for at in range(n)]), [MPI.DOUBLE] * n],
    )
    comm.Alltoallw(
        [ramp(comm, 2 * n), [1] * n, [16 * at for at in range(n)], [plain] * n],
        [whole, [1] * n, [16 * at for at in range(n)], [plain] * n],
    )
    comm.Alltoallw(MPI.IN_PLACE, [own, ([2] * n, [16 * at for at in range(n)]), [MPI.DOUBLE] * n])
    every = MPI.DOUBLE.Create_vector(n, 1, 1).Commit()
    same = blank(n * n)
    comm.Alltoallw([ramp(comm, n), [every] * n],
                   [same, ([1] * n, [8 * n * at for at in range(n)]), [every] * n])  # fmt: skip
    return out, whole, own, same


@case
def reduce_scatter_forms(MPI: Any, comm: Any) -> Any:
    n, rank = comm.size, comm.rank
    counts = list(range(1, n + 1))
    total = sum(counts)
    out, known, empty, whole = blank(rank + 1), blank(rank + 1), blank(0), ramp(comm, total)
    comm.Reduce_scatter(ramp(comm, total), out, counts)
    comm.Reduce_scatter(ramp(comm, total), known, op=MPI.MAX)
    comm.Reduce_scatter(MPI.IN_PLACE, whole, counts, MPI.MIN)
    only = [0] * n
    only[1] = 3
    comm.Reduce_scatter(ramp(comm, 3), got := blank(3) if rank == 1 else empty, only)
    return out, known, whole[: rank + 1], got


@case
def scans(MPI: Any, comm: Any) -> Any:
    found = []
    for op in (MPI.SUM, MPI.PROD, MPI.MIN, MPI.MAX):
        x = np.array([comm.rank + 1.0, 3.0 - comm.rank])
        out, below = blank(2), blank(2)
        comm.Scan(x, out, op)
        comm.Exscan(x, below, op=op)
        own = x.copy()
        comm.Scan(MPI.IN_PLACE, own, op)
        above = x.copy()
        comm.Exscan(MPI.IN_PLACE, above, op)
        found += [out, below, own, above]
    return found


def started(MPI: Any, comm: Any, form: Callable[[str], Any]) -> tuple[list[Any], Any]:
    """Start or make every collective of this file; return the requests and the results."""
    n, rank = comm.size, comm.rank
    counts = list(range(1, n + 1))
    x, mine = ramp(comm, 40), ramp(comm, rank + 1)
    out = [blank(40) for _ in range(8)]
    whole = [MPI.DOUBLE] * n
    places = [8 * at for at in range(n)]
    part, own, low, high = blank(rank + 1), blank(rank + 1), blank(2), blank(2)
    requests = [
        form("gather")(x[:2], out[0][: 2 * n], 0),
        form("gatherv")(mine, [out[1], counts], 1),
        form("scatter")(x[: 2 * n], out[2][:2], 2),
        form("scatterv")([x, counts], own),
        form("allgatherv")(mine, [out[3], counts]),
        form("alltoall")(x[:n], out[4][:n]),
        form("alltoallv")([x, [2] * n], [out[5], [2] * n]),
        form("alltoallw")([x, [1] * n, places, whole], [out[6], [1] * n, places, whole]),
        form("reduce_scatter")(x[: sum(counts)], part, counts),
        form("scan")(x[:2], low),
        form("exscan")(x[:2], high),
    ]
    return requests, [*out, part, own, low, high]


@case
def nonblocking_exchanges(MPI: Any, comm: Any) -> Any:
    requests, found = started(MPI, comm, lambda name: getattr(comm, f"I{name}"))
    MPI.Request.Waitall(requests)
    return found


@case
def persistent_exchanges(MPI: Any, comm: Any) -> Any:
    requests, found = started(MPI, comm, lambda name: getattr(comm, f"{name.capitalize()}_init"))
    for _ in range(2):
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
    for each in requests:
        each.Free()
    return found


@case
def objects_of_each_rank(MPI: Any, comm: Any) -> Any:
    n, rank = comm.size, comm.rank
    mine = {"rank": rank, "text": "x" * 500 * rank}
    each = [(rank, to, "y" * 300 * to) for to in range(n)]
    return [
        comm.gather(mine),
        comm.gather(mine, root=2),
        comm.scatter(each if rank == 1 else None, root=1),
        comm.scatter([None] * n if rank == 0 else None),
        comm.alltoall(each),
        comm.reduce(rank + 1),
        comm.reduce([rank], op=lambda a, b: a + b, root=1),
        comm.reduce(rank, MPI.MAX, 2),
        comm.scan(rank + 1),
        comm.scan(rank + 1, op=MPI.PROD),
        comm.exscan(rank + 1),
        comm.exscan([rank], lambda a, b: a + b),
    ]


# Errors, on all ranks alike


def failing(name: str, *specs: Callable[[Any, Any], Any], **named: Any) -> Case:
    def run(MPI: Any, comm: Any) -> Any:
        return getattr(comm, name)(*(each(MPI, np.zeros(12)) for each in specs), **named)

    return run


def x(MPI: Any, x: Any) -> Any:
    return x


CASES |= {
    "error_of_two_counts": failing("Allgatherv", x, lambda MPI, x: [x, [1, 2]]),
    "error_of_two_displacements": failing("Allgatherv", x, lambda MPI, x: [x, ([1] * 3, [0, 1])]),
    "error_of_counts_that_are_text": failing("Alltoallv", x, lambda MPI, x: [x, "three"]),
    "error_of_a_fraction_in_counts": failing("Alltoallv", x, lambda MPI, x: [x, [1, 2.5, 1]]),
    "error_of_a_number_for_blocks": failing("Alltoallv", x, lambda MPI, x: 7),
    "error_of_five_items_for_blocks": failing("Alltoallv", x, lambda MPI, x: [x, 1, 2, "d", 3]),
    "error_of_read_only_blocks": failing("Allgatherv", x, lambda MPI, x: [bytes(24), 1, "d"]),
    "error_of_bytes_that_are_no_doubles": failing(
        "Alltoallv", x, lambda MPI, x: [x.view("u1")[:20], MPI.DOUBLE]
    ),
    "error_of_an_odd_number_to_all": failing("Alltoall", lambda MPI, x: x[:10], x),
    "error_of_counts_of_reduce_scatter": failing(
        "Reduce_scatter", x, lambda MPI, x: x[:2], recvcounts=[2, 2, 2]
    ),
    "error_of_own_count_of_reduce_scatter": failing(
        "Reduce_scatter", x, lambda MPI, x: x[:2], recvcounts=[4, 4, 4]
    ),
    "error_of_counts_in_place": failing(
        "Reduce_scatter", lambda MPI, x: MPI.IN_PLACE, x, recvcounts=[2, 2, 2]
    ),
    "error_of_other_counts_of_a_scan": failing("Scan", x, lambda MPI, x: x[:2]),
    "error_of_a_root_of_gather": failing("Gather", x, x, root=5),
    "error_of_a_root_of_scatterv": failing("Scatterv", x, x, root=-7),
    "error_of_one_datatype_for_all": failing(
        "Alltoallw", lambda MPI, x: [x, [MPI.DOUBLE]], lambda MPI, x: [x, [MPI.DOUBLE]]
    ),
}


@case
def datatypes_without_data(MPI: Any, comm: Any) -> Any:
    """Such as the halo of a rank without neighbors: they have a count, but no bytes."""
    after, before, n = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, comm.size
    status, found = MPI.Status(), []
    for none in (
        MPI.INT.Create_contiguous(0), MPI.DOUBLE.Create_indexed([], []),
        MPI.DOUBLE.Create_vector(0, 1, 2), MPI.Datatype.Create_struct([], [], []),
        MPI.INT.Create_contiguous(0).Create_resized(0, 8),
    ):  # fmt: skip
        none.Commit()
        x, out = np.ones(4), np.zeros(4)
        comm.Sendrecv([x, 2, none], after, 0, [out, 2, none], before, 0, status)
        found.append([status.Get_count(none), status.Get_count(MPI.BYTE)])
        comm.Bcast([out, 1, none])
        comm.Allgather([x, 1, none], [out, 1, none])
        comm.Alltoallw([x, [1] * n, [0] * n, [none] * n], [out, [1] * n, [8] * n, [none] * n])
        comm.Alltoallw([x, [1] * n, [0] * n, [none] * n], [out, [0] * n, [0] * n, [MPI.DOUBLE] * n])
        found.append(out)
        none.Free()
    return found

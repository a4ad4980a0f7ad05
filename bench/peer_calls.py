"""Make the calls of mpi4py and gloo that a case of `collectives` measures.

The libraries are imported by the ranks that use them only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from r2ccl.cli.perf.cases import Buffers, Case

#: Collectives that gloo's binding in torch lacks.
GLOO_LACKS = ("allgatherv", "reduce_scatterv", "gatherv", "scatterv", "scan", "exscan")
_MPI_NAMES = {"broadcast": "Bcast", "reduce_scatter": "Reduce_scatter_block",
              "reduce_scatterv": "Reduce_scatter"}  # fmt: skip


def mpi_call(world: Any, case: Case, buffers: Buffers) -> Callable[[], object]:
    """Return the function that makes one call of mpi4py, summing or of root 0."""
    from mpi4py import MPI

    name, rank = case.form.name, world.Get_rank()
    x, out = buffers
    method = getattr(world, _MPI_NAMES.get(name, name.capitalize()))
    if name == "barrier":
        return partial(method)
    if name == "broadcast":
        return partial(method, x, case.root)
    if name == "sendrecv":
        right, left = (rank + 1) % case.nranks, (rank - 1) % case.nranks
        return partial(method, x, right, 0, out, left, 0)
    if name in ("allreduce", "reduce") and x is out:
        x = MPI.IN_PLACE
    if name == "alltoallv":
        x, out = ([each, case.exchanged(rank)] for each in (x, out))
    elif name in ("allgatherv", "gatherv") and out is not None:
        out = [out, case.parts]
    elif name == "scatterv" and x is not None:
        x = [x, case.parts]
    if name == "reduce_scatterv":
        return partial(method, x, out, case.parts, MPI.SUM)
    if case.form.is_rooted:
        options: dict[str, Any] = {"op": MPI.SUM} if case.form.reduces else {}
        return partial(method, x, out, root=case.root, **options)
    return partial(method, x, out, *([MPI.SUM] if case.form.reduces else []))


def gloo_call(rank: int, case: Case, buffers: Buffers) -> Callable[[], object]:
    """Return the function that makes one call of gloo, summing or of root 0."""
    import torch
    from torch import distributed as dist

    name = case.form.name
    x, out = (None if each is None else torch.from_numpy(each) for each in buffers)
    calls: dict[str, Callable[[], Callable[[], object]]] = {
        "barrier": lambda: dist.barrier,
        "allreduce": lambda: partial(dist.all_reduce, x),
        "broadcast": lambda: partial(dist.broadcast, x, case.root),
        "reduce": lambda: partial(dist.reduce, x, case.root),
        "allgather": lambda: partial(dist.all_gather_into_tensor, out, x),
        "reduce_scatter": lambda: partial(dist.reduce_scatter_tensor, out, x),
        "gather": lambda: partial(dist.gather, x, _parts(out, case), case.root),
        "scatter": lambda: partial(dist.scatter, out, _parts(x, case), case.root),
        "alltoall": lambda: partial(dist.all_to_all_single, out, x),
        "alltoallv": lambda: partial(dist.all_to_all_single, out, x, *_splits(rank, case)),
        "sendrecv": lambda: partial(_exchange, dist, x, out, rank, case.nranks),
    }
    return calls[name]()


def _parts(whole: Any, case: Case) -> list[Any] | None:
    """Return the part of every rank in the root's array; None on other ranks."""
    return None if whole is None else list(whole.split(case.parts))


def _splits(rank: int, case: Case) -> tuple[list[int], list[int]]:
    counts = case.exchanged(rank)
    return counts, counts


def _exchange(dist: Any, x: Any, out: Any, rank: int, nranks: int) -> None:
    received = dist.irecv(out, (rank - 1) % nranks)
    dist.send(x, (rank + 1) % nranks)
    received.wait()


__all__ = ["GLOO_LACKS", "gloo_call", "mpi_call"]

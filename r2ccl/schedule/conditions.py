"""Definitions of the collectives: the contributions each rank starts with and must end with.

The ops of a correct algorithm lead from ``initial`` to ``wanted``; `r2ccl.schedule.check.check`
verifies that.

A contribution is the input data of one rank for one chunk. A set of contributions is an int used as
a bit set: bit ``r`` stands for rank ``r``. All spaces have the same chunks. In an allgather or a
gather, only some chunks of a rank's INPUT hold data. In a reduce_scatter or a scatter, only some
chunks of a rank's OUTPUT are defined. In an in-place call, these chunks are at the positions that
NCCL's in-place operations require.

In an alltoall, a rank's chunks form ``nranks`` equal parts, numbered by distance and not by rank:
part k of rank r's INPUT goes to rank r + k, and part k of its OUTPUT comes from rank r - k, both
modulo ``nranks``.

The functions that return the conditions of a collective raise `InvalidArgument` if `root` is not a
rank, or if the collective needs equally many chunks per rank and `nchunks` is not a multiple of
`nranks`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from r2ccl.errors import InvalidArgument, ScheduleError
from r2ccl.schedule.ir import Schedule


class Conditions(msgspec.Struct, frozen=True):
    """Pre- and postconditions of a collective.

    Parameters
    ----------
    initial : callable
        ``initial(rank, chunk)`` returns the contributions in the rank's INPUT chunk at the start; 0
        for none.
    wanted : callable
        ``wanted(rank, chunk)`` returns the contributions that the rank's OUTPUT chunk must hold at
        the end; None if the chunk is undefined.
    is_reduction : bool
        True if every defined OUTPUT chunk must hold the reduced contributions of all ranks. The ops
        that complete these reductions have `is_final`. False in a scan or exscan, in which the
        outputs of different ranks hold different contributions.
    is_ordered : bool
        True if contributions may only be reduced in rank order: every operand holds the
        contributions of consecutive ranks, and the last rank of the left operand is just below the
        first rank of the right operand.
    """

    initial: Callable[[int, int], int]
    wanted: Callable[[int, int], int | None]
    is_reduction: bool
    is_ordered: bool = False


def allreduce(nranks: int, nchunks: int) -> Conditions:
    """Return the conditions of an allreduce: all ranks end with all contributions to each chunk."""
    every = (1 << nranks) - 1
    return Conditions(lambda rank, chunk: 1 << rank, lambda rank, chunk: every, True)


def reduce(nranks: int, nchunks: int, root: int) -> Conditions:
    """Return the conditions of a reduce: rank `root` ends with all contributions to each chunk."""
    every = (1 << nranks) - 1
    _require_rank(root, nranks)
    return Conditions(
        lambda rank, chunk: 1 << rank, lambda rank, chunk: every if rank == root else None, True
    )


def reduce_scatter(nranks: int, nchunks: int) -> Conditions:
    """Return the conditions of a reduce-scatter.

    Rank ``chunk * nranks // nchunks`` ends with all contributions to `chunk`.
    """
    every = (1 << nranks) - 1
    _require_multiple(nranks, nchunks)
    return Conditions(
        lambda rank, chunk: 1 << rank,
        lambda rank, chunk: every if chunk * nranks // nchunks == rank else None,
        True,
    )


def allgather(nranks: int, nchunks: int) -> Conditions:
    """Return the conditions of an allgather.

    All ranks end with the data of rank ``chunk * nranks // nchunks`` for each `chunk`.
    """
    _require_multiple(nranks, nchunks)

    def owner(chunk: int) -> int:
        return chunk * nranks // nchunks

    return Conditions(
        lambda rank, chunk: 1 << rank if owner(chunk) == rank else 0,
        lambda rank, chunk: 1 << owner(chunk),
        False,
    )


def broadcast(nranks: int, nchunks: int, root: int) -> Conditions:
    """Return the conditions of a broadcast: all ranks end with the data of rank `root`."""
    _require_rank(root, nranks)
    return Conditions(
        lambda rank, chunk: 1 << root if rank == root else 0,
        lambda rank, chunk: 1 << root,
        False,
    )


def gather(nranks: int, nchunks: int, root: int) -> Conditions:
    """Return the conditions of a gather.

    Rank `root` ends with the data of rank ``chunk * nranks // nchunks`` for each `chunk`.
    """
    _require_rank(root, nranks)
    every = allgather(nranks, nchunks)
    return Conditions(
        every.initial,
        lambda rank, chunk: every.wanted(rank, chunk) if rank == root else None,
        False,
    )


def scatter(nranks: int, nchunks: int, root: int) -> Conditions:
    """Return the conditions of a scatter.

    Rank ``chunk * nranks // nchunks`` ends with the data of rank `root` for each `chunk`.
    """
    _require_rank(root, nranks)
    _require_multiple(nranks, nchunks)
    return Conditions(
        lambda rank, chunk: 1 << root if rank == root else 0,
        lambda rank, chunk: 1 << root if chunk * nranks // nchunks == rank else None,
        False,
    )


def alltoall(nranks: int, nchunks: int) -> Conditions:
    """Return the conditions of an alltoall.

    For a chunk of part ``k = chunk * nranks // nchunks``, rank r sends its data to rank ``r + k``
    and ends with the data of rank ``r - k``, both modulo `nranks`.
    """
    _require_multiple(nranks, nchunks)
    return Conditions(
        lambda rank, chunk: 1 << rank,
        lambda rank, chunk: 1 << (rank - chunk * nranks // nchunks) % nranks,
        False,
    )


def scan(nranks: int, nchunks: int) -> Conditions:
    """Return the conditions of a scan: rank r ends with the contributions of ranks 0 to r."""
    return Conditions(
        lambda rank, chunk: 1 << rank, lambda rank, chunk: (2 << rank) - 1, False, is_ordered=True
    )


def exscan(nranks: int, nchunks: int) -> Conditions:
    """Return the conditions of an exscan: rank r ends with the contributions of ranks below r.

    The output of rank 0 is undefined.
    """
    return Conditions(
        lambda rank, chunk: 1 << rank,
        lambda rank, chunk: (1 << rank) - 1 or None,
        False,
        is_ordered=True,
    )


#: Collectives without a root, by the name in `Schedule.collective`.
CONDITIONS: dict[str, Callable[[int, int], Conditions]] = {
    "allgather": allgather,
    "allreduce": allreduce,
    "alltoall": alltoall,
    "exscan": exscan,
    "reduce_scatter": reduce_scatter,
    "scan": scan,
}
#: Collectives with a root, by name.
ROOTED: dict[str, Callable[[int, int, int], Conditions]] = {
    "broadcast": broadcast,
    "gather": gather,
    "reduce": reduce,
    "scatter": scatter,
}


def conditions_of(schedule: Schedule) -> tuple[Conditions, ...]:
    """Return the conditions of `schedule`'s collective for each channel.

    Raises
    ------
    ScheduleError
        If the name of the collective is neither in `CONDITIONS` nor in `ROOTED`.
    InvalidArgument
        If the collective needs a multiple of `nranks` chunks per channel, and a channel has a
        number of chunks that is not such a multiple.
    """
    name, nranks = schedule.collective, schedule.nranks
    if name in CONDITIONS:
        return tuple(CONDITIONS[name](nranks, nchunks) for nchunks in schedule.nchunks)
    if name in ROOTED:
        return tuple(ROOTED[name](nranks, nchunks, schedule.root) for nchunks in schedule.nchunks)
    raise ScheduleError(
        f"collective {name!r} is unknown; known: {', '.join((*CONDITIONS, *ROOTED))}"
    )


def _require_rank(root: int, nranks: int) -> None:
    if not 0 <= root < nranks:
        raise InvalidArgument(f"root={root}; allowed is 0 to {nranks - 1}")


def _require_multiple(nranks: int, nchunks: int) -> None:
    if nchunks % nranks:
        raise InvalidArgument(
            f"{nchunks} chunks for {nranks} ranks; give each rank the same number of chunks"
        )


__all__ = [
    "CONDITIONS",
    "ROOTED",
    "Conditions",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "conditions_of",
    "exscan",
    "gather",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
]

"""What a collective means: which contributions a rank starts with and which it must end with.

Values and arithmetic only. Invariant: a collective is defined here and nowhere else; an
algorithm is right iff `check` finds that its ops lead from ``initial`` to ``wanted``.

A contribution is one rank's share of one chunk. A set of contributions is an int used as a bit
set: bit ``r`` for rank ``r``. All spaces have the same chunks, so a rank's INPUT may hold only
some of them (allgather) and a rank's OUTPUT may matter only in part (reduce_scatter); in place
these are NCCL's in-place positions.
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
        ``initial(rank, chunk)``: contributions that rank's INPUT chunk holds at first; 0 if none.
    wanted : callable
        ``wanted(rank, chunk)``: contributions that rank's OUTPUT chunk must end with; None where
        the collective does not say what it holds.
    is_reduction : bool
        Contributions are combined, so that ops have to mark where they are complete.
    """

    initial: Callable[[int, int], int]
    wanted: Callable[[int, int], int | None]
    is_reduction: bool


def allreduce(nranks: int, nchunks: int) -> Conditions:
    """Every rank ends with every rank's contribution to every chunk."""
    every = (1 << nranks) - 1
    return Conditions(lambda rank, chunk: 1 << rank, lambda rank, chunk: every, True)


def reduce(nranks: int, nchunks: int, root: int) -> Conditions:
    """Rank `root` ends with every rank's contribution to every chunk."""
    every = (1 << nranks) - 1
    _require_rank(root, nranks)
    return Conditions(
        lambda rank, chunk: 1 << rank, lambda rank, chunk: every if rank == root else None, True
    )


def reduce_scatter(nranks: int, nchunks: int) -> Conditions:
    """Each rank ends with every rank's contribution to the chunks it owns."""
    every = (1 << nranks) - 1
    _require_multiple(nranks, nchunks)
    return Conditions(
        lambda rank, chunk: 1 << rank,
        lambda rank, chunk: every if chunk * nranks // nchunks == rank else None,
        True,
    )


def allgather(nranks: int, nchunks: int) -> Conditions:
    """Every rank ends with each chunk as its owner, rank ``chunk * nranks // nchunks``, had it."""
    _require_multiple(nranks, nchunks)

    def owner(chunk: int) -> int:
        return chunk * nranks // nchunks

    return Conditions(
        lambda rank, chunk: 1 << rank if owner(chunk) == rank else 0,
        lambda rank, chunk: 1 << owner(chunk),
        False,
    )


def broadcast(nranks: int, nchunks: int, root: int) -> Conditions:
    """Every rank ends with what rank `root` had."""
    _require_rank(root, nranks)
    return Conditions(
        lambda rank, chunk: 1 << root if rank == root else 0,
        lambda rank, chunk: 1 << root,
        False,
    )


#: Collectives by the name a schedule gives.
CONDITIONS: dict[str, Callable[[int, int], Conditions]] = {
    "allgather": allgather,
    "allreduce": allreduce,
    "reduce_scatter": reduce_scatter,
}
#: Those with a root.
ROOTED: dict[str, Callable[[int, int, int], Conditions]] = {
    "broadcast": broadcast,
    "reduce": reduce,
}


def conditions_of(schedule: Schedule) -> tuple[Conditions, ...]:
    """Look up what each channel of `schedule` claims to compute.

    Raises
    ------
    ScheduleError
        The name is neither in `CONDITIONS` nor in `ROOTED`.
    InvalidArgument
        There is no such collective with so many chunks.
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
    "broadcast",
    "conditions_of",
    "reduce",
    "reduce_scatter",
]

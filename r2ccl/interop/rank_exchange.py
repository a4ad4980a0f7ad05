"""`RankExchange`: base class of the objects through which ranks exchange values in `r2ccl.init`.

`r2ccl.init` accepts any object with the methods of this class, such as a communicator of mpi4py.
The ranks use the object to exchange the IDs of their hosts, the address of rank 0 and, unless every
rank already has it, the secret of the job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any


class RankExchange(ABC):
    """Exchange of values among ranks, with the methods that `r2ccl.init` calls.

    The methods are those of a communicator of mpi4py, but `root` has no default.

    Parameters
    ----------
    rank, nranks : int

    Notes
    -----
    *Collective*: all ranks call `allgather` and `bcast` in the same order.
    """

    def __init__(self, rank: int, nranks: int) -> None:
        self._rank = rank
        self._nranks = nranks

    def Get_rank(self) -> int:
        """Return the rank of this process."""
        return self._rank

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self._nranks

    @abstractmethod
    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""

    def bcast(self, value: Any, root: int) -> Any:
        """Return the value that rank `root` passed; the errors are those of `allgather`."""
        return self.allgather(value if self._rank == root else None)[root]


def named_ranks(ranks: Collection[int]) -> str:
    """Return the name of one or more ranks for an error message: "rank 1", or "ranks 1, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


__all__ = ["RankExchange", "named_ranks"]

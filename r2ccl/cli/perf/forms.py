"""Collectives that ``r2ccl bench`` measures, and their bandwidths as nccl-tests defines them.

The module does not import NumPy or `r2ccl.runtime`, so that ``r2ccl bench --help``, which lists the
collectives, is fast.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple


class DataExtent(enum.Enum):
    """Elements that a rank sends or receives: none, its part, all, or all on the root only."""

    NONE = enum.auto()
    PART = enum.auto()
    WHOLE = enum.auto()
    ROOT = enum.auto()


class CollectiveForm(NamedTuple):
    """Properties of a collective, barrier or message exchange that the benchmark measures.

    Attributes
    ----------
    name : str
        Method of `r2ccl.Communicator`.
    sends, receives : DataExtent
        Elements that a rank sends, and elements that it receives.
    reduces : bool
        True if the method takes a reduction operation.
    is_rooted : bool
        True if the method takes a root.
    has_parts : bool
        True if the buffer consists of one part per rank.
    is_unequal : bool
        True if the parts have different sizes.
    """

    name: str
    sends: DataExtent
    receives: DataExtent
    reduces: bool = False
    is_rooted: bool = False
    has_parts: bool = False
    is_unequal: bool = False

    @property
    def can_be_in_place(self) -> bool:
        """True if the data sent and the data received may share memory."""
        return self.name not in ("sendrecv", "barrier")


_NONE, _PART, _WHOLE, _ROOT = DataExtent.NONE, DataExtent.PART, DataExtent.WHOLE, DataExtent.ROOT
FORMS = {
    form.name: form
    for form in (
        CollectiveForm("allreduce", _WHOLE, _WHOLE, reduces=True),
        CollectiveForm("allgather", _PART, _WHOLE, has_parts=True),
        CollectiveForm("allgatherv", _PART, _WHOLE, has_parts=True, is_unequal=True),
        CollectiveForm("reduce_scatter", _WHOLE, _PART, reduces=True, has_parts=True),
        CollectiveForm(
            "reduce_scatterv", _WHOLE, _PART, reduces=True, has_parts=True, is_unequal=True
        ),
        CollectiveForm("broadcast", _WHOLE, _WHOLE, is_rooted=True),
        CollectiveForm("reduce", _WHOLE, _ROOT, reduces=True, is_rooted=True),
        CollectiveForm("gather", _PART, _ROOT, is_rooted=True, has_parts=True),
        CollectiveForm("gatherv", _PART, _ROOT, is_rooted=True, has_parts=True, is_unequal=True),
        CollectiveForm("scatter", _ROOT, _PART, is_rooted=True, has_parts=True),
        CollectiveForm("scatterv", _ROOT, _PART, is_rooted=True, has_parts=True, is_unequal=True),
        CollectiveForm("alltoall", _WHOLE, _WHOLE, has_parts=True),
        CollectiveForm("alltoallv", _WHOLE, _WHOLE, has_parts=True, is_unequal=True),
        CollectiveForm("scan", _WHOLE, _WHOLE, reduces=True),
        CollectiveForm("exscan", _WHOLE, _WHOLE, reduces=True),
        CollectiveForm("sendrecv", _WHOLE, _WHOLE),
        CollectiveForm("barrier", _NONE, _NONE),
    )
}

#: Operations of reductions that are measured.
OPS = ("sum", "prod", "min", "max", "avg")

#: Bus bandwidth divided by algorithm bandwidth, per collective (PERFORMANCE.md of nccl-tests).
#: Unequal parts count like equal ones. nccl-tests has no prefix sums; their factor is 1, because no
#: rank needs to send or receive the data more than once.
_BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(
        (
            *("allgather", "allgatherv", "reduce_scatter", "reduce_scatterv"),
            *("gather", "gatherv", "scatter", "scatterv", "alltoall", "alltoallv"),
        ),
        lambda n: (n - 1) / n,
    ),
    **dict.fromkeys(
        ("broadcast", "reduce", "scan", "exscan", "sendrecv", "barrier"), lambda n: 1.0
    ),
}


def algbw(nbytes: int, seconds: float) -> float:
    """Return the algorithm bandwidth in GB/s (1e9 bytes)."""
    return nbytes / seconds / 1e9


def busbw(collective: str, nranks: int, nbytes: int, seconds: float) -> float:
    """Return the bus bandwidth in GB/s (1e9 bytes): `algbw` times the collective's bus factor."""
    return algbw(nbytes, seconds) * _BUS_FACTORS[collective](nranks)


__all__ = ["FORMS", "OPS", "CollectiveForm", "DataExtent", "algbw", "busbw"]

"""The values that all packages use: reductions, NICs, rails, paths, probes.

Values only: no I/O, no clock, no state; this module imports nothing of the library.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec


class ReduceOp(enum.IntEnum):
    """Reduction of a collective; ``AVG`` is the sum divided by ``nranks`` (NCCL's definition)."""

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3
    AVG = 4


class Collective(enum.IntEnum):
    """Collective operations, as they are numbered on the wire."""

    ALLREDUCE = 0
    BARRIER = 1
    ALLGATHER = 2
    REDUCE_SCATTER = 3
    BROADCAST = 4
    REDUCE = 5


#: Collectives that combine data, and those with a root.
REDUCTIONS = frozenset((Collective.ALLREDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE))
ROOTED = frozenset((Collective.BROADCAST, Collective.REDUCE))
#: Collectives whose buffer has one part a rank.
PARTED = frozenset((Collective.ALLGATHER, Collective.REDUCE_SCATTER))

#: Returns the bytes that each rank passed, by rank. *Collective*: all ranks, with equal lengths.
AllgatherBytes: TypeAlias = Callable[[bytes], Sequence[bytes]]


#: The rail of a path that two ranks use when they have no rail in common.
BYPASS = 0xFFFF


class Nic(msgspec.Struct, frozen=True):
    """One local network device a rail can start from.

    ``name`` is the interface (``eth0``), ``address`` the IPv4 or IPv6 address to bind,
    ``index`` the kernel's interface index, ``speed_mbps`` the nominal rate (0: unknown).
    ``is_last_resort``: slices travel over it only where two ranks have nothing else.
    """

    name: str
    address: str
    index: int = 0
    speed_mbps: int = 0
    is_last_resort: bool = False


def rail_name(rail: int) -> str:
    """Name a path's rail for people."""
    return "the bypass" if rail == BYPASS else f"rail {rail}"


class PathKey(NamedTuple):
    """One rail between this rank and ``peer``: what fails, is fenced and migrates.

    Rail `BYPASS` is none of the rails: see `BypassWay`.
    """

    peer: int
    rail: int

    @property
    def is_bypass(self) -> bool:
        """Whether it goes round the rails."""
        return self.rail == BYPASS


class BypassWay(NamedTuple):
    """How a bypass may go: from this rank's port of rail `via` to rank `to`'s port of rail `rail`.

    To the peer itself between ports of different rails, on a fabric that joins them; or to a third
    rank, which forwards.
    """

    via: int
    to: int
    rail: int


class ProbeKey(NamedTuple):
    """The port `rail` of `peer` is asked for a sign of life, from this rank's port of rail `via`.

    With ``via == rail`` the two ports are those of a path; any other is this rank's auxiliary.
    """

    peer: int
    rail: int
    via: int


class CallSignature(msgspec.Struct, frozen=True):
    """What all ranks must agree on in one call; travels with every slice, packed in 64 bits.

    ``count`` is that of the whole buffer, all ranks' parts together. ``op`` is SUM and ``root`` 0
    where a collective has none. For an allreduce with a schedule of the caller's, ``root`` is
    derived from its digest: see `with_schedule`.
    """

    collective: int
    dtype: int
    op: int
    count: int
    root: int = 0

    def with_schedule(self, digest: int) -> CallSignature:
        """Return the signature of this allreduce with the schedule of that `Schedule.digest`."""
        return msgspec.structs.replace(self, root=1 + digest % _ROOT_MASK)

    def pack(self) -> int:
        """Pack: 4 bits collective, 6 dtype, 4 op, 12 root, 38 count (elements).

        Of a root, and of a count, the lower bits: enough to tell calls apart.
        """
        head = (self.collective << 10) | (self.dtype << 4) | self.op
        return (head << 50) | ((self.root & _ROOT_MASK) << 38) | (self.count & _COUNT_MASK)

    @classmethod
    def unpack(cls, packed: int) -> CallSignature:
        """Invert `pack`."""
        return cls(
            packed >> 60,
            (packed >> 54) & 0x3F,
            (packed >> 50) & 0xF,
            packed & _COUNT_MASK,
            (packed >> 38) & _ROOT_MASK,
        )


_ROOT_MASK = (1 << 12) - 1
_COUNT_MASK = (1 << 38) - 1


__all__ = [
    "BYPASS",
    "REDUCTIONS",
    "ROOTED",
    "AllgatherBytes",
    "BypassWay",
    "CallSignature",
    "Collective",
    "Nic",
    "PathKey",
    "ProbeKey",
    "ReduceOp",
    "rail_name",
]

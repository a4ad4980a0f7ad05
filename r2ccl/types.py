"""Values that several packages share: collectives, call signatures, NICs, path and probe keys."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec


class ReduceOp(enum.IntEnum):
    """Reduction of a collective; the members beginning with L, B and M have MPI's definitions.

    AVG is the sum divided by ``nranks`` (NCCL's definition). LAND, LOR and LXOR give 0 or 1 (False
    or True); any number but 0 is true. MINLOC and MAXLOC reduce pairs of a value and an index
    (`r2ccl.pair_dtype`); if values are equal, the result has the lowest index.
    """

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3
    AVG = 4
    LAND = 5
    BAND = 6
    LOR = 7
    BOR = 8
    LXOR = 9
    BXOR = 10
    MINLOC = 11
    MAXLOC = 12


#: Number of a commutative user-defined operation in a call signature.
USER_OP = 14
#: Number of a non-commutative user-defined operation in a call signature; the ranks' data must be
#: combined in rank order.
ORDERED_OP = 15


class EnvelopeKind(enum.IntEnum):
    """Kinds of the frames by which a message is sent, and their numbers on the wire.

    MESSAGE contains a short message. REQUEST announces any other message: a long one, a synchronous
    one, or a short one that would exceed `MOST_UNTAKEN` in shared memory, or
    `MOST_UNTAKEN_ON_LINKS` over links. GRANT, READ or REFUSE answers a REQUEST. After a GRANT, the
    data follows as DATA in shared memory, or as slices of links. READ, only in shared memory, says
    that the receiver has read all data from the sender's process. On links, every envelope also
    reports how many bytes of the peer's short messages this rank's receives have taken; TAKEN
    contains only this report.
    """

    MESSAGE = 1
    REQUEST = 2
    GRANT = 3
    REFUSE = 4
    TAKEN = 5
    DATA = 6
    READ = 7


#: Maximum total size of short messages to one peer that no receive has taken yet, in bytes: in
#: shared memory, and over links.
MOST_UNTAKEN = 1 << 20
MOST_UNTAKEN_ON_LINKS = 1 << 22
#: Total size of a peer's short messages over links, in bytes, that a rank takes before it reports
#: them in an envelope of their own.
MOST_UNREPORTED = MOST_UNTAKEN_ON_LINKS // 2


class Collective(enum.IntEnum):
    """Collective operations and their numbers on the wire."""

    ALLREDUCE = 0
    BARRIER = 1
    ALLGATHER = 2
    REDUCE_SCATTER = 3
    BROADCAST = 4
    REDUCE = 5
    GATHER = 6
    SCATTER = 7
    ALLTOALL = 8
    GATHERV = 9
    SCATTERV = 10
    ALLTOALLV = 11
    SCAN = 12
    EXSCAN = 13


#: Collectives that reduce data.
REDUCTIONS = frozenset(
    (
        Collective.ALLREDUCE,
        Collective.REDUCE_SCATTER,
        Collective.REDUCE,
        Collective.SCAN,
        Collective.EXSCAN,
    )
)
#: Collectives with a root rank.
ROOTED = frozenset(
    (
        Collective.BROADCAST,
        Collective.REDUCE,
        Collective.GATHER,
        Collective.SCATTER,
        Collective.GATHERV,
        Collective.SCATTERV,
    )
)
#: Collectives in which, on every rank, exactly one of the two buffers has one part per rank.
PARTED = frozenset((Collective.ALLGATHER, Collective.REDUCE_SCATTER))
#: Collectives in which a rank knows only the sizes of the parts that it sends or receives.
PAIRWISE = frozenset((Collective.GATHERV, Collective.SCATTERV, Collective.ALLTOALLV))
#: Collectives whose parts travel from source to destination directly, except that a gather or
#: scatter may use a tree.
DIRECT = PAIRWISE | {Collective.GATHER, Collective.SCATTER, Collective.ALLTOALL}
#: Reductions, in rank order, over the ranks below each rank, with or without that rank.
PREFIXES = frozenset((Collective.SCAN, Collective.EXSCAN))

#: Allgather of bytes: returns the bytes passed by each rank, in rank order.
#: *Collective*: all ranks must call with equally many bytes.
AllgatherBytes: TypeAlias = Callable[[bytes], Sequence[bytes]]


def pack_text(text: str, nbytes: int) -> bytes:
    """Return `text` in UTF-8, cut or padded with zeros to `nbytes` bytes, for an allgather."""
    return text.encode()[:nbytes].ljust(nbytes, b"\0")


def unpack_text(packed: bytes) -> str:
    """Return the text that `pack_text` packed; a character that was cut becomes U+FFFD."""
    return packed.rstrip(b"\0").decode(errors="replace")


#: Rail number of a bypass: a path for two ranks that have no usable rail in common.
BYPASS = 0xFFFF


class Nic(msgspec.Struct, frozen=True):
    """Local network interface or RDMA port that can serve as this rank's end of a rail.

    Attributes
    ----------
    name : str
        Name of the interface (``eth0``) or of the RDMA port (``mlx5_0:1``).
    address : str
        IPv4 or IPv6 address to bind; empty for an RDMA port.
    index : int
        The kernel's interface index; 0: none.
    speed_mbps : int
        Nominal rate in Mbit/s; 0: unknown.
    is_last_resort : bool
        True if the NIC carries slices only between two ranks that have no other rail left. Not
        used with RDMA rails: the NICs of all TCP rails then have this role, and the value is False.
    """

    name: str
    address: str
    index: int = 0
    speed_mbps: int = 0
    is_last_resort: bool = False


def rail_name(rail: int) -> str:
    """Return the name of a path's rail for messages: ``rail 2`` or ``the bypass``."""
    return "the bypass" if rail == BYPASS else f"rail {rail}"


class PathKey(NamedTuple):
    """Key of the path from this rank to ``peer`` over one rail; a path is the unit that fails.

    Rail number `BYPASS` stands for a bypass, which uses no common rail: see `BypassWay`.
    """

    peer: int
    rail: int

    @property
    def is_bypass(self) -> bool:
        """True if the path is a bypass, which uses no common rail."""
        return self.rail == BYPASS


class BypassWay(NamedTuple):
    """First hop of a possible bypass, from this rank's port of rail `via` to a port of rank `to`.

    The port of `to` is on rail `rail`. `to` is either the peer itself, if the fabric connects the
    ports of different rails, or a third rank that forwards the bytes to the peer.
    """

    via: int
    to: int
    rail: int


class ProbeKey(NamedTuple):
    """Key of a probe of `peer`'s port on rail `rail`, sent from this rank's port on rail `via`.

    With ``via == rail`` the two ports are the ends of a path. Otherwise one of the two is an end of
    the path that is diagnosed, and the other an auxiliary port: see
    `r2ccl.failover.diagnosis.verdict`.
    """

    peer: int
    rail: int
    via: int


def signed_word(word: int) -> int:
    """Return the signed 64-bit integer with the same bits as the unsigned `word`."""
    return word - (1 << 64) if word >= 1 << 63 else word


class CallSignature(msgspec.Struct, frozen=True):
    """Arguments of a call that must be equal on all ranks, in 64 bits on the wire.

    Sent with every slice, except over RDMA, where a cleared slice has them in its clear-to-send.
    ``count`` is the number of elements of the whole buffer, all ranks' parts together; for a
    collective in `PAIRWISE` it is 0 or, in a slice, the number of elements that the sender of the
    slice sends to its receiver in the call. ``user`` is the digest of a user-defined operation,
    else 0. Collectives that do not reduce have ``op`` SUM. Collectives without a root have ``root``
    0, except in three cases, in which ``root`` is made from a digest (see `with_digest`):

    - an allreduce that runs a schedule of the caller
    - an allreduce that joins several allreduces of a group
    - a collective in `PARTED` whose parts differ in size, and every allgatherv on GPU memory
    """

    collective: int
    dtype: int
    op: int
    count: int
    root: int = 0
    user: int = 0

    def with_digest(self, digest: int) -> CallSignature:
        """Return the signature with a ``root`` made from `digest`, such as that of a schedule."""
        return msgspec.structs.replace(self, root=1 + digest % _ROOT_MASK)

    def pack(self) -> int:
        """Return the 64-bit form: 4 bits collective, 6 dtype, 4 op, 12 root, 38 count (elements).

        With a user-defined operation, the upper 12 of the 38 bits are combined with its digest by
        exclusive or, so that calls with one operation and different counts differ. Only the lower
        bits of larger numbers are packed; they distinguish calls well enough.
        """
        head = (self.collective << 10) | (self.dtype << 4) | self.op
        count = (self.count ^ (self.user << 26)) & _COUNT_MASK
        return (head << 50) | ((self.root & _ROOT_MASK) << 38) | count

    @classmethod
    def unpack(cls, packed: int) -> CallSignature:
        """Return the signature that `pack` packed; its numbers have only the packed bits.

        With a user-defined operation, ``count`` has only the lower 26 bits, and ``user`` has the
        upper 12, which `pack` combined with the digest.
        """
        op = (packed >> 50) & 0xF
        is_user = op >= USER_OP
        return cls(
            packed >> 60,
            (packed >> 54) & 0x3F,
            op,
            packed & (_USER_COUNT_MASK if is_user else _COUNT_MASK),
            (packed >> 38) & _ROOT_MASK,
            (packed >> 26) & _USER_MASK if is_user else 0,
        )


_ROOT_MASK = (1 << 12) - 1
_COUNT_MASK = (1 << 38) - 1
_USER_MASK = (1 << 12) - 1
_USER_COUNT_MASK = (1 << 26) - 1


__all__ = [
    "BYPASS",
    "DIRECT",
    "MOST_UNREPORTED",
    "MOST_UNTAKEN",
    "MOST_UNTAKEN_ON_LINKS",
    "ORDERED_OP",
    "PAIRWISE",
    "PARTED",
    "PREFIXES",
    "REDUCTIONS",
    "ROOTED",
    "USER_OP",
    "AllgatherBytes",
    "BypassWay",
    "CallSignature",
    "Collective",
    "EnvelopeKind",
    "Nic",
    "PathKey",
    "ProbeKey",
    "ReduceOp",
    "pack_text",
    "rail_name",
    "signed_word",
    "unpack_text",
]

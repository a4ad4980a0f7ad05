"""The schedule's vocabulary: ops, a rank's program, the schedule of a collective.

Values only: no I/O, no clock, no thread, no array. Of the library this file imports `errors`.
Invariant: a value here says what happens and what waits for what; whether that is *right* is
`r2ccl.schedule.check`'s business, and nothing here is trusted before it has been checked.

How a program runs
------------------
A channel owns a share of the buffer, cut in nearly equal chunks (`r2ccl.schedule.chunks`); each
channel has its own number of them. Every op names one chunk index; the same index has the same size
on all ranks and in all spaces. Ops of a channel run as soon as the ops in ``after`` allow, not in
the order they are listed; the list orders only the ops of one directed link (source rank,
destination rank, channel), whose sends and receives match one to one in that order.

A chunk travels as slices. Between two ops on the same chunk index a dependency holds slice by
slice (slice k waits for slice k only); between ops on different indices, for the whole op.

``after`` an op that receives, reduces or copies means that its destination holds the data.
``after`` a SEND means that its source memory is released: the peer confirmed the slice and the
local request is retired, or the slice was copied into an eager slot. A peer confirms a slice
when it has *landed*; a RECV_REDUCE lands beside the user's buffers and confirms before it
reduces, otherwise two ranks that exchange a chunk and reduce it in place would wait for ever.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable
from fractions import Fraction

import msgspec

from r2ccl.errors import InvalidArgument

#: Collectives whose buffer is one equal part a rank; no chunk straddles two of them.
PARTED = frozenset({"allgather", "reduce_scatter"})


class OpKind(enum.IntEnum):
    """What an op does; ``received`` is what the matching SEND of ``peer`` carries."""

    #: Read ``src``, give it to ``peer``.
    SEND = 0
    #: ``dst = received``, landing straight in ``dst``: named to the peer when ``after`` holds.
    RECV = 1
    #: ``dst = reduce(src, received)``; ``received`` is the left operand iff ``peer < rank``.
    RECV_REDUCE = 2
    #: ``dst = src``; harmless when both are the same memory.
    COPY = 3
    #: ``dst = reduce(dst, src)``.
    REDUCE = 4


class Space(enum.IntEnum):
    """Which buffer a chunk index points into; in place, INPUT and OUTPUT are the same memory."""

    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2


class Op(msgspec.Struct, frozen=True, gc=False):
    """One step of one rank on one channel.

    Parameters
    ----------
    kind : OpKind
    peer : int
        The other rank; -1 for COPY and REDUCE.
    src_space, src : Space, int
        Chunk that is read; ``src`` is -1 for RECV, whose ``src_space`` means nothing.
    dst_space, dst : Space, int
        Chunk that is written, never in INPUT; ``dst`` is -1 for SEND, whose ``dst_space`` means
        nothing. Where both are given, ``src == dst``: other chunks may differ in size.
    after : tuple of int
        Ops of the same rank and channel this op waits for: indices below its own, ascending.
    is_final : bool
        The destination now holds every contribution: AVG divides here, exactly once on the way
        to each rank's output.
    is_proof : bool
        Of a RECV: what it receives could not have been sent before the peers of the SENDs in
        ``after`` received theirs. Their confirmation is implied then, and the landing place may be
        named as soon as they are retired; the checker proves it.
    """

    kind: OpKind
    peer: int
    src_space: Space
    src: int
    dst_space: Space
    dst: int
    after: tuple[int, ...] = ()
    is_final: bool = False
    is_proof: bool = False

    @property
    def chunk(self) -> int:
        """Index of the chunk the op works on."""
        return self.dst if self.src < 0 else self.src


class RankProgram(msgspec.Struct, frozen=True):
    """What one rank does in one collective: ``channels[c][i]`` is op ``i`` of channel ``c``.

    ``nparts``, ``nchunks`` and ``weights`` are those of the schedule.
    """

    rank: int
    nranks: int
    nparts: int
    nchunks: tuple[int, ...]
    weights: tuple[int, ...]
    channels: tuple[tuple[Op, ...], ...]


class Cost(msgspec.Struct, frozen=True):
    """What a schedule costs, independent of any network.

    Parameters
    ----------
    steps : int
        Messages on the longest chain of messages that wait for one another.
    sent, received : Fraction
        What the busiest rank puts on and takes off the wire, as a multiple of the buffer.
    ops : int
        Ops of the busiest rank on its busiest channel.
    """

    steps: int
    sent: Fraction
    received: Fraction
    ops: int


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """The ops of a collective, generated rank by rank.

    Parameters
    ----------
    name : str
        The algorithm, as its file in ``algos`` is called.
    collective : str
        What it computes: a key of `r2ccl.schedule.conditions.CONDITIONS`.
    nranks : int
        Size of the communicator.
    nchunks : tuple of int
        Chunks of each channel; their number is that of the channels.
    cost : Cost
        As the algorithm declares it; `r2ccl.schedule.cost.measure` counts it from the ops.
    generate : callable
        ``generate(rank)`` returns that rank's ops, one tuple a channel, in time proportional to
        their number. Pure: equal arguments, equal ops.
    weights : tuple of int
        Share of each channel of the work; default equal.
    root : int
        Of a rooted collective: the rank that gives or gets the data.

    Raises
    ------
    InvalidArgument
        A size below 1, no channel, not one weight a channel, a root that is no rank.
    """

    name: str
    collective: str
    nranks: int
    nchunks: tuple[int, ...]
    cost: Cost
    generate: Callable[[int], tuple[tuple[Op, ...], ...]]
    weights: tuple[int, ...] = ()
    root: int = 0

    def __post_init__(self) -> None:
        if self.nranks < 1:
            raise InvalidArgument(f"schedule {self.name!r}: nranks={self.nranks}; give 1 or more")
        if min(self.nchunks, default=0) < 1:
            raise InvalidArgument(
                f"schedule {self.name!r}: nchunks={self.nchunks}; give 1 or more a channel, and "
                "one channel or more"
            )
        if not 0 <= self.root < self.nranks:
            raise InvalidArgument(
                f"schedule {self.name!r}: root={self.root}; allowed is 0 to {self.nranks - 1}"
            )
        if not self.weights:
            msgspec.structs.force_setattr(self, "weights", (1,) * self.nchannels)
        if len(self.weights) != self.nchannels:
            raise InvalidArgument(
                f"schedule {self.name!r}: weights={self.weights}; give {self.nchannels}, one a "
                "channel"
            )

    @property
    def nchannels(self) -> int:
        """Channels of every rank."""
        return len(self.nchunks)

    @property
    def nparts(self) -> int:
        """Equal parts of the buffer, see `PARTED`; the chunks of every channel are a multiple."""
        return self.nranks if self.collective in PARTED else 1

    def digest(self) -> int:
        """Return a CRC-32 of the programs of all ranks, which this generates."""
        found = 0
        for rank in range(self.nranks):
            found = zlib.crc32(msgspec.msgpack.encode(self.program(rank)), found)
        return found

    def program(self, rank: int) -> RankProgram:
        """Generate the program of `rank`.

        Raises
        ------
        InvalidArgument
            `rank` is not in ``range(nranks)``.
        """
        if not 0 <= rank < self.nranks:
            raise InvalidArgument(
                f"schedule {self.name!r}: rank={rank}; allowed is 0 to {self.nranks - 1}"
            )
        channels = self.generate(rank)
        return RankProgram(rank, self.nranks, self.nparts, self.nchunks, self.weights, channels)


__all__ = ["PARTED", "Cost", "Op", "OpKind", "RankProgram", "Schedule", "Space"]

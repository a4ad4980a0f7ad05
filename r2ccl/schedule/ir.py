"""Intermediate representation of schedules: ops, rank programs, schedules.

These types only describe operations and their dependencies. `r2ccl.schedule.check.check` verifies
that a schedule computes its collective.

Execution model
---------------
A channel owns a share of the buffer, divided into chunks (`r2ccl.schedule.chunks`).
Channels can differ in their number of chunks. Every op works on one chunk index; the same index has
the same size at both ends of a message. An op begins as soon as the ops in its ``after`` are done,
or earlier with `Op.is_proof`. The position in the program orders only the ops of one directed link
(source rank, destination rank, channel): the n-th send matches the n-th receive.

A chunk is sent as slices. If an op waits for another op on the same chunk index, slice k waits for
slice k only; if the chunk indices differ, every slice waits for the whole op.

An op that receives, reduces or copies is done when its destination holds the data. A SEND is done
when its source memory is released: the peer has confirmed the slice and the transport no longer
reads the memory, or the slice was copied to an eager slot. A peer confirms a slice when it has
*landed*. The slices of a RECV_REDUCE land outside the user's buffers and are confirmed before they
are reduced; otherwise two ranks that exchange a chunk and reduce it in place would deadlock.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable
from fractions import Fraction

import msgspec

from r2ccl.errors import InvalidArgument, ScheduleError

#: Collectives whose buffer consists of one part per rank. No chunk straddles two parts.
PARTED = frozenset({"allgather", "reduce_scatter", "gather", "scatter", "alltoall"})
#: Collectives whose INPUT and OUTPUT are never the same memory.
APART = frozenset({"alltoall", "exscan"})


class OpKind(enum.IntEnum):
    """Kind of an op.

    In the descriptions of the kinds, ``received`` is the data of the matching SEND of ``peer``.
    """

    #: Send ``src`` to ``peer``.
    SEND = 0
    #: ``dst = received``. Unless the message is eager, it lands directly in ``dst``: the rank
    #: announces ``dst`` to the peer when the ops in ``after`` are done, or earlier with `is_proof`.
    RECV = 1
    #: ``dst = reduce(src, received)``, or ``dst = reduce(received, src)`` if ``peer < rank``.
    RECV_REDUCE = 2
    #: ``dst = src``. Copies nothing if both are the same memory.
    COPY = 3
    #: ``dst = reduce(dst, src)``.
    REDUCE = 4


class Space(enum.IntEnum):
    """Buffer that a chunk index refers to.

    In place, INPUT and OUTPUT are the same memory. Collectives in `APART` are never in place.
    """

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
        Chunk that is read. For RECV, ``src`` is -1 and ``src_space`` is ignored.
    dst_space, dst : Space, int
        Chunk that is written, never in INPUT. For SEND, ``dst`` is -1 and ``dst_space`` is ignored.
        For kinds that read and write, ``src == dst``, because chunks may differ in size.
    after : tuple of int
        Ops of the same rank and channel that this op waits for: indices below its own, ascending.
    is_final : bool
        True if the op completes a reduction: its destination then holds every contribution. For
        AVG, this op also divides. In a scan or exscan no op is final. In all other reductions, the
        data of each output chunk passes exactly one final op.
    is_proof : bool
        RECV only. True if the message cannot be sent before the peers of all SENDs in ``after``
        have received the messages of these SENDs. The arrival of the message then confirms these
        SENDs, so the landing place may be announced as soon as the transport no longer reads their
        memory. The checker verifies this.
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
        """Index of the chunk that the op works on."""
        return self.dst if self.src < 0 else self.src

    @property
    def memory(self) -> Space:
        """Space that the op writes; for a SEND, the space that it reads."""
        return self.src_space if self.dst < 0 else self.dst_space


class RankProgram(msgspec.Struct, frozen=True):
    """Ops of one rank in one collective: ``channels[c][i]`` is op ``i`` of channel ``c``.

    ``nranks``, ``nparts``, ``nchunks`` and ``weights`` are those of the `Schedule`.
    """

    rank: int
    nranks: int
    nparts: int
    nchunks: tuple[int, ...]
    weights: tuple[int, ...]
    channels: tuple[tuple[Op, ...], ...]


class Cost(msgspec.Struct, frozen=True):
    """Cost of a schedule, independent of any network.

    Parameters
    ----------
    steps : int
        Number of messages on the longest chain of dependent messages.
    sent, received : Fraction
        Largest amount of data that one rank sends, and receives, as a multiple of the buffer.
    ops : int
        Largest number of ops of one rank on one channel.
    """

    steps: int
    sent: Fraction
    received: Fraction
    ops: int


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Ops of a collective on all ranks, generated rank by rank.

    Parameters
    ----------
    name : str
        Name of the algorithm, for messages and reports. The planner also uses it to select the
        formula for the predicted time of a call.
    collective : str
        Name of the collective: a key of `CONDITIONS` or `ROOTED` in `r2ccl.schedule.conditions`.
    nranks : int
        Number of ranks of the communicator.
    nchunks : tuple of int
        Number of chunks of each channel; its length is the number of channels.
    cost : Cost
        Cost as the algorithm declares it; `r2ccl.schedule.cost.measure` counts it from the ops.
    generate : callable
        ``generate(rank)`` returns the ops of `rank`, one tuple per channel, in time proportional to
        their number. A pure function: equal arguments give equal ops.
    weights : tuple of int
        Relative share of each channel in the buffer, 0 or more and not all 0. Default: equal
        shares.
    root : int
        Rank that provides the data of a broadcast or scatter, or gets the result of a reduce or
        gather. Other collectives ignore it.

    Raises
    ------
    InvalidArgument
        If a field is not of its type, a value of `cost` is negative, `nranks` or a number of chunks
        is below 1, there is no channel, the number of weights is not the number of channels, a
        weight is negative, all weights are 0, or `root` is not a rank.
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
        # First, because the cost that an algorithm computes from such a number is wrong, too.
        if isinstance(self.nranks, int) and self.nranks < 1:
            raise InvalidArgument(f"schedule {self.name!r}: nranks={self.nranks}; give 1 or more")
        self._require_types()
        if min(self.nchunks, default=0) < 1:
            raise InvalidArgument(
                f"schedule {self.name!r}: nchunks={self.nchunks}; give one channel or more, with "
                "1 chunk or more each"
            )
        if not 0 <= self.root < self.nranks:
            raise InvalidArgument(
                f"schedule {self.name!r}: root={self.root}; allowed is 0 to {self.nranks - 1}"
            )
        if not self.weights:
            msgspec.structs.force_setattr(self, "weights", (1,) * self.nchannels)
        are_shares = min(self.weights) >= 0 and max(self.weights) > 0
        if len(self.weights) != self.nchannels or not are_shares:
            raise InvalidArgument(
                f"schedule {self.name!r}: weights={self.weights}; give {self.nchannels} weights, "
                "one per channel, each 0 or more and not all 0"
            )

    def _require_types(self) -> None:
        """Refuse fields of a wrong type, because caches use the schedule as a key."""
        for field, is_right, wanted in (
            ("name", isinstance(self.name, str), "a string"),
            ("collective", isinstance(self.collective, str), "a string"),
            ("nranks", isinstance(self.nranks, int), "an integer"),
            ("nchunks", _are_integers(self.nchunks), "a tuple of integers"),
            ("cost", _is_cost(self.cost), "a Cost of integers and fractions of 0 or more"),
            ("generate", callable(self.generate), "a function"),
            ("weights", _are_integers(self.weights), "a tuple of integers"),
            ("root", isinstance(self.root, int), "an integer"),
        ):
            if not is_right:
                raise InvalidArgument(
                    f"schedule {self.name!r}: {field} is {getattr(self, field)!r}; give {wanted}"
                )

    @property
    def nchannels(self) -> int:
        """Number of channels, equal on all ranks."""
        return len(self.nchunks)

    @property
    def nparts(self) -> int:
        """Number of parts of the buffer: `nranks` for collectives in `PARTED`, else 1.

        In a schedule that `check` accepts, the number of chunks of every channel is a multiple of
        this number.
        """
        return self.nranks if self.collective in PARTED else 1

    @property
    def can_be_in_place(self) -> bool:
        """True if INPUT and OUTPUT may be the same memory."""
        return self.collective not in APART

    def digest(self) -> int:
        """Generate the programs of all ranks and return a checksum (CRC-32) of them."""
        found = 0
        for rank in range(self.nranks):
            found = zlib.crc32(msgspec.msgpack.encode(self.program(rank)), found)
        return found

    def program(self, rank: int) -> RankProgram:
        """Generate the program of `rank`.

        Raises
        ------
        InvalidArgument
            If `rank` is not in ``range(nranks)``.
        ScheduleError
            If `generate` does not return a tuple or list of tuples or lists. The number of the
            inner sequences and their items are not checked.
        """
        if not 0 <= rank < self.nranks:
            raise InvalidArgument(
                f"schedule {self.name!r}: rank={rank}; allowed is 0 to {self.nranks - 1}"
            )
        channels = self.generate(rank)
        if not _is_sequence(channels) or not all(map(_is_sequence, channels)):
            raise ScheduleError(
                f"generate({rank}) did not return a tuple with a tuple of ops for each channel: "
                "correct it",
                rank=rank,
            )
        return RankProgram(rank, self.nranks, self.nparts, self.nchunks, self.weights, channels)


def _are_integers(values: object) -> bool:
    return isinstance(values, tuple) and all(isinstance(each, int) for each in values)


def _is_cost(cost: object) -> bool:
    if not isinstance(cost, Cost):
        return False
    counts, shares = (cost.steps, cost.ops), (cost.sent, cost.received)
    return all(isinstance(each, int) and each >= 0 for each in counts) and all(
        isinstance(each, int | Fraction) and each >= 0 for each in shares
    )


def _is_sequence(values: object) -> bool:
    return isinstance(values, tuple | list)  # a list works too, although a tuple is declared


__all__ = ["APART", "PARTED", "Cost", "Op", "OpKind", "RankProgram", "Schedule", "Space"]

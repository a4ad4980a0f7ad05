"""Symbolic replay of a schedule: contributions in every location, and their order of reduction.

The replay runs the ops in one possible order. `r2ccl.schedule.hazards` has already verified that
all possible orders give the same result.

A location holds an *expression*: a contribution, or the reduction of a left and a right operand,
which are expressions themselves. Equal expressions have equal numbers. Outputs with equal numbers
are therefore bit-identical for every reduction function, which is stronger than equal sets of
contributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from r2ccl.errors import ScheduleError
from r2ccl.schedule.arrays import ScheduleArrays
from r2ccl.schedule.conditions import Conditions
from r2ccl.schedule.events import Events, error_at, replay_order
from r2ccl.schedule.graph import Ints
from r2ccl.schedule.ir import OpKind, Schedule, Space


class HeldChunk(NamedTuple):
    """Symbolic content of a chunk or of a message.

    ``expression`` is the number of the expression, and ``contributions`` is the bit set of the
    ranks whose data is in the expression. ``is_final`` is True if an op with `Op.is_final`, which
    divides for AVG, has completed the data.
    """

    expression: int
    contributions: int
    is_final: bool


#: A rank and one of its spaces; in place, OUTPUT also stands for INPUT.
Place = tuple[int, int]


def replay(
    schedule: Schedule,
    conditions: Sequence[Conditions],
    arrays: ScheduleArrays,
    other: Ints,
    events: Events,
) -> None:
    """Verify that the ops lead from the initial to the wanted contributions on every channel.

    `conditions` has one entry per channel. `other` is the result of `match`, and `events` is the
    result of `build_events`.

    Raises
    ------
    ScheduleError
        If an op reads memory that holds no data, or reduces a complete chunk; if a contribution
        is missing, is added twice, or does not belong in an output; if an `is_final` is wrong; if
        ranks reduce in different orders, or not in rank order although the collective requires it.
    """
    order, _ = replay_order(arrays, events)
    firsts = list(accumulate(schedule.nchunks, initial=0))
    lane_of = np.array(firsts)[arrays.ops["channel"]] + arrays.chunks()
    cuts = np.searchsorted(lane_of[order], np.arange(firsts[-1] + 1))
    for channel, nchunks in enumerate(schedule.nchunks):
        for chunk, number in enumerate(range(firsts[channel], firsts[channel] + nchunks)):
            members = order[cuts[number] : cuts[number + 1]]
            for in_place in (False, True)[: 1 + schedule.can_be_in_place]:
                lane = _Lane(
                    schedule.nranks, conditions[channel], arrays, channel, chunk, in_place=in_place
                )
                lane.run(members, other)


class _Lane:
    """Replay of one chunk of one channel on all ranks, in place or out of place."""

    def __init__(
        self,
        nranks: int,
        conditions: Conditions,
        arrays: ScheduleArrays,
        channel: int,
        chunk: int,
        *,
        in_place: bool,
    ) -> None:
        self._nranks = nranks
        self._conditions = conditions
        self._arrays = arrays
        self._channel, self._chunk = channel, chunk
        self._mode = "in place" if in_place else "out of place"
        self._every = (1 << nranks) - 1
        self._input = Space.OUTPUT if in_place else Space.INPUT
        self._memory: dict[Place, HeldChunk] = {}
        # Number of each expression, by its two operands; a contribution has the key (bits, -1).
        self._expressions: dict[tuple[int, int], int] = {}
        for rank in range(nranks):
            initial = conditions.initial(rank, chunk)
            if initial:
                leaf = self._expressions.setdefault((initial, -1), len(self._expressions))
                self._memory[rank, self._input] = HeldChunk(leaf, initial, False)

    def run(self, members: Ints, other: Ints) -> None:
        """Replay the ops in `members`, then compare the outputs with the wanted contributions.

        `members` are indices into ``arrays.ops``, in order of execution. `other` is the result of
        `match`.
        """
        messages: dict[int, HeldChunk] = {}
        rows = self._arrays.ops[members]
        columns = ("rank", "kind", "peer", "src_space", "dst_space", "final")
        fields = zip(*(rows[name].tolist() for name in columns), strict=True)
        pairs = zip(members.tolist(), other[members].tolist(), strict=True)
        for (op, partner), (rank, kind, peer, src_space, dst_space, final) in zip(
            pairs, fields, strict=True
        ):
            source = (rank, src_space or self._input)
            if kind == OpKind.SEND:
                messages[op] = self._read(op, source)
                continue
            if kind == OpKind.RECV:
                held = messages.pop(partner)
            elif kind == OpKind.COPY:
                held = self._read(op, source)
            elif kind == OpKind.REDUCE:
                held = self._reduce(op, self._read(op, (rank, dst_space)), self._read(op, source))
            else:
                sides = (self._read(op, source), messages.pop(partner))
                held = self._reduce(op, *(sides if peer > rank else sides[::-1]))
            self._memory[rank, dst_space] = self._mark(op, held, final)
        self._compare()

    def _read(self, op: int, place: Place) -> HeldChunk:
        held = self._memory.get(place)
        if held is None:
            raise error_at(
                self._arrays,
                op,
                f"reads {Space(place[1]).name}, which holds no data at that time ({self._mode}); "
                "read another space, or wait for the op that writes the chunk",
            )
        return held

    def _reduce(self, op: int, left: HeldChunk, right: HeldChunk) -> HeldChunk:
        if left.is_final or right.is_final:
            raise error_at(
                self._arrays, op, f"reduces a chunk that is already complete ({self._mode})"
            )
        twice = left.contributions & right.contributions
        if twice:
            raise error_at(
                self._arrays, op, f"adds rank {_lowest(twice)}'s data twice ({self._mode})"
            )
        gap = _lowest(right.contributions) - left.contributions.bit_length()
        if self._conditions.is_ordered and gap:
            raise error_at(
                self._arrays,
                op,
                "the ranks of the right operand do not directly follow the ranks of the left "
                f"operand, but the reduction must be in rank order ({self._mode})",
            )
        pair = (left.expression, right.expression)
        number = self._expressions.setdefault(pair, len(self._expressions))
        return HeldChunk(number, left.contributions | right.contributions, False)

    def _mark(self, op: int, held: HeldChunk, final: bool) -> HeldChunk:
        is_due = (
            self._conditions.is_reduction
            and held.contributions == self._every
            and not held.is_final
        )
        if final and not is_due:
            why = (
                "an earlier op with is_final has completed the data"
                if held.is_final
                else "the chunk is not complete, or the collective has no final op"
            )
            raise error_at(self._arrays, op, f"is_final is wrong here: {why} ({self._mode})")
        if is_due and not final:
            raise error_at(
                self._arrays, op, f"completes the reduction without is_final ({self._mode})"
            )
        return held._replace(is_final=held.is_final or final)

    def _compare(self) -> None:
        expressions: dict[int, int] = {}
        for rank in range(self._nranks):
            wanted = self._conditions.wanted(rank, self._chunk)
            if wanted is None:
                continue
            held = self._memory.get((rank, Space.OUTPUT))
            if held is None:
                raise self._wrong(rank, "no op has written it")
            if held.contributions != wanted:
                raise self._wrong(rank, _difference(held.contributions, wanted))
            if self._conditions.is_reduction and not held.is_final:
                raise self._wrong(rank, "no op with is_final has written it, so AVG never divides")
            if expressions.setdefault(wanted, held.expression) != held.expression:
                raise self._wrong(rank, "it was reduced in another order than on a lower rank")

    def _wrong(self, rank: int, what: str) -> ScheduleError:
        return ScheduleError(
            f"output chunk {self._chunk} is wrong at the end ({self._mode}): {what}",
            rank=rank,
            channel=self._channel,
        )


def _lowest(ranks: int) -> int:
    return (ranks & -ranks).bit_length() - 1


def _difference(held: int, wanted: int) -> str:
    if wanted & ~held:
        return f"rank {_lowest(wanted & ~held)}'s data is missing"
    return f"rank {_lowest(held & ~wanted)}'s data does not belong there"


__all__ = ["replay"]

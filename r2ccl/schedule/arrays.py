"""The global form of a schedule: all ops of all ranks as NumPy arrays.

Imports the IR and NumPy. Invariant: ops lie in the order (rank, channel, index), so the ops of
one program are one run, and nothing is dropped or repaired: what a malformed schedule says is
what the arrays hold.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from r2ccl.errors import ScheduleError
from r2ccl.schedule.ir import Op, Schedule

#: One row an op. Signed and wider than valid values need, so that a wrong one is still shown.
OP_DTYPE = np.dtype(
    [
        ("rank", np.int32),
        ("channel", np.int32),
        ("index", np.int32),
        ("kind", np.int16),
        ("peer", np.int32),
        ("src_space", np.int16),
        ("src", np.int32),
        ("dst_space", np.int16),
        ("dst", np.int32),
        ("final", np.bool_),
        ("proof", np.bool_),
    ]
)


class ScheduleArrays(NamedTuple):
    """All ops of a schedule.

    Parameters
    ----------
    ops : ndarray of OP_DTYPE, shape (nops,)
        Ordered by rank, channel, index.
    offsets : ndarray of int64, shape (nops + 1,)
        Op ``i`` waits for ``after[offsets[i]:offsets[i + 1]]``.
    after : ndarray of int32
        Indices within the op's own program, as in `Op.after`.
    """

    ops: npt.NDArray[np.void]
    offsets: npt.NDArray[np.int64]
    after: npt.NDArray[np.int32]

    def waits(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Pair every op that waits with the one it waits for, both as indices into ``ops``."""
        waiting = np.repeat(np.arange(self.ops.size), np.diff(self.offsets))
        return waiting, waiting - self.ops["index"][waiting] + self.after

    def chunks(self) -> npt.NDArray[np.int32]:
        """Chunk index each op works on, as `Op.chunk`."""
        return np.where(self.ops["src"] < 0, self.ops["dst"], self.ops["src"])


class _Block(NamedTuple):
    """The ops of one rank's channel; ``channel`` and ``rank`` are filled in where it is used."""

    ops: npt.NDArray[np.void]
    counts: npt.NDArray[np.int64]
    after: npt.NDArray[np.int32]


def as_arrays(schedule: Schedule) -> ScheduleArrays:
    """Lay out every op of `schedule`, generating one rank's program at a time.

    Raises
    ------
    ScheduleError
        A rank's program has another number of channels, or a field that is no 32-bit integer.

    Notes
    -----
    *Cost*: 32 bytes an op, 8 for its offset and 4 for each index in ``after``.
    """
    blocks: list[_Block] = []
    for rank in range(schedule.nranks):
        channels = schedule.program(rank).channels
        if len(channels) != schedule.nchannels:
            raise ScheduleError(
                f"{len(channels)} channels instead of {schedule.nchannels}; "
                "generate as many as the schedule announces",
                rank=rank,
            )
        shared: dict[int, _Block] = {}  # channels of one shape share a tuple: pack it once
        for channel, ops in enumerate(channels):
            packed = shared.get(id(ops))
            if packed is None:
                packed = shared[id(ops)] = _pack(ops, rank, channel)
            rows = packed.ops.copy()
            rows["rank"] = rank
            rows["channel"] = channel
            blocks.append(packed._replace(ops=rows))
    counts = np.concatenate([block.counts for block in blocks])
    return ScheduleArrays(
        np.concatenate([block.ops for block in blocks]),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        np.concatenate([block.after for block in blocks]),
    )


def _pack(ops: tuple[Op, ...], rank: int, channel: int) -> _Block:
    try:
        return _pack_all(ops)
    except (TypeError, OverflowError):
        for i, op in enumerate(ops):  # find the one to name
            _pack_alone(op, rank, channel, i)
        raise


def _pack_all(ops: tuple[Op, ...]) -> _Block:
    rows = [_row(i, op) for i, op in enumerate(ops)]
    after = [i for op in ops for i in op.after]
    for kind in {type(value) for value in chain(after, *rows)}:
        if not issubclass(kind, int):  # NumPy would round a float without a word
            raise TypeError(f"{kind.__name__} instead of int")
    counts = np.fromiter((len(op.after) for op in ops), np.int64, len(ops))
    return _Block(np.array(rows, OP_DTYPE), counts, np.array(after, np.int32))


def _pack_alone(op: Op, rank: int, channel: int, index: int) -> None:
    try:
        _pack_all((op,))
    except (TypeError, OverflowError) as exc:
        raise ScheduleError(
            f"{op!r} has a field of the wrong type or size ({exc}); every field is a small integer",
            rank=rank,
            channel=channel,
            op=index,
        ) from exc


def _row(index: int, op: Op) -> tuple[int, ...]:
    return (
        0, 0, index, op.kind, op.peer, op.src_space, op.src, op.dst_space, op.dst, op.is_final,
        op.is_proof,
    )  # fmt: skip


__all__ = ["OP_DTYPE", "ScheduleArrays", "as_arrays"]

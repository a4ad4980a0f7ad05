"""Array form of a schedule: all ops of all ranks as NumPy arrays.

The conversion neither drops nor corrects anything: the arrays of a malformed schedule are malformed
in the same way.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from r2ccl.errors import ScheduleError
from r2ccl.schedule.ir import Op, Schedule

#: One record per op. Fields are signed and wider than needed, so that error messages can show
#: invalid values.
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
    """All ops of a schedule and their dependencies.

    Parameters
    ----------
    ops : ndarray of OP_DTYPE, shape (nops,)
        The ops of one rank and channel are contiguous and in program order. `as_arrays` orders
        them by rank, then channel.
    offsets : ndarray of int64, shape (nops + 1,)
        Op ``i`` waits for the ops ``after[offsets[i]:offsets[i + 1]]``.
    after : ndarray of int32
        Indices within the ops of the same rank and channel, as in `Op.after`.
    """

    ops: npt.NDArray[np.void]
    offsets: npt.NDArray[np.int64]
    after: npt.NDArray[np.int32]

    def waits(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return all dependencies as two arrays of indices: the waiting ops and the awaited ops.

        Both are indices into ``ops``. The waiting op ``[0][i]`` waits for the op ``[1][i]``.
        """
        waiting = np.repeat(np.arange(self.ops.size), np.diff(self.offsets))
        return waiting, waiting - self.ops["index"][waiting] + self.after

    def chunks(self) -> npt.NDArray[np.int32]:
        """Return the chunk index of each op, as `Op.chunk` does for one op."""
        return np.where(self.ops["src"] < 0, self.ops["dst"], self.ops["src"])


class _Block(NamedTuple):
    """Ops of one rank and channel in array form.

    In the records of ``ops``, `_pack` leaves ``rank`` and ``channel`` 0; `as_arrays` sets them in a
    copy.
    """

    ops: npt.NDArray[np.void]
    counts: npt.NDArray[np.int64]
    after: npt.NDArray[np.int32]


def as_arrays(schedule: Schedule) -> ScheduleArrays:
    """Return the array form of `schedule`, generating the program of one rank at a time.

    Raises
    ------
    ScheduleError
        If `Schedule.program` refuses a rank's program; if the program and the schedule have
        different numbers of channels; if an op is not an `Op`; or if a field of an op is not an
        integer, or does not fit its type in `OP_DTYPE`.

    Notes
    -----
    *Cost*: the arrays take 40 bytes per op and 4 bytes for each index in its ``after``.
    """
    blocks: list[_Block] = []
    for rank in range(schedule.nranks):
        channels = schedule.program(rank).channels
        if len(channels) != schedule.nchannels:
            raise ScheduleError(
                f"{len(channels)} channels instead of {schedule.nchannels}; "
                "generate one tuple of ops per channel",
                rank=rank,
            )
        shared: dict[int, _Block] = {}  # channels may share one tuple of ops: convert it once
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
    except (AttributeError, TypeError, OverflowError):
        for i, op in enumerate(ops):  # find the op to report
            _pack_alone(op, rank, channel, i)
        raise


def _pack_all(ops: tuple[Op, ...]) -> _Block:
    rows = [_row(i, op) for i, op in enumerate(ops)]
    after = [i for op in ops for i in op.after]
    for kind in {type(value) for value in chain(after, *rows)}:
        if not issubclass(kind, int):  # NumPy would round a float silently
            raise TypeError(f"{kind.__name__} instead of int")
    counts = np.fromiter((len(op.after) for op in ops), np.int64, len(ops))
    return _Block(np.array(rows, OP_DTYPE), counts, np.array(after, np.int32))


def _pack_alone(op: Op, rank: int, channel: int, index: int) -> None:
    try:
        _pack_all((op,))
    except (AttributeError, TypeError, OverflowError) as exc:
        raise ScheduleError(
            f"{op!r} is not an Op, or has a field of the wrong type or size ({exc}): pass "
            "integers that fit into 32 bits (16 bits for kinds and spaces)",
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

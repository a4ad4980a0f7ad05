"""Cost of a schedule, counted from its ops: steps, bytes on the wire, number of ops.

The counts are exact and involve no model of a network. Tests compare them with the costs that the
algorithms declare.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from r2ccl.schedule.arrays import as_arrays
from r2ccl.schedule.check import check_fields
from r2ccl.schedule.chunks import layout
from r2ccl.schedule.events import build_events, match
from r2ccl.schedule.ir import Cost, OpKind, Schedule


def measure(schedule: Schedule) -> Cost:
    """Return the cost of `schedule`, counted from the ops of all ranks.

    Raises
    ------
    ScheduleError
        If the number of channels or a field is wrong, the sends and receives do not match, or the
        ops deadlock.
    """
    arrays = as_arrays(schedule)
    check_fields(schedule, arrays)
    events = build_events(arrays, match(arrays))
    ops = arrays.ops
    is_send = ops["kind"] == OpKind.SEND
    is_receive = (ops["kind"] == OpKind.RECV) | (ops["kind"] == OpKind.RECV_REDUCE)
    return Cost(
        events.steps,
        _busiest(schedule, ops[is_send]),
        _busiest(schedule, ops[is_receive]),
        int(ops["index"].max(initial=-1)) + 1,
    )


def _busiest(schedule: Schedule, ops: npt.NDArray[np.void]) -> Fraction:
    """Return the largest amount of data that one rank's `ops` move, as a multiple of the buffer."""
    place = ops["rank"].astype(np.int64) * schedule.nchannels + ops["channel"]
    counts = np.bincount(place, minlength=schedule.nranks * schedule.nchannels)
    total = sum(schedule.weights)
    shares = [
        Fraction(weight, total * nchunks)
        for weight, nchunks in zip(schedule.weights, schedule.nchunks, strict=True)
    ]
    return max(
        sum((int(n) * share for n, share in zip(row, shares, strict=True)), Fraction(0))
        for row in counts.reshape(schedule.nranks, schedule.nchannels)
    )


def wire_nbytes(
    schedule: Schedule, count: int, itemsize: int, weights: Sequence[int] | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the number of bytes that each rank sends and receives.

    Parameters
    ----------
    schedule : Schedule
        A schedule that `check` accepts.
    count, itemsize : int
        Number of elements of the buffer, and bytes of an element.
    weights : sequence of int, optional
        Share of each channel. Default: the weights of the schedule.

    Returns
    -------
    sent, received : ndarray of int64, shape (nranks,)
        Payload bytes, without headers and replays.

    Raises
    ------
    InvalidArgument
        If `count` is negative or not a multiple of the schedule's `nparts`, `itemsize` is below 1,
        the number of weights is not the number of channels, a weight is negative, or all weights
        are 0.
    """
    arrays = as_arrays(schedule)
    chunks = layout(count, schedule.nchunks, weights or schedule.weights, itemsize, schedule.nparts)
    sizes = np.array([hi - lo for pieces in chunks for lo, hi in pieces], np.int64)
    firsts = np.array(list(accumulate(schedule.nchunks, initial=0)))
    nbytes = sizes[firsts[arrays.ops["channel"]] + arrays.chunks()] * itemsize
    kind = arrays.ops["kind"]
    totals = []
    for kinds in ((OpKind.SEND,), (OpKind.RECV, OpKind.RECV_REDUCE)):
        total = np.zeros(schedule.nranks, np.int64)
        chosen = np.isin(kind, kinds)
        np.add.at(total, arrays.ops["rank"][chosen], nbytes[chosen])
        totals.append(total)
    return totals[0], totals[1]


__all__ = ["measure", "wire_nbytes"]

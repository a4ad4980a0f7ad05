"""Access of compiled code to the tables of a call, and to its log; see `layout`."""

from __future__ import annotations

from typing import Any

from r2ccl.kernels.compiling import inlined
from r2ccl.runtime.compiled.layout import (
    CONN_NWORDS,
    CONNS,
    CUTS,
    EVENT_NS,
    EVENT_NWORDS,
    ITEMSIZE,
    LOG,
    NLOGGED,
    PAIR_NWORDS,
    PAIRS,
    PASS_NS,
    STEP_NWORDS,
    STEPS,
    TIME,
)
from r2ccl.shm.atomics import clock_ns, words_at


@inlined
def pair_of(state: Any, number: Any) -> Any:
    """Return a pointer to the words of a pair."""
    return words_at(state[PAIRS] + 8 * PAIR_NWORDS * number)


@inlined
def conn_of(state: Any, number: Any) -> Any:
    """Return a pointer to the words of a connection."""
    return words_at(state[CONNS] + 8 * CONN_NWORDS * number)


@inlined
def step_of(state: Any, number: Any) -> Any:
    """Return a pointer to the words of a step."""
    return words_at(state[STEPS] + 8 * STEP_NWORDS * number)


@inlined
def first_of(state: Any, step: Any, k: Any) -> Any:
    """Return the offset in bytes of slice `k` of a step, without the step's `SHIFT`."""
    return words_at(step[CUTS])[k] * state[ITEMSIZE]


@inlined
def size_of(state: Any, step: Any, k: Any) -> Any:
    """Return the size of slice `k` of a step in bytes."""
    cuts = words_at(step[CUTS])
    return (cuts[k + 1] - cuts[k]) * state[ITEMSIZE]


@inlined
def now_ns(state: Any) -> Any:
    """Return the monotonic time in nanoseconds."""
    return clock_ns(state[TIME])


@inlined
def log_event(
    state: Any, kind: Any, conn: Any, channel: Any, seq: Any, ack: Any, nbytes: Any, pair: Any
) -> None:
    """Add an event to the log; the caller ensures that there is room."""
    row = words_at(state[LOG] + 8 * EVENT_NWORDS * state[NLOGGED])
    row[0] = kind
    row[1] = conn
    row[2] = channel
    row[3] = seq
    row[4] = ack
    row[5] = nbytes
    row[6] = pair
    state[NLOGGED] += 1


@inlined
def log_time(state: Any, kind: Any, conn: Any, nbytes: Any) -> None:
    """Log that a cleared slice was posted or released (`kind`), with the time of this pass."""
    row = words_at(state[LOG] + 8 * EVENT_NWORDS * state[NLOGGED])
    log_event(state, kind, conn, 0, 0, 0, nbytes, 0)
    row[EVENT_NS] = state[PASS_NS]


__all__ = [
    "conn_of",
    "first_of",
    "log_event",
    "log_time",
    "now_ns",
    "pair_of",
    "size_of",
    "step_of",
]

"""Refuse a schedule that is not right, before any byte moves.

Imports the rest of this package. Invariant: a schedule that `check` accepts computes its collective
in place and out of place, for any slice size, on an executor that keeps to what `ir` says and
has at least room for one slice a link; nothing else about the executor is assumed.

In order: every field makes sense; sends and receives meet; nobody waits for ever; memory is
read after it is written and overwritten after it is released, by what the ops wait for and not by
luck; every contribution arrives exactly once, and is marked complete exactly where it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl.schedule.arrays import ScheduleArrays, as_arrays
from r2ccl.schedule.conditions import conditions_of
from r2ccl.schedule.events import build_events, check_slices, error_at, match
from r2ccl.schedule.graph import Bools, Ints
from r2ccl.schedule.hazards import check_hazards
from r2ccl.schedule.ir import OpKind, Schedule, Space
from r2ccl.schedule.replay import replay

AnyInts = npt.NDArray[np.signedinteger[Any]]


def check(schedule: Schedule) -> None:
    """Replay `schedule` symbolically and refuse it if anything is wrong.

    Raises
    ------
    ScheduleError
        Names rank, channel, op and chunk of the first thing that is wrong.

    Notes
    -----
    *Cost*: one pass over the ops of all ranks, and a sort, for schedules whose ops name what they
    must wait for themselves; an order that only a chain of messages proves is searched for.
    """
    conditions = conditions_of(schedule)
    arrays = as_arrays(schedule)
    check_fields(schedule, arrays)
    other = match(arrays)
    events = build_events(arrays, other)
    check_slices(arrays, events)
    check_hazards(arrays, other, events)
    replay(schedule, conditions, arrays, other, events)


def check_fields(schedule: Schedule, arrays: ScheduleArrays) -> None:
    """Refuse ops whose fields contradict their kind or the schedule's sizes.

    Raises
    ------
    ScheduleError
        Names the first such op.
    """
    ops = arrays.ops
    kind, peer, src, dst = ops["kind"], ops["peer"], ops["src"], ops["dst"]
    reads, writes = kind != OpKind.RECV, kind != OpKind.SEND
    is_local = (kind == OpKind.COPY) | (kind == OpKind.REDUCE)
    # A channel that is none has been refused when the arrays were made.
    nchunks = np.array(schedule.nchunks)[ops["channel"]]
    owner = np.repeat(np.arange(ops.size), np.diff(arrays.offsets))
    repeats = np.zeros(owner.size, np.bool_)
    repeats[1:] = (owner[1:] == owner[:-1]) & (arrays.after[1:] <= arrays.after[:-1])
    rules: list[tuple[Bools, str]] = [
        (_outside(kind, len(OpKind)), f"kind must be 0 to {len(OpKind) - 1}"),
        (is_local & (peer != -1), "a local op has peer -1"),
        (~is_local & _outside(peer, schedule.nranks), f"peer must be below {schedule.nranks}"),
        (~is_local & (peer == ops["rank"]), "peer must be another rank"),
        (reads & _outside(src, nchunks), "src must be below the channel's number of chunks"),
        (writes & _outside(dst, nchunks), "dst must be below the channel's number of chunks"),
        (~reads & (src != -1), "RECV reads no chunk: src must be -1"),
        (~writes & (dst != -1), "SEND writes no chunk: dst must be -1"),
        (reads & writes & (src != dst), "src and dst must be one index: chunks differ in size"),
        (_outside(ops["src_space"], len(Space)), "src_space must be a Space"),
        (_outside(ops["dst_space"], len(Space)), "dst_space must be a Space"),
        (writes & (ops["dst_space"] == Space.INPUT), "INPUT is the caller's: write to OUTPUT"),
        (~writes & ops["final"], "a SEND writes nothing that could be final"),
        (ops["proof"] & (ops["kind"] != OpKind.RECV), "only a RECV can be a proof"),
        (
            _any(owner, _outside(arrays.after, ops["index"][owner]), ops.size),
            "after must name earlier ops of the same program",
        ),
        (_any(owner, repeats, ops.size), "after must ascend, without repeats"),
    ]
    first = min(rules, key=lambda rule: int(rule[0].argmax()) if rule[0].any() else ops.size)
    if first[0].any():
        at = int(first[0].argmax())
        raise error_at(arrays, at, f"{first[1]}; got {_shown(arrays, at)}")


def _outside(values: AnyInts, limit: int | AnyInts) -> Bools:
    return np.asarray((values < 0) | (values >= limit))


def _any(owner: Ints, bad: Bools, nops: int) -> Bools:
    flags = np.zeros(nops, np.bool_)
    flags[owner[bad]] = True
    return flags


def _shown(arrays: ScheduleArrays, op: int) -> str:
    row = arrays.ops[op]
    names = ("kind", "peer", "src_space", "src", "dst_space", "dst", "final")
    fields = ", ".join(f"{name}={row[name]}" for name in names)
    waits = arrays.after[arrays.offsets[op] : arrays.offsets[op + 1]].tolist()
    return f"{fields}, after={tuple(waits)}"


__all__ = ["check", "check_fields"]

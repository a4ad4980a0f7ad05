"""Checker of schedules: rejects an incorrect schedule before any byte moves.

A schedule that `check` accepts computes its collective in place and out of place, for any slice
size. The executor must follow the rules of `r2ccl.schedule.ir` and have room for at least one
unreduced slice per link. Collectives in `r2ccl.schedule.ir.APART` are computed out of place only.

The checks, in this order:

1. Every field is valid.
2. Every send has a matching receive, and every receive a matching send.
3. There is no deadlock.
4. The dependencies of the ops guarantee, independent of timing, that memory is read only after it
   is written, and overwritten only after it is released.
5. Every contribution arrives exactly once. Outputs with the same contributions are reduced in the
   same order on all ranks, and in rank order if the collective requires it. `Op.is_final` is set
   exactly on the ops that complete a reduction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl.errors import ScheduleError
from r2ccl.schedule.arrays import ScheduleArrays, as_arrays
from r2ccl.schedule.conditions import conditions_of
from r2ccl.schedule.events import build_events, check_slices, error_at, match
from r2ccl.schedule.graph import Bools, Ints
from r2ccl.schedule.hazards import check_hazards
from r2ccl.schedule.interpret import interpret
from r2ccl.schedule.ir import OpKind, Schedule, Space
from r2ccl.schedule.replay import replay

AnyInts = npt.NDArray[np.signedinteger[Any]]


def check(schedule: Schedule) -> None:
    """Verify that `schedule` computes its collective, by symbolic replay.

    Raises
    ------
    ScheduleError
        If the schedule is wrong. The error describes the first mistake found and names the rank,
        channel, op and chunk if the mistake has them. For example, an output that is wrong at the
        end has no op, and an unknown collective has no rank.
    InvalidArgument
        If the collective needs the same number of chunks for each rank, and the number of chunks of
        a channel is not a multiple of `nranks`.

    Notes
    -----
    *Cost*: several passes over the ops of all ranks, several sorts, and a graph search for each
    pair of conflicting ops whose order does not follow directly from ``after``.
    """
    conditions = conditions_of(schedule)
    arrays = as_arrays(schedule)
    check_fields(schedule, arrays)
    other = match(arrays)
    events = build_events(arrays, other)
    check_slices(arrays, events)
    check_hazards(arrays, other, events, can_be_in_place=schedule.can_be_in_place)
    replay(schedule, conditions, arrays, other, events)


def check_order(schedule: Schedule) -> None:
    """Verify that `schedule`, a correct reduction, combines the data of the ranks in rank order.

    Raises
    ------
    ScheduleError
        If the data of a chunk is combined in another order; the message names the rank that has the
        result.

    Notes
    -----
    *Cost*: one interpretation of the schedule, with one element per chunk.
    """
    count = sum(schedule.nchunks)
    inputs = [np.empty(count, object) for _ in range(schedule.nranks)]
    for rank, data in enumerate(inputs):
        data[:] = [(rank,)] * count
    outputs = interpret(schedule, inputs, np.add, weights=schedule.nchunks)
    everyone = tuple(range(schedule.nranks))
    ranks = [schedule.root] if schedule.collective == "reduce" else range(schedule.nranks)
    for rank in ranks:
        expected = everyone[: {"scan": rank + 1, "exscan": rank}.get(schedule.collective)]
        part = count // schedule.nparts
        own = slice(rank * part, (rank + 1) * part) if schedule.nparts > 1 else slice(None)
        if not expected:  # rank 0 of an exscan
            continue
        for found in outputs[rank][own]:
            if found != expected:
                raise ScheduleError(
                    f"{schedule.name} combines the data of ranks {found} in this order: a "
                    "non-commutative operation needs rank order; pass a schedule that keeps it",
                    rank=rank,
                )


def check_fields(schedule: Schedule, arrays: ScheduleArrays) -> None:
    """Verify that the fields of every op agree with its kind and with the schedule's sizes.

    Raises
    ------
    ScheduleError
        If the fields of an op are wrong; the message names the first such op.
    """
    ops = arrays.ops
    kind, peer, src, dst = ops["kind"], ops["peer"], ops["src"], ops["dst"]
    reads, writes = kind != OpKind.RECV, kind != OpKind.SEND
    is_local = (kind == OpKind.COPY) | (kind == OpKind.REDUCE)
    # `as_arrays` has verified the number of channels, so every channel number is valid.
    nchunks = np.array(schedule.nchunks)[ops["channel"]]
    owner = np.repeat(np.arange(ops.size), np.diff(arrays.offsets))
    repeats = np.zeros(owner.size, np.bool_)
    repeats[1:] = (owner[1:] == owner[:-1]) & (arrays.after[1:] <= arrays.after[:-1])
    rules: list[tuple[Bools, str]] = [
        (_outside(kind, len(OpKind)), f"kind must be 0 to {len(OpKind) - 1}"),
        (is_local & (peer != -1), "peer of a COPY or REDUCE must be -1"),
        (
            ~is_local & _outside(peer, schedule.nranks),
            f"peer must be a rank below {schedule.nranks}",
        ),
        (~is_local & (peer == ops["rank"]), "peer must be another rank"),
        (reads & _outside(src, nchunks), "src must be a chunk of the channel"),
        (writes & _outside(dst, nchunks), "dst must be a chunk of the channel"),
        (~reads & (src != -1), "RECV reads no chunk: src must be -1"),
        (~writes & (dst != -1), "SEND writes no chunk: dst must be -1"),
        (reads & writes & (src != dst), "src and dst must be equal: chunks may differ in size"),
        (_outside(ops["src_space"], len(Space)), "src_space must be a Space"),
        (_outside(ops["dst_space"], len(Space)), "dst_space must be a Space"),
        (writes & (ops["dst_space"] == Space.INPUT), "INPUT is read-only: write to OUTPUT"),
        (~writes & ops["final"], "a SEND writes nothing, so is_final must be False"),
        (ops["proof"] & (ops["kind"] != OpKind.RECV), "only a RECV can have is_proof"),
        (
            _any(owner, _outside(arrays.after, ops["index"][owner]), ops.size),
            "after must name earlier ops of the same rank and channel",
        ),
        (_any(owner, repeats, ops.size), "after must be strictly ascending"),
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
    names = ("kind", "peer", "src_space", "src", "dst_space", "dst")
    fields = ", ".join(f"{name}={row[name]}" for name in names)
    waits = arrays.after[arrays.offsets[op] : arrays.offsets[op + 1]].tolist()
    flags = f"is_final={row['final']}, is_proof={row['proof']}"
    return f"{fields}, after={tuple(waits)}, {flags}"


__all__ = ["check", "check_fields", "check_order"]

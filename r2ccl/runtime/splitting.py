"""Agreement of the ranks of a communicator on the communicators to make from it.

`split`, `dup`, `create` and `create_among` do the first part of the methods of `Communicator` with
these names: the ranks agree on the new communicators, and the functions return their descriptions.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from r2ccl.clock import monotonic
from r2ccl.errors import InvalidArgument, TransportTimeout
from r2ccl.runtime.arguments import integer_of, rank_of
from r2ccl.runtime.contexts import NO_OFFER, Context, is_offer
from r2ccl.runtime.engine import Engine
from r2ccl.runtime.participant import Participant
from r2ccl.types import AllgatherBytes

#: Wire format of an `_Entry`, without the offer.
_ENTRY = struct.Struct("<BBqq")
_INT64 = range(-(1 << 63), 1 << 63)
#: Maximum pause in seconds before another attempt, while another thread makes a communicator.
_PAUSE_S = 0.002


class _Entry(NamedTuple):
    """Arguments and state of one rank in the agreement, sent to all other ranks.

    Attributes
    ----------
    takes_part : int
        1 if the rank gets a communicator, else 0.
    is_late : int
        1 if the rank has timed out, else 0.
    color, key : int
        As in `agree`; ``color`` is 0 if the rank gets no communicator.
    offer : bytes
        `Contexts.offer` of the rank, or `NO_OFFER`.
    """

    takes_part: int
    is_late: int
    color: int
    key: int
    offer: bytes

    def packed(self) -> bytes:
        """Return the entry as bytes, which `_entry_of` reads."""
        return _ENTRY.pack(*self[:-1]) + self.offer


class Part(NamedTuple):
    """Communicator that the ranks have agreed to make.

    Attributes
    ----------
    context : Context
    members : tuple of int
        ``members[i]`` is the rank in the parent communicator of rank i of the new communicator.
    """

    context: Context
    members: tuple[int, ...]


def split(participant: Participant, color: int | None, key: int) -> Part | None:
    """Agree on one communicator per color; return that of `color`, or None if `color` is None.

    Arguments and errors are those of `Communicator.split`.
    """
    collectives, engine = participant.collectives, participant.engine
    collectives.require_free()
    return agree(engine, collectives.allgather_bytes, color, key, engine.config.timeout_s)


def dup(participant: Participant) -> Part:
    """Agree on a communicator of the same ranks; return its description."""
    part = split(participant, 0, participant.engine.rank)
    assert part is not None
    return part


def create(participant: Participant, ranks: Sequence[int]) -> Part | None:
    """Agree on a communicator of `ranks`; return its description, or None on all other ranks."""
    chosen = _different(ranks, participant.engine.nranks)
    own = participant.engine.rank
    return (
        split(participant, 0, chosen.index(own)) if own in chosen else split(participant, None, 0)
    )


def create_among(participant: Participant, ranks: Sequence[int], allgather: AllgatherBytes) -> Part:
    """Agree on a communicator of `ranks`; return its description. Only `ranks` make this call.

    `allgather` gathers the bytes of all `ranks`, in the order of `ranks`, on each of these ranks.
    Errors are those of `Communicator.create_among`.
    """
    engine = participant.engine
    participant.collectives.require_free()
    chosen = _different(ranks, engine.nranks)
    if engine.rank not in chosen:
        raise InvalidArgument(
            f"ranks={list(ranks)!r}; rank {engine.rank}, which calls create_among(), must be among "
            "them"
        )
    if not callable(allgather):
        raise InvalidArgument(f"allgather={allgather!r}; give a function that gathers bytes")

    def checked(data: bytes) -> Sequence[bytes]:
        rows = allgather(data)
        is_list = isinstance(rows, Sequence) and len(rows) == len(chosen)
        if not is_list or not all(isinstance(row, bytes | bytearray | memoryview) for row in rows):
            raise InvalidArgument(
                f"allgather returned {rows!r:.200}; it must return the bytes of each of the "
                f"{len(chosen)} ranks"
            )
        return [bytes(row) for row in rows]

    key = chosen.index(engine.rank)
    part = agree(engine, checked, 0, key, engine.config.timeout_s, chosen)
    assert part is not None
    return part


def _different(ranks: Sequence[int], nranks: int) -> list[int]:
    """Return `ranks` as a list; raise `InvalidArgument` if a rank is invalid or occurs twice."""
    if not np.iterable(ranks):
        raise InvalidArgument(f"ranks={ranks!r}; give a sequence of ranks from 0 to {nranks - 1}")
    chosen = [rank_of(rank, nranks, "rank") for rank in ranks]
    if len(set(chosen)) < len(chosen):
        raise InvalidArgument(f"ranks={list(ranks)!r}; give each rank at most once")
    return chosen


def agree(
    engine: Engine,
    allgather: AllgatherBytes,
    color: int | None,
    key: int,
    timeout_s: float,
    among: Sequence[int] | None = None,
) -> Part | None:
    """Agree on the communicators to make, and return that of this rank's `color`.

    Parameters
    ----------
    engine : Engine
        Engine of the communicator to split.
    allgather : callable
        Gathers the bytes of all ranks that take part, on each of these ranks.
    color : int or None
        Ranks with the same color get one communicator; None: this rank gets none.
    key : int
        The ranks of a new communicator are ordered by key, then as in the allgather.
    timeout_s : float
        Longest wait, in seconds, for other threads that are making communicators and, if all
        context ids are in use, for a context id to become free.
    among : sequence of int, optional
        Ranks that take part, in the order of the allgather. Default: all.

    Returns
    -------
    Part or None
        None if `color` is None.

    Raises
    ------
    InvalidArgument
        If `color` or `key` is not a 64-bit integer, if `allgather` returns bytes that no rank
        can have passed, or if no context id is free on all ranks of the new communicator.
    TransportTimeout
        If, after `timeout_s`, other threads are still making communicators, all context ids of a
        rank are still in use, or the ranks have not agreed because one of them called late. Raised
        on all ranks that take part.
    R2cclError
        If `allgather` raises it, for example because the communicator has ended.

    Notes
    -----
    *Collective*: all ranks, or the ranks in `among`.
    """
    ranks = range(len(engine.context.members)) if among is None else among
    given = {"key": key} if color is None else {"color": color, "key": key}
    for name, value in given.items():
        number = integer_of(value)
        if number is None or number not in _INT64:
            raise InvalidArgument(f"{name}={value!r}; allowed are integers of 64 bits")
    give_up_s = monotonic() + timeout_s
    contexts = engine.contexts
    # No offer at first: a rank that comes late must not keep other threads from making theirs.
    mine, is_first = NO_OFFER, True
    try:
        while True:
            # If one rank gives up, all do: a rank that went on would wait for the others.
            is_late = monotonic() >= give_up_s
            own = _Entry(color is not None, is_late, color or 0, key, mine)
            rows = zip(ranks, allgather(own.packed()), strict=True)
            entries = {rank: _entry_of(row, rank) for rank, row in rows}
            takers = [rank for rank, entry in entries.items() if entry.takes_part]
            if not is_first and all(entries[rank].offer != NO_OFFER for rank in takers):
                break
            contexts.withdraw(is_last=False)
            if any(entry.is_late for entry in entries.values()):
                raise TransportTimeout(
                    f"rank {engine.rank_in_job}: no communicator was made within {timeout_s:g} s, "
                    "because a rank came late, other threads were making communicators, or all "
                    "context ids were in use: try again, close communicators, or raise "
                    "the timeout (timeout_s= or R2CC_TIMEOUT_S)",
                    rank=engine.rank_in_job,
                )
            if not is_first:
                time.sleep(_PAUSE_S * random.random())
            is_first = False
            if color is not None:
                mine = contexts.offer(engine.context.context_id)
        if color is None:
            return None
        members = sorted(
            (rank for rank in takers if entries[rank].color == color),
            key=lambda rank: entries[rank].key,
        )
        context_id, first_op = contexts.choose([entries[rank].offer for rank in members])
    finally:
        contexts.withdraw(is_last=True)
    in_job = tuple(engine.context.members[rank] for rank in members)
    return Part(Context(context_id, first_op, in_job), tuple(members))


def _entry_of(row: bytes, rank: int) -> _Entry:
    """Decode `row`, the entry of `rank`; raise `InvalidArgument` if `row` is no valid entry."""
    offer = row[_ENTRY.size :]
    if is_offer(offer):
        takes_part, is_late, color, key = _ENTRY.unpack_from(row)
        if takes_part <= 1 and is_late <= 1:
            return _Entry(takes_part, is_late, color, key, offer)
    raise InvalidArgument(
        f"allgather returned {row!r:.200} for rank {rank}; it must return the bytes that the rank "
        "passed"
    )


__all__ = ["Part", "agree", "create", "create_among", "dup", "split"]

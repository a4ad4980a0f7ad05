"""Ordering of memory accesses on the fake GPU by vector clocks, and the errors for violations.

An actor is a stream, a host (the CPU code of one process or of all), or a host's NICs on one card.
A clock (a vector clock) holds for each actor the number of its last known step; a stamp identifies
one step. If two accesses touch the same byte and at least one of them is a write, the clock of the
later access must cover the stamp of the earlier one; otherwise `Race` is raised. The order in which
the fake ran the two accesses does not matter. As an exception, streams may set a word and wait for
it in any order (SET and WAIT of `Access`).

References
----------
Mattern, "Virtual time and global states of distributed systems", 1989; Flanagan and Freund,
"FastTrack", PLDI 2009.
"""

from __future__ import annotations

import bisect
import enum
import os
import sys
from pathlib import Path
from typing import TypeAlias

import msgspec

#: Vector clock: number of the last known step of each actor.
Clock: TypeAlias = dict[int, int]

_HERE = str(Path(__file__).parent)


class WrongOrder(AssertionError):
    """Error in the code under test: no GPU guarantees the assumed order, or a call is invalid."""


class Race(WrongOrder):
    """Error raised for two unordered accesses to the same bytes, at least one of them a write."""

    @classmethod
    def between(cls, first: str, second: str) -> Race:
        """Return the error for two accesses, given by their descriptions."""
        return cls(
            f"race: nothing orders\n  {first}\nand\n  {second}\nwhich access the same bytes, and "
            "one of them writes"
        )


class StillInUse(WrongOrder):
    """Error raised when a freed resource may still be used, or is mapped by another process."""

    @classmethod
    def by(cls, what: str, user: str, why: str) -> StillInUse:
        """Return the error for the call `what`, which frees a resource that `user` still uses.

        `why` is the state of `user`, such as ``has not run``; it ends the message.
        """
        return cls(f"freed too early: {what}\nbut\n  {user}\n{why}")


class WouldHang(WrongOrder):
    """Error raised when a call waits too long for work; on a real GPU it would never return."""

    @classmethod
    def by(cls, what: str, waiting: str) -> WouldHang:
        """Return the error for a call `what` that waits while operation `waiting` does not run."""
        return cls(f"would hang: {what}\nat {caller()} waits, but\n  {waiting}\ndoes not run")


class Misuse(WrongOrder):
    """Error raised for an invalid call, such as one with an unknown address or handle."""

    @classmethod
    def of(cls, what: str) -> Misuse:
        """Return the error with the problem `what` and the position of the calling code."""
        return cls(f"{what}, at {caller()}")


class Access(enum.Enum):
    """Kind of an access to memory.

    WAIT and SET are accesses of streams to a word, which do not race with each other.
    """

    READ = "reads"
    WRITE = "writes"
    WAIT = "waits for"
    SET = "sets"

    # Enum computes the hash from the name, in Python; each access looks up several kinds.
    __hash__ = object.__hash__


#: Kinds of earlier accesses with which an access of each kind must be ordered.
_AFTER = {
    Access.READ: (Access.WRITE, Access.SET),
    Access.WRITE: tuple(Access),
    Access.WAIT: (Access.WRITE,),
    Access.SET: (Access.READ, Access.WRITE),
}


class Stamp(msgspec.Struct, frozen=True):
    """Identity of one step of an actor: step `time` of `actor`, described by `what`."""

    actor: int
    time: int
    what: str

    def is_known(self, clock: Clock) -> bool:
        """Return True if `clock` covers this step: the clock's owner is ordered after the step."""
        return clock.get(self.actor, 0) >= self.time


def join(clock: Clock, other: Clock) -> None:
    """Merge `other` into `clock`: keep the maximum for each actor."""
    for actor, time in other.items():
        if time > clock.get(actor, 0):
            clock[actor] = time


def caller() -> str:
    """Return the file and line of the code under test: the nearest frame outside the fake."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _is_ours(filename: str) -> bool:
    return filename.startswith(_HERE) or filename.endswith("contextlib.py")


class _Segment:
    """Range of bytes with the same accesses: the last step of each actor, by kind of access."""

    __slots__ = ("end", "start", "steps")

    def __init__(self, start: int, end: int, steps: dict[Access, dict[int, Stamp]]) -> None:
        self.start = start
        self.end = end
        self.steps = steps

    def cut(self, at: int) -> _Segment:
        """Shorten the segment to end at `at`; return the rest as a new segment."""
        steps = {access: dict(known) for access, known in self.steps.items()}
        rest = _Segment(at, self.end, steps)
        self.end = at
        return rest


class Shadow:
    """Record of the last accesses to each byte of some memory; positions may be any integers."""

    def __init__(self) -> None:
        #: Disjoint segments in order; bytes without accesses are in none.
        self._segments: list[_Segment] = []

    def touch(self, start: int, nbytes: int, access: Access, stamp: Stamp, clock: Clock) -> None:
        """Record that step `stamp` of an actor accesses `nbytes` bytes, 1 or more, from `start` on.

        `clock` is the actor's clock at this step.

        Raises
        ------
        Race
            If the access is not ordered with an earlier one.
        """
        segments = self._carve(start, start + nbytes)
        for segment in segments:
            for before in _AFTER[access]:
                for other in segment.steps.get(before, {}).values():
                    if not other.is_known(clock):
                        raise Race.between(other.what, stamp.what)
            if access is Access.WRITE:  # steps after this write are after all earlier ones too
                segment.steps = {}
            segment.steps.setdefault(access, {})[stamp.actor] = stamp

    def forget(self, start: int, nbytes: int) -> None:
        """Forget all accesses to a range of bytes, because its memory is freed."""
        gone = self._carve(start, start + nbytes)
        first = self._segments.index(gone[0])
        del self._segments[first : first + len(gone)]

    def _carve(self, start: int, end: int) -> list[_Segment]:
        """Return the segments that together cover this range; split and add segments as needed."""
        first = bisect.bisect_right(self._segments, start, key=lambda segment: segment.end)
        last = bisect.bisect_left(self._segments, end, key=lambda segment: segment.start)
        inside = self._segments[first:last]
        carved, before, after, position = [], [], [], start
        for segment in inside:
            if segment.start < start:
                before.append(segment)
                segment = segment.cut(start)
            if segment.end > end:
                after.append(segment.cut(end))
            if position < segment.start:
                carved.append(_Segment(position, segment.start, {}))
            carved.append(segment)
            position = segment.end
        if position < end:
            carved.append(_Segment(position, end, {}))
        self._segments[first:last] = before + carved + after
        return carved


__all__ = [
    "Access",
    "Clock",
    "Misuse",
    "Race",
    "Shadow",
    "Stamp",
    "StillInUse",
    "WouldHang",
    "WrongOrder",
    "caller",
    "join",
]

"""What comes before what on the fake GPU, and the errors that say it was not so.

A clock says of every actor, a stream or a host, how many of its steps are known; a stamp names one
step. Must not import the rest of the fake.

Invariant: of two accesses to one byte, at least one of them a write, the clock of the later one
knows the stamp of the earlier one; else `Race`. Whether there is such a pair does not depend on the
order in which the fake ran them.

References
----------
Mattern, "Virtual time and global states of distributed systems", 1989; Flanagan and Freund,
"FastTrack", PLDI 2009.
"""

from __future__ import annotations

import bisect
import enum
import sys
from pathlib import Path
from typing import TypeAlias

import msgspec

#: Actor to the number of its last step that is known.
Clock: TypeAlias = dict[int, int]

_HERE = str(Path(__file__).parent)


class WrongOrder(AssertionError):
    """The code under test does what a GPU need not do in the order it hopes for."""


class Race(WrongOrder):
    """Two accesses to the same memory are not ordered, and one of them writes."""

    @classmethod
    def between(cls, first: str, second: str) -> Race:
        """Name both."""
        return cls(
            f"race: nothing orders\n  {first}\nand\n  {second}\nwhich reach the same bytes, one of "
            "them writing"
        )


class StillInUse(WrongOrder):
    """Something is freed, destroyed or closed while work on it may be under way."""

    @classmethod
    def by(cls, what: str, user: str, why: str) -> StillInUse:
        """Name both, and why they are not ordered."""
        return cls(f"in use: {what}\nwhile\n  {user}\n{why}")


class Misuse(WrongOrder):
    """An address, a handle or an argument that the driver would refuse, or not survive."""

    @classmethod
    def of(cls, what: str) -> Misuse:
        """Say what is wrong, and where."""
        return cls(f"{what}, at {caller()}")


class Access(enum.Enum):
    """How memory is touched; words that a stream sets or waits for do not race with each other."""

    READ = "reads"
    WRITE = "writes"
    WAIT = "waits for"
    SET = "sets"


#: What an access must come after.
_AFTER = {
    Access.READ: (Access.WRITE, Access.SET),
    Access.WRITE: tuple(Access),
    Access.WAIT: (Access.WRITE,),
    Access.SET: (Access.READ, Access.WRITE),
}


class Stamp(msgspec.Struct, frozen=True):
    """A step of an actor, in words too."""

    actor: int
    time: int
    what: str

    def is_known(self, clock: Clock) -> bool:
        """Whether who has `clock` comes after it."""
        return clock.get(self.actor, 0) >= self.time


def join(clock: Clock, other: Clock) -> None:
    """Have `clock` know what `other` knows."""
    for actor, time in other.items():
        if time > clock.get(actor, 0):
            clock[actor] = time


def caller() -> str:
    """Where the code under test stands: the nearest frame outside the fake."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_ours(filename: str) -> bool:
    return filename.startswith(_HERE) or filename.endswith("contextlib.py")


class _Segment:
    """Bytes that were touched alike: the last step of each actor, by access."""

    __slots__ = ("end", "start", "steps")

    def __init__(self, start: int, end: int, steps: dict[Access, dict[int, Stamp]]) -> None:
        self.start = start
        self.end = end
        self.steps = steps

    def cut(self, at: int) -> _Segment:
        """Keep what is before `at`; return the rest."""
        steps = {access: dict(known) for access, known in self.steps.items()}
        rest = _Segment(at, self.end, steps)
        self.end = at
        return rest


class Shadow:
    """Who touched the bytes of some memory last; positions are any integers."""

    def __init__(self) -> None:
        #: In order, disjoint; bytes that were never touched are in none.
        self._segments: list[_Segment] = []

    def touch(self, start: int, nbytes: int, access: Access, stamp: Stamp, clock: Clock) -> None:
        """Note an access, of one byte or more, by who has `clock`.

        Raises
        ------
        Race
            It is not ordered with an earlier one.
        """
        segments = self._carve(start, start + nbytes)
        for segment in segments:
            for before in _AFTER[access]:
                for other in segment.steps.get(before, {}).values():
                    if not other.is_known(clock):
                        raise Race.between(other.what, stamp.what)
            if access is Access.WRITE:  # it comes after all others: who comes after it does too
                segment.steps = {}
            segment.steps.setdefault(access, {})[stamp.actor] = stamp

    def forget(self, start: int, nbytes: int) -> None:
        """The memory is freed: what is there next is something else."""
        gone = self._carve(start, start + nbytes)
        first = self._segments.index(gone[0])
        del self._segments[first : first + len(gone)]

    def _carve(self, start: int, end: int) -> list[_Segment]:
        """Return segments that make up exactly the range, made where there are none."""
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
    "WrongOrder",
    "caller",
    "join",
]

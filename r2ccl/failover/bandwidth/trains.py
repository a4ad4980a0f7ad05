"""Trains: what one rail carries, measured from the slices it carries anyway.

Theory of operation
-------------------
What a data loop sees for nothing is when a slice was handed to a rail and when it was confirmed.
From one slice alone no rate follows: its time has the latency in it, and the wait behind others.
While at least one slice is under way all the time, though, a slice's confirmation comes one
service time after the one before it. So a *train* counts from one confirmation to a later one::

    posted      1 2   3   4   5          6 7
    confirmed       1   2   3   4   5          6   7 ...
                    |---- train ----|          |---- next one

    rate = bytes confirmed after the first / time since the first

That is the delivery rate of Cheng, Cardwell et al. (draft-cheng-iccrg-delivery-rate-estimation-02)
and, at its core, the packet pair of Keshav (SIGCOMM 1991), with trains that begin at a confirmation
and end when the rail falls idle. So neither latency nor idle time, nor the caller's, nor a slower
rail's that the schedule waits for, is in any rate, and nothing has to be marked as limited by the
application. What is confirmed at one instant counts as one: confirmations that were held up and
come together (ack compression) neither begin nor end a train in their midst. Trains too short to
mean anything, as those of small operations are, count for nothing.

Pure: times are passed in. Invariant: the trains of a rail do not overlap.
"""

from __future__ import annotations

from typing import NamedTuple

from r2ccl.errors import InternalError

#: A train is measured once it has this many slices and lasted this long: what one confirmation
#: is late by is then small beside it.
_NSLICES = 8
_TRAIN_S = 0.002
#: So that slow rails, with slices of hundreds of ms, are measured in time too.
_LONG_TRAIN_S = 0.1
_LONG_NSLICES = 2
#: A train that ended because the rail fell idle needs this much.
_SHORT_NSLICES = 3
#: Less than this is no train: a small operation's time is not the rail's.
_LEAST_NBYTES = 256 << 10


class Train(NamedTuple):
    """Bytes that were confirmed, and how long that took."""

    nbytes: int
    length_s: float


class Meter:
    """Measures one rail. Times that are read within one poll must be equal."""

    __slots__ = ("_began_s", "_last_s", "_nbytes", "_nslices", "under_way")

    def __init__(self) -> None:
        #: Slices handed to the rail and not confirmed.
        self.under_way = 0
        #: The train under way, if any: its first and last confirmation, and what came between.
        self._began_s: float | None = None
        self._last_s = 0.0
        self._nslices = self._nbytes = 0

    def posted(self) -> None:
        """A slice was handed to the rail."""
        self.under_way += 1

    def confirmed(self, now: float, nbytes: int) -> Train | None:
        """A slice was confirmed; returns the train that was whole by then, if one was.

        Raises
        ------
        InternalError
            None was under way.
        """
        if self.under_way == 0:
            raise InternalError("a rail confirmed a slice it was never given")
        self.under_way -= 1
        train = None
        if self._began_s is None:
            self._begin(now)
        elif now > self._last_s:
            if self._is_whole():
                train = self._train()
                self._begin(self._last_s)
            self._add(now, nbytes)
        elif now > self._began_s:  # at the same instant as the one before it
            self._add(now, nbytes)
        if self.under_way == 0:
            if self._nslices >= _SHORT_NSLICES and self._nbytes >= _LEAST_NBYTES:
                train = self._train()
            self._began_s = None
        return train

    def dropped(self, nslices: int) -> None:
        """So many of those under way will not be confirmed: their path was fenced.

        Raises
        ------
        InternalError
            Fewer were under way.
        """
        if nslices > self.under_way:
            raise InternalError(f"a rail lost {nslices} slices of {self.under_way} under way")
        self.under_way -= nslices
        self._began_s = None

    def _begin(self, at_s: float) -> None:
        self._began_s = self._last_s = at_s
        self._nslices = self._nbytes = 0

    def _add(self, now: float, nbytes: int) -> None:
        self._last_s = max(now, self._last_s)
        self._nslices += 1
        self._nbytes += nbytes

    def _is_whole(self) -> bool:
        length_s = self._length_s()
        is_full = self._nslices >= _NSLICES and length_s >= _TRAIN_S
        is_long = self._nslices >= _LONG_NSLICES and length_s >= _LONG_TRAIN_S
        return (is_full or is_long) and self._nbytes >= _LEAST_NBYTES

    def _length_s(self) -> float:
        assert self._began_s is not None
        return self._last_s - self._began_s

    def _train(self) -> Train | None:
        length_s = self._length_s()
        return Train(self._nbytes, length_s) if length_s > 0 else None


__all__ = ["Meter", "Train"]

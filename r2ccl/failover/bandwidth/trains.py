"""Measurement of the rate of one rail from the confirmations of its slices.

Theory of operation
-------------------
The data loop knows, at no extra cost, when a slice was posted to a rail and when the slice was
confirmed. The time of a single slice gives no rate, because it includes the latency and the wait
behind other slices. While at least one slice is always in flight, however, each confirmation
follows the previous one after the service time of one slice. A *train* is therefore the time from
one confirmation to a later one::

    posted      1 2   3   4   5          6 7
    confirmed       1   2   3   4   5          6   7 ...
                    |---- train ----|          |---- next one

    rate = bytes confirmed after the first / time since the first

This is the delivery rate of Cheng, Cardwell et al. (draft-cheng-iccrg-delivery-rate-estimation-02),
based on the packet pair of Keshav (SIGCOMM 1991), with trains that begin at a confirmation and end
at the latest when the rail becomes idle. A train therefore contains no latency, and no idle time in
which the rail waits for the caller or for a slower rail of the schedule. So no sample needs to be
marked as limited by the application. If confirmations were delayed and arrive at the same instant
(ack compression), no train begins or ends between them. Trains that are too short, as in small
operations, are discarded.

Times are passed in as clock readings. Invariant: the trains of a rail do not overlap.
"""

from __future__ import annotations

from typing import NamedTuple

from r2ccl.errors import InternalError

#: A train is complete once it has this many slices and lasts this many seconds: the delay of a
#: single confirmation is then small in comparison.
_NSLICES = 8
_TRAIN_S = 0.002
#: It is also complete once it lasts this many seconds with this smaller number of slices, so that a
#: slow rail, on which a slice takes hundreds of ms, is measured early enough.
_LONG_TRAIN_S = 0.1
_LONG_NSLICES = 2
#: Fewest slices of a train that ends because the rail becomes idle.
_SHORT_NSLICES = 3
#: Fewest bytes of any train: the time of a small operation is not that of the rail.
_LEAST_NBYTES = 256 << 10


class Train(NamedTuple):
    """Measurement of a rail between two confirmations, while slices were always in flight.

    ``nbytes`` counts the bytes confirmed after the first confirmation, up to and including the
    last. ``length_s`` is the time between the two, in seconds.
    """

    nbytes: int
    length_s: float


class Meter:
    """Meter of the rate of one rail: turns confirmations of slices into trains.

    All slices confirmed in one poll must be recorded with the same clock reading.
    """

    __slots__ = ("_began_s", "_last_s", "_nbytes", "_nslices", "under_way")

    def __init__(self) -> None:
        #: Number of slices in flight on the rail.
        self.under_way = 0
        #: Current train, if any: the times of its first and last confirmation, and the slices and
        #: bytes confirmed after the first.
        self._began_s: float | None = None
        self._last_s = 0.0
        self._nslices = self._nbytes = 0

    def posted(self) -> None:
        """Record that a slice was posted to the rail."""
        self.under_way += 1

    def confirmed(self, now: float, nbytes: int) -> Train | None:
        """Record that a slice of `nbytes` was confirmed.

        Return the train that is complete now, or None. `now` is a clock reading in seconds.

        Raises
        ------
        InternalError
            If no slice is in flight.
        """
        if self.under_way == 0:
            raise InternalError("a slice was confirmed on a rail that has none in flight")
        self.under_way -= 1
        train = None
        if self._began_s is None:
            self._begin(now)
        elif now > self._last_s:
            if self._is_whole():
                train = self._train()
                self._begin(self._last_s)
            self._add(now, nbytes)
        elif now > self._began_s:  # at the same instant as the previous confirmation
            self._add(now, nbytes)
        if self.under_way == 0:
            if self._nslices >= _SHORT_NSLICES and self._nbytes >= _LEAST_NBYTES:
                train = self._train()
            self._began_s = None
        return train

    def dropped(self, nslices: int) -> None:
        """Record that `nslices` slices in flight will not be confirmed: their path was fenced.

        Raises
        ------
        InternalError
            If fewer slices are in flight.
        """
        if nslices > self.under_way:
            raise InternalError(
                f"{nslices} slices were dropped on a rail that has {self.under_way} in flight"
            )
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

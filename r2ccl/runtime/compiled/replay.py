"""Continuation in Python of a call that compiled code has left.

Compiled code logs the events of a call. `Replay.run` passes these events to the links and lanes in
the same order. Meanwhile a recorder replaces the transport, and only records the posted slices and
landing places. The copies and reductions that compiled code has done are skipped. Links and lanes
are then in the state that the data loop would have reached. `Replay.restore` passes to the
connections the slices and frames that compiled code has read or written only in part or not at all.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from r2ccl.clock import monotonic
from r2ccl.failover.migration.calls import Calls
from r2ccl.failover.migration.links import Consumer, Links
from r2ccl.planning.lowering import Step
from r2ccl.runtime.compiled import layout as at
from r2ccl.runtime.compiled.program import CompiledProgram
from r2ccl.runtime.executor import HostLanes, LaneRun
from r2ccl.runtime.progress import Progress
from r2ccl.transport.base import Arrived, Cleared, Confirmed, Event, Frame, Sent
from r2ccl.transport.tcp.connection import Connection, NamedPlace, QueuedSlice, pack_data
from r2ccl.types import PathKey


class _Asked(NamedTuple):
    """Landing place that was announced during a replay."""

    path: PathKey
    frame: Frame
    region: memoryview
    ack: int


class _Posted(NamedTuple):
    """Slice that was posted during a replay."""

    path: PathKey
    frame: Frame
    view: memoryview
    token: object


class RecordingTransport:
    """Transport that records the slices and landing places that a replay posts.

    Implements `r2ccl.runtime.progress.Recorder`.
    """

    def __init__(self) -> None:
        self.posted: dict[tuple[PathKey, int, int], _Posted] = {}
        self.asked: dict[tuple[PathKey, int, int], _Asked] = {}
        #: `Sent` events of eager slices, for the caller to handle.
        self.events: list[Event] = []

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: object, is_replay: bool = False
    ) -> None:
        """Record a posted slice; an eager one (``token=None``) counts as sent at once."""
        self.posted[path, frame.channel, frame.seq] = _Posted(path, frame, view, token)
        if token is None:
            self.events.append(Sent(path, frame.channel, frame.seq))

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        """Record a landing place."""
        self.asked[path, frame.channel, frame.seq] = _Asked(path, frame, region, ack)

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """Do nothing: compiled code has sent the confirmation, or the caller sends it later."""

    def flush(self) -> None:
        """Do nothing: there is nothing to write."""


class _Continued:
    """`Operands` of a call that compiled code has done in part; skips the slices that are done."""

    def __init__(self, program: CompiledProgram, lanes: HostLanes) -> None:
        call = lanes.call(program.plan, program.scratch)
        self.layout, self.views = call.layout, call.views
        self.is_bandwidth_sample = call.is_bandwidth_sample
        self.computed = 0
        self._apply = call.apply
        steps = [step for lane in program.layout.lanes for step in lane.steps]
        self._done = {
            id(step): int(program.step(number)[at.DONE]) for number, step in enumerate(steps)
        }

    def apply(self, step: Step, lo: int, hi: int, received: Any) -> int:
        """Apply a step to elements `lo` to ``hi - 1``, unless compiled code did; return 0.

        As for `Operands.apply`, 0 means that no work is deferred.
        """
        if bisect_left(step.cuts, lo) >= self._done[id(step)]:
            self._apply(step, lo, hi, received)
        return 0


class Replay:
    """Continuation, in the data loop, of one call that compiled code has left.

    Parameters
    ----------
    program : CompiledProgram
    conns : sequence of Connection
        Connections of the program's paths, in the same order.
    links : Links
    progress : Progress
    """

    def __init__(
        self,
        program: CompiledProgram,
        conns: Sequence[Connection],
        links: Links,
        progress: Progress,
    ) -> None:
        self._program = program
        self._conns = conns
        self._links = links
        self._progress = progress
        self._recorder = RecordingTransport()
        self._numbers = {pair.key: number for number, pair in enumerate(program.pairs)}

    def lanes(self, lanes: HostLanes, calls: Calls[Consumer]) -> list[LaneRun]:
        """Make the lanes of the call, register them as consumers of its slices, and return them.

        The caller passes the lanes' `LaneRun.advance` methods to `run`. Afterwards the data loop
        finishes the lanes.
        """
        program, links = self._program, self._links
        call = _Continued(program, lanes)
        runs = [LaneRun(lane, call, links, lanes.pool) for lane in program.layout.lanes]
        calls.consumers = {channel: run for run in runs for channel in run.channels}
        return runs

    def run(self, begin: Sequence[Callable[[], None]], calls: Calls[Consumer]) -> None:
        """Bring links and consumers of slices to the state that compiled code has reached.

        The functions in `begin` post the first slices and receives of the call.
        """
        program, links = self._program, self._links
        ends = [(links.sender(*pair.key), links.receiver(*pair.key)) for pair in program.pairs]
        slots = [sender.slots for sender, _ in ends]
        for sender, _ in ends:  # compiled code may have posted more slices than Python would
            sender.slots = program.view[at.SLOTS]
        try:
            self._progress.replay(begin, self._events(calls), self._recorder)
        finally:
            for (sender, _), usual in zip(ends, slots, strict=True):
                sender.slots = usual
        for number, (sender, receiver) in enumerate(ends):
            row = program.pair(number)
            for item in sender.outstanding:
                ordinal = item.seq - int(row[at.FIRST_SENT])
                if item.is_eager and 0 <= ordinal < row[at.POSTED]:
                    # The memory may have changed since compiled code copied it.
                    item.view = program.copy_of(number, ordinal)
            receiver.acked = int(row[at.ACKED])
            if receiver.acked < receiver.consumed:
                links.unconfirmed[receiver] = None

    def _events(self, calls: Calls[Consumer]) -> Iterator[Event]:
        program = self._program
        rows = program.log[: int(program.words[at.NLOGGED])].tolist()
        for kind, conn, channel, seq, ack, nbytes, number, *_ in rows:
            path = program.paths[conn]
            if kind >= at.POSTED_EVENT or (kind == at.CONFIRMED_EVENT and number < 0):
                continue
            if kind == at.CONFIRMED_EVENT:
                yield Confirmed(path, channel, ack)
            elif kind == at.SENT_EVENT:
                yield Sent(path, channel, seq)
            elif kind == at.CLEARED_EVENT:
                signature = program.signature(number, is_sent=True)
                yield Cleared(path, Frame(channel, seq, ack, calls.op, signature), nbytes, True)
            else:
                signature = program.signature(number, is_sent=False)
                frame = Frame(channel, seq, ack, calls.op, signature)
                ordinal = seq - int(program.pair(number)[at.FIRST_RECEIVED])
                start = program.places[number][ordinal]
                payload = None
                if kind == at.ARRIVED_EAGER:
                    payload = memoryview(program.arena[start : start + nbytes].tobytes())
                elif start >= 0:
                    region = self._recorder.asked[path, channel, seq].region
                    region[:] = program.arena[start : start + nbytes].data
                is_confirmed = kind == at.ARRIVED_CONFIRMED
                yield Arrived(path, frame, payload, monotonic(), is_confirmed)

    def measure(self) -> None:
        """Report to the bandwidth measurement the cleared slices that only the replay has posted.

        These are the slices that `run` has posted and compiled code has not.
        """
        balance, now = self._links.balance, monotonic()
        assert balance is not None
        for path, frame, _, token in self._recorder.posted.values():
            row = self._program.pair(self._numbers[path.peer, frame.channel])
            if token is not None and frame.seq >= row[at.FIRST_SENT] + row[at.POSTED]:
                balance.posted(path.rail, path.peer, now)

    # Connections

    def restore(self) -> None:
        """Bring the connections to the state that compiled code has reached."""
        program = self._program
        for number, conn in enumerate(self._conns):
            row = program.conn(number).tolist()
            restore_bytes(conn, row, 0)
            self._restore_sending(conn, row)
            self._restore_places(number, conn, row)

    def _restore_sending(self, conn: Connection, row: list[int]) -> None:
        program, recorder = self._program, self._recorder
        if row[at.SENDING_PAIR] >= 0:
            fragment, rest = row[at.FRAGMENT_NBYTES], row[at.REST_NBYTES]
            number, ordinal = row[at.SENDING_PAIR], row[at.SENDING_ORDINAL]
            if not row[at.IS_CLEARED]:
                conn.sending.append(ctypes.string_at(row[at.FRAGMENT], fragment))
            else:
                posted = recorder.posted[self._key_of(number, ordinal)]
                end = len(posted.view) - rest
                if fragment:
                    conn.sending.append(posted.view[end - fragment : end])
                if rest:
                    conn.bulk.append(QueuedSlice(posted.frame, posted.view[end:]))
                else:
                    conn.sent = posted.frame
        taken, added = row[at.EAGER_TAKEN], row[at.EAGER_ADDED]
        for entry in program.ring(row[at.EAGER], taken, added):
            copy = program.copy_of(*entry)
            conn.small.append(pack_data(recorder.posted[self._key_of(*entry)].frame, len(copy)))
            conn.small.append(copy)
        begun = {self._key_of(*each) for each in program.ring(row[at.BULK], 0, row[at.BULK_TAKEN])}
        for key, posted in recorder.posted.items():
            if key[0] != conn.path or key in begun:
                continue
            if posted.token is not None:
                conn.bulk.append(QueuedSlice(posted.frame, posted.view))
            else:
                number = self._numbers[conn.path.peer, posted.frame.channel]
                ordinal = posted.frame.seq - int(program.pair(number)[at.FIRST_SENT])
                if ordinal >= program.pair(number)[at.POSTED]:
                    conn.small.append(pack_data(posted.frame, len(posted.view)))
                    if len(posted.view):
                        conn.small.append(posted.view)

    def _restore_places(self, number: int, conn: Connection, row: list[int]) -> None:
        program = self._program
        for path, frame, region, ack in self._recorder.asked.values():
            if path != conn.path:
                continue
            at_pair = self._numbers.get((path.peer, frame.channel), -1)
            if at_pair < 0:  # of a message, which the replay has granted
                conn.ask(frame, region, ack)
                continue
            words = program.pair(at_pair)
            ordinal = frame.seq - int(words[at.FIRST_RECEIVED])
            if ordinal >= words[at.ASKED]:
                conn.ask(frame, region, ack)
                continue
            arrived = int(program.arrived(at_pair)[ordinal])
            if arrived < 0:
                continue
            place = NamedPlace(region[arrived:], ack)
            place.began_s = monotonic() if arrived else 0.0
            if words[at.EARLY] == ordinal + 1:
                place.ack, place.is_confirmed = 0, True
            conn.places[frame.channel, frame.seq] = place
            left = 0
            if row[at.TARGET_LEFT] and (row[at.TARGET_PAIR], row[at.TARGET_ORDINAL]) == (
                at_pair,
                ordinal,
            ):
                left = row[at.TARGET_LEFT]
                conn.target = region[arrived - left : arrived]
                # The peer's confirmation in the header of the fragment has been handled.
                conn.frame = msgspec.structs.replace(frame, ack=0)
                conn.place = place
            start = program.places[at_pair][ordinal]
            if start >= 0:
                held = arrived - left
                region[:held] = program.arena[start : start + held].data

    def _key_of(self, number: int, ordinal: int) -> tuple[PathKey, int, int]:
        row = self._program.pair(number)
        path = self._program.paths[int(row[at.CONN])]
        return path, int(row[at.CHANNEL]), int(row[at.FIRST_SENT]) + ordinal


def restore_bytes(conn: Connection, words: Sequence[int], start: int) -> None:
    """Pass to a connection the bytes that compiled code has read but not parsed.

    Also pass the frames that compiled code has staged but not written. `words` contains the words
    of the connection, from index `start` on. If Ctrl-C interrupts this function, it may be called
    again.
    """
    conn.parsed, conn.filled = words[start + at.PARSED], words[start + at.FILLED]
    left = words[start + at.NOW_NBYTES] - words[start + at.NOW_DONE]
    if left and not conn.sending:  # nothing is queued while a connection is lent
        address = words[start + at.NOW] + words[start + at.NOW_DONE]
        conn.sending.append(ctypes.string_at(address, left))
    left = words[start + at.NEXT_NBYTES]
    if left and not conn.small:
        conn.small.append(ctypes.string_at(words[start + at.NEXT], left))


__all__ = ["RecordingTransport", "Replay", "restore_bytes"]

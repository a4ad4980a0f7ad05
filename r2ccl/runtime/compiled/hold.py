"""Calls that have ended and whose tables still hold the state of their links.

Several programs can be *held* together, also programs of different communicators and of messages.
One of them, the current program, has the newest state. If another held program becomes the current
one, it takes the counts of the links, and the positions in the receive buffers of the connections,
from a table that all held programs share. The links are brought up to date only when the hold ends.
A rank that repeats several calls in rotation thus runs little more Python code than a rank that
repeats a single call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from r2ccl.failover.migration.calls import HISTORY, Calls
from r2ccl.failover.migration.links import Consumer
from r2ccl.failover.migration.path import Path
from r2ccl.kernels.arrays import data_of
from r2ccl.kernels.native import callable_of
from r2ccl.planning.plan_cache import Plan
from r2ccl.runtime.compiled import layout as at
from r2ccl.runtime.compiled.program import CompiledProgram
from r2ccl.transport.aligned import LINE_NBYTES
from r2ccl.transport.tcp.connection import Connection
from r2ccl.types import PathKey


class _Shared(NamedTuple):
    """Array that describes a program's shared words to `r2ccl.runtime.compiled.hand_over`.

    ``words`` is this array, not the shared words themselves; ``address`` is its address.
    """

    words: npt.NDArray[np.int64]
    address: int


class Totals(NamedTuple):
    """Final values of counters once the held calls are settled.

    They are values, not increments, so setting the counters twice does no harm.

    Attributes
    ----------
    nfinished : int
        `r2ccl.runtime.compiled.call.CompiledCalls.nfinished`.
    paths : dict of Path to list of int
        Slices sent, bytes sent, slices received, bytes received on each path of the calls.
    """

    nfinished: int
    paths: dict[Path, list[int]]


class HeldCalls:
    """Held calls of one communicator, or of its messages.

    Parameters
    ----------
    calls : Calls
    on_settled : callable
        ``on_settled(op)`` is called when the hold ends, with the number of the last call that has
        ended. If `CompiledCalls.proceed` ends the hold to continue a call, it then calls
        ``on_settled`` with the number of this call, too.
    program : CompiledProgram
        Program of the first call.

    Attributes
    ----------
    op : int
        Number of the last call; out of date while a program of these calls has the newest state.
    """

    __slots__ = ("_first", "_turns", "calls", "on_settled", "op")

    def __init__(
        self, calls: Calls[Consumer], on_settled: Callable[[int], None], program: CompiledProgram
    ) -> None:
        self.calls = calls
        self.on_settled = on_settled
        self.op = calls.op
        self._first = program
        #: The last programs that took over, each with the number of its first call then.
        self._turns: deque[tuple[int, CompiledProgram]] = deque(maxlen=HISTORY)

    def take_over(self, program: CompiledProgram) -> None:
        """Record that `program` makes the calls after call `op`, until another program does.

        Also store `op` in the tables of `program`, as the number of its last call.
        """
        program.view[at.OP] = self.op
        turns, first_op = self._turns, self.op + program.view[at.OP_STEP]
        if turns and turns[-1][0] == first_op:  # the program that took over last made no call
            turns.pop()
        turns.append((first_op, program))

    def settle(self) -> None:
        """Bring `calls` to the state after call `op`, and call ``on_settled(op)``."""
        calls, op = self.calls, self.op
        if op > calls.op:
            calls.repeat_to(op, lambda number: self._plan_of(number).signature)
            calls.pairs = self._plan_of(op).pairs
        self.on_settled(op)

    def _plan_of(self, op: int) -> Plan:
        """Return the plan of call `op`, which must be one of the last `HISTORY` calls."""
        turn = bisect_right(self._turns, op, key=itemgetter(0))
        return (self._turns[turn - 1][1] if turn else self._first).plan


class HeldPrograms:
    """Programs that are held together; made after the call of the first program has ended.

    Parameters
    ----------
    program : CompiledProgram
        First program.
    conns : sequence of Connection
        Connections of the program's paths, borrowed from the transport.
    calls : Calls
        Calls of the program's communicator.
    on_settled : callable
        As for `HeldCalls`.
    ncalls : int
        `Links.ncalls` after the call.

    Attributes
    ----------
    program : CompiledProgram
        Program with the newest state.
    current : HeldCalls
        Held calls of this program's communicator.
    conns : dict of PathKey to Connection
        All connections that are borrowed from the transport.
    delayed : sequence of (PathKey, int)
        Path and context id of each frame of another communicator that the last call left in a
        receive buffer.
    all_calls : dict of Calls to HeldCalls
        Held calls of all communicators.
    totals : Totals or None
        None until they have been computed, at the end of the hold.
    """

    __slots__ = (
        "_arena", "_compiled", "_links", "_members", "_paths", "_table",
        "_used_nbytes", "all_calls", "conns", "current", "delayed", "ncalls", "program", "totals",
    )  # fmt: skip

    def __init__(
        self,
        program: CompiledProgram,
        conns: Sequence[Connection],
        calls: Calls[Consumer],
        on_settled: Callable[[int], None],
        ncalls: int,
    ) -> None:
        self.program = program
        self.conns = dict(zip(program.paths, conns, strict=True))
        self.current = HeldCalls(calls, on_settled, program)
        self.all_calls = {calls: self.current}
        self.ncalls = ncalls
        self.delayed: Sequence[tuple[PathKey, int]] = ()
        self.totals: Totals | None = None
        #: Memory for the calls of all programs, and the size of the part in use.
        self._arena = program.arena
        self._used_nbytes = program.nslots * program.arena_nbytes
        #: Shared words of each program; empty until there may be a second program, see `has`.
        self._members: dict[CompiledProgram, _Shared] = {}
        #: Table of the shared words; index of the first word of each link, by peer and channel, and
        #: of each path.
        self._table = np.empty(0, np.int64)
        self._compiled = callable_of(_HAND_OVER)
        self._links: dict[tuple[int, int], int] = {}
        self._paths: dict[PathKey, int] = {}

    @property
    def programs(self) -> Collection[CompiledProgram]:
        """All held programs."""
        return self._members or (self.program,)

    def has(self, program: CompiledProgram) -> bool:
        """Return whether `program` is held; call this before `has_link`, `add` and `take_over`."""
        if not self._members:  # of the first program, only once there may be a second one
            self._members[self.program] = self._share(self.program)
        return program in self._members

    def has_link(self, peer: int, channel: int) -> bool:
        """Return whether a held program uses the links of `peer` and `channel`.

        Call `has` first.
        """
        return (peer, channel) in self._links

    def reserve(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return `nbytes` of memory for another program, or None if too little is left."""
        start = self._used_nbytes
        if start + nbytes > self._arena.nbytes:
            return None
        self._used_nbytes = start + -(-nbytes // LINE_NBYTES) * LINE_NBYTES
        return self._arena[start : start + nbytes]

    def add(self, program: CompiledProgram) -> None:
        """Add `program` to the held programs.

        Its tables must have their initial values (`CompiledProgram.initial`), as at the start of a
        call, and its connections must be in ``conns``.
        """
        program.view[at.NREPEATS], program.view[at.REMAINING] = -1, 0  # as after a call
        self._members[program] = self._share(program)

    def take_over(
        self,
        program: CompiledProgram,
        calls: Calls[Consumer],
        on_settled: Callable[[int], None],
    ) -> None:
        """Make the held program `program` the current one, and give it the newest state.

        `calls` and `on_settled` are those of its communicator, see `HeldCalls`.
        """
        self._hand_over(self.program, program, is_ended=True)
        self.current.op = self.program.view[at.OP]
        current = self.all_calls.get(calls)
        if current is None:
            current = self.all_calls[calls] = HeldCalls(calls, on_settled, program)
        current.take_over(program)
        self.program, self.current = program, current

    def delays(self, program: CompiledProgram) -> bool:
        """Return whether a frame in ``delayed`` would remain unread in a call of `program`.

        A call reads the frame if it receives on the same path and belongs to the same communicator.
        """
        context, traffic = program.view[at.CONTEXT], program.traffic
        return any(
            other != context or path not in traffic or not traffic[path][_NRECEIVED]
            for path, other in self.delayed
        )

    def confirm(self, confirmations: Sequence[tuple[tuple[int, int], int]]) -> bool:
        """Store confirmations for links that the current program does not use; return True.

        Each has the key of a link (peer, channel) and a number; slices with lower numbers are
        confirmed. Return False, and store nothing, if a link is not used by any held program, or if
        a number exceeds the number of slices sent.
        """
        rows = [(self._links.get(key), ack) for key, ack in confirmations]
        for row, ack in rows:
            if row is None or ack > self._table[row + _FIRST_SENT]:
                return False
        for row, ack in rows:
            assert row is not None
            self._table[row + _CONFIRMED] = max(ack, self._table[row + _CONFIRMED])
        return True

    def op_of(self, calls: Calls[Consumer]) -> int:
        """Return the number of the last call of a communicator; any thread may call this method."""
        held = self.all_calls.get(calls)
        if held is None:
            return calls.op
        current = self.program.view[at.OP] if held is self.current else held.op
        return max(calls.op, current)  # the tables may be filled in again now

    def spread(self, *, is_running: bool) -> None:
        """Copy the newest state to all held programs, and update ``current.op``.

        If `is_running`, the current program has begun a further call, which does not count.
        """
        words = self.program.view
        self.current.op = words[at.OP] - (words[at.OP_STEP] if is_running else 0)
        if self._members:
            self._hand_over(self.program, None, is_ended=not is_running)
            for program in self._members:
                if program is not self.program:
                    self._hand_over(None, program, is_ended=True)

    def others(self) -> list[Connection]:
        """Return the connections that the current program does not use.

        Also bring their positions in the receive buffers up to date. Call `spread` first.
        """
        found = []
        for path, conn in self.conns.items():
            if path not in self.program.paths:
                row = self._paths.get(path)
                if row is not None:  # otherwise Ctrl-C came before its program was held
                    conn.parsed, conn.filled = self._table[row : row + _NCONN].tolist()
                found.append(conn)
        return found

    # Programs

    def _share(self, program: CompiledProgram) -> _Shared:
        """Return the description of a program's shared words.

        Add to the table the words of links and paths that no other held program uses.
        """
        entries: list[tuple[int, int, int]] = []
        for end in program.ends:
            key = end.sender.peer, end.sender.channel
            if key not in self._links:
                sender, receiver = end.sender, end.receiver
                counts = sender.posted, sender.confirmed, receiver.posted, receiver.posted
                self._links[key] = self._extend((*counts, receiver.acked))
            ahead = end.nsends, 0, end.nreceives, 0, 0
            entries += _entries(end.row, _LINK_WORDS, self._links[key], ahead)
        for number, path in enumerate(program.paths):
            if path not in self._paths:
                conn = self.conns[path]
                self._paths[path] = self._extend((conn.parsed, conn.filled))
            start = program.conns_at + at.CONN_NWORDS * number
            entries += _entries(start, _CONN_WORDS, self._paths[path], (0, 0))
        head = data_of(program.words), len(entries)
        words = np.array([*head, *chain.from_iterable(entries)], np.int64)
        return _Shared(words, data_of(words))

    def _extend(self, words: Sequence[int]) -> int:
        """Append words to the table; return the index of the first one."""
        start = self._table.size
        self._table = np.concatenate((self._table, np.array(words, np.int64)))
        return start

    def _hand_over(
        self, source: CompiledProgram | None, target: CompiledProgram | None, *, is_ended: bool
    ) -> None:
        """Copy the shared words of `source` to the table, then from the table to `target`.

        If `source` or `target` is None, skip this copy. `is_ended` is False if the call of `source`
        is running.
        """
        members = self._members
        giver = 0 if source is None else members[source].address
        taker = 0 if target is None else members[target].address
        self._compiled(giver, is_ended, taker, data_of(self._table))


def _entries(
    column: int, words: Sequence[int], row: int, ahead: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield the entries for the shared words of a link or connection, see `hand_over`.

    `column` is the index at which the record of the link or connection begins in the words of the
    program. `words` are the indices of the shared words in this record. `row` is the index of the
    first of them in the table. `ahead` has one number for each of `words`.
    """
    for number, (word, more) in enumerate(zip(words, ahead, strict=True)):
        yield column + word, row + number, more


#: Shared words of a link, and of a connection.
_LINK_WORDS = (at.FIRST_SENT, at.CONFIRMED, at.FIRST_RECEIVED, at.CONSUMED, at.ACKED)
_FIRST_SENT, _CONFIRMED = 0, 1
#: Index of the number of slices received in `CompiledProgram.traffic`.
_NRECEIVED = 2
_CONN_WORDS = (at.PARSED, at.FILLED)
_NCONN = len(_CONN_WORDS)
_HAND_OVER = "r2ccl.runtime.compiled.hand_over:make_hand_over"


def preload_hand_over() -> None:
    """Load the compiled hand-over; compile it if this host has not compiled it yet.

    Raises
    ------
    ImportError, TransportError
        As `r2ccl.kernels.native.callable_of`.
    """
    callable_of(_HAND_OVER)


__all__ = ["HeldCalls", "HeldPrograms", "Totals", "preload_hand_over"]

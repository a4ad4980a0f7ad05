"""Start and end of calls in compiled code.

A call runs in compiled code only if no slice of an earlier call is in progress on its links, apart
from eager slices that await their confirmation. Frames of the call may have arrived already. If
the call ends in compiled code, only the counts of the links change, and copies of its unconfirmed
eager slices are kept. Otherwise `r2ccl.runtime.compiled.replay` brings links and lanes to the state
that compiled code has reached.

A call that ended in compiled code may be *held*: the counts stay in its tables, and its connections
stay lent. The same call can then be repeated (`r2ccl.runtime.compiled.repeated`), and other calls
can be held together with it (`r2ccl.runtime.compiled.hold`). `settle` brings the links to the state
after all these calls. It must be called before anything else uses links or transport, so a thread
that becomes the owner of the data loop calls it, unless the thread repeats a call.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from r2ccl.bootstrap.logs import progress
from r2ccl.config import Config
from r2ccl.failover.health.table import Health
from r2ccl.failover.migration.calls import Calls
from r2ccl.failover.migration.links import Consumer, Links
from r2ccl.kernels.arrays import DATA, word_at
from r2ccl.kernels.native import address_of, callable_of, must_compile
from r2ccl.planning.plan_cache import Plan
from r2ccl.runtime.compiled import layout as at
from r2ccl.runtime.compiled.hold import HeldPrograms, Totals, preload_hand_over
from r2ccl.runtime.compiled.link_update import (
    count,
    keep_copies,
    measure,
    totals_after,
    update_links,
)
from r2ccl.runtime.compiled.program import UNUSED, CompiledProgram, LinkPair, is_supported
from r2ccl.runtime.compiled.replay import Replay, restore_bytes
from r2ccl.runtime.executor import HostLanes, LaneRun
from r2ccl.runtime.progress import Progress
from r2ccl.transport.aligned import aligned_memory
from r2ccl.transport.tcp.connection import Connection
from r2ccl.transport.tcp.transport import TcpTransport

_log = logging.getLogger(__name__)

_LOOP = "r2ccl.runtime.compiled.loop:make_loop"
_REPEATED = "r2ccl.runtime.compiled.repeated:make_repeated"
_REPEATED_MESSAGE = "r2ccl.runtime.compiled.repeated_message:make_repeated_message"
#: Maximum number of plans whose programs are kept.
_KEPT = 128
#: Maximum size in bytes of the memory for copies of eager slices and landing places. A call that
#: needs more, such as a large call whose slices are all eager, runs in Python, which keeps fewer
#: copies.
_MOST_ARENA_NBYTES = 64 << 20
#: Minimum size of this memory, so that several small calls can be held together. The system
#: provides only the pages that calls use.
_HELD_NBYTES = 8 << 20


class CompiledCalls:
    """Compiled execution of the calls of one rank's communicators.

    Only the thread that owns the data loop may call the methods, unless a method says otherwise.

    Parameters
    ----------
    links : Links
        Links of this rank; a call updates their counts.
    progress : Progress
    transport : TcpTransport
        Lends its connections to a running call.
    config : Config
    home : int
        CPU assigned to this rank and to no other rank of the host; -1: none.
    """

    def __init__(
        self,
        links: Links,
        progress: Progress,
        transport: TcpTransport,
        config: Config,
        home: int = -1,
    ) -> None:
        self._links = links
        self._progress = progress
        self._transport = transport
        self._config = config
        self._home = home
        self._programs: OrderedDict[int, tuple[Plan, CompiledProgram | None]] = OrderedDict()
        self._loop: Callable[[int], int] = callable_of(_LOOP)
        self._loop_address = address_of(_LOOP)
        #: Loop of a repeated call, see `r2ccl.runtime.compiled.repeated`, and its address.
        self.repeat: Callable[[int, int, int, int, int], int] = callable_of(_REPEATED)
        self.repeated = address_of(_REPEATED)
        #: Address of the loop of a repeated exchange of messages.
        self.repeated_message = address_of(_REPEATED_MESSAGE)
        preload_hand_over()
        #: Memory for landing places and copies of eager slices; all calls use it.
        self._arena = np.empty(0, np.uint8)
        #: Connections that the running call has borrowed from the transport.
        self._conns: list[Connection] = []
        self._running: tuple[CompiledProgram, Calls[Consumer]] | None = None
        #: True if the last call has left frames of other communicators in the buffers, and was not
        #: held.
        self._is_delaying = False
        #: The held calls; None if there are none.
        self.held: HeldPrograms | None = None
        #: Number of events after which a call leaves compiled code; 0: no limit. For tests.
        self.limit = 0
        #: Number of calls that ended in compiled code; number of calls that left compiled code, so
        #: that the data loop finished them.
        self.nfinished = 0
        self.nleft = 0

    def run(
        self,
        plan: Plan,
        lanes: HostLanes,
        calls: Calls[Consumer],
        repeat: Callable[[Callable[[], int]], int],
        on_settled: Callable[[int], None] | None = None,
        post: Callable[[], None] | None = None,
        health: Health | None = None,
    ) -> Sequence[LaneRun] | None:
        """Run a call until it ends or leaves compiled code.

        Call `Links.begin` before this method, except for messages. If the call ends, it may be held
        (attribute ``held``).

        Parameters
        ----------
        plan : Plan
        lanes : HostLanes
            Memory of the call.
        calls : Calls
            Calls of the communicator.
        repeat : callable
            ``repeat(loop)`` calls ``loop()`` until its result is not PAUSED, and returns this
            result. If the data loop has other work meanwhile, ``repeat`` returns PAUSED.
        on_settled : callable, optional
            As for `HeldCalls`. None: the call must not be held, for example because the next call
            may need another plan.
        post : callable, optional
            Required for messages, whose calls have no lanes: if the data loop has to finish the
            call, ``post()`` posts its slices and receives. Before `run`, the caller must have
            called `take_events`, because the events may be messages.
        health : Health, optional
            Health for which the plan was chosen.

        Returns
        -------
        sequence of LaneRun or None
            Lanes that the data loop has to finish; empty if the call has ended, or with `post`.
            None if compiled code cannot run the call; no part of the call has then been done.
        """
        program = self._program_of(plan)
        if program is None:
            return None
        if self._links.unconfirmed or self._links.touched:
            # Work left by another communicator; a replay would take the confirmations as sent.
            self._progress.advance()
        if self._is_delaying:
            self.take_events()
        conns = self._prepare(program, lanes, calls)
        if conns is None and post is None and self.take_events():
            conns = self._prepare(program, lanes, calls)
        if conns is None:
            return None
        self._conns, self._running = conns, (program, calls)
        program.health = None if on_settled is None else health
        result = at.LEFT
        try:
            result = repeat(partial(self._loop, program.address))
        finally:
            # Also after Ctrl-C: a slice that was confirmed early must be read to its end.
            runs = self._end(program, lanes, calls, conns, result, on_settled, post)
            self._conns, self._running = [], None
            if self.held is None:
                program.scratch = None
        return runs

    def take_events(self) -> bool:
        """Handle the transport's pending events and delayed frames; return False if there are none.

        An earlier call that ended in Python, or a message, may have left such events. While events
        are pending, the transport does not lend connections.
        """
        if not self._transport.has_events and not self._is_delaying:
            return False
        self._is_delaying = False
        self._progress.step()
        return True

    @property
    def arena_nbytes(self) -> int:
        """Size in bytes of the memory for landing places and copies of eager slices."""
        return self._arena.nbytes

    # Repeated calls

    def last_op_of(self, calls: Calls[Consumer]) -> int:
        """Return the number of a communicator's last call, including held calls.

        Any thread may call this method.
        """
        held = self.held
        return calls.op if held is None else held.op_of(calls)

    def switch(
        self,
        program: CompiledProgram,
        calls: Calls[Consumer],
        on_settled: Callable[[int], None],
        scratch: npt.NDArray[np.uint8] | None = None,
    ) -> bool:
        """Make `program` the program that `repeat` runs; return False if it cannot be repeated now.

        The calls of `program` must be allowed to be held (see `on_settled` of `run`). `calls` and
        `on_settled` are those of the program's communicator (see `HeldCalls`). `scratch` is the
        program's scratch memory; None: new memory.

        `program` cannot be repeated if no program is held. If `program` itself is not held, it also
        cannot be repeated in four cases: the routes of its links have changed; one of its links
        that no held program uses is not idle (`_is_idle`); a connection cannot be lent (see
        `TcpTransport.lend`); the memory is full.
        """
        held = self.held
        if held is None:
            return False
        if program is held.program:
            return True
        if not held.has(program) and not self._join(held, program, scratch):
            return False
        held.take_over(program, calls, on_settled)
        if self.limit:
            program.view[at.LIMIT] = self.limit
        return True

    def _join(
        self, held: HeldPrograms, program: CompiledProgram, scratch: npt.NDArray[np.uint8] | None
    ) -> bool:
        """Add `program` to the held programs; return False if that is impossible, see `switch`."""
        for end in program.ends:
            route = end.route
            if route is None or end.sender.route != route or end.receiver.route != route:
                return False
            if not held.has_link(end.sender.peer, end.sender.channel) and not _is_idle(end):
                return False
        arena_nbytes = program.nslots * program.arena_nbytes
        own_nbytes = program.scratch_nbytes if scratch is None else 0
        memory = held.reserve(arena_nbytes + own_nbytes)
        missing = [path for path in program.paths if path not in held.conns]
        lent = None if memory is None else self._transport.lend(missing)
        if memory is None or lent is None:
            return False
        held.conns.update(zip(missing, lent, strict=True))
        _attach(program, [held.conns[path] for path in program.paths])
        _reset(program, memory[:arena_nbytes])
        if program.scratch_nbytes:
            _use_scratch(program, memory[arena_nbytes:] if scratch is None else scratch)
        held.add(program)
        return True

    def has_ended(self, result: int) -> bool:
        """Return whether a repetition whose loop has returned `result` has ended and is held.

        If the loop has returned HAS_OTHERS, pass the confirmations on to the other held programs
        and set `HeldPrograms.delayed`; return False if a confirmation is for a link that none of
        these programs uses. `result` must not be CHANGED.
        """
        if result != at.HAS_OTHERS:
            return result == at.FINISHED
        held = self.held
        assert held is not None
        if not held.confirm(held.program.confirmations_for_others()):
            return False
        held.delayed = held.program.delayed()
        return True

    def settle(self) -> None:
        """Bring the links to the state after the held calls and their repetitions; end the hold.

        Do nothing if no call is held. If Ctrl-C interrupts this method, it has to be called again.
        """
        held = self.held
        if held is None:
            return
        program = held.program
        # A repetition that has not ended is here only if an exception prevented `proceed`; the
        # exception ends the communicator.
        self._update_to(held, is_running=program.view[at.REMAINING] != 0)
        self._return_conns(program, [held.conns[path] for path in program.paths])
        self._free(held)

    def proceed(
        self,
        lanes: HostLanes,
        result: int,
        repeat: Callable[[Callable[[], int]], int],
        post: Callable[[], None] | None = None,
    ) -> Sequence[LaneRun]:
        """Continue a repetition of a held call whose loop has returned `result`.

        `result` must be a result other than CHANGED for which `has_ended` has returned False. This
        method ends the hold of all calls. The other parameters and the result are those of `run`.
        """
        held = self.held
        assert held is not None
        program, calls = held.program, held.current.calls
        self._update_to(held, is_running=True)
        if post is None:
            self._links.begin(calls, program.plan.signature, program.plan.pairs)
        held.current.on_settled(program.view[at.OP])
        conns = [held.conns[path] for path in program.paths]
        scratch = program.scratch
        self._free(held)
        program.scratch = scratch
        program.make_first_slot()
        self._conns, self._running = conns, (program, calls)
        ended = at.LEFT
        try:
            if result == at.PAUSED:
                result = repeat(partial(self._loop, program.address))
            ended = result
        finally:
            runs = self._end(program, lanes, calls, conns, ended, None, post)
            self._conns, self._running, program.scratch = [], None, None
        return runs

    def _free(self, held: HeldPrograms) -> None:
        """End the hold; give back the connections that ``held.program`` does not use."""
        for conn in held.others():
            self._transport.take_back(conn)
        for program in held.programs:
            program.scratch = None
        self.held = None

    def _update_to(self, held: HeldPrograms, *, is_running: bool) -> None:
        """Bring links and counts to the state after all held calls that have ended.

        If `is_running`, another call of the current program has begun since. If Ctrl-C interrupts
        this method, call it again.
        """
        current = held.program
        held.spread(is_running=is_running)
        for each in held.all_calls.values():
            each.settle()
        counts = {program: program.view[at.NREPEATS] + 1 for program in held.programs}
        counts[current] -= is_running
        ncalls = sum(counts.values())
        self._links.ncalls = held.ncalls + ncalls - 1
        for program in held.programs:
            calls = self._links.calls[program.view[at.CONTEXT]]
            update_links(self._links, program, calls, is_running=is_running and program is current)
        keep_copies(held.programs, current if is_running else None)
        if held.totals is None:
            # Stored before they are set, so that an interrupted call of this method adds nothing.
            paths = totals_after(self._links, counts)
            held.totals = Totals(self.nfinished + ncalls - 1, paths)
        self.nfinished = held.totals.nfinished
        count(held.programs, held.totals.paths)

    def program_of(self, calls: Calls[Consumer]) -> CompiledProgram | None:
        """Return the program of the communicator's call that compiled code is running, or None.

        The result is also None during a repetition, unless `proceed` continues it. Any thread may
        call this method.
        """
        running = self._running
        return None if running is None or running[1] is not calls else running[0]

    def forget(self) -> None:
        """Drop this object's references to links and plans; no call may follow."""
        self._programs.clear()
        self.held = None

    def is_interrupted(self) -> bool:
        """Return whether the transport must be polled for a reason other than the current calls.

        The current calls are the running or held ones. The other reasons are a ready socket or
        unparsed frames of a connection that they do not use, frames of other communicators that
        the last held call left unread (`HeldPrograms.delayed`), and a probe that is in flight or
        whose result was not polled yet. This method clears an earlier `wake` of the transport,
        which then does not make a later `poll` return.
        """
        if self.held is None:
            return self._transport.has_other_events(self._conns)
        return bool(self.held.delayed) or self._transport.has_other_events(self.held.conns.values())

    def has_other_events(self, plan: Plan) -> bool:
        """Return whether the transport must be polled for a reason other than the next call.

        `plan` is the plan of the next call. The reasons are those of `is_interrupted`, except
        delayed frames.
        """
        program = self._program_of(plan)
        return self._transport.has_other_events([] if program is None else program.conns)

    def _end(
        self,
        program: CompiledProgram,
        lanes: HostLanes,
        calls: Calls[Consumer],
        conns: list[Connection],
        result: int,
        on_settled: Callable[[int], None] | None,
        post: Callable[[], None] | None = None,
    ) -> Sequence[LaneRun]:
        words = program.view
        if result in (at.FINISHED, at.UNSETTLED, at.HAS_OTHERS):
            is_over = result != at.UNSETTLED and not words[at.NFOREIGN]
            if is_over and on_settled is not None and self._may_hold(program, calls):
                self.nfinished += 1
                self.held = HeldPrograms(program, conns, calls, on_settled, self._links.ncalls)
                self.held.delayed = program.delayed()
                return ()
            update_links(self._links, program, calls)
            keep_copies((program,))
            self.nfinished += 1
            count((program,), totals_after(self._links, {program: 1}))
            self._confirm_foreign(program)
            if words[at.IS_MEASURED]:
                measure(self._links, program)
            self._return_conns(program, conns)
            self._is_delaying |= bool(words[at.IS_DELAYING])
            return ()
        self.nleft += 1
        replay = Replay(program, conns, self._links, self._progress)
        runs: Sequence[LaneRun] = ()
        if post is None:
            runs = replay.lanes(lanes, calls)
            replay.run([run.advance for run in runs], calls)
        else:
            replay.run([post], calls)
        replay.restore()
        if words[at.IS_MEASURED]:
            measure(self._links, program)
            replay.measure()
        failed = words[at.FAILED_CONN] if result == at.FAILED else -1
        for number, conn in enumerate(conns):
            error = words[at.ERRNO] if number == failed else None
            self._transport.take_back(conn, error)
        # Not part of the replay, because slices of other calls may be posted in consequence.
        self._confirm_foreign(program)
        return runs

    def _return_conns(self, program: CompiledProgram, conns: Sequence[Connection]) -> None:
        """Give the connections back to the transport after a call that ended in compiled code."""
        start = program.conns_at
        for conn in conns:
            restore_bytes(conn, program.view, start)
            self._transport.take_back(conn)
            start += at.CONN_NWORDS

    def _confirm_foreign(self, program: CompiledProgram) -> None:
        """Pass on the confirmations received for links that the call did not use."""
        for (peer, channel), ack in program.confirmations_for_others():
            self._progress.confirmed(peer, channel, ack)

    def _may_hold(self, program: CompiledProgram, calls: Calls[Consumer]) -> bool:
        """Return whether a call that has ended may be held.

        It may be held if its plan can be repeated and no other work is left.
        """
        links = self._links
        return program.nslots > 1 and not (calls.ahead or links.touched or links.unconfirmed)

    def _program_of(self, plan: Plan) -> CompiledProgram | None:
        key = id(plan)
        found = self._programs.get(key)
        if found is not None and found[0] is plan:
            self._programs.move_to_end(key)
            return found[1]
        program = None
        if plan.layout.peers and is_supported(plan):
            program = CompiledProgram(
                plan,
                self._links,
                self._config,
                loop=self._loop_address,
                wakeup=self._transport.wakeup_number,
                home=self._home,
            )
            if program.arena_nbytes > _MOST_ARENA_NBYTES:
                program = None
        self._programs[key] = (plan, program)
        if len(self._programs) > _KEPT:
            self._programs.popitem(last=False)
        return program

    def _prepare(
        self, program: CompiledProgram, lanes: HostLanes, calls: Calls[Consumer]
    ) -> list[Connection] | None:
        """Fill in the tables of a program; return the connections that its call uses.

        Return None if compiled code cannot run the call: a pair of links has no common route,
        slices of earlier calls are in progress, frames of this call that have arrived do not fit
        its tables, or the transport does not lend the connections (see `TcpTransport.lend`).
        """
        for end in program.ends:
            route = end.route
            if route is None or end.sender.route != route or end.receiver.route != route:
                if not program.bind():
                    return None
                break
        wanted = max(program.nslots * program.arena_nbytes, _HELD_NBYTES)
        if self._arena.nbytes < wanted:
            self._arena = aligned_memory(1 << (wanted - 1).bit_length())
        _reset(program, self._arena)
        if not _fill_tables(program, calls.op):
            return None
        words = program.view
        words[at.SPACES] = word_at(id(lanes.source) + DATA).value
        words[at.SPACES + 1] = word_at(id(lanes.output) + DATA).value
        if self.limit:
            words[at.LIMIT] = self.limit
        conns = self._transport.lend(program.paths)
        if conns is None:
            return None
        if program.scratch_nbytes:
            scratch = lanes.scratch
            if scratch is None:
                scratch = aligned_memory(program.scratch_nbytes)
            _use_scratch(program, scratch)
        if conns != program.conns:
            _attach(program, conns)
        at_conn = program.conns_at
        for conn in conns:
            words[at_conn + at.PARSED], words[at_conn + at.FILLED] = conn.parsed, conn.filled
            at_conn += at.CONN_NWORDS
        return conns


def _reset(program: CompiledProgram, arena: npt.NDArray[np.uint8]) -> None:
    """Set all words of a program to their values before a call whose memory is `arena`."""
    program.words[:] = program.initial
    program.slots.fill(UNUSED)
    program.imported.clear()
    program.arena = arena
    # As `data_of`, without a function call for each array.
    program.view[at.ARENA] = program.view[at.FIRST_SLOT] = word_at(id(arena) + DATA).value


def _use_scratch(program: CompiledProgram, memory: npt.NDArray[np.uint8]) -> None:
    program.scratch = memory
    program.view[at.SPACES + 2] = word_at(id(memory) + DATA).value


def _attach(program: CompiledProgram, conns: list[Connection]) -> None:
    """Make a program use the connections `conns`, one for each of its paths, from now on."""
    program.conns = conns
    start = program.conns_at
    for conn in conns:
        for words in (program.initial, program.words):
            words[start + at.FD] = conn.fd
            words[start + at.BUFFER] = conn.buffer_address
            words[start + at.FRAGMENT_MOST] = conn.fragment_nbytes
            words[start + at.IS_LOOPBACK] = conn.is_loopback
        start += at.CONN_NWORDS


def _fill_tables(program: CompiledProgram, op: int) -> bool:
    """Fill in the tables of a program for call `op` from the state of its links.

    Return False if slices of earlier calls are in progress, or frames of this call that have
    arrived do not fit the tables.
    """
    for end in program.ends:
        if not _fill_pair(program, end, op):
            return False
    words = program.view
    words[at.OP] = op
    program.slots[0] = [op, *(words[end.row + at.FIRST_SENT] for end in program.ends)]
    return True


def _fill_pair(program: CompiledProgram, end: LinkPair, op: int) -> bool:
    """Copy the counts of a pair of links, and the frames of call `op` that have arrived.

    Return False if these frames do not fit, or slices of earlier calls are in progress.
    """
    sender, receiver, words, row = end.sender, end.receiver, program.view, end.row
    if receiver.landings or receiver.posted != receiver.consumed:
        return False
    for item in sender.outstanding:
        if item.path != end.route or not item.is_eager:
            return False
    words[row + at.FIRST_SENT] = sender.posted
    words[row + at.CONFIRMED] = sender.confirmed
    words[row + at.FIRST_RECEIVED] = words[row + at.CONSUMED] = receiver.posted
    words[row + at.ACKED] = receiver.acked
    if sender.clears and not _fill_clears(program, end):
        return False
    return not receiver.arrivals or _fill_arrivals(program, end, op)


def _fill_clears(program: CompiledProgram, end: LinkPair) -> bool:
    """Store the ordinal below which all cleared slices to send have landing places (`CLEARED`).

    Return False if a landing place was announced on another path or for another size, or if a
    cleared slice without a landing place precedes a cleared slice with one.
    """
    sender, is_over = end.sender, False
    for ordinal in range(end.nsends):
        if program.is_eager(end.number, ordinal, is_sent=True):
            continue
        clear = sender.clears.get(sender.posted + ordinal)
        if clear is None:
            is_over = True
            continue
        nbytes = program.slice_nbytes(end.number, ordinal, is_sent=True)
        if is_over or clear[0] != end.route or clear[1] != nbytes:
            return False
        program.view[end.row + at.CLEARED] = ordinal + 1
    return True


def _fill_arrivals(program: CompiledProgram, end: LinkPair, op: int) -> bool:
    """Copy the eager slices of call `op` that have arrived already.

    Return False if a slice whose number belongs to this call is cleared, has another size than the
    call expects, or was sent in a call with another number.
    """
    arrived = program.arrived(end.number)
    for seq, (peer_op, payload) in end.receiver.arrivals.items():
        ordinal = seq - end.receiver.posted
        if ordinal < end.nreceives:
            nbytes = program.slice_nbytes(end.number, ordinal, is_sent=False)
            if payload is None or len(payload) != nbytes or peer_op != op:
                return False
            start = program.places[end.number][ordinal]
            program.arena[start : start + nbytes] = np.frombuffer(payload, np.uint8)
            arrived[ordinal] = -1
            assert end.route is not None
            program.imported.append((end.route, nbytes))
    return True


def _is_idle(end: LinkPair) -> bool:
    """Return whether the two links are idle, except for unconfirmed eager slices.

    These slices must have been sent on the route of the pair.
    """
    sender, receiver = end.sender, end.receiver
    if receiver.landings or receiver.arrivals or receiver.posted != receiver.consumed:
        return False
    return not sender.clears and all(
        each.is_eager and each.path == end.route for each in sender.outstanding
    )


def announce_compilation() -> None:
    """Report that the loop will be compiled, if this host has no compiled version of it yet."""
    if must_compile(_LOOP):
        progress(
            _log, "compiling code for calls over TCP; once for this user on this host, about 8 s"
        )


def preload() -> None:
    """Load the compiled loops and the hand-over; compile any that this host has not compiled yet.

    Raises
    ------
    ImportError, TransportError
        As `r2ccl.kernels.native.callable_of`.
    """
    for loop in (_LOOP, _REPEATED, _REPEATED_MESSAGE):
        callable_of(loop)
    preload_hand_over()


__all__ = ["CompiledCalls", "announce_compilation", "preload"]

"""Tables that all calls of a plan in compiled code use: the class `CompiledProgram`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from r2ccl.config import Config
from r2ccl.failover.health.table import Health
from r2ccl.failover.migration.calls import CONTEXT_SHIFT, context_of, is_of_messages
from r2ccl.failover.migration.link import RecvLink, SendLink
from r2ccl.failover.migration.links import Links
from r2ccl.kernels.arrays import word_at
from r2ccl.kernels.fold import fold_kernel
from r2ccl.planning.lowering import Lane, LinkSteps, Step
from r2ccl.planning.plan_cache import Plan
from r2ccl.runtime.compiled import layout as at
from r2ccl.schedule.ir import OpKind
from r2ccl.transport.aligned import LINE_NBYTES, aligned_memory
from r2ccl.transport.tcp.connection import Connection, buffer_nbytes
from r2ccl.types import USER_OP, CallSignature, PathKey, signed_word

Words = npt.NDArray[np.int64]

#: Kind of the steps whose cleared slices arrive in the arena and are reduced from there.
_PLACED = OpKind.RECV_REDUCE
_REDUCING = frozenset((OpKind.RECV_REDUCE, OpKind.REDUCE))
#: Idle time after which a call leaves compiled code, and time after which compiled code returns to
#: Python, which then handles signals; in nanoseconds.
_SLEEP_NS = 10_000_000
_BUSY_NS = 5_000_000
#: Spare rows of the log per pair, for confirmations of earlier slices. When these rows are used up,
#: the call leaves compiled code. As many rows again are for events that are logged meanwhile.
_SPARE_ROWS = 64
#: Maximum size in bytes of the memory for calls that are repeated. A larger call takes so long that
#: nothing is gained.
_MOST_SLOTS_NBYTES = 4 << 20
#: Small calls may have more unconfirmed eager slices per link than `Config.eager_slots`: up to
#: `_MOST_AHEAD` times as many, as long as the arenas of that many calls fit in `_AHEAD_NBYTES`.
_MOST_AHEAD = 4
_AHEAD_NBYTES = 256 << 10
#: Value of the words of a slot that no call has used: lower than all numbers of calls and slices.
UNUSED = -(1 << 60)


class Pair:
    """The two links of one peer and channel, with the slices of a call on them.

    Attributes
    ----------
    key : (int, int)
        Peer (a rank of the job) and link channel.
    lane : int
        Number of the lane that uses the links.
    sends, receives : list of (int, int)
        For each slice: index of its step in the lane, and index of the slice in the step.
    depth : int
        Maximum number of landing places that the plan allows this rank to announce ahead.
    """

    def __init__(self, key: tuple[int, int], lane: int) -> None:
        self.key = key
        self.lane = lane
        self.sends: list[tuple[int, int]] = []
        self.receives: list[tuple[int, int]] = []
        self.depth = 1 << 30


class LinkPair(NamedTuple):
    """Links of a `Pair`, and the route that they had at the last successful `bind`.

    Attributes
    ----------
    number : int
        Index of the pair in `CompiledProgram.pairs`.
    row : int
        Index of the first word of the pair in `CompiledProgram.words`.
    nsends, nreceives : int
        Number of slices to send and to receive in a call.
    sender : SendLink
    receiver : RecvLink
    route : PathKey or None
        Path that both links used when `CompiledProgram.bind` last returned True; None before.
    """

    number: int
    row: int
    nsends: int
    nreceives: int
    sender: SendLink
    receiver: RecvLink
    route: PathKey | None


class CompiledProgram:
    """Tables of one plan for compiled code, with the state of the running call of this plan.

    Parameters
    ----------
    plan : Plan
        Plan for which `is_supported` returns True.
    links : Links
    config : Config
    loop : int
        Address of the compiled loop, as a C function.
    wakeup : int
        Descriptor that interrupts a call when it becomes readable; borrowed.
    home : int
        CPU assigned to this rank and to no other rank of the host; -1: none.

    Attributes
    ----------
    plan : Plan
    layout : Layout
        Layout of the plan.
    words, initial : ndarray of int64
        State and tables of the running call, and their values before a call.
    address : int
        Address of ``words``, which begins with the state.
    view : memoryview
        View of ``words`` that reads single words three times as fast.
    pairs : list of Pair
        Pairs of links that the plan uses.
    ends : list of LinkPair
        Links of each pair in ``pairs``, in the same order.
    conns_at, pairs_at : int
        Indices in ``words`` of the first connection and of the first pair.
    log : ndarray of int64
        Log of the running call, see `r2ccl.runtime.compiled.layout`.
    polls : ndarray of int64
        The ``struct pollfd`` of each connection, and of `wakeup`.
    paths : tuple of PathKey
        Path of each connection, set by `bind`.
    conns : list of Connection
        Connections of these paths in the last call.
    traffic : dict of PathKey to list of int
        Slices sent, bytes sent, slices received, bytes received in one call, by path.
    imported : list of (PathKey, int)
        Path and size of each slice of the running call that arrived before the call.
    arena_nbytes : int
        Size of the memory for landing places and copies of eager slices that one call needs.
    nslots : int
        Number of calls whose memory is kept, so that the call can be repeated; 1: no repetition.
    arena : ndarray of uint8
        Memory for the running call, followed by the memory for its repetitions; borrowed.
    slots : ndarray of int64, shape (nslots, 1 + number of pairs)
        For the last call that used each slot of ``arena``: its number, and the number of the first
        slice that each pair has sent.
    scratch : ndarray of uint8 or None
        Scratch memory of the running or held call, if it uses any.
    scratch_nbytes : int
        Size of the scratch memory of a collective; 0 if the plan uses none. Messages pass scratch
        memory of their own, whose size may differ.
    health : Health or None
        Health that `CompiledCalls.run` was given when it last ran this program; None if the call
        must not be held. Repetitions do not change it.
    """

    def __init__(
        self, plan: Plan, links: Links, config: Config, *, loop: int, wakeup: int, home: int
    ) -> None:
        self.plan = plan
        self._depth = config.landing_depth
        self._buffer_nbytes = buffer_nbytes(config.inbox_nbytes)
        self.layout = plan.layout
        self.pairs = _pairs_of(plan.layout.lanes)
        self.paths: tuple[PathKey, ...] = ()
        self.conns: list[Connection] = []
        self.traffic: dict[PathKey, list[int]] = {}
        self.imported: list[tuple[PathKey, int]] = []
        self.arena_nbytes = 0
        self.arena: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.scratch: npt.NDArray[np.uint8] | None = None
        self.scratch_nbytes = 0
        if plan.layout.uses_scratch:
            self.scratch_nbytes = plan.layout.count * plan.layout.itemsize
        self.health: Health | None = None
        #: Offsets in the arena, by pair and slice, of copies of sent slices and of received slices;
        #: -1: the slice is not in the arena.
        self.copies: list[list[int]] = []
        self.places: list[list[int]] = []
        call = CallSignature.unpack(plan.signature)
        kernel = plan.kernel
        if not kernel and _reduces(plan):
            kernel = fold_kernel(call.dtype, call.op)
        steps = [step for lane in plan.layout.lanes for step in lane.steps]
        self._offsets = [0, *accumulate(len(lane.steps) for lane in plan.layout.lanes)]
        tables = _Tables()
        head = tables.add(np.zeros(at.STATE_NWORDS, np.int64))
        self.conns_at = tables.add(np.zeros(at.CONN_NWORDS * len(self.pairs), np.int64))
        self.pairs_at = tables.add(np.zeros(at.PAIR_NWORDS * len(self.pairs), np.int64))
        self._steps_at = tables.add(np.zeros(at.STEP_NWORDS * len(steps), np.int64))
        locals_at = tables.add(
            [self._number(i, j) for i, lane in enumerate(plan.layout.lanes) for j in lane.locals]
        )
        rows = sum(6 * len(pair.sends) + 3 * len(pair.receives) for pair in self.pairs)
        spare = _SPARE_ROWS * (1 + len(self.pairs))
        self.log: Words = np.empty((rows + 2 * spare, at.EVENT_NWORDS), np.int64)
        self._rings = np.empty(
            (len(self.pairs), 2, sum(len(p.sends) for p in self.pairs)), np.int64
        )
        stages = aligned_memory(len(self.pairs) * 2 * at.STAGE_NBYTES)
        self._stages = stages.reshape(len(self.pairs), 2, at.STAGE_NBYTES)
        self.polls = np.zeros(len(self.pairs) + 1, np.int64)
        space = tables.add(np.zeros(16, np.int64))
        step_tables = [
            self._step_tables(tables, i, lane) for i, lane in enumerate(plan.layout.lanes)
        ]
        pair_tables = [self._pair_tables(tables, number) for number in range(len(self.pairs))]
        self.words = tables.joined()
        base = int(self.words.ctypes.data)
        self.address = base
        state = self.words[head:]
        state[at.NPAIRS] = len(self.pairs)
        state[at.NLOCALS] = sum(len(lane.locals) for lane in plan.layout.lanes)
        state[at.PAIRS], state[at.CONNS] = base + 8 * self.pairs_at, base + 8 * self.conns_at
        state[at.STEPS], state[at.LOCALS] = base + 8 * self._steps_at, base + 8 * locals_at
        state[at.CONTEXT] = context_of(self.pairs[0].key[1]) if self.pairs else 0
        state[at.REMAINING] = sum(lane.nslices for lane in plan.layout.lanes)
        state[at.KERNEL], state[at.ITEMSIZE] = kernel, plan.layout.itemsize
        window = self._window(config)
        state[at.SLOTS], state[at.CONFIRM_AFTER] = window, config.confirm_after
        state[at.IS_RESILIENT] = config.is_resilient
        state[at.SPIN_NS] = int(config.spin_s * 1e9)
        state[at.SLEEP_NS], state[at.BUSY_NS] = _SLEEP_NS, _BUSY_NS
        state[at.LOG], state[at.MOST_LOGGED] = self.log.ctypes.data, rows + spare
        state[at.IS_MEASURED] = links.balance is not None and plan.is_bandwidth_sample
        state[at.HOME] = home
        state[at.LOOP], state[at.NSTEPS], state[at.TOTAL] = loop, len(steps), state[at.REMAINING]
        is_message = is_of_messages(int(state[at.CONTEXT]))
        state[at.OP_STEP] = not is_message
        scratch_nbytes = 0 if is_message else self.scratch_nbytes
        self.nslots = 1 if state[at.IS_MEASURED] else self._count_slots(window, scratch_nbytes)
        state[at.NSLOTS], state[at.SLOT_NBYTES] = self.nslots, self.arena_nbytes
        self.slots: Words = np.full((self.nslots, 1 + len(self.pairs)), UNUSED, np.int64)
        state[at.SLOT_ROWS] = self.slots.ctypes.data
        state[at.LIMIT] = 1 << 60
        state[at.POLLS] = self.polls.ctypes.data
        state[at.MESSAGE], state[at.TIME] = base + 8 * space, base + 8 * (space + 12)
        state[at.OPERANDS] = base + 8 * (space + 14)
        self.words[space + 2] = base + 8 * (space + 8)  # the parts of the message
        for number, step in enumerate(steps):
            self._fill_step(
                self._steps_at + at.STEP_NWORDS * number, step, step_tables, number, base
            )
        self._arrived_at = [found[-1] for found in pair_tables]
        for number, pair in enumerate(self.pairs):
            self._fill_pair(number, pair, pair_tables[number], base)
        for number in range(len(self.pairs)):
            self._fill_conn(number)
        self.initial = self.words.copy()
        self.view = memoryview(self.words)  # type: ignore[arg-type]
        self._wakeup = wakeup
        self.ends = [
            LinkPair(
                number,
                self.pairs_at + at.PAIR_NWORDS * number,
                len(pair.sends),
                len(pair.receives),
                links.sender(*pair.key),
                links.receiver(*pair.key),
                None,
            )
            for number, pair in enumerate(self.pairs)
        ]

    # The tables

    def _number(self, lane: int, step: int) -> int:
        return self._offsets[lane] + step

    def _step_tables(self, tables: _Tables, index: int, lane: Lane) -> list[tuple[int, int]]:
        """Add two tables for each step of a lane: slice boundaries, and dependencies.

        Return, for each step, the indices of the first words of its two tables.
        """
        first = self._offsets[index]
        return [
            (
                tables.add(step.cuts),
                tables.add(
                    (first + other) << 2 | is_proof << 1 | is_by_slice
                    for other, is_by_slice, is_proof in step.after
                ),
            )
            for step in lane.steps
        ]

    def _fill_step(
        self, place: int, step: Step, found: list[list[tuple[int, int]]], number: int, base: int
    ) -> None:
        cuts, after = [each for lane in found for each in lane][number]
        words = self.words[place : place + at.STEP_NWORDS]
        words[at.KIND], words[at.IS_EAGER], words[at.IS_LEFT] = (
            step.kind,
            step.is_eager,
            step.is_left,
        )
        words[at.SOURCE], words[at.DESTINATION] = step.src_space, step.dst_space
        words[at.SHIFT], words[at.NSLICES] = step.shift, step.nslices
        words[at.CUTS], words[at.AFTER] = base + 8 * cuts, base + 8 * after
        words[at.NAFTER] = len(step.after)

    def _pair_tables(self, tables: _Tables, number: int) -> tuple[int, ...]:
        """Reserve the part of a pair in the arena, and add the pair's tables.

        Return the index of the first word of each table.
        """
        pair = self.pairs[number]
        lane = self.layout.lanes[pair.lane]
        size = self.layout.slice_nbytes
        most = max(1, min(self._depth, pair.depth))
        ring, nplaced = self._reserve(0), 0
        copies = [
            self._reserve(_nbytes(lane.steps[step], k, self.layout.itemsize))
            if lane.steps[step].is_eager
            else -1
            for step, k in pair.sends
        ]
        places = []
        for step, k in pair.receives:
            each = lane.steps[step]
            if each.is_eager:
                places.append(self._reserve(_nbytes(each, k, self.layout.itemsize)))
            elif each.kind == _PLACED:
                if nplaced == 0:
                    ring = self._reserve(most * size)
                places.append(ring + nplaced % most * size)
                nplaced += 1
            else:
                places.append(-1)
        self.copies.append(copies)
        self.places.append(places)
        sends = [self._number(pair.lane, step) << 32 | k for step, k in pair.sends]
        receives = [self._number(pair.lane, step) << 32 | k for step, k in pair.receives]
        empty = np.zeros(len(receives) + 1, np.int64)
        return tuple(map(tables.add, (sends, copies, receives, places, empty)))

    def _reserve(self, nbytes: int) -> int:
        start = self.arena_nbytes
        self.arena_nbytes = start + (nbytes + LINE_NBYTES - 1) // LINE_NBYTES * LINE_NBYTES
        return start

    def _fill_pair(self, number: int, pair: Pair, found: tuple[int, ...], base: int) -> None:
        words = self.pair(number)
        words[at.PAIR_PEER], words[at.CHANNEL] = pair.key
        words[at.SENT_SIGNATURE] = signed_word(self.signature(number, is_sent=True))
        words[at.RECEIVED_SIGNATURE] = signed_word(self.signature(number, is_sent=False))
        words[at.NSENDS], words[at.NRECEIVES] = len(pair.sends), len(pair.receives)
        words[at.NUMBER] = number
        words[at.DEPTH] = max(1, min(self._depth, pair.depth))
        places = [base + 8 * each for each in found]
        (
            words[at.SENDS],
            words[at.COPIES],
            words[at.RECEIVES],
            words[at.PLACES],
            words[at.ARRIVED],
        ) = places

    def _window(self, config: Config) -> int:
        """Return the number of unconfirmed slices of a link at which eager slices must wait."""
        nsmall = _AHEAD_NBYTES // max(1, self.arena_nbytes)
        return max(config.eager_slots, min(_MOST_AHEAD * config.eager_slots, nsmall))

    def _count_slots(self, window: int, scratch_nbytes: int) -> int:
        """Return the number of slots, one per successive call that may have unconfirmed slices.

        Two slots suffice if every pair that sends slices also receives some, because the arriving
        slices confirm the sent ones. Otherwise up to `window` slices of a link may be unconfirmed,
        each possibly of a different call. Return 1 if the call cannot be repeated because it would
        need too much memory. `scratch_nbytes` is the size of the scratch memory of a held call.
        """
        is_answered = all(pair.receives for pair in self.pairs if pair.sends)
        nslots = 2 if is_answered else window + 1
        is_large = nslots * self.arena_nbytes + scratch_nbytes > _MOST_SLOTS_NBYTES
        return 1 if is_large else nslots

    def _fill_conn(self, number: int) -> None:
        words = self.conn(number)
        stages, rings = self._stages[number], self._rings[number]
        words[at.NOW], words[at.NEXT] = stages[0].ctypes.data, stages[1].ctypes.data
        words[at.BULK], words[at.EAGER] = rings[0].ctypes.data, rings[1].ctypes.data
        words[at.BUFFER_NBYTES] = self._buffer_nbytes
        words[at.TARGET_PAIR] = words[at.SENDING_PAIR] = -1
        words[at.IS_READABLE] = 1

    # State of a running call; any thread may read it, and it changes meanwhile

    @property
    def remaining(self) -> int:
        """Number of slices, summed over all steps, that are not done."""
        return self.view[at.REMAINING]

    def waits(self) -> list[tuple[int, int, int]]:
        """Return (peer, channel, number) of the slice that each link must deliver next.

        Links that have delivered all slices of the call are left out.
        """
        found = []
        for pair, link in zip(self.pairs, self.ends, strict=True):
            ordinal = self.view[link.row + at.DELIVERED]
            if ordinal < link.nreceives:
                found.append((*pair.key, self.view[link.row + at.FIRST_RECEIVED] + ordinal))
        return found

    # Calls

    def confirmations_for_others(self) -> list[tuple[tuple[int, int], int]]:
        """Return the confirmations that the call received for links that it does not use.

        Each has the key of the link (peer, channel) and a number; slices with lower numbers are
        confirmed.
        """
        if not self.view[at.NFOREIGN]:
            return []
        rows = self.log[: self.view[at.NLOGGED]].tolist()
        return [
            ((self.paths[conn].peer, channel), ack)
            for kind, conn, channel, _, ack, _, number, *_ in rows
            if kind == at.CONFIRMED_EVENT and number < 0
        ]

    def delayed(self) -> list[tuple[PathKey, int]]:
        """Return path and context id of each frame of another communicator in a receive buffer.

        The frames are those that the last call left there.
        """
        words, found = self.view, []
        if words[at.IS_DELAYING]:
            for number, path in enumerate(self.paths):
                start = self.conns_at + at.CONN_NWORDS * number
                if words[start + at.IS_STALLED] == at.OTHER:
                    frame = words[start + at.BUFFER] + words[start + at.PARSED]
                    found.append((path, word_at(frame + 8).value >> CONTEXT_SHIFT))
        return found

    def bind(self) -> bool:
        """Use the current routes of the links in all later calls; return True.

        Return False, and change nothing, if the two links of a pair have no common route.
        """
        routes = [end.sender.route for end in self.ends if end.sender.route is not None]
        if routes != [end.receiver.route for end in self.ends]:
            return False
        ends = zip(self.ends, routes, strict=True)
        self.ends = [end._replace(route=route) for end, route in ends]
        self.paths = tuple(dict.fromkeys(routes))
        self.initial[at.NCONNS] = len(self.paths)
        self.polls[len(self.paths)] = self._wakeup | 1 << 32
        self.traffic = {path: [0] * 4 for path in self.paths}
        for number, path in enumerate(self.paths):
            self.initial[self.conns_at + at.CONN_NWORDS * number + at.PEER] = path.peer
        for end, route in zip(self.ends, routes, strict=True):
            self.initial[end.row + at.CONN] = self.paths.index(route)
            counts = self.traffic[route]
            for is_sent, count in ((True, end.nsends), (False, end.nreceives)):
                sizes = [
                    self.slice_nbytes(end.number, each, is_sent=is_sent) for each in range(count)
                ]
                counts[0 if is_sent else 2] += count
                counts[1 if is_sent else 3] += sum(sizes)
        return True

    @property
    def slot(self) -> int:
        """Index in ``slots`` of the slot that the newest call uses."""
        return self.view[at.NREPEATS] % self.nslots

    def make_first_slot(self) -> None:
        """Make the slot of the newest call slot 0, as in a call that is not a repetition."""
        slot, words = self.slot, self.view
        self.arena = self.arena[slot * self.arena_nbytes :]
        words[at.FIRST_SLOT], words[at.NREPEATS] = words[at.ARENA], 0
        row = self.slots[slot].copy()
        self.slots.fill(UNUSED)
        self.slots[0] = row

    def last_op(self, *, is_running: bool) -> int:
        """Return the number of the program's last call that has ended.

        0: no call has ended since `HeldPrograms.add` added the program. If `is_running`, a further
        call has begun, which does not count.
        """
        newest = self.view[at.NREPEATS] - is_running
        return 0 if newest < 0 else int(self.slots[newest % self.nslots, 0])

    def pair(self, number: int) -> Words:
        """Return a view of the words of a pair."""
        start = self.pairs_at + at.PAIR_NWORDS * number
        return self.words[start : start + at.PAIR_NWORDS]

    def conn(self, number: int) -> Words:
        """Return a view of the words of a connection."""
        start = self.conns_at + at.CONN_NWORDS * number
        return self.words[start : start + at.CONN_NWORDS]

    def step(self, number: int) -> Words:
        """Return a view of the words of a step."""
        start = self._steps_at + at.STEP_NWORDS * number
        return self.words[start : start + at.STEP_NWORDS]

    def signature(self, number: int, *, is_sent: bool) -> int:
        """Return the packed signature of the slices that a pair sends (`is_sent`) or receives."""
        pairs = self.plan.pairs or {}
        return pairs.get((self.pairs[number].key[0], is_sent), self.plan.signature)

    def copy_of(self, number: int, ordinal: int, slot: int = 0) -> memoryview:
        """Return a copy of the data of a posted eager slice of pair `number`.

        `slot` is the number of the call's slot in ``arena``.
        """
        start = slot * self.arena_nbytes + self.copies[number][ordinal]
        nbytes = self.slice_nbytes(number, ordinal, is_sent=True)
        return memoryview(self.arena[start : start + nbytes].tobytes())

    def ring(self, address: int, start: int, end: int) -> list[tuple[int, int]]:
        """Return (pair, ordinal) of entries `start` to ``end - 1`` of the queue at `address`."""
        index = (address - int(self._rings.ctypes.data)) // 8
        entries = self._rings.reshape(-1)[index + start : index + end].tolist()
        return [(entry >> 32, entry & 0xFFFFFFFF) for entry in entries]

    def arrived(self, number: int) -> Words:
        """Return a view of one word per slice that a pair receives.

        The word is the number of bytes of the slice that have arrived; -1 for a complete slice.
        """
        start = self._arrived_at[number]
        return self.words[start : start + len(self.pairs[number].receives)]

    def slice_nbytes(self, number: int, ordinal: int, *, is_sent: bool) -> int:
        """Return the size in bytes of a slice that a pair sends (`is_sent`) or receives."""
        pair = self.pairs[number]
        step, k = (pair.sends if is_sent else pair.receives)[ordinal]
        return _nbytes(self.layout.lanes[pair.lane].steps[step], k, self.layout.itemsize)

    def is_eager(self, number: int, ordinal: int, *, is_sent: bool) -> bool:
        """Return whether a slice that a pair sends (`is_sent`) or receives is eager."""
        pair = self.pairs[number]
        step, _ = (pair.sends if is_sent else pair.receives)[ordinal]
        return self.layout.lanes[pair.lane].steps[step].is_eager


def is_supported(plan: Plan) -> bool:
    """Return whether compiled code can run a plan.

    If the plan reduces, the reduction must have a compiled kernel. Operations of the user, and AVG,
    which ends with a division, are not supported.
    """
    call = CallSignature.unpack(plan.signature)
    if call.op >= USER_OP or plan.finish is not None:
        return False
    return plan.kernel != 0 or not _reduces(plan) or fold_kernel(call.dtype, call.op) != 0


def _reduces(plan: Plan) -> bool:
    return any(step.kind in _REDUCING for lane in plan.layout.lanes for step in lane.steps)


class _Tables:
    """Builder that joins arrays of words; `add` returns the index at which each array begins."""

    def __init__(self) -> None:
        self._parts: list[Words] = []
        self._size = 0

    def add(self, words: Any) -> int:
        """Add words; return the index that the first one will have in the joined array."""
        start = self._size
        part = words if isinstance(words, np.ndarray) else np.array([*words], np.int64)
        self._parts.append(part)
        self._size += part.size
        return start

    def joined(self) -> Words:
        return np.concatenate(self._parts)


def _pairs_of(lanes: Sequence[Lane]) -> list[Pair]:
    pairs: dict[tuple[int, int], Pair] = {}
    for number, lane in enumerate(lanes):

        def pair_of(way: LinkSteps, number: int = number) -> Pair:
            key = (way.peer, way.channel)
            return pairs.setdefault(key, Pair(key, number))

        for way in lane.sends:
            pair_of(way).sends = _slices(lane, way)
        for way in lane.recvs:
            pair = pair_of(way)
            pair.receives, pair.depth = _slices(lane, way), way.depth
    return list(pairs.values())


def _slices(lane: Lane, way: LinkSteps) -> list[tuple[int, int]]:
    return [(step, k) for step in way.steps for k in range(lane.steps[step].nslices)]


def _nbytes(step: Step, k: int, itemsize: int) -> int:
    return (step.cuts[k + 1] - step.cuts[k]) * itemsize


__all__ = ["UNUSED", "CompiledProgram", "LinkPair", "Pair", "is_supported"]

"""Plans of direct calls over TCP, and the memory of their envelopes.

A short message is one eager slice: its envelope, with the data. A long message uses the slices
that `r2ccl.runtime.messages.driver` uses, but compiled code compares and answers the envelopes
(`r2ccl.runtime.compiled.answer`)::

    sender                           receiver
    REQUEST, an eager slice      ->  compares it with the expected request
    compares it with the         <-  GRANT, an eager slice, and landing places
    expected grant
    slices of data               ->
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from r2ccl.config import ENVELOPE_NBYTES
from r2ccl.errors import InternalError
from r2ccl.kernels.arrays import data_of
from r2ccl.kernels.native import address_of
from r2ccl.planning.lowering import Lane, Layout, LinkSteps, Step
from r2ccl.planning.plan_cache import Plan
from r2ccl.runtime.compiled.layout import (
    EXPECTED_NWORDS,
    INCOMING,
    INCOMING_KIND,
    INCOMING_NBYTES,
    INCOMING_TAG,
    IS_LONG,
    OUTGOING,
    OUTGOING_NBYTES,
)
from r2ccl.runtime.compiled.program import CompiledProgram
from r2ccl.runtime.executor import HostLanes, LandingPool
from r2ccl.runtime.messages.driver import GRANT_NBYTES, MessageDriver
from r2ccl.runtime.messages.matching import ANY, Message
from r2ccl.runtime.messages.outcome import NOTHING, DirectEnd
from r2ccl.schedule.ir import OpKind, Space
from r2ccl.transport.aligned import aligned_memory
from r2ccl.types import EnvelopeKind

Bytes = npt.NDArray[np.uint8]

_ANSWER = "r2ccl.runtime.compiled.answer:make_answer"


class PreparedCall(ABC):
    """Plan of a direct call with given peers and sizes, and the memory of its envelopes.

    Attributes
    ----------
    plan : Plan
    program : CompiledProgram or None
        Program of the last call that `DirectCalls.run` made with this plan, if that call was held
        (`r2ccl.runtime.compiled.call`); otherwise None. Repetitions do not change it.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.program: CompiledProgram | None = None

    @abstractmethod
    def lanes(self, sent: DirectEnd | None, received: DirectEnd | None) -> HostLanes:
        """Return the memory that the steps of the plan use in a call with `sent` and `received`."""

    @abstractmethod
    def pack(
        self, driver: MessageDriver, sent: DirectEnd | None, received: DirectEnd | None
    ) -> None:
        """Write the envelopes that a call sends, and those that it expects, into its memory."""

    @abstractmethod
    def note_sent(self, driver: MessageDriver, sent: DirectEnd) -> None:
        """Count the message that the call has sent."""

    @abstractmethod
    def take(self, driver: MessageDriver, received: DirectEnd) -> Message | None:
        """Count and return the message that the call has received.

        Return None, and count nothing, if the received envelope is not the expected one.
        """

    @abstractmethod
    def note_taken(self, driver: MessageDriver, to: int | None, source: int | None) -> None:
        """Note the bytes that rank `to` and rank `source` reported as taken during repetitions.

        `to` is None if the call does not send, and `source` is None if it does not receive.
        """

    @abstractmethod
    def fill(self, words: memoryview, *, is_sending: bool, is_receiving: bool) -> None:
        """Describe the envelopes of the last call in the words of a repeated exchange.

        For the words, see `r2ccl.runtime.compiled.layout`. Repetitions expect an envelope with the
        tag that the last call received.
        """


class PreparedShort(PreparedCall):
    """`PreparedCall` of at most one short message each way.

    Attributes
    ----------
    received : memoryview
        Envelope that the call receives, with its data.
    """

    def __init__(
        self, driver: MessageDriver, pool: LandingPool, rank: int, ends: Sequence[DirectEnd | None]
    ) -> None:
        steps: list[Step] = []
        arrays: list[Bytes] = []
        ways: list[tuple[LinkSteps, ...]] = []
        kinds = (OpKind.SEND, Space.INPUT), (OpKind.RECV, Space.OUTPUT)
        for end, (kind, space) in zip(ends, kinds, strict=True):
            size = 0 if end is None else ENVELOPE_NBYTES + end.buffer.nbytes
            arrays.append(aligned_memory(size))
            if end is None:
                ways.append(())
                continue
            peer = driver.in_job(end.peer)
            ways.append((LinkSteps(peer, driver.channel, (len(steps),)),))
            steps.append(_step(kind, peer, space, (0, size), is_eager=True))
        lane = Lane(tuple(steps), ways[0], ways[1], (), len(steps), (driver.channel,))
        super().__init__(_plan(driver, rank, lane, max(each.nbytes for each in arrays)))
        self._lanes = HostLanes(pool, *arrays)
        self._sent, self.received = _view_of(arrays[0]), _view_of(arrays[1])

    def lanes(self, sent: DirectEnd | None, received: DirectEnd | None) -> HostLanes:
        """Implement `PreparedCall.lanes`: the memory is always the same."""
        return self._lanes

    def pack(
        self, driver: MessageDriver, sent: DirectEnd | None, received: DirectEnd | None
    ) -> None:
        """Write the envelope that the call sends, followed by a copy of the data.

        Nothing is written for the receive: `take` compares the received envelope.
        """
        if sent is not None:
            buffer = sent.buffer
            given = buffer.dtype_code, sent.peer, sent.tag, buffer.nbytes
            driver.pack(self._sent, EnvelopeKind.MESSAGE, *given)
            self._sent[ENVELOPE_NBYTES:] = buffer.data

    def note_sent(self, driver: MessageDriver, sent: DirectEnd) -> None:
        """Implement `PreparedCall.note_sent`."""
        driver.note_short(sent.peer, sent.buffer.nbytes)

    def take(self, driver: MessageDriver, received: DirectEnd) -> Message | None:
        """Implement `PreparedCall.take`; copy the data, too."""
        dtype = received.buffer.dtype_code
        given = self.received, received.buffer.data, dtype, received.peer, received.tag
        return driver.take_short(*given)

    def note_taken(self, driver: MessageDriver, to: int | None, source: int | None) -> None:
        """Do nothing: compiled code keeps these counts, see `MessageDriver.import_counts`."""

    def fill(self, words: memoryview, *, is_sending: bool, is_receiving: bool) -> None:
        """Implement `PreparedCall.fill`."""
        source, output = self._lanes.source, self._lanes.output
        if is_sending:
            words[OUTGOING] = data_of(source)
            words[OUTGOING_NBYTES] = source.nbytes - ENVELOPE_NBYTES
        if is_receiving:
            words[INCOMING] = data_of(output)
            words[INCOMING_NBYTES] = output.nbytes - ENVELOPE_NBYTES
            envelope = output[:ENVELOPE_NBYTES].view(np.int64)
            words[INCOMING_KIND], words[INCOMING_TAG] = map(int, envelope[:2])


class PreparedLong(PreparedCall):
    """`PreparedCall` of at most one long message each way, whose data uses one channel."""

    def __init__(
        self, driver: MessageDriver, pool: LandingPool, rank: int, ends: Sequence[DirectEnd | None]
    ) -> None:
        self._pool = pool
        self._scratch = np.zeros(_SCRATCH_NBYTES, np.uint8)
        steps: list[Step] = []
        local: list[int] = []
        sends: dict[tuple[int, int], list[int]] = {}
        receives: dict[tuple[int, int], list[int]] = {}
        control, data = driver.channel, driver.data_channel

        def add(step: Step, channel: int) -> int:
            links = sends if step.kind is OpKind.SEND else receives
            if channel >= 0:
                links.setdefault((step.peer, channel), []).append(len(steps))
            steps.append(step)
            return len(steps) - 1

        # Each rank sends its request before it answers that of the peer.
        sent, received = ends
        requested = granted = -1
        if sent is not None:
            to = driver.in_job(sent.peer)
            add(_step(OpKind.SEND, to, Space.SCRATCH, _REQUEST, is_eager=True), control)
        if received is not None:
            source = driver.in_job(received.peer)
            step = _step(OpKind.RECV, source, Space.SCRATCH, _REQUESTED, is_eager=True)
            requested = add(step, control)
        if sent is not None:
            step = _step(OpKind.RECV, to, Space.SCRATCH, _GRANTED, is_eager=True)
            granted = add(step, control)
            # The data must wait until the grant is checked: a short message of the size of a grant
            # may arrive in its place, and landing places may arrive before the grant.
            shift = _GRANTED[0] - _CHECKED[0]
            step = _step(OpKind.REDUCE, -1, Space.SCRATCH, _CHECKED, after=granted, shift=shift)
            checked = add(step, -1)
            local.append(checked)
            cuts = driver.cuts_of(sent.buffer.nbytes)
            add(_step(OpKind.SEND, to, Space.INPUT, cuts, after=checked), data)
        if received is not None:
            shift = _REQUESTED[0] - _GRANT[0]
            step = _step(OpKind.REDUCE, -1, Space.SCRATCH, _GRANT, after=requested, shift=shift)
            answered = add(step, -1)
            local.append(answered)
            step = _step(OpKind.SEND, source, Space.SCRATCH, _GRANT, after=answered, is_eager=True)
            add(step, control)
            cuts = driver.cuts_of(received.buffer.nbytes)
            add(_step(OpKind.RECV, source, Space.OUTPUT, cuts, after=answered), data)
        lane = Lane(
            tuple(steps),
            tuple(LinkSteps(*link, tuple(order)) for link, order in sends.items()),
            tuple(LinkSteps(*link, tuple(order)) for link, order in receives.items()),
            tuple(local),
            sum(step.nslices for step in steps),
            (control, data),
        )
        most = max(end.buffer.nbytes for end in ends if end is not None)
        super().__init__(_plan(driver, rank, lane, most, uses_scratch=True))

    def lanes(self, sent: DirectEnd | None, received: DirectEnd | None) -> HostLanes:
        """Implement `PreparedCall.lanes`: the data is in the arrays of the caller."""
        source, output = (
            NOTHING if end is None else end.buffer.array.view(np.uint8) for end in (sent, received)
        )
        return HostLanes(self._pool, source, output, self._scratch)

    def pack(
        self, driver: MessageDriver, sent: DirectEnd | None, received: DirectEnd | None
    ) -> None:
        """Implement `PreparedCall.pack`."""
        if sent is not None:
            buffer = sent.buffer
            given = buffer.dtype_code, sent.peer, sent.tag, buffer.nbytes
            driver.pack(self._part(_REQUEST), EnvelopeKind.REQUEST, *given)
            self._words(_EXPECTED_GRANT)[:] = driver.expected_grant(buffer.nbytes)
        if received is not None:
            buffer, source, tag = received.buffer, received.peer, received.tag
            driver.pack_grant(self._part(_GRANT), source, buffer.nbytes)
            self._words(_EXPECTED)[:] = driver.expected(
                buffer.dtype_code, 0 if tag == ANY else tag, buffer.nbytes, is_any=tag == ANY
            )

    def note_sent(self, driver: MessageDriver, sent: DirectEnd) -> None:
        """Implement `PreparedCall.note_sent`."""
        driver.note_long(sent.peer, self._part(_GRANTED))

    def take(self, driver: MessageDriver, received: DirectEnd) -> Message | None:
        """Implement `PreparedCall.take`; never return None.

        Compiled code compares the request. If the request is not the expected one, compiled code
        leaves the call, and this method is not called.
        """
        return driver.take_long(self._part(_REQUESTED), received.peer)

    def note_taken(self, driver: MessageDriver, to: int | None, source: int | None) -> None:
        """Implement `PreparedCall.note_taken`."""
        if to is not None:
            driver.note_taken(to, self._part(_GRANTED))
        if source is not None:
            driver.note_taken(source, self._part(_REQUESTED))

    def fill(self, words: memoryview, *, is_sending: bool, is_receiving: bool) -> None:
        """Implement `PreparedCall.fill`."""
        words[IS_LONG] = 1
        if is_sending:
            words[OUTGOING] = data_of(self._scratch) + _REQUEST[0]
        if is_receiving:  # the repetition receives messages with this tag only
            expected = self._words(_EXPECTED)
            expected[1], expected[3] = self._words(_REQUESTED)[1], 0

    def _part(self, place: tuple[int, int]) -> memoryview:
        return _view_of(self._scratch[place[0] : place[1]])

    def _words(self, place: tuple[int, int]) -> npt.NDArray[np.int64]:
        return self._scratch[place[0] : place[1]].view(np.int64)


def make_pool() -> LandingPool:
    """Return a pool for `HostLanes`, which requires one; direct calls do not use the pool."""
    return LandingPool(aligned_memory, 1)


def _step(
    kind: OpKind,
    peer: int,
    space: Space,
    cuts: tuple[int, ...],
    *,
    is_eager: bool = False,
    after: int = -1,
    shift: int = 0,
) -> Step:
    others = () if after < 0 else ((after, False, False),)
    return Step(kind, peer, space, space, cuts, others, is_eager, False, False, shift)


def _plan(
    driver: MessageDriver, rank: int, lane: Lane, most: int, *, uses_scratch: bool = False
) -> Plan:
    """Return the plan of a lane whose largest step has `most` bytes."""
    peers = frozenset(step.peer for step in lane.steps if step.peer >= 0)
    layout = Layout(rank, most, 1, most, (lane,), peers, uses_scratch)
    kernel = address_of(_ANSWER) if lane.locals else 0
    return Plan(driver.calls.signature, layout, _refuse, None, False, kernel=kernel)


def _view_of(array: Bytes) -> memoryview:
    return memoryview(array)  # type: ignore[arg-type]


def _refuse(left: object, right: object, out: object) -> None:
    raise InternalError(
        "the plan of a message asked for a reduction in Python, but messages are not reduced"
    )


def _places(*sizes: int) -> list[tuple[int, int]]:
    """Return the ranges (start, end) of consecutive buffers with these sizes in bytes."""
    ends = np.cumsum((0, *sizes)).tolist()
    return list(pairwise(ends))


#: Places in the scratch memory of a long message: request and its grant; words to compare the grant
#: with, and an unused envelope; request of the peer, words to compare it with, and the grant that
#: answers it. An envelope must follow the words, see `r2ccl.runtime.compiled.answer`.
_REQUEST, _GRANTED, _EXPECTED_GRANT, _CHECKED, _REQUESTED, _EXPECTED, _GRANT = _places(
    ENVELOPE_NBYTES,
    GRANT_NBYTES,
    *(8 * EXPECTED_NWORDS, GRANT_NBYTES),
    ENVELOPE_NBYTES,
    *(8 * EXPECTED_NWORDS, GRANT_NBYTES),
)
_SCRATCH_NBYTES = _GRANT[1]

__all__ = ["PreparedCall", "PreparedLong", "PreparedShort", "make_pool"]

"""Direct calls over TCP: short messages in compiled code.

A direct call is to the links what a collective is: a plan of at most one slice to send and one to
receive, which `r2ccl.runtime.compiled` runs. Each slice is an envelope of
`r2ccl.runtime.messages.driver`, with the data of the message. A received envelope that is not the
expected message, for example because its tag differs, is handled as in Python. If compiled code
leaves the call, its send and receive become requests of the driver, and the events of the call are
passed to these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from r2ccl.errors import InternalError
from r2ccl.planning.lowering import Lane, Layout, LinkSteps, Step
from r2ccl.planning.plan_cache import Plan
from r2ccl.runtime.data_loop import DataLoop
from r2ccl.runtime.executor import HostLanes, LandingPool
from r2ccl.runtime.messages.direct import NOT_RUN, Delayed, DirectEnd, Outcome
from r2ccl.runtime.messages.driver import HEADER_NBYTES, MessageDriver
from r2ccl.runtime.messages.matching import ANY, Message
from r2ccl.runtime.messages.protocol import ReceiveRequest, SendRequest
from r2ccl.runtime.patience import Caller, Patience
from r2ccl.runtime.status import Pending
from r2ccl.schedule.ir import OpKind, Space

Bytes = npt.NDArray[np.uint8]

#: Maximum number of prepared direct calls.
_NPREPARED = 64
#: After so many calls in succession that compiled code has left, further calls with the same ends
#: are not direct, and for how many.
_MOST_LEFT, _NSKIPPED = 3, 100


class _Prepared(NamedTuple):
    """Plan of a direct call, and the memory of the envelopes that it sends and receives."""

    plan: Plan
    lanes: HostLanes
    sent: memoryview
    received: memoryview


class ShortMessages:
    """Direct calls of one communicator over links.

    Only the thread that owns the data loop may call `run`.

    Parameters
    ----------
    loop : DataLoop
        Its calls over TCP run in compiled code.
    driver : MessageDriver
    caller : Caller
        The communicator's `Messenger`.
    pending : callable
        ``pending(sent, received)`` describes a direct call.
    timeout_s : float
        Timeout of a call.
    """

    def __init__(
        self,
        loop: DataLoop,
        driver: MessageDriver,
        caller: Caller,
        pending: Callable[[DirectEnd | None, DirectEnd | None], Pending],
        timeout_s: float,
    ) -> None:
        assert loop.compiled is not None
        self._compiled = loop.compiled
        self._loop = loop
        self._driver = driver
        self._caller = caller
        self._pending = pending
        self._timeout_s = timeout_s
        self._pool = LandingPool(_memory, 1)
        self._prepared: dict[tuple[int, ...], _Prepared] = {}
        #: By key: number of calls in succession that compiled code has left; if negative, number of
        #: calls that will not be direct.
        self._left: dict[tuple[int, ...], int] = {}

    def is_likely(
        self, key: tuple[int, ...], sent: DirectEnd | None, received: DirectEnd | None
    ) -> bool:
        """Return whether to try a direct call; any thread may call this method."""
        for each in (sent, received):
            if each is not None and not self._driver.is_short(each.buffer.nbytes):
                return False
        left = self._left.get(key, 0)
        if left < 0:
            self._left[key] = left + 1
            return False
        return True

    def run(
        self, key: tuple[int, ...], sent: DirectEnd | None, received: DirectEnd | None
    ) -> Outcome:
        """Run a direct call of short messages, see `r2ccl.runtime.messages.direct`.

        Return NOT_RUN if a peer is this rank, `ANY` or not connected; if a message or receive of
        the communicator has to come first; if a receive waits, which could take the message; or if
        the links or connections are in use.
        """
        driver = self._driver
        self._compiled.take_events()  # one of them may be the message to receive
        for each in (sent, received):
            if each is not None and not driver.has_links(each.peer):
                return NOT_RUN
        if sent is not None and not driver.may_send(sent.peer, sent.buffer.nbytes):
            return NOT_RUN
        if received is not None and not driver.may_receive(received.peer, received.tag):
            return NOT_RUN
        call = self._prepare(sent, received)
        if sent is not None:
            buffer = sent.buffer
            driver.pack_short(call.sent, buffer.dtype_code, sent.tag, buffer.nbytes)
            call.sent[HEADER_NBYTES:] = _bytes_of(sent)
        requests: list[Delayed] = []

        def post() -> None:
            requests.append(self._post(sent, received))

        pending = partial(self._pending, sent, received)
        patience = Patience(self._timeout_s, "R2CC_TIMEOUT_S", pending)
        runs = self._compiled.run(
            call.plan,
            call.lanes,
            driver.calls,
            partial(self._loop.run_compiled, self._caller, patience),
            post=post,
        )
        if runs is None:
            return NOT_RUN
        if requests:
            self._note_left(key)
            return requests[0]
        self._left.pop(key, None)
        if sent is not None:
            driver.note_short(sent.peer, sent.buffer.nbytes)
        driver.advance()  # peers may have confirmed earlier envelopes
        return None if received is None else self._received(received, call.received)

    def _received(self, end: DirectEnd, envelope: memoryview) -> Message | Delayed:
        dtype, driver = end.buffer.dtype_code, self._driver
        found = driver.take_short(envelope, _bytes_of(end), dtype, end.peer, end.tag)
        return found if isinstance(found, Message) else Delayed(None, found)

    def _post(self, sent: DirectEnd | None, received: DirectEnd | None) -> Delayed:
        """Make requests of a direct call that compiled code has left."""
        driver = self._driver
        taker: ReceiveRequest | None = None
        request: SendRequest | None = None
        if received is not None:
            dtype, view = received.buffer.dtype_code, _bytes_of(received)
            taker = driver.receive(view, dtype, received.peer, received.tag)
        if sent is not None:
            request = driver.send(_bytes_of(sent), sent.buffer.dtype_code, sent.peer, sent.tag)
        return Delayed(request, taker)

    def _note_left(self, key: tuple[int, ...]) -> None:
        if len(self._left) >= _NPREPARED:
            self._left.clear()
        count = self._left.get(key, 0) + 1
        self._left[key] = count if count < _MOST_LEFT else -_NSKIPPED

    def _prepare(self, sent: DirectEnd | None, received: DirectEnd | None) -> _Prepared:
        key = (*_size_of(sent), *_size_of(received))
        found = self._prepared.get(key)
        if found is None:
            if len(self._prepared) >= _NPREPARED:
                self._prepared.clear()
            found = self._prepared[key] = self._made(sent, received)
        return found

    def _made(self, sent: DirectEnd | None, received: DirectEnd | None) -> _Prepared:
        driver = self._driver
        steps: list[Step] = []
        arrays: list[Bytes] = []
        ways: list[tuple[LinkSteps, ...]] = []
        for end, kind, space in (
            (sent, OpKind.SEND, Space.INPUT),
            (received, OpKind.RECV, Space.OUTPUT),
        ):
            size = 0 if end is None else HEADER_NBYTES + end.buffer.nbytes
            arrays.append(np.empty(size, np.uint8))
            if end is None:
                ways.append(())
                continue
            peer = driver.in_job(end.peer)
            ways.append((LinkSteps(peer, driver.channel, (len(steps),)),))
            steps.append(Step(kind, peer, space, space, (0, size), (), True, False, False))
        lane = Lane(tuple(steps), ways[0], ways[1], (), len(steps), (driver.channel,))
        peers, most = frozenset(step.peer for step in steps), max(each.nbytes for each in arrays)
        layout = Layout(self._loop.rank, most, 1, most, (lane,), peers, False)
        plan = Plan(driver.calls.signature, layout, _refuse, None, False)
        lanes = HostLanes(self._pool, *arrays)
        return _Prepared(plan, lanes, *map(_view_of, arrays))


def _size_of(end: DirectEnd | None) -> tuple[int, int]:
    return (ANY, 0) if end is None else (end.peer, end.buffer.nbytes)


def _bytes_of(end: DirectEnd) -> memoryview:
    return _view_of(end.buffer.array.view(np.uint8))


def _view_of(array: Bytes) -> memoryview:
    return memoryview(array)  # type: ignore[arg-type]


def _memory(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


def _refuse(left: object, right: object, out: object) -> None:
    raise InternalError("a message has been reduced: please report this bug")


__all__ = ["ShortMessages"]

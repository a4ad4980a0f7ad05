"""Direct calls over TCP: blocking sends and receives in compiled code.

A direct call runs like a collective: it has a plan, which `r2ccl.runtime.compiled` executes. It
sends at most one message and receives at most one; see `r2ccl.runtime.messages.prepared` for the
plans. A received envelope that is not the expected one, for example because its tag differs, is
passed to the driver. If compiled code leaves the call, its send and receive become requests of the
driver, and the events of the call are passed to these requests.

A call that ended in compiled code may be held and repeated (`r2ccl.runtime.compiled.call`). After
two successive repetitions with the same peers and tags, a single compiled function makes the next
repetitions (`r2ccl.runtime.compiled.repeated_message`). That function keeps the driver's counts of
messages, which `DirectCalls._on_settled` gives back to the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from r2ccl.kernels.arrays import DATA, data_of
from r2ccl.runtime.compiled.call import CompiledCalls
from r2ccl.runtime.compiled.layout import (
    ARRAYS_FORM,
    IS_ANSWERED,
    MESSAGE_NWORDS,
    UNEXPECTED,
)
from r2ccl.runtime.data_loop import DataLoop
from r2ccl.runtime.messages.driver import MessageDriver
from r2ccl.runtime.messages.matching import ANY, Message
from r2ccl.runtime.messages.outcome import NOT_RUN, NOTHING, Delayed, DirectEnd, NotRun, Outcome
from r2ccl.runtime.messages.prepared import (
    PreparedCall,
    PreparedLong,
    PreparedShort,
    make_pool,
)
from r2ccl.runtime.messages.protocol import ReceiveRequest, SendRequest
from r2ccl.runtime.patience import Caller, Patience
from r2ccl.runtime.staged_call import plain_words
from r2ccl.runtime.status import Pending
from r2ccl.shm.arrays import form_of
from r2ccl.shm.layout import CHANGED
from r2ccl.shm.repeat import Role, repeat_of

#: Maximum number of prepared direct calls. A call that would be one more is not direct; after
#: `_NREFUSED` such calls, all prepared calls are dropped, because the user's code may send messages
#: of other sizes now.
_NPREPARED, _NREFUSED = 32, 1_000
#: A call that leaves compiled code takes longer than a call in Python. It adds `_LEFT_COST` to the
#: cost of its key; a call that ends in compiled code subtracts 1. If the cost exceeds `_MOST_COST`,
#: the next `_NSKIPPED` calls with this key are not direct.
_LEFT_COST, _MOST_COST, _NSKIPPED = 8, 32, 100


class _RepeatedExchange(NamedTuple):
    """Direct call that a single compiled function repeats; see `DirectCalls._remember`.

    Attributes
    ----------
    key : tuple of int
        As for `Way.begin`.
    call : PreparedCall
    to, source : int or None
        Ranks to which the call sends, and from which it receives.
    words : memoryview
        Words of the exchange, see `r2ccl.runtime.compiled.layout`.
    run : callable
        ``run(x, out, ())`` repeats the call and returns its outcome, or NotImplemented if it cannot
        be repeated now.
    """

    key: tuple[int, ...]
    call: PreparedCall
    to: int | None
    source: int | None
    words: memoryview
    run: Callable[[Any, Any, tuple[()]], Any]


class DirectCalls:
    """Direct calls of one communicator over links.

    Only the thread that owns the data loop may call `run`; any thread may call `is_likely`,
    `repeat` and `repeat_exchange`. Calls may be held and repeated, like collectives
    (`r2ccl.runtime.compiled.call`).

    Parameters
    ----------
    loop : DataLoop
        Data loop of the job, whose ``compiled`` is not None.
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
        self._pool = make_pool()
        self._words = plain_words()
        #: Address of these words, for a repetition, which does not check the form of arrays.
        self._words_at = data_of(self._words)
        self._prepared: dict[tuple[int, ...], PreparedCall] = {}
        #: Number of calls that were not prepared since `_prepared` became full.
        self._nrefused = 0
        #: Cost by key; a negative cost -n means that the next n calls are not direct.
        self._costs: dict[tuple[int, ...], int] = {}
        #: Key of the last direct call that `_again` repeated in compiled code.
        self._last_key: tuple[int, ...] = ()
        #: The held call, if a single compiled function repeats it; otherwise None.
        self._exchange: _RepeatedExchange | None = None

    def is_likely(
        self, key: tuple[int, ...], sent: DirectEnd | None, received: DirectEnd | None
    ) -> bool:
        """Return whether to try a direct call; any thread may call this method.

        Return False if a peer is `ANY`. Return False unless either all messages are short, or all
        are long and compiled code can move them. If calls with `key` have left compiled code too
        often, also return False the next `_NSKIPPED` times that this method is called with `key`.
        """
        if any(end is not None and end.peer == ANY for end in (sent, received)):
            return False
        if not (self._are_short(sent, received) or self._are_long(sent, received)):
            return False
        cost = self._costs.get(key, 0)
        if cost < 0:
            self._costs[key] = cost + 1
            return False
        return True

    def run(
        self, key: tuple[int, ...], sent: DirectEnd | None, received: DirectEnd | None
    ) -> Outcome:
        """Run a direct call, see `r2ccl.runtime.messages.outcome`.

        Return NOT_RUN in these cases:

        - A peer is this rank, `ANY` or not connected, or the communicator is being closed.
        - An announced message is unfinished, which compiled code would delay.
        - The call receives, and one of these is true: another receive waits; a message that the
          call would receive has arrived already; an envelope from the sender has arrived and is not
          handled yet.
        - A message of the call is long, and any message, receive or envelope waits.
        - The call sends, and either an earlier envelope to the peer waits, or the peer may not
          buffer a short message of this size.
        - The two links to a peer have no common route.
        - Links or connections are in use, or too many calls are prepared.
        """
        driver = self._driver
        self._compiled.take_events()  # one of them may be the message to receive
        call = self._prepare(sent, received) if self._is_possible(sent, received) else None
        if call is None:
            return NOT_RUN
        self._loop.links.ncalls += 1
        call.pack(driver, sent, received)
        requests: list[Delayed] = []
        runs = self._compiled.run(
            call.plan,
            call.lanes(sent, received),
            driver.calls,
            self._runner(sent, received),
            # While the call is held, waiting envelopes would not be posted.
            None if driver.has_waiting else self._on_settled,
            lambda: requests.append(self._post(sent, received)),
        )
        if runs is None:
            return NOT_RUN
        held = self._compiled.held
        call.program = None if held is None else held.program
        return self._end(key, call, sent, received, requests)

    def _is_possible(self, sent: DirectEnd | None, received: DirectEnd | None) -> bool:
        """Return whether peers, messages and receives permit a direct call; see `run`."""
        driver = self._driver
        if driver.is_closing or driver.has_long:
            return False
        if driver.has_waiting and not self._are_short(sent, received):
            return False
        for each in (sent, received):
            if each is not None and not driver.has_links(each.peer):
                return False
        if sent is not None and not driver.may_send(sent.peer, sent.buffer.nbytes):
            return False
        return received is None or driver.may_receive(received.peer, received.tag)

    def repeat(
        self, key: tuple[int, ...], sent: DirectEnd | None, received: DirectEnd | None
    ) -> Outcome:
        """Repeat the last direct call with these peers and sizes, with new tags and arrays.

        Return the outcome as `run` does. Return NOT_RUN if that call was not held after `run`, or
        cannot be repeated now. Any thread may call this method.
        """
        call = self._prepared.get((*_size_of(sent), *_size_of(received)))
        if call is None or call.program is None:
            return NOT_RUN
        switch = partial(self._switch, call, sent, received)
        again = partial(self._again, key, call)
        found = self._loop.repeat(self._caller, call.program, switch, again, sent, received, None)
        return NOT_RUN if found is NotImplemented else found

    def _switch(
        self,
        call: PreparedCall,
        sent: DirectEnd | None,
        received: DirectEnd | None,
        compiled: CompiledCalls,
    ) -> bool:
        """Select `call` for the next repetition; return False if `call` cannot run now.

        The calling thread must own the data loop.
        """
        program = call.program
        self._on_settled(0)
        # Another thread may have run the call since, and it was not held then.
        if program is None or self._driver.has_waiting or not self._is_possible(sent, received):
            return False
        scratch = call.lanes(sent, received).scratch
        return compiled.switch(program, self._driver.calls, self._on_settled, scratch)

    def repeat_exchange(self, key: tuple[int, ...], x: Any, out: Any) -> Outcome:
        """Repeat the call that `_remember` has prepared, if it has this key; see `Way.repeat`.

        Return NOT_RUN if there is no such call, or it cannot be repeated now. Any thread may call
        this method.
        """
        exchange = self._exchange
        if exchange is None or exchange.key != key:
            return NOT_RUN
        found = exchange.run(x, out, ())
        return NOT_RUN if found is NotImplemented else found

    def _remember(
        self,
        key: tuple[int, ...],
        call: PreparedCall,
        sent: DirectEnd | None,
        received: DirectEnd | None,
        message: Message | None,
    ) -> None:
        """Let a single compiled function repeat the held call from now on.

        Do nothing unless the arrays of the call are C-contiguous NumPy arrays.
        """
        x = NOTHING if sent is None else sent.buffer.owner
        out = NOTHING if received is None else received.buffer.owner
        for array in (x, out):
            if type(array) is not np.ndarray or not array.flags.c_contiguous:
                return
        form = form_of(x, out)
        array = np.zeros(MESSAGE_NWORDS, np.int64)
        words = memoryview(array)  # type: ignore[arg-type]
        words[ARRAYS_FORM] = data_of(form)
        to, source = (None if end is None else end.peer for end in (sent, received))
        call.fill(words, is_sending=to is not None, is_receiving=source is not None)
        words[IS_ANSWERED] = to is not None and to == source
        self._driver.export_counts(words, to, source)

        program = call.program
        assert program is not None
        outcome: Outcome = message

        def proceed(x: Any, out: Any, result: int) -> None:
            nonlocal outcome
            ends = _end_of(sent, x), _end_of(received, out)
            self._on_settled(0)
            if result == UNEXPECTED:
                outcome = self._end(key, call, None, ends[1], [])
            elif self._compiled.has_ended(result):
                outcome = self._end(key, call, *ends, [])
            else:
                outcome = self._continue(key, call, *ends, result)
            self._loop.send_rest()

        def run(x: Any, out: Any, rest: tuple[()]) -> Any:
            # Another thread may have settled the call, and repeated it since.
            is_current = self._exchange is not None and self._exchange.words is words
            if not is_current or repeat(x, out, rest) is NotImplemented:
                return NotImplemented
            return outcome

        def switch(compiled: CompiledCalls) -> bool:
            # The program is held as long as the exchange is the same.
            is_held = self._exchange is not None and self._exchange.words is words
            return is_held and compiled.switch(program, self._driver.calls, self._on_settled)

        sent, received = _without_array(sent), _without_array(received)
        repeat = repeat_of(
            self._compiled.repeated_message,
            program.address,
            data_of(array),
            (),
            uses_input=True,
            output=Role.ARRAY,
            proceed=proceed,
            kept=(call, form, array, x.dtype, out.dtype),
        )
        again = partial(self._loop.repeat, self._caller, program, switch, run)
        self._exchange = _RepeatedExchange(key, call, to, source, words, again)

    def _on_settled(self, op: int) -> None:
        """Give the counts of messages back to the driver, if a compiled function keeps them.

        Called when the held call is settled, and, while it is still held, before the driver uses
        these counts. If Ctrl-C interrupts this method, it is called again.
        """
        exchange = self._exchange
        if exchange is not None:
            self._driver.import_counts(exchange.words, exchange.to, exchange.source)
            exchange.call.note_taken(self._driver, exchange.to, exchange.source)
            self._exchange = None

    def _again(
        self,
        key: tuple[int, ...],
        call: PreparedCall,
        sent: DirectEnd | None,
        received: DirectEnd | None,
        rest: None,
    ) -> Any:
        """Implement `repeat` in the thread that owns the data loop.

        Return NotImplemented, not NOT_RUN, if the call cannot be repeated now.
        """
        self._on_settled(0)
        if sent is not None and not self._driver.has_room(sent.peer, sent.buffer.nbytes):
            return NotImplemented
        assert call.program is not None
        call.pack(self._driver, sent, received)
        lanes = call.lanes(sent, received)
        at = id(lanes.source) + DATA, id(lanes.output) + DATA
        result = self._compiled.repeat(call.program.address, *at, self._words_at, 0)
        if result == CHANGED:
            return NotImplemented
        if not self._compiled.has_ended(result):
            return self._continue(key, call, sent, received, result)
        outcome = self._end(key, call, sent, received, [])
        is_held = self._compiled.held is not None
        if key == self._last_key and is_held and not isinstance(outcome, Delayed | NotRun):
            self._remember(key, call, sent, received, outcome)
        self._last_key = key
        return outcome

    def _continue(
        self,
        key: tuple[int, ...],
        call: PreparedCall,
        sent: DirectEnd | None,
        received: DirectEnd | None,
        result: int,
    ) -> Outcome:
        """Continue a repetition whose loop has returned `result`; return its outcome."""
        requests: list[Delayed] = []
        self._compiled.proceed(
            call.lanes(sent, received),
            result,
            self._runner(sent, received),
            lambda: requests.append(self._post(sent, received)),
        )
        return self._end(key, call, sent, received, requests)

    def _runner(
        self, sent: DirectEnd | None, received: DirectEnd | None
    ) -> Callable[[Callable[[], int]], int]:
        pending = partial(self._pending, sent, received)
        patience = Patience(self._timeout_s, "timeout_s", pending)
        return partial(self._loop.run_compiled, self._caller, patience)

    def _end(
        self,
        key: tuple[int, ...],
        call: PreparedCall,
        sent: DirectEnd | None,
        received: DirectEnd | None,
        requests: list[Delayed],
    ) -> Outcome:
        """Count the messages of a direct call and return its outcome.

        `requests` is empty, or has the requests that continue the call.
        """
        found: Outcome = None
        if requests:
            found = requests[0]
            self._note_left(key)
        else:
            cost = self._costs.get(key, 0)
            if cost:
                self._costs[key] = cost - 1
            if sent is not None:
                call.note_sent(self._driver, sent)
            if received is not None:
                found = self._received(call, received)
        if self._compiled.held is None:
            self._driver.advance()  # peers may have confirmed earlier envelopes
            self._loop.progress.advance()
        return found

    def _received(self, call: PreparedCall, end: DirectEnd) -> Message | Delayed:
        message = call.take(self._driver, end)
        if message is not None and not self._driver.is_report_due(end.peer):
            return message
        self._loop.settle_held()
        if message is not None:
            self._driver.report(end.peer)
            return message
        assert isinstance(call, PreparedShort)
        dtype = end.buffer.dtype_code
        given = call.received, end.buffer.data, dtype, end.peer, end.tag
        return Delayed(None, self._driver.pass_on(*given))

    def _post(self, sent: DirectEnd | None, received: DirectEnd | None) -> Delayed:
        """Return requests that continue a direct call that compiled code has left."""
        driver = self._driver
        taker: ReceiveRequest | None = None
        request: SendRequest | None = None
        if sent is not None:
            x, to, tag = sent
            request = driver.send(x.data, x.dtype_code, to, tag)
        if received is not None:
            out, source, tag = received
            taker = driver.receive(out.data, out.dtype_code, source, tag)
        return Delayed(request, taker)

    def _note_left(self, key: tuple[int, ...]) -> None:
        if len(self._costs) >= 2 * _NPREPARED:
            self._costs.clear()
        cost = self._costs.get(key, 0) + _LEFT_COST
        self._costs[key] = cost if cost <= _MOST_COST else -_NSKIPPED

    def _prepare(self, sent: DirectEnd | None, received: DirectEnd | None) -> PreparedCall | None:
        key = (*_size_of(sent), *_size_of(received))
        found = self._prepared.get(key)
        if found is not None:
            return found
        if len(self._prepared) >= _NPREPARED:
            self._nrefused += 1
            if self._nrefused < _NREFUSED:
                return None
            self._prepared.clear()
            self._nrefused = 0
        given = self._driver, self._pool, self._loop.rank, (sent, received)
        is_short = self._are_short(sent, received)
        found = PreparedShort(*given) if is_short else PreparedLong(*given)
        self._prepared[key] = found
        return found

    def _are_short(self, *ends: DirectEnd | None) -> bool:
        return all(end is None or self._driver.is_short(end.buffer.nbytes) for end in ends)

    def _are_long(self, *ends: DirectEnd | None) -> bool:
        """Return whether all messages are long, and compiled code can move each of them."""
        driver, sizes = self._driver, [end.buffer.nbytes for end in ends if end is not None]
        return not any(map(driver.is_short, sizes)) and all(map(driver.is_undivided, sizes))


def _without_array(end: DirectEnd | None) -> DirectEnd | None:
    """Return a copy of `end` that does not keep the caller's array alive."""
    if end is None:
        return None
    buffer = end.buffer
    return end._replace(
        buffer=msgspec.structs.replace(buffer, array=np.empty(0, buffer.array.dtype), owner=None)
    )


def _end_of(end: DirectEnd | None, array: npt.NDArray[Any]) -> DirectEnd | None:
    """Return `end` with `array`, a contiguous array of the caller, as its buffer."""
    if end is None:
        return None
    flat = array.reshape(-1).view(end.buffer.array.dtype)
    return end._replace(buffer=msgspec.structs.replace(end.buffer, array=flat, owner=array))


def _size_of(end: DirectEnd | None) -> tuple[int, int]:
    return (ANY, -1) if end is None else (end.peer, end.buffer.nbytes)


__all__ = ["DirectCalls"]

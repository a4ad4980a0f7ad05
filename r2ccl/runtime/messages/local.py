"""Messages of one communicator in memory that its ranks share: threads, waits and errors.

One thread at a time moves messages: the thread that has the *turn* (`r2ccl.runtime.turn`). A thread
that waits for a message moves the messages of all threads. While no thread waits, the owner of the
data loop moves messages: at each tick, and more often while frames of this rank wait for room or
the data of announced messages moves.

A *direct call* is a blocking send, receive or both that runs in one call of a compiled function
(`r2ccl.shm.one_message`). It is possible only if, at this rank, no other message of the
communicator is unfinished or waits to be received.

Invariant: after an error, no thread moves messages. The exception is another thread that has the
turn and does not return it in time; a warning is then logged (`LocalMessages._failed`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from r2ccl.clock import monotonic
from r2ccl.errors import ConcurrentCalls, R2cclError
from r2ccl.kernels.arrays import DATA
from r2ccl.runtime.arrays.buffers import Buffer
from r2ccl.runtime.data_loop import DataLoop
from r2ccl.runtime.messages.local_driver import LocalDriver, message_of
from r2ccl.runtime.messages.outcome import (
    NOT_RUN,
    NOTHING,
    Delayed,
    DirectEnd,
    Outcome,
    PreparedMessage,
)
from r2ccl.runtime.patience import Caller, Patience, timed_out
from r2ccl.runtime.turn import Turn
from r2ccl.shm.layout import CHANGED, FINISHED
from r2ccl.shm.message_layout import (
    CALL_DTYPE,
    CALL_RECV_DTYPE,
    CALL_RESULT,
    CALL_SOURCE,
    CALL_TO,
    OPEN,
)

if TYPE_CHECKING:
    from r2ccl.shm.rings import DirectCall, Operand

_log = logging.getLogger(__name__)

#: Interval in seconds at which a thread that waits for its turn wakes the thread that has it.
_LOOK_S = 0.02
#: Duration in seconds of a sleep that lets another thread take its turn.
_GIVE_WAY_S = 50e-6
#: Interval in seconds at which the control thread submits `poll` while `LocalDriver.has_work`.
_REST_S = 0.002
#: Maximum number of prepared direct calls; if there would be more, all are dropped first. And, for
#: each length of key, maximum number of those that compiled code compares.
_NPREPARED, _NRECENT = 64, 8
#: Longest wait in seconds for the end of another thread's turn after an error; a turn lasts some
#: milliseconds.
_LAST_TURN_S = 5.0
#: Number of times that Ctrl-C may interrupt the cleanup of a failed call.
_MOST_INTERRUPTS = 1_000


class LocalEngine(Protocol):
    """Interface through which the messages of a communicator use its engine."""

    @property
    def error(self) -> R2cclError | None:
        """Error that ended the communicator; None while it is in use."""
        ...

    def watch_end(self, act: Callable[[], None]) -> None:
        """Call `act`, in any thread, when the communicator ends; at once if it has ended."""
        ...

    def unwatch_end(self, act: Callable[[], None]) -> None:
        """Undo `watch_end`: stop calling `act` when the communicator ends."""
        ...

    def fail_local(self, error: BaseException) -> None:
        """End the communicator because of `error`."""
        ...


_T = TypeVar("_T")


class LocalMessages:
    """Carrier (`Way`) of the messages of one communicator in shared memory.

    Parameters
    ----------
    caller : Caller
        The communicator's `Messenger`.
    loop : DataLoop
        Data loop of the job.
    driver : LocalDriver
        Exchange of the messages; other objects call it only within `own` or `wait`.
    engine : LocalEngine
        Engine of the same communicator; called with the errors that end the communicator.
    """

    def __init__(
        self, caller: Caller, loop: DataLoop, driver: LocalDriver, engine: LocalEngine
    ) -> None:
        self.driver = driver
        self._caller = caller
        self._loop = loop
        self._engine = engine
        rings = driver.rings
        self._direct = partial(rings.direct, rings.state, rings.table)
        self._turn = Turn()
        #: One entry per thread that waits for its turn.
        self._newcomers: deque[None] = deque()
        #: True if no message was unfinished or unreceived after the last turn of `_in_turn`, and
        #: since then no `poll` has found the turn taken and no direct call was left to requests.
        self._is_quiet = True
        self._has_ended = False
        #: True if the control thread is scheduled to move messages.
        self._is_resting = False
        #: Prepared direct calls by key; and those that compiled code compares, by length of key.
        self._prepared: dict[tuple[int, ...], PreparedMessage] = {}
        self._recent: dict[int, list[PreparedMessage]] = {2: [], 3: [], 4: []}
        loop.pollers.append(self.poll)
        engine.watch_end(self.end)

    #: Direct calls are possible.
    is_direct = True

    @property
    def starter(self) -> LocalMessages:
        """Implement `Way.starter`."""
        return self

    # Turns

    @property
    def is_below(self) -> bool:
        """True in a signal handler that interrupted its thread while the thread had the turn."""
        return self._turn.is_mine

    def _in_turn(self, fn: Callable[[], _T], timeout_s: float | None = None) -> _T | None:
        """Return ``fn()``, called in this thread's turn.

        If `timeout_s` is None, wait for the turn. Otherwise, return None, without calling `fn`, if
        the turn is not free within `timeout_s` seconds.

        Raises
        ------
        ConcurrentCalls
            If `timeout_s` is None, and the caller is a signal handler that interrupted the turn.
        """
        is_mine, turn = False, self._turn
        try:
            if not (self._lock() if timeout_s is None else turn.lock.acquire(timeout=timeout_s)):
                return None
            turn.is_running = is_mine = True
            if turn.is_repeating and not self._await_return(timeout_s):
                return None
            found = fn()
            self._is_quiet = self.driver.is_quiet
            return found
        finally:
            # Ctrl-C raises as a function begins or ends: no other call may come before the release.
            if is_mine:
                turn.is_running = False
            try:  # noqa: SIM105
                turn.lock.release()
            except RuntimeError:  # not acquired
                pass

    def _lock(self) -> bool:
        """Acquire the lock of the turn, which the caller (`_in_turn`) releases; return True."""
        is_below, lock = self.is_below, self._turn.lock
        if lock.acquire(blocking=False):
            if is_below:
                raise ConcurrentCalls(
                    f"rank {self._loop.rank}: a signal handler called r2ccl after it interrupted "
                    "another call of the same thread: set a flag in the handler, and call r2ccl "
                    "later"
                )
            return True
        self._newcomers.append(None)
        try:
            self._wake()
            while not lock.acquire(timeout=_LOOK_S):
                self._wake()
            return True
        finally:
            self._newcomers.pop()

    def _await_return(self, timeout_s: float | None) -> bool:
        """Wait for compiled code to return the turn; return whether it has.

        `timeout_s` is that of `_in_turn`.
        """
        if timeout_s is not None:
            return self._turn.await_return(timeout_s)
        self._wake()
        while not self._turn.await_return(_LOOK_S):
            self._wake()
        return True

    def _wake(self) -> None:
        if not self._has_ended:  # else `end` has woken the thread
            self.driver.rings.wake()

    # The interface `Way`

    def connect_to(self, peer: int) -> None:
        """Do nothing: all ranks share memory."""

    def own(self, fn: Callable[[], Any], *, is_step: bool) -> Any:
        """Call ``fn()`` while no other thread moves messages; return its result.

        If `is_step`, move messages first. An exception, except `ConcurrentCalls`, ends the
        communicator.
        """

        def run() -> Any:
            self._caller.check()
            if is_step and not self._has_ended:
                self.driver.advance(False)
            return fn()

        try:
            found = self._in_turn(run)
        except ConcurrentCalls:
            raise
        except BaseException as exc:
            raise self._failed(exc) from None
        self._rest_later()
        return found

    def wait(self, caller: Caller, is_done: Callable[[], bool], patience: Patience) -> None:
        """Move messages until ``is_done()``; also run the data loop unless another thread does.

        Raises
        ------
        TransportTimeout
            If ``is_done()`` is not true within ``patience.timeout_s``; all communicators of the job
            have ended.
        ConcurrentCalls
            If the caller is a signal handler that interrupted this thread's turn.
        R2cclError
            If the communicator has ended, or ends meanwhile.
        """
        loop = self._loop
        caller.since_s = monotonic()
        deadline = caller.since_s + patience.timeout_s
        caller.waiting = patience
        try:
            while not self._step(is_done):
                if self._engine.error is not None:
                    caller.check()
                loop.poll(caller)
                if self._newcomers or self._has_ended:
                    time.sleep(_GIVE_WAY_S)
                if monotonic() >= deadline:
                    raise timed_out(patience)
        except ConcurrentCalls:
            raise
        except BaseException as exc:
            raise self._failed(exc) from None
        finally:
            caller.waiting = None
        self._rest_later()

    def _step(self, is_done: Callable[[], bool]) -> bool:
        """Return ``is_done()``; if False, move messages once and ask again.

        If nothing can move and no thread waits for its turn, first wait up to some milliseconds.
        """

        def move() -> bool:
            if is_done():
                return True
            if not self._has_ended:
                self.driver.advance(not self._newcomers, is_done)
            return is_done()

        return bool(self._in_turn(move))

    def poll(self) -> None:
        """Move messages once, unless a thread has the turn; called by the data loop's owner.

        If a thread has the turn, direct calls return NOT_RUN until a later turn ends with no
        message unfinished or unreceived.
        """
        if self.is_below:
            self._is_quiet = False  # a direct call looks at the rings of its own peers only
            return

        def move() -> bool:
            if not self._has_ended:
                self.driver.advance(False)
            return True

        if self._in_turn(move, 0.0) is None:
            self._is_quiet = False

    def _rest_later(self) -> None:
        """If `LocalDriver.has_work`, let the control thread submit `poll` in `_REST_S` seconds."""
        if self.driver.has_work and not self._is_resting and not self._has_ended:
            self._is_resting = True
            self._loop.call_later(_REST_S, self._rest)

    def _rest(self) -> None:
        self._is_resting = False
        self._loop.submit(self.poll)
        self._rest_later()

    # Direct calls

    def repeat(self, key: tuple[int, ...], x: Any, out: Any) -> Outcome:
        """Implement `Way.repeat`."""
        found = self._prepared.get(key)
        if found is None or type(x) is not np.ndarray or type(out) is not np.ndarray:
            return NOT_RUN
        if all(each is not found for each in self._recent[len(key)]):
            self._keep(found)
        return self._run(found, x, out)

    def begin(
        self, key: tuple[int, ...], sent: DirectEnd | None, received: DirectEnd | None
    ) -> Outcome:
        """Implement `Way.begin`; keep a call with C-contiguous NumPy arrays for `repeat`.

        A direct call cannot run if another message is unfinished or waits to be received, another
        thread moves messages, or a peer is this rank or `ANY`.
        """
        from r2ccl.shm.rings import DirectCall

        if not self._is_quiet:
            return NOT_RUN
        for each in (sent, received):
            if each is not None and not self.driver.has_ring(each.peer):
                return NOT_RUN
        has_form = all(_is_plain(each.buffer) for each in (sent, received) if each is not None)
        first, second = _operand(sent, has_form), _operand(received, has_form)
        is_short = sent is not None and self.driver.is_short(sent.buffer.nbytes)

        def prepare() -> DirectCall | None:
            if self._has_ended:
                return None
            return DirectCall(
                self.driver.rings, first, second, is_short=is_short, has_form=has_form
            )

        call = self.own(prepare, is_step=True)
        if call is None:
            return NOT_RUN
        made = PreparedMessage(call.words, key, [None], call)
        if has_form:
            if len(self._prepared) >= _NPREPARED:
                self._prepared.clear()
                for recent in self._recent.values():
                    recent.clear()
            self._keep(made)
        x = NOTHING if first is None else first.array
        return self._run(made, x, NOTHING if second is None else second.array)

    def _keep(self, made: PreparedMessage) -> None:
        """Keep a prepared call instead of an earlier one with the same key."""
        self._prepared[made.key] = made
        recent = self._recent[len(made.key)]
        recent[:] = [made, *(each for each in recent if each.key != made.key)][:_NRECENT]

    def _run(self, made: PreparedMessage, x: Any, out: Any) -> Outcome:
        is_mine, turn = False, self._turn
        if turn.is_mine:
            return NOT_RUN
        try:
            try:
                if not turn.lock.acquire(False):
                    return NOT_RUN
                turn.is_running = is_mine = True
                if turn.is_repeating or not self._is_quiet or self._has_ended:
                    return NOT_RUN
                result = self._direct(made.call.at, id(x) + DATA, id(out) + DATA)
                if result == FINISHED:
                    return made.last[0]
                if result == CHANGED:
                    return NOT_RUN
                return self._outcome(made, result, x, out)
            finally:
                if is_mine:
                    turn.is_running = False
                try:  # noqa: SIM105 - as in `_in_turn`
                    turn.lock.release()
                except RuntimeError:  # not acquired
                    pass
        except BaseException as exc:
            raise self._failed(exc) from None

    def _outcome(self, made: PreparedMessage, result: int, x: Any, out: Any) -> Outcome:
        """Return the outcome of a direct call with the result OPEN or FINISHED_OTHER.

        For the results, see `r2ccl.shm.message_layout`.
        """
        call = made.call
        if result == OPEN:
            return self._take_over(call, x, out)
        made.last[0] = message_of(call, int(call.words[CALL_RECV_DTYPE]))
        return made.last[0]

    def compiled(
        self,
        slow: Callable[..., Any],
        names: Sequence[str],
        proceed: Callable[[PreparedMessage, Any, Any], Any],
        failed: Callable[[BaseException], None],
        groups: list[Any],
        conditions: Sequence[tuple[object, str, object]],
    ) -> Callable[..., Any]:
        """Implement `Starter.compiled`."""
        from r2ccl.shm.repeat_message import message_of as compiled_message

        rings = self.driver.rings
        own = [(self, "_is_quiet", True), (self, "_has_ended", False)]
        return compiled_message(
            slow,
            proceed,
            failed,
            self._turn,
            groups,
            [*conditions, *own, (self._turn, "is_running", False)],
            calls=self._recent[{(1, 0): 2, (0, 1): 3, (1, 1): 4}["x" in names, "out" in names]],
            state=rings.state,
            table=rings.table,
            names=names,
        )

    def proceed(self, made: PreparedMessage, x: Any, out: Any) -> Outcome:
        """Implement `Starter.proceed`."""
        try:
            try:
                return self._outcome(made, int(made.words[CALL_RESULT]), x, out)
            finally:
                self._turn.is_repeating = False
                if self._turn.is_awaited:
                    self._turn.wake()
        except BaseException as exc:
            raise self._failed(exc) from None

    def fail(self, error: BaseException) -> None:
        """Implement `Starter.fail`."""
        self._failed(error)

    def _take_over(self, call: DirectCall, x: Any, out: Any) -> Delayed:
        self._is_quiet = False
        words, driver = call.words, self.driver
        received = sent = None
        if words[CALL_SOURCE] >= 0:
            received = driver.take_over_receive(call, _bytes(out), int(words[CALL_RECV_DTYPE]))
        if words[CALL_TO] >= 0:
            sent = driver.take_over_send(call, _bytes(x), int(words[CALL_DTYPE]))
        return Delayed(sent, received)

    # Ends

    def _failed(self, error: BaseException) -> BaseException:
        """End the communicator because of `error`; return `error`, which the call then raises.

        Afterwards no thread reads or writes the memory of a message, unless this method has logged
        a warning. Ctrl-C does not interrupt this method.
        """
        self._has_ended = True
        for _ in range(_MOST_INTERRUPTS):
            try:
                if self._turn.is_repeating and self._turn.is_mine:
                    self._turn.is_repeating = False  # taken by compiled code in this thread
                if not self._forget(_LAST_TURN_S, is_closing=False):
                    _log.warning(
                        "rank %d: a thread still moves messages %g s after an error and may read "
                        "or write the arrays that were passed to send and recv: do not use these "
                        "arrays, and end the process",
                        self._loop.rank, _LAST_TURN_S,
                    )  # fmt: skip
                self._engine.fail_local(error)
                break
            except KeyboardInterrupt:
                _log.debug("rank %d: Ctrl-C while a message ends", self._loop.rank)
        return error

    def _forget(self, timeout_s: float, *, is_closing: bool) -> bool:
        """Drop all messages; see `LocalDriver.forget`.

        Return False, and drop no message, if another thread does not end its turn within
        `timeout_s` seconds.
        """

        def forget() -> bool:
            self.driver.forget(is_closing=is_closing)
            return True

        return bool(self._in_turn(forget, timeout_s))

    def end(self) -> None:
        """Stop moving messages; wake waiting threads, which raise the communicator's error."""
        self._has_ended = True
        self.driver.rings.wake()

    def disown(self) -> None:
        """Stop moving messages, in a forked process."""
        self._has_ended = True
        self.driver.disown()

    def close(self, timeout_s: float) -> bool:
        """Drop all messages and stop moving messages; return True.

        Return False if another thread does not end its turn within `timeout_s` seconds; then call
        again.
        """
        self._has_ended = True
        if not self._forget(timeout_s, is_closing=self._engine.error is None):
            return False
        self._loop.pollers.remove(self.poll)
        self._engine.unwatch_end(self.end)
        return True


def _is_plain(buffer: Buffer) -> bool:
    owner = buffer.owner
    return type(owner) is np.ndarray and bool(owner.flags.c_contiguous)


def _operand(end: DirectEnd | None, is_plain: bool) -> Operand | None:
    from r2ccl.shm.rings import Operand

    if end is None:
        return None
    array = end.buffer.owner if is_plain else end.buffer.array
    return Operand(array, end.peer, end.buffer.dtype_code, end.tag)


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


__all__ = ["LocalEngine", "LocalMessages"]

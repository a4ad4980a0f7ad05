"""Ownership of the data loop by one thread at a time, and waits with a deadline.

All communicators of a job share one data loop (`Progress`). A blocking call over the network owns
the loop while it waits. If another thread begins a call or message meanwhile, the owner *stands
aside*: the new call takes over the loop and advances the calls of all threads. The former owner
sleeps until its own call is done or the loop is free. While no call owns the loop, the control
thread runs the loop at every tick, so that a rank that is busy in user code still handles failures,
replays slices and confirms them. Events of the control thread are functions in an inbox. The
control thread runs them at once if no thread owns the loop; otherwise it wakes the owner, which
runs them. Only the owner checks whether the calls of other threads are done, because the checks
read state that the loop changes. A call in compiled code may leave state of the links in its
tables, so that the call can be repeated (`r2ccl.runtime.compiled.call`); a thread that becomes the
owner for another purpose first brings the links up to date.

Invariants: every wait for other ranks has a deadline. No blocking call ends, by result, error or
Ctrl-C, while a peer could still write into its memory. The only exception is a call whose cleanup
repeated Ctrl-C has prevented: in this case, the control thread ends the job's communicators at its
next tick.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, Protocol, TypeVar

from r2ccl.bootstrap.base import ControlPort
from r2ccl.errors import (
    CommunicatorRevoked,
    ConcurrentCalls,
    InternalError,
    R2cclError,
    TransportError,
)
from r2ccl.failover.context import RankContext
from r2ccl.failover.failover import Failover
from r2ccl.failover.migration.calls import Calls
from r2ccl.failover.migration.links import Consumer, Links
from r2ccl.failover.revocation import Revoke
from r2ccl.runtime.compiled.call import CompiledCalls, announce_compilation
from r2ccl.runtime.compiled.layout import PAUSED
from r2ccl.runtime.compiled.program import CompiledProgram
from r2ccl.runtime.patience import Caller, Patience, timed_out, without_frames
from r2ccl.runtime.progress import Progress
from r2ccl.shm.machine import allowed_cpus, assign_cpu
from r2ccl.shm.repeat import Repeat
from r2ccl.transport.tcp.transport import TcpTransport

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Duration in seconds of a sleep that lets another thread acquire the GIL.
_GIVE_WAY_S = 50e-6
#: Interval in seconds at which the control thread tries to send the data of finished calls that
#: sockets did not accept before.
_REST_S = 0.002
#: Longest time in seconds until all paths are out of use after an error. A transport destroys a
#: queue pair that has not drained after one second.
_SETTLE_S = 2.0
#: Number of times that Ctrl-C may interrupt the cleanup of a failed call.
_MOST_INTERRUPTS = 1_000
#: Time in seconds within which running calls must end after the communicator was closed.
_LAST_CALL_S = 10.0
#: Interval in seconds of timer checks while a call waits; the default suspicion timeout is 25 times
#: as long.
_TICK_S = 0.02
#: Least time in seconds from the start of a wait to its first check of timers.
_FIRST_TICK_S = 0.005
#: Longest duration of `DataLoop.poll`, and its longest wait for one more event, in seconds.
_POLL_S, _EVENT_S = 0.004, 0.0005


class BackgroundControl(ControlPort, Protocol):
    """Interface of the control plane that the data loop uses, in addition to `ControlPort`.

    Attributes
    ----------
    is_busy : bool
        Set by the data loop: True while a call waits in the loop or runs in compiled code.
    """

    is_busy: bool

    def call_soon(self, fn: Callable[[], object]) -> None:
        """Run `fn` in the control thread soon; any thread may call this method."""
        ...

    def call_later(self, delay_s: float, fn: Callable[[], object]) -> None:
        """Run `fn` in the control thread after `delay_s` seconds."""
        ...


class _Follower:
    """Thread that stands aside while another one owns the data loop."""

    __slots__ = ("is_done", "is_over", "thread", "turn")

    def __init__(self, is_done: Callable[[], bool]) -> None:
        #: Called only by the owner of the loop, because it may read state that the loop changes.
        self.is_done = is_done
        self.is_over = False
        self.thread = get_ident()
        #: Set when the thread's wait is over, or the loop may be free.
        self.turn = threading.Event()


class DataLoop:
    """Data loop of one rank of a job; one thread at a time owns it and runs it.

    Parameters
    ----------
    context : RankContext
    control : BackgroundControl
        Control plane of `context`.
    """

    def __init__(self, context: RankContext, control: BackgroundControl) -> None:
        self.rank = context.rank
        self.links = Links(context)
        self.failover = Failover(context, self.links)
        self.progress = Progress(context, self.links, self.failover)
        self.inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        #: Calls and messages of all communicators, and each wait for a message. Any thread adds and
        #: removes its own, so iterate over a copy.
        self.callers: list[Caller] = []
        #: Functions that advance messages in shared memory; the owner of the loop calls them.
        self.pollers: list[Callable[[], None]] = []
        self._config = context.config
        self._transport = context.transport
        self._control = control
        self._clock = context.clock
        self._migration = self.failover.migration
        #: Compiled code for calls over TCP; None if it is not used.
        self.compiled = _compiled_calls(context, self.links, self.progress)
        self._revocation = self.failover.revocation
        #: Re-entrant, because only such a lock can tell whether this thread holds it.
        self.owner = threading.RLock()
        #: One entry per thread that waits for the owner to stand aside.
        self._newcomers: deque[None] = deque()
        self._followers: list[_Follower] = []
        self._sleeping = False
        self._next_tick = 0.0
        #: True if timers are due that the control thread has left to the running call, or to the
        #: next one.
        self.is_tick_due = False
        #: True while the control thread is to send data that finished calls have left.
        self._is_sending_rest = False
        #: True once the communicators have failed and no path is in use any more.
        self.is_settled = False
        #: True once the user knows that the communicators have ended: a call of this rank has
        #: raised an error that ended them or reports their end, or the user has ended them.
        self.is_end_known = False
        #: True once the transport is freed: events of the control thread are dropped.
        self._is_closed = False

    @property
    def error(self) -> R2cclError | None:
        """Error that ended the job's communicators at this rank; None while they are in use."""
        return self._revocation.error

    # Ownership

    def owned(self, fn: Callable[[], _T]) -> _T:
        """Return ``fn()``, which runs while this thread owns the data loop.

        If a call in another thread owns the loop, that call stands aside (see `acquire`).

        Raises
        ------
        ConcurrentCalls
            As `acquire`.
        """

        def run() -> _T:
            self.acquire()
            return fn()

        return self._released_after(run)

    def _owned_if_free(self, fn: Callable[[], _T], timeout_s: float = 0.0) -> _T | None:
        """Return ``fn()``, which runs while this thread owns the data loop.

        Return None, without calling `fn`, if the loop does not become free within `timeout_s`
        seconds. `fn` must call `settle_held` first.
        """
        acquire = partial(self.owner.acquire, timeout_s > 0, timeout_s or -1)
        return self._released_after(lambda: fn() if acquire() else None)

    def _released_after(self, run: Callable[[], _T]) -> _T:
        """Return ``run()``, which may have acquired the loop; release it if this thread owns it."""
        owner = self.owner
        try:
            return run()
        finally:
            # Not in a method of its own, because Ctrl-C could interrupt such a method as it begins,
            # before the release.
            try:
                owner.release()
            except RuntimeError:  # not owned
                pass
            else:
                self.wake_followers()

    def give_way(self) -> None:
        """Sleep briefly if another thread waits for the loop, to let that thread own the loop.

        The caller must not own the loop. Calls that programs make in a loop, such as polls, call
        this method at their end. Otherwise the polling thread would own the data loop nearly all of
        the time, and blocking calls of other threads could not run.
        """
        if self._followers or self._newcomers:
            time.sleep(_GIVE_WAY_S)

    def acquire(self) -> None:
        """Become the owner of the data loop.

        If a call in another thread owns the loop, that call stands aside: it gives up the loop
        until the loop is free or its own wait is over. The caller must release ``owner``
        afterwards, as `owned` does, even if this method raises, because this thread may then own
        the loop.

        Raises
        ------
        ConcurrentCalls
            If this thread owns the loop already: the caller is a signal handler that interrupted a
            call in the loop, or a function of `user_op`.
        """
        if self.owner._is_owned():  # type: ignore[attr-defined]
            # The interrupted call may be a repetition, which must not be settled now.
            self.owner.acquire()
            raise self._concurrent()
        if self._try_to_own():
            return
        self._newcomers.append(None)
        try:
            while True:
                if self._sleeping:
                    self._transport.wake()
                if self._try_to_own(_TICK_S):
                    return
        finally:
            self._newcomers.pop()

    def require_outside(self) -> None:
        """Raise `ConcurrentCalls` if this thread owns the loop already, as `acquire` does.

        Calls that wait for the loop without owning it call this method first.
        """
        if self.owner._is_owned():  # type: ignore[attr-defined]
            raise self._concurrent()

    def _concurrent(self) -> ConcurrentCalls:
        return ConcurrentCalls(
            f"rank {self.rank}: r2ccl was called within another call of the same thread, by a "
            "signal handler or a function of user_op: set a flag there, and call r2ccl later"
        )

    def _try_to_own(self, timeout_s: float = 0.0) -> bool:
        """Wait up to `timeout_s` seconds to become the owner; return whether that succeeded."""
        if not self.owner.acquire(blocking=timeout_s > 0, timeout=timeout_s or -1):
            return False
        self.settle_held()
        return True

    def settle_held(self) -> None:
        """Bring the links up to date with held calls (`CompiledCalls.settle`), as the owner."""
        if self.compiled is not None:
            self.compiled.settle()

    def wake_followers(self) -> None:
        """Wake the threads that stand aside; call this method after releasing the data loop."""
        if self._followers:
            for follower in self._followers.copy():
                follower.turn.set()

    def settle_if_free(self) -> None:
        """Bring the links up to date with held calls, before a report; any thread may call this.

        If a thread owns the loop, leave the links unchanged; the report may then be some
        milliseconds old. Unless the calling thread owns the loop, also serve the inbox (`serve`).
        """
        if self.owner._is_owned():  # type: ignore[attr-defined]
            return
        self._owned_if_free(self.settle_held)
        self.serve()

    def _stand_aside(self, caller: Caller, is_done: Callable[[], bool], deadline: float) -> None:
        """Let another thread own the loop until the loop is free, or this thread's wait is over.

        The wait is over when ``is_done()`` is true, when the communicators have ended, or at
        `deadline`. When this method returns, this thread owns the loop again. If Ctrl-C interrupts
        this method, `give_up` takes the loop back.
        """
        follower = _Follower(is_done)
        was_calling = caller.is_calling
        self._followers.append(follower)
        caller.is_calling = False
        self.owner.release()
        self.wake_followers()
        while self._newcomers or not self._try_to_own():
            follower.turn.wait(_TICK_S)
            follower.turn.clear()
            if follower.is_over or self.error is not None or self._clock() >= deadline:
                self.acquire()
                break
        self._followers.remove(follower)
        caller.is_calling = was_calling

    def _take_back(self) -> None:
        """Become the owner of the loop again, after Ctrl-C in `_stand_aside`."""
        if not self.owner._is_owned():  # type: ignore[attr-defined]
            self.acquire()
        self._followers = [each for each in self._followers if each.thread != get_ident()]

    # Events of the control thread

    def submit(self, fn: Callable[..., None], *args: Any) -> None:
        """Run ``fn(*args)`` here if no thread owns the data loop; otherwise let the owner run it.

        This method does not wait for the owner.
        """
        self.inbox.append((fn, args))
        self.serve()

    def serve(self) -> None:
        """Run the events in the inbox; if a thread owns the data loop, wake it to run them."""
        while self.inbox:
            # A signal handler may run inside of the thread that owns the loop.
            if self.owner._is_owned():  # type: ignore[attr-defined]
                return
            if self._owned_if_free(self._serve_owned) is None:
                if self._sleeping:
                    self._transport.wake()
                return

    def _serve_owned(self) -> bool:
        """Run the events in the inbox, as the owner of the loop; return True.

        If a call could not end properly, end the communicators first. Also end them if an event
        raises an exception. If the transport has been freed, drop the events.
        """
        try:
            self.settle_held()
            if self._is_closed:
                self.inbox.clear()
                return True
            for caller in self.callers.copy():
                if caller.is_calling:
                    caller.is_calling = False
                    self.fail(
                        CommunicatorRevoked(
                            f"rank {self.rank}: a call was interrupted repeatedly, so its "
                            "cleanup did not finish"
                        )
                    )
            self._drain()
            self.progress.advance()
        except R2cclError as exc:
            self.fail(exc)
        except Exception as exc:
            # The event that raised is lost, and a call that depends on it would wait until its
            # timeout.
            self.fail(self._broken(exc))
        return True

    def _drain(self) -> None:
        while self.inbox:
            fn, args = self.inbox.popleft()
            fn(*args)

    def tick(self, now: float) -> None:
        """Call `on_tick` here or in the thread that owns the loop; called by the control thread.

        If a call sleeps or runs in compiled code, only mark the tick as due (``is_tick_due``); a
        call that waits long then runs the timers itself. If the call ends before, the next
        collective or repetition runs them before it enters compiled code. If the tick is still due
        at the next tick, that tick interrupts the call.
        """
        if self._sleeping and not self.is_tick_due:
            self.is_tick_due = True
        else:
            self.submit(self.on_tick, now)

    def on_tick(self, now: float) -> None:
        """Run the data loop and the timers once, for a rank that is not in a call.

        If the rank is in a call, the thread of the call runs this method, which does no harm. After
        the end of the communicators, do not run timers, and run the loop only while paths are in
        use.
        """
        if self._revocation.error is None:
            self.progress.step()
            self._tick(now)
        elif not (self.is_settled or self._migration.is_quiet):
            self.progress.step()

    def _tick(self, now: float) -> None:
        self.is_tick_due = False
        callers = self.callers.copy()
        peers: frozenset[int] = frozenset().union(*(caller.peers for caller in callers))
        self.failover.tick(now, peers)
        for caller in callers:
            caller.tick(now)
        for poll in tuple(self.pollers):
            poll()

    def send_rest(self) -> None:
        """Have the control thread send the data of finished calls that the transport still holds.

        A call may end before its eager slices are sent, because they were copied.
        """
        if not self._is_sending_rest and self._transport.has_unsent():
            self._is_sending_rest = True
            self._control.call_later(_REST_S, self._send_rest)

    def _send_rest(self) -> None:
        # Cleared first, because a call that ends from now on schedules this function again.
        self._is_sending_rest = False
        if any(caller.is_calling for caller in self.callers.copy()):
            return
        self.submit(self._step_once)
        self.send_rest()

    def _step_once(self) -> None:
        if self._revocation.error is None:
            self.progress.step()

    def call_later(self, delay_s: float, fn: Callable[[], object]) -> None:
        """Run `fn` in the control thread after `delay_s` seconds."""
        self._control.call_later(delay_s, fn)

    def poll(self, caller: Caller) -> None:
        """Run the loop until it has no events, for some milliseconds at most.

        A call of `caller` that waits outside of the loop calls this method, so that the loop runs
        meanwhile. If any thread owns the loop, return at once. The owner may be the calling thread
        itself, if a signal handler calls this method.

        Raises
        ------
        R2cclError
            If the loop fails; the communicators have ended.
        """
        if self.owner._is_owned():  # type: ignore[attr-defined]
            return  # in a signal handler that interrupted a call in the loop

        def run() -> bool:
            try:
                self.settle_held()
                if self._is_closed:
                    return True
                for poll in tuple(self.pollers):
                    poll()
                until_s, timeout_s = self._clock() + _POLL_S, 0.0
                while self._clock() < until_s and not self._newcomers and self.error is None:
                    if not self.progress.step(timeout_s):
                        break
                    timeout_s = _EVENT_S
            except BaseException as exc:
                self.give_up(caller, exc)
                raise
            return True

        if self._owned_if_free(run) is None:
            return
        # The inbox is not left to the control thread, which may have ended. An event in it may end
        # the communicators, which the waiting call must see.
        self.serve()

    # Waits

    def wait(
        self,
        caller: Caller,
        is_done: Callable[[], bool],
        patience: Patience,
        *,
        spins: bool = True,
    ) -> None:
        """Run the data loop until ``is_done()``; the calling thread must own it.

        Parameters
        ----------
        caller : Caller
        is_done : callable
        patience : Patience
        spins : bool
            True: look for events for ``R2CC_SPIN_S`` before sleeping. False: sleep at once,
            because the wait is for work of the control thread, which needs the GIL and the core.

        Raises
        ------
        TransportTimeout
            If ``is_done()`` is not true within ``patience.timeout_s``; all communicators have
            ended.
        R2cclError
            If the communicators have ended; no peer can then write into the memory of a call.
        """
        clock, progress = self._clock, self.progress
        caller.since_s = clock()
        deadline = caller.since_s + patience.timeout_s
        # After a pause between calls, timers can wait for the first events of this call.
        self._next_tick = max(self._next_tick, caller.since_s + _FIRST_TICK_S)
        caller.waiting = patience
        self._control.is_busy = True
        idle_since = 0.0
        try:
            while not is_done():
                if self.is_settled:  # the transport may be closed, after Ctrl-C in another call
                    caller.check()
                if self._newcomers:
                    self._stand_aside(caller, is_done, deadline)
                    self._control.is_busy = True
                    continue
                if self.inbox:
                    self._drain()
                    progress.advance()
                    if self._followers:
                        self._notify()
                    continue  # an event may have made is_done() true
                if progress.step():
                    idle_since = 0.0
                    if self._followers:
                        self._notify()
                    if self._revocation.error is None:
                        if self._migration.repairing:
                            # The control thread exchanges the announcements of a migration. A busy
                            # loop would make it wait 5 ms (Python's switch interval) for the GIL.
                            time.sleep(_GIVE_WAY_S)
                        continue
                now = clock()
                if now >= self._next_tick:
                    self._next_tick = now + _TICK_S
                    self._tick(now)
                    if self._followers:
                        self._notify()
                caller.check()
                if now >= deadline:
                    raise timed_out(patience)
                if not idle_since:
                    idle_since = now
                if spins and now - idle_since < self._config.spin_s:
                    os.sched_yield()
                elif progress.is_computing:
                    # No file descriptor reports the end of a kernel, so poll with short sleeps.
                    time.sleep(_GIVE_WAY_S)
                else:
                    self._sleep(min(_TICK_S, deadline - now))
        except BaseException as exc:
            self.give_up(caller, exc)
            raise
        finally:
            caller.waiting = None
            self._control.is_busy = False

    def program_of(self, calls: Calls[Consumer]) -> CompiledProgram | None:
        """Return the program of the call that compiled code runs for a communicator, or None."""
        return None if self.compiled is None else self.compiled.program_of(calls)

    def serve_inbox(self) -> None:
        """Run the events in the inbox; the calling thread must own the loop."""
        self._drain()
        self.progress.advance()

    def run_compiled(self, caller: Caller, patience: Patience, run: Callable[[], int]) -> int:
        """Run a call in compiled code: call ``run()`` until its result is not `PAUSED`.

        Return this result, or `PAUSED` as soon as the loop has other work. The calling thread must
        own the loop.
        """
        assert self.compiled is not None
        caller.since_s = self._clock()
        caller.waiting = patience
        self._control.is_busy = self._sleeping = True
        try:
            # The inbox and the newcomers are checked after the flag is set: a thread that adds to
            # them later sees the flag and wakes the compiled code.
            while not (self.inbox or self._newcomers or self._followers):
                result = run()
                if result != PAUSED or self.compiled.is_interrupted():
                    return result
            return PAUSED
        finally:
            caller.waiting = None
            self._control.is_busy = self._sleeping = False

    def repeat(
        self,
        caller: Caller,
        program: CompiledProgram,
        switch: Callable[[CompiledCalls], bool],
        repeat: Repeat,
        x: Any,
        out: Any,
        rest: Any,
    ) -> Any:
        """Return ``repeat(x, out, rest)``, which repeats the last call of `program`.

        If the last held call belongs to another program, first call ``switch(compiled)``, which
        lets `program` run again or returns False, and must not wait. Return NotImplemented, without
        repeating the call, if no call is held, a thread owns the loop, the loop has other work, or
        ``switch`` returns False. If timers are due, or a held call delays frames of other calls,
        run the timers or handle the frames, and then return NotImplemented. If this method raises
        an exception, the communicators have ended.
        """
        owner, compiled = self.owner, self.compiled
        assert compiled is not None
        if owner._is_owned():  # type: ignore[attr-defined]
            return NotImplemented
        try:
            held = compiled.held if owner.acquire(blocking=False) else None
            if held is None:
                return NotImplemented
            try:
                # As in `run_compiled`, the flag is set before the checks.
                self._control.is_busy = self._sleeping = True
                if self.inbox or self._newcomers or self._followers:
                    return NotImplemented
                if self.is_tick_due:
                    self._tick_between_repetitions(compiled)
                    return NotImplemented
                if held.delayed:
                    if held.delays(program):
                        compiled.settle()
                        self.progress.step()
                        return NotImplemented
                    held.delayed = ()
                if held.program is not program and not switch(compiled):
                    return NotImplemented
                return repeat(x, out, rest)
            except BaseException as exc:
                self.give_up(caller, exc)
                raise
            finally:
                self._control.is_busy = self._sleeping = False
        finally:
            try:  # as in `_released_after`
                owner.release()
            except RuntimeError:  # not owned
                pass
            else:
                self.wake_followers()
            if self.inbox:
                self._control.call_soon(self.serve)

    def _tick_between_repetitions(self, compiled: CompiledCalls) -> None:
        """Bring the links up to date with held calls, then run the timers (`run_due_timers`)."""
        has_others = compiled.is_interrupted()
        compiled.settle()
        self.run_due_timers(has_others=has_others)

    def run_due_timers(self, *, has_others: bool) -> None:
        """Run the timers before a call enters compiled code; called by the owner.

        If the transport has events that do not belong to the call (`has_others`), run the data loop
        first. Otherwise leave the frames of the call unread, because a call whose frames the data
        loop has read can neither be held nor run in compiled code.
        """
        if has_others:
            self.progress.step()
        self._tick(self._clock())

    def _notify(self) -> None:
        """Wake the threads that stand aside and whose wait is over; called by the owner."""
        for follower in self._followers.copy():
            if not follower.is_over and follower.is_done():
                follower.is_over = True
                follower.turn.set()

    def _sleep(self, timeout_s: float) -> None:
        self._sleeping = True
        try:
            # The inbox and the newcomers are checked after the flag is set: a thread that adds to
            # them later sees the flag and wakes the loop.
            if not self.inbox and not self._newcomers:
                self.progress.step(timeout_s)
        finally:
            self._sleeping = False
            if self._followers:
                self._notify()

    # Errors

    def _broken(self, cause: Exception) -> InternalError:
        error = InternalError(
            f"rank {self.rank}: the data loop failed with {cause!r}; the log has the stack trace"
        )
        error.__cause__ = cause
        return error

    def give_up(self, caller: Caller, exc: BaseException) -> None:
        """End the communicators, unless they have ended, because a call of `caller` raises `exc`.

        If the calling thread stood aside when Ctrl-C arrived, take the loop back first. Afterwards
        no peer can write into the call's memory. Further Ctrl-C does not interrupt this method. Set
        `is_end_known` and, if `exc` is an `R2cclError`, ``caller.has_raised``.
        """
        is_sound = isinstance(exc, R2cclError)
        self.is_end_known = True
        for _ in range(_MOST_INTERRUPTS):
            try:
                self._take_back()
                self.settle_held()
                if isinstance(exc, R2cclError):
                    caller.has_raised = True
                    self.fail(exc)
                else:
                    rank = self.rank
                    self.fail(CommunicatorRevoked(f"rank {rank}: interrupted by {exc!r}"))
                self._settle(is_sound)
                return
            except BaseException as again:
                is_sound = False
                _log.debug("rank %d: %r while a call ends", self.rank, again)

    def _settle(self, is_sound: bool) -> None:
        """Fence all paths and run the data loop until none is in use.

        If a path stays in use, close the transport. If `is_sound` is false, close the transport
        immediately after the fences, because events of the transport may have been lost in an
        exception.
        """
        if self.is_settled:
            return
        self.failover.fence_all()
        if not (is_sound and self._comes_to_rest()):
            try:
                self._transport.close()
            except Exception:
                _log.exception(
                    "rank %d: the transport was not freed completely; end the process to free it",
                    self.rank,
                )
        self.is_settled = True
        self.progress.forget()
        if self.compiled is not None:
            self.compiled.forget()

    def _comes_to_rest(self) -> bool:
        clock = self._clock
        give_up_s = clock() + _SETTLE_S
        try:
            while not self._migration.is_quiet:
                if clock() >= give_up_s:
                    _log.error("rank %d: some paths did not drain; all are closed", self.rank)
                    return False
                self.progress.step(_GIVE_WAY_S)
        except Exception:
            _log.exception(
                "rank %d: the data loop failed while paths were taken out of use: please report it",
                self.rank,
            )
            return False
        return True

    def fail(self, exc: R2cclError) -> None:
        """End the communicators, unless they have ended, with `exc`, an error of this rank."""
        if self._revocation.error is not None:
            return
        if isinstance(exc, InternalError):
            _log.error("rank %d: %s", self.rank, exc, exc_info=exc)
        message = Revoke(type(exc).__name__, str(exc), self.rank)
        self._revocation.revoke(message, error=without_frames(exc))

    @property
    def is_closed(self) -> bool:
        """True if the transport is freed; any thread may read it."""
        return self._is_closed

    def close(self) -> None:
        """Free the transport once the running calls, if any, have ended.

        If the calls do not end within `_LAST_CALL_S`, log an error and free nothing.
        """

        def free() -> bool:
            self.settle_held()
            if not self._followers:
                self._is_closed = True
                self._transport.close()
            return self._is_closed

        give_up_s = self._clock() + _LAST_CALL_S
        while self._clock() < give_up_s:
            if self._owned_if_free(free, _TICK_S):
                return
        _log.error(
            "rank %d: a call still runs %g s after the communicator was closed: the "
            "communicator's connections and memory stay in use; end the process to free them",
            self.rank, _LAST_CALL_S,
        )  # fmt: skip


def _compiled_calls(context: RankContext, links: Links, progress: Progress) -> CompiledCalls | None:
    """Return the compiled calls of a rank; None if all calls run in Python.

    Raises
    ------
    TransportError
        If compiled code cannot be used for calls over TCP, and ``R2CC_COMPILED=1`` requires it.
    """
    if context.config.compiled == "0" or not isinstance(context.transport, TcpTransport):
        return None
    try:
        if context.hosts.index(context.hosts[context.rank]) == context.rank:
            announce_compilation()
        return CompiledCalls(links, progress, context.transport, context.config, _home_of(context))
    except (ImportError, OSError, TransportError) as exc:
        if context.config.compiled == "1":
            raise TransportError(
                f"rank {context.rank}: calls over TCP cannot run in compiled code: {exc}; "
                "R2CC_COMPILED=1 requires compiled code: remove this cause (numba must be "
                "installed), or set R2CC_COMPILED=auto"
            ) from exc
        _log.info(
            "rank %d: calls over TCP run in Python, which is slower, because compiled code cannot "
            "be used: %s", context.rank, exc,
        )  # fmt: skip
        return None


def _home_of(context: RankContext) -> int:
    """Return the home CPU of this rank; -1 if it is alone on its host, or there are too few CPUs.

    Each rank of the host gets a different CPU if all of them may run on the same CPUs.
    """
    own = [rank for rank, host in enumerate(context.hosts) if host == context.hosts[context.rank]]
    cpu, nsharers = assign_cpu(own.index(context.rank), [allowed_cpus()] * len(own))
    return cpu if len(own) > 1 and nsharers == 1 else -1


__all__ = ["BackgroundControl", "DataLoop"]

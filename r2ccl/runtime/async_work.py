"""Asynchronous collectives: the worker thread that runs them and the handle of the caller.

A `Worker` is the thread of one communicator that runs tasks in the order of their submission. All
ranks submit their collectives in the same order, so all run the same collective next. A `Work` is
the caller's handle of one collective.

Invariants: every submitted task ends exactly once: it succeeds, fails or is refused. Every wait has
a deadline or ends when the communicator ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from r2ccl.clock import monotonic
from r2ccl.errors import CommunicatorRevoked, InvalidArgument, TransportError, TransportTimeout

#: Result of a collective.
_R = TypeVar("_R")


class Task:
    """Function that a `Worker` runs at most once, and its outcome."""

    __slots__ = ("_ended", "_fn", "error", "is_seen")

    def __init__(self, fn: Callable[[], None]) -> None:
        self._fn = fn
        self._ended = threading.Event()
        #: Exception that the function raised, or with which the task was refused; None if there is
        #: none. Valid once the task has ended.
        self.error: BaseException | None = None
        #: True once the error was raised to a caller.
        self.is_seen = False

    @property
    def has_ended(self) -> bool:
        """True if the task has ended, with or without an error."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait up to `timeout_s` seconds until the task has ended; return whether it has.

        With ``timeout_s=None``, wait without a limit.
        """
        limit_s = None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)
        return self._ended.wait(limit_s)

    def succeed(self) -> None:
        """Raise the error of the ended task, if any, and mark the error as seen."""
        if self.error is not None:
            self.is_seen = True
            raise self.error

    def attempt(self) -> BaseException | None:
        """Run the function; return the exception that it raised, or None."""
        try:
            self._fn()
        except BaseException as exc:
            return exc
        return None

    def end(self, error: BaseException | None) -> None:
        """Mark the task as ended with `error`, and drop the reference to the function."""
        self.error = error
        del self._fn
        self._ended.set()


class Effects(Protocol):
    """Work of a collective on a device; it may still run after the collective's task has ended."""

    def is_done(self) -> bool:
        """Return whether the work is done; called only after the task has ended.

        Raises
        ------
        TransportError
            If the device failed.
        """
        ...

    def synchronize(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds until the work is done; return whether it is.

        Called only after the task has ended.

        Raises
        ------
        R2cclError
            If the work on the device failed.
        """
        ...

    def order(self, stream: Any) -> None:
        """Make all work that is enqueued on `stream` from now on wait for this work.

        Parameters
        ----------
        stream : object or None
            None: the stream on which the collective runs.

        Raises
        ------
        InvalidArgument
            If `stream` is not a stream, or captures a CUDA graph.
        TransportError
            If the device failed.
        """
        ...


class Work(Generic[_R]):
    """Handle of an asynchronous collective, returned by calls with ``async_op=True``.

    The arrays of the call are kept alive until it has finished. The caller may drop the handle
    without waiting: the collective continues, and an error ends the communicator in any case.
    """

    def __init__(
        self,
        task: Task,
        result: _R,
        timeout_s: float,
        effects: Effects | None = None,
        *,
        convert: Callable[[Any], _R] | None = None,
    ) -> None:
        self._task = task
        self._result = result
        self._timeout_s = timeout_s
        self._effects = effects
        #: Converts `_result` to what the caller gets, once the task has ended; None if the caller
        #: gets `_result` itself.
        self._convert = None if convert is None else partial(convert, result)

    def is_done(self) -> bool:
        """Return, without blocking, whether the collective has finished or failed.

        Raises
        ------
        TransportError
            If the device of the call's arrays failed.
        """
        if not self._task.has_ended:
            return False
        return self._task.error is not None or self._effects is None or self._effects.is_done()

    def wait(self, timeout_s: float | None = None) -> _R:
        """Block the host until the collective has finished; return its result.

        Parameters
        ----------
        timeout_s : float, optional
            Longest wait, in seconds. Default: the timeout of the collective itself
            (``R2CC_TIMEOUT_S``) plus 10 s.

        Returns
        -------
        object
            Result of the blocking call with the same arguments.

        Raises
        ------
        TransportTimeout
            If the collective has not finished after `timeout_s`. It continues: call `wait` again.
        R2cclError
            If the collective failed: the error that the blocking call would raise.
        """
        limit_s = self._timeout_s + _GRACE_S if timeout_s is None else timeout_s
        until_s = monotonic() + limit_s
        is_over = self._task.wait(limit_s)
        if is_over:
            self._task.succeed()
        if is_over and self._effects is not None:
            is_over = self._effects.synchronize(max(0.0, until_s - monotonic()))
        if not is_over:
            raise TransportTimeout(
                f"the collective has not finished after {limit_s:g} s and continues: wait again, "
                "or call the communicator's pending() to see which ranks it waits for",
                status="TIMEOUT",
            )
        # Threads that wait at the same time may each convert; their results share memory.
        if (convert := self._convert) is not None:
            self._result = convert()
            self._convert = None
        return self._result

    def order(self, stream: Any = None) -> _R:
        """Make a stream wait for the result, without blocking the host; return the result.

        Parameters
        ----------
        stream : optional
            A stream as for the collectives. Default: the stream on which the collective runs. Work
            enqueued on the stream from now on sees the result.

        Raises
        ------
        InvalidArgument
            If the arrays of the call are in host memory (call `wait` instead), or `stream` is not a
            stream or captures a CUDA graph.
        TransportError
            If the device failed.
        """
        if self._effects is None:
            raise InvalidArgument(
                "the arrays are in host memory, which streams do not apply to: call wait()"
            )
        self._effects.order(stream)
        return self._result


class Worker:
    """Thread that runs tasks in the order of their submission; starts with the first task.

    Parameters
    ----------
    name : str
        Name of the thread.
    turn : context manager
        Entered while a task runs.
    on_error : callable
        Called in the thread with the exception of a task that failed, before the task ends.
    """

    def __init__(
        self,
        name: str,
        turn: AbstractContextManager[object],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._name = name
        self._turn = turn
        self._on_error = on_error
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        #: True while no task is queued or running.
        self.is_idle = True
        #: First task that failed; `unseen` clears it.
        self.failed: Task | None = None

    def submit(self, fn: Callable[[], None]) -> Task:
        """Queue ``fn()``, which the thread runs after all earlier tasks; return its task.

        Raises
        ------
        CommunicatorRevoked, TransportError
            As `enqueue`.
        """
        task = Task(fn)
        self.enqueue(task)
        return task

    def enqueue(self, task: Task) -> None:
        """Queue `task`.

        If an exception interrupts this method, such as Ctrl-C, the caller must call `settle`.

        Raises
        ------
        CommunicatorRevoked
            If the worker is closed.
        TransportError
            If this process cannot start another thread; the task is not queued.
        """
        with self._changed:
            if self._is_closed:
                raise CommunicatorRevoked(f"{self._name}: the communicator was closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as exc:
                    self._thread = None
                    raise TransportError(
                        f"{self._name}: no thread can be started for asynchronous calls ({exc}): "
                        "end other threads, or raise the limit of processes (ulimit -u)",
                        status="NO_THREAD",
                    ) from exc
            self._tasks.append(task)
            self.is_idle = False
            self._changed.notify_all()

    def settle(self, task: Task) -> None:
        """Wait while `task` is queued or running; Ctrl-C does not end the wait."""
        while task in self._tasks and not task.has_ended:
            try:
                task.wait(_LOOK_S)
            except KeyboardInterrupt:
                continue

    def unseen(self) -> BaseException | None:
        """Return the error of the first task that failed since the last call of this method.

        Mark the error as seen. Return None if no task failed, or if a caller has seen the error.
        """
        failed, self.failed = self.failed, None
        if failed is None or failed.is_seen:
            return None
        failed.is_seen = True
        return failed.error

    def drain(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds until all tasks have ended; return whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Refuse new tasks and all queued tasks but the first; wait for the thread to end.

        The first task is running, or runs next.

        Parameters
        ----------
        timeout_s : float
            Longest wait, in seconds.

        Returns
        -------
        bool
            True if the thread has ended or was never started.
        """
        with self._changed:
            self._is_closed = True
            refused = list(self._tasks)[1:]
            for task in refused:
                self._tasks.remove(task)
            self._changed.notify_all()
        for task in refused:
            task.end(
                CommunicatorRevoked(
                    f"{self._name}: the communicator was closed before this collective began"
                )
            )
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._is_closed)
                if not self._tasks:
                    return
                task = self._tasks[0]
            with self._turn:
                error = task.attempt()
                if error is not None:
                    self._on_error(error)
            with self._changed:
                self._tasks.popleft()
                self.is_idle = not self._tasks
                task.end(error)
                if error is not None and self.failed is None:
                    self.failed = task
                self._changed.notify_all()


#: Interval in seconds at which `Worker.settle` checks that its task is still queued.
_LOOK_S = 0.1
#: Time in seconds that `Work.wait` allows, after the timeout of a collective, for its task to end.
_GRACE_S = 10.0

__all__ = ["Effects", "Task", "Work", "Worker"]

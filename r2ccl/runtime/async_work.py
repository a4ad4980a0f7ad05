"""Work: collectives that go on while their caller does something else.

A `Worker` is one thread of one communicator, which does what it is given in the order it was given:
all ranks call in the same order, so all do the same next. `Work` is a caller's handle of one
collective.

Sees neither schedules nor devices. Invariants: what was submitted is done, failed, or refused,
once; every wait has a deadline or ends with the communicator.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from r2ccl.clock import monotonic
from r2ccl.errors import CommunicatorRevoked, InvalidArgument, TransportTimeout


class Task:
    """Something a `Worker` does once."""

    __slots__ = ("_ended", "_fn", "error", "is_seen")

    def __init__(self, fn: Callable[[], None]) -> None:
        self._fn = fn
        self._ended = threading.Event()
        #: What ended it early; read once it has ended.
        self.error: BaseException | None = None
        #: Whether somebody was told of the error.
        self.is_seen = False

    @property
    def has_ended(self) -> bool:
        """Whether it is over, well or not."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is over; whether it is."""
        return self._ended.wait(timeout_s)

    def succeed(self) -> None:
        """Raise what ended it early, if anything did; it has ended."""
        if self.error is not None:
            self.is_seen = True
            raise self.error

    def attempt(self) -> BaseException | None:
        """Do it; return what ended it early."""
        try:
            self._fn()
        except BaseException as exc:
            return exc
        return None

    def end(self, error: BaseException | None) -> None:
        """Have it be over; what it holds is the caller's again."""
        self.error = error
        del self._fn
        self._ended.set()


class Effects(Protocol):
    """What a collective does to memory that only a device can tell about."""

    def is_done(self) -> bool:
        """Whether the device is done; True at most if the task has ended."""
        ...

    def synchronize(self, timeout_s: float) -> bool:
        """Wait for the device; whether it is done."""
        ...

    def order(self, stream: Any) -> None:
        """Have what `stream` is given from now on wait for them."""
        ...


class Work:
    """A collective under way, as ``async_op=True`` returns it.

    Keeps the arrays of the call alive. Nothing needs to be done with it: the collective goes on,
    and an error ends the communicator whether anybody waits or not.
    """

    def __init__(
        self, task: Task, result: Any, timeout_s: float, effects: Effects | None = None
    ) -> None:
        self._task = task
        self._result = result
        self._timeout_s = timeout_s
        self._effects = effects

    def is_done(self) -> bool:
        """Whether the result is there, or an error is; at once."""
        if not self._task.has_ended:
            return False
        return self._task.error is not None or self._effects is None or self._effects.is_done()

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait, on the host, until the collective is over; return its result.

        Parameters
        ----------
        timeout_s : float, optional
            Default: ``R2CC_TIMEOUT_S``, which the collective itself keeps as well.

        Raises
        ------
        TransportTimeout
            It is not over after `timeout_s`. It goes on: wait again.
        R2cclError
            What ended it; as the blocking call.
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
                f"the collective is not over after {limit_s:g} s; it goes on: wait again, or call "
                "the communicator's pending() to see what it waits for",
                status="TIMEOUT",
            )
        return self._result

    def order(self, stream: Any = None) -> Any:
        """Have a stream wait for the result, the host not; return the result.

        Parameters
        ----------
        stream : optional
            As of the collectives; default: the current one of the array's library. What the
            stream is given from now on sees the result.

        Raises
        ------
        InvalidArgument
            The call was on arrays in host memory: `wait` for it.
        """
        if self._effects is None:
            raise InvalidArgument("the arrays are in host memory, where no stream works: wait()")
        self._effects.order(stream)
        return self._result


class Worker:
    """A thread that does tasks in order; started by the first.

    Parameters
    ----------
    name : str
        Of the thread.
    turn : context manager
        Held while a task is done.
    on_error : callable
        Told in the thread of what ended a task, before who waits for it is.
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
        #: Whether no task is waiting or running.
        self.is_idle = True
        #: The first task that failed; `unseen` takes it.
        self.failed: Task | None = None

    def submit(self, fn: Callable[[], None]) -> Task:
        """Have ``fn()`` done after everything that was submitted before.

        Raises
        ------
        CommunicatorRevoked
            It was closed.
        """
        task = Task(fn)
        self.enqueue(task)
        return task

    def enqueue(self, task: Task) -> None:
        """Have `task` done, as `submit`; who was interrupted in it must `settle` the task."""
        with self._changed:
            if self._is_closed:
                raise CommunicatorRevoked(f"{self._name}: the communicator was closed")
            self._tasks.append(task)
            self.is_idle = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def settle(self, task: Task) -> None:
        """Wait until `task` is over, if it is to be done at all; Ctrl-C does not break this off."""
        while task in self._tasks and not task.has_ended:
            try:
                task.wait(_LOOK_S)
            except KeyboardInterrupt:
                continue

    def unseen(self) -> BaseException | None:
        """Return the error of the first task that failed if nobody has seen it, once."""
        failed, self.failed = self.failed, None
        if failed is None or failed.is_seen:
            return None
        failed.is_seen = True
        return failed.error

    def drain(self, timeout_s: float) -> bool:
        """Wait until all it was given is over; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Refuse what has not begun, and wait for what has; whether the thread has ended."""
        with self._changed:
            self._is_closed = True
            refused = list(self._tasks)[1:]
            for task in refused:
                self._tasks.remove(task)
            self._changed.notify_all()
        for task in refused:
            task.end(CommunicatorRevoked(f"{self._name}: closed before it began"))
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


#: How often a wait that nothing breaks off looks whether its task was taken away.
_LOOK_S = 0.1
#: How much longer than a collective may take its error is waited for.
_GRACE_S = 10.0

__all__ = ["Effects", "Task", "Work", "Worker"]

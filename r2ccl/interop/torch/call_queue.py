"""`CallQueue`: runs the collectives of one process group one at a time, in the order of the calls.

`CallQueue.run` runs a call in the caller's thread if no other call is queued or running. All other
calls run in threads of the queue. Completing a future runs the callbacks of the program, which may
wait for a later call of the same group (PowerSGD does). Before a thread completes a future, it
therefore lets another thread run the queue.

torch has one current stream per thread. A call on GPU tensors therefore stores the stream of its
caller, and the thread that runs the call makes this stream current.

Invariant: at most one thread runs a call at a time, and every call that was added ends once.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

import torch

#: Longest wait of `CallQueue.close` for the threads, in seconds.
_JOIN_S = 1.0
#: Protects the future of every call; held only briefly.
_LOCK = threading.Lock()


class QueuedCall:
    """Function that a `CallQueue` runs once, with its outcome.

    Parameters
    ----------
    fn : callable
        Runs the collective; blocks until it has finished.
    result : list of Tensor
        Tensors that hold the result; the value of the future.
    stream : torch.cuda.Stream, optional
        Current stream for the function, and for callbacks that were added to the future before the
        call ended. Default: the current stream of the thread that runs the function or callback.
    """

    __slots__ = ("_done", "_ended", "_fn", "_future", "_stream", "error", "has_ended", "result")

    def __init__(self, fn: Callable[[], None], result: list[Any], stream: Any = None) -> None:
        self._fn: Callable[[], None] | None = fn
        self._stream = stream
        self._done = None if stream is None else torch.cuda.Event()
        #: Held until the call has ended; afterwards, only for a moment by each thread that waits.
        self._ended = threading.Lock()
        self._ended.acquire()
        self._future: tuple[Any, Any] | None = None
        #: Exception that the function raised, or None; valid once the call has ended.
        self.error: BaseException | None = None
        #: True once the call has ended, with or without an error.
        self.has_ended = False
        self.result = result

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait up to `timeout_s` seconds until the call has ended; return whether it has.

        With a `timeout_s` of -1, wait without a limit.
        """
        try:
            # Waiters hold the lock for a moment, so only the flag tells whether the call has ended.
            if not self.has_ended:
                self._ended.acquire(timeout=timeout_s)
        finally:
            # Also if Ctrl-C came as the lock was acquired: other threads may wait for it.
            if self.has_ended:
                try:  # noqa: SIM105 - Ctrl-C raises when a call returns: this is the first call
                    self._ended.release()
                except RuntimeError:  # not held
                    pass
        return self.has_ended

    def run(self) -> None:
        """Run the function; if it raises an exception, store the exception in `error`."""
        assert self._fn is not None
        try:
            self._on_stream(self._fn)
            if self._done is not None:
                self._done.record(self._stream)
        except BaseException as exc:
            self.error = exc
        self._fn = None

    def order(self) -> None:
        """Make this thread's current stream wait for the call, which must have succeeded.

        For a call without a stream, do nothing.
        """
        if self._done is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)

    def end(self) -> Any:
        """Mark the call as ended; return the future that `complete` must complete, if any."""
        with _LOCK:
            self.has_ended = True
            with contextlib.suppress(RuntimeError):  # a late `wait` has released it
                self._ended.release()
            return None if self._future is None else self._future[0]

    def complete(self, future: Any) -> None:
        """Complete a future that `end` returned; this runs the callbacks of the future."""
        self._on_stream(lambda: future.set_result(None))

    def future(self) -> Any:
        """Return the future of the call: its value is `result`, or it raises `error`.

        C++ code that waits for a future, such as DDP's reducer, treats ``Future.set_exception`` as
        success, but recognizes an exception that a callback raised. This method therefore returns a
        future made by ``then``, whose callback returns `result` or raises `error`.
        """
        with _LOCK:
            if self._future is None:
                first = torch.futures.Future()
                self._future = first, first.then(self._value)
                is_late = self.has_ended
            else:
                is_late = False
            future = self._future
        if is_late:
            self.complete(future[0])
        return future[1]

    def _on_stream(self, fn: Callable[[], None]) -> None:
        if self._stream is None:  # torch.cuda.stream(None) would initialize CUDA
            fn()
        else:
            with torch.cuda.stream(self._stream):
                fn()

    def _value(self, _: object) -> list[Any]:
        if self.error is not None:
            raise self.error
        return self.result


class CallQueue:
    """Calls of one process group, run in the order in which they were added.

    Parameters
    ----------
    name : str
        Name of the threads of the queue, for debuggers.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: deque[QueuedCall] = deque()
        self._changed = threading.Condition()
        self._is_running = False
        self._is_closed = False
        #: True if a thread may wait in `drain` or `close` for the end of a call.
        self._is_watched = False
        #: Number of threads of the queue that wait for a call to run.
        self._nidle = 0
        self._threads: list[threading.Thread] = []

    def run(self, call: QueuedCall) -> None:
        """Run `call` after all earlier calls; return when it has ended, even with an error."""
        with self._changed:
            is_free = not self._calls and not self._is_running
            if is_free:
                self._is_running = True
        if is_free:
            call.run()
            self._leave()
            future = call.end()
            if future is not None:
                call.complete(future)
        else:
            self.add(call)
            call.wait()

    def add(self, call: QueuedCall) -> None:
        """Let a thread of the queue run `call` after all earlier calls; return at once."""
        with self._changed:
            self._calls.append(call)
            if not self._is_running:
                self._wake()

    def drain(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds until all calls have run; return whether they have."""
        with self._changed:
            self._is_watched = True
            return self._changed.wait_for(
                lambda: not self._calls and not self._is_running, timeout_s
            )

    def close(self) -> None:
        """End the threads once all added calls have run; wait for them up to a second.

        The wait matters because a thread that still runs when the interpreter ends can make the
        process crash. If a callback of a future calls `close`, its thread cannot be joined here; an
        atexit function joins it.
        """
        with self._changed:
            self._is_closed = self._is_watched = True
            self._changed.notify_all()
            threads = list(self._threads)
        give_up_s = monotonic() + _JOIN_S
        for thread in threads:
            if thread is threading.current_thread():
                atexit.register(thread.join, _JOIN_S)
            else:
                thread.join(max(0, give_up_s - monotonic()))

    def _wake(self) -> None:
        """Let a thread run the first queued call; the caller must hold `_changed`."""
        if self._nidle:
            self._changed.notify_all()
        else:
            thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _leave(self) -> None:
        """End the turn of this thread, and let another thread run the next call, if any."""
        with self._changed:
            self._is_running = False
            if self._calls:
                self._wake()
            elif self._is_watched:
                self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._nidle += 1
                self._changed.wait_for(
                    lambda: (self._calls and not self._is_running) or self._is_closed
                )
                self._nidle -= 1
                if not self._calls or self._is_running:
                    return
                self._is_running = True
                call = self._calls.popleft()
            call.run()
            future = call.end()
            if future is not None:
                self._leave()
                call.complete(future)
            else:  # this thread runs the next call, too
                with self._changed:
                    self._is_running = False
                    if self._is_watched:
                        self._changed.notify_all()


__all__ = ["CallQueue", "QueuedCall"]

"""Handles of collectives and messages, with the interface of ``torch.distributed.Work``."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from r2ccl import MessageRequest, R2cclError
from r2ccl.interop.torch.call_queue import QueuedCall


class _Translation(ContextDecorator):
    """Context manager and decorator: errors of r2ccl become ``torch.distributed.DistBackendError``.

    DistBackendError is a RuntimeError, like the errors of gloo. Its ``__cause__`` is the error of
    r2ccl. Its text begins with the class of that error, because a backward pass raises a new
    RuntimeError with the text alone.

    This is a class because a context manager made from a generator function takes more time.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, R2cclError):
            raise dist.DistBackendError(f"{type(error).__name__}: {error}") from error


#: Translates the errors of a block or a function.
translated = _Translation()


def seconds(timeout: timedelta | None, default_s: float) -> float:
    """Return a timeout of torch in seconds; for None, 0 and less, return `default_s`."""
    given_s = 0.0 if timeout is None else timeout.total_seconds()
    return given_s if given_s > 0 else default_s


def late_collective(timeout_s: float) -> str:
    """Return the reason to pass to ``on_timeout`` for a collective that reached its timeout."""
    return f"a collective has reached its timeout of {timeout_s:g} s"


class _AnyWork(dist.Work):  # type: ignore[misc]
    """Base of `CollectiveWork` and `MessageWork`.

    ``_join(timeout_s)`` waits up to `timeout_s` seconds and returns whether the call has ended.
    """

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the call has finished; return True.

        Parameters
        ----------
        timeout : timedelta, optional
            Longest wait. Default: the timeout of the call.

        Raises
        ------
        DistBackendError
            If the call failed, or reached its own timeout, which ends the call. Also if the call
            has not finished after a shorter `timeout`; it then continues, and the caller may wait
            again.
        """
        limit_s = seconds(timeout, math.inf)
        if not self._join(limit_s):
            raise dist.DistBackendError(
                f"the call has not finished after {limit_s:g} s and continues: wait again"
            )
        error = self.exception()
        if error is not None:
            raise error
        return True

    def _join(self, timeout_s: float) -> bool:
        raise NotImplementedError

    def exception(self) -> BaseException | None:
        """Return the error of the call; None if it succeeded or has not finished."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Call `wait` without a timeout; for a call on GPU tensors see `CollectiveWork.wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Call `wait` without a timeout; for a call on GPU tensors see `CollectiveWork.wait`."""
        self.wait()

    def is_success(self) -> bool:
        """Return whether the call has finished without an error."""
        return self.is_completed() and self.exception() is None

    def is_completed(self) -> bool:
        """Return at once whether the call has finished or failed."""
        raise NotImplementedError


class CollectiveWork(_AnyWork):
    """Handle of a collective.

    Parameters
    ----------
    call : QueuedCall
    timeout_s : float
        Timeout of the call, in seconds, counted from the beginning of a wait.
    on_timeout : callable
        ``on_timeout(reason)`` ends the communicator; called when a wait has reached the timeout.
    """

    def __init__(
        self, call: QueuedCall, timeout_s: float, on_timeout: Callable[[str], None]
    ) -> None:
        super().__init__()
        self._call = call
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the call has finished; return True.

        A call on GPU tensors has finished for the host once its work is enqueued; the current
        stream of this thread then waits for the result. The parameter and the errors are those of
        `_AnyWork.wait`.
        """
        # The frequent case: torch also waits for blocking calls, which have ended already.
        if not (self._call.has_ended and self._call.error is None):
            super().wait(timeout)
        self._call.order()
        return True

    def is_completed(self) -> bool:
        """Return at once whether the call has finished or failed."""
        return self._call.has_ended

    def exception(self) -> BaseException | None:
        """Return the error of the call; None if it succeeded or has not finished."""
        return self._call.error

    def result(self) -> list[Any]:
        """Return the tensors that hold the result."""
        return self._call.result

    def get_future(self) -> Any:
        """Return a future; its value is the list of tensors, or it raises the error of the call."""
        return self._call.future()

    def _join(self, timeout_s: float) -> bool:
        if timeout_s < self._timeout_s:
            return self._call.wait(timeout_s)
        if not self._call.wait(self._timeout_s):
            self._on_timeout(late_collective(self._timeout_s))
        return self._call.wait()


class MessageWork(_AnyWork):
    """Handle of a message that is sent or received.

    Parameters
    ----------
    request : MessageRequest
    tensors : list of Tensor
        Tensors of the call.
    timeout_s : float
        Timeout of the message, in seconds, counted from the beginning of a wait. If a wait reaches
        it before the message has finished, the message fails: a receive that no message has matched
        is withdrawn; in all other cases the communicator ends.
    on_timeout : callable
        ``on_timeout(reason)`` ends the communicator.
    finish : callable, optional
        Called once after the message was received, for example to copy it to a tensor.
    """

    def __init__(
        self,
        request: MessageRequest,
        tensors: list[Any],
        timeout_s: float,
        on_timeout: Callable[[str], None],
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._request = request
        self._tensors = tensors
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._finish = finish
        self._error: BaseException | None = None
        self._source = -1
        self._is_over = False
        #: Held by the thread that waits. Re-entrant, because only the holder can release an RLock.
        self._lock = threading.RLock()

    def is_completed(self) -> bool:
        """Return at once whether the message is sent or received, or has failed."""
        # `_join` copies the message to a tensor that is not in order, so it must have run.
        return self._is_over or (self._request.is_done() and self._join(0))

    def exception(self) -> BaseException | None:
        """Return the error of the message; None if it succeeded or has not finished."""
        return self._error

    def result(self) -> list[Any]:
        """Return the tensors of the call."""
        return self._tensors

    def source_rank(self) -> int:
        """Wait for the message; return its sender's rank in the group, or -1 for a send."""
        self.wait()
        return self._source

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """Return a future; its value is the list of tensors, or it raises the message's error.

        A new thread completes the future.
        """
        first = torch.futures.Future()

        def value(_: object) -> list[Any]:
            self.wait()
            return self._tensors

        def run() -> None:
            self._join(math.inf)
            first.set_result(None)

        threading.Thread(target=run, name="r2ccl-torch-message", daemon=True).start()
        return first.then(value)

    def _join(self, timeout_s: float) -> bool:
        lock, limit_s = self._lock, min(timeout_s, self._timeout_s)
        has_shorter_limit = timeout_s < self._timeout_s
        give_up_s = monotonic() + limit_s
        if lock._is_owned():  # type: ignore[attr-defined]
            return False  # in a signal handler that interrupted this thread's wait
        try:
            # Another thread that waits holds the lock for at most the message's timeout.
            if not lock.acquire(timeout=limit_s if has_shorter_limit else -1):
                return False
            if self._is_over:
                return True
            try:
                self._receive(max(0, give_up_s - monotonic()))
            except RuntimeError as exc:
                is_late = _is_timeout(exc)
                if is_late and has_shorter_limit:
                    return False
                self._error = self._give_up(exc) if is_late else exc
            self._is_over = True
            return True
        finally:
            # Ctrl-C raises when a call returns, so no other call may come before the release.
            try:  # noqa: SIM105
                lock.release()
            except RuntimeError:  # not acquired
                pass

    def _receive(self, timeout_s: float) -> None:
        with translated:
            found = self._request.wait(timeout_s)
        self._source = -1 if found is None else found.source
        if self._finish is not None:
            self._finish()

    def _give_up(self, late: RuntimeError) -> RuntimeError | None:
        """End the message, which has reached its timeout; return its error.

        Return None if the message has finished meanwhile. After the return, r2ccl does not use the
        tensor: if the message cannot be withdrawn, because its transfer may have begun, the
        communicator ends.
        """
        try:
            with translated:
                is_withdrawn = self._request.cancel()
            if not is_withdrawn:
                if not self._request.is_done():
                    self._on_timeout(f"a message has reached its timeout of {self._timeout_s:g} s")
                self._receive(self._timeout_s)
                return None
        except RuntimeError as exc:
            return exc
        error: RuntimeError = dist.DistBackendError(
            f"a receive has reached its timeout of {self._timeout_s:g} s and was withdrawn, "
            "because no message matched it: check that the peer sends one"
        )
        error.__cause__ = late.__cause__
        return error


def _is_timeout(error: RuntimeError) -> bool:
    return getattr(error.__cause__, "status", "") == "TIMEOUT"


__all__ = ["CollectiveWork", "MessageWork", "late_collective", "seconds", "translated"]

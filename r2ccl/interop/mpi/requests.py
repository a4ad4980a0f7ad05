"""Requests of nonblocking and persistent calls, with the methods of mpi4py's requests.

The methods that take a list of requests also accept requests of mpi4py in the list, because a
program may wait together for a call of r2ccl and for a call of MPI on a window or a file.

A method that waits or tests *completes* a request when it reports that the call has finished;
`MpiRequest.Get_status` and its variants do not complete it. A request is *active* from the start of
its call until it is completed or freed.

If a request in a list has failed, the methods that may complete several requests raise an
`MpiError` of class ``ERR_IN_STATUS``, and the statuses tell the error class of each request. As
with MPICH, all finished requests are completed, including the failed request. `MpiRequest.Waitall`
and `MpiRequest.waitall`, however, stop at the first failed request, and the statuses of the later
requests in the list have the error class ``ERR_PENDING``.

Invariant: when a request was completed without an error, the caller's buffers hold its result.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from contextlib import AbstractContextManager
from functools import wraps
from itertools import zip_longest
from typing import Any, Self
from weakref import WeakSet

from mpi4py import MPI

from r2ccl.interop.mpi.calls import EMPTY, Call, CallOutcome, require_status
from r2ccl.interop.mpi.errors import MpiError, handled
from r2ccl.interop.mpi.messages import MessageCall

#: Pause between two polls of a list of requests, in seconds. Meanwhile, a thread of r2ccl moves
#: the data.
_PAUSE_S = 50e-6


class Unfinished:
    """Unfinished requests of one `Comm`; true if there are any.

    A request is unfinished if it is active, or if it was freed or garbage-collected while active
    and its call is not done yet.
    """

    def __init__(self) -> None:
        self._started: WeakSet[MpiRequest] = WeakSet()
        self._dropped: deque[Any] = deque()

    def add(self, request: MpiRequest) -> None:
        """Record a request whose call was started, and release dropped calls that are done.

        Only calls at the head of the queue are checked. Calls mostly end in the order of their
        start, so this releases the arrays of nearly all finished calls.
        """
        self._started.add(request)
        while self._dropped and self._dropped[0].is_done():
            self._dropped.popleft()

    def drop(self, work: Any) -> None:
        """Keep `work`, the call of an active request that is freed or garbage-collected."""
        self._dropped.append(work)  # no more than this: the garbage collector may call

    def __bool__(self) -> bool:
        return any(request.is_active for request in list(self._started)) or not all(
            work.is_done() for work in list(self._dropped)
        )


def _list_method(method: Callable[..., Any]) -> Any:
    """Return `method` as a class method that delegates lists of only MPI's own requests to MPI.

    MPI must handle such lists, because only MPI knows which of its persistent requests are active.
    """

    @wraps(method)
    def call(cls: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
        is_list = isinstance(requests, Sequence) and len(requests) > 0
        if is_list and all(isinstance(each, MPI.Request) for each in requests):
            return getattr(MPI.Request, method.__name__)(requests, *args, **kwargs)
        return method(cls, requests, *args, **kwargs)

    return classmethod(call)


class MpiRequest:
    """Handle of a nonblocking collective or message, in place of ``MPI.Request``.

    Once the request is completed or freed, it is false and equal to ``MPI.REQUEST_NULL``, like a
    request that the constructor makes. If the call failed, the method that completes the request
    raises `MpiError`.
    """

    _work: Any = None  # for `__del__`, if the constructor refuses its arguments

    def __init__(self) -> None:
        self._comm: Any = None
        self._call: Any = None
        self._work = None

    @classmethod
    def of(cls, comm: Any, call: Call | MessageCall) -> Self:
        """Start `call`, a call of the `Comm` `comm`, and return its request."""
        made = cls()
        made._comm, made._call, made._work = comm, call, call.start(True)
        comm.unfinished.add(made)
        return made

    def __del__(self) -> None:
        # As in MPI, the call goes on.
        if self._work is not None:
            self._comm.unfinished.drop(self._work)

    @property
    def is_active(self) -> bool:
        """True from the start of the call until the request is completed or freed."""
        return self._work is not None

    @property
    def has_finished(self) -> bool:
        """True if the request is not active, or its call has finished, even with an error."""
        if self._work is None:
            return True
        with self._handled():
            return bool(self._work.is_done())

    def __bool__(self) -> bool:
        return self.is_active

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MPI.Request):
            return other == MPI.REQUEST_NULL and not self
        return self is other

    __hash__ = object.__hash__

    def Wait(self, status: Any = None) -> bool:
        """Wait until the call has finished; return True."""
        self._waited(status)
        return True

    def Test(self, status: Any = None) -> bool:
        """Return at once whether the call has finished; if so, complete the request."""
        return self._tested(status) is not None

    def wait(self, status: Any = None) -> Any:
        """Wait until the call has finished; return the Python object received, or None."""
        return self._waited(status).obj

    def test(self, status: Any = None) -> tuple[bool, Any]:
        """Test like `Test`; return the flag, and the Python object received or None."""
        outcome = self._tested(status)
        return (False, None) if outcome is None else (True, outcome.obj)

    def Get_status(self, status: Any = None) -> bool:
        """Return whether the call has finished, without completing the request.

        If the call failed, raise `MpiError`.
        """
        require_status(status)
        if self._work is None:
            EMPTY.write(status)
            return True
        if not self.has_finished:
            return False
        with self._handled():
            outcome = self._call.look(self._work)
        outcome.write(status)
        return True

    def Cancel(self) -> None:
        """Cancel a receive that no message has matched; do nothing to a matched receive or a send.

        Raises
        ------
        MpiError
            ``ERR_REQUEST``, for a collective and for a request that is not active.
        """
        with self._handled():
            if self._work is None:
                raise MpiError(
                    "the request is not active: there is nothing to cancel", MPI.ERR_REQUEST
                )
            self._call.cancel(self._work)

    def Free(self) -> None:
        """Free a request of a send, of a cancelled receive, or of an inactive persistent call.

        An active send continues.

        Raises
        ------
        MpiError
            ``ERR_REQUEST``, if the request was freed before; if it was completed and is not
            persistent; or if it is active and its call is a collective or a receive that was not
            cancelled.
        """
        with self._handled():
            if not self:
                raise MpiError(
                    "the request is completed or was freed: there is nothing to free",
                    MPI.ERR_REQUEST,
                )
            if self._work is not None:
                self._call.drop(self._work)
                self._comm.unfinished.drop(self._work)
                self._work = None

    get_status, cancel, free = Get_status, Cancel, Free

    @_list_method
    def Get_status_all(cls, requests: Sequence[Any], statuses: list[Any] | None = None) -> bool:
        """Return whether all requests have finished, without completing them."""
        return all(
            request.Get_status(status) for request, status in _with_statuses(requests, statuses)
        )

    @_list_method
    def Get_status_any(cls, requests: Sequence[Any], status: Any = None) -> tuple[int, bool]:
        """Return the same index and flag as `Testany`, without completing the request."""
        return _first(requests, status, lambda request: request.Get_status(status))

    @_list_method
    def Get_status_some(
        cls, requests: Sequence[Any], statuses: list[Any] | None = None
    ) -> list[int] | None:
        """Return the indices of the active requests that have finished, without completing them.

        Returns None if no request is active.
        """
        done = _finished(requests)
        if done:
            cls.Get_status_all([requests[index] for index in done], statuses)
        return done

    get_status_all, get_status_any, get_status_some = (
        Get_status_all,
        Get_status_any,
        Get_status_some,
    )

    @_list_method
    def Waitall(cls, requests: Sequence[Any], statuses: list[Any] | None = None) -> bool:
        """Wait until all requests have finished; return True."""
        _completed(requests, statuses, _wait, is_stopped_by_error=True)
        return True

    @_list_method
    def Waitany(cls, requests: Sequence[Any], status: Any = None) -> int:
        """Wait until one request has finished; return its index.

        Returns MPI.UNDEFINED if no request is active.
        """
        while True:
            index, is_over = cls.Testany(requests, status)
            if is_over:
                return int(index)
            time.sleep(_PAUSE_S)

    @_list_method
    def Waitsome(
        cls, requests: Sequence[Any], statuses: list[Any] | None = None
    ) -> list[int] | None:
        """Wait until a request has finished; return the indices of all that have finished.

        Returns None if no request is active.
        """
        while True:
            found = cls.Testsome(requests, statuses)
            if found is None or found:
                return found
            time.sleep(_PAUSE_S)

    @_list_method
    def Testall(cls, requests: Sequence[Any], statuses: list[Any] | None = None) -> bool:
        """Return at once whether all requests have finished; if so, complete all of them."""
        if not all(map(_has_finished, _checked(requests))):
            return False
        _completed(requests, statuses, _wait)
        return True

    @_list_method
    def Testany(cls, requests: Sequence[Any], status: Any = None) -> tuple[int, bool]:
        """Complete one active request that has finished; return its index and True.

        If none has finished, return MPI.UNDEFINED and False. If no request is active, return
        MPI.UNDEFINED and True.
        """
        return _first(requests, status, lambda request: request.Test(status))

    @_list_method
    def Testsome(
        cls, requests: Sequence[Any], statuses: list[Any] | None = None
    ) -> list[int] | None:
        """Complete the requests that have finished; return their indices.

        Returns None if no request is active.
        """
        done = _finished(requests)
        if done:
            _completed([requests[index] for index in done], statuses, _wait)
        return done

    @_list_method
    def waitall(cls, requests: Sequence[Any], statuses: list[Any] | None = None) -> list[Any]:
        """Wait until all requests have finished; return the objects received."""
        return _completed(requests, statuses, _wait_for_object, is_stopped_by_error=True)

    @_list_method
    def waitany(cls, requests: Sequence[Any], status: Any = None) -> tuple[int, Any]:
        """Wait until one request has finished; return its index and the object received.

        Returns MPI.UNDEFINED and None if no request is active.
        """
        while True:
            index, is_over, found = cls.testany(requests, status)
            if is_over:
                return index, found
            time.sleep(_PAUSE_S)

    @_list_method
    def testall(
        cls, requests: Sequence[Any], statuses: list[Any] | None = None
    ) -> tuple[bool, list[Any] | None]:
        """Test like `Testall`; return True and the objects received, or False and None."""
        if not all(map(_has_finished, _checked(requests))):
            return False, None
        return True, _completed(requests, statuses, _wait_for_object)

    @_list_method
    def testany(cls, requests: Sequence[Any], status: Any = None) -> tuple[int, bool, Any]:
        """Complete a request like `Testany`; return its index, the flag and the object received.

        The object is None if no object was received.
        """
        require_status(status)
        active = _active(requests)
        for index in active:
            is_over, found = requests[index].test(status)
            if is_over:
                return index, True, found
        if not active:
            EMPTY.write(status)
        return MPI.UNDEFINED, not active, None

    @_list_method
    def waitsome(
        cls, requests: Sequence[Any], statuses: list[Any] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Wait like `Waitsome`; return the indices of the requests and the objects received.

        Returns None and None if no request is active.
        """
        while True:
            indices, found = cls.testsome(requests, statuses)
            if indices is None or indices:
                return indices, found
            time.sleep(_PAUSE_S)

    @_list_method
    def testsome(
        cls, requests: Sequence[Any], statuses: list[Any] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Complete the requests that have finished; return their indices and objects received.

        Returns None and None if no request is active.
        """
        done = _finished(requests)
        if done is None:
            return None, None
        some = [requests[index] for index in done]
        return done, _completed(some, statuses, _wait_for_object)

    def _waited(self, status: Any) -> CallOutcome:
        require_status(status)
        outcome = EMPTY if self._work is None else self._complete()
        outcome.write(status)
        return outcome

    def _tested(self, status: Any) -> CallOutcome | None:
        require_status(status)
        return self._waited(status) if self.has_finished else None

    def _complete(self) -> CallOutcome:
        try:
            with self._handled():
                outcome: CallOutcome = self._call.wait(self._work)
        except Exception:
            self._work = None
            raise
        # After Ctrl-C the request stays active, because its call may still run.
        self._work = None
        return outcome

    def _handled(self) -> AbstractContextManager[None]:
        return handled(MPI.COMM_NULL if self._comm is None else self._comm.mpi)


class MpiPrequest(MpiRequest):
    """Handle of a persistent call, which can be started repeatedly; replaces ``MPI.Prequest``.

    The request is true, and not equal to ``MPI.REQUEST_NULL``, until it is freed.
    """

    @classmethod
    def of(cls, comm: Any, call: Call | MessageCall) -> Self:
        """Return the request of `call`, a call of the `Comm` `comm`; `Start` starts the call."""
        made = cls()
        made._comm, made._call = comm, call
        return made

    def __bool__(self) -> bool:
        return self._call is not None

    def Start(self) -> None:
        """Start the call, with the current contents of its buffers.

        Raises
        ------
        MpiError
            ``ERR_REQUEST``, if the request is active or was freed.
        """
        with self._handled():
            if self.is_active or self._call is None:
                state = "active: wait for it" if self.is_active else "freed: make another one"
                raise MpiError(f"the persistent request is {state} before Start()", MPI.ERR_REQUEST)
            self._work = self._call.start(True)
            self._comm.unfinished.add(self)

    def Free(self) -> None:
        """Free the request like `MpiRequest.Free`; it cannot be started again."""
        super().Free()
        self._call = None

    free = Free

    @classmethod
    def Startall(cls, requests: Sequence[Any]) -> None:
        """Start all requests, in the order of the list."""
        for request in _checked(requests):
            if not isinstance(request, MpiPrequest | MPI.Prequest):
                raise MpiError(
                    "a request in a list for Startall() is not persistent: make it with a method "
                    "whose name ends in _init",
                    MPI.ERR_REQUEST,
                )
        for request in requests:
            request.Start()


def _checked(requests: Sequence[Any]) -> Sequence[Any]:
    if not (isinstance(requests, Sized) and hasattr(requests, "__getitem__")):
        raise TypeError(f"{requests!r}: a sequence of requests is needed, such as a list")
    for request in requests:
        if not isinstance(request, MpiRequest | MPI.Request):
            raise TypeError(f"{request!r} in a list of requests: an MPI.Request is needed")
    return requests


def _active(requests: Sequence[Any]) -> list[int]:
    """Return the indices of the active requests.

    Every request of MPI itself counts as active, except MPI.REQUEST_NULL.
    """
    return [
        index
        for index, request in enumerate(_checked(requests))
        if (request.is_active if isinstance(request, MpiRequest) else request != MPI.REQUEST_NULL)
    ]


def _first(
    requests: Sequence[Any], status: Any, is_done: Callable[[Any], bool]
) -> tuple[int, bool]:
    """Return the index of the first active request that is done, and True.

    If none is done, return MPI.UNDEFINED and False. If no request is active, return MPI.UNDEFINED
    and True, and write an empty outcome to `status`.
    """
    require_status(status)
    active = _active(requests)
    if not active:
        EMPTY.write(status)
    found = next((index for index in active if is_done(requests[index])), MPI.UNDEFINED)
    return found, found != MPI.UNDEFINED or not active


def _has_finished(request: Any) -> bool:
    """Return whether the call of a request has finished, with or without an error."""
    if isinstance(request, MpiRequest):
        return request.has_finished
    try:
        return bool(request.Get_status())
    except MPI.Exception:  # the error of the call, which the request raises once it is completed
        return True


def _finished(requests: Sequence[Any]) -> list[int] | None:
    """Return the indices of the active requests that have finished; None if none is active."""
    active = _active(requests)
    return [index for index in active if _has_finished(requests[index])] if active else None


def _wait(request: Any, status: Any) -> Any:
    return request.Wait(status)


def _wait_for_object(request: Any, status: Any) -> Any:
    return request.wait(status)


def _completed(
    requests: Sequence[Any],
    statuses: list[Any] | None,
    wait: Callable[[Any, Any], Any],
    *,
    is_stopped_by_error: bool = False,
) -> list[Any]:
    """Complete each request by ``wait(request, status)``; return the results.

    Raises
    ------
    MpiError
        ``ERR_IN_STATUS``, if a request has failed. All requests are completed. With
        `is_stopped_by_error`, the requests after the first failed one are not completed.
    """
    results: list[Any] = []
    first: MPI.Exception | None = None
    for request, status in _with_statuses(requests, statuses):
        if is_stopped_by_error and first is not None:
            CallOutcome(error=MPI.ERR_PENDING).write(status)
            continue
        try:
            results.append(wait(request, status))
        except MPI.Exception as exc:
            CallOutcome(error=exc.Get_error_class()).write(status)
            first = exc if first is None else first
    if first is not None:
        raise MpiError(f"a request in a list has failed: {first}", MPI.ERR_IN_STATUS) from first
    return results


def _with_statuses(
    requests: Sequence[Any], statuses: list[Any] | None
) -> list[tuple[Any, Any | None]]:
    """Pair each request with a status; append the statuses that the caller's list lacks.

    Requests for which there is no status, because `statuses` is None or a tuple that is too short,
    are paired with None.
    """
    checked = _checked(requests)
    if isinstance(statuses, list):
        statuses += [MPI.Status() for _ in range(len(checked) - len(statuses))]
    for status in statuses or ():
        require_status(status)
    return list(zip_longest(checked, (statuses or [])[: len(checked)]))


__all__ = ["MpiPrequest", "MpiRequest", "Unfinished"]

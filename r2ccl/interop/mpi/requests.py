"""Requests of nonblocking and persistent collectives, with the methods of mpi4py's requests.

The methods for several requests accept those of mpi4py in the same list, because a program may wait
for a collective of r2ccl and a message of MPI together.

Invariant: a request is *active* from its start until a method has reported its end; only then is
the result in the memory of the caller.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from r2ccl.interop.mpi.calls import Call
from r2ccl.interop.mpi.errors import MpiError, handled

#: Pause between two looks at several requests. A thread of r2ccl moves the data meanwhile.
_PAUSE_S = 50e-6


class MpiRequest:
    """Handle of a nonblocking collective; ``MPI.Request`` of mpi4py.

    Equal to ``MPI.REQUEST_NULL``, and false, once its end was reported.

    Parameters
    ----------
    comm : Comm
    call : Call
        Started by the constructor.
    """

    def __init__(self, comm: Any, call: Call) -> None:
        self._comm = comm
        self._call = call
        self._work: Any = call.start(True)

    @property
    def is_active(self) -> bool:
        """True if the collective was started and no method has reported its end."""
        return self._work is not None

    def __bool__(self) -> bool:
        return self.is_active

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MPI.Request):
            return other == MPI.REQUEST_NULL and not self
        return self is other

    __hash__ = object.__hash__

    def Wait(self, status: Any = None) -> bool:
        """Wait until the collective has finished; return True."""
        if self._work is not None:
            # The collective has a deadline itself, R2CC_TIMEOUT_S after its own start.
            self._complete(threading.TIMEOUT_MAX)
        _set_empty(status)
        return True

    def Test(self, status: Any = None) -> bool:
        """Return at once whether the collective has finished; its result is then complete."""
        if self._work is not None:
            if not self._work.is_done():
                return False
            self._complete(0)
        _set_empty(status)
        return True

    def wait(self, status: Any = None) -> None:
        """Wait as `Wait`; a collective on buffers has no message to return."""
        self.Wait(status)

    def test(self, status: Any = None) -> tuple[bool, None]:
        """Test as `Test`; return the flag and, as there is no message, None."""
        return self.Test(status), None

    def Get_status(self, status: Any = None) -> bool:
        """Return whether the collective has finished, without completing the request."""
        is_done = self._work is None or bool(self._work.is_done())
        if is_done:
            _set_empty(status)
        return is_done

    def Cancel(self) -> None:
        """Raise `MpiError`, because a collective cannot be cancelled."""
        with handled(self._comm.mpi):
            raise MpiError(
                "a collective cannot be cancelled: wait for the request instead", MPI.ERR_REQUEST
            )

    def Free(self) -> None:
        """Free a request that is not active.

        Raises
        ------
        MpiError
            ``ERR_REQUEST``, if the request is active: MPI forbids it for a collective.
        """
        with handled(self._comm.mpi):
            if self.is_active:
                raise MpiError(
                    "the collective of the request is running: wait for the request before Free()",
                    MPI.ERR_REQUEST,
                )

    @classmethod
    def Waitall(cls, requests: Sequence[Any], statuses: list[Any] | None = None) -> bool:
        """Wait until all requests have finished; return True."""
        for request, status in _with_statuses(requests, statuses):
            request.Wait(status)
        return True

    @classmethod
    def Waitany(cls, requests: Sequence[Any], status: Any = None) -> int:
        """Wait until one request has finished; return its index.

        Returns MPI.UNDEFINED if no request is active.
        """
        while True:
            index, is_over = cls.Testany(requests, status)
            if is_over:
                return index
            time.sleep(_PAUSE_S)

    @classmethod
    def Waitsome(
        cls, requests: Sequence[Any], statuses: list[Any] | None = None
    ) -> list[int] | None:
        """Wait until at least one request has finished; return the indices of those that have.

        Returns None if no request is active.
        """
        while True:
            found = cls.Testsome(requests, statuses)
            if found is None or found:
                return found
            time.sleep(_PAUSE_S)

    @classmethod
    def Testall(cls, requests: Sequence[Any], statuses: list[Any] | None = None) -> bool:
        """Return at once whether all requests have finished; completes all of them or none."""
        if not all(request.Get_status() for request in _checked(requests)):
            return False
        return cls.Waitall(requests, statuses)

    @classmethod
    def Testany(cls, requests: Sequence[Any], status: Any = None) -> tuple[int, bool]:
        """Complete one request that has finished; return its index and whether there is one.

        The index is MPI.UNDEFINED if there is none, and the flag is True if none is active.
        """
        active = _active(requests)
        for index in active:
            if requests[index].Test(status):
                return index, True
        return MPI.UNDEFINED, not active

    @classmethod
    def Testsome(
        cls, requests: Sequence[Any], statuses: list[Any] | None = None
    ) -> list[int] | None:
        """Complete the requests that have finished; return their indices.

        Returns None if no request is active.
        """
        active = _active(requests)
        if not active:
            return None
        done = [index for index in active if requests[index].Get_status()]
        for request, status in _with_statuses([requests[index] for index in done], statuses):
            request.Wait(status)
        return done

    @classmethod
    def waitall(cls, requests: Sequence[Any], statuses: list[Any] | None = None) -> list[Any]:
        """Wait until all requests have finished; return their messages."""
        return [request.wait(status) for request, status in _with_statuses(requests, statuses)]

    @classmethod
    def waitany(cls, requests: Sequence[Any], status: Any = None) -> tuple[int, Any]:
        """Wait until one request has finished; return its index and message."""
        while True:
            index, is_over, found = cls.testany(requests, status)
            if is_over:
                return index, found
            time.sleep(_PAUSE_S)

    @classmethod
    def testall(
        cls, requests: Sequence[Any], statuses: list[Any] | None = None
    ) -> tuple[bool, list[Any] | None]:
        """Return at once whether all requests have finished and, if so, their messages."""
        if not all(request.Get_status() for request in _checked(requests)):
            return False, None
        return True, cls.waitall(requests, statuses)

    @classmethod
    def testany(cls, requests: Sequence[Any], status: Any = None) -> tuple[int, bool, Any]:
        """Complete one request that has finished; return its index, the flag and its message."""
        active = _active(requests)
        for index in active:
            is_over, found = requests[index].test(status)
            if is_over:
                return index, True, found
        return MPI.UNDEFINED, not active, None

    def _complete(self, timeout_s: float) -> None:
        work, self._work = self._work, None
        with handled(self._comm.mpi):
            work.wait(timeout_s)
            self._call.finish()


class MpiPrequest(MpiRequest):
    """Handle of a persistent collective, which `Start` runs again; ``MPI.Prequest`` of mpi4py."""

    def __init__(self, comm: Any, call: Call) -> None:
        self._comm = comm
        self._call: Any = call
        self._work = None

    def __bool__(self) -> bool:
        return self._call is not None

    def Start(self) -> None:
        """Run the collective once more, with what the buffers hold now.

        Raises
        ------
        MpiError
            ``ERR_REQUEST``, if the request is active or was freed.
        """
        with handled(self._comm.mpi):
            if self.is_active or self._call is None:
                state = "active: wait for it" if self.is_active else "freed: make another one"
                raise MpiError(f"the persistent request is {state} before Start()", MPI.ERR_REQUEST)
            self._work = self._call.start(True)

    def Free(self) -> None:
        """Free the request, which must not be active."""
        super().Free()
        self._call = None

    @classmethod
    def Startall(cls, requests: Sequence[Any]) -> None:
        """Start all requests, in the order of the list."""
        for request in requests:
            request.Start()


def _checked(requests: Sequence[Any]) -> Sequence[Any]:
    for request in requests:
        if not isinstance(request, MpiRequest | MPI.Request):
            raise TypeError(f"{request!r} in a list of requests: an MPI.Request is needed")
    return requests


def _active(requests: Sequence[Any]) -> list[int]:
    """Return the indices of the active requests."""
    return [
        index
        for index, request in enumerate(_checked(requests))
        if (request.is_active if isinstance(request, MpiRequest) else request != MPI.REQUEST_NULL)
    ]


def _with_statuses(
    requests: Sequence[Any], statuses: list[Any] | None
) -> list[tuple[Any, Any | None]]:
    """Pair each request with a status; append the statuses that the caller's list lacks."""
    if statuses is None:
        return [(request, None) for request in _checked(requests)]
    statuses += [MPI.Status() for _ in range(len(requests) - len(statuses))]
    return list(zip(_checked(requests), statuses, strict=False))


def _set_empty(status: Any) -> None:
    """Write the status of a collective, which has no source, tag and count."""
    if status is not None:
        status.Set_source(MPI.ANY_SOURCE)
        status.Set_tag(MPI.ANY_TAG)
        status.Set_error(MPI.SUCCESS)
        status.Set_elements(MPI.BYTE, 0)
        status.Set_cancelled(False)


__all__ = ["MpiPrequest", "MpiRequest"]

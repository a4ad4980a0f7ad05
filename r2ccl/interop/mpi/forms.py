"""Methods of mpi4py, made from functions that return a `Call` or `MessageCall`.

Up to three methods are made from each function: blocking, nonblocking and persistent, such as
``Bcast``, ``Ibcast`` and ``Bcast_init``. Collectives on objects have only the blocking method,
made from a function that runs the collective itself (`on_objects`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from r2ccl.interop.mpi.calls import Call, require_status
from r2ccl.interop.mpi.errors import handled
from r2ccl.interop.mpi.messages import MessageCall
from r2ccl.interop.mpi.requests import MpiPrequest, MpiRequest

#: Takes the communicator and the arguments of a method of mpi4py; returns the checked call.
Make = Callable[..., Call | MessageCall]

_ANY_POSITION = inspect.Parameter.POSITIONAL_OR_KEYWORD
_INFO = inspect.Parameter("info", _ANY_POSITION, default=MPI.INFO_NULL)
_STATUS = inspect.Parameter("status", _ANY_POSITION, default=None)


def collective(make: Make) -> tuple[Any, Any, Any]:
    """Return the blocking, the nonblocking and the persistent method of a collective."""
    return blocking(make), nonblocking(make), persistent(make, _INFO)


def sent(make: Make) -> tuple[Any, Any, Any]:
    """Return the blocking, the nonblocking and the persistent method of a send."""
    return blocking(make), nonblocking(make), persistent(make)


def received(make: Make) -> tuple[Any, Any, Any]:
    """Return the blocking, the nonblocking and the persistent method of a receive.

    The blocking method also takes a `status`.
    """
    return blocking_with_status(make), nonblocking(make), persistent(make)


def blocking(make: Make) -> Any:
    """Return a method that builds a call with `make`, runs it, and returns the received object.

    The method returns None if the call receives no object.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with handled(self.mpi):
            return make(self, *args, **kwargs).run().obj

    return _documented(method, make)


def blocking_with_status(make: Make) -> Any:
    """Return a method like `blocking`, which also writes the outcome to its `status` argument."""
    nplain = len(inspect.signature(make).parameters) - 1

    def method(self: Any, *args: Any, status: Any = None, **kwargs: Any) -> Any:
        if len(args) == nplain + 1 and status is None:
            *args, status = args  # type: ignore[assignment]
        require_status(status)
        with handled(self.mpi):
            outcome = make(self, *args, **kwargs).run()
        outcome.write(status)
        return outcome.obj

    return _documented(method, make, _STATUS)


def nonblocking(make: Make) -> Any:
    """Return a method that starts the call made by `make` and returns its `MpiRequest`."""

    def method(self: Any, *args: Any, **kwargs: Any) -> MpiRequest:
        with handled(self.mpi):
            return MpiRequest.of(self, make(self, *args, **kwargs))

    return _documented(method, make)


def persistent(make: Make, *more: inspect.Parameter) -> Any:
    """Return a method that makes an `MpiPrequest`, which can start its call many times.

    The call is made by `make`. The method also accepts the parameters `more`, and ignores them.
    """
    signature = _extended(make, *more)

    def method(self: Any, *args: Any, **kwargs: Any) -> MpiPrequest:
        given = signature.bind(self, *args, **kwargs).arguments
        for each in more:  # hints, which r2ccl does not use
            given.pop(each.name, None)
        with handled(self.mpi):
            return MpiPrequest.of(self, make(**given))

    return _documented(method, make, *more)


def on_objects(function: Callable[..., Any]) -> Any:
    """Return the method that calls `function`, which itself runs a collective on objects."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with handled(self.mpi):
            return function(self, *args, **kwargs)

    return _documented(method, function)


def _extended(make: Callable[..., Any], *more: inspect.Parameter) -> inspect.Signature:
    plain = inspect.signature(make)
    return plain.replace(parameters=[*plain.parameters.values(), *more])


def _documented(method: Any, make: Callable[..., Any], *more: inspect.Parameter) -> Any:
    method.__doc__ = make.__doc__
    method.__signature__ = _extended(make, *more)
    return method


__all__ = [
    "blocking",
    "blocking_with_status",
    "collective",
    "nonblocking",
    "on_objects",
    "persistent",
    "received",
    "sent",
]

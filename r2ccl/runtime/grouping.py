"""Groups of calls: collected in a ``with`` block and run at its end, small allreduces as one."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import get_ident
from typing import Any

import msgspec

from r2ccl.errors import InvalidArgument, R2cclError
from r2ccl.runtime.arguments import Request
from r2ccl.runtime.arrays.buffers import Buffer
from r2ccl.runtime.messages.matching import Message
from r2ccl.runtime.messages.messenger import MessageRequest
from r2ccl.types import CallSignature, Collective


class Group:
    """Calls of one thread in a ``with comm.group():`` block, which run at the end of the block.

    Attributes
    ----------
    messages : list of Message
        After the block: the messages that the block's `recv` and `sendrecv` calls received, in the
        order of the calls.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thread = get_ident()
        self._requests: list[tuple[Request, Any]] = []
        self._posts: list[Callable[[], MessageRequest]] = []

    @property
    def is_here(self) -> bool:
        """True in the thread that opened the group."""
        return self._thread == get_ident()

    def add(self, request: Request, stream: Any) -> None:
        """Add a collective; `stream` is the ``stream`` argument of the caller."""
        self._requests.append((request, stream))

    def post(self, fn: Callable[[], MessageRequest]) -> None:
        """Add a message; ``fn()`` begins to send or receive it."""
        self._posts.append(fn)

    def run(
        self,
        on_host: Callable[[Sequence[Request]], None],
        on_device: Callable[[Request, Any], object],
    ) -> None:
        """Begin all messages, run all collectives, and wait for the messages.

        Parameters
        ----------
        on_host : callable
            Runs requests on host memory.
        on_device : callable
            Starts a request on device memory, on the given stream.

        Raises
        ------
        R2cclError
            If a message or a collective fails; afterwards no message uses its array.
        """
        begun: list[MessageRequest] = []
        try:
            for post in self._posts:
                begun.append(post())
            host = [each for each, _ in self._requests if isinstance(each.source, Buffer)]
            if host:
                on_host(host)
            for request, stream in self._requests:
                if not isinstance(request.source, Buffer):
                    on_device(request, stream)
        except BaseException:
            with suppress(R2cclError):
                _wait_for(begun)
            raise
        self.messages = [each for each in _wait_for(begun) if each is not None]


def _wait_for(begun: Sequence[MessageRequest]) -> list[Message | None]:
    """Wait for all messages; return each received message, and None for each sent one.

    The first `InvalidArgument` is raised only after all waits, when no message uses its array.
    Other errors end the communicator and are raised at once.
    """
    found, refusals = [], []
    for each in begun:
        try:
            found.append(each.wait())
        except InvalidArgument as exc:
            refusals.append(exc)
    if refusals:
        raise refusals[0]
    return found


def batches(requests: Sequence[Request]) -> list[list[Request]]:
    """Divide requests into batches, each for one call, in the order of their first requests.

    Small allreduces of one dtype and operation share batches of at most `_MOST_NBYTES`; for the
    conditions, see `_can_join`. Equal groups on all ranks give equal batches.
    """
    found: list[list[Request]] = []
    open_lists: dict[CallSignature, list[Request]] = {}
    for request in requests:
        kind = msgspec.structs.replace(request.signature, count=0)
        batch = open_lists.get(kind)
        if not _can_join(request):
            found.append([request])
        elif batch is None or _nbytes(batch) + _nbytes([request]) > _MOST_NBYTES:
            open_lists[kind] = [request]
            found.append(open_lists[kind])
        else:
            batch.append(request)
    return found


def joined(batch: Sequence[Request]) -> CallSignature:
    """Return the signature of the allreduce that replaces all requests of `batch`."""
    counts = [request.signature.count for request in batch]
    whole = msgspec.structs.replace(batch[0].signature, count=sum(counts))
    return whole.with_digest(zlib.crc32(repr(counts).encode()))


def _can_join(request: Request) -> bool:
    return (
        request.signature.collective == Collective.ALLREDUCE
        and request.schedule is None
        and request.conversion is None
        and isinstance(request.source, Buffer)
        and request.source.nbytes <= _SMALL_NBYTES
    )


def _nbytes(requests: Sequence[Request]) -> int:
    return sum(each.source.nbytes for each in requests if isinstance(each.source, Buffer))


#: Maximum size in bytes of an array that is joined with others, and of one joined call. For larger
#: arrays, the copies take more time than joining saves.
_SMALL_NBYTES, _MOST_NBYTES = 256 << 10, 4 << 20

__all__ = ["Group", "batches", "joined"]

"""Sends and receives of mpi4py, as calls of a `Communicator`.

Each function from `send` to `sendrecv_replace` takes a `Comm` and the arguments of one method of
mpi4py, checks them and returns a `MessageCall`.

Invariant: r2ccl gets bytes, so sender and receiver may describe the same elements with different
datatypes, as MPI allows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI

from r2ccl import InvalidArgument, Message
from r2ccl.communicator import ANY_SOURCE, ANY_TAG
from r2ccl.interop.mpi.buffers import BufferSpec, message
from r2ccl.interop.mpi.calls import EMPTY, CallOutcome
from r2ccl.interop.mpi.errors import MpiError

#: Result of a receive from ``MPI.PROC_NULL``.
NO_MESSAGE = Message(MPI.PROC_NULL, MPI.ANY_TAG, 0)


class Delivery:
    """Messages of a started call: at most one to receive, and at most one to send.

    Parameters
    ----------
    received, sent : MessageRequest or None
        Requests of the receive and of the send; None: the call has none.
    found : Message or None
        Message that has already been received; None: none yet.

    Attributes
    ----------
    is_cancelled : bool
        True if `cancel` has withdrawn the receive.
    """

    def __init__(
        self, received: Any = None, sent: Any = None, found: Message | None = None
    ) -> None:
        self.received = received
        self.sent = sent
        self.is_cancelled = False
        self._found = found

    def is_done(self) -> bool:
        """Return at once whether the send and the receive have finished or failed."""
        return all(each is None or each.is_done() for each in (self.received, self.sent))

    def wait(self, timeout_s: float | None = None) -> Message | None:
        """Wait for the send and the receive; return the message received, or None.

        Raises
        ------
        MpiError
            ``ERR_TRUNCATE``, if a message does not fit the memory of its receive.
        R2cclError
            If the communicator has ended, or the wait reached `timeout_s` or, by default,
            R2CC_TIMEOUT_S.
        """
        try:
            if self.received is not None:
                self._found = self.received.wait(timeout_s)
        except InvalidArgument as exc:
            raise MpiError(str(exc), MPI.ERR_TRUNCATE) from exc
        finally:
            self._wait_sent(timeout_s)
        return self._found

    def _wait_sent(self, timeout_s: float | None) -> None:
        try:
            if self.sent is not None:
                self.sent.wait(timeout_s)
        except InvalidArgument as exc:
            raise MpiError(str(exc), MPI.ERR_TRUNCATE) from exc

    def cancel(self) -> None:
        """Withdraw the receive, unless a message has matched it; do nothing to a send."""
        if self.received is not None and self.received.cancel():
            self.received = None
            self.is_cancelled = True


class MessageCall(msgspec.Struct, frozen=True, eq=False):
    """A send, a receive or both, with checked arguments; has the methods of a `Call`.

    Parameters
    ----------
    begin : callable
        Begins to send or receive, and returns a `Delivery`.
    finish : callable
        ``finish(found)`` copies the received message to the caller's memory, or returns its Python
        object.
    """

    begin: Callable[[], Delivery]
    finish: Callable[[Message], Any] = lambda found: None

    def start(self, is_async: bool) -> Delivery:
        """Begin to send or receive; `is_async` has no effect."""
        return self.begin()

    def run(self) -> CallOutcome:
        """Begin to send or receive, and wait for the outcome."""
        return self.wait(self.begin())

    def wait(self, work: Delivery) -> CallOutcome:
        """Wait for `work`, which `start` returned; if it received a message, call `finish`."""
        found = work.wait()
        if found is None or found is NO_MESSAGE:
            return _outcome(found, work)
        return _outcome(found, work)._replace(obj=self.finish(found))

    def look(self, work: Delivery) -> CallOutcome:
        """Return the outcome of `work`, which must be done, without calling `finish`."""
        return _outcome(work.wait(0), work)

    def cancel(self, work: Delivery) -> None:
        """Withdraw the receive, unless a message has matched it; a send is never cancelled."""
        work.cancel()

    def drop(self, work: Delivery) -> None:
        """Let a running send continue; raise `MpiError` if the request of a receive is active."""
        if work.received is not None:
            raise MpiError(
                "the request is active, and its call is a receive: wait for it, or cancel it, "
                "before Free()",
                MPI.ERR_REQUEST,
            )


def _outcome(found: Message | None, work: Delivery) -> CallOutcome:
    if found is None:
        return EMPTY._replace(is_cancelled=work.is_cancelled)
    return CallOutcome(found.source, found.tag, found.count)


def send(comm: Any, buf: Any, dest: int, tag: int = 0) -> MessageCall:
    """Send `buf` to rank `dest`, like mpi4py's Send."""
    return _sending_buffer(comm, buf, dest, tag)


def ssend(comm: Any, buf: Any, dest: int, tag: int = 0) -> MessageCall:
    """Send `buf` to rank `dest`, like mpi4py's Ssend.

    The call has finished only when a receive has taken the message.
    """
    return _sending_buffer(comm, buf, dest, tag, is_synchronous=True)


def bsend(comm: Any, buf: Any, dest: int, tag: int = 0) -> MessageCall:
    """Send a copy of `buf` to rank `dest`; the call is done at once, like mpi4py's Bsend."""
    if dest == MPI.PROC_NULL:
        return send(comm, buf, dest, tag)
    sent = message(buf, writable=False)
    return buffered(comm, sent, dest, tag)


def rsend(comm: Any, buf: Any, dest: int, tag: int = 0) -> MessageCall:
    """Send `buf` to rank `dest`, like mpi4py's Rsend; the receive need not be posted yet."""
    return _sending_buffer(comm, buf, dest, tag)


def recv(comm: Any, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> MessageCall:
    """Receive a message from rank `source` into `buf`, like mpi4py's Recv."""
    if source == MPI.PROC_NULL:
        return from_nowhere(tag)
    into = message(buf, writable=True)
    out = into.data(writable=True)
    return receiving(comm, out, source, tag, lambda found: unpack_first(into, out, found.count))


def sendrecv(
    comm: Any,
    sendbuf: Any,
    dest: int,
    sendtag: int = 0,
    recvbuf: Any = None,
    source: int = MPI.ANY_SOURCE,
    recvtag: int = MPI.ANY_TAG,
) -> MessageCall:
    """Send `sendbuf` and receive into `recvbuf` at the same time, like mpi4py's Sendrecv."""
    sent = send(comm, sendbuf, dest, sendtag)
    return _both(recv(comm, recvbuf, source, recvtag), sent)


def sendrecv_replace(
    comm: Any,
    buf: Any,
    dest: int,
    sendtag: int = 0,
    source: int = MPI.ANY_SOURCE,
    recvtag: int = MPI.ANY_TAG,
) -> MessageCall:
    """Send a copy of `buf` and receive into `buf`, like mpi4py's Sendrecv_replace."""
    if dest == source == MPI.PROC_NULL:  # mpi4py then ignores the buffer
        return sendrecv(comm, None, dest, sendtag, None, source, recvtag)
    given = message(buf, writable=True)
    copy = np.empty(given.block_nbytes, np.uint8)
    received = recv(comm, buf, source, recvtag)

    def begin() -> Delivery:
        given.pack(copy)  # before the receive begins: its message may have arrived already
        return received.begin()

    sent = sending(comm, copy, dest, sendtag)
    return _both(MessageCall(begin, received.finish), sent)


# Helpers of the functions above and of those in `object_messages`


def sending(
    comm: Any,
    x: Any,
    dest: Any,
    tag: Any,
    *,
    pack: Callable[[], None] = lambda: None,
    is_synchronous: bool = False,
) -> MessageCall:
    """Return the call that sends the bytes `x`, after ``pack()`` has written them."""
    to, tag = peer_of(comm, "dest", dest), _tag_of(tag)
    if to == MPI.PROC_NULL:
        return MessageCall(Delivery)
    run = comm.communicator.send

    def begin() -> Delivery:
        pack()
        return Delivery(sent=run(x, to, tag, is_synchronous=is_synchronous, async_op=True))

    return MessageCall(begin)


def buffered(comm: Any, sent: BufferSpec, dest: Any, tag: Any) -> MessageCall:
    """Return the call that sends a copy of `sent`, and is done as soon as it has started."""
    to, tag = peer_of(comm, "dest", dest), _tag_of(tag)
    run = comm.communicator.send

    def begin() -> Delivery:
        x = np.empty(sent.block_nbytes, np.uint8)
        sent.pack(x)
        comm.keep(run(x, to, tag, async_op=True))
        return Delivery()

    return MessageCall(begin)


def receiving(
    comm: Any, out: Any, source: Any, tag: Any, finish: Callable[[Message], Any]
) -> MessageCall:
    """Return the call that receives into the bytes `out`, and then calls ``finish(message)``."""
    wanted = wanted_of(comm, source, tag)
    run = comm.communicator.recv

    def begin() -> Delivery:
        with comm.taking:
            return Delivery(run(out, *wanted, async_op=True))

    return MessageCall(begin, finish)


def from_nowhere(tag: Any) -> MessageCall:
    """Return the call that receives from ``MPI.PROC_NULL``."""
    _tag_of(tag, is_any=True)
    return MessageCall(lambda: Delivery(found=NO_MESSAGE))


def unpack_first(into: BufferSpec, out: Any, nbytes: int) -> None:
    """Copy the first `nbytes` of `out` to `into`, whose other elements keep their values."""
    if nbytes < out.size and not into.is_contiguous:
        before = np.empty_like(out)
        into.pack(before)
        out[nbytes:] = before[nbytes:]
    into.unpack(out)


def wanted_of(comm: Any, source: Any, tag: Any) -> tuple[int, int]:
    """Return source and tag of a receive, with MPI's wildcards replaced by those of r2ccl."""
    rank, number = peer_of(comm, "source", source), _tag_of(tag, is_any=True)
    return (
        ANY_SOURCE if rank == MPI.ANY_SOURCE else rank,
        ANY_TAG if number == MPI.ANY_TAG else number,
    )


def peer_of(comm: Any, name: str, value: Any) -> int:
    """Return `value` if it is a rank of `comm`, ``PROC_NULL`` or, as a source, ``ANY_SOURCE``.

    `name` is "source" or "dest".

    Raises
    ------
    TypeError
        If `value` is not an integer.
    MpiError
        ``ERR_RANK``, if `value` is none of these.
    """
    rank = operator.index(value)
    others = (MPI.PROC_NULL, MPI.ANY_SOURCE) if name == "source" else (MPI.PROC_NULL,)
    if not 0 <= rank < comm.size and rank not in others:
        also = "PROC_NULL and ANY_SOURCE" if name == "source" else "PROC_NULL"
        raise MpiError(f"{name}={rank}: allowed are 0 to {comm.size - 1}, {also}", MPI.ERR_RANK)
    return rank


def _tag_of(value: Any, *, is_any: bool = False) -> int:
    tag = operator.index(value)
    if not 0 <= tag <= _largest_tag() and not (is_any and tag == MPI.ANY_TAG):
        also = " and ANY_TAG" if is_any else ""
        raise MpiError(f"tag={tag}: allowed are 0 to {_largest_tag()}{also}", MPI.ERR_TAG)
    return tag


@cache
def _largest_tag() -> int:
    return operator.index(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB))  # type: ignore[arg-type]


def _sending_buffer(
    comm: Any, buf: Any, dest: Any, tag: Any, *, is_synchronous: bool = False
) -> MessageCall:
    if dest == MPI.PROC_NULL:  # mpi4py then ignores the buffer
        return sending(comm, None, dest, tag)
    sent = message(buf, writable=False)
    x = sent.data(writable=False)
    return sending(comm, x, dest, tag, pack=lambda: sent.pack(x), is_synchronous=is_synchronous)


def _both(received: MessageCall, sent: MessageCall) -> MessageCall:
    """Return the call that receives and sends at the same time."""

    def begin() -> Delivery:
        work = received.begin()  # first, because the peer may answer the send at once
        work.sent = sent.begin().sent
        return work

    return MessageCall(begin, received.finish)


__all__ = [
    "NO_MESSAGE",
    "Delivery",
    "MessageCall",
    "bsend",
    "buffered",
    "from_nowhere",
    "peer_of",
    "receiving",
    "recv",
    "rsend",
    "send",
    "sending",
    "sendrecv",
    "sendrecv_replace",
    "ssend",
    "unpack_first",
    "wanted_of",
]

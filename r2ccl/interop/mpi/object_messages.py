"""Sends and receives of Python objects, pickled as in `objects`.

Like the functions of `messages`, each function takes a `Comm` and the arguments of one method of
mpi4py, checks them and returns a `MessageCall`; only `sendrecv` runs the call and returns its
outcome.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from mpi4py import MPI

from r2ccl.interop.mpi.buffers import memory_of, message
from r2ccl.interop.mpi.calls import CallOutcome
from r2ccl.interop.mpi.messages import (
    MessageCall,
    buffered,
    from_nowhere,
    receiving,
    sending,
    wanted_of,
)
from r2ccl.interop.mpi.objects import pickled
from r2ccl.interop.mpi.probes import claim, loaded

#: Memory of an `irecv` without a buffer, in bytes, as in mpi4py.
_IRECV_NBYTES = 1 << 15


def send(comm: Any, obj: Any, dest: int, tag: int = 0) -> MessageCall:
    """Send an object to rank `dest`, like mpi4py's send."""
    return _sending_object(comm, obj, dest, tag)


def ssend(comm: Any, obj: Any, dest: int, tag: int = 0) -> MessageCall:
    """Send an object to rank `dest`, like mpi4py's ssend.

    The call has finished only when a receive has taken the message.
    """
    return _sending_object(comm, obj, dest, tag, is_synchronous=True)


def bsend(comm: Any, obj: Any, dest: int, tag: int = 0) -> MessageCall:
    """Send an object to rank `dest`; the call is done at once, like mpi4py's bsend."""
    if dest == MPI.PROC_NULL:
        return send(comm, obj, dest, tag)
    return buffered(comm, message(pickled(obj), writable=False), dest, tag)


def irecv(
    comm: Any, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
) -> MessageCall:
    """Begin to receive an object from rank `source`, like mpi4py's irecv.

    `buf` is the memory for the pickle, or the size of this memory in bytes; by default 32 KiB. A
    larger pickle raises `MpiError` with ``ERR_TRUNCATE``.
    """
    if source == MPI.PROC_NULL:
        return from_nowhere(tag)
    out = _memory(_IRECV_NBYTES if buf is None else buf)
    return receiving(comm, out, source, tag, lambda found: loaded(out[: found.count]))


def recv(
    comm: Any, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
) -> MessageCall:
    """Receive an object from rank `source`, like mpi4py's recv.

    `buf` is as for `irecv`. Without `buf`, the object may have any size, and this function itself
    waits for the message.
    """
    if buf is not None or source == MPI.PROC_NULL:
        return irecv(comm, buf, source, tag)
    call: MessageCall = claim(comm, source, tag, None, is_blocking=True).as_object()
    return call


def sendrecv(
    comm: Any,
    sendobj: Any,
    dest: int,
    sendtag: int = 0,
    recvbuf: Any = None,
    source: int = MPI.ANY_SOURCE,
    recvtag: int = MPI.ANY_TAG,
) -> CallOutcome:
    """Send an object and receive one at the same time, like mpi4py's sendrecv.

    The `obj` of the result is the object received.
    """
    wanted_of(comm, source, recvtag)
    call = send(comm, sendobj, dest, sendtag)
    sent = call.begin()
    outcome = recv(comm, recvbuf, source, recvtag).run()
    call.wait(sent)
    return outcome


def _sending_object(
    comm: Any, obj: Any, dest: Any, tag: Any, *, is_synchronous: bool = False
) -> MessageCall:
    data = None if dest == MPI.PROC_NULL else pickled(obj)  # mpi4py then ignores the object
    return sending(comm, data, dest, tag, is_synchronous=is_synchronous)


def _memory(buf: Any) -> Any:
    try:
        return np.empty(operator.index(buf), np.uint8)
    except TypeError:
        return memory_of(buf, writable=True)


__all__ = ["bsend", "irecv", "recv", "send", "sendrecv", "ssend"]

"""Messages of mpi4py that are Python objects, pickled as in `objects`.

The functions are as in `messages`.
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

#: Memory of an `irecv` without a buffer, in bytes; that of mpi4py.
_IRECV_NBYTES = 1 << 15


def send(comm: Any, obj: Any, dest: int, tag: int = 0) -> MessageCall:
    """Send an object to rank `dest`, as mpi4py's send."""
    return sending(comm, pickled(obj), dest, tag)


def ssend(comm: Any, obj: Any, dest: int, tag: int = 0) -> MessageCall:
    """Send an object to rank `dest`; done once a receive has taken it, as mpi4py's ssend."""
    return sending(comm, pickled(obj), dest, tag, is_synchronous=True)


def bsend(comm: Any, obj: Any, dest: int, tag: int = 0) -> MessageCall:
    """Send an object to rank `dest`; done at once, as mpi4py's bsend."""
    if dest == MPI.PROC_NULL:
        return send(comm, obj, dest, tag)
    return buffered(comm, message(pickled(obj), writable=False), dest, tag)


def irecv(
    comm: Any, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
) -> MessageCall:
    """Begin to receive an object of rank `source`, as mpi4py's irecv.

    `buf` is memory for the pickle, or the number of bytes of that memory; by default 32 KiB.
    """
    if source == MPI.PROC_NULL:
        return from_nowhere(tag)
    out = _memory(_IRECV_NBYTES if buf is None else buf)
    return receiving(comm, out, source, tag, lambda found: loaded(out[: found.count]))


def recv(
    comm: Any, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
) -> MessageCall:
    """Receive an object of rank `source`, of any size unless `buf` is given, as mpi4py's recv."""
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
    """Send an object and receive one at the same time, as mpi4py's sendrecv."""
    wanted_of(comm, source, recvtag)
    call = send(comm, sendobj, dest, sendtag)
    sent = call.begin()
    outcome = recv(comm, recvbuf, source, recvtag).run()
    call.wait(sent)
    return outcome


def _memory(buf: Any) -> Any:
    try:
        return np.empty(operator.index(buf), np.uint8)
    except TypeError:
        return memory_of(buf, writable=True)


__all__ = ["bsend", "irecv", "recv", "send", "sendrecv", "ssend"]

"""Probes of mpi4py, which look at a message before it is received.

`MPI_Mprobe` reserves the message for its caller. r2ccl therefore receives the message at once, into
new memory, and `MpiMessage` later copies it to the caller's memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Self

import numpy as np
from mpi4py import MPI

from r2ccl import Message
from r2ccl.interop.mpi.buffers import message
from r2ccl.interop.mpi.calls import CallOutcome, require_status
from r2ccl.interop.mpi.errors import MpiError, handled
from r2ccl.interop.mpi.messages import (
    NO_MESSAGE,
    Delivery,
    MessageCall,
    unpack_first,
    wanted_of,
)
from r2ccl.interop.mpi.requests import MpiRequest


def probe(comm: Any, source: Any, tag: Any, status: Any, *, is_blocking: bool) -> Message | None:
    """Return the message that a receive would take; write its source, tag and size to `status`.

    If there is no such message yet, wait for one if `is_blocking`, otherwise return None.
    """
    require_status(status)
    wanted = wanted_of(comm, source, tag)
    if source == MPI.PROC_NULL:
        found: Message | None = NO_MESSAGE
    else:
        found = comm.communicator.probe(*wanted, is_blocking=is_blocking)
        while found is None and is_blocking:  # another thread received it meanwhile
            found = comm.communicator.probe(*wanted)
    if found is not None:
        CallOutcome(found.source, found.tag, found.count).write(status)
    return found


def claim(comm: Any, source: Any, tag: Any, status: Any, *, is_blocking: bool) -> Any:
    """Take the message that a receive would take; write its source, tag and size to `status`.

    The result is an `MpiMessage`; for ``MPI.PROC_NULL``, mpi4py's ``MESSAGE_NO_PROC``. If there is
    no such message yet, wait for one if `is_blocking`, otherwise return None.
    """
    if source == MPI.PROC_NULL:
        probe(comm, source, tag, status, is_blocking=False)
        return MPI.Message(MPI.MESSAGE_NO_PROC)
    while True:
        with comm.taking:
            found = probe(comm, source, tag, status, is_blocking=False)
            if found is not None:
                return MpiMessage.of(comm, found)
        if not is_blocking:
            return None
        probe(comm, source, tag, None, is_blocking=True)


def loaded(data: Any) -> Any:
    """Return the object whose pickle is `data`; None if `data` is empty, as in mpi4py."""
    return MPI.pickle.loads(data.data) if data.size else None


class MpiMessage:
    """Message that `Comm.Mprobe` and `Comm.Improbe` return, in place of ``MPI.Message``.

    Once `Recv`, `Irecv`, `recv` or `irecv` has begun, the object is falsy and equal to
    ``MPI.MESSAGE_NULL``, like a newly constructed object.
    """

    def __init__(self) -> None:
        self._comm: Any = None
        self._data = np.empty(0, np.uint8)
        self._request: Any = None

    @classmethod
    def of(cls, comm: Any, found: Message) -> Self:
        """Take a message of the `Comm` `comm`, so that no other receive can take it.

        `found` must be the first message with its source and tag that no receive has taken yet.
        Therefore the caller must acquire the lock ``comm.taking`` before it probes for `found`, and
        hold the lock until this method returns.
        """
        made = cls()
        made._comm, made._data = comm, np.empty(found.count, np.uint8)
        receive = comm.communicator.recv
        made._request = receive(made._data, found.source, found.tag, async_op=True)
        return made

    @classmethod
    def Probe(
        cls, comm: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None
    ) -> Any:
        """Call `Mprobe` of `comm`."""
        return comm.Mprobe(source, tag, status)

    @classmethod
    def Iprobe(
        cls, comm: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None
    ) -> Any:
        """Call `Improbe` of `comm`."""
        return comm.Improbe(source, tag, status)

    probe, iprobe = Probe, Iprobe

    def Recv(self, buf: Any, status: Any = None) -> None:
        """Copy the message into `buf`; raise `MpiError` (``ERR_TRUNCATE``) if it does not fit."""
        require_status(status)
        with self._handled():
            self._into(buf).run().write(status)

    def Irecv(self, buf: Any) -> MpiRequest:
        """Begin to copy the message into `buf`; return the request."""
        with self._handled():
            return MpiRequest.of(self._comm, self._into(buf))

    def recv(self, status: Any = None) -> Any:
        """Return the Python object of the message."""
        require_status(status)
        with self._handled():
            outcome = self.as_object().run()
        outcome.write(status)
        return outcome.obj

    def irecv(self) -> MpiRequest:
        """Return a request whose `MpiRequest.wait` returns the Python object of the message."""
        with self._handled():
            return MpiRequest.of(self._comm, self.as_object())

    def __bool__(self) -> bool:
        return self._request is not None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MPI.Message):
            return other == MPI.MESSAGE_NULL and not self
        return self is other

    __hash__ = object.__hash__

    def _handled(self) -> AbstractContextManager[None]:
        return handled(MPI.COMM_NULL if self._comm is None else self._comm.mpi)

    def _into(self, buf: Any) -> MessageCall:
        into = message(buf, writable=True)
        data = self._data

        def finish(found: Message) -> None:
            out = into.data(writable=True)
            if data.size > out.size:
                raise MpiError(
                    f"rank {found.source} sent {data.size} bytes with tag {found.tag}, but the "
                    f"buffer has {out.size}: the message is lost; pass a buffer of the "
                    "size in the status of the probe",
                    MPI.ERR_TRUNCATE,
                )
            out[: data.size] = data
            unpack_first(into, out, data.size)

        return MessageCall(self._begin, finish)

    def as_object(self) -> MessageCall:
        """Return the call that receives the Python object of the message."""
        data = self._data
        return MessageCall(self._begin, lambda found: loaded(data))

    def _begin(self) -> Delivery:
        request, self._request = self._request, None
        if request is None:
            raise MpiError(
                "the message has already been received: call Mprobe() for the next one",
                MPI.ERR_REQUEST,
            )
        return Delivery(request)


__all__ = ["MpiMessage", "claim", "loaded", "probe"]

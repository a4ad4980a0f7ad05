"""The transport interface: like NCCL's net plugin, but in Python and with a fence.

A transport moves slices over paths; docs/concepts.md defines these and other terms. The calls of
this interface hide the differences between a socket and a queue pair, for example:

========================  ==============================  ====================================
call                      over TCP                        over verbs
========================  ==============================  ====================================
``irecv``                 a clear-to-send frame; the      an address and a remote key, sent to
                          slice is read into the region   the peer ahead of the slice
``isend``                 ``sendmsg`` from the view       RDMA_WRITE_WITH_IMM
``fence``                 close the socket                queue pair to ERR, then drain it
``probe``                 TCP connects on sockets used    an RDMA write of 0 bytes, on a queue
                          for nothing else                pair used for nothing else
========================  ==============================  ====================================

Two protocols carry a slice. *Eager*: the sender calls ``isend`` without waiting for an ``irecv`` of
the receiver. The payload arrives in the transport's memory, and the `Arrived` event borrows it
until the next ``poll``. *Cleared*: the receiver announces the landing place with ``irecv``, the
sender is notified by `Cleared` and calls ``isend`` on the same path. The payload arrives in the
landing place.

Invariants:

- After `Fenced` no byte of the old path reaches a landing place that was announced on it, and the
  transport no longer reads any view that ``isend`` was given on it.
- A slice that the transport confirmed on its own (see ``irecv``) reaches its landing place even if
  the path is fenced.
- Eager slices of one path arrive in the order of their ``isend`` calls, and so do cleared slices
  that are not replays. Eager slices and replays may overtake cleared slices.
- Every event of a path names the path. Until a path is opened again, it reports `Failed` at most
  once.

A *probe* tests whether a port of the peer still answers. The peer's NIC or kernel answers, so a
probe is answered even while the peer's process is stopped. Invariants: a probe never uses the
socket or queue pair of a path, so it works while the path is fenced and does not disturb the path;
every probe that was started is reported by exactly one `Probed`, unless the transport is closed
first.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from r2ccl.types import PathKey, ProbeKey


class Frame(msgspec.Struct, gc=False):
    """Header of a slice, or of the announcement of a landing place for it.

    ``channel`` and the two ranks determine the link; ``seq`` is the number of the slice on it.
    ``ack`` is a confirmation: the sender of this header has consumed the other rank's slices of the
    channel with numbers below ``ack``. ``op`` is the number of the collective within the
    communicator; ``signature`` is its packed `CallSignature`, which must be equal at both ends of
    the link. In the slices of point-to-point messages, ``op`` and ``signature`` are 0.

    Over verbs, a cleared slice travels without a header: its `Arrived` contains the frame that the
    receiver passed to ``irecv``, with ``ack`` set to 0.
    """

    channel: int
    seq: int
    ack: int
    op: int
    signature: int


class Arrived(msgspec.Struct, gc=False):
    """Event: a slice arrived.

    A cleared slice is in its landing place and ``payload`` is None. An eager slice is in
    ``payload``, which is borrowed until the next ``poll``. ``began_s`` is a time of the transport's
    clock, in seconds: for a cleared slice over TCP, the time at which the header of its first
    fragment was read; in the simulation, the time at which the first half of a cleared slice was
    written; in all other cases, the time at which the transport noticed the complete slice. For
    slices that compiled code received, it is the time at which Python took over the call.
    ``is_confirmed`` is True if the transport has already confirmed the slice to the sender.
    """

    path: PathKey
    frame: Frame
    payload: memoryview | None
    began_s: float
    is_confirmed: bool = False


class Cleared(msgspec.Struct, gc=False):
    """Event: the peer announced a landing place of ``nbytes`` bytes for slice ``frame.seq``.

    Send the slice on the same path, by ``isend`` with this ``token``.
    """

    path: PathKey
    frame: Frame
    nbytes: int
    token: object


class Confirmed(msgspec.Struct, gc=False):
    """Event: the peer confirmed this rank's slices of the channel with numbers below ``ack``."""

    path: PathKey
    channel: int
    ack: int


class Sent(msgspec.Struct, gc=False):
    """Event: progress of slice ``seq`` of ``channel``, which was passed to ``isend``.

    For a cleared slice: the transport no longer reads its view. For an eager slice: the slice is
    queued, and its view must stay unchanged until the peer has confirmed it or the path is fenced.
    """

    path: PathKey
    channel: int
    seq: int


class Failed(msgspec.Struct, gc=False):
    """Event: the path failed and can only be fenced now.

    ``status`` is the name of the error, such as ``ECONNRESET`` or ``RETRY_EXC_ERR``; ``detail``
    explains it to the user.
    """

    path: PathKey
    status: str
    detail: str


class Joined(msgspec.Struct, gc=False):
    """Event: a connection test, started by `Endpoint.join` with ``is_caller=True``, has ended.

    ``endpoint`` is this rank's end. ``error`` tells why the test failed; empty if it succeeded. An
    end of a path also reports `Joined` if it fails before the path is opened; ``error`` then tells
    why.
    """

    key: PathKey | ProbeKey
    endpoint: Endpoint
    error: str = ""


class Probed(msgspec.Struct, gc=False):
    """Event: the outcome of a probe.

    ``is_answered`` is True if the peer's NIC or kernel answered, False if it did not, and None if
    the outcome proves nothing; see `Transport.probe`. ``detail`` explains the outcome to the user.
    """

    key: ProbeKey
    is_answered: bool | None
    detail: str


class RailChanged(msgspec.Struct, gc=False):
    """Event: the state of the local port of ``rail`` changed.

    ``is_up`` is True if the port went up, False if it went down or became unusable. ``why`` is the
    reason that the device gave; empty if it gave none.
    """

    rail: int
    is_up: bool
    why: str = ""


class Fenced(msgspec.Struct, gc=False):
    """Event: the fence of ``path`` is complete.

    From now on no byte of the old path reaches memory, and the transport reads no view that
    ``isend`` was given on the path.
    """

    path: PathKey


Event = Arrived | Cleared | Confirmed | Sent | Failed | Fenced | Joined | RailChanged | Probed


class Endpoint(Protocol):
    """One end of the connection of a path or of a probe, made by `Transport.offer`.

    The two ranks exchange `info` over the control plane; each passes the peer's `info` to `join`.
    """

    @property
    def info(self) -> bytes:
        """Encoded address and settings of this end (endpoint info), for the peer's `join`.

        Raises
        ------
        TransportError
            If the device refuses to make the end.
        """
        ...

    def join(self, info: bytes, is_caller: bool) -> None:
        """Connect to the end that `info` describes.

        Parameters
        ----------
        info : bytes
            The peer's `Endpoint.info`.
        is_caller : bool
            True at one of the two ends: it tests the connection and reports the result as `Joined`.
            The other end must have joined before this call.

        Raises
        ------
        TransportError
            If `info` cannot be decoded, the device refuses to connect, or the link-layer address of
            the peer is not known (status ``NO_NEIGHBOUR``: a later call may succeed).
        """
        ...

    def close(self) -> None:
        """Close this end; data in flight on it may be lost."""
        ...


class Registered(Protocol):
    """Memory that is registered with a transport."""

    def close(self) -> None:
        """End this registration: the caller no longer needs the memory to be registered.

        The transport may keep the memory registered. It always does so while slices in the memory
        are in flight.
        """
        ...


class MemoryUse(NamedTuple):
    """Memory that one transport uses, in bytes.

    Attributes
    ----------
    ring_nbytes : int
        Message rings of the paths that were opened and not fenced since (verbs).
    staging_nbytes : int
        Registered buffers through which slices of unregistered memory are copied.
    registered_nbytes : int
        Memory registered with NICs, counted once even if several NICs have it registered: the
        user's arrays, staging buffers and landing places, but not the rings.
    """

    ring_nbytes: int = 0
    staging_nbytes: int = 0
    registered_nbytes: int = 0


class Transport(Protocol):
    """Interface of a transport, which moves slices over paths.

    Only ``poll`` waits for events, and only ``poll`` reports them. Any thread may call ``wake`` and
    ``memory_use`` at any time; the other methods may be called by one thread at a time.
    """

    #: Number of rails, without the bypass.
    nrails: int

    def joins(self, rail: int) -> bool:
        """Return True if connections of `rail` are made by `offer` and `Endpoint.join`.

        False means that the control plane connects sockets and passes them to `open`.

        If True, the probes of the rail use separate connections, which are made in the same way.
        The rank that probes passes ``is_caller=True`` to `Endpoint.join`, and may call `probe` once
        `Joined` has reported success. The `Endpoint` of the other rank answers probes as soon as
        its ``join`` has returned.
        """
        ...

    def offer(self, key: PathKey | ProbeKey) -> Endpoint:
        """Make this rank's end of a new connection, for a path or for probes.

        In a `ProbeKey`, ``via`` is the rail of this rank's port, on which the end is made, and
        ``rail`` is the rail of the peer's port. The peer's key for its end of the same connection
        therefore has ``via`` and ``rail`` swapped.

        Raises
        ------
        TransportError
            If the device cannot make an end now, for example because its port is down.
        InternalError
            If `joins` is False for the rail.
        """
        ...

    def open(self, path: PathKey, endpoint: Any) -> None:
        """Begin to use a connection as `path`.

        Parameters
        ----------
        path : PathKey
            If the path was open before, it must have been fenced.
        endpoint : socket.socket or Endpoint
            A connected, authenticated socket, or an `Endpoint` that has joined, depending on
            `joins`. The transport owns it from now on.
        """
        ...

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return `nbytes` bytes of memory in which a slice can land without another copy.

        Raises
        ------
        TransportError
            If the memory must be registered and cannot be, as in `register`.
        """
        ...

    def register(self, memory: npt.NDArray[np.uint8]) -> Registered:
        """Register `memory` so that its slices travel without a copy, until `Registered.close`.

        Raises
        ------
        TransportError
            If a device refuses, or R2CC_REGISTRATION_LIMIT_NBYTES would be exceeded.
        InvalidArgument
            If `memory` is empty and the transport needs registration.
        """
        ...

    def register_device(self, address: int, nbytes: int) -> Registered:
        """Register device memory so that its slices travel on every rail, until `Registered.close`.

        While it is registered, ``isend`` and ``irecv`` accept views of it (`r2ccl.device.views`);
        the CPU does not access the bytes. Before the caller sends a slice, the device must have
        finished writing it. A slice that arrived is visible to device work that is enqueued after
        ``poll`` returned its `Arrived`; on a device that reorders NIC writes, only after
        `Device.flush_remote_writes`.

        Parameters
        ----------
        address : int
            Device address of the first byte.
        nbytes : int
            Size of the memory, in bytes.

        Raises
        ------
        TransportError
            If a rail cannot reach the memory, or R2CC_REGISTRATION_LIMIT_NBYTES would be exceeded;
            the message gives the reason.
        InvalidArgument
            If the bytes are not part of one allocation.
        """
        ...

    def memory_use(self) -> MemoryUse:
        """Return the memory that the transport uses now."""
        ...

    def is_open(self, path: PathKey) -> bool:
        """Return True if `path` was opened and has neither failed nor been fenced since."""
        ...

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: object, is_replay: bool = False
    ) -> None:
        """Queue a slice for sending on `path`; do nothing if the path is not open.

        Parameters
        ----------
        path : PathKey
        frame : Frame
            Header of the slice. Its ``ack`` is sent too, so it needs no separate `confirm`.
        view : memoryview
            The bytes of the slice. Those of a cleared slice are borrowed until `Sent` or `Fenced`;
            those of an eager slice until the peer has confirmed the slice, or until `Fenced`.
        token : object
            ``Cleared.token`` of the landing place; None sends the slice eagerly.
        is_replay : bool
            True: a cleared slice overtakes the queued cleared slices that are not replays. Ignored
            for an eager slice.
        """
        ...

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        """Announce `region` to the peer as the landing place of slice ``frame.seq``.

        `region` is borrowed until `Arrived` or `Fenced`. The announcement also carries the
        confirmation ``frame.ack``. Does nothing if the path is not open.

        With `ack` above 0, the transport may confirm the peer's slices of the channel with numbers
        below `ack` as soon as it is certain that slice ``frame.seq`` will land even if the path
        fails; the peer then need not wait until the slice has been read. A transport that cannot be
        certain of this ignores `ack`.
        """
        ...

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """Confirm to the peer that its slices of `channel` numbered below `ack` were consumed.

        Does nothing if the path is not open.
        """
        ...

    def flush(self) -> None:
        """Send queued slices, announcements and confirmations, without waiting for room.

        Data that the sockets and send queues do not accept now stays queued. To send it, call
        `poll` and then `flush` again.

        Raises
        ------
        InternalError
            If an invariant of the transport is violated.
        """
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Return new events; if there are none, wait for one up to `timeout_s` seconds.

        An empty list may be returned before `timeout_s` has passed, for example after `wake`.
        Payloads of `Arrived` events are borrowed until the next call.

        Raises
        ------
        InternalError
            If an invariant of the transport is violated.
        """
        ...

    def wake(self) -> None:
        """Make a waiting ``poll`` return; may also be called after `close`."""
        ...

    def fence(self, path: PathKey) -> None:
        """Take the local end of `path` out of use; `poll` reports `Fenced` when that is complete.

        Before the path is opened again, call this once, even if the path has failed.

        Raises
        ------
        InternalError
            If an invariant of the transport is violated.
        """
        ...

    def has_unsent(self) -> bool:
        """Return True if eager slices or confirmations wait for room in a buffer, queue or ring.

        Later calls of `poll` and `flush` send them. Cleared slices that wait need not be reported,
        because the call or request that they belong to is not complete while they wait.
        """
        ...

    def is_stuck(self, path: PathKey) -> bool:
        """Return True if the transport has evidence that `path`, not the peer, delays data."""
        ...

    def probe(self, key: ProbeKey) -> None:
        """Start a probe of a port; a later `poll` reports the outcome as `Probed`.

        A call has no effect while a probe of the same key is in flight.

        ``Probed.is_answered`` is None if the probe, or a part of it, could not be made and so
        proves nothing, for example because the rail does not exist or no file descriptor is free.
        It is also None if a probe between different rails is not answered and no probe of the same
        key was ever answered, because some fabrics do not connect ports of different rails. In all
        other cases without an answer it is False, for example after the probe timeout, or if the
        local NIC could not send.
        """
        ...

    def descriptors(self) -> list[int]:
        """Return the transport's open file descriptors.

        Call it only while no other thread runs, as in the child of a fork.
        """
        ...

    def close(self) -> None:
        """Close every path and free all resources. Idempotent.

        Raises
        ------
        InternalError
            If an invariant of the transport is violated.
        """
        ...


class WrappedTransport(Transport, Protocol):
    """Transport that wraps another one."""

    def begin(self, first_op: int) -> None:
        """Record that `r2ccl.init` is complete.

        Collectives with numbers below `first_op` belong to ``init``, all others to the user.
        """
        ...


class TransportWrapper(Protocol):
    """Factory of transports that wrap the one in use, for example to inject faults."""

    def wrap(self, inner: Transport, rank: int, nranks: int) -> WrappedTransport:
        """Return a transport that wraps and owns `inner`, the transport of `rank` of `nranks`."""
        ...


__all__ = [
    "Arrived",
    "Cleared",
    "Confirmed",
    "Endpoint",
    "Event",
    "Failed",
    "Fenced",
    "Frame",
    "Joined",
    "MemoryUse",
    "Probed",
    "RailChanged",
    "Registered",
    "Sent",
    "Transport",
    "TransportWrapper",
    "WrappedTransport",
]

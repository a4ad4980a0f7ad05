"""The transport interface: NCCL's net plugin in Python, with a fence.

A transport moves slices over paths. Only transports and bootstrap use sockets, and only transports
use verbs; these calls hide the differences between a socket and a queue pair:

========================  ==============================  ====================================
call                      over TCP                        over verbs
========================  ==============================  ====================================
``irecv``                 a clear-to-send frame; the      the region's address and remote key,
                          slice is read into the region   sent to the peer ahead of the slice
``isend``                 ``sendmsg`` from the view       RDMA_WRITE_WITH_IMM
``fence``                 close the socket                queue pair to ERR, then drain it
``probe``                 TCP connects on sockets used    an RDMA write of 0 bytes, on a queue
                          for nothing else                pair used for nothing else
========================  ==============================  ====================================

Two protocols carry a slice. *Eager*: ``isend`` without an ``irecv``; the payload arrives in the
transport's memory and is borrowed by its `Arrived` event until the next ``poll``. *Cleared*: the
receiver announces the landing place with ``irecv``, the sender is notified by `Cleared` and answers
with ``isend`` on the same path; the payload lands in the region itself.

Invariants:

- After `Fenced` no byte of the old path reaches memory named on that path, and the transport no
  longer reads any ``isend`` view of that path.
- A slice that the transport confirmed on its own is in the receiver's kernel and still reaches its
  landing place, even if the path is fenced.
- Cleared slices of one path arrive in the order of their ``isend`` calls, and so do eager slices.
  Eager slices and replays may overtake cleared slices.
- Every event of a path names the path. A path that fails reports `Failed` once.

A *probe* tests whether a port of the peer still answers. The peer's NIC or kernel answers, not its
process: the probe of a stopped process is answered too. Invariants: a probe never uses the socket
or queue pair of a path, so it works while the path is fenced and does not disturb the path; every
probe that was started is reported by exactly one `Probed`, whatever happens to the port.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from r2ccl.types import PathKey, ProbeKey


class Frame(msgspec.Struct, gc=False):
    """Header fields of a slice, the same for every transport.

    Over verbs, a cleared slice is written without a header: its `Arrived` repeats the frame that
    the receiver passed to ``irecv``, with ``ack`` 0.

    ``channel`` and ``seq`` identify the slice on its directed link. ``ack`` confirms the opposite
    link of the same channel: every slice with a number below ``ack`` was consumed. ``op`` is the
    number of the collective within the communicator; ``signature`` is its packed `CallSignature`,
    which must be equal on all ranks.
    """

    channel: int
    seq: int
    ack: int
    op: int
    signature: int


class Arrived(msgspec.Struct, gc=False):
    """Event: a slice arrived.

    A cleared slice is in its landing place and ``payload`` is None. An eager slice is in
    ``payload``, which is borrowed until the next ``poll``. ``began_s`` is the clock's time, in
    seconds, when the transport saw the first byte; over verbs, when it polled the completion of the
    whole slice. ``is_confirmed`` is True if the transport has already confirmed the slice to the
    sender.
    """

    path: PathKey
    frame: Frame
    payload: memoryview | None
    began_s: float
    is_confirmed: bool = False


class Cleared(msgspec.Struct, gc=False):
    """Event: the peer announced a landing place of ``nbytes``; answer with ``isend(token=...)``."""

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
    """Event: the transport no longer reads the view of this cleared slice.

    For an eager slice it means only that the slice is queued: the view must stay unchanged until
    the peer has confirmed the slice, or the path is fenced.
    """

    path: PathKey
    channel: int
    seq: int


class Failed(msgspec.Struct, gc=False):
    """Event: the path failed. ``status`` is the cause's name, ``detail`` a text for people."""

    path: PathKey
    status: str
    detail: str


class Joined(msgspec.Struct, gc=False):
    """Event: the verification of `endpoint` ended; ``error`` is empty if it succeeded."""

    key: PathKey | ProbeKey
    endpoint: Endpoint
    error: str = ""


class Probed(msgspec.Struct, gc=False):
    """Event: the outcome of a probe.

    ``is_answered`` is True if the peer's NIC or kernel answered; False if it did not answer within
    the probe timeout or the local NIC could not send; None if the probe could not be made and so
    proves nothing. ``detail`` is a text for people.
    """

    key: ProbeKey
    is_answered: bool | None
    detail: str


class RailChanged(msgspec.Struct, gc=False):
    """Event: the device reported that the local port of ``rail`` went up or down.

    ``why`` is the device's reason; empty if it gave none.
    """

    rail: int
    is_up: bool
    why: str = ""


class Fenced(msgspec.Struct, gc=False):
    """Event: the local end of the path is out of use and drained; see the module's invariants."""

    path: PathKey


Event = Arrived | Cleared | Confirmed | Sent | Failed | Fenced | Joined | RailChanged | Probed


class Endpoint(Protocol):
    """One end of a path's or a probe's connection, connected by an exchange of endpoint info."""

    @property
    def info(self) -> bytes:
        """Encoded endpoint info, which the peer passes to `join`; the control plane carries it.

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
            True at the end that tests the connection and reports `Joined`. The other end must
            have joined before the caller does.

        Raises
        ------
        TransportError
            If the endpoint info cannot be decoded, the device refuses to connect, or the peer's
            link-layer address is not resolved yet (status ``NO_NEIGHBOUR``): try again later.
        """
        ...

    def close(self) -> None:
        """Discard this end; whatever it has in flight is abandoned."""
        ...


class Registered(Protocol):
    """Memory that is registered with a transport."""

    def close(self) -> None:
        """End this use of the registration; memory of slices in flight stays registered."""
        ...


class MemoryUse(NamedTuple):
    """Memory of one transport in bytes.

    Attributes
    ----------
    ring_nbytes : int
        Message rings of the open paths.
    staging_nbytes : int
        Buffers for slices of memory that is not registered.
    registered_nbytes : int
        Memory registered with NICs, each byte counted once: the user's, and staging buffers and
        landing places, but not rings.
    """

    ring_nbytes: int = 0
    staging_nbytes: int = 0
    registered_nbytes: int = 0


class Transport(Protocol):
    """Interface of a transport, which moves slices over paths.

    Only ``poll`` waits, and only ``poll`` reports events. One thread at a time may call the
    methods, except ``wake``.
    """

    #: Number of rails, without the bypass.
    nrails: int

    def joins(self, rail: int) -> bool:
        """Return True if connections of `rail` are made by `offer` and `Endpoint.join`.

        False means that the control plane connects sockets and passes them to `open`.

        If True, the probes of the rail use separate connections, which are joined like paths. The
        rank that probes joins with ``is_caller``; its end is in use from its `Joined` on, the
        peer's end as soon as it has joined.
        """
        ...

    def offer(self, key: PathKey | ProbeKey) -> Endpoint:
        """Make this rank's end of a path or of a probe's connection, on a rail that `joins`.

        The end of a probe's connection is on this rank's port of rail ``key.via``, at the rank
        that probes and at the rank that is probed.

        Raises
        ------
        TransportError
            If the device cannot make an end now, for example because its port is down.
        InternalError
            If the rail does not use `offer`.
        """
        ...

    def open(self, path: PathKey, endpoint: Any) -> None:
        """Begin to use `endpoint`, which is connected and authenticated, as `path`.

        The transport owns `endpoint` from now on. A path that was used before must be fenced.
        """
        ...

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return `nbytes` bytes of memory in which a slice can land without another copy.

        Raises
        ------
        TransportError
            As `register`.
        """
        ...

    def register(self, memory: npt.NDArray[np.uint8]) -> Registered:
        """Register `memory` so that its slices travel without a copy, until `Registered.close`.

        Raises
        ------
        TransportError
            If the device refuses, or the limit of registered memory would be exceeded.
        InvalidArgument
            If `memory` is empty and the transport needs registration.
        """
        ...

    def register_device(self, address: int, nbytes: int) -> Registered:
        """Register device memory so that its slices travel on every rail, until `Registered.close`.

        While it is registered, ``isend`` and ``irecv`` accept views of it (`r2ccl.device.views`);
        only NICs read and write the bytes. The caller must know that the device has finished
        writing a slice before it sends the slice. Data that arrived is visible to device work that
        is enqueued after the event was polled; on a device that reorders NIC writes, only after
        `Device.flush_remote_writes`.

        Parameters
        ----------
        address : int
        nbytes : int

        Raises
        ------
        TransportError
            If a rail cannot reach the memory; the message gives the reason.
        InvalidArgument
            If the bytes are not part of one allocation.
        """
        ...

    def memory_use(self) -> MemoryUse:
        """Return the memory that the transport uses now; any thread may call it."""
        ...

    def is_open(self, path: PathKey) -> bool:
        """Return True if `path` was opened and has neither failed nor been fenced since."""
        ...

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: object, is_replay: bool = False
    ) -> None:
        """Queue a slice for sending on `path`.

        `view` is borrowed until `Sent` or `Fenced`; that of an eager slice until the peer has
        confirmed the slice, or `Fenced`. Does nothing if the path is not open.

        Parameters
        ----------
        path : PathKey
        frame : Frame
        view : memoryview
            The bytes of the slice.
        token : object
            ``Cleared.token`` of the landing place; None sends the slice eagerly.
        is_replay : bool
            True lets a cleared slice overtake those that are queued, even other replays.
        """
        ...

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        """Announce `region` to the peer as the landing place of slice ``frame.seq``.

        `region` is borrowed until `Arrived` or `Fenced`. Does nothing if the path is not open.

        With `ack` above 0, the transport may confirm the peer's slices below `ack` as soon as
        this slice is certain to land whatever happens to the path. The peer then does not wait
        until the slice has been read. A transport that cannot know this never confirms on its own.
        """
        ...

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """Confirm to the peer that its slices of `channel` numbered below `ack` were consumed.

        Does nothing if the path is not open.
        """
        ...

    def flush(self) -> None:
        """Send what is queued, as far as sockets and send queues have room now."""
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Return new events; if there are none, wait for one up to `timeout_s` seconds."""
        ...

    def wake(self) -> None:
        """Make a waiting ``poll`` return; any thread may call this, even after `close`."""
        ...

    def fence(self, path: PathKey) -> None:
        """Take the local end of `path` out of use; `Fenced` is reported once the end is drained.

        Call it once for each `open`, also if the path has failed.
        """
        ...

    def has_unsent(self) -> bool:
        """Return True if data waits for a later `poll` because a socket buffer is full."""
        ...

    def is_stuck(self, path: PathKey) -> bool:
        """Return True if the transport has evidence that `path`, not the peer, delays data."""
        ...

    def probe(self, key: ProbeKey) -> None:
        """Start a probe of a port; `Probed` follows within the probe timeout.

        A call has no effect while a probe of the same key is in flight.

        The outcome is None ("could not be made") if the probe proves nothing, for example because
        the rail does not exist. Some fabrics do not connect ports on different rails. The outcome
        of an unanswered probe between different rails is therefore None, not False, until a probe
        of the same key has been answered once.
        """
        ...

    def descriptors(self) -> list[int]:
        """Return the open file descriptors; call it only while nothing else runs (after a fork)."""
        ...

    def close(self) -> None:
        """Close every path and free all resources."""
        ...


class WrappedTransport(Transport, Protocol):
    """Transport that wraps another one."""

    def begin(self, first_op: int) -> None:
        """Handle the end of `init`: collectives from number `first_op` on are the user's."""
        ...


class TransportWrapper(Protocol):
    """Factory of transports that wrap the one in use, for example to inject faults."""

    def wrap(self, inner: Transport, rank: int) -> WrappedTransport:
        """Return the transport of `rank` that wraps `inner` and owns it."""
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

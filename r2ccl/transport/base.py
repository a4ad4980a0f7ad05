"""The transport interface: NCCL's net plugin in Python, with a fence.

A transport moves slices over paths and knows nothing of links, schedules or migration. It may
import sockets or verbs; nothing above it may. What differs between a socket and a queue pair
stays behind these calls:

========================  ==============================  ====================================
call                      over TCP                        over verbs
========================  ==============================  ====================================
``irecv``                 a clear-to-send frame; the      address and remote key of the chosen
                          slice is read into the region   NIC, sent ahead
``isend``                 ``sendmsg`` from the view       RDMA_WRITE_WITH_IMM
``fence``                 close                           queue pair to ERR, drained
``probe``                 connects of its own             a write of nothing, on a queue pair of
                                                          its own
========================  ==============================  ====================================

Two protocols carry a slice. *Eager*: ``isend`` without an ``irecv``; the payload arrives in the
transport's memory and is borrowed by its `Arrived` event until the next ``poll``. *Cleared*: the
receiver names the landing place with ``irecv``, the sender learns of it by `Cleared` and answers
with ``isend`` on the same path; the payload lands in the region itself.

Invariants: after `Fenced` no byte of the old path reaches any memory named on it, and every
``isend`` view of it is no longer read; a slice the transport confirmed by itself arrived before.
Slices of one path arrive in the order they were sent.
Every event of a path names it; a path reports `Failed` once.

A *probe* asks whether a port at the far end still answers. The NIC or the kernel does, never the
process: one that is stopped answers probes and echoes nothing. Invariants: no probe travels on a
path's own socket or queue pair, so it survives the fence of the path and disturbs nothing on it;
every probe that was asked is followed by one `Probed`, whatever happens to the port.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from r2ccl.types import PathKey, ProbeKey


class Frame(msgspec.Struct, gc=False):
    """What a slice says about itself on the wire, whatever the transport.

    ``channel`` and ``seq`` name the slice on its directed link; ``ack`` confirms the opposite
    link of the same channel: every slice below it was consumed. ``op`` counts the communicator's
    planned collectives and ``signature`` is the packed `CallSignature` all ranks must share.
    """

    channel: int
    seq: int
    ack: int
    op: int
    signature: int


class Arrived(msgspec.Struct, gc=False):
    """A slice is here: in its landing place, or in ``payload``, borrowed until the next poll.

    ``began_s`` is the clock's reading when its first byte was seen, ``is_confirmed`` whether the
    transport has confirmed it by itself.
    """

    path: PathKey
    frame: Frame
    payload: memoryview | None
    began_s: float
    is_confirmed: bool = False


class Cleared(msgspec.Struct, gc=False):
    """The peer named a landing place of ``nbytes``; answer with ``isend(token=token)``."""

    path: PathKey
    frame: Frame
    nbytes: int
    token: object


class Confirmed(msgspec.Struct, gc=False):
    """The peer consumed every slice of the link below ``ack``."""

    path: PathKey
    channel: int
    ack: int


class Sent(msgspec.Struct, gc=False):
    """The transport no longer reads the view of this slice (the work request is retired)."""

    path: PathKey
    channel: int
    seq: int


class Failed(msgspec.Struct, gc=False):
    """The path broke: ``status`` is the decoded cause, ``detail`` what a person reads."""

    path: PathKey
    status: str
    detail: str


class Joined(msgspec.Struct, gc=False):
    """An `Endpoint` reached its peer and back, or did not: ``error`` says why."""

    key: PathKey | ProbeKey
    error: str = ""


class Probed(msgspec.Struct, gc=False):
    """What became of a probe.

    ``is_answered`` is True if the far end's NIC or kernel answered, False if it was asked and did
    not answer in time or this end's NIC could not send, and None if it could not be asked;
    ``detail`` is what a person reads.
    """

    key: ProbeKey
    is_answered: bool | None
    detail: str


class RailChanged(msgspec.Struct, gc=False):
    """The local port of ``rail`` went up or down, by the device's own word.

    ``why`` is what the device said beside that; empty: nothing.
    """

    rail: int
    is_up: bool
    why: str = ""


class Fenced(msgspec.Struct, gc=False):
    """The local end of the path is out of use and drained."""

    path: PathKey


Event = Arrived | Cleared | Confirmed | Sent | Failed | Fenced | Joined | RailChanged | Probed


class Endpoint(Protocol):
    """One end of a path or of a probe's connection, until both ends exchanged endpoint info."""

    @property
    def info(self) -> bytes:
        """What the peer must know of this end, for the control plane to carry.

        Raises
        ------
        TransportError
            The device refused.
        """
        ...

    def join(self, info: bytes, is_caller: bool) -> None:
        """Connect to the end that `info` describes; the caller's `Joined` follows.

        The peer must have joined before the caller does.

        Raises
        ------
        TransportError
            The endpoint info makes no sense, or the device refused.
        """
        ...

    def close(self) -> None:
        """Give it up."""
        ...


class Registered(Protocol):
    """Memory a transport has prepared."""

    def close(self) -> None:
        """End it; slices under way are finished first."""
        ...


class Transport(Protocol):
    """What a link needs from the wire. Calls never block; only ``poll`` reports."""

    nrails: int

    def joins(self, rail: int) -> bool:
        """Whether the ends of this rail's paths are made by `offer` and joined; else, sockets.

        Then its probes have connections of their own, which are joined as paths are: at the end
        that asks with ``is_caller``; it is in use with its `Joined`, the other as soon as it is
        joined.
        """
        ...

    def offer(self, key: PathKey | ProbeKey) -> Endpoint:
        """Make this rank's end of a path, or of a probe's connection, of a rail that `joins`.

        A probe's end is on the port of rail ``via``, whichever of the two it is.

        Raises
        ------
        TransportError
            The device cannot make one now (its port is down).
        """
        ...

    def open(self, path: PathKey, endpoint: Any) -> None:
        """Take an established, authenticated endpoint into use as `path`."""
        ...

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return memory in which a slice can land without another copy."""
        ...

    def register(self, memory: npt.NDArray[np.uint8]) -> Registered:
        """Prepare `memory` so that slices of it travel without a copy; `close` ends that.

        Raises
        ------
        TransportError
            The device refused, or the limit of registered memory would be exceeded.
        """
        ...

    def register_device(self, address: int, nbytes: int) -> Registered:
        """Prepare device memory, so that slices of it travel on every rail; `close` ends that.

        Until then ``isend`` and ``irecv`` take views of it (`r2ccl.device.views`), whose bytes
        only NICs touch. What the device writes must be known to be written before it is sent; what
        arrived is there for work that the device is given after the event was polled.

        Raises
        ------
        TransportError
            A rail cannot reach it; says which and why.
        """
        ...

    def is_open(self, path: PathKey) -> bool:
        """Whether `path` was opened and not yet failed or fenced."""
        ...

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: object, is_replay: bool = False
    ) -> None:
        """Queue a slice; `view` is borrowed until `Sent` or `Fenced`.

        ``token`` is what `Cleared` brought; None: eager. A replay overtakes queued slices. On a
        path that is not open nothing happens: its `Failed` is on the way.
        """
        ...

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        """Name where the slice ``frame.seq`` lands; `region` is borrowed until it arrives.

        ``ack`` above 0 allows the transport to confirm the peer's slices below `ack` by itself,
        once nothing that happens to the path can keep this slice from landing: the peer then need
        not wait until it is read. A transport that cannot tell leaves it to the caller.
        """
        ...

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """Tell the peer that every slice of its link below `ack` was consumed."""
        ...

    def flush(self) -> None:
        """Put everything queued on the wire, as far as it takes it."""
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Collect what happened; sleeps up to `timeout_s` when nothing has."""
        ...

    def wake(self) -> None:
        """End a sleeping ``poll``; the only call allowed from another thread."""
        ...

    def fence(self, path: PathKey) -> None:
        """Take the local end of `path` out of use; `Fenced` follows once it is drained."""
        ...

    def has_unsent(self) -> bool:
        """Whether something waits for a later `poll`, as a socket took no more."""
        ...

    def is_stuck(self, path: PathKey) -> bool:
        """Whether the path itself (not the peer) holds data up, by the transport's own evidence."""
        ...

    def probe(self, key: ProbeKey) -> None:
        """Begin to ask for a sign of life; `Probed` follows within the probe timeout.

        One at a time per key: asked again meanwhile, it adds nothing. A way between different
        rails that has never answered, since it was first asked or joined, may not exist on this
        fabric: it counts as one that cannot be asked. So does a rail there is none of.
        """
        ...

    def descriptors(self) -> list[int]:
        """File descriptors in use; read where nothing else runs, as in the child of a fork."""
        ...

    def close(self) -> None:
        """Fence every path and free everything."""
        ...


class WrappedTransport(Transport, Protocol):
    """A transport around another."""

    def begin(self, first_op: int) -> None:
        """From collective `first_op` on the communicator is its user's."""
        ...


class TransportWrapper(Protocol):
    """Puts a transport around the one in use, such as one that has faults strike."""

    def wrap(self, inner: Transport, rank: int) -> WrappedTransport:
        """Return the transport of `rank`, which owns `inner`."""
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
    "Probed",
    "RailChanged",
    "Registered",
    "Sent",
    "Transport",
    "TransportWrapper",
    "WrappedTransport",
]

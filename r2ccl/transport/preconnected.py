"""Defaults for transports whose connections the control plane makes, such as TCP.

`Transport.open` of such a transport is given connections that are ready, such as sockets. The
transport needs no registered memory.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from r2ccl.errors import InternalError, TransportError
from r2ccl.transport.aligned import aligned_memory
from r2ccl.transport.base import Endpoint
from r2ccl.types import PathKey, ProbeKey


class Unregistered:
    """Registration with a transport that needs none (implements `Registered`)."""

    def close(self) -> None:
        """Do nothing: nothing was registered."""


class PreconnectedTransport:
    """Base class of transports whose connections the control plane makes.

    Implements the methods of `Transport` that make endpoints and register memory: these transports
    need neither.
    """

    def joins(self, rail: int) -> bool:
        """Return False: the control plane makes the connections."""
        return False

    def offer(self, key: PathKey | ProbeKey) -> Endpoint:
        """Raise InternalError: the control plane makes the connections of this transport."""
        raise InternalError(
            f"an endpoint was requested for rail {key.rail} to rank {key.peer}, but the control "
            "plane makes the connections of this rail"
        )

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return `nbytes` bytes of ordinary memory, which begins at a cache line."""
        return aligned_memory(nbytes)

    def register(self, memory: npt.NDArray[np.uint8]) -> Unregistered:
        """Return a registration that does nothing: no memory needs one."""
        return Unregistered()

    def register_device(self, address: int, nbytes: int) -> Unregistered:
        """Raise TransportError (``HOST_ONLY``): the CPU cannot move bytes of device memory."""
        raise TransportError(
            "sockets cannot reach device memory: the data must be staged through host memory",
            status="HOST_ONLY",
        )


__all__ = ["PreconnectedTransport", "Unregistered"]

"""What transports have in common whose ends others connect and whose memory needs no preparing.

Invariant: nothing here touches the wire.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from r2ccl.errors import InternalError, TransportError
from r2ccl.transport.base import Endpoint
from r2ccl.types import PathKey, ProbeKey


class Unregistered:
    """`Registered` where there is nothing to prepare."""

    def close(self) -> None:
        """Nothing to end."""


class PreconnectedTransport:
    """The part of `Transport` that is about NICs which join their ends and must know the memory."""

    def joins(self, rail: int) -> bool:
        """Never: the control plane connects the ends."""
        return False

    def offer(self, key: PathKey | ProbeKey) -> Endpoint:
        """See `Transport.offer`; there is nothing to offer here."""
        raise InternalError(f"rail {key.rail} to rank {key.peer} does not join its ends")

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return memory; any is as good."""
        return np.empty(nbytes, np.uint8)

    def register(self, memory: npt.NDArray[np.uint8]) -> Unregistered:
        """Nothing to prepare."""
        return Unregistered()

    def register_device(self, address: int, nbytes: int) -> Unregistered:
        """Refuse: what moves the bytes is this process, which cannot touch them."""
        raise TransportError(
            "sockets do not reach device memory: it passes through the host", status="HOST_ONLY"
        )


__all__ = ["PreconnectedTransport", "Unregistered"]

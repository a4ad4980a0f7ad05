"""Interfaces of the control plane that the data plane uses; no method blocks.

`r2ccl.bootstrap.control.ControlPlane` and the simulator in `r2ccl.testing.simulation` implement
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from r2ccl.types import BypassWay


class Post(Protocol):
    """Sender of control messages to other ranks."""

    def send(self, peer: int, message: object) -> None:
        """Queue `message` for `peer`; it arrives exactly once, in the order sent."""
        ...

    def broadcast(self, message: object) -> None:
        """Queue `message` for every other rank; it arrives even if ranks in between are lost."""
        ...

    def gossip(self, message: object, source: int = -1) -> None:
        """Queue `message` for every neighbor in the overlay network except `source`."""
        ...


class ControlPort(Post, Protocol):
    """Control plane that also connects paths; new connections go to the handler's ``on_path``.

    Attributes
    ----------
    neighbors : frozenset of int
        Ranks that `gossip` sends to; see `r2ccl.bootstrap.overlay`.
    """

    neighbors: frozenset[int]

    def open_session(self, peer: int) -> None:
        """Send messages to `peer` directly from now on; `peer` must do the same."""
        ...

    def accept_path(self, peer: int, rail: int, epoch: int) -> None:
        """Accept one data connection with exactly this (peer, rail, epoch)."""
        ...

    def dial_path(self, peer: int, rail: int, epoch: int) -> None:
        """Connect the path to `peer` on `rail`; retry until it succeeds or is cancelled."""
        ...

    def dial_bypass(self, peer: int, epoch: int, ways: Sequence[BypassWay]) -> None:
        """Connect to `peer`, as its path of rail `BYPASS`, by the first of `ways` that works."""
        ...

    def cancel_path(self, peer: int, rail: int) -> None:
        """Cancel `accept_path`, `dial_path` and `dial_bypass` of this path."""
        ...

    def kick(self, rail: int) -> None:
        """Dial the pending paths of `rail` now, without waiting for their next retry."""
        ...

    def obstacles(self, peer: int) -> list[str]:
        """Return the reasons known here why paths to `peer` are not connected; any thread."""
        ...


__all__ = ["ControlPort", "Post"]

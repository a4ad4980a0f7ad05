"""What the data plane needs of the control plane, as interfaces; nothing in them blocks.

`r2ccl.bootstrap.control.ControlPlane` is what implements them, and `r2ccl.testing.simulation` has
one of its own. Interfaces only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from r2ccl.types import BypassWay


class Post(Protocol):
    """Carries messages to other ranks."""

    def send(self, peer: int, message: object) -> None:
        """Queue `message`; it arrives exactly once, in order."""
        ...

    def broadcast(self, message: object) -> None:
        """`send` to every other rank."""
        ...


class ControlPort(Post, Protocol):
    """Connects paths too; a connection is reported to the handler's ``on_path``."""

    def accept_path(self, peer: int, rail: int, epoch: int) -> None:
        """Let in one connection of exactly (peer, rail, epoch)."""
        ...

    def dial_path(self, peer: int, rail: int, epoch: int) -> None:
        """Connect until it succeeds."""
        ...

    def dial_bypass(self, peer: int, epoch: int, ways: Sequence[BypassWay]) -> None:
        """Connect by the first of `ways` that works, if one does; as rail `BYPASS`."""
        ...

    def cancel_path(self, peer: int, rail: int) -> None:
        """Undo `accept_path` and `dial_path`."""
        ...

    def kick(self, rail: int) -> None:
        """Dial the pending paths of `rail` now."""
        ...

    def obstacles(self, peer: int) -> list[str]:
        """Say why paths to `peer` are not connected, as far as this end knows; any thread."""
        ...


__all__ = ["ControlPort", "Post"]

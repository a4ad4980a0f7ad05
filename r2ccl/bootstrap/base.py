"""Interfaces of the control plane that the data plane uses; no method blocks.

`r2ccl.bootstrap.control.ControlPlane` and the simulator in `r2ccl.testing.simulation` implement
`ControlPort`. `r2ccl.runtime.contexts.ContextPost` implements only `Post`, for the ranks of one
communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from r2ccl.types import BypassWay


class Post(Protocol):
    """Sender of control messages to other ranks.

    The argument `peer` must be another rank. The message must be of a registered type, and its
    encoded form must have at most `r2ccl.bootstrap.messages.MAX_MESSAGE_NBYTES` bytes. Otherwise
    `ControlPlane` raises InvalidArgument; other implementations need not check.

    Attributes
    ----------
    neighbors : frozenset of int
        Ranks that `gossip` sends to; see `r2ccl.bootstrap.overlay`.
    """

    neighbors: frozenset[int]

    def send(self, peer: int, message: object) -> None:
        """Queue `message` for `peer`.

        Over a session with `peer`, messages arrive exactly once and in the order sent, unless
        `peer` or this rank is lost or leaves. Without a session, the message passes through other
        ranks: it arrives at most once, may be lost if one of these ranks is lost or leaves
        meanwhile, and may be overtaken by a later message if a session is opened in between.
        """
        ...

    def broadcast(self, message: object) -> None:
        """Queue `message` for every other rank.

        Each rank gets the message at most once, and may miss it if ranks are lost or leave
        meanwhile.
        """
        ...

    def gossip(self, message: object, source: int = -1) -> None:
        """Queue `message` for every rank in ``neighbors`` except `source`; -1 excludes none."""
        ...


class ControlPort(Post, Protocol):
    """Sender of control messages that also opens sessions and connects paths.

    Each new connection of a path is passed to `ControlHandler.on_path`. `peer` must be another
    rank. `rail` must be the number of a TCP rail, since the transport itself connects RDMA rails;
    only `accept_path` and `cancel_path` also take rail `BYPASS`. For other values, `ControlPlane`
    raises InvalidArgument, except in `obstacles`; other implementations need not check.
    """

    def open_session(self, peer: int) -> None:
        """Connect a session with `peer`, and send messages to `peer` over it from now on.

        Both ranks call this method: the lower rank dials, the higher rank accepts.
        """
        ...

    def accept_path(self, peer: int, rail: int, epoch: int) -> None:
        """Accept one data connection with exactly this (peer, rail, epoch).

        To be called by the higher of the two ranks.
        """
        ...

    def dial_path(self, peer: int, rail: int, epoch: int) -> None:
        """Connect the path to `peer` on `rail`; to be called by the lower of the two ranks.

        Retries until it succeeds, `cancel_path` is called, or `peer` is lost or leaves.
        """
        ...

    def dial_bypass(self, peer: int, epoch: int, ways: Sequence[BypassWay]) -> None:
        """Connect the path of rail `BYPASS` to `peer` by the first of `ways` that works.

        To be called by the lower of the two ranks. Each way is tried once.
        """
        ...

    def cancel_path(self, peer: int, rail: int) -> None:
        """Cancel `accept_path`, `dial_path` and `dial_bypass` of this path."""
        ...

    def kick(self, rail: int) -> None:
        """Try to connect the pending paths of `rail` now, without waiting for their next retry."""
        ...

    def obstacles(self, peer: int) -> list[str]:
        """Return the reasons known to this rank why paths to `peer` are not connected.

        Any thread may call this.
        """
        ...


__all__ = ["ControlPort", "Post"]

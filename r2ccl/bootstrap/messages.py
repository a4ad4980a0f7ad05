"""What bootstrap itself says: the table of ranks, and the two messages every session understands.

Values only: no I/O, no clock. Invariant: these are the only message types bootstrap adds to those
its user registers; their tags begin with ``boot.``, so that no user's type collides.
"""

from __future__ import annotations

import functools
import operator
import typing
from typing import Any

import msgspec

from r2ccl.errors import InvalidArgument


class PeerInfo(msgspec.Struct, frozen=True):
    """Where one rank is and how to reach it; the same on all ranks.

    Attributes
    ----------
    rank : int
    host : str
        Host name, boot id and network namespace. Equal strings: the same network stack, so
        that loopback reaches; two namespaces of one machine count as two hosts.
    pid : int
    control_addresses : tuple of (str, int)
        Address and port of the control listeners, management first. Rail listeners take control
        connections too.
    rails : tuple of (str, int)
        Address and port of rail i's listener. All ranks have the same number of rails.
    probe_ports : tuple of int
        Port i, at rail i's address, is bound and nobody listens: a connect is refused if the rail
        works.
    nlast_resorts : int
        Rails at the end of these that are the last resort; as many on all ranks.
    hcas : tuple of str
        Names of the RDMA ports it can use beside; as many on all ranks.
    """

    rank: int
    host: str
    pid: int
    control_addresses: tuple[tuple[str, int], ...]
    rails: tuple[tuple[str, int], ...]
    hcas: tuple[str, ...] = ()
    nlast_resorts: int = 0
    probe_ports: tuple[int, ...] = ()

    @property
    def hostname(self) -> str:
        """The part of ``host`` that says something to people."""
        return self.host.partition("/")[0]


class Goodbye(msgspec.Struct, frozen=True, tag="boot.goodbye"):
    """The sender leaves in order: the end of its connections is no loss.

    Handed to ``on_message`` too, so that a call that still waits for this peer can end.
    """


class PeerDown(msgspec.Struct, frozen=True, tag="boot.peer_down"):
    """`rank` is dead or silent as the sender sees it; every receiver reports it as well."""

    rank: int
    why: str


class Codec:
    """Turn messages into bytes and back: bootstrap's own and those its user registers.

    Parameters
    ----------
    message_types : type or union of types
        A tagged `msgspec.Struct`, or ``A | B | C`` of them, with different tags. Kept, for the
        next communicator's.
    """

    def __init__(self, message_types: Any) -> None:
        given = typing.get_args(message_types) or (message_types,)
        self.message_types = message_types
        self._types = (*given, Goodbye, PeerDown)
        union = functools.reduce(operator.or_, self._types)
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(union)

    def encode(self, message: object) -> bytes:
        """Return the MessagePack form.

        Raises
        ------
        InvalidArgument
            The type was not registered: no rank could read it.
        """
        if not isinstance(message, self._types):
            names = ", ".join(t.__name__ for t in self._types)
            raise InvalidArgument(
                f"a {type(message).__name__} is no message of this control plane; known: {names}"
            )
        return msgspec.msgpack.encode(message)

    def decode(self, body: bytes) -> object:
        """Invert `encode`.

        Raises
        ------
        msgspec.MsgspecError
            Not one of the registered types.
        """
        return self._decoder.decode(body)


__all__ = ["Codec", "Goodbye", "PeerDown", "PeerInfo"]

"""`PeerInfo`, the message types that bootstrap sends on control sessions, and their codec.

Invariant: the tags of these message types begin with ``boot.``, so that they differ from the tags
of the types that the data plane registers.
"""

from __future__ import annotations

import functools
import operator
import typing
from typing import Any

import msgspec

from r2ccl.bootstrap.session import MAX_BODY_NBYTES
from r2ccl.errors import InvalidArgument

#: Maximum size of an encoded message, in bytes; the fields of `Flooded` and `Routed` around it take
#: under 128 bytes.
MAX_MESSAGE_NBYTES = MAX_BODY_NBYTES - 128


class PeerInfo(msgspec.Struct, frozen=True):
    """Host, process and addresses of one rank; after the rendezvous, all ranks have equal copies.

    Attributes
    ----------
    rank : int
    host : str
        Host name, boot id and network namespace. Ranks with equal strings share a network stack
        and reach each other by loopback; two namespaces of one machine count as two hosts.
    pid : int
    control_addresses : tuple of (str, int)
        Address and port of each control listener. Rail listeners accept control connections, too.
    rails : tuple of (str, int)
        Address and port of the listener of TCP rail i. All ranks have the same number of TCP rails.
    probe_ports : tuple of int
        Port i, at rail i's address, is bound but not listened on: if the rail works, the kernel
        refuses a connection to it.
    nlast_resorts : int
        Number of rails at the end of ``rails`` that are last resorts; equal on all ranks.
    hcas : tuple of str
        Names of the RDMA ports, the same number on all ranks. Their rails are numbered after those
        in ``rails``.
    interfaces : tuple of str
        Name of rail i's network interface, for the rails in ``rails``.
    failed_nics : str
        ``R2CC_FAILED_NICS`` of this rank: the NICs that it declares failed. Empty if a shrink made
        this communicator; ``excluded`` then has the rails that are still excluded.
    excluded : tuple of int
        Numbers, in this communicator, of the rails of this rank that were excluded before the
        shrink that made the communicator. Empty if no shrink made it.
    """

    rank: int
    host: str
    pid: int
    control_addresses: tuple[tuple[str, int], ...]
    rails: tuple[tuple[str, int], ...]
    hcas: tuple[str, ...] = ()
    nlast_resorts: int = 0
    probe_ports: tuple[int, ...] = ()
    interfaces: tuple[str, ...] = ()
    failed_nics: str = ""
    excluded: tuple[int, ...] = ()

    @property
    def nics(self) -> tuple[str, ...]:
        """Names of the NICs of all rails, in the order of the rails."""
        return (*self.interfaces, *self.hcas)

    @property
    def hostname(self) -> str:
        """Host name, the first part of ``host``, for messages."""
        return self.host.partition("/")[0]


class Goodbye(msgspec.Struct, frozen=True, tag="boot.goodbye"):
    """Message of a rank that closes normally, so that its peers do not report it as lost.

    The message is also passed to `ControlHandler.on_message`, so that a call that still waits for
    this peer can end.
    """


class PeerDown(msgspec.Struct, frozen=True, tag="boot.peer_down"):
    """Report of rank ``witness`` that ``rank`` is lost.

    A rank that did not know of the loss passes the report on.

    ``why`` is the evidence. ``last_heard_s`` is the time in seconds from the last sign of life of
    ``rank`` at ``witness`` until ``witness`` found the loss. If a rank receives this message about
    itself, the sender has given it up; ``last_heard_s`` is then measured at the sender, which need
    not be ``witness``.
    """

    rank: int
    why: str
    witness: int
    last_heard_s: float


class Flooded(msgspec.Struct, frozen=True, tag="boot.flooded"):
    """Broadcast of ``source``; each rank passes on the first copy that it receives.

    ``number`` counts the broadcasts of ``source``, from 1; ``body`` is the encoded message.
    """

    source: int
    number: int
    body: bytes


class Routed(msgspec.Struct, frozen=True, tag="boot.routed"):
    """Message from ``source`` to ``destination``, passed on by ranks between them.

    ``body`` is the encoded message, ``nhops`` the number of sessions over which it may still be
    sent.
    """

    source: int
    destination: int
    nhops: int
    body: bytes


class Codec:
    """Encoder and decoder of control messages: those of bootstrap and the registered types.

    Parameters
    ----------
    message_types : type or union of types
        Types to register: a tagged `msgspec.Struct`, or a union ``A | B | C`` of them with
        different tags.
    """

    def __init__(self, message_types: Any) -> None:
        given = typing.get_args(message_types) or (message_types,)
        self._types = (*given, Goodbye, PeerDown, Flooded, Routed)
        union = functools.reduce(operator.or_, self._types)
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(union)

    def encode(self, message: object) -> bytes:
        """Return the MessagePack form of `message`.

        Raises
        ------
        InvalidArgument
            If the type of `message` was not registered, or its encoded form is longer than
            `MAX_MESSAGE_NBYTES` (not checked for `Flooded` and `Routed`, whose ``body`` was checked
            before).
        """
        if not isinstance(message, self._types):
            names = ", ".join(t.__name__ for t in self._types)
            raise InvalidArgument(
                f"control message type {type(message).__name__} is not registered; known: {names}"
            )
        body = msgspec.msgpack.encode(message)
        if len(body) > MAX_MESSAGE_NBYTES and not isinstance(message, Flooded | Routed):
            raise InvalidArgument(
                f"control message {type(message).__name__} has {len(body)} bytes; at most "
                f"{MAX_MESSAGE_NBYTES} are allowed"
            )
        return body

    def decode(self, body: bytes) -> object:
        """Return the message that is encoded in `body`.

        Raises
        ------
        msgspec.MsgspecError
            If `body` is not a message of a registered type.
        """
        return self._decoder.decode(body)


__all__ = [
    "MAX_MESSAGE_NBYTES",
    "Codec",
    "Flooded",
    "Goodbye",
    "PeerDown",
    "PeerInfo",
    "Routed",
]

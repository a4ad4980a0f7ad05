"""Messages of `r2ccl.bootstrap.rendezvous`, their encoding, and the result of a rendezvous."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TypeVar

import msgspec

from r2ccl.bootstrap.auth import Secret
from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.errors import InvalidArgument, PeerLost, R2cclError, TransportTimeout


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message to rank 0, from each other rank.

    ``host`` is the result of `host_id`, ``digest`` that of `Config.digest`. ``address`` is the
    address and port at which the rank's children in the tree connect; ``("", 0)`` if the rank does
    not listen for children.
    """

    rank: int
    nranks: int
    host: str
    pid: int
    digest: str
    address: tuple[str, int] = ("", 0)


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer of rank 0 once all ranks have sent `Hello`.

    ``parent`` is the address and port of the receiver's parent in the tree. It is not used if the
    parent is rank 0, because the receiver has a connection to rank 0.
    """

    communicator_id: bytes
    is_on_one_host: bool
    parent: tuple[str, int]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Message of a rank to its parent: the addresses of all ranks in the sender's subtree."""

    infos: tuple[PeerInfo, ...]


class Table(msgspec.Struct, frozen=True, tag="table"):
    """Last message, from each rank to its children: the addresses of all ranks.

    ``packed`` is the compressed encoding, which has about a quarter of the uncompressed size.
    """

    packed: bytes

    @classmethod
    def of(cls, peers: tuple[PeerInfo, ...]) -> Table:
        """Return the message with the addresses `peers`."""
        return cls(zlib.compress(msgspec.msgpack.encode(peers)))

    def peers(self) -> tuple[PeerInfo, ...]:
        """Return the addresses of all ranks.

        Raises
        ------
        InvalidArgument
            If the addresses cannot be decoded.
        """
        try:
            plain = zlib.decompressobj().decompress(self.packed, _MAX_TABLE_NBYTES)
            return _peers_decoder.decode(plain)
        except (zlib.error, msgspec.MsgspecError) as exc:
            raise _undecodable(exc) from exc


class MeetingFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Failure of the rendezvous.

    A rank reports a failure to rank 0, which sends it to all ranks that have arrived; these raise
    `error`. ``text`` is the cause. ``is_timeout`` is True if ranks or their addresses did not
    arrive in time. If the cause is a rank that exited, ``lost`` is this rank and ``host`` is its
    host (empty if unknown); otherwise ``lost`` is -1.
    """

    text: str
    is_timeout: bool = False
    lost: int = -1
    host: str = ""

    def error(self, rank: int, account: str = "") -> R2cclError:
        """Return the error that `rank` must raise.

        `account` is a clause that names the event for which `rank` itself waited; it may be empty.
        It is not used if the cause is a rank that exited.
        """
        if self.lost >= 0:
            return PeerLost(
                rank=rank, peer=self.lost, last_heard_s=0.0, why=self.text, host=self.host,
                is_met=False,
            )  # fmt: skip
        text = f"rank {rank}: {self.text}"
        if account:
            text += f"; this rank {account}"
        return TransportTimeout(text, rank=rank) if self.is_timeout else InvalidArgument(text)


Greeting = Hello | Welcome | Ready | Table | MeetingFailed
#: Maximum size of the addresses of all ranks, decompressed: enough for 200,000 ranks.
_MAX_TABLE_NBYTES = 64 << 20
_peers_decoder = msgspec.msgpack.Decoder(tuple[PeerInfo, ...])
_decoder: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)
_T = TypeVar("_T")


class Meeting(msgspec.Struct, frozen=True):
    """Result of a rendezvous: id and secret of the communicator, and addresses of all ranks.

    ``peers`` is in rank order; all ranks in it have the same number of rails.
    """

    communicator_id: bytes
    secret: Secret
    peers: tuple[PeerInfo, ...]


#: Function that takes (is_on_one_host, control_address), opens this rank's listeners and returns
#: their addresses. Raises no OSError.
Prepare = Callable[[bool, str], PeerInfo]


def encode(greeting: Greeting) -> bytes:
    """Return the encoded form of `greeting`, which `decode` reads."""
    return msgspec.msgpack.encode(greeting)


def decode(body: bytes) -> Greeting:
    """Return the message that is encoded in `body`.

    Raises
    ------
    InvalidArgument
        If `body` is not a message of the rendezvous.
    """
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as exc:
        raise _undecodable(exc) from exc


def _undecodable(exc: Exception) -> InvalidArgument:
    return InvalidArgument(
        f"rendezvous: received a message that this version cannot decode ({exc}): "
        "install the same version of r2ccl on all ranks"
    )


def expect(kind: type[_T], body: bytes) -> _T:
    """Return the message that is encoded in `body`, which must be of type `kind`.

    Raises
    ------
    InvalidArgument
        If `body` is not a message of type `kind`.
    """
    message = decode(body)
    if not isinstance(message, kind):
        raise InvalidArgument(
            f"rendezvous: received {type(message).__name__}, expected {kind.__name__}: "
            "install the same version of r2ccl on all ranks"
        )
    return message


__all__ = [
    "Greeting",
    "Hello",
    "Meeting",
    "MeetingFailed",
    "Prepare",
    "Ready",
    "Table",
    "Welcome",
    "decode",
    "encode",
    "expect",
]

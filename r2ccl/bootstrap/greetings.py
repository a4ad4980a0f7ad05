"""What ranks say to each other at the rendezvous.

Values and their wire form only: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from r2ccl.bootstrap.auth import Secret
from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.errors import InvalidArgument, PeerLost, R2cclError, TransportTimeout


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """What every rank says first; ``digest`` is `Config.digest`."""

    rank: int
    nranks: int
    host: str
    pid: int
    digest: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """All ranks are here."""

    communicator_id: bytes
    is_on_one_host: bool


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Say where this rank listens."""

    info: PeerInfo


class Table(msgspec.Struct, frozen=True, tag="table"):
    """All ranks listen: here they are."""

    peers: tuple[PeerInfo, ...]


class MeetingFailed(msgspec.Struct, frozen=True, tag="failed"):
    """It cannot work, and why; the text goes into the error every rank raises.

    ``lost`` is the rank that left meanwhile, on ``host``, if that is the reason.
    """

    text: str
    is_timeout: bool = False
    lost: int = -1
    host: str = ""

    def error(self, rank: int) -> R2cclError:
        """Return the error `rank` raises."""
        if self.lost >= 0:
            return PeerLost(
                rank=rank, peer=self.lost, last_heard_s=0.0, why=self.text, host=self.host,
                is_met=False,
            )  # fmt: skip
        text = f"rank {rank}: {self.text}"
        return TransportTimeout(text, rank=rank) if self.is_timeout else InvalidArgument(text)


Greeting = Hello | Welcome | Ready | Table | MeetingFailed
_decoder: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)
_T = TypeVar("_T")


class Meeting(msgspec.Struct, frozen=True):
    """What rendezvous ends with."""

    communicator_id: bytes
    secret: Secret
    peers: tuple[PeerInfo, ...]


#: Opens this rank's listeners; takes (is_on_one_host, control_address); raises no OSError.
Prepare = Callable[[bool, str], PeerInfo]


def encode(greeting: Greeting) -> bytes:
    """Return the wire form."""
    return msgspec.msgpack.encode(greeting)


def decode(body: bytes) -> Greeting:
    """Invert `encode`.

    Raises
    ------
    InvalidArgument
        It is none of them.
    """
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as exc:
        raise InvalidArgument(
            f"rendezvous: a message this version cannot read ({exc}): "
            "is the same r2ccl installed everywhere?"
        ) from exc


def expect(kind: type[_T], body: bytes) -> _T:
    """Decode `body`, which has to be a `kind`.

    Raises
    ------
    InvalidArgument
        It is something else.
    """
    message = decode(body)
    if not isinstance(message, kind):
        raise InvalidArgument(
            f"rendezvous: {type(message).__name__} came where {kind.__name__} was due: "
            "is the same r2ccl installed everywhere?"
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

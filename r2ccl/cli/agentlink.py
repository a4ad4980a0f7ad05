"""Messages between a launcher and its agents, and the link that carries them.

A link is the standard input and output of the agent, usually through ssh. The secret of the job
travels on the link; ssh authenticates both ends and encrypts the link. A message is its length in 4
bytes, followed by its fields, encoded with msgpack.

Invariant: each end of a link sends something at least every `_ALIVE_S`, as long as the other end
reads. If the host of one end or the network fails, the other end notices this within `_SILENCE_S`
while it waits for a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from typing import Any, Generic, TypeVar

import msgspec

from r2ccl.bootstrap.launch import JobShare
from r2ccl.cli.rankprocs import JobCommand
from r2ccl.config import VERSION

_T = TypeVar("_T")

#: First line that an agent writes. Earlier output, from the login shell of its host, is not part of
#: the link.
GREETING = f"r2ccl agent {VERSION}\n".encode()

_ALIVE_S = 10.0
_SILENCE_S = 60.0
_FLUSH_S = 5.0
_LENGTH = struct.Struct("!I")
#: Maximum size of a message. The largest are `Start`, with a command line (by default, Linux limits
#: it to 2 MiB), and `Output`, with up to 64 KiB.
_MAX_NBYTES = 4 << 20


class LinkEnded(Exception):
    """Raised by `AgentLink.receive` when the link has ended; the text is the reason."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Sign that the sender is alive; both ends send it, and `AgentLink.receive` drops it."""


class Resolve(msgspec.Struct, frozen=True, tag=True):
    """Request for the numeric address that ``name`` has on the host of the agent."""

    name: str


class Resolved(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Resolve`: the numeric address."""

    address: str


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Request for a socket that listens at all addresses of the host, for rank 0's rendezvous.

    The socket has the address family of ``address``. If ``port`` is 0, a free port is taken.
    """

    address: str
    port: int


class Listening(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Listen`: the port of the socket."""

    port: int


class Start(msgspec.Struct, frozen=True, tag=True):
    """Order to start the ranks of a host.

    The fields other than ``share`` are those of the `JobCommand`. Texts are stored as the bytes
    that the operating system uses, which need not be UTF-8.
    """

    share: JobShare
    words: tuple[bytes, ...]
    is_module: bool
    env: dict[bytes, bytes]
    folder: bytes
    has_stdin: bool

    @classmethod
    def of(cls, share: JobShare, program: JobCommand) -> Start:
        """Return the order to run `program` as the ranks of `share`."""
        return cls(
            share,
            tuple(map(os.fsencode, program.words)),
            program.is_module,
            {os.fsencode(name): os.fsencode(value) for name, value in program.env.items()},
            os.fsencode(program.folder),
            program.has_stdin,
        )

    def program(self) -> JobCommand:
        """Return the command to run."""
        return JobCommand(
            tuple(map(os.fsdecode, self.words)),
            self.is_module,
            {os.fsdecode(name): os.fsdecode(value) for name, value in self.env.items()},
            os.fsdecode(self.folder),
            self.has_stdin,
        )


class Started(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Start`: all ranks of the host were started."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Answer to a `Resolve`, `Listen` or `Start` that failed; ``text`` says why."""

    text: str


class SendSignal(msgspec.Struct, frozen=True, tag=True):
    """Order to send a signal to the ranks."""

    number: int


class Input(msgspec.Struct, frozen=True, tag=True):
    """Data for the standard input of rank 0; empty ``data`` closes it."""

    data: bytes


class InputTaken(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Input`: the agent is ready for more input."""


class Output(msgspec.Struct, frozen=True, tag=True):
    """Output of a rank to the stream ``out`` or ``err``; empty bytes end the stream."""

    rank: int
    stream: str
    data: bytes


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    """Exit status of a rank; ``-n`` if signal n ended the rank."""

    rank: int
    status: int


ToAgent = Alive | Resolve | Listen | Start | SendSignal | Input
FromAgent = Alive | Resolved | Listening | Started | Refused | InputTaken | Output | RankEnded


class AgentLink(Generic[_T]):
    """One end of a link.

    Parameters
    ----------
    kinds : type or union of types
        Types of the messages that the other end sends.
    reader : asyncio.StreamReader
    writer : asyncio.StreamWriter
    """

    def __init__(
        self, kinds: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._decoder: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(kinds)
        self._reader = reader
        self._writer = writer
        self._beating = asyncio.create_task(self._beat())

    async def send(self, message: ToAgent | FromAgent) -> None:
        """Send a message; wait while the other end reads too slowly.

        If the link has ended, the message is dropped; `receive` reports the end.
        """
        self.post(message)
        try:
            await self._writer.drain()
        except OSError:
            return

    def post(self, message: ToAgent | FromAgent) -> None:
        """Send a small message without waiting; drop it if the link has ended."""
        if self._writer.is_closing():
            return
        body = msgspec.msgpack.encode(message)
        self._writer.write(_LENGTH.pack(len(body)) + body)

    async def receive(self) -> _T:
        """Return the next message.

        Raises
        ------
        LinkEnded
            If the link is closed or broken, no complete message arrives within `_SILENCE_S`, or the
            other end has sent invalid data.
        """
        while True:
            try:
                async with asyncio.timeout(_SILENCE_S):
                    (nbytes,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                    if nbytes > _MAX_NBYTES:
                        raise LinkEnded(f"a message of {nbytes} bytes is too long")
                    message = self._decoder.decode(await self._reader.readexactly(nbytes))
            except TimeoutError:
                raise LinkEnded(f"silent for {_SILENCE_S:g} s") from None
            except (OSError, EOFError) as exc:
                raise LinkEnded("the connection was closed") from exc
            except msgspec.MsgspecError as exc:
                raise LinkEnded(f"invalid message: {exc}") from exc
            if not isinstance(message, Alive):
                return message

    async def _beat(self) -> None:
        while True:
            await self.send(Alive())
            await asyncio.sleep(_ALIVE_S)

    async def close(self) -> None:
        """Send buffered data, then close this end; `receive` at the other end raises `LinkEnded`.

        Data that the other end does not read within `_FLUSH_S` may be lost.
        """
        self._beating.cancel()
        self._writer.close()
        with contextlib.suppress(TimeoutError, OSError):
            await asyncio.wait_for(self._writer.wait_closed(), _FLUSH_S)


__all__ = [
    "GREETING",
    "AgentLink",
    "Alive",
    "FromAgent",
    "Input",
    "InputTaken",
    "LinkEnded",
    "Listen",
    "Listening",
    "Output",
    "RankEnded",
    "Refused",
    "Resolve",
    "Resolved",
    "SendSignal",
    "Start",
    "Started",
    "ToAgent",
]

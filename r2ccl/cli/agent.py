"""Agent of a launcher on one host: starts ranks, and reports their output and exit statuses.

The agent's standard input and output are the link to the launcher. When the link ends, or the agent
gets SIGHUP, SIGINT or SIGTERM, the agent ends its ranks: SIGTERM, then SIGKILL. The agent exits
when its ranks have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import BinaryIO

from r2ccl.bootstrap import wire
from r2ccl.cli.agentlink import (
    GREETING,
    AgentLink,
    Input,
    InputTaken,
    LinkEnded,
    Listen,
    Listening,
    Output,
    RankEnded,
    Refused,
    Resolve,
    Resolved,
    SendSignal,
    Start,
    Started,
    ToAgent,
)
from r2ccl.cli.rankprocs import TERMINATION_GRACE_S, HostRanks
from r2ccl.cli.results import as_utf8
from r2ccl.errors import InvalidArgument

#: Signals after which the agent ends its ranks; the end of a login session may send SIGHUP.
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def serve() -> int:
    """Serve the launcher on standard input and output until the ranks have ended.

    Return 0, or 1 if the link ended or a signal in `_ENDING` came before the ranks had ended.
    """
    with os.fdopen(os.dup(1), "wb", buffering=0) as out:
        os.dup2(2, 1)  # other output of this process must not enter the link
        return asyncio.run(_serve(out))


async def _serve(out: BinaryIO) -> int:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    incoming = asyncio.StreamReaderProtocol(reader)
    outgoing = asyncio.StreamReaderProtocol(asyncio.StreamReader())
    await loop.connect_read_pipe(lambda: incoming, sys.stdin.buffer)
    transport, _ = await loop.connect_write_pipe(lambda: outgoing, out)
    writer = asyncio.StreamWriter(transport, outgoing, None, loop)
    writer.write(GREETING)
    agent = _Agent(AgentLink(ToAgent, reader, writer))
    for number in _ENDING:
        loop.add_signal_handler(number, agent.leave)
    return await agent.run()


def listen_everywhere(address: str, port: int) -> socket.socket:
    """Return a socket that listens at all addresses of this host.

    The socket has the address family of `address`, a numeric IPv4 or IPv6 address.

    Raises
    ------
    InvalidArgument
        If the port cannot be used.
    """
    try:
        return wire.listen("::" if ":" in address else "0.0.0.0", port)
    except OSError as exc:
        raise InvalidArgument(
            f"rank 0 cannot listen at port {port} of {socket.gethostname()} ({exc.strerror}): "
            "choose another one with --port"
        ) from exc


async def _resolve(name: str) -> str:
    try:
        return (await wire.resolve(name, 0))[0]
    except (OSError, UnicodeError) as exc:
        raise InvalidArgument(
            f"the host of rank 0, {name!r}, cannot be resolved here ({exc}): give its address with "
            "--master-addr"
        ) from exc


class _Agent:
    def __init__(self, link: AgentLink[ToAgent]) -> None:
        self._link = link
        self._listener: socket.socket | None = None
        self._ranks: HostRanks | None = None
        self._is_leaving = asyncio.Event()
        self._feeding: asyncio.Task[None] | None = None
        self._attending: asyncio.Task[None] | None = None

    def leave(self) -> None:
        """Make `run` end the ranks and return."""
        self._is_leaving.set()

    async def output(self, rank: int, stream: str, data: bytes) -> None:
        await self._link.send(Output(rank, stream, data))

    async def ended(self, rank: int, status: int) -> None:
        await self._link.send(RankEnded(rank, status))

    async def run(self) -> int:
        """Serve the launcher until the ranks or the link end, or `leave` is called.

        Then end the ranks, and return the exit status of the agent. If one of the agent's tasks
        failed, raise its error: the launcher could not continue without the answers of the task.
        """
        obeying = asyncio.create_task(self._obey())
        leaving = asyncio.create_task(self._is_leaving.wait())
        await asyncio.wait([obeying, leaving], return_when=asyncio.FIRST_COMPLETED)
        ended = [each for each in (obeying, self._attending, self._feeding) if each and each.done()]
        is_done = self._attending in ended and self._attending.exception() is None
        if not is_done:
            await self._end_ranks()
        await self._link.close()
        for task in (obeying, leaving):
            task.cancel()
        for task in ended:
            task.result()
        return 0 if is_done else 1

    async def _obey(self) -> None:
        with contextlib.suppress(LinkEnded):
            while True:
                try:
                    await self._carry_out(await self._link.receive())
                except InvalidArgument as exc:
                    await self._link.send(Refused(as_utf8(str(exc))))

    async def _carry_out(self, order: ToAgent) -> None:
        if isinstance(order, Resolve):
            await self._link.send(Resolved(await _resolve(order.name)))
        elif isinstance(order, Listen):
            self._listener = listen_everywhere(order.address, order.port)
            await self._link.send(Listening(self._listener.getsockname()[1]))
        elif isinstance(order, Start):
            await self._start(order)
        elif isinstance(order, SendSignal) and self._ranks is not None:
            self._ranks.signal(order.number)
        elif isinstance(order, Input):
            self._feeding = asyncio.create_task(self._feed(order.data))

    async def _start(self, order: Start) -> None:
        self._ranks = HostRanks(order.share, order.program(), self)
        await self._ranks.start(self._listener)
        if self._listener is not None:
            self._listener.close()
        await self._link.send(Started())
        self._attending = asyncio.create_task(self._attend(self._ranks))

    async def _attend(self, ranks: HostRanks) -> None:
        try:
            await ranks.attend()
        finally:
            self.leave()

    async def _feed(self, data: bytes) -> None:
        """Write `data` to the standard input of rank 0, then answer with `InputTaken`.

        This runs as a task, because rank 0 may be slow to read.
        """
        assert self._ranks is not None
        try:
            await self._ranks.feed(data)
        except Exception:
            self.leave()
            raise
        await self._link.send(InputTaken())

    async def _end_ranks(self) -> None:
        if self._ranks is None:
            return
        self._ranks.signal(signal.SIGTERM)
        if self._attending is not None:
            await asyncio.wait([self._attending], timeout=TERMINATION_GRACE_S)
        await self._ranks.close()


__all__ = ["listen_everywhere", "serve"]

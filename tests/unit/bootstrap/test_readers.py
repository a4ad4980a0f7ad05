"""Many sockets that the event loop watches through one descriptor."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from r2ccl.bootstrap.readers import ReaderSet


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    with ExitStack() as stack:
        made = [socket.socketpair() for _ in range(3)]
        for sock in (each for ends in made for each in ends):
            stack.enter_context(sock)
        yield made


def test_callbacks_run_while_there_is_something_to_read(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    async def main() -> None:
        readers = ReaderSet()
        seen: list[tuple[int, bytes]] = []
        done = asyncio.Event()

        def read(at: int) -> None:
            seen.append((at, pairs[at][0].recv(1)))
            if len(seen) == 4:
                done.set()

        for at, (ours, _) in enumerate(pairs):
            readers.add_reader(ours.fileno(), read, at)
        assert readers.remove_reader(pairs[1][0].fileno())
        assert not readers.remove_reader(pairs[1][0].fileno())
        for _, theirs in pairs:
            theirs.send(b"ab")
        await asyncio.wait_for(done.wait(), 5.0)
        assert sorted(seen) == [(0, b"a"), (0, b"b"), (2, b"a"), (2, b"b")]
        readers.close()

    asyncio.run(main())


def test_a_removed_callback_does_not_run(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    async def main() -> None:
        readers = ReaderSet()
        ran: list[int] = []

        def run(at: int) -> None:
            ran.append(at)
            for ours, _ in pairs:
                readers.remove_reader(ours.fileno())

        for at, (ours, theirs) in enumerate(pairs):
            readers.add_reader(ours.fileno(), run, at)
            theirs.send(b"a")
        await asyncio.sleep(0.05)
        assert len(ran) == 1
        readers.close()

    asyncio.run(main())


def test_a_callback_can_be_replaced(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    async def main() -> None:
        readers = ReaderSet()
        ours, theirs = pairs[0]
        done = asyncio.Event()
        readers.add_reader(ours.fileno(), pytest.fail, "replaced")
        readers.add_reader(ours.fileno(), done.set)
        theirs.send(b"a")
        await asyncio.wait_for(done.wait(), 5.0)
        readers.close()

    asyncio.run(main())


def test_after_a_batch_there_is_a_pause(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        readers = ReaderSet(lambda: 0.2)
        read_at: list[float] = []
        done = asyncio.Event()

        def read(at: int) -> None:
            pairs[at][0].recv(1)
            read_at.append(loop.time())
            if len(read_at) == 3:
                done.set()
            else:
                pairs[2][1].send(b"c")  # becomes readable within the batch

        for at, (ours, _) in enumerate(pairs[:2]):
            readers.add_reader(ours.fileno(), read, at)
        pairs[0][1].send(b"a")
        await asyncio.sleep(0.05)
        pairs[1][1].send(b"b")
        await asyncio.sleep(0.05)
        assert len(read_at) == 1
        readers.add_reader(pairs[2][0].fileno(), read, 2)
        await asyncio.wait_for(done.wait(), 5.0)
        assert read_at[1] - read_at[0] >= 0.15
        assert read_at[2] - read_at[1] < 0.15
        readers.close()

    asyncio.run(main())


def test_a_pause_ends_with_the_set(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    async def main() -> None:
        readers = ReaderSet(lambda: 0.05)
        ours, theirs = pairs[0]
        ran: list[None] = []
        readers.add_reader(ours.fileno(), ran.append, None)
        theirs.send(b"a")
        await asyncio.sleep(0.02)
        readers.close()
        count = len(ran)
        await asyncio.sleep(0.1)
        assert len(ran) == count > 0

    asyncio.run(main())

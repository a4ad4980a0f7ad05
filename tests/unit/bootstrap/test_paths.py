"""Order in which the paths to a peer are dialed."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from r2ccl.bootstrap.paths import Paths
from r2ccl.types import Nic, PathKey

PEER, LAST = 1, 2


class Dialed(Paths):
    """Paths whose dials end when the test says so."""

    def __init__(self) -> None:
        nics = [
            Nic(f"eth{rail}", f"10.{rail}.0.1", is_last_resort=rail == LAST) for rail in (0, 1, 2)
        ]
        rails = [("10.0.0.2", 1)] * len(nics)
        peers: Any = [SimpleNamespace(rails=rails)] * 3
        setting: Any = SimpleNamespace(rank=0, nics=nics)
        self.opened: list[PathKey] = []
        super().__init__(
            peers, setting, lambda peer, rail, *rest: self.opened.append(PathKey(peer, rail))
        )
        self.ends: dict[PathKey, asyncio.Future[Any]] = {}

    async def _dial_once(self, key: PathKey, epoch: int) -> socket.socket:
        self.ends[key] = asyncio.get_running_loop().create_future()
        found: socket.socket = await self.ends[key]
        return found

    async def started(self, *rails: int, within_s: float = 1.0) -> None:
        """Wait until exactly the dials of these rails have been started."""
        async with asyncio.timeout(within_s):
            while {key.rail for key in self.ends} != set(rails):
                await asyncio.sleep(0.001)


def run(program: Any) -> None:
    async def main() -> None:
        paths = Dialed()
        try:
            await program(paths)
        finally:
            paths.close()

    asyncio.run(main())


def dial_all(paths: Paths) -> None:
    for rail in range(3):
        paths.dial(PathKey(PEER, rail), 1, None)


def test_the_last_resort_is_dialed_after_the_other_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r2ccl.bootstrap.paths._GIVE_WAY_S", 60.0)

    async def program(paths: Dialed) -> None:
        dial_all(paths)
        await paths.started(0, 1)
        paths.ends[PathKey(PEER, 0)].set_result(None)
        await asyncio.sleep(0.05)
        await paths.started(0, 1)
        paths.ends[PathKey(PEER, 1)].set_result(None)
        await paths.started(0, 1, LAST)
        paths.ends[PathKey(PEER, LAST)].set_result(None)
        await asyncio.sleep(0.01)
        assert [key.rail for key in paths.opened] == [0, 1, LAST]

    run(program)


def test_the_last_resort_does_not_wait_for_long() -> None:
    async def program(paths: Dialed) -> None:
        dial_all(paths)
        await paths.started(0, 1)
        await paths.started(0, 1, LAST)

    run(program)


def test_a_last_resort_alone_is_dialed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r2ccl.bootstrap.paths._GIVE_WAY_S", 60.0)

    async def program(paths: Dialed) -> None:
        paths.dial(PathKey(2, 0), 1, None)  # of another peer
        paths.dial(PathKey(PEER, LAST), 1, None)
        await paths.started(0, LAST)

    run(program)


def test_a_cancelled_last_resort_is_not_dialed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r2ccl.bootstrap.paths._GIVE_WAY_S", 0.01)

    async def program(paths: Dialed) -> None:
        dial_all(paths)
        paths.cancel(PathKey(PEER, LAST))
        await asyncio.sleep(0.05)
        await paths.started(0, 1)

    run(program)

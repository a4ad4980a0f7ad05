"""The rendezvous with all ranks in one event loop: rank 0's load, and failures in the tree."""

from __future__ import annotations

import asyncio
import math
import random
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import pytest
from support.slow import slow_but

from r2ccl.bootstrap import dialing, leader, wire
from r2ccl.bootstrap.auth import SECRET_NBYTES, Claim, Purpose, Secret
from r2ccl.bootstrap.branch import Branch
from r2ccl.bootstrap.greetings import Hello, Meeting, Table, encode
from r2ccl.bootstrap.identity import Identity
from r2ccl.bootstrap.listener import Rejections
from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.bootstrap.rendezvous import meet
from r2ccl.bootstrap.secretfile import GivenSecret
from r2ccl.errors import InvalidArgument, PeerLost, R2cclError, TransportError, TransportTimeout

HOST = "node{}/7a1e04c5-2f5e-4a5a-9d3c-0c1d2e3f4a5b/4026531840"
NRAILS = 8


def info_of(rank: int) -> PeerInfo:
    """Return addresses as long, and as little compressible, as those of a rank with 8 rails."""
    rng = random.Random(rank)
    host = f"{rank // 256}.{rank % 256}"
    ports = [rng.randrange(32768, 61000) for _ in range(2 * NRAILS + 1)]
    return PeerInfo(
        rank, HOST.format(rank), 1000 + rank, ((f"10.0.{host}", ports[-1]),),
        tuple((f"10.{rail + 1}.{host}", ports[rail]) for rail in range(NRAILS)),
        probe_ports=tuple(ports[NRAILS:-1]),
        interfaces=tuple(f"eth{rail}" for rail in range(NRAILS)),
    )  # fmt: skip


class Ranks:
    """Ranks of one job, as tasks."""

    def __init__(self, nranks: int, timeout_s: float = 60.0) -> None:
        self.nranks = nranks
        self.timeout_s = timeout_s
        self.secret = Secret(bytes(SECRET_NBYTES))
        self.rejections = Rejections(0)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=wire.BACKLOG)
        self.port: int = self.listener.getsockname()[1]
        self.tasks: list[asyncio.Task[Meeting]] = []

    def start(self, prepare: Callable[[int], PeerInfo] = info_of) -> None:
        self.tasks = [
            asyncio.get_running_loop().create_task(self._meet(rank, prepare))
            for rank in range(self.nranks)
        ]

    def _meet(self, rank: int, prepare: Callable[[int], PeerInfo]) -> Coroutine[Any, Any, Meeting]:
        listener = self.listener if rank == 0 else None
        identity = Identity(
            rank, self.nranks, "127.0.0.1", self.port, GivenSecret(self.secret), listener
        )
        hello = Hello(rank, self.nranks, HOST.format(rank), 1000 + rank, 64 * "0")
        return meet(
            identity, hello, lambda _one, _address: prepare(rank), self.rejections, self.timeout_s
        )

    async def errors(self) -> list[BaseException | None]:
        """Return the error of each rank, or None."""
        async with asyncio.timeout(20.0):
            found = await asyncio.gather(*self.tasks, return_exceptions=True)
        return [each if isinstance(each, BaseException) else None for each in found]


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(250.0):
            await main()

    asyncio.run(bounded())


class Traffic:
    """Messages and bytes at rank 0's port, in both directions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.port = 0
        self.nmessages = self.nbytes = 0
        send = wire.send_messages

        async def send_messages(messages: Any) -> None:
            given = list(messages)
            for sock, body in given:
                self._count(sock, body)
            await send(given)

        traffic = self

        class Reader(wire.MessageReader):
            def __init__(
                self, sock: socket.socket, on_message: Callable[[bytes], None], *rest: Any
            ) -> None:
                def take(body: bytes) -> None:
                    traffic._count(sock, body)
                    on_message(body)

                super().__init__(sock, take, *rest)

        monkeypatch.setattr(wire, "send_messages", send_messages)
        monkeypatch.setattr(leader, "MessageReader", Reader)

    def _count(self, sock: socket.socket, body: bytes) -> None:
        if sock.getsockname()[1] == self.port:
            self.nmessages += 1
            self.nbytes += 4 + len(body)


@pytest.mark.parametrize("nranks", slow_but([2, 3, 64], [2, 3, 64, 1024]))
def test_rank_0_sends_the_table_to_log2_ranks(monkeypatch: pytest.MonkeyPatch, nranks: int) -> None:
    traffic = Traffic(monkeypatch)
    ranks = Ranks(nranks, timeout_s=200.0)
    traffic.port = ranks.port

    async def main() -> None:
        ranks.start()
        meetings = await asyncio.gather(*ranks.tasks)
        assert {each.peers for each in meetings} == {tuple(map(info_of, range(nranks)))}
        assert len({each.communicator_id for each in meetings}) == 1

    run(main)
    assert not ranks.rejections.counts
    nchildren = math.ceil(math.log2(nranks))
    assert traffic.nmessages == 2 * (nranks - 1) + 2 * nchildren
    table = len(encode(Table.of(tuple(map(info_of, range(nranks))))))
    print(f"\n{nranks} ranks: {traffic.nmessages} messages, {traffic.nbytes} bytes; {table=}")
    assert traffic.nbytes < 700 * nranks + nchildren * (table + 64)


@pytest.mark.parametrize("nranks", [16, 64])
def test_rank_0_pauses_only_while_many_are_missing(
    monkeypatch: pytest.MonkeyPatch, nranks: int
) -> None:
    pauses: list[float] = []

    class Readers(leader.ReaderSet):
        def __init__(self, pause_s: Callable[[], float]) -> None:
            def observed_s() -> float:
                pauses.append(pause_s())
                return pauses[-1]

            super().__init__(observed_s)

    monkeypatch.setattr(leader, "ReaderSet", Readers)
    ranks = Ranks(nranks)

    async def main() -> None:
        ranks.start()
        await asyncio.gather(*ranks.tasks)

    run(main)
    assert any(pauses) == (nranks == 64)
    assert max(pauses) <= 0.25
    assert pauses[-1] == 0.0


def test_a_hello_behind_a_wrong_proof_is_not_read() -> None:
    ranks = Ranks(2, timeout_s=5.0)
    claim = Claim(Purpose.RENDEZVOUS, bytes(16), 1, 0)
    forged = wire.frame(encode(Hello(1, 2, HOST.format(1), 666, 64 * "0")))

    async def main() -> None:
        ranks.start()
        ranks.tasks[1].cancel()
        with pytest.raises(R2cclError, match="closed during the handshake"):
            await dialing.dial(
                Secret(b"s" * SECRET_NBYTES),
                claim,
                ("127.0.0.1", ranks.port),
                first_bytes=lambda _sock: forged,
            )
        ranks.tasks[1] = asyncio.get_running_loop().create_task(ranks._meet(1, info_of))
        assert await ranks.errors() == [None, None]  # rank 1 was not started twice
        assert ranks.rejections.counts == {"wrong proof": 1}

    run(main)


# -- failures; the tree of 8 ranks is 0: 1, 2, 4; 2: 3; 4: 5, 6; 6: 7 -------------------------


async def fail_together(ranks: Ranks, prepare: Callable[[int], PeerInfo]) -> list[Any]:
    ranks.start(prepare)
    return await ranks.errors()


@pytest.mark.parametrize("victim", [0, 1, 4, 6])
def test_a_rank_that_ends_is_named_on_all_others(victim: int) -> None:
    ranks = Ranks(8)

    def prepare(rank: int) -> PeerInfo:
        if rank == victim:
            ranks.tasks[rank].cancel()
        return info_of(rank)

    async def main() -> None:
        errors = await fail_together(ranks, prepare)
        assert isinstance(errors.pop(victim), asyncio.CancelledError)
        for error in errors:
            assert isinstance(error, PeerLost)
            assert error.peer == victim, str(error)

    run(main)


@pytest.mark.parametrize("broken", [{0}, {7}, {4, 5, 6}])
def test_ranks_without_rails_are_named_on_all(broken: set[int]) -> None:
    ranks = Ranks(8)

    def prepare(rank: int) -> PeerInfo:
        if rank in broken:
            raise InvalidArgument(f"rank {rank}: no rail")
        return info_of(rank)

    async def main() -> None:
        for rank, error in enumerate(await fail_together(ranks, prepare)):
            assert isinstance(error, InvalidArgument)
            for each in {rank} if rank in broken else broken:
                assert f"rank {each}: no rail" in str(error)
            assert "failed" not in str(error)
            assert "left during init" not in str(error)

    run(main)


def test_a_rank_raises_its_own_error_if_rank_0_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(rank: int) -> PeerInfo:
        if rank == 1:
            raise InvalidArgument("rank 1: there is no rail")
        return info_of(rank)

    async def lost(sock: socket.socket, body: bytes) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(wire, "send_message", lost)

    async def main() -> None:
        _, error = await fail_together(Ranks(2), prepare)
        assert isinstance(error, InvalidArgument)
        assert str(error) == "rank 1: there is no rail"

    run(main)


def test_an_error_of_rank_0_itself_keeps_its_class_and_text() -> None:
    own = TransportError("rank 0: no descriptor is left", status="EMFILE")
    ranks = Ranks(3)

    def prepare(rank: int) -> PeerInfo:
        if rank == 0:
            raise own
        return info_of(rank)

    async def main() -> None:
        first, *others = await fail_together(ranks, prepare)
        assert first is own
        for rank, error in enumerate(others, 1):
            assert isinstance(error, InvalidArgument)
            assert str(error) == f"rank {rank}: rank 0: no descriptor is left"

    run(main)


@pytest.fixture
def at_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Callable[[], None]]]:
    """Return a dict of functions that ranks call before they pass the table on."""
    calls: dict[int, Callable[[], None]] = {}
    tell = Branch._tell_children

    async def first(self: Branch, body: bytes) -> None:
        calls.get(self._rank, lambda: None)()
        await asyncio.sleep(0)
        await tell(self, body)

    monkeypatch.setattr(Branch, "_tell_children", first)
    return calls


def test_a_rank_that_ends_with_the_table_is_named_below_it(
    at_tables: dict[int, Callable[[], None]],
) -> None:
    ranks = Ranks(8)
    at_tables[4] = lambda: ranks.tasks[4].cancel() and None  # type: ignore[func-returns-value]

    async def main() -> None:
        errors = await fail_together(ranks, info_of)
        assert errors[:4] == [None] * 4
        for error in errors[5:]:
            assert isinstance(error, PeerLost)
            assert error.peer == 4, str(error)

    run(main)


def test_a_rank_that_hangs_is_named_by_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(8, timeout_s=0.7)
    exchange = Branch.exchange

    async def hang(self: Branch, *given: Any) -> Any:
        return await (asyncio.sleep(60.0) if self._rank == 5 else exchange(self, *given))

    monkeypatch.setattr(Branch, "exchange", hang)

    async def main() -> None:
        ranks.start()
        ranks.tasks[5].add_done_callback(lambda _: None)
        await asyncio.wait(set(ranks.tasks) - {ranks.tasks[5]}, timeout=10.0)
        ranks.tasks[5].cancel()
        errors = await ranks.errors()
        for rank in {*range(8)} - {5}:
            assert isinstance(errors[rank], TransportTimeout)
            assert "ranks [4, 5, 6, 7] arrived at rank 0" in str(errors[rank])
        assert "this rank waits for the addresses of ranks [5]" in str(errors[4])
        assert "this rank" not in str(errors[6])

    run(main)


def test_a_parent_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(8, timeout_s=0.7)
    dial = dialing.dial

    async def filtered(secret: Secret, claim: Claim, *rest: Any, **more: Any) -> socket.socket:
        if (claim.src, claim.dst) == (5, 4):
            raise TimeoutError
        return await dial(secret, claim, *rest, **more)

    monkeypatch.setattr(dialing, "dial", filtered)

    async def main() -> None:
        errors = await fail_together(ranks, info_of)
        assert all(isinstance(error, TransportTimeout) for error in errors)
        assert "this rank has not reached rank 4: 127.0.0.1:" in str(errors[5])
        assert "check firewalls and routes" in str(errors[5])

    run(main)


def test_only_the_children_connect_to_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers, and ranks of other places in the tree, are refused while the rank waits."""
    ranks = Ranks(8, timeout_s=5.0)
    found: dict[int, Branch] = {}
    addresses: dict[int, wire.Address] = {}
    listen, climb = Branch.listen, Branch._climb
    may_go_on = asyncio.Event()

    def listening(self: Branch, host: str) -> wire.Address:
        found[self._rank] = self
        addresses[self._rank] = listen(self, host)
        return addresses[self._rank]

    async def late(self: Branch, *given: Any) -> None:
        if self._rank == 5:
            await may_go_on.wait()
        await climb(self, *given)

    monkeypatch.setattr(Branch, "listen", listening)
    monkeypatch.setattr(Branch, "_climb", late)

    async def refused(secret: Secret, **changes: Any) -> None:
        claim = Claim(Purpose.RENDEZVOUS, found[4]._communicator_id, 5, 4)._replace(**changes)
        with pytest.raises(R2cclError, match="closed during the handshake"):
            await dialing.dial(secret, claim, addresses[4])

    async def main() -> None:
        ranks.start()
        while not found.get(4) or found[4]._listener is None:
            await asyncio.sleep(0.01)
        await refused(Secret(b"s" * SECRET_NBYTES))
        await refused(ranks.secret, purpose=Purpose.CONTROL)
        await refused(ranks.secret, communicator=bytes(16))
        await refused(ranks.secret, src=7)
        await refused(ranks.secret, dst=6)
        may_go_on.set()
        assert await ranks.errors() == [None] * 8
        assert ranks.rejections.counts == {
            "wrong proof": 1,
            "not a rendezvous": 1,
            "another rendezvous": 2,
            "not an awaited child": 1,
        }

    run(main)

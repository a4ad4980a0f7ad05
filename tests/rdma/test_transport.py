"""The transport contract on real queue pairs, and what only they can show."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from rdma.probing import open_transport, silent

from r2ccl.errors import TransportError
from r2ccl.testing.contract import CHECKS, Bench, Side, random_bytes
from r2ccl.testing.contract import JoinedPair as Pair
from r2ccl.testing.probecontract import PROBE_CHECKS
from r2ccl.topology.hcas import Hca
from r2ccl.transport.base import Arrived, Cleared, Failed, Fenced, Joined, Sent
from r2ccl.types import PathKey, ProbeKey

Nodes = tuple[tuple[Hca, ...], ...]


class VerbsBench:
    """One process holds both ends, on the ports of two nodes."""

    patience_s = 30.0
    #: Each rail of the lab has a cable, or a switch, of its own.
    cross = None

    def __init__(self, hcas: Nodes, fastpath: str) -> None:
        self.silenced = ExitStack()
        self.transports = [open_transport(rank, hcas[rank][:2], fastpath) for rank in (0, 1)]
        self.newest: dict[int, tuple[Any, Any]] = {}

    def endpoints(self, rail: int) -> tuple[Any, Any]:
        low, high = self.transports
        key = PathKey(1, rail)
        caller, answerer = low.offer(key), high.offer(PathKey(0, rail))
        self.join(key, caller, answerer)
        self.newest[rail] = caller, answerer
        return caller, answerer

    def join(self, key: PathKey | ProbeKey, caller: Any, answerer: Any) -> None:
        give_up = time.monotonic() + self.patience_s
        join(answerer, caller.info, False, give_up)
        join(caller, answerer.info, True, give_up)
        proofs: list[Joined] = []
        while not proofs:
            assert time.monotonic() < give_up, "the caller's proof did not come"
            found = self.transports[0].poll(0.01)
            proofs = [event for event in found if isinstance(event, Joined)]
            self.transports[1].poll(0.0)
        assert proofs == [Joined(key, caller)]

    def join_probes(self) -> None:
        low, high = self.transports
        for rail in (0, 1):
            key = ProbeKey(1, rail, rail)
            self.join(key, low.offer(key), high.offer(ProbeKey(0, rail, rail)))

    def silence(self, rail: int) -> None:
        self.silenced.enter_context(silent(f"n1r{rail}", f"10.{50 + rail}.0.1"))

    def run(self) -> None:
        """The devices do it."""

    def break_path(self, rail: int) -> None:
        for end in self.newest[rail]:
            end.qp.flush()

    def close(self) -> None:
        self.silenced.close()
        for transport in self.transports:
            transport.close()


def join(end: Any, info: bytes, is_caller: bool, give_up: float) -> None:
    """Join as soon as the neighbour is known."""
    while True:
        try:
            return end.join(info, is_caller)
        except TransportError as exc:
            if exc.status != "NO_NEIGHBOUR" or time.monotonic() > give_up:
                raise
            time.sleep(0.01)


@pytest.fixture(params=["0", "1"], ids=["pyverbs", "compiled"], scope="module")
def fastpath(request: pytest.FixtureRequest) -> str:
    """Return how polls and posts are done: each way passes every test."""
    way: str = request.param
    return way


@pytest.fixture
def bench(hcas: Nodes, fastpath: str) -> Iterator[VerbsBench]:
    made = VerbsBench(hcas, fastpath)
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS + PROBE_CHECKS, ids=lambda check: check.__name__)
def test_contract(bench: VerbsBench, check: Callable[[Bench], None]) -> None:
    check(bench)


def test_many_small_messages_need_their_credits(bench: VerbsBench) -> None:
    """More than the ring holds, one way, with nothing coming back but credits."""
    pair = Pair(bench)
    for seq in range(1000):
        pair.a.send(seq, random_bytes(seq % 64, seq))
    arrived = pair.until_count(pair.b, Arrived, 1000)
    assert [event.frame.seq for event in arrived] == list(range(1000))
    assert pair.b.payloads == [bytes(random_bytes(seq % 64, seq)) for seq in range(1000)]


def test_more_landing_places_than_a_path_has_numbers_for(bench: VerbsBench) -> None:
    pair = Pair(bench)
    regions = [bytearray(100) for _ in range(300)]
    for seq, region in enumerate(regions):
        pair.b.want(seq, region)
    answered = 0
    while answered < len(regions):
        for event in pair.until_count(pair.a, Cleared, answered + 1)[answered:]:
            pair.a.send(event.frame.seq, random_bytes(100, event.frame.seq), event.token)
            answered += 1
    pair.until_count(pair.b, Arrived, 300)
    assert regions == [random_bytes(100, seq) for seq in range(300)]


def test_registered_memory_is_used_as_it_is(bench: VerbsBench) -> None:
    pair = Pair(bench)
    source = bench.transports[0].allocate(50_000)
    source[:] = memoryview(random_bytes(50_000))
    target = bench.transports[1].allocate(50_000)
    target[:] = 0
    token = pair.cleared(memoryview(target), 0)  # type: ignore[arg-type]
    _, address, _ = token  # type: ignore[misc]
    assert address == target.ctypes.data
    pair.a.send(0, memoryview(source), token)  # type: ignore[arg-type]
    pair.until_count(pair.b, Arrived)
    pair.until_count(pair.a, Sent)
    assert target.tobytes() == random_bytes(50_000)


def test_fenced_while_slices_are_under_way(bench: VerbsBench) -> None:
    """The fence comes back with the markers, long before its deadline destroys the queue pair."""
    pair = Pair(bench)
    regions = [bytearray(200_000) for _ in range(4)]
    tokens = [pair.cleared(region, seq) for seq, region in enumerate(regions)]
    for seq, token in enumerate(tokens):
        pair.a.send(seq, random_bytes(200_000), token)
    for side in (pair.a, pair.b):
        side.fence()
    for side in (pair.a, pair.b):
        pair.until_count(side, Fenced)
    narrived = len(pair.b.of(Arrived))
    before = [bytes(region) for region in regions]
    pair.settle()
    assert len(pair.b.of(Arrived)) == narrived
    assert [bytes(region) for region in regions] == before
    assert all(before[seq] == random_bytes(200_000) for seq in range(narrived))


def give_up_unfenced(side: Side) -> None:
    """What a fence must not be: the queue pair is only forgotten."""
    transport: Any = side.transport
    transport._by_path.pop(side.path)
    transport._events.append(Fenced(side.path))


@pytest.mark.parametrize("is_fenced", [True, False])
def test_without_the_fence_a_late_write_lands_in_reused_memory(
    bench: VerbsBench, is_fenced: bool
) -> None:
    """The receiver gives a path up; the sender, who does not know yet, writes over it once more.

    After a real fence the landing place is the receiver's again. Without, its new content is lost.
    """
    pair = Pair(bench)
    place = bench.transports[1].allocate(8_192)
    place[:] = 0
    token = pair.cleared(memoryview(place), 0)  # type: ignore[arg-type]
    if is_fenced:
        pair.b.fence()
    else:
        give_up_unfenced(pair.b)
    pair.until_count(pair.b, Fenced)
    place[:] = 7  # it holds something else now
    pair.a.send(0, random_bytes(8_192), token)
    give_up = time.monotonic() + 5
    while not (pair.a.of(Sent) or pair.a.of(Failed)) and time.monotonic() < give_up:
        pair.settle()
    is_corrupted = bool((place != 7).any())
    assert is_corrupted is not is_fenced

"""The transport contract on real queue pairs, and what only they can show."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from r2ccl.testing.contract import CHECKS, Bench, Side, pattern
from r2ccl.testing.contract import Joined as Pair
from r2ccl.topology.hcas import Hca, choose_gid
from r2ccl.transport.base import Arrived, Cleared, Failed, Fenced, Joined, Sent
from r2ccl.types import PathKey

Nodes = tuple[tuple[Hca, ...], ...]


class VerbsBench:
    """One process holds both ends, on the ports of two nodes."""

    patience_s = 30.0

    def __init__(self, hcas: Nodes) -> None:
        self.transports = [_open(rank, hcas[rank][:2]) for rank in (0, 1)]
        self.newest: dict[int, tuple[Any, Any]] = {}

    def endpoints(self, rail: int) -> tuple[Any, Any]:
        low, high = self.transports
        caller, answerer = low.offer(PathKey(1, rail)), high.offer(PathKey(0, rail))
        answerer.join(caller.card, is_caller=False)
        caller.join(answerer.card, is_caller=True)
        give_up = time.monotonic() + self.patience_s
        proofs: list[Joined] = []
        while not proofs:
            assert time.monotonic() < give_up, "the caller's proof did not come"
            proofs = [event for event in low.poll(0.01) if isinstance(event, Joined)]
            high.poll(0.0)
        assert proofs == [Joined(PathKey(1, rail))]
        self.newest[rail] = caller, answerer
        return caller, answerer

    def run(self) -> None:
        """The devices do it."""

    def break_path(self, rail: int) -> None:
        for end in self.newest[rail]:
            end.qp.flush()

    def close(self) -> None:
        for transport in self.transports:
            transport.close()


def _open(rank: int, hcas: tuple[Hca, ...]) -> Any:
    from r2ccl.transport.device import Device
    from r2ccl.transport.registration import RegistrationCache
    from r2ccl.transport.verbs import VerbsTransport

    def gid_of(hca: Hca) -> tuple[int, str]:
        gid = choose_gid(hca)
        return gid.index, gid.address

    devices = [Device(hca.name, hca.port, functools.partial(gid_of, hca)) for hca in hcas]
    cache = RegistrationCache([device.registrar for device in devices], 1 << 30)
    return VerbsTransport(rank, devices, cache, eager_nbytes=64, timeout=16, retry_cnt=3)


@pytest.fixture
def bench(hcas: Nodes) -> Iterator[VerbsBench]:
    made = VerbsBench(hcas)
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(bench: VerbsBench, check: Callable[[Bench], None]) -> None:
    check(bench)


def test_many_small_messages_need_their_credits(bench: VerbsBench) -> None:
    """More than the ring holds, one way, with nothing coming back but credits."""
    pair = Pair(bench)
    for seq in range(1000):
        pair.a.send(seq, pattern(seq % 64, seq))
    arrived = pair.until_count(pair.b, Arrived, 1000)
    assert [event.frame.seq for event in arrived] == list(range(1000))
    assert pair.b.payloads == [bytes(pattern(seq % 64, seq)) for seq in range(1000)]


def test_more_landing_places_than_a_path_has_numbers_for(bench: VerbsBench) -> None:
    pair = Pair(bench)
    regions = [bytearray(100) for _ in range(300)]
    for seq, region in enumerate(regions):
        pair.b.want(seq, region)
    answered = 0
    while answered < len(regions):
        for event in pair.until_count(pair.a, Cleared, answered + 1)[answered:]:
            pair.a.send(event.frame.seq, pattern(100, event.frame.seq), event.token)
            answered += 1
    pair.until_count(pair.b, Arrived, 300)
    assert regions == [pattern(100, seq) for seq in range(300)]


def test_registered_memory_is_used_as_it_is(bench: VerbsBench) -> None:
    pair = Pair(bench)
    source = bench.transports[0].allocate(50_000)
    source[:] = memoryview(pattern(50_000))
    target = bench.transports[1].allocate(50_000)
    target[:] = 0
    token = pair.cleared(memoryview(target), 0)  # type: ignore[arg-type]
    _, address, _ = token  # type: ignore[misc]
    assert address == target.ctypes.data
    pair.a.send(0, memoryview(source), token)  # type: ignore[arg-type]
    pair.until_count(pair.b, Arrived)
    pair.until_count(pair.a, Sent)
    assert target.tobytes() == pattern(50_000)


def test_fenced_while_slices_are_under_way(bench: VerbsBench) -> None:
    """The fence comes back with the markers, long before its deadline destroys the queue pair."""
    pair = Pair(bench)
    regions = [bytearray(200_000) for _ in range(4)]
    tokens = [pair.cleared(region, seq) for seq, region in enumerate(regions)]
    for seq, token in enumerate(tokens):
        pair.a.send(seq, pattern(200_000), token)
    for side in (pair.a, pair.b):
        side.fence()
    for side in (pair.a, pair.b):
        pair.until_count(side, Fenced)
    narrived = len(pair.b.of(Arrived))
    before = [bytes(region) for region in regions]
    pair.settle()
    assert len(pair.b.of(Arrived)) == narrived
    assert [bytes(region) for region in regions] == before
    assert all(before[seq] == pattern(200_000) for seq in range(narrived))


def give_up_unfenced(side: Side) -> None:
    """What a fence must not be: the queue pair is only forgotten."""
    transport: Any = side.transport
    transport._by_path.pop(side.path)
    transport._events.append(Fenced(side.path))


@pytest.mark.parametrize("is_fenced", [True, False])
def test_without_the_fence_a_late_write_lands_in_memory_used_again(
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
    pair.a.send(0, pattern(8_192), token)
    give_up = time.monotonic() + 5
    while not (pair.a.of(Sent) or pair.a.of(Failed)) and time.monotonic() < give_up:
        pair.settle()
    is_corrupted = bool((place != 7).any())
    assert is_corrupted is not is_fenced

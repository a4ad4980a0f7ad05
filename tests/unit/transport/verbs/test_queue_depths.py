"""Verbs over a NIC in memory: completion queues have room for all peers, whatever breaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.slow import slow_but

from r2ccl.errors import TransportError
from r2ccl.testing.fakepyverbs import FakeFabric, installed
from r2ccl.transport.base import Event, Failed, Fenced, Frame, Joined, RailChanged
from r2ccl.transport.verbs import queue_depths
from r2ccl.transport.verbs.registration import RegistrationCache
from r2ccl.types import PathKey, ProbeKey

many_peers = pytest.mark.parametrize("npeers", slow_but([15], [15, 63, 255]))
#: As many as a send queue holds.
NSLICES = queue_depths.NSENDS


class Job:
    """Rank 0, and one transport that plays all its peers, over a NIC each."""

    def __init__(self, loaded: Any, fabric: FakeFabric, npeers: int) -> None:
        self.fabric = fabric
        self.npeers = npeers
        self._loaded = loaded
        self.near, self.far = self._open("near0"), self._open("far0")
        for peer in range(1, npeers + 1):
            self._connect(peer)

    def _open(self, name: str) -> Any:
        device = self._loaded.device.RdmaDevice(
            name, 1, lambda: (0, "fe80::1"), fastpath="0", npeers=self.npeers
        )
        return self._loaded.transport.VerbsTransport(
            0, [device], RegistrationCache([device.registrar], 1 << 30),
            eager_nbytes=64, timeout=14, retry_cnt=7, probe_timeout_s=1.0,
        )  # fmt: skip

    def _connect(self, peer: int) -> None:
        key = PathKey(peer, 0)
        caller, answerer = self.near.offer(key), self.far.offer(key)
        answerer.join(caller.info, is_caller=False)
        caller.join(answerer.info, is_caller=True)
        assert self.near.poll(0.0) == [Joined(key, caller)]
        self.near.open(key, caller)
        self.far.open(key, answerer)

    @property
    def cq(self) -> Any:
        return self.near._devices[0].cq

    def fill(self) -> None:
        """Have as many requests under way to every peer as the queues hold."""
        self.fabric.mute("near0")
        for peer in range(1, self.npeers + 1):
            for seq in range(NSLICES):
                frame = Frame(0, seq, 0, 1, 0)
                self.near.isend(PathKey(peer, 0), frame, memoryview(bytearray(8)), (0, 1, 1))
        self.near.flush()

    def poll(self, npolls: int = 10) -> list[Event]:
        return [event for _ in range(npolls) for event in self.near.poll(0.0)]

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def start() -> Iterator[Any]:
    with ExitStack() as stack:

        def begin(npeers: int, **limits: int) -> Job:
            fabric = FakeFabric(**limits)
            job = Job(stack.enter_context(installed(fabric)), fabric, npeers)
            stack.callback(job.close)
            return job

        yield begin


def paths_of(events: Sequence[Event], kind: type[Any]) -> list[int]:
    return sorted(event.path.peer for event in events if isinstance(event, kind))


@many_peers
def test_a_port_that_dies_is_told_on_every_path_at_once(start: Any, npeers: int) -> None:
    job = start(npeers)
    job.fill()
    job.fabric.fail_port("near0")
    # Slices, receives, and the markers come with the fence.
    assert job.cq.nhighest > 100 * npeers
    assert job.cq.nlost == 0
    assert paths_of(job.poll(), Failed) == list(range(1, npeers + 1))
    for peer in range(1, npeers + 1):
        job.near.fence(PathKey(peer, 0))
    assert paths_of(job.poll(), Fenced) == list(range(1, npeers + 1))
    assert job.cq.nlost == 0


@many_peers
def test_fencing_every_path_drains_what_each_of_them_flushes(start: Any, npeers: int) -> None:
    """Room for one path's completions is enough, if they are taken while the paths are fenced."""
    job = start(npeers)
    job.fill()
    job.cq.nhighest = 0
    for peer in range(1, npeers + 1):
        job.near.fence(PathKey(peer, 0))
    assert 100 < job.cq.nhighest <= queue_depths.NCOMPLETIONS
    # One poll is enough, however many there are: the deadline of a fence is a second.
    assert paths_of(job.poll(1), Fenced) == list(range(1, npeers + 1))


def test_the_queue_has_an_entry_for_each_request_of_each_peer(start: Any) -> None:
    for npeers in (1, 7):
        job = start(npeers)
        job.fill()
        qps = [qp for qp in job.fabric.qps.values() if qp.context.name == "near0"]
        assert sum(qp._cap.max_send_wr + qp._cap.max_recv_wr for qp in qps) <= job.cq.cqe
        assert job.cq.cqe == queue_depths.completions(npeers)


def test_the_pages_tell_the_number_of_the_code() -> None:
    pages = Path(__file__).parents[4] / "docs"
    assert f"| {queue_depths.NCOMPLETIONS} per peer:" in (pages / "tuning.md").read_text()
    assert f"`r2ccl/transport/verbs/queue_depths.py`: {queue_depths.NCOMPLETIONS} per peer" in (
        pages / "rdma.md"
    ).read_text().replace("\n", " ")


def test_a_nic_with_too_few_entries_tells_for_how_many_ranks(start: Any) -> None:
    most = 32767  # Soft-RoCE's
    nranks = queue_depths.most_peers(most) + 1
    start(nranks - 1, max_cqe=most)
    with pytest.raises(TransportError) as caught:
        start(nranks, max_cqe=most)
    message = str(caught.value)
    assert message.startswith(f"near0 has completion queues of {most} entries, but {nranks} peers")
    assert f"use at most {nranks} ranks" in message
    assert "leave the NIC out with R2CC_HCA" in message


def test_a_queue_that_overran_takes_its_rail_out_of_use(start: Any) -> None:
    """It must not happen; should it, no completion says so, and calls would wait for ever."""
    job = start(2)
    job.cq.cqe = 3
    job.fill()
    job.fabric.fail_port("near0")
    (changed,) = job.poll()
    assert isinstance(changed, RailChanged)
    assert not changed.is_up
    assert "completion queue overflowed" in changed.why
    for key in (PathKey(1, 0), ProbeKey(1, 0, 0)):
        with pytest.raises(
            TransportError, match=r"near0 \(rail 0, to rank 1\) no longer reports completions"
        ) as caught:
            job.near.offer(key)
        assert caught.value.status == "CQ_ERR"


def test_room_of_a_nic_is_told_before_it_is_used() -> None:
    fabric = FakeFabric(max_cqe=32767)
    with installed(fabric) as loaded:
        assert loaded.device.room("near0") == queue_depths.most_peers(32767)


class Watched:
    def __init__(self) -> None:
        self.is_closed = False

    def knows(self, source: str, destination: str) -> bool:
        return True

    def close(self) -> None:
        self.is_closed = True


def test_a_device_that_fails_to_open_or_close_leaves_none_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with installed(FakeFabric(max_cqe=1)) as loaded:
        neighbours = Watched()
        with pytest.raises(TransportError, match="use at most 1 ranks"):
            loaded.device.RdmaDevice("near0", 1, lambda: (0, "fe80::1"), neighbours, "0")
        assert neighbours.is_closed
    with installed(FakeFabric()) as loaded:
        neighbours = Watched()

        def refuse(_: object) -> None:
            raise loaded.device.PyverbsError("busy")

        monkeypatch.setattr(loaded.device.CQ, "close", refuse)
        device = loaded.device.RdmaDevice("near0", 1, lambda: (0, "fe80::1"), neighbours, "0")
        with pytest.raises(loaded.device.PyverbsError, match="busy"):
            device.close()
        assert neighbours.is_closed

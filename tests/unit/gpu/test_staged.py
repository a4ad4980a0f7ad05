"""Collectives through staging buffers: right, in order, and never hanging a stream.

The devices are fakes that run work late and in any order that streams, events and words allow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.hostgroup import HostGroup
from support.ranks import KINDS, data_of, get, meant, put, sizes_of, together

from r2ccl.clock import monotonic
from r2ccl.device.base import Stream
from r2ccl.dtypes import CODES
from r2ccl.errors import PeerLost, TransportError, TransportTimeout
from r2ccl.gpu.staged import DeviceCall, StagedBackend
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu
from r2ccl.types import CallSignature, Collective, ReduceOp

INT64 = CODES[np.dtype(np.int64)]
SLOT_NBYTES = 240


class Rank:
    """A rank with a GPU of its own."""

    def __init__(self, group: HostGroup, rank: int, seed: int = 0, timeout_s: float = 20.0) -> None:
        self.rank, self.nranks = rank, group.nranks
        self.device = FakeDevice(FakeGpu(seed), f"rank {rank}", is_strict=True)
        self.stream = self.device.make_stream()
        self.error: BaseException | None = None
        self.backend = StagedBackend(
            self.device,
            rank,
            group.nranks,
            slot_nbytes=SLOT_NBYTES,
            enter=lambda call, own: call,
            run=lambda call, source, output: group.run(rank, call, source, output),
            check=self._check,
            clock=monotonic,
            timeout_s=timeout_s,
        )

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def put(self, array: Any) -> int:
        return put(self.device, self.stream, array)

    def get(self, address: int, count: int) -> Any:
        return get(self.device, self.stream, address, count)

    def run(self, kind: Collective, x: Any, op: ReduceOp, root: int, *, in_place: bool) -> Any:
        """Run a collective from device memory to device memory; return the result."""
        count, whole = sizes_of(kind, x.size, self.nranks)
        source = self.put(x)
        output = self.put(np.full(count, -1))
        has_output = kind != Collective.REDUCE or self.rank == root
        if in_place and count == x.size:
            output = source
        call = CallSignature(kind, INT64, op, whole, root)
        job, done = self.backend.begin(DeviceCall(call, source, output * has_output), self.stream)
        assert job.error is None
        self.device.wait(self.stream, done)
        self.backend.recycle(done)
        self.backend.finish(job)
        return self.get(output, count) if has_output else None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [0, 3, 30, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_every_collective_of_any_size(kind: Collective, count: int, seed: int) -> None:
    nranks, root = 3, 1
    group = HostGroup(nranks)
    ranks = [Rank(group, rank, seed + rank) for rank in range(nranks)]
    xs = [data_of(rank, count) for rank in range(nranks)]
    op = ReduceOp.SUM if seed % 2 else ReduceOp.MAX

    def body(rank: int) -> Any:
        return ranks[rank].run(kind, xs[rank], op, root, in_place=seed > 1)

    for rank, result in enumerate(together(nranks, body)):
        np.testing.assert_array_equal(result, meant(kind, xs, op, root, rank))
    for each in ranks:
        each.backend.close(20.0)


def test_calls_back_to_back_share_the_slots() -> None:
    nranks, ncalls = 2, 12
    group = HostGroup(nranks)
    ranks = [Rank(group, rank, rank) for rank in range(nranks)]

    def body(rank: int) -> Any:
        mine = ranks[rank]
        jobs, places = [], []
        for at in range(ncalls):
            place = mine.put(np.full(50 + at, at + rank))
            call = CallSignature(Collective.ALLREDUCE, INT64, ReduceOp.SUM, 50 + at)
            job, done = mine.backend.begin(DeviceCall(call, place, place), mine.stream)
            mine.device.wait(mine.stream, done)
            mine.backend.recycle(done)
            jobs.append(job)
            places.append(place)
        for job in jobs:
            mine.backend.finish(job)
        return [mine.get(place, 50 + at) for at, place in enumerate(places)]

    for results in together(nranks, body):
        for at, result in enumerate(results):
            np.testing.assert_array_equal(result, np.full(50 + at, 2 * at + 1))
    for each in ranks:
        each.backend.close(20.0)


def test_a_failed_collective_lets_the_streams_go() -> None:
    group = HostGroup(1)
    mine = Rank(group, 0)
    lost = PeerLost(rank=0, peer=1, last_heard_s=0.0, why="for a test")
    calls = 0

    def run(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise lost

    mine.backend._run = run
    place = mine.put(np.arange(200))
    call = CallSignature(Collective.ALLREDUCE, INT64, ReduceOp.SUM, 200)
    jobs = [mine.backend.begin(DeviceCall(call, place, place), mine.stream) for _ in range(2)]
    mine.device.wait(mine.stream, jobs[0][1])
    with pytest.raises(PeerLost):
        mine.backend.finish(jobs[0][0])
    assert mine.device.synchronize(jobs[0][1], 20.0)
    assert mine.device.make_event() != jobs[1][1]
    assert not mine.device.is_done(jobs[1][1])
    mine.backend.finish(jobs[1][0])
    assert mine.device.synchronize(jobs[1][1], 20.0)
    mine.backend.close(20.0)


def blocked(mine: Rank) -> tuple[Any, Any]:
    """Begin a call behind work that does not end; return its job, and what ends the work."""
    word = mine.device.allocate_pinned(64)
    mine.device.wait_word(mine.stream, int(word.ctypes.data), 1)
    place = mine.put(np.arange(10))
    call = CallSignature(Collective.ALLREDUCE, INT64, ReduceOp.SUM, 10)
    job, _ = mine.backend.begin(DeviceCall(call, place, place), mine.stream)
    return job, word.view(np.uint32)


def test_endless_work_of_the_caller_is_not_waited_for_for_ever() -> None:
    mine = Rank(HostGroup(1), 0, timeout_s=0.2)
    job, word = blocked(mine)
    with pytest.raises(TransportTimeout, match="kernel that hangs"):
        mine.backend.finish(job)
    with pytest.raises(TransportTimeout, match="its memory was not freed"):
        mine.backend.close(0.05)
    word[0] = 1
    mine.backend.close(20.0)


def test_the_communicators_end_ends_the_wait_for_the_device() -> None:
    mine = Rank(HostGroup(1), 0)
    job, word = blocked(mine)
    mine.error = PeerLost(rank=0, peer=1, last_heard_s=0.0, why="for a test")
    with pytest.raises(PeerLost):
        mine.backend.finish(job)
    word[0] = 1
    mine.backend.close(20.0)


def test_a_device_that_refuses_half_a_call_is_reported() -> None:
    mine = Rank(HostGroup(1), 0)
    refused = TransportError("no", status="CUDA_ERROR_ILLEGAL_ADDRESS")
    copy, ncopies = mine.device.copy, 0

    def fail_third(target: int, source: int, nbytes: int, stream: Stream) -> None:
        nonlocal ncopies
        ncopies += 1
        if ncopies == 3:
            raise refused
        copy(target, source, nbytes, stream)

    place = mine.put(np.arange(200))
    mine.device.copy = fail_third  # type: ignore[method-assign]
    call = CallSignature(Collective.ALLREDUCE, INT64, ReduceOp.SUM, 200)
    job, _ = mine.backend.begin(DeviceCall(call, place, place), mine.stream)
    assert job.error is refused
    with pytest.raises(TransportError) as caught:
        mine.backend.finish(job)
    assert caught.value is refused
    mine.device.copy = copy  # type: ignore[method-assign]
    mine.backend.close(20.0)

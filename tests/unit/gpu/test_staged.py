"""Collectives through staging buffers: right, in order, and never hanging a stream.

The devices are fakes that run work late and in any order that streams, events and words allow.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.hostgroup import HostGroup
from support.ranks import KINDS, data_of, get, meant, put, sizes_of, together

from r2ccl.clock import monotonic
from r2ccl.device.base import Event, Stream
from r2ccl.dtypes import CODES
from r2ccl.errors import PeerLost, TransportError, TransportTimeout
from r2ccl.gpu.host_signal import DeviceCall
from r2ccl.gpu.staged import StagedBackend, StagedJob
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

    def begin(self, call: DeviceCall) -> StagedJob:
        job = self.backend.begin(call, self.stream)
        self.backend.hold(self.stream, job.number)
        return job

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
        job = self.begin(DeviceCall(call, source, output * has_output))
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
            job = mine.begin(DeviceCall(call, place, place))
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
    first, second = (mine.begin(DeviceCall(call, place, place)) for _ in range(2))
    passed = mine.device.make_event()
    mine.device.record(passed, mine.stream)
    with pytest.raises(PeerLost):
        mine.backend.finish(first)
    assert mine.device.synchronize(first.done, 20.0)
    assert not mine.device.synchronize(passed, 0.02)
    mine.backend.finish(second)
    assert mine.device.synchronize(passed, 20.0)
    mine.backend.close(20.0)


def test_copies_to_and_from_slots_are_on_two_streams() -> None:
    """On one stream, no window could be copied out while another is copied in."""
    mine = Rank(HostGroup(1), 0)
    place = mine.put(np.arange(300))
    streams: dict[bool, set[Stream]] = {True: set(), False: set()}
    copy = mine.device.copy

    def spy(target: int, source: int, nbytes: int, stream: Stream) -> None:
        streams[target >= place and target < place + 2400].add(stream)
        copy(target, source, nbytes, stream)

    mine.device.copy = spy  # type: ignore[method-assign]
    call = CallSignature(Collective.ALLREDUCE, INT64, ReduceOp.SUM, 300)
    mine.backend.finish(mine.begin(DeviceCall(call, place, place)))

    assert [len(each) for each in streams.values()] == [1, 1]
    assert not streams[True] & streams[False]
    mine.backend.close(20.0)


def test_threads_that_hold_a_stream_do_so_one_by_one() -> None:
    """The event of the last wait, which `close` waits for, is recorded after all waits."""
    mine = Rank(HostGroup(1), 0)
    place = mine.put(np.arange(10))
    call = CallSignature(Collective.ALLREDUCE, INT64, ReduceOp.SUM, 10)
    job = mine.begin(DeviceCall(call, place, place))
    made: list[tuple[str, int]] = []
    wait_word, record = mine.device.wait_word, mine.device.record
    other = threading.Thread(target=lambda: mine.backend.hold(mine.stream, job.number))

    def spy_wait(stream: Stream, address: int, value: int) -> None:
        made.append(("wait", threading.get_ident()))
        wait_word(stream, address, value)

    def spy_record(event: Event, stream: Stream) -> None:
        if other.ident is None:  # another thread comes between the two calls of this one
            other.start()
            other.join(0.1)
        made.append(("record", threading.get_ident()))
        record(event, stream)

    mine.device.wait_word, mine.device.record = spy_wait, spy_record  # type: ignore[method-assign]
    mine.backend.hold(mine.stream, job.number)
    other.join(20.0)

    assert [name for name, _ in made] == ["wait", "record"] * 2
    assert made[0][1] == made[1][1] != made[2][1] == made[3][1]
    mine.backend.finish(job)
    mine.backend.close(20.0)


def blocked(mine: Rank) -> tuple[Any, Any]:
    """Begin a call behind work that does not end; return its job, and what ends the work."""
    word = mine.device.allocate_pinned(64)
    mine.device.wait_word(mine.stream, int(word.ctypes.data), 1)
    place = mine.put(np.arange(10))
    call = CallSignature(Collective.ALLREDUCE, INT64, ReduceOp.SUM, 10)
    return mine.begin(DeviceCall(call, place, place)), word.view(np.uint32)


def test_endless_work_of_the_caller_is_not_waited_for_for_ever() -> None:
    mine = Rank(HostGroup(1), 0, timeout_s=0.2)
    job, word = blocked(mine)
    with pytest.raises(TransportTimeout, match="kernel that hangs"):
        mine.backend.finish(job)
    with pytest.raises(TransportTimeout, match="which frees the memory that the GPU uses"):
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
    job = mine.begin(DeviceCall(call, place, place))
    with pytest.raises(TransportError) as caught:
        mine.backend.finish(job)
    assert caught.value is refused
    mine.device.copy = copy  # type: ignore[method-assign]
    mine.backend.close(20.0)

"""Collectives among GPUs that share a node: right in every order of work, and never hanging.

Ranks are threads, each with a process of its own on one fake GPU, which runs work late, in any
order that streams, events and words allow, and finds two that should have been ordered.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
from support.ranks import (
    KINDS,
    TIMEOUT_S,
    Gathering,
    PlainKernels,
    data_of,
    get,
    meant,
    put,
    sizes_of,
    together,
)
from support.slow import slow_but

from r2ccl.clock import monotonic
from r2ccl.dtypes import CODES
from r2ccl.errors import InvalidArgument, PeerLost, TransportError, TransportTimeout
from r2ccl.gpu import peer_connect
from r2ccl.gpu.host_signal import DeviceCall
from r2ccl.gpu.ipc_board import NSLOTS
from r2ccl.gpu.peer import PeerBackend
from r2ccl.gpu.peer_connect import connect_peers
from r2ccl.gpu.peer_memory import COPIED, PeerMemory
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu, MemoryKind
from r2ccl.types import CallSignature, Collective, ReduceOp

AREA_NBYTES = 400
INT64 = CODES[np.dtype(np.int64)]


class Node:
    """Ranks on one GPU."""

    def __init__(self, nranks: int, seed: int = 0, timeout_s: float = TIMEOUT_S) -> None:
        self.nranks = nranks
        self.errors: list[BaseException | None] = [None] * nranks
        gpu = FakeGpu(seed)
        self.devices = [FakeDevice(gpu, f"rank {rank}") for rank in range(nranks)]
        self.streams = [device.make_stream() for device in self.devices]
        gathering = Gathering(nranks)

        def enter(rank: int) -> PeerBackend:
            device = self.devices[rank]
            kernels = PlainKernels(device)
            memory = connect_peers(
                device, kernels, rank, [range(nranks)], lambda mine: gathering(rank, mine),
                AREA_NBYTES,
            )  # fmt: skip
            assert isinstance(memory, PeerMemory), memory
            return PeerBackend(
                device,
                kernels,
                memory,
                range(nranks),
                check=lambda: self._check(rank),
                clock=monotonic,
                sleep=time.sleep,
                timeout_s=timeout_s,
            )

        self.calls: list[PeerBackend] = together(nranks, enter)

    def _check(self, rank: int) -> None:
        error = self.errors[rank]
        if error is not None:
            raise error

    def begin(self, rank: int, call: DeviceCall) -> Any:
        """Begin a call, with the caller's stream waiting for it."""
        self.calls[rank].prepare(call)
        job = self.calls[rank].begin(call, self.streams[rank])
        self.calls[rank].hold(self.streams[rank], job.number)
        return job

    def run(
        self, rank: int, kind: Collective, x: Any, op: ReduceOp, root: int, *, in_place: bool
    ) -> Any:
        """Run a collective from device memory to device memory; return the result."""
        device, stream = self.devices[rank], self.streams[rank]
        count, whole = sizes_of(kind, x.size, self.nranks)
        source, output = put(device, stream, x), put(device, stream, np.full(count, -1))
        has_output = kind != Collective.REDUCE or rank == root
        if in_place and count == x.size:
            output = source
        signature = CallSignature(kind, INT64, op, whole, root)
        job = self.begin(rank, DeviceCall(signature, source, output * has_output))
        assert job.error is None
        self.calls[rank].finish(job)
        return get(device, stream, output, count) if has_output else None

    def close(self) -> None:
        together(self.nranks, lambda rank: self.calls[rank].close(TIMEOUT_S))


@pytest.mark.parametrize("seed", slow_but([1, 5], range(6)))
@pytest.mark.parametrize("count", slow_but([0, 4, 240], [0, 4, 40, 240, 1000]))
@pytest.mark.parametrize("kind", KINDS)
def test_every_collective_of_any_size(kind: Collective, count: int, seed: int) -> None:
    nranks = 2 + seed % 3
    count -= count % nranks
    node, root = Node(nranks, seed), 1
    xs = [data_of(rank, count) for rank in range(nranks)]
    op = ReduceOp.SUM if seed % 2 else ReduceOp.MAX
    results = together(
        nranks, lambda rank: node.run(rank, kind, xs[rank], op, root, in_place=seed > 2)
    )
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result, meant(kind, xs, op, root, rank))
    node.close()


def allreduce_of(count: int) -> CallSignature:
    return CallSignature(Collective.ALLREDUCE, INT64, ReduceOp.SUM, count)


@pytest.mark.parametrize("seed", slow_but([1], range(4)))
def test_calls_back_to_back_on_the_same_memory(seed: int) -> None:
    nranks, ncalls, count = 3, 20, 30
    node = Node(nranks, seed)

    def body(rank: int) -> Any:
        place = put(node.devices[rank], node.streams[rank], np.full(count, rank + 1))
        jobs = [
            node.begin(rank, DeviceCall(allreduce_of(count), place, place)) for _ in range(ncalls)
        ]
        for job in jobs:
            node.calls[rank].finish(job)
        return get(node.devices[rank], node.streams[rank], place, count)

    for result in together(nranks, body):
        np.testing.assert_array_equal(result, np.full(count, 6 * 3 ** (ncalls - 1)))
    node.close()


def test_a_rank_many_calls_ahead_waits_and_loses_nothing() -> None:
    """More calls than messages are kept: the one ahead may not overwrite what is not read."""
    nranks, ncalls = 2, 150
    node = Node(nranks)

    def body(rank: int) -> Any:
        place = put(node.devices[rank], node.streams[rank], np.full(4, 1))
        late = threading.Event()
        jobs: list[Any] = []

        def finish() -> None:
            if rank == 1:
                time.sleep(0.2)
            for at in range(ncalls):
                while len(jobs) <= at:
                    late.wait(0.001)
                node.calls[rank].finish(jobs[at])

        worker = threading.Thread(target=finish)
        worker.start()
        for _ in range(ncalls):
            jobs.append(node.begin(rank, DeviceCall(allreduce_of(4), place, place)))
        worker.join(TIMEOUT_S)
        assert not worker.is_alive()
        return [job.error for job in jobs if job.error is not None]

    assert together(nranks, body) == [[], []]
    node.close()


def test_ranks_that_call_different_things_are_told_so() -> None:
    node = Node(2)

    def body(rank: int) -> str:
        place = put(node.devices[rank], node.streams[rank], np.arange(8))
        job = node.begin(rank, DeviceCall(allreduce_of(8 - rank), place, place))
        with pytest.raises(InvalidArgument) as caught:
            node.calls[rank].finish(job)
        return str(caught.value)

    for text in together(2, body):
        assert "count=8" in text
        assert "count=7" in text
    node.close()


def test_a_rank_that_does_not_call_is_named() -> None:
    node = Node(2, timeout_s=0.2)
    place = put(node.devices[0], node.streams[0], np.arange(8))
    job = node.begin(0, DeviceCall(allreduce_of(8), place, place))
    with pytest.raises(TransportTimeout, match="rank 1 has not made this call"):
        node.calls[0].finish(job)
    node.close()


def test_when_a_rank_dies_after_it_called_no_stream_hangs() -> None:
    """Its stream never says that its input is there; the others' are let go by their hosts."""
    node = Node(3)
    lost = PeerLost(rank=0, peer=2, last_heard_s=0.0, why="for a test")
    word = node.devices[2].allocate_pinned(64)
    node.devices[2].wait_word(node.streams[2], int(word.ctypes.data), 1)

    def body(rank: int) -> Any:
        place = put(node.devices[rank], node.streams[rank], np.arange(30))
        job = node.begin(rank, DeviceCall(allreduce_of(30), place, place))
        if rank == 2:
            return None
        if rank == 0:
            time.sleep(0.1)
            node.errors[:2] = [lost, lost]
        with pytest.raises(PeerLost):
            node.calls[rank].finish(job)
        assert node.devices[rank].synchronize(job.done, TIMEOUT_S)
        return None

    together(3, body)
    word.view(np.uint32)[0] = 1
    node.close()


class FailingKernels(PlainKernels):
    """Kernels that are loaded, but cannot be launched."""

    def launch_from_table(self, *args: Any) -> None:
        raise TransportError("for a test")


def test_no_rank_takes_the_numbers_of_a_failed_one_for_a_result() -> None:
    """They end the waits of the others' streams, whose communicator may not know of it yet."""
    node = Node(2)
    node.calls[1]._kernels = FailingKernels(node.devices[1])

    def body(rank: int) -> None:
        place = put(node.devices[rank], node.streams[rank], np.arange(30))
        job = node.begin(rank, DeviceCall(allreduce_of(30), place, place))
        with pytest.raises(TransportError, match="for a test" if rank else "rank 1 failed"):
            node.calls[rank].finish(job)

    together(2, body)
    node.close()


def test_a_failure_is_known_before_rounds_end_without_a_part() -> None:
    """The stream of the failing rank goes on at once, and its thread is stopped meanwhile."""
    node = Node(2)
    lost = PeerLost(rank=1, peer=7, last_heard_s=0.0, why="for a test")
    places = [put(node.devices[rank], node.streams[rank], np.arange(64)) for rank in range(2)]
    calls = [DeviceCall(allreduce_of(64), place, place) for place in places]

    def map_memory(rank: int) -> None:
        for _ in range(3):
            node.calls[rank].finish(node.begin(rank, calls[rank]))

    together(2, map_memory)
    word = node.devices[1].allocate_pinned(64)
    node.devices[1].wait_word(node.streams[1], int(word.ctypes.data), 1)
    jobs = [node.begin(rank, calls[rank]) for rank in range(2)]
    board, has_ended = node.calls[1]._board, threading.Event()
    release = board.release

    def release_and_stop(number: int) -> None:
        release(number)
        word.view(np.uint32)[0] = 1
        has_ended.wait(TIMEOUT_S)

    board.release = release_and_stop  # type: ignore[method-assign]

    def body(rank: int) -> None:
        if rank:
            node.errors[1] = lost
        try:
            with pytest.raises(PeerLost if rank else TransportError):
                node.calls[rank].finish(jobs[rank])
        finally:
            if not rank:
                has_ended.set()

    together(2, body)
    node.close()


def test_a_rank_ahead_does_not_hang_when_one_behind_writes_late() -> None:
    """What was let go stays so: an older number that a slow stream writes takes nothing back."""
    node = Node(2)
    lost = PeerLost(rank=0, peer=2, last_heard_s=0.0, why="for a test")
    places = [put(node.devices[rank], node.streams[rank], np.arange(30)) for rank in range(2)]
    calls = [DeviceCall(allreduce_of(30), place, place) for place in places]
    words = [device.allocate_pinned(64) for device in node.devices]

    def map_memory(rank: int) -> None:
        for _ in range(3):
            node.calls[rank].finish(node.begin(rank, calls[rank]))

    together(2, map_memory)

    def block(rank: int) -> None:
        node.devices[rank].wait_word(node.streams[rank], int(words[rank].ctypes.data), 1)

    block(1)
    ahead = [node.begin(0, calls[0])]
    block(0)
    ahead.append(node.begin(0, calls[0]))
    behind = node.begin(1, calls[1])
    node.errors = [lost, lost]
    node.calls[0].finish(ahead[0])  # the next one's watch is its too
    for rank, job in ((0, ahead[1]), (1, behind)):
        with pytest.raises(PeerLost):
            node.calls[rank].finish(job)
    for rank, job in ((1, behind), (0, ahead[1])):
        words[rank].view(np.uint32)[0] = 1
        assert node.devices[rank].synchronize(job.done, 2.0)
    node.close()


def test_a_kernel_reads_all_addresses_or_none_when_taken_back() -> None:
    """It looks at the first alone: to find it, and another gone, would fail the whole GPU."""
    node = Node(2)

    def body(rank: int) -> None:
        place = put(node.devices[rank], node.streams[rank], np.arange(8))
        node.calls[rank].finish(node.begin(rank, DeviceCall(allreduce_of(8), place, place)))

    together(2, body)
    for calls in node.calls:
        table = calls._table_of(1)
        first, *others = table[:4].tolist()
        assert all((first, *others))
        calls._release_streams(PeerLost(rank=0, peer=1, last_heard_s=0.0, why="for a test"))
        assert table[:4].tolist() == [0, *others]
    node.close()


@pytest.mark.parametrize(
    ("kind", "memory"),
    slow_but(
        [
            (Collective.ALLREDUCE, MemoryKind.POOLED),
            (Collective.ALLGATHER, MemoryKind.MANAGED),
            (Collective.REDUCE_SCATTER, MemoryKind.DEVICE),
            (Collective.BROADCAST, MemoryKind.POOLED),
            (Collective.REDUCE, MemoryKind.DEVICE),
        ],
        itertools.product(KINDS, (MemoryKind.POOLED, MemoryKind.MANAGED, MemoryKind.DEVICE)),
    ),
)
def test_any_memory_works_on_any_rank(kind: Collective, memory: MemoryKind) -> None:
    """Rank 1's arrays cannot be exported, or are given again; the windows of an area are small."""
    nranks, count, root, ncalls = 3, 120, 1, 4
    node = Node(nranks)
    xs = [data_of(rank, count) for rank in range(nranks)]
    size, whole = sizes_of(kind, count, nranks)
    call = CallSignature(kind, INT64, ReduceOp.SUM, whole, root)

    def body(rank: int) -> Any:
        device, stream, mine = node.devices[rank], node.streams[rank], node.calls[rank]
        places = [
            device.caller_memory(8 * each, memory if rank == 1 else MemoryKind.DEVICE)
            for each in (count, size)
        ]
        found = []
        for _ in range(ncalls):
            device.copy(places[0], put(device, stream, xs[rank]), 8 * count, stream)
            has_output = kind != Collective.REDUCE or rank == root
            mine.finish(node.begin(rank, DeviceCall(call, places[0], places[1] * has_output)))
            found.append(get(device, stream, places[1], size) if has_output else None)
        used = places if has_output else places[:1]
        return found, [mine._memory.place_of(place).slot for place in used]

    for rank, (results, slots) in enumerate(together(nranks, body)):
        for result in results:
            np.testing.assert_array_equal(result, meant(kind, xs, ReduceOp.SUM, root, rank))
        is_mapped = rank != 1 or memory is MemoryKind.DEVICE
        assert (COPIED not in slots) is is_mapped, "memory used again is mapped, if it can be"
    node.close()


def test_freed_memory_is_unmapped_and_a_loop_does_not_grow() -> None:
    node = Node(2)
    call = allreduce_of(8)

    def body(rank: int) -> int:
        device, stream, mine = node.devices[rank], node.streams[rank], node.calls[rank]
        most = 0
        for _ in range(NSLOTS + 8):
            place = device.caller_memory(64)
            for _ in range(2):
                device.copy(place, put(device, stream, np.arange(8)), 64, stream)
                mine.finish(node.begin(rank, DeviceCall(call, place, place)))
                assert (get(device, stream, place, 8) == 2 * np.arange(8)).all()
            most = max(most, len(mine._memory._mapped))
            device.free_caller_memory(place)
        return most

    for most in together(2, body):
        assert 0 < most <= 2
    node.close()


def test_more_allocations_than_slots_are_used_in_turn() -> None:
    node, ncalls = Node(2), 3
    call = allreduce_of(8)

    def body(rank: int) -> Any:
        device, stream, mine = node.devices[rank], node.streams[rank], node.calls[rank]
        places = [device.caller_memory(64) for _ in range(NSLOTS + 5)]
        for _ in range(ncalls):
            for place in places:
                device.copy(place, put(device, stream, np.arange(8)), 64, stream)
                mine.finish(node.begin(rank, DeviceCall(call, place, place)))
        assert len(mine._memory._mapped) <= NSLOTS
        return [get(device, stream, place, 8) for place in places]

    for results in together(2, body):
        for result in results:
            np.testing.assert_array_equal(result, 2 * np.arange(8))
    node.close()


def test_all_do_without_if_one_cannot() -> None:
    gpu, other = FakeGpu(), FakeGpu()
    devices = [FakeDevice(gpu, "rank 0"), FakeDevice(gpu, "rank 1"), FakeDevice(other, "rank 2")]
    for _ in range(4):  # its handles differ from those of the first GPU
        devices[2].allocate(8)
    gathering = Gathering(3)
    answers = together(
        3,
        lambda rank: connect_peers(
            devices[rank],
            PlainKernels(devices[rank]),
            rank,
            [range(3)],
            lambda mine: gathering(rank, mine),
            AREA_NBYTES,
        ),
    )
    assert all(isinstance(answer, str) and answer for answer in answers)


class LosingKernels(PlainKernels):
    """Kernels whose writes get lost, as on machines where peer access maps and corrupts."""

    def launch_from_table(self, *given: Any, **named: Any) -> None:
        pass


def test_memory_that_maps_but_loses_data_is_not_used() -> None:
    gpu, gathering = FakeGpu(), Gathering(3)
    devices = [FakeDevice(gpu, f"rank {rank}") for rank in range(3)]

    def connect(rank: int) -> Any:
        kernels = (LosingKernels if rank == 1 else PlainKernels)(devices[rank])
        return connect_peers(
            devices[rank], kernels, rank, [range(3)], lambda mine: gathering(rank, mine), 400
        )

    found = together(3, connect)
    for rank in (0, 2):
        assert f"rank 1 wrote to the memory of rank {rank} did not arrive" in found[rank]
    assert found[1] == "rank 0 cannot use CUDA IPC; see its error or INFO log"
    for device in devices:
        device.close()


@pytest.mark.parametrize("nbefore", [0, 1])
def test_memory_that_a_gpu_may_still_use_is_not_freed(nbefore: int) -> None:
    """Rank 1 times out while it writes patterns, or while it copies those of others."""
    gpu, gathering, nwaits = FakeGpu(), Gathering(3), [nbefore]
    devices = [FakeDevice(gpu, f"rank {rank}") for rank in range(3)]
    synchronize = devices[1].synchronize

    def late(event: Any, timeout_s: float) -> bool:
        nwaits[0] -= 1
        return nwaits[0] >= 0 and synchronize(event, timeout_s)

    devices[1].synchronize = late  # type: ignore[method-assign]
    devices[1].refusals["unmap"] = "CUDA_ERROR_WOULD_HANG"
    for device in devices:
        device.refusals["free"] = "CUDA_ERROR_WOULD_HANG"
    found = together(
        3,
        lambda rank: connect_peers(
            devices[rank], PlainKernels(devices[rank]), rank, [range(3)],
            lambda mine: gathering(rank, mine), AREA_NBYTES,
        ),
    )  # fmt: skip
    assert "within 20 s" in found[1]
    assert found[0] == found[2] == "rank 1 cannot use CUDA IPC; see its error or INFO log"


def test_a_kernel_that_does_not_compile_is_no_failure_of_others() -> None:
    gpu, gathering = FakeGpu(), Gathering(2)
    devices = [FakeDevice(gpu, f"rank {rank}") for rank in range(2)]
    devices[1].refusals["load"] = "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"

    def connect(rank: int) -> Any:
        return connect_peers(
            devices[rank], PlainKernels(devices[rank]), rank, [range(2)],
            lambda mine: gathering(rank, mine), 400,
        )  # fmt: skip

    found = together(2, connect)
    assert found[0] == "rank 1 cannot use CUDA IPC; see its error or INFO log"
    assert "UNSUPPORTED_PTX_VERSION" in found[1]
    for device in devices:
        device.close()


def test_a_rank_without_a_fence_refuses_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, gathering = FakeGpu(), Gathering(2)
    devices = [FakeDevice(gpu, f"rank {rank}") for rank in range(2)]

    def refuse() -> None:
        raise TransportError("no fence, in a test")

    monkeypatch.setattr(peer_connect, "load_fence", refuse)

    def connect(rank: int) -> Any:
        return connect_peers(
            devices[rank], PlainKernels(devices[rank]), rank, [range(2)],
            lambda mine: gathering(rank, mine), 400,
        )  # fmt: skip

    assert together(2, connect) == ["no fence, in a test"] * 2
    for device in devices:
        device.close()


@pytest.mark.parametrize("nranks", [2, 8])
def test_a_repeated_call_takes_few_driver_calls(nranks: int) -> None:
    """Their number does not grow with the ranks, and nothing is exported, mapped or loaded."""
    node = Node(nranks)
    counted: list[list[str]] = [[] for _ in range(nranks)]

    def body(rank: int) -> None:
        device, mine = node.devices[rank], node.calls[rank]
        place = put(device, node.streams[rank], np.arange(100))
        call = DeviceCall(allreduce_of(100), place, place)
        for _ in range(6):
            job = node.begin(rank, call)
            mine.finish(job)
            mine.recycle(job.done)
        called = device._called

        def count(method: str) -> Any:
            if method not in ("is_done", "synchronize"):
                counted[rank].append(method)
            return called(method)

        device._called = count  # type: ignore[method-assign]
        job = node.begin(rank, call)
        mine.finish(job)

    together(nranks, body)
    # `exchange_words` of the fake is followed by the words, one by one.
    words = {"write_word": 2 * nranks + 1, "wait_word": 2 * (nranks - 1) + 1}
    others = ["buffer_id", *["exchange_words"] * 2, "launch", *["record"] * 3, "wait"]
    for names in counted:
        assert {name: names.count(name) for name in words} == words
        assert sorted(name for name in names if name not in words) == others
    node.close()

"""Allreduces among several nodes of several GPUs: right in every order of work, never hanging."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from support.hostgroup import HostGroup
from support.ranks import TIMEOUT_S, Gathering, PlainKernels, data_of, get, put, together

from r2ccl.clock import monotonic
from r2ccl.dtypes import CODES
from r2ccl.errors import CommunicatorRevoked, PeerLost, TransportError
from r2ccl.gpu.hierarchical import HierarchicalBackend
from r2ccl.gpu.ipc_board import IpcBoard
from r2ccl.gpu.peer_connect import connect_peers
from r2ccl.gpu.staged import DeviceCall, StagedBackend
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu
from r2ccl.types import CallSignature, Collective, ReduceOp

INT64 = CODES[np.dtype(np.int64)]


class Cluster:
    """Nodes of a GPU each, which the ranks of the node share; rank r is on node r % nnodes."""

    def __init__(self, nnodes: int, nlocal: int, seed: int) -> None:
        self.nranks = nnodes * nlocal
        self.nodes = [range(node, self.nranks, nnodes) for node in range(nnodes)]
        self.groups = [HostGroup(nnodes) for _ in range(nlocal)]
        self.errors: list[BaseException | None] = [None] * self.nranks
        gpus = [FakeGpu(seed + node) for node in range(nnodes)]
        self.devices = [
            FakeDevice(gpus[rank % nnodes], f"rank {rank}") for rank in range(self.nranks)
        ]
        self.streams = [device.make_stream() for device in self.devices]
        gathering = Gathering(self.nranks)

        def enter(rank: int) -> HierarchicalBackend:
            device, node = self.devices[rank], rank % nnodes
            board = connect_peers(device, rank, self.nodes, lambda mine: gathering(rank, mine))
            assert isinstance(board, IpcBoard), board
            group = self.groups[board.index]
            rails = StagedBackend(
                device,
                rank,
                self.nranks,
                slot_nbytes=240,
                enter=lambda call, own: call,
                run=lambda call, source, output: group.run(node, call, source, output),
                check=lambda: self._check(rank),
                clock=monotonic,
                timeout_s=TIMEOUT_S,
            )
            self.rails[rank] = rails
            return HierarchicalBackend(
                device,
                PlainKernels(device),
                board,
                self.nodes[node],
                backends=[rails],
                enter=lambda call, own: call,
                nnodes=nnodes,
                check=lambda: self._check(rank),
                clock=monotonic,
                sleep=time.sleep,
                timeout_s=TIMEOUT_S,
            )

        #: By rank, what is closed after its calls.
        self.rails: dict[int, StagedBackend] = {}
        self.calls: list[HierarchicalBackend] = together(self.nranks, enter)

    def _check(self, rank: int) -> None:
        error = self.errors[rank]
        if error is not None:
            raise error

    def begin(self, rank: int, source: int, output: int, count: int, op: ReduceOp) -> Any:
        call = CallSignature(Collective.ALLREDUCE, INT64, op, count)
        given = DeviceCall(call, source, output)
        self.calls[rank].prepare(given)
        job, done = self.calls[rank].begin(given, self.streams[rank])
        self.devices[rank].wait(self.streams[rank], done)
        return job

    def close(self) -> None:
        def close(rank: int) -> None:
            self.calls[rank].close(TIMEOUT_S)
            self.rails[rank].close(TIMEOUT_S)

        together(self.nranks, close)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [0, 1, 5, 61, 121, 1001])
@pytest.mark.parametrize(("nnodes", "nlocal"), [(2, 2), (3, 2), (2, 4)])
def test_every_size_in_place_and_not(nnodes: int, nlocal: int, count: int, seed: int) -> None:
    cluster = Cluster(nnodes, nlocal, seed)
    xs = [data_of(rank, count) for rank in range(cluster.nranks)]
    op = ReduceOp.SUM if seed % 2 else ReduceOp.MAX

    def body(rank: int) -> Any:
        device, stream = cluster.devices[rank], cluster.streams[rank]
        source = put(device, stream, xs[rank])
        output = source if seed > 1 else put(device, stream, np.full(count, -1))
        for _ in range(2):
            job = cluster.begin(rank, source, output, count, op)
            assert job.error is None
            cluster.calls[rank].finish(job)
        return get(device, stream, output, count)

    total = np.sum(xs, axis=0) if op is ReduceOp.SUM else np.max(xs, axis=0)
    if seed > 1 and op is ReduceOp.SUM:
        total = total * cluster.nranks
    for result in together(cluster.nranks, body):
        np.testing.assert_array_equal(result, total)
    # Ranks count collectives: groups with less to do enter as many.
    assert len({len(group.calls) for group in cluster.groups}) == 1
    cluster.close()


def test_when_the_rails_fail_no_stream_hangs_on_any_rank() -> None:
    """Rank 0's call between the nodes fails; the ranks of both nodes are let go."""
    cluster = Cluster(2, 2, 0)
    lost = PeerLost(rank=0, peer=1, last_heard_s=0.0, why="for a test")

    def body(rank: int) -> None:
        device, stream = cluster.devices[rank], cluster.streams[rank]
        place = put(device, stream, np.arange(100))
        jobs = [cluster.begin(rank, place, place, 100, ReduceOp.SUM) for _ in range(2)]
        if rank == 0:
            cluster.errors[:] = [lost] * 4
            for group in cluster.groups:
                group.abort()
        for job in jobs:
            with pytest.raises((PeerLost, CommunicatorRevoked, threading.BrokenBarrierError)):
                cluster.calls[rank].finish(job)
        assert device.synchronize(jobs[1].done, TIMEOUT_S)

    together(4, body)
    cluster.close()


def test_a_call_let_go_by_another_rank_lets_its_rails_go_too() -> None:
    """Words that another rank wrote do not count as done while the host's part is to come."""
    cluster = Cluster(2, 2, 0)
    lost = PeerLost(rank=0, peer=1, last_heard_s=0.0, why="for a test")
    device, stream, mine = cluster.devices[0], cluster.streams[0], cluster.calls[0]
    place = put(device, stream, np.arange(100))
    first = cluster.begin(0, place, place, 100, ReduceOp.SUM)
    beside = cluster.calls[2]
    beside._board.release(first.number)
    pinned = int(device.allocate_pinned(800).ctypes.data)
    second = cluster.begin(0, pinned, pinned, 100, ReduceOp.SUM)
    assert second.error is not None, "it cannot be exported"
    cluster.errors[0] = lost
    for job in (first, second):
        with pytest.raises((PeerLost, TransportError)):
            mine.finish(job)
    assert device.synchronize(first.done, 2.0)
    cluster.close()


def test_calls_of_the_rails_own_between_two_that_are_let_go() -> None:
    """The host signal between nodes never decreases, in whatever order calls end."""
    cluster = Cluster(2, 2, 0)
    lost = PeerLost(rank=0, peer=1, last_heard_s=0.0, why="for a test")
    device, stream, rails = cluster.devices[0], cluster.streams[0], cluster.rails[0]
    place = put(device, stream, np.arange(100))
    first = cluster.begin(0, place, place, 100, ReduceOp.SUM)
    call = CallSignature(Collective.ALLREDUCE, INT64, ReduceOp.SUM, 100)
    between, done = rails.begin(DeviceCall(call, place, place), stream)
    device.wait(stream, done)
    word = device.allocate_pinned(64)
    device.wait_word(stream, int(word.ctypes.data), 1)
    last = cluster.begin(0, place, place, 100, ReduceOp.SUM)
    cluster.errors[0] = lost
    cluster.groups[0].abort()
    with pytest.raises(PeerLost):
        cluster.calls[0].finish(first)
    with pytest.raises((PeerLost, threading.BrokenBarrierError)):
        rails.finish(between)
    with pytest.raises(PeerLost):
        cluster.calls[0].finish(last)
    word.view(np.uint32)[0] = 1
    assert device.synchronize(last.done, 2.0)
    cluster.close()

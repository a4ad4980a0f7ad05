"""Allreduces among several nodes of several GPUs: right in every order of work, never hanging."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from support.hostgroup import HostGroup
from support.ranks import TIMEOUT_S, Gathering, PlainKernels, data_of, get, put, together
from support.slow import slow_but

from r2ccl.clock import monotonic
from r2ccl.dtypes import CODES
from r2ccl.errors import CommunicatorRevoked, PeerLost
from r2ccl.gpu.hierarchical import HierarchicalBackend
from r2ccl.gpu.host_signal import DeviceCall
from r2ccl.gpu.peer_connect import connect_peers
from r2ccl.gpu.peer_memory import PeerMemory
from r2ccl.gpu.staged import StagedBackend
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
            kernels = PlainKernels(device)
            memory = connect_peers(
                device, kernels, rank, self.nodes, lambda mine: gathering(rank, mine), 400
            )
            assert isinstance(memory, PeerMemory), memory
            group = self.groups[memory.board.index]
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
                kernels,
                memory,
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
        job = self.calls[rank].begin(given, self.streams[rank])
        self.calls[rank].hold(self.streams[rank], job.number)
        return job

    def close(self) -> None:
        def close(rank: int) -> None:
            self.calls[rank].close(TIMEOUT_S)
            self.rails[rank].close(TIMEOUT_S)

        together(self.nranks, close)


@pytest.mark.parametrize("seed", slow_but([3], range(4)))
@pytest.mark.parametrize("count", slow_but([0, 5, 241], [0, 1, 5, 61, 121, 241, 1001]))
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


def test_calls_of_the_rails_own_mix_with_parts_of_others() -> None:
    """Parts have no number: a call of the rails that was begun earlier is not let go by them."""
    cluster = Cluster(2, 2, 0)

    def body(rank: int) -> Any:
        device, stream, rails = cluster.devices[rank], cluster.streams[rank], cluster.rails[rank]
        place, other = (put(device, stream, np.full(100, rank + 1)) for _ in range(2))
        first = cluster.begin(rank, place, place, 100, ReduceOp.SUM)
        call = CallSignature(Collective.ALLREDUCE, INT64, ReduceOp.SUM, 100)
        between = rails.begin(DeviceCall(call, other, other), stream)
        rails.hold(stream, between.number)
        last = cluster.begin(rank, place, place, 100, ReduceOp.SUM)
        passed = device.make_event()
        device.record(passed, stream)
        cluster.calls[rank].finish(first)
        assert not device.synchronize(passed, 0.02)
        rails.finish(between)
        cluster.calls[rank].finish(last)
        return get(device, stream, place, 100), get(device, stream, other, 100)

    for rank, (whole, column) in enumerate(together(4, body)):
        np.testing.assert_array_equal(whole, np.full(100, 40))
        # The stand-in of the rails reduces among the ranks with the same index in their nodes.
        np.testing.assert_array_equal(column, np.full(100, 3 if rank < 2 else 7))
    cluster.close()

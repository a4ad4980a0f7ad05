"""All ranks select the same backends for calls on GPU memory, the best that all support first.

Ranks are threads with engines of their own, on one simulated network; the GPUs of a node, one a
rank, are fakes of one machine.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines import Group, Rank
from support.machines.recorded import record
from support.ranks import TIMEOUT_S, OneCard, together
from support.slow import slow_but

from r2ccl.dtypes import CODES
from r2ccl.errors import R2cclError, TransportError
from r2ccl.gpu.backends import BackendSelector, GpuBackend
from r2ccl.gpu.gpudirect import GpuDirectBackend
from r2ccl.gpu.hierarchical import HierarchicalBackend
from r2ccl.gpu.host_signal import DeviceCall
from r2ccl.gpu.peer import PeerBackend
from r2ccl.gpu.staged import StagedBackend
from r2ccl.planning.plan_cache import Plan
from r2ccl.runtime.executor import HostLanes, LandingPool
from r2ccl.testing.fakedevice.forms import FakeLauncher
from r2ccl.topology.machine import Machine
from r2ccl.types import CallSignature, Collective, ReduceOp

INT64 = CODES[np.dtype(np.int64)]


class Caller:
    """A rank whose calls go the backends that were found."""

    def __init__(self, rank: Rank, machine: Machine | None, labels: list[str]) -> None:
        self.rank = rank
        pool = LandingPool(lambda n: np.empty(n, np.uint8), 2)

        def run_plan(plan: Plan, source: Any, output: Any) -> None:
            rank.engine.run(plan, HostLanes(pool, source, output))

        kernels = FakeLauncher(rank.device)
        hardware = OneCard(rank.device, kernels, machine)
        selector = BackendSelector(
            rank.engine, rank.entry, run_plan, config=rank.group.config,
            nodes=rank.group.nodes, allgather=rank.gather, labels=labels, hardware=hardware,
        )  # fmt: skip
        self.backends: tuple[GpuBackend, ...] = selector.select(rank.device, kernels)
        self.taken: list[type] = []

    def begin(
        self, x: Any, op: ReduceOp = ReduceOp.SUM, address: int = 0
    ) -> tuple[GpuBackend, Any, int]:
        """Begin an allreduce in place; return its backend, job, and the result's address."""
        address = address or self.rank.put(x)
        signature = CallSignature(Collective.ALLREDUCE, CODES[x.dtype], op, x.size)
        call = DeviceCall(signature, address, address)
        backend = next(each for each in self.backends if each.supports(call))
        self.taken.append(type(backend))
        if not backend.is_prepared(call):
            backend.prepare(call)
        assert backend.is_prepared(call)
        job = backend.begin(call, self.rank.stream)
        backend.hold(self.rank.stream, job.number)
        return backend, job, address

    def allreduce(self, x: Any, op: ReduceOp = ReduceOp.SUM) -> Any:
        backend, job, address = self.begin(x, op)
        assert job.error is None
        backend.finish(job)
        return self.rank.get(address, x)

    def close(self) -> None:
        for backend in self.backends:
            backend.close(TIMEOUT_S)
        assert self.rank.transport.nheld == 0
        self.rank.device.close()


def callers(group: Group, machine: Machine | None = None, labels: Any = ()) -> list[Caller]:
    found: list[Caller] = together(
        group.nranks, lambda rank: Caller(group.ranks[rank], machine, list(labels))
    )
    return found


def close(found: list[Caller]) -> None:
    together(len(found), lambda rank: found[rank].close())


def data_of(rank: int, count: int) -> Any:
    return np.random.default_rng(rank).integers(-1000, 1000, count)


@pytest.mark.parametrize(
    ("nranks", "nlocal", "settings", "reaches", "meant"),
    [
        (1, 1, {}, True, [StagedBackend]),
        (2, 2, {}, True, [PeerBackend, StagedBackend]),
        (2, 2, {"ipc": "0"}, True, [GpuDirectBackend, StagedBackend]),
        (2, 2, {"ipc": "0"}, False, [StagedBackend]),
        (2, 1, {}, True, [GpuDirectBackend, StagedBackend]),
        (4, 2, {}, True, [HierarchicalBackend, GpuDirectBackend, StagedBackend]),
        (4, 2, {}, False, [HierarchicalBackend, StagedBackend]),
    ],
)
def test_the_best_backend_that_all_ranks_support_comes_first(
    nranks: int, nlocal: int, settings: dict[str, str], reaches: bool, meant: list[type]
) -> None:
    group = Group(nranks, 0, nlocal, **settings)
    # One rank that cannot is enough.
    group.ranks[-1].transport.refuses = lambda address: not reaches
    found = callers(group)
    assert [[type(backend) for backend in each.backends] for each in found] == [meant] * nranks
    xs = [data_of(rank, 700) for rank in range(nranks)]
    for result in together(nranks, lambda rank: found[rank].allreduce(xs[rank])):
        np.testing.assert_array_equal(result, np.sum(xs, axis=0))
    assert [each.taken for each in found] == [meant[:1]] * nranks
    close(found)


def test_the_least_staging_memory_serves_a_reduce_scatter() -> None:
    """Its windows need memory for an element of each rank, and for as many sums."""
    group = Group(4, staging_nbytes=16)
    group.ranks[-1].transport.refuses = lambda address: True
    found = callers(group)
    xs = [data_of(rank, 8) for rank in range(4)]
    call = CallSignature(Collective.REDUCE_SCATTER, INT64, ReduceOp.SUM, 8)

    def body(rank: int) -> Any:
        mine, (staged,) = found[rank].rank, found[rank].backends
        output = mine.put(xs[rank][:2])
        job = staged.begin(DeviceCall(call, mine.put(xs[rank]), output), mine.stream)
        staged.hold(mine.stream, job.number)
        staged.finish(job)
        return mine.get(output, xs[rank][:2])

    np.testing.assert_array_equal(np.concatenate(together(4, body)), np.sum(xs, axis=0))
    close(found)


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_any_staging_memory_has_aligned_windows(dtype: Any) -> None:
    """A GPU fails on operands that are not aligned, and so does the fake."""
    group = Group(2, 0, 2, staging_nbytes=1_000_003)
    found = callers(group)
    xs = [data_of(rank, 700).astype(dtype) for rank in range(2)]
    for result in together(2, lambda rank: found[rank].allreduce(xs[rank])):
        np.testing.assert_array_equal(result, np.sum(xs, axis=0))
    assert [each.taken for each in found] == [[PeerBackend]] * 2
    close(found)


def test_what_was_demanded_and_cannot_be_is_an_error_of_all() -> None:
    group = Group(2, 0, 1, ipc="1")

    def find(rank: int) -> None:
        with pytest.raises(TransportError, match="1 rank per host; CUDA IPC needs 2 to"):
            Caller(group.ranks[rank], None, [])

    together(2, find)


def test_what_was_found_is_freed_if_the_rest_cannot_be_made() -> None:
    """On one rank alone, of which the others learn when it ends the communicator."""
    group = Group(4, 0, 2)
    group.ranks[1].device.refusals["pin"] = "CUDA_ERROR_OUT_OF_MEMORY"

    def find(rank: int) -> Caller | None:
        if rank != 1:
            return Caller(group.ranks[rank], None, [])
        with pytest.raises(TransportError, match="OUT_OF_MEMORY"):
            Caller(group.ranks[rank], None, [])
        return None

    found = together(4, find)
    assert group.ranks[1].transport.nheld == 0, "no NIC may keep memory that is freed"
    group.ranks[1].device.close()
    close([each for each in found if each is not None])


#: Elements of allreduces: few of them, and more.
FEW = (0, 3, 61, 200)
MORE = (0, 1, 3, 16, 33, 61, 200, 1001)


@pytest.mark.parametrize(
    ("reaches", "op", "seed", "counts"),
    slow_but(
        [
            (True, ReduceOp.AVG, 0, FEW),
            (False, ReduceOp.SUM, 1, FEW),
            (True, ReduceOp.MAX, 2, FEW),
        ],
        itertools.product(
            (True, False), (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX), range(3), (FEW, MORE)
        ),
    ),
)
def test_hierarchical_calls_mix_with_calls_of_all_ranks(
    reaches: bool, op: ReduceOp, seed: int, counts: tuple[int, ...]
) -> None:
    """Parts differ, are empty, or too small for the NICs; ranks count collectives all the same."""
    group = Group(4, seed, 2)
    group.ranks[0].transport.refuses = lambda address: not reaches
    found = callers(group)
    for count in counts:
        xs = [data_of(rank + seed, count) for rank in range(4)]
        results = together(4, lambda rank, xs=xs: found[rank].allreduce(xs[rank], op))  # type: ignore[misc]
        meant = np.max(xs, axis=0) if op is ReduceOp.MAX else np.sum(xs, axis=0)
        for result in results:
            np.testing.assert_array_equal(
                result, np.trunc(meant / 4).astype(np.int64) if op is ReduceOp.AVG else meant
            )
    hierarchical = [each.backends[0] for each in found]
    for each in found:
        each.backends = each.backends[1:]
    xs = [data_of(rank, 300) for rank in range(4)]
    for result in together(4, lambda rank: found[rank].allreduce(xs[rank])):
        np.testing.assert_array_equal(result, np.sum(xs, axis=0))
    assert len({each.rank.engine.op for each in found}) == 1
    for each, first in zip(found, hierarchical, strict=True):
        each.backends = (first, *each.backends)
    close(found)


def test_hierarchical_calls_over_failed_nics_let_streams_go() -> None:
    group = Group(4, 0, 2)
    found = callers(group)
    x = np.arange(2000)

    def body(rank: int) -> None:
        mine = found[rank]
        backend, job, address = mine.begin(x)
        backend.finish(job)
        begun = [mine.begin(x, address=address) for _ in range(2)]
        mine.rank.engine.revoke("for a test")
        for backend, job, _ in begun:
            with pytest.raises(R2cclError):
                backend.finish(job)
        done = mine.rank.device.make_event()
        mine.rank.device.record(done, mine.rank.stream)
        assert mine.rank.device.synchronize(done, TIMEOUT_S)

    together(4, body)
    close(found)


def test_members_use_the_rails_near_to_their_gpus(tmp_path: Path) -> None:
    """Two GPUs of a DGX and the NICs beside them: member i travels on rail i alone."""
    gpus = ("0000:1b:00.0", "0000:43:00.0")
    group = Group(4, 0, 2)
    for rank in group.ranks:
        rank.device._gpu.bus_id = gpus[rank.rank % 2]
    machine = record(tmp_path, "dgx_h100").read()
    found = callers(group, machine, ("mlx5_0:1", "mlx5_3:1"))
    xs = [data_of(rank, 1000) for rank in range(4)]
    for result in together(4, lambda rank: found[rank].allreduce(xs[rank])):
        np.testing.assert_array_equal(result, np.sum(xs, axis=0))
    for rank in group.ranks:
        routes = {
            link.route.rail
            for (_, _), link in rank.engine._links.senders.items()
            if link.route is not None
        }
        assert routes == {rank.rank % 2}
    close(found)

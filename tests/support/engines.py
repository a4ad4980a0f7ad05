"""Ranks as threads, each with its own engine and fake GPU, on one simulated network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from support.ranks import TIMEOUT_S, Gathering, sizes_of, together

from r2ccl.clock import monotonic
from r2ccl.config import Config
from r2ccl.dtypes import CODES
from r2ccl.errors import TransportError
from r2ccl.failover.context import RankContext
from r2ccl.gpu.gpudirect import GpuDirectBackend
from r2ccl.gpu.gpudirect_connect import connect_gpudirect
from r2ccl.gpu.host_signal import DeviceCall
from r2ccl.gpu.plan_selector import PlanSelector
from r2ccl.planning.cost_model import Fabric
from r2ccl.planning.plan_cache import PlanCache
from r2ccl.runtime.engine import Engine
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu
from r2ccl.testing.fakedevice.forms import FakeLauncher
from r2ccl.testing.simulation.gpus import GpuNetwork
from r2ccl.testing.simulation.network import Timeline
from r2ccl.testing.simulation.transport import SimTransport
from r2ccl.types import CallSignature, Collective, ReduceOp


class NoControl:
    """Control plane that ignores every call."""

    is_busy = False
    neighbors: frozenset[int] = frozenset()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


class SharedSim(SimTransport):
    """A rank's end of a network that all ranks' threads share, one at a time."""

    lock: Any
    #: Returns whether memory at an address cannot be registered.
    refuses: Callable[[int], bool] = staticmethod(lambda address: False)
    nheld = 0

    def register_device(self, address: int, nbytes: int) -> Any:
        if self.refuses(address):
            raise TransportError("this memory moves", status="NO_DIRECT_WAY")
        self.nheld += 1
        return _Held(self)

    def poll(self, timeout_s: float) -> Any:
        with self.lock:
            for _ in range(4):
                self._network.timeline.step()
            return super().poll(timeout_s)

    def flush(self) -> None:
        with self.lock:
            super().flush()

    def isend(self, *given: Any, **named: Any) -> None:
        with self.lock:
            super().isend(*given, **named)


class _Held:
    def __init__(self, transport: SharedSim) -> None:
        self._transport = transport

    def close(self) -> None:
        self._transport.nheld -= 1


class Rank:
    """Rank with an engine, a GPU, and the backend between them."""

    def __init__(self, group: Group, rank: int, seed: int) -> None:
        self.rank, self.nranks = rank, group.nranks
        self.group = group
        self.device = FakeDevice(group.card(rank, seed), f"rank {rank}")
        group.network.devices[rank] = self.device
        self.transport = SharedSim(group.network, rank)
        self.transport.lock = group.lock
        control: Any = NoControl()
        context = RankContext(
            rank, group.nranks, self.transport, control, group.config, group.network.timeline,
            nwires=2,
        )  # fmt: skip
        self.engine = Engine.of_job(context, control)
        fabric = Fabric(self.engine.homes, 2)
        self.plans = PlanCache(self.rank, self.nranks, fabric, group.config)
        self.entry = PlanSelector(self.engine, self.plans)
        self.stream = self.device.caller_stream()
        self.opened: GpuDirectBackend | str = ""
        #: Addresses of the caller's arrays.
        self.arrays: set[int] = set()

    def open(self) -> GpuDirectBackend | str:
        self.opened = connect_gpudirect(
            self.device,
            FakeLauncher(self.device),
            engine=self.engine,
            enter=self.entry,
            config=self.group.config,
            clock=monotonic,
            allgather=self.gather,
        )
        return self.opened

    def gather(self, mine: bytes) -> Sequence[bytes]:
        return self.group.gathering(self.rank, mine)

    @property
    def direct(self) -> GpuDirectBackend:
        assert isinstance(self.opened, GpuDirectBackend)
        return self.opened

    def put(self, array: Any, offset: int = 0) -> int:
        """Create an array in the caller's stream; return its address."""
        data = np.ascontiguousarray(array)
        address = self.device.caller_memory(data.nbytes + offset + 1) + offset
        self.arrays.add(address)
        if data.nbytes:
            pinned = self.device.allocate_pinned(data.nbytes)
            pinned[:] = data.view(np.uint8).reshape(-1)
            self.device.copy(address, int(pinned.ctypes.data), data.nbytes, self.stream)
        return address

    def get(self, address: int, like: Any) -> Any:
        """Return the contents of an array, read in the order of the caller's stream."""
        done = self.device.make_event()
        pinned = self.device.allocate_pinned(like.nbytes + 1)
        if like.nbytes:
            self.device.copy(int(pinned.ctypes.data), address, like.nbytes, self.stream)
        self.device.record(done, self.stream)
        assert self.device.synchronize(done, TIMEOUT_S)
        return pinned[: like.nbytes].view(like.dtype).copy()

    def begin(self, call: CallSignature, source: int, output: int) -> Any:
        given = DeviceCall(call, source, output)
        self.direct.prepare(given)
        job = self.direct.begin(given, self.stream)
        self.direct.hold(self.stream, job.number)
        return job

    def run(
        self, kind: Collective, x: Any, op: ReduceOp, root: int, *, in_place: bool, offset: int = 0
    ) -> Any:
        """Run a collective from device memory to device memory; return the result."""
        count, whole = sizes_of(kind, x.size, self.nranks)
        like = np.full(count, 77, x.dtype)
        has_output = kind != Collective.REDUCE or self.rank == root
        source = self.put(x, offset)
        output = source if in_place and count == x.size else self.put(like, offset)
        call = CallSignature(kind, CODES[x.dtype], op, whole, root)
        job = self.begin(call, source, output * has_output)
        assert job.error is None
        self.direct.finish(job)
        if output != source:
            np.testing.assert_array_equal(self.get(source, x), x)
        return self.get(output, like) if has_output else None


class Group:
    """Ranks on one network."""

    def __init__(self, nranks: int, seed: int = 0, nlocal: int = 1, **settings: Any) -> None:
        self.nranks = nranks
        #: Ranks of each node.
        self.nodes = [tuple(range(first, first + nlocal)) for first in range(0, nranks, nlocal)]
        self._cards: dict[int, FakeGpu] = {}
        defaults = {"eager_nbytes": 16, "slice_nbytes": 64, "staging_nbytes": 2048}
        self.config = Config(**(defaults | settings))
        self.lock = threading.RLock()
        self.network = GpuNetwork(Timeline(seed), nranks, 2)
        self.gathering = Gathering(nranks)
        self.ranks = [Rank(self, rank, seed + rank) for rank in range(nranks)]
        for wire in self.network.wires.values():
            for rank, end in zip(wire.pair, self.network.connect(wire), strict=True):
                self.ranks[rank].engine._migration.on_opened(end.path.peer, wire.rail, 0, end)

    def card(self, rank: int, seed: int) -> FakeGpu:
        """Return the rank's GPU, on one board with the other GPUs of the node."""
        first = next(node[0] for node in self.nodes if rank in node)
        beside = self._cards.get(first)
        self._cards[rank] = FakeGpu(seed) if beside is None else beside.beside()
        return self._cards[rank]

    def open(self) -> None:
        together(self.nranks, lambda rank: self.ranks[rank].open())

    def close(self) -> None:
        for each in self.ranks:
            each.direct.close(TIMEOUT_S)
            assert each.transport.nheld == 0
            each.device.close()

"""Collectives on device memory over NICs that reach it: right, in order, and hanging no stream.

Ranks are threads with engines of their own, on one simulated network; their GPUs are fakes that run
work late, in any order that streams, events and words allow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import KINDS, TIMEOUT_S, Gathering, meant, sizes_of, together

from r2ccl.bounce import DeviceCall
from r2ccl.clock import monotonic
from r2ccl.config import Config
from r2ccl.direct import Direct, open_direct
from r2ccl.dtypes import CODES
from r2ccl.engine import Engine
from r2ccl.errors import CommunicatorRevoked, TransportError, TransportTimeout
from r2ccl.plans import Plans
from r2ccl.prediction import Fabric
from r2ccl.resilience.health import Health
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu
from r2ccl.testing.fakedevice.forms import FakeLauncher
from r2ccl.testing.simulation.gpus import GpuNetwork
from r2ccl.transport.sim import SimTransport
from r2ccl.transport.simnet import Timeline
from r2ccl.types import CallSignature, Collective, ReduceOp


class NoControl:
    """A control plane of which nothing is wanted."""

    is_busy = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


class SharedSim(SimTransport):
    """A rank's end of a network that belongs to all ranks' threads, one at a time."""

    lock: Any
    #: Whether it refuses to register what is at an address.
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
    """A rank with an engine, a GPU, and the way between them."""

    def __init__(self, group: Group, rank: int, seed: int) -> None:
        self.rank, self.nranks = rank, group.nranks
        self.group = group
        self.device = FakeDevice(FakeGpu(seed), f"rank {rank}")
        group.network.devices[rank] = self.device
        self.transport = SharedSim(group.network, rank)
        self.transport.lock = group.lock
        self.engine = Engine(
            rank, group.nranks, transport=self.transport, control=NoControl(),
            config=group.config, clock=group.network.timeline, nwires=2,
        )  # fmt: skip
        self.stream = self.device.caller_stream()
        self.opened: Direct | str = ""
        #: Where the caller's arrays are.
        self.arrays: set[int] = set()

    def open(self) -> Direct | str:
        fabric = Fabric(self.engine.recovery.homes, 2)
        config = self.group.config
        self.opened = open_direct(
            self.device,
            FakeLauncher(self.device),
            engine=self.engine,
            plans=Plans(self.rank, self.nranks, fabric, config),
            whole=Health.whole(self.nranks, 2, config.digest()),
            config=config,
            clock=monotonic,
            gather=lambda mine: self.group.gathering(self.rank, mine),
        )
        return self.opened

    @property
    def direct(self) -> Direct:
        assert isinstance(self.opened, Direct)
        return self.opened

    def put(self, array: Any, offset: int = 0) -> int:
        """Have the caller's stream make an array."""
        data = np.ascontiguousarray(array)
        address = self.device.caller_memory(data.nbytes + offset + 1) + offset
        self.arrays.add(address)
        if data.nbytes:
            pinned = self.device.allocate_pinned(data.nbytes)
            pinned[:] = data.view(np.uint8).reshape(-1)
            self.device.copy(address, int(pinned.ctypes.data), data.nbytes, self.stream)
        return address

    def get(self, address: int, like: Any) -> Any:
        """Read an array in the order of the caller's stream."""
        done = self.device.make_event()
        pinned = self.device.allocate_pinned(like.nbytes + 1)
        if like.nbytes:
            self.device.copy(int(pinned.ctypes.data), address, like.nbytes, self.stream)
        self.device.record(done, self.stream)
        assert self.device.synchronize(done, TIMEOUT_S)
        return pinned[: like.nbytes].view(like.dtype).copy()

    def begin(self, call: CallSignature, source: int, output: int) -> Any:
        job, done = self.direct.begin(DeviceCall(call, source, output), self.stream)
        self.device.wait(self.stream, done)
        self.direct.recycle(done)
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

    def __init__(self, nranks: int, seed: int = 0, **settings: Any) -> None:
        self.nranks = nranks
        defaults = {"eager_nbytes": 16, "slice_nbytes": 64, "bounce_nbytes": 2048}
        self.config = Config(**(defaults | settings))
        self.lock = threading.RLock()
        self.network = GpuNetwork(Timeline(seed), nranks, 2)
        self.gathering = Gathering(nranks)
        self.ranks = [Rank(self, rank, seed + rank) for rank in range(nranks)]
        for wire in self.network.wires.values():
            for rank, end in zip(wire.pair, self.network.connect(wire), strict=True):
                self.ranks[rank].engine.recovery.on_opened(end.path.peer, wire.rail, 0, end)

    def open(self) -> None:
        together(self.nranks, lambda rank: self.ranks[rank].open())

    def close(self) -> None:
        for each in self.ranks:
            each.direct.close(TIMEOUT_S)
            assert each.transport.nheld == 0
            each.device.close()


def data_of(rank: int, count: int, dtype: str) -> Any:
    return np.random.default_rng(rank).integers(-1000, 1000, count).astype(dtype)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [0, 3, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_every_collective_of_any_size(kind: Collective, count: int, seed: int) -> None:
    nranks, root = 3, 1
    group = Group(nranks, seed)
    group.open()
    dtype = "int64" if seed else "float32"
    op = ReduceOp.SUM if seed % 2 else ReduceOp.MAX
    xs = [data_of(rank, count, dtype) for rank in range(nranks)]

    def body(rank: int) -> Any:
        return group.ranks[rank].run(kind, xs[rank], op, root, in_place=seed > 1)

    for rank, result in enumerate(together(nranks, body)):
        np.testing.assert_array_equal(result, meant(kind, xs, op, root, rank))
    group.close()


def test_a_mean_is_divided_once() -> None:
    group = Group(3)
    group.open()
    xs = [data_of(rank, 100, "float32") for rank in range(3)]

    def body(rank: int) -> Any:
        mine = group.ranks[rank]
        return mine.run(Collective.ALLREDUCE, xs[rank], ReduceOp.AVG, 0, in_place=True)

    total = np.sum(xs, axis=0)
    for result in together(3, body):
        np.testing.assert_array_equal(result, total / np.float32(3))
    group.close()


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_place", [True, False])
def test_arrays_that_nics_do_not_reach_are_copied(
    kind: Collective, in_place: bool, offset: int
) -> None:
    """One rank's are refused, or do not begin at an element: the others' go as they are."""
    nranks, root = 3, 1
    group = Group(nranks, 5)
    group.open()
    xs = [data_of(rank, 90, "int64") for rank in range(nranks)]
    odd = group.ranks[1]
    if not offset:
        odd.transport.refuses = lambda address: address in odd.arrays

    def body(rank: int) -> Any:
        shift = offset * (rank == 1)
        mine = group.ranks[rank]
        return mine.run(kind, xs[rank], ReduceOp.SUM, root, in_place=in_place, offset=shift)

    for rank, result in enumerate(together(nranks, body)):
        np.testing.assert_array_equal(result, meant(kind, xs, ReduceOp.SUM, root, rank))
    group.close()


def test_an_array_that_is_refused_when_it_is_used_is_copied_too() -> None:
    """There was room for it at the call, and is none any more."""
    group = Group(2)
    group.open()
    xs = [data_of(rank, 200, "int64") for rank in range(2)]
    call = CallSignature(Collective.ALLREDUCE, CODES[xs[0].dtype], ReduceOp.SUM, 200)

    def body(rank: int) -> Any:
        mine = group.ranks[rank]
        place = mine.put(xs[rank])
        job = mine.begin(call, place, place)
        if rank == 0:
            mine.transport.refuses = lambda address: address in mine.arrays
        mine.direct.finish(job)
        return mine.get(place, xs[rank])

    for result in together(2, body):
        np.testing.assert_array_equal(result, xs[0] + xs[1])
    group.close()


def test_calls_back_to_back_keep_their_order() -> None:
    """All are given to the device before the first is carried out, on one array."""
    nranks, ncalls = 2, 6
    group = Group(nranks)
    group.open()
    call = CallSignature(Collective.ALLREDUCE, CODES[np.dtype(np.int64)], ReduceOp.SUM, 60)

    def body(rank: int) -> Any:
        mine = group.ranks[rank]
        data = np.full(60, rank + 1)
        place = mine.put(data)
        first = mine.begin(call, place, place)
        mine.direct.finish(first)
        jobs = [mine.begin(call, place, place) for _ in range(ncalls - 1)]
        for job in jobs:
            mine.direct.finish(job)
        return mine.get(place, data)

    for result in together(nranks, body):
        np.testing.assert_array_equal(result, np.full(60, 3 * nranks ** (ncalls - 1)))
    group.close()


def test_what_may_wait_for_the_device_waits_for_earlier_calls_first() -> None:
    """A call of another dtype takes another kernel: it is begun once the first call is over."""
    group = Group(2)
    group.open()
    begun = [threading.Event() for _ in range(2)]

    def body(rank: int) -> Any:
        mine = group.ranks[rank]
        x, y = data_of(rank, 60, "int64"), data_of(rank, 60, "float32")
        places = mine.put(x), mine.put(y)
        calls = [
            CallSignature(Collective.ALLREDUCE, CODES[each.dtype], ReduceOp.SUM, 60)
            for each in (x, y)
        ]
        first = mine.begin(calls[0], places[0], places[0])
        jobs: list[Any] = []

        def begin() -> None:
            jobs.append(mine.begin(calls[1], places[1], places[1]))
            begun[rank].set()

        caller = threading.Thread(target=begin)
        caller.start()
        assert not begun[rank].wait(0.02)
        mine.direct.finish(first)
        assert begun[rank].wait(TIMEOUT_S)
        caller.join()
        mine.direct.finish(jobs[0])
        return mine.get(places[1], y)

    wanted = data_of(0, 60, "float32") + data_of(1, 60, "float32")
    for result in together(2, body):
        np.testing.assert_array_equal(result, wanted)
    group.close()


def test_a_call_that_fails_lets_the_stream_go_on() -> None:
    group = Group(2)
    group.open()
    call = CallSignature(Collective.ALLREDUCE, CODES[np.dtype(np.int64)], ReduceOp.SUM, 300)
    mine = group.ranks[0]
    place = mine.put(np.arange(300))
    job = mine.begin(call, place, place)
    mine.engine.revoke("for a test")
    with pytest.raises(CommunicatorRevoked, match="for a test"):
        mine.direct.finish(job)
    with pytest.raises(CommunicatorRevoked, match="for a test"):
        mine.direct.examine(job)
    mine.get(place, np.arange(300))
    group.close()


def test_a_caller_whose_stream_hangs_is_told() -> None:
    group = Group(2, timeout_s=0.2)
    group.open()
    mine = group.ranks[0]
    call = CallSignature(Collective.ALLREDUCE, CODES[np.dtype(np.int64)], ReduceOp.SUM, 300)
    place = mine.put(np.arange(300))
    word = mine.device.allocate_pinned(64)
    mine.device.wait_word(mine.stream, int(word.ctypes.data), 1)
    job = mine.begin(call, place, place)
    with pytest.raises(TransportTimeout, match="given before"):
        mine.direct.finish(job)
    word.view(np.uint32)[0] = 1
    group.close()  # which frees events of work that nobody else asked for


def test_kernels_of_a_call_that_fails_are_done_before_the_stream_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Group(2, 3)
    group.open()
    mine = group.ranks[0]
    call = CallSignature(Collective.ALLREDUCE, CODES[np.dtype(np.int64)], ReduceOp.SUM, 300)
    place, other = mine.put(np.arange(300)), mine.put(np.zeros(300, np.int64))

    def run(*given: Any) -> None:
        for _ in range(8):
            mine.direct._offload.copy(place, other, 2400)
        raise CommunicatorRevoked("for a test")

    monkeypatch.setattr(mine.engine, "run", run)
    job = mine.begin(call, place, place)
    with pytest.raises(CommunicatorRevoked, match="for a test"):
        mine.direct.finish(job)
    mine.device.write(place, np.zeros(300, np.int64))  # the caller has it back
    group.close()


def test_what_the_device_refuses_is_raised_and_harms_no_later_call() -> None:
    group = Group(2)
    group.open()
    xs = [data_of(rank, 60, "int64") for rank in range(2)]
    call = CallSignature(Collective.ALLREDUCE, CODES[xs[0].dtype], ReduceOp.SUM, 60)

    def body(rank: int) -> Any:
        mine = group.ranks[rank]
        place = mine.put(xs[rank])
        mine.device.refusals["wait_word"] = "CUDA_ERROR_UNKNOWN"
        job, done = mine.direct.begin(DeviceCall(call, place, place), mine.stream)
        mine.direct.recycle(done)
        assert isinstance(job.error, TransportError)
        with pytest.raises(TransportError, match="CUDA_ERROR_UNKNOWN"):
            mine.direct.finish(job)
        del mine.device.refusals["wait_word"]
        mine.direct.finish(mine.begin(call, place, place))
        return mine.get(place, xs[rank])

    for result in together(2, body):
        np.testing.assert_array_equal(result, xs[0] + xs[1])
    group.close()


def test_all_ranks_take_the_way_or_none_does() -> None:
    group = Group(3)
    group.ranks[1].transport.refuses = lambda address: True
    found = together(3, lambda rank: group.ranks[rank].open())
    assert found == ["rank 1: this memory moves"] * 3
    for each in group.ranks:
        each.device.close()


def test_small_calls_are_left_to_others() -> None:
    group = Group(2, eager_nbytes=64)
    group.open()
    direct = group.ranks[0].direct

    def call(count: int) -> CallSignature:
        return CallSignature(Collective.ALLREDUCE, CODES[np.dtype(np.int64)], ReduceOp.SUM, count)

    assert not direct.takes(DeviceCall(call(0), 0, 0))
    assert not direct.takes(DeviceCall(call(16), 0, 0))
    assert direct.takes(DeviceCall(call(17), 0, 0))
    group.close()

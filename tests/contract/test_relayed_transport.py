"""Contract tests of `PxnTransport` around another transport, whatever rails it relays.

The contract checks use host memory. `OnDevice` moves their cleared slices from and to the memory of
a fake GPU, which detects unordered accesses, and frees memory as soon as the contract allows.
"""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from contract.test_transport import TcpBench as SocketBench

from r2ccl.device.views import address_of, view_of
from r2ccl.gpu.pxn.transport import PxnTransport
from r2ccl.testing.contract import CHECKS, Bench, JoinedPair, random_bytes
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu
from r2ccl.testing.probecontract import PROBE_CHECKS
from r2ccl.testing.simulation.gpus import GpuNetwork
from r2ccl.testing.simulation.network import Cut, End, Timeline
from r2ccl.testing.simulation.relays import CheckedRelay, SimPart
from r2ccl.transport.base import Arrived, Cleared, Event, Fenced, Frame, Sent
from r2ccl.transport.mixed import MixedTransport
from r2ccl.types import PathKey


class OnDevice:
    """Wrapper of a transport that keeps the caller's slices in device memory."""

    def __init__(self, transport: Any, device: FakeDevice) -> None:
        self._transport = transport
        self._device = device
        self._sent: dict[tuple[PathKey, int], memoryview] = {}
        self._named: dict[tuple[PathKey, int], tuple[memoryview, memoryview]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: object, is_replay: bool = False
    ) -> None:
        if token is not None and self._transport.is_open(path):
            data = np.frombuffer(view, np.uint8)
            view = self._sent[path, frame.seq] = view_of(
                self._device.allocate(len(view)), len(view)
            )
            self._device.write(address_of(view), data)
        self._transport.isend(path, frame, view, token, is_replay)

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        if self._transport.is_open(path):
            place = view_of(self._device.allocate(len(region)), len(region))
            self._device.write(address_of(place), np.frombuffer(region, np.uint8))
            self._named[path, frame.seq] = (region, place)
            region = place
        self._transport.irecv(path, frame, region, ack)

    def poll(self, timeout_s: float) -> list[Event]:
        events = self._transport.poll(timeout_s)
        for event in events:
            if isinstance(event, Arrived) and event.payload is None:
                region, place = self._named.pop((event.path, event.frame.seq))
                region[:] = self._device.read(address_of(place), len(place)).tobytes()
                self._device.free(address_of(place))
            elif isinstance(event, Sent) and (event.path, event.seq) in self._sent:
                self._device.free(address_of(self._sent.pop((event.path, event.seq))))
            elif isinstance(event, Fenced):
                self._free_all(event.path)
        return events

    def _free_all(self, path: PathKey) -> None:
        for key in [key for key in self._sent if key[0] == path]:
            self._device.free(address_of(self._sent.pop(key)))
        for key in [key for key in self._named if key[0] == path]:
            self._device.free(address_of(self._named.pop(key)[1]))


class RelayedBench:
    """Two simulated ranks; time passes and GPUs work only when `run` is called.

    `relays[rank]` are the rails that the rank relays.
    """

    patience_s = 5.0
    cross = True

    def __init__(
        self,
        relays: tuple[tuple[int, ...], tuple[int, ...]],
        *,
        is_loud: bool = True,
        nslots: int = 4,
        seed: int = 1,
    ) -> None:
        self.timeline = Timeline(seed)
        self.network = GpuNetwork(self.timeline, 2, 2, is_loud=is_loud)
        self.relays: list[CheckedRelay] = []
        self.transports: list[Any] = []
        for rank, rails in enumerate(relays):
            device = FakeDevice(FakeGpu(seed + rank), f"rank {rank}")
            self.network.devices[rank] = device
            relayed = PxnTransport(SimPart(self.network, rank))
            for rail in rails:
                # Space for all slices of the checks but one.
                self.relays.append(CheckedRelay(device, 1 << 19, nslots))
                relayed.use(rail, self.relays[-1])
            self.transports.append(OnDevice(relayed, device))

    def endpoints(self, rail: int) -> tuple[End, End]:
        wire = self.network.wire(0, 1, rail)
        self.network.restore(wire)
        return self.network.connect(wire)

    def run(self) -> None:
        deadline = self.timeline.now + 1e-3
        self.timeline.after(1e-3, lambda: None)
        while self.timeline.now < deadline and self.timeline.step():
            pass

    def break_path(self, rail: int) -> None:
        self.network.cut(self.network.wire(0, 1, rail), Cut(told=(0, 1)))

    def join_probes(self) -> None:
        """Do nothing: probes need no join."""

    def silence(self, rail: int) -> None:
        self.network.set_port(1, rail, is_up=False)

    def close(self) -> None:
        for transport in self.transports:
            transport.close()
        for relay in self.relays:
            relay.close()


class HostBench(RelayedBench):
    """Slices in host memory, so that the wrapper only adds checks."""

    def __init__(self) -> None:
        super().__init__(((0, 1), (0, 1)))
        self.transports = [each._transport for each in self.transports]


class TcpBench(SocketBench):
    """Two parts over real sockets, which are polled together."""

    cross = None

    def __init__(self) -> None:
        super().__init__()
        for transport in self.transports:
            transport.close()
        self.transports = [
            MixedTransport([PxnTransport(self.transport(rank, 1, (rail,))) for rail in (0, 1)])
            for rank in (0, 1)
        ]


BENCHES: dict[str, Callable[[], Any]] = {
    "tcp": TcpBench,
    "no relay": lambda: RelayedBench(((), ())),
    "host memory": HostBench,
    "both rails": lambda: RelayedBench(((0, 1), (0, 1))),
    "both rails, silent": lambda: RelayedBench(((0, 1), (0, 1)), is_loud=False),
    "one slot": lambda: RelayedBench(((0, 1), (0, 1)), nslots=1),
    "sender alone": lambda: RelayedBench(((0, 1), ()), seed=2),
    "receiver alone": lambda: RelayedBench(((), (0, 1)), seed=3),
}


@pytest.fixture(params=BENCHES)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = BENCHES[request.param]()
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS + PROBE_CHECKS, ids=lambda check: check.__name__)
def test_contract(bench: Bench, check: Callable[[Bench], None]) -> None:
    check(bench)


def test_the_checks_relay() -> None:
    """Check that the contract tests do use the relays."""
    bench = RelayedBench(((0,), (0,)))
    taken = [0, 0]

    def count(rank: int) -> Callable[[int], Any]:
        take = bench.relays[rank].take

        def counted(nbytes: int) -> Any:
            slot = take(nbytes)
            taken[rank] += slot is not None
            return slot

        return counted

    for rank in (0, 1):
        bench.relays[rank].take = count(rank)  # type: ignore[method-assign]
    pair = JoinedPair(bench)
    regions = [bytearray(5_000) for _ in range(8)]
    tokens = [pair.cleared(region, seq) for seq, region in enumerate(regions)]
    for seq, token in enumerate(tokens):
        pair.a.send(seq, random_bytes(5_000, seq), token)
    pair.until_count(pair.b, Arrived, 8)
    pair.until_count(pair.a, Sent, 8)
    assert regions == [random_bytes(5_000, seq) for seq in range(8)]
    assert taken == [4, 4]
    assert [relay.nfree for relay in bench.relays] == [4, 4]
    bench.close()


def test_a_mixed_transport_stays_awake_while_a_slice_is_copied() -> None:
    """Poll until a copied slice completes: no descriptor signals the end of the GPU's copy."""
    bench = RelayedBench(((), (0, 1)))
    silent = os.eventfd(0, os.EFD_NONBLOCK)
    pair = JoinedPair(bench)
    part = pair.b.transport._transport
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimPart, "fileno", lambda self: silent)
        mixed = MixedTransport([part])
    region = view_of(bench.network.devices[1].allocate(1_000), 1_000)
    mixed.irecv(pair.b.path, Frame(3, 0, 0, 5, 77), region)
    mixed.flush()
    token = pair.until_count(pair.a, Cleared)[0].token
    pair.a.send(0, random_bytes(1_000), token)
    assert part.limit_s(3.0) == 3.0
    bench.run()
    began = time.monotonic()
    while not (events := mixed.poll(60.0)):
        assert part.limit_s(3.0) == 0.0
    assert [type(event) for event in events] == [Arrived]
    assert time.monotonic() - began < bench.patience_s
    assert part.limit_s(3.0) == 3.0
    assert bench.network.bytes_of(1, region) == random_bytes(1_000)
    mixed.close()
    os.close(silent)
    bench.close()

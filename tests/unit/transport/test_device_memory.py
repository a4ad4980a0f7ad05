"""Device memory and transports: registered on every rail or refused, and sent as it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from r2ccl.device.views import address_of, is_device_view, view_of
from r2ccl.errors import InternalError, TransportError
from r2ccl.testing.simulation.network import SimNetwork, Timeline
from r2ccl.testing.simulation.transport import SimTransport
from r2ccl.transport.mixed import MixedTransport
from r2ccl.transport.tcp.transport import TcpTransport
from r2ccl.transport.verbs.registration import RegistrationCache
from r2ccl.transport.verbs.staging import Staging
from r2ccl.types import PathKey, ProbeKey

PAGE = os.sysconf("SC_PAGE_SIZE")
#: Where no processor can read: whoever touches the bytes dies.
BASE = 0xD000_0000_0000 + PAGE // 2
NBYTES = 8 * PAGE


class FakeDriver:
    """A GPU with one allocation."""

    def __init__(self) -> None:
        self.number = 41
        self.is_capable = True

    @contextmanager
    def current(self, address: int) -> Iterator[None]:
        yield

    def is_pooled(self, address: int) -> bool:
        return False

    def is_managed(self, address: int) -> bool:
        return False

    def is_rdma_capable(self, address: int) -> bool:
        return self.is_capable

    def is_dmabuf_supported(self, address: int) -> bool:
        return True

    def address_range(self, address: int) -> tuple[int, int]:
        return BASE, NBYTES

    def buffer_id(self, address: int) -> int:
        return self.number

    def set_sync_memops(self, address: int) -> None: ...

    def export_dmabuf(self, address: int, nbytes: int) -> int:
        return os.open(os.devnull, os.O_RDONLY)


class FakeRegion:
    def __init__(self, nic: FakeNic, iova_base: int) -> None:
        self.nic = nic
        self.lkey, self.rkey, self.iova_base = nic.number, 100 + nic.number, iova_base

    def close(self) -> None:
        self.nic.nregions -= 1


class FakeNic:
    def __init__(self, number: int) -> None:
        self.name = f"mlx5_{number}"
        self.number = number
        self.nregions = 0
        self.takes_dmabuf = True

    def register(self, address: int, nbytes: int) -> FakeRegion:
        if address >= BASE:
            raise OSError(14, "Bad address")
        self.nregions += 1
        return FakeRegion(self, 0)

    def register_dmabuf(self, fd: int, offset: int, nbytes: int) -> FakeRegion:
        if not self.takes_dmabuf:
            raise OSError(95, "Operation not supported")
        self.nregions += 1
        return FakeRegion(self, -BASE)


class Bench:
    def __init__(self) -> None:
        self.driver = FakeDriver()
        self.nics = [FakeNic(0), FakeNic(1)]
        self.staging = Staging(RegistrationCache(self.nics, 1 << 30), lambda: self.driver)  # type: ignore[arg-type]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_view_names_memory_and_touches_none() -> None:
    view = view_of(BASE, 1000)
    part = view[100:300][50:]
    assert (len(view), address_of(part), len(part)) == (1000, BASE + 150, 150)
    assert is_device_view(part)
    assert len(view_of(0, 0)) == 0
    assert not is_device_view(memoryview(np.zeros(4, np.uint8)))  # type: ignore[arg-type]


def test_a_slice_of_device_memory_goes_as_it_is_on_every_nic(bench: Bench) -> None:
    registered = bench.staging.register_device(BASE, NBYTES)
    view = view_of(BASE, NBYTES)[1000:3000]
    for nic in (0, 1):
        reach = bench.staging.reach(view, nic)
        # The NIC's own address: a dma-buf begins with the page the allocation begins in.
        assert reach.address == BASE + 1000 - BASE // PAGE * PAGE
        assert (reach.lkey, reach.rkey, reach.buffer) == (nic, 100 + nic, None)
        bench.staging.release(reach)
    registered.close()
    bench.staging.close()
    assert [nic.nregions for nic in bench.nics] == [0, 0]


def test_memory_is_registered_once_for_all_who_use_it(bench: Bench) -> None:
    first = bench.staging.register_device(BASE, 100)
    second = bench.staging.register_device(BASE + 5000, 100)
    assert first is second
    first.close()
    bench.staging.release(bench.staging.reach(view_of(BASE + 5000, 100), 0))
    second.close()
    bench.staging.close()


def test_memory_that_was_freed_is_not_sent(bench: Bench) -> None:
    bench.staging.register_device(BASE, 100)
    bench.driver.number = 42
    with pytest.raises(InternalError, match="freed while"):
        bench.staging.reach(view_of(BASE, 100), 0)


def test_memory_that_was_never_registered_is_not_sent(bench: Bench) -> None:
    with pytest.raises(InternalError, match="not registered"):
        bench.staging.reach(view_of(BASE, 100), 0)


def test_one_nic_that_does_not_reach_it_is_enough_to_refuse(bench: Bench) -> None:
    bench.nics[1].takes_dmabuf = False
    with pytest.raises(TransportError, match="nvidia_peermem") as caught:
        bench.staging.register_device(BASE, 100)
    assert caught.value.status == "NO_DIRECT_WAY"
    assert [nic.nregions for nic in bench.nics] == [0, 0]
    bench.staging.close()


def test_host_memory_is_none_of_the_gpus(bench: Bench) -> None:
    """Nobody opens the CUDA driver for it."""

    def refuse() -> Any:
        raise AssertionError("the driver was opened")

    staging = Staging(RegistrationCache(bench.nics, 1 << 30), refuse)
    memory = staging.allocate(4096)
    staging.release(staging.reach(memoryview(memory), 0))  # type: ignore[arg-type]
    staging.close()


def test_sockets_refuse() -> None:
    tcp = TcpTransport(0, 1, eager_nbytes=64, sources={}, targets={}, probe_timeout_s=0.1)
    with pytest.raises(TransportError, match="staged through host memory") as caught:
        tcp.register_device(BASE, 100)
    assert caught.value.status == "HOST_ONLY"
    tcp.close()


def test_simulated_nics_refuse_devices_their_network_misses() -> None:
    network = SimNetwork(Timeline(0), 2, 1)
    transport = SimTransport(network, 0)
    with pytest.raises(TransportError, match="staged through host memory"):
        transport.register_device(BASE, 100)
    network.reaches_devices = True
    transport.register_device(BASE, 100).close()


class Part:
    """A transport that is waited for, and reaches device memory or not."""

    def __init__(self, nrails: int, *, refuses: bool = False) -> None:
        self.nrails = nrails
        self.refuses = refuses
        self.nheld = 0
        self._fd = os.eventfd(0)

    def fileno(self) -> int:
        return self._fd

    def register_device(self, address: int, nbytes: int) -> Any:
        if self.refuses:
            raise TransportError("not here", status="HOST_ONLY")
        self.nheld += 1
        return SimpleNamespace(close=self._let_go)

    def close(self) -> None:
        os.close(self._fd)

    def _let_go(self) -> None:
        self.nheld -= 1


def test_the_part_with_the_port_makes_the_end_of_a_probe() -> None:
    parts = Part(2), Part(2)
    for number, part in enumerate(parts):
        part.offer = lambda key, number=number: (number, key)  # type: ignore[attr-defined]
    mixed = MixedTransport(parts)  # type: ignore[arg-type]
    for key, number in ((ProbeKey(1, 3, 0), 0), (ProbeKey(1, 0, 2), 1), (PathKey(1, 3), 1)):
        assert mixed.offer(key) == (number, key)
    mixed.close()


@pytest.mark.parametrize("nrails", [0, 1])
def test_every_part_that_has_rails_must_reach_it(nrails: int) -> None:
    sockets, nics = Part(nrails, refuses=True), Part(2)
    mixed = MixedTransport((nics, sockets))  # type: ignore[arg-type]
    if nrails:
        with pytest.raises(TransportError, match="not here"):
            mixed.register_device(BASE, 100)
    else:
        registered = mixed.register_device(BASE, 100)
        assert nics.nheld == 1
        registered.close()
    assert nics.nheld == 0
    mixed.close()

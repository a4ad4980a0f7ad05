"""Device memory: dma-buf, then the plain pointer, then staging; in that order, and saying why."""

from __future__ import annotations

import errno
import os
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.transport.verbs.cuda import BindingsDriver
from r2ccl.transport.verbs.dmabuf import DeviceMemory, DeviceMemoryRoute, DeviceRegion, PdRegistrar
from r2ccl.transport.verbs.registration import Registration, RegistrationCache

PAGE = os.sysconf("SC_PAGE_SIZE")
#: A piece of a pool: its allocation begins and ends within pages.
BASE = 7 * PAGE + 512
NBYTES = 3 * PAGE
POINTER = BASE + 1536
LIMIT = 1 << 30
ACCESS = 3


class VerbsError(Exception):
    """Bears its number as pyverbs' exceptions do."""

    def __init__(self, number: int) -> None:
        super().__init__(os.strerror(number))
        self.error_code = number


class FakeVerbs:
    """The module pyverbs.mr: what was registered, on which domain, and how."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.open: list[Any] = []
        #: Kind of region and domain to the errno they are refused with.
        self.refusals: dict[tuple[str, str], int] = {}
        self.count = 0

        class MR:
            def __init__(
                region,
                pd: str,
                length: int,
                access: int,
                address: int,
            ) -> None:
                region.kind = "pointer"
                region.span = (address, length)
                self._made(region, pd, access)

            def close(region) -> None:
                self.open.remove(region)

        class DmaBufMR(MR):
            def __init__(
                region,
                pd: str,
                length: int,
                access: int,
                dmabuf: int,
                offset: int,
            ) -> None:
                os.fstat(dmabuf)  # open while the NIC takes it
                region.kind = "dmabuf"
                region.span = (offset, length)
                self._made(region, pd, access)

        self.MR = MR
        self.DmaBufMR = DmaBufMR

    def _made(self, region: Any, pd: str, access: int) -> None:
        self.log.append(f"{region.kind} {pd}")
        if (region.kind, pd) in self.refusals:
            raise VerbsError(self.refusals[region.kind, pd])
        assert access == ACCESS
        self.count += 1
        region.lkey, region.rkey = self.count, 100 + self.count
        self.open.append(region)


class FakeDriver:
    """A GPU with one allocation, which can be freed and made anew."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.fds: list[int] = []
        self.allocations = {BASE: (NBYTES, 41)}
        self.no_attributes: set[str] = set()
        self.attributes: set[str] = set()
        self.failures: dict[str, str] = {}
        self.depth = 0

    def _called(self, name: str, *, needs_context: bool = True) -> None:
        self.log.append(name)
        assert self.depth == 1 or not needs_context, f"{name} without a current context"
        if name in self.failures:
            raise TransportError(f"{name} failed", status=self.failures[name])

    def _find(self, address: int) -> tuple[int, int, int]:
        for base, (nbytes, number) in self.allocations.items():
            if base <= address < base + nbytes:
                return base, nbytes, number
        raise TransportError("no such memory", status="CUDA_ERROR_INVALID_VALUE")

    @contextmanager
    def current(self, address: int) -> Iterator[None]:
        self._find(address)
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def is_pooled(self, address: int) -> bool:
        return "pooled" in self.attributes

    def is_managed(self, address: int) -> bool:
        return "managed" in self.attributes

    def is_rdma_capable(self, address: int) -> bool:
        self._called("is_rdma_capable")
        return "rdma" not in self.no_attributes

    def is_dmabuf_supported(self, address: int) -> bool:
        self._called("is_dmabuf_supported")
        return "dmabuf" not in self.no_attributes

    def address_range(self, address: int) -> tuple[int, int]:
        self._called("address_range")
        base, nbytes, _ = self._find(address)
        return base, nbytes

    def buffer_id(self, address: int) -> int:
        self._called("buffer_id", needs_context=False)
        return self._find(address)[2]

    def set_sync_memops(self, address: int) -> None:
        self._called("set_sync_memops")

    def export_dmabuf(self, address: int, nbytes: int) -> int:
        self._called("export_dmabuf")
        assert address % PAGE == 0
        assert nbytes % PAGE == 0
        base, size, _ = self._find(address + PAGE - 1)
        assert address <= base
        assert base + size <= address + nbytes
        assert nbytes < size + 2 * PAGE
        self.fds.append(os.open(os.devnull, os.O_RDONLY))
        return self.fds[-1]


class Bench:
    """Two NICs, a GPU, and the log of what was asked of them, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.verbs = FakeVerbs(self.log)
        self.driver = FakeDriver(self.log)
        self.nics = [PdRegistrar("mlx5_0", "pd0", ACCESS), PdRegistrar("mlx5_1", "pd1", ACCESS)]
        self.memory = DeviceMemory(self.driver)
        self.cache = RegistrationCache(self.nics, LIMIT, memory=self.memory)

    def refuse(self, kind: str, number: int) -> None:
        self.verbs.refusals[kind, "pd1"] = number

    def register(self) -> Registration:
        return self.cache.register(POINTER, 100, None)

    def is_open(self, fd: int) -> bool:
        try:
            os.fstat(fd)
        except OSError:
            return False
        return True


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench()
    package = types.ModuleType("pyverbs")
    monkeypatch.setitem(sys.modules, "pyverbs", package)
    monkeypatch.setitem(sys.modules, "pyverbs.mr", made.verbs)
    return made


def route_of(registration: Registration) -> DeviceMemoryRoute:
    region = registration.keys(0)
    assert isinstance(region, DeviceRegion)
    return region.route


# dma-buf


def test_an_allocation_is_exported_once_and_is_on_every_nic(bench: Bench) -> None:
    registration = bench.register()

    assert (registration.base, registration.nbytes) == (BASE, NBYTES)
    assert bench.log == [
        "address_range", "buffer_id", "is_rdma_capable", "set_sync_memops", "is_dmabuf_supported",
        "export_dmabuf", "dmabuf pd0", "dmabuf pd1",
    ]  # fmt: skip
    assert [bench.is_open(fd) for fd in bench.driver.fds] == [False]
    assert route_of(registration) == DeviceMemoryRoute("dmabuf")


def test_a_nic_addresses_a_pointer_by_its_place_in_the_export(bench: Bench) -> None:
    registration = bench.register()

    for nic, region in enumerate(bench.verbs.open):
        offset, nbytes = region.span
        keys = registration.keys(nic)
        # The region is the allocation, not the pages around it ...
        assert (offset, nbytes) == (BASE - 7 * PAGE, NBYTES)
        # ... and pyverbs gives it the offset for an I/O address.
        assert BASE + keys.iova_base == offset
        assert POINTER + keys.iova_base == offset + (POINTER - BASE)
        assert (keys.lkey, keys.rkey) == (region.lkey, region.rkey)


def test_every_pointer_into_an_allocation_finds_its_registration(bench: Bench) -> None:
    registration = bench.register()

    assert bench.cache.find(BASE + NBYTES - 8, 8) is registration
    assert bench.cache.register(BASE, 8, None) is registration
    assert bench.log.count("export_dmabuf") == 1


def test_a_descriptor_is_closed_when_a_nic_refuses(bench: Bench) -> None:
    bench.refuse("dmabuf", errno.EOPNOTSUPP)

    bench.register()

    assert [bench.is_open(fd) for fd in bench.driver.fds] == [False]
    assert [each.kind for each in bench.verbs.open] == ["pointer", "pointer"]


def test_closing_deregisters(bench: Bench) -> None:
    bench.register()

    bench.cache.close()

    assert not bench.verbs.open


# Reallocation


def test_memory_allocated_anew_at_an_address_is_not_the_old_one(
    bench: Bench,
) -> None:
    stale = bench.register()
    bench.driver.allocations = {BASE: (NBYTES, 42)}

    assert bench.cache.find(POINTER, 100) is None
    assert not stale.is_open
    assert not bench.verbs.open
    fresh = bench.register()
    assert fresh is not stale
    assert bench.cache.find(POINTER, 100) is fresh


def test_registering_memory_allocated_anew_replaces_the_old(bench: Bench) -> None:
    stale = bench.register()
    stale.close()
    bench.driver.allocations = {BASE: (NBYTES, 42)}

    fresh = bench.register()

    assert not stale.is_open
    assert bench.cache.find(POINTER, 100) is fresh


def test_freed_memory_is_not_found_but_keeps_regions_in_use(
    bench: Bench,
) -> None:
    registration = bench.register()
    registration.pin()
    bench.driver.allocations = {}

    assert bench.cache.find(POINTER, 100) is None
    assert len(bench.verbs.open) == 2
    registration.unpin()
    assert not bench.verbs.open


def test_a_driver_that_fails_is_not_taken_for_freed_memory(bench: Bench) -> None:
    bench.register()
    bench.driver.failures["buffer_id"] = "CUDA_ERROR_DEINITIALIZED"

    with pytest.raises(TransportError, match="buffer_id failed"):
        bench.cache.find(POINTER, 100)


# The ways after dma-buf


def refuse_support(bench: Bench) -> str:
    bench.driver.no_attributes.add("dmabuf")
    return "open kernel modules"


def refuse_export(bench: Bench) -> str:
    bench.driver.failures["export_dmabuf"] = "CUDA_ERROR_NOT_SUPPORTED"
    return "export_dmabuf failed"


def refuse_region(bench: Bench) -> str:
    bench.refuse("dmabuf", errno.EOPNOTSUPP)
    return "mlx5_1 cannot register .* EOPNOTSUPP"


@pytest.mark.parametrize("obstacle", [refuse_support, refuse_export, refuse_region])
def test_without_dmabuf_the_device_pointer_is_registered(bench: Bench, obstacle: Any) -> None:
    why = obstacle(bench)

    registration = bench.register()

    route = route_of(registration)
    assert route.method == "peermem"
    assert len(route.reasons) == 1
    assert re.search(f"dmabuf: .*{why}", route.reasons[0])
    assert registration.keys(1).iova_base == 0
    assert [each.span for each in bench.verbs.open] == [(BASE, NBYTES)] * 2


def test_a_nic_without_dmabuf_is_named(bench: Bench) -> None:
    class Plain:
        name = "old0"

        def register(self, address: int, nbytes: int) -> Any:
            return bench.nics[0].register(address, nbytes)

    cache = RegistrationCache([bench.nics[0], Plain()], LIMIT, memory=bench.memory)

    assert route_of(cache.register(POINTER, 100, None)) == DeviceMemoryRoute(
        "peermem", ("dmabuf: old0 cannot register a dma-buf",)
    )


def refuse_both(bench: Bench) -> list[str]:
    bench.driver.no_attributes.add("dmabuf")
    bench.refuse("pointer", errno.EFAULT)
    return ["dmabuf: the GPU's driver", "peermem: .*modprobe nvidia_peermem"]


def refuse_both_otherwise(bench: Bench) -> list[str]:
    bench.refuse("dmabuf", errno.EINVAL)
    bench.refuse("pointer", errno.EINVAL)
    return ["dmabuf: mlx5_1 .*EINVAL", "peermem: mlx5_1 .*EINVAL"]


def refuse_capability(bench: Bench) -> list[str]:
    bench.driver.no_attributes.add("rdma")
    return ["not GPUDirect RDMA capable"]


def refuse_sync_memops(bench: Bench) -> list[str]:
    bench.driver.failures["set_sync_memops"] = "CUDA_ERROR_NOT_SUPPORTED"
    return ["SYNC_MEMOPS cannot be set: set_sync_memops failed"]


def pool(bench: Bench) -> list[str]:
    bench.driver.attributes.add("pooled")
    return ["stream-ordered pool"]


def manage(bench: Bench) -> list[str]:
    bench.driver.attributes.add("managed")
    return ["managed memory migrates"]


OBSTACLES = [
    refuse_both,
    refuse_both_otherwise,
    refuse_capability,
    refuse_sync_memops,
    pool,
    manage,
]


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_where_no_way_is_left_all_reasons_are_told(bench: Bench, obstacle: Any) -> None:
    reasons = obstacle(bench)

    with pytest.raises(TransportError) as caught:
        bench.register()

    assert caught.value.status == "NO_DIRECT_WAY"
    for reason in reasons:
        assert re.search(reason, str(caught.value)), str(caught.value)
    assert not bench.verbs.open
    assert not any(map(bench.is_open, bench.driver.fds))


def test_a_refusal_is_remembered_for_as_long_as_the_allocation(bench: Bench) -> None:
    refuse_both(bench)
    for _ in range(2):
        bench.log.clear()
        with pytest.raises(TransportError):
            bench.register()
    assert "is_dmabuf_supported" not in bench.log

    bench.driver.allocations = {BASE: (NBYTES, 42)}
    bench.driver.no_attributes.clear()

    assert route_of(bench.register()) == DeviceMemoryRoute("dmabuf")


# Room


@pytest.mark.parametrize("status", ["ENOMEM", "ENOSPC", "CUDA_ERROR_OUT_OF_MEMORY"])
def test_without_room_idle_registrations_go_dmabuf_is_retried(
    bench: Bench, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = 100 * PAGE
    bench.driver.allocations[other] = (PAGE, 50)
    idle = bench.cache.register(other, 10, None)
    idle.close()
    export = bench.driver.export_dmabuf

    def export_if_there_is_room(address: int, nbytes: int) -> int:
        if bench.verbs.open:
            raise TransportError("BAR space is used up", status=status)
        return export(address, nbytes)

    monkeypatch.setattr(bench.driver, "export_dmabuf", export_if_there_is_room)

    registration = bench.register()

    assert route_of(registration) == DeviceMemoryRoute("dmabuf")
    assert not idle.is_open


def test_without_room_and_nothing_idle_it_is_an_error_for_now(bench: Bench) -> None:
    bench.refuse("dmabuf", errno.ENOMEM)

    with pytest.raises(TransportError, match="mlx5_1 cannot register") as caught:
        bench.register()

    assert caught.value.status == "ENOMEM"
    assert not bench.verbs.open
    bench.verbs.refusals.clear()
    assert route_of(bench.register()) == DeviceMemoryRoute("dmabuf")


def test_the_cap_holds_for_device_memory_too(bench: Bench) -> None:
    cache = RegistrationCache(bench.nics, NBYTES - 1, memory=bench.memory)

    with pytest.raises(TransportError, match="R2CC_REGISTRATION_LIMIT_NBYTES"):
        cache.register(POINTER, 100, None)


def test_memory_across_two_allocations_is_the_callers_fault(bench: Bench) -> None:
    with pytest.raises(InvalidArgument, match="reach beyond their allocation"):
        bench.cache.register(POINTER, NBYTES, None)


# The driver behind the protocol


class Api:
    """``cuda.bindings.driver`` in small: returns (status, result), and tells what was called."""

    class _Status:
        def __init__(self, name: str) -> None:
            self.name = name

    class _Names:
        def __getattr__(self, name: str) -> str:
            return name

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.results: dict[str, Any] = {
            "cuInit": (),
            "CU_POINTER_ATTRIBUTE_CONTEXT": (77,),
            "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL": (3,),
            "cuDeviceGet": ("device 3",),
            "cuDevicePrimaryCtxRetain": ("primary",),
            "cuDevicePrimaryCtxRelease": (),
            "cuCtxPushCurrent": (),
            "cuCtxPopCurrent": (77,),
        }
        self.status: dict[str, str] = {}
        names = ("CUDA_SUCCESS", "CUDA_ERROR_NOT_READY", "CUDA_ERROR_NO_DEVICE")
        self.CUresult = types.SimpleNamespace(**{name: self._Status(name) for name in names})
        self.CUpointer_attribute = self.CUdevice_attribute = self._Names()
        self.CUmemRangeHandleType = self._Names()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name in self.status:
                return (self._Status(self.status[name]), None)
            key = arguments[0] if name == "cuPointerGetAttribute" else name
            return (self.CUresult.CUDA_SUCCESS, *self.results[key])

        return call


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    made = Api()
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", types.ModuleType("cuda.bindings"))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", made)
    return made


def test_the_context_of_an_allocation_is_pushed_and_popped(api: Api) -> None:
    driver = BindingsDriver()
    with pytest.raises(ZeroDivisionError), driver.current(POINTER):
        raise ZeroDivisionError

    assert api.calls[1:] == [
        ("cuPointerGetAttribute", "CU_POINTER_ATTRIBUTE_CONTEXT", POINTER),
        ("cuCtxPushCurrent", 77),
        ("cuCtxPopCurrent",),
    ]


def test_memory_without_a_context_gets_its_devices_primary_one(api: Api) -> None:
    api.results["CU_POINTER_ATTRIBUTE_CONTEXT"] = (0,)
    driver = BindingsDriver()

    with driver.current(POINTER):
        assert api.calls[-1] == ("cuCtxPushCurrent", "primary")

    assert api.calls[-2:] == [("cuCtxPopCurrent",), ("cuDevicePrimaryCtxRelease", "device 3")]


def test_a_context_that_cannot_be_pushed_is_released(api: Api) -> None:
    api.results["CU_POINTER_ATTRIBUTE_CONTEXT"] = (0,)
    api.status["cuCtxPushCurrent"] = "CUDA_ERROR_INVALID_CONTEXT"
    driver = BindingsDriver()

    with pytest.raises(TransportError) as caught, driver.current(POINTER):
        pass

    assert caught.value.status == "CUDA_ERROR_INVALID_CONTEXT"
    assert api.calls[-1] == ("cuDevicePrimaryCtxRelease", "device 3")


@pytest.mark.parametrize(
    ("call", "arguments", "expected", "result", "answer"),
    [
        ("is_pooled", (9,), ("cuPointerGetAttribute", "CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE", 9),
         0, False),
        ("is_managed", (9,), ("cuPointerGetAttribute", "CU_POINTER_ATTRIBUTE_IS_MANAGED", 9),
         True, True),
        ("is_rdma_capable", (9,),
         ("cuPointerGetAttribute", "CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE", 9), 1, True),
        ("is_dmabuf_supported", (9,),
         ("cuDeviceGetAttribute", "CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED", "device 3"), 0, False),
        ("address_range", (9,), ("cuMemGetAddressRange", 9), (4, 5), (4, 5)),
        ("buffer_id", (9,), ("cuPointerGetAttribute", "CU_POINTER_ATTRIBUTE_BUFFER_ID", 9), 6, 6),
        ("set_sync_memops", (9,),
         ("cuPointerSetAttribute", True, "CU_POINTER_ATTRIBUTE_SYNC_MEMOPS", 9), None, None),
        ("export_dmabuf", (PAGE, PAGE),
         ("cuMemGetHandleForAddressRange", PAGE, PAGE, "CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD", 0),
         12, 12),
    ],
)  # fmt: skip
def test_each_question_is_one_call_of_the_driver(
    api: Api, call: str, arguments: tuple[int, ...], expected: Any, result: Any, answer: Any
) -> None:
    driver = BindingsDriver()
    key = expected[1] if expected[0] == "cuPointerGetAttribute" else expected[0]
    if result is None:
        api.results[key] = ()
    else:
        api.results[key] = result if isinstance(result, tuple) else (result,)

    assert getattr(driver, call)(*arguments) == answer

    assert api.calls[-1] == expected


def test_without_the_bindings_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)

    with pytest.raises(TransportError, match=r"pip install 'r2ccl\[gpu\]'") as caught:
        BindingsDriver()

    assert caught.value.status == "NO_CUDA"


def test_without_a_driver_that_is_said(api: Api) -> None:
    def fail(flags: int) -> Any:
        raise RuntimeError("libcuda.so.1 is missing")

    api.cuInit = fail

    with pytest.raises(TransportError, match=r"no CUDA driver .*libcuda.so.1 is missing"):
        BindingsDriver()


def test_a_failed_call_is_named_with_the_drivers_status(api: Api) -> None:
    api.status["cuInit"] = "CUDA_ERROR_SYSTEM_NOT_READY"

    with pytest.raises(TransportError, match="cuInit failed: CUDA_ERROR_SYSTEM_NOT_R") as caught:
        BindingsDriver()

    assert caught.value.status == "CUDA_ERROR_SYSTEM_NOT_READY"

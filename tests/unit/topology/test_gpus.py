"""GPUs as CUDA and NVML tell them: from recorded answers, and through bindings that are faked."""

from __future__ import annotations

import sys
import types
import uuid
from enum import IntEnum
from typing import Any

import pytest

from r2ccl.errors import TransportError
from r2ccl.topology.gpus import (
    BindingsLinks,
    BindingsSource,
    GpuFacts,
    find_gpus,
    read_gpus,
)
from r2ccl.topology.machine import Gpu, LinkEnd, NvLink

A, B, C = "0000:1b:00.0", "0000:43:00.0", "0000:52:00.0"


class Recording:
    """What a machine's driver answered; pairs in `joined` can do atomics on each other."""

    def __init__(self, *bus_ids: str, cc: int = 90, joined: str = "", gdr: str = "") -> None:
        self.bus_ids = bus_ids
        self.joined = {tuple(map(int, pair)) for pair in joined.split()}
        self.values = {
            "COMPUTE_CAPABILITY_MAJOR": cc // 10,
            "COMPUTE_CAPABILITY_MINOR": cc % 10,
            "MULTIPROCESSOR_COUNT": 132,
            "GPU_DIRECT_RDMA_SUPPORTED": int(gdr == "peermem"),
            "DMA_BUF_SUPPORTED": int(gdr == "dmabuf"),
        }

    def count(self) -> int:
        return len(self.bus_ids)

    def bus_id(self, ordinal: int) -> str:
        return self.bus_ids[ordinal]

    def uuid(self, ordinal: int) -> str:
        return f"GPU-{ordinal}"

    def attribute(self, name: str, ordinal: int) -> int:
        return self.values[name]

    def peer_attribute(self, name: str, source: int, target: int) -> int:
        assert source != target  # CUDA_ERROR_INVALID_DEVICE
        assert name in ("ACCESS_SUPPORTED", "NATIVE_ATOMIC_SUPPORTED")
        is_joined = (min(source, target), max(source, target)) in self.joined
        return int(is_joined or name == "ACCESS_SUPPORTED")  # PCIe has peer access, not atomics


class Counted:
    """An NVML that counts; fails from some GPU on where told to."""

    def __init__(self, *links: NvLink, fails_at: str = "") -> None:
        self.links = links
        self.fails_at = fails_at
        self.is_open = True

    def nvlinks(self, bus_id: str) -> tuple[NvLink, ...]:
        assert self.is_open
        if bus_id == self.fails_at:
            raise TransportError("nvlink failed: GPU is lost", status="GpuIsLostError")
        return tuple(link for link in self.links if link.gpu == bus_id)

    def close(self) -> None:
        self.is_open = False


def no_nvml() -> Counted:
    raise TransportError("no libnvidia-ml", status="NO_NVML")


@pytest.mark.parametrize(("gdr", "expected"), [("", False), ("peermem", True), ("dmabuf", True)])
def test_a_gpu_is_read_from_the_driver(gdr: str, expected: bool) -> None:
    facts = read_gpus(Recording(B, A, cc=86, gdr=gdr), Counted)
    gpus = (Gpu(B, "GPU-0", 86, 132, expected), Gpu(A, "GPU-1", 86, 132, expected))
    assert facts == GpuFacts(gpus, links_from="NVML")


def test_links_are_those_nvml_counts() -> None:
    links = Counted(NvLink(A, "0000:07:00.0", LinkEnd.SWITCH, 18), NvLink(B, A, LinkEnd.GPU, 4))
    facts = read_gpus(Recording(A, B, joined="01"), lambda: links)
    assert facts.nvlinks == links.links
    assert (facts.remarks, facts.links_from) == ((), "NVML")
    assert not links.is_open


@pytest.mark.parametrize(
    ("cc", "joined", "counts"),
    [
        (90, "01 02 12", {(A, B): 9, (A, C): 9, (B, A): 9, (B, C): 9, (C, A): 9, (C, B): 9}),
        (80, "01", {(A, B): 12, (B, A): 12}),
        (86, "01", {(A, B): 4, (B, A): 4}),
        (70, "01 12", {(A, B): 6, (B, A): 3, (B, C): 3, (C, B): 6}),
        (89, "", {}),
        (50, "01", {(A, B): 1, (B, A): 1}),
    ],
)
def test_without_nvml_atomics_tell_nvlink(
    cc: int, joined: str, counts: dict[tuple[str, str], int]
) -> None:
    facts = read_gpus(Recording(A, B, C, cc=cc, joined=joined), no_nvml)
    assert {(link.gpu, link.target): link.count for link in facts.nvlinks} == counts
    assert {link.end for link in facts.nvlinks} <= {LinkEnd.GPU}
    assert facts.links_from == "peer access"
    (remark,) = facts.remarks
    assert "no libnvidia-ml" in remark
    assert remark.endswith(f": {len(counts)}")


def test_an_nvml_that_fails_is_not_believed_by_halves() -> None:
    links = Counted(NvLink(A, "0000:07:00.0", LinkEnd.SWITCH, 18), fails_at=B)
    facts = read_gpus(Recording(A, B, joined="01"), lambda: links)
    assert [link.end for link in facts.nvlinks] == [LinkEnd.GPU, LinkEnd.GPU]
    assert "GPU is lost" in facts.remarks[0]
    assert not links.is_open


def test_a_single_gpu_needs_no_links() -> None:
    assert read_gpus(Recording(A), no_nvml).remarks == ()


# The bindings


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_UNKNOWN = 999


def names(prefix: str, *suffixes: str) -> Any:
    return types.SimpleNamespace(**{prefix + suffix: suffix for suffix in suffixes})


class FakeDriver(types.ModuleType):
    """``cuda.bindings.driver`` of a machine with two GPUs; calls return a status and results."""

    CUresult = Status
    CUdevice_attribute = names("CU_DEVICE_ATTRIBUTE_", *Recording().values)
    CUdevice_P2PAttribute = names(
        "CU_DEVICE_P2P_ATTRIBUTE_", "ACCESS_SUPPORTED", "NATIVE_ATOMIC_SUPPORTED"
    )

    def __init__(self, start: Status = Status.CUDA_SUCCESS) -> None:
        super().__init__("cuda.bindings.driver")
        self.start = start
        self.machine = Recording(A, B, joined="01", gdr="dmabuf")

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (self.start,)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, 2

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, ("device", ordinal)

    def cuDeviceGetPCIBusId(self, length: int, device: tuple[str, int]) -> tuple[Any, ...]:
        text = self.machine.bus_ids[device[1]].upper().encode()
        assert length > len(text)
        return Status.CUDA_SUCCESS, text.ljust(length, b"\0")

    def cuDeviceGetUuid(self, device: tuple[str, int]) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, types.SimpleNamespace(bytes=bytes(15) + bytes([device[1]]))

    def cuDeviceGetAttribute(self, name: str, device: tuple[str, int]) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, self.machine.values[name]

    def cuDeviceGetP2PAttribute(self, name: str, *ends: tuple[str, int]) -> tuple[Any, ...]:
        if ends[0] == ends[1]:
            return (Status.CUDA_ERROR_UNKNOWN,)
        return Status.CUDA_SUCCESS, self.machine.peer_attribute(name, ends[0][1], ends[1][1])


class NvmlError(Exception):
    pass


class NotSupportedError(NvmlError):
    pass


class DriverNotLoadedError(NvmlError):
    pass


class GpuIsLostError(NvmlError):
    pass


class FakeNvml(types.ModuleType):
    """``cuda.bindings.nvml``: per GPU, for each link None or (can peer, is up, bus id, kind)."""

    NVLINK_MAX_LINKS = 6
    NvmlError = NvmlError
    GPU, NPU, SWITCH = 0, 1, 2

    def __init__(self, links: dict[str, list[Any]], start: Exception | None = None) -> None:
        super().__init__("cuda.bindings.nvml")
        self.links = links
        self.start = start
        self.users = 0

    def init_v2(self) -> None:
        if self.start:
            raise self.start
        self.users += 1

    def shutdown(self) -> None:
        self.users -= 1

    def device_get_handle_by_pci_bus_id_v2(self, bus_id: str) -> str:
        return bus_id

    def _of(self, device: str, link: int) -> Any:
        assert self.users == 1
        there = self.links[device]
        if link >= len(there):
            raise NotSupportedError("Not Supported")
        if there[link] is None:
            raise GpuIsLostError("GPU is lost")
        return there[link]

    def device_get_nvlink_capability(self, device: str, link: int, which: int) -> int:
        assert which == 0  # NVML_NVLINK_CAP_P2P_SUPPORTED
        return int(self._of(device, link)[0])

    def device_get_nvlink_state(self, device: str, link: int) -> int:
        return int(self._of(device, link)[1])

    def device_get_nvlink_remote_pci_info_v2(self, device: str, link: int) -> Any:
        return types.SimpleNamespace(bus_id=self._of(device, link)[2])

    def device_get_nvlink_remote_device_type(self, device: str, link: int) -> int:
        return int(self._of(device, link)[3])


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(driver: object, nvml: object) -> None:
        # None in place of a module: importing it fails.
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
        monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", nvml)

    return put


def test_the_driver_is_asked_in_its_own_terms(install: Any) -> None:
    install(FakeDriver(), None)
    source = BindingsSource()
    assert source.count() == 2
    assert source.bus_id(1) == B
    assert source.uuid(1) == f"GPU-{uuid.UUID(int=1)}"
    assert source.attribute("COMPUTE_CAPABILITY_MAJOR", 0) == 9
    assert source.peer_attribute("NATIVE_ATOMIC_SUPPORTED", 0, 1) == 1
    with pytest.raises(TransportError) as error:
        source.peer_attribute("ACCESS_SUPPORTED", 1, 1)
    assert error.value.status == "CUDA_ERROR_UNKNOWN"


def test_links_are_counted_by_what_they_lead_to(install: Any) -> None:
    up, kind = (1, 1), FakeNvml
    nvml = FakeNvml(
        {
            A: [
                (*up, "00000000:43:00.0", kind.GPU),
                (*up, "00000000:43:00.0", kind.GPU),
                (*up, "00000000:07:00.0", kind.SWITCH),
                (1, 0, "00000000:07:00.0", kind.SWITCH),  # down
                (0, 1, "00000000:07:00.0", kind.SWITCH),  # not for peers
            ],
            B: [
                (*up, "FFFFFFF:FFFF:FF", kind.SWITCH),  # hidden from this virtual machine
                (*up, "00000000:00:05.0", kind.NPU),
                (*up, "00000000:08:00.0", 255),
            ],
        }
    )
    install(None, nvml)
    links = BindingsLinks()
    assert links.nvlinks(A) == (
        NvLink(A, "0000:07:00.0", LinkEnd.SWITCH, 1),
        NvLink(A, B, LinkEnd.GPU, 2),
    )
    assert links.nvlinks(B) == (
        NvLink(B, "0000:00:05.0", LinkEnd.CPU, 1),
        NvLink(B, "0000:08:00.0", LinkEnd.SWITCH, 1),
        NvLink(B, "fffffff:ffff:ff", LinkEnd.SWITCH, 1),
    )
    links.close()
    assert nvml.users == 0


def test_a_lost_gpu_is_not_taken_for_one_without_links(install: Any) -> None:
    install(None, FakeNvml({A: [None]}))
    with pytest.raises(TransportError) as error:
        BindingsLinks().nvlinks(A)
    assert error.value.status == "GpuIsLostError"


def test_everything_is_found_where_everything_is_there(install: Any) -> None:
    switch = (1, 1, "00000000:07:00.0", FakeNvml.SWITCH)
    nvml = FakeNvml({A: [switch] * 6, B: [switch] * 6})
    install(FakeDriver(), nvml)
    facts = find_gpus()
    assert [gpu.bus_id for gpu in facts.gpus] == [A, B]
    assert [link.count for link in facts.nvlinks] == [6, 6]
    assert facts.remarks == ()
    assert nvml.users == 0


@pytest.mark.parametrize(
    "nvml",
    [None, FakeNvml({}, DriverNotLoadedError("no")), FakeNvml({}, RuntimeError("no library"))],
    ids=["no bindings", "no driver", "no library"],
)
def test_links_are_inferred_where_nvml_does_not_start(install: Any, nvml: object) -> None:
    install(FakeDriver(), nvml)
    facts = find_gpus()
    assert [link.count for link in facts.nvlinks] == [18, 18]
    assert len(facts.remarks) == 1


@pytest.mark.parametrize("driver", [None, FakeDriver(Status.CUDA_ERROR_NO_DEVICE)])
def test_a_machine_without_cuda_has_no_gpus_and_says_why(install: Any, driver: object) -> None:
    install(driver, None)
    facts = find_gpus()
    assert (facts.gpus, facts.nvlinks) == ((), ())
    assert facts.remarks[0].startswith("no GPUs: ")


def test_the_real_bindings_have_what_is_called() -> None:
    reason = "needs cuda.bindings: pip install r2ccl[gpu]"
    driver = pytest.importorskip("cuda.bindings.driver", reason=reason)
    nvml = pytest.importorskip("cuda.bindings.nvml", reason=reason)
    for faked, real in ((FakeDriver, driver), (FakeNvml, nvml)):
        called = [
            name for name in vars(faked) if name.startswith(("cu", "device_", "init", "shut"))
        ]
        assert called
        assert [name for name in called if not hasattr(real, name)] == []
    for enumeration in ("CUdevice_attribute", "CUdevice_P2PAttribute"):
        asked = vars(getattr(FakeDriver, enumeration))
        assert [name for name in asked if not hasattr(getattr(driver, enumeration), name)] == []
    assert issubclass(nvml.NotSupportedError, nvml.NvmlError)
    assert issubclass(nvml.InvalidArgumentError, nvml.NvmlError)
    kinds = nvml.IntNvLinkDeviceType
    assert (kinds.GPU, kinds.IBMNPU) == (FakeNvml.GPU, FakeNvml.NPU)
    assert (nvml.NvLinkCapability.P2P_SUPPORTED, nvml.EnableState.FEATURE_ENABLED) == (0, 1)
    assert nvml.NVLINK_MAX_LINKS >= 18

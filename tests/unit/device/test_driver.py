"""The CUDA driver behind `Device`: which calls are made, in which context, and what of failures.

The driver is a script. Where NVIDIA's package is installed and finds no driver, every call is shown
to it first: it converts the arguments, and fails only then.
"""

from __future__ import annotations

import ast
import ctypes
import enum
import importlib
import inspect
import mmap
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r2ccl.device.base import Device, Event, Kernel, Stream
from r2ccl.device.bindings import Cuda
from r2ccl.device.driver import CudaDevice
from r2ccl.device.numbering import ordinal_of
from r2ccl.errors import InternalError, InvalidArgument, TransportError, TransportTimeout
from r2ccl.testing.fakedevice import FakeDevice
from r2ccl.topology.machine import parse_bus_id

PAGE = mmap.PAGESIZE
#: Handles of contexts: this device's, and another that the caller has current.
OURS, THEIRS = 0x77, 0x55
#: Of another GPU.
PEERS = 0x99
#: Types of kernels' arguments.
KINDS = (ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_float,
         ctypes.c_double)  # fmt: skip
SOURCES = [
    Path(__file__).parents[3] / "r2ccl" / each
    for each in (
        "device/bindings.py",
        "device/context.py",
        "device/driver.py",
        "device/numbering.py",
        "device/remote.py",
        "transport/verbs/cuda.py",
    )
]
#: Enumerations whose members are passed on.
ENUMERATIONS = (
    "CUdevice_attribute",
    "CUpointer_attribute",
    "CUjit_option",
    "CUmemorytype",
    "CUstreamBatchMemOpType",
    "CUstreamCaptureMode",
    "CUstreamCaptureStatus",
    "CUflushGPUDirectRDMAWritesTarget",
    "CUflushGPUDirectRDMAWritesScope",
)


class Result(enum.IntEnum):
    """The statuses that tests use (cuda.h)."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_PTX = 218
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704
    CUDA_ERROR_TOO_MANY_PEERS = 711
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906


class Named:
    """An enumeration whose members are their names."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class IpcHandle:
    """``CUipcMemHandle``: 64 bytes, to be found through a pointer alone."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.memory)


class MemOp:
    """``CUstreamBatchMemOpParams``: a union of structs, of which two are used."""

    def __init__(self) -> None:
        self.operation: Any = None
        self.writeValue = types.SimpleNamespace()
        self.waitValue = types.SimpleNamespace()


class Script:
    """``cuda.bindings.driver``: tells what was called, returns what it is told to."""

    def __init__(self, real: Any = None) -> None:
        self.real = real
        self.calls: list[tuple[Any, ...]] = []
        self.failures: dict[str, Result] = {}
        self.attributes = {
            "COMPUTE_CAPABILITY_MAJOR": 9,
            "COMPUTE_CAPABILITY_MINOR": 0,
            "MULTIPROCESSOR_COUNT": 132,
            "MAX_PITCH": 2**31 - 1,
            "CAN_USE_64_BIT_STREAM_MEM_OPS": 1,
            "GPU_DIRECT_RDMA_WRITES_ORDERING": 100,
            "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS": 1,
        }
        self.pointers = {
            "IS_MANAGED": False,
            "MEMPOOL_HANDLE": 0,
            "IS_LEGACY_CUDA_IPC_CAPABLE": True,
            "BUFFER_ID": 41,
        }
        self.current = [THEIRS]
        self.mode = "global" if real is None else real.CUstreamCaptureMode(0)
        self.pinned = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
        self.pinned[:] = 7
        self.results: dict[str, Any] = {
            "cuDeviceGet": "device 1" if real is None else real.CUdevice(1),
            "cuDeviceGetPCIBusId": b"0000:1B:00.0\0   ",
            "cuDeviceCanAccessPeer": 1,
            "cuDeviceGetUuid": types.SimpleNamespace(bytes=bytes(range(16))),
            "cuDevicePrimaryCtxRetain": OURS,
            "cuCtxGetStreamPriorityRange": (0, -5),
            "cuMemAlloc": 0x1000,
            "cuMemHostAlloc": self.pinned.ctypes.data,
            "cuMemHostGetDevicePointer": 0x9000,
            "cuMemGetAddressRange": (0x2000, 4096),
            "cuIpcGetMemHandle": IpcHandle() if real is None else real.CUipcMemHandle(),
            "cuIpcOpenMemHandle": 0x3000,
            "cuStreamCreateWithPriority": 0x51,
            "cuEventCreate": 0xE1,
            "cuModuleLoadDataEx": 0xA1,
            "cuModuleGetFunction": 0xF1,
        }
        for name in ENUMERATIONS:
            setattr(self, name, Named() if real is None else getattr(real, name))
        self.CUresult = Result
        self.CUipcMemHandle = IpcHandle if real is None else real.CUipcMemHandle
        self.CUstreamBatchMemOpParams = MemOp if real is None else real.CUstreamBatchMemOpParams
        self.CUDA_MEMCPY2D = types.SimpleNamespace if real is None else real.CUDA_MEMCPY2D

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *arguments: self.answer(name, arguments)

    def answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.real is not None:
            with pytest.raises(RuntimeError):  # no libcuda; a TypeError is one of the arguments
                getattr(self.real, name)(*arguments)
        self.calls.append((name, *arguments))
        if name in self.failures:
            return (self.failures[name], None)
        found = self.result(name, arguments)
        results = found if isinstance(found, tuple) else () if found is None else (found,)
        return (Result.CUDA_SUCCESS, *results)

    def result(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "cuCtxGetCurrent":
            return self.current[-1]
        if name == "cuCtxPushCurrent":
            self.current.append(arguments[0])
        if name == "cuCtxPopCurrent":
            return self.current.pop()
        if name == "cuThreadExchangeStreamCaptureMode":
            before, self.mode = self.mode, arguments[0]
            return before
        for function, prefix, known in (
            ("cuDeviceGetAttribute", "CU_DEVICE_ATTRIBUTE_", self.attributes),
            ("cuPointerGetAttribute", "CU_POINTER_ATTRIBUTE_", self.pointers),
        ):
            if name == function:
                which = arguments[0] if self.real is None else arguments[0].name
                return known[which.removeprefix(prefix)]
        return self.results.get(name)

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        """Calls of these functions."""
        return [call for call in self.calls if call[0] in names]

    def work(self) -> list[tuple[Any, ...]]:
        """Calls that are no questions and not of contexts."""
        asides = "cuCtx(Get|Push|Pop)Current|cuThreadExchangeStreamCaptureMode"
        return [call for call in self.calls if not re.match(asides, call[0])]


class Clock:
    """Time passes in pauses alone."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def real_bindings() -> tuple[Any, str]:
    """NVIDIA's package, or why it is not shown the calls."""
    try:
        real = importlib.import_module("cuda.bindings.driver")
    except ImportError as exc:
        return None, f"cuda.bindings cannot be imported: {exc}"
    try:
        real.cuInit(0)
    except RuntimeError:
        return real, ""
    return None, "there is a CUDA driver here, which is not to be called with made-up handles"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Script:
    made = Script(real_bindings()[0])
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", made)
    return made


def test_the_calls_are_shown_to_nvidias_package() -> None:
    """Here, not where there is a driver, or no package: of all the tests of this file."""
    real, why_not = real_bindings()
    if real is None:
        pytest.skip(why_not)
    device = Script(real)
    with pytest.raises(TypeError):
        device.cuMemcpyAsync("no address", 2, 3, 4)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def device(api: Script, clock: Clock) -> CudaDevice:
    made = CudaDevice(1, close_timeout_s=2.0, clock=clock, pause=clock.pause)
    api.calls.clear()
    return made


# What is there


def test_it_is_opened_by_its_number_and_says_what_it_is(api: Script) -> None:
    device = CudaDevice(1)

    assert api.calls[:2] == [("cuInit", 0), ("cuDeviceGet", 1)]
    assert api.calls[-1] == ("cuDevicePrimaryCtxRetain", api.results["cuDeviceGet"])
    assert (device.ordinal, device.uuid) == (1, bytes(range(16)))
    assert device.bus_id == "0000:1b:00.0"
    assert (device.capability, device.nsms, device.waits_on_memory) == ((9, 0), 132, True)


def test_a_device_that_cannot_wait_on_memory_says_so(api: Script) -> None:
    api.attributes["CAN_USE_64_BIT_STREAM_MEM_OPS"] = 0

    assert not CudaDevice(1).waits_on_memory


@pytest.mark.parametrize(("ordering", "reorders"), [(0, True), (100, False), (200, False)])
def test_a_device_says_whether_it_reorders_what_nics_write(
    api: Script, ordering: int, reorders: bool
) -> None:
    api.attributes["GPU_DIRECT_RDMA_WRITES_ORDERING"] = ordering

    assert CudaDevice(1).reorders_remote_writes is reorders


def test_without_the_bindings_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)

    with pytest.raises(TransportError, match=r"pip install 'r2ccl\[gpu\]'") as caught:
        CudaDevice(0)
    assert caught.value.status == "NO_CUDA"


def test_without_a_driver_that_is_said(api: Script) -> None:
    def missing(*arguments: Any) -> Any:
        raise RuntimeError("libcuda.so.1 is missing")

    api.__dict__["cuInit"] = missing

    with pytest.raises(TransportError, match=r"no CUDA driver .*libcuda.so.1 is missing") as caught:
        CudaDevice(0)
    assert caught.value.status == "NO_CUDA"


def test_without_a_gpu_that_is_said(api: Script) -> None:
    api.failures["cuInit"] = Result.CUDA_ERROR_NO_DEVICE

    with pytest.raises(TransportError, match="sees no GPU: check nvidia-smi") as caught:
        CudaDevice(0)
    assert caught.value.status == "NO_CUDA"


@pytest.mark.parametrize("name", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_a_device_that_cannot_be_opened_has_the_drivers_status(api: Script, name: str) -> None:
    api.failures[name] = Result.CUDA_ERROR_INVALID_DEVICE

    with pytest.raises(TransportError, match=f"{name} failed") as caught:
        CudaDevice(9)
    assert caught.value.status == "CUDA_ERROR_INVALID_DEVICE"


# Contexts


def test_the_context_is_pushed_and_popped_over_a_current_one(
    api: Script, device: CudaDevice
) -> None:
    device.allocate(64)

    assert api.calls == [
        ("cuCtxGetCurrent",),
        ("cuCtxPushCurrent", OURS),
        ("cuMemAlloc", 64),
        ("cuCtxPopCurrent",),
    ]
    assert api.current == [THEIRS]


def test_the_context_is_left_alone_where_it_is_current(api: Script, device: CudaDevice) -> None:
    api.current = [OURS]

    device.allocate(64)

    assert api.calls == [("cuCtxGetCurrent",), ("cuMemAlloc", 64)]


def test_a_thread_without_a_context_has_none_afterwards(api: Script, device: CudaDevice) -> None:
    api.current = [0]

    device.record(Event(3), Stream(2))

    assert api.current == [0]


def test_a_call_that_fails_leaves_the_context_as_it_was(api: Script, device: CudaDevice) -> None:
    api.failures["cuMemAlloc"] = Result.CUDA_ERROR_OUT_OF_MEMORY

    with pytest.raises(TransportError, match="cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY"):
        device.allocate(1 << 60)
    assert api.current == [THEIRS]


def test_many_calls_may_share_one_push(api: Script, device: CudaDevice) -> None:
    with device.current():
        device.record(Event(3), Stream(2))
        device.wait(Stream(2), Event(3))

    assert len(api.named("cuCtxPushCurrent")) == len(api.named("cuCtxPopCurrent")) == 1
    assert api.current == [THEIRS]


def test_asking_an_event_takes_no_context(api: Script, device: CudaDevice) -> None:
    device.is_done(Event(3))

    assert api.calls == [("cuEventQuery", 3)]


@pytest.mark.parametrize(("lowest", "highest", "meant"), [(0, -5, -4), (0, -1, 0), (0, 0, 0)])
def test_waiting_streams_have_a_priority_where_there_are_several(
    api: Script, device: CudaDevice, lowest: int, highest: int, meant: int
) -> None:
    api.results["cuCtxGetStreamPriorityRange"] = (lowest, highest)
    device.make_stream(waits=True)
    assert api.named("cuStreamCreateWithPriority") == [("cuStreamCreateWithPriority", 1, meant)]


def test_inside_of_current_no_call_asks_for_the_context(api: Script, device: CudaDevice) -> None:
    with device.current(), device.current():
        device.record(Event(4), Stream(2))
        device.record(Event(4), Stream(2))
    exchange = "cuThreadExchangeStreamCaptureMode"
    assert [call[0] for call in api.calls] == [
        "cuCtxPushCurrent", exchange, "cuEventRecord", "cuEventRecord", exchange, "cuCtxPopCurrent"
    ]  # fmt: skip
    assert api.current == [THEIRS]
    device.record(Event(4), Stream(2))
    assert len(api.named("cuCtxPushCurrent")) == 2


def test_words_are_exchanged_in_one_call(api: Script, device: CudaDevice) -> None:
    kinds = api.CUstreamBatchMemOpType
    for value in (7, 2**32 + 9):
        api.calls.clear()
        device.exchange_words(Stream(2), value, (0x40, 0x80), (0xC0,))
        ((_, stream, number, operations, flags),) = api.named("cuStreamBatchMemOp")
        assert (stream, number, flags) == (2, 3, 0)
        *written, awaited = operations
        found = [each.writeValue for each in written] + [awaited.waitValue]
        assert [int(each.value) for each in found] == [value & 0xFFFFFFFF] * 3
        assert [int(each.address) for each in found] == [0x40, 0x80, 0xC0]
        write, wait = (
            kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32, kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
        )  # fmt: skip
        assert [each.operation for each in operations] == [write, write, wait]
        assert [each.operation for each in found] == [write, write, wait]
        assert [each.flags for each in found] == [0, 0, 0]
    api.failures["cuStreamBatchMemOp"] = Result.CUDA_ERROR_INVALID_HANDLE
    with pytest.raises(TransportError, match="INVALID_HANDLE"):
        device.exchange_words(Stream(2), 7, (0x40, 0x80), (0xC0,))


# Call by call


@pytest.mark.parametrize(
    ("method", "arguments", "calls", "answer"),
    [
        ("allocate", (64,), [("cuMemAlloc", 64)], 0x1000),
        ("make_stream", (), [("cuCtxGetStreamPriorityRange",),
                             ("cuStreamCreateWithPriority", 1, -5)], 0x51),
        ("make_event", (), [("cuEventCreate", 2)], 0xE1),
        ("record", (Event(4), Stream(2)), [("cuEventRecord", 4, 2)], None),
        ("wait", (Stream(2), Event(4)), [("cuStreamWaitEvent", 2, 4, 0)], None),
        ("write_word", (Stream(2), 0x40, 7), [("cuStreamWriteValue32", 2, 0x40, 7, 0)], None),
        ("write_word", (Stream(2), 0x40, 2**32 + 1), [("cuStreamWriteValue32", 2, 0x40, 1, 0)],
         None),
        ("wait_word", (Stream(2), 0x40, 7), [("cuStreamWaitValue32", 2, 0x40, 7, 0)], None),
        ("wait_word", (Stream(2), 0x40, -1), [("cuStreamWaitValue32", 2, 0x40, 2**32 - 1, 0)],
         None),
        ("copy", (0x10, 0x20, 99, Stream(2)), [("cuMemcpyAsync", 0x10, 0x20, 99, 2)], None),
        ("launch", (Kernel(0xF1), 12, 256, Stream(2),
                    [(0x10, ctypes.c_uint64), (2.5, ctypes.c_float)]),
         [("cuLaunchKernel", 0xF1, 12, 1, 1, 256, 1, 1, 0, 2,
           ((0x10, 2.5), (ctypes.c_uint64, ctypes.c_float)), 0)], None),
        ("launch", (Kernel(0xF1), 1, 32, Stream(1), [(1, kind) for kind in KINDS]),
         [("cuLaunchKernel", 0xF1, 1, 1, 1, 32, 1, 1, 0, 1,
           ((1,) * len(KINDS), KINDS), 0)], None),
        ("launch", (Kernel(0xF1), 1, 32, Stream(0), []),
         [("cuLaunchKernel", 0xF1, 1, 1, 1, 32, 1, 1, 0, 0, ((), ()), 0)], None),
    ],
)  # fmt: skip
def test_a_method_is_these_calls_and_fails_with_their_status(
    api: Script, device: CudaDevice, method: str, arguments: Any, calls: Any, answer: Any
) -> None:
    assert getattr(device, method)(*arguments) == answer
    assert api.work() == calls

    api.failures[calls[-1][0]] = Result.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(TransportError, match=f"{calls[-1][0]} failed") as caught:
        getattr(device, method)(*arguments)
    assert caught.value.status == "CUDA_ERROR_INVALID_VALUE"


@pytest.mark.parametrize(
    ("make", "end", "call"),
    [
        (lambda device: device.allocate(64), "free", ("cuMemFree", 0x1000)),
        (lambda device: device.make_stream(), "destroy_stream", ("cuStreamDestroy", 0x51)),
        (lambda device: device.make_event(), "destroy_event", ("cuEventDestroy", 0xE1)),
        (lambda device: device.map(bytes(64)), "unmap", ("cuIpcCloseMemHandle", 0x3000)),
    ],
)
def test_what_was_made_is_given_back_once(
    api: Script, device: CudaDevice, make: Any, end: str, call: Any
) -> None:
    made = make(device)
    getattr(device, end)(made)
    assert api.named(call[0]) == [call]

    with pytest.raises(InternalError, match=f"{made:#x} was not created by GPU 1, or is alr"):
        getattr(device, end)(made)
    assert api.named(call[0]) == [call]


def test_what_another_made_is_not_freed(api: Script, device: CudaDevice) -> None:
    with pytest.raises(InternalError, match="device memory 0x4000 was not created by GPU 1"):
        device.free(0x4000)
    with pytest.raises(InternalError, match="stream 0x2 "):
        device.destroy_stream(Stream(2))
    assert api.calls == []


def test_pinned_memory_is_an_array_of_zeros_at_the_drivers_place(
    api: Script, device: CudaDevice
) -> None:
    memory = device.allocate_pinned(256)

    assert api.work() == [("cuMemHostAlloc", 256, 3)]
    assert memory.ctypes.data == api.pinned.ctypes.data
    assert (memory.dtype, memory.shape, memory.any()) == (np.uint8, (256,), False)
    assert api.pinned[256] == 7
    device.free_pinned(memory)
    assert api.work()[1:] == [("cuMemFreeHost", api.pinned.ctypes.data)]


def test_existing_memory_is_pinned_and_has_the_drivers_address(
    api: Script, device: CudaDevice
) -> None:
    at = api.pinned.ctypes.data

    assert device.pin(api.pinned) == 0x9000
    device.unpin(api.pinned)

    assert api.work() == [
        ("cuMemHostRegister", at, PAGE, 3),
        ("cuMemHostGetDevicePointer", at, 0),
        ("cuMemHostUnregister", at),
    ]


def test_memory_the_device_cannot_address_is_not_left_pinned(
    api: Script, device: CudaDevice
) -> None:
    api.failures["cuMemHostGetDevicePointer"] = Result.CUDA_ERROR_INVALID_VALUE

    with pytest.raises(TransportError):
        device.pin(api.pinned)
    assert api.work()[-1] == ("cuMemHostUnregister", api.pinned.ctypes.data)


def test_only_whole_pages_are_pinned(api: Script, device: CudaDevice) -> None:
    for part in (api.pinned[1:], api.pinned[: PAGE // 2], api.pinned[::2]):
        with pytest.raises(InvalidArgument, match=f"pass whole pages of {PAGE} bytes"):
            device.pin(part)
    assert api.calls == []


def test_an_allocation_is_exported_whole_with_the_place_in_it(
    api: Script, device: CudaDevice
) -> None:
    known = bytes(range(64))
    ctypes.memmove(api.results["cuIpcGetMemHandle"].getPtr(), known, 64)

    assert device.export(0x2030) == (known, 0x30)
    assert api.named("cuMemGetAddressRange", "cuIpcGetMemHandle") == [
        ("cuMemGetAddressRange", 0x2030),
        ("cuIpcGetMemHandle", 0x2000),
    ]


@pytest.mark.parametrize(
    ("attribute", "value", "says"),
    [
        ("IS_MANAGED", True, "^GPU 1: managed memory has no IPC handle, because it migrates"),
        ("MEMPOOL_HANDLE", 5, "^GPU 1: memory of the stream-ordered pool has no IPC handle"),
        ("IS_LEGACY_CUDA_IPC_CAPABLE", False, r"^GPU 1: .* from pieces \(expandable segments\)"),
    ],
)
def test_memory_that_cannot_be_exported_says_why(
    api: Script, device: CudaDevice, attribute: str, value: Any, says: str
) -> None:
    api.pointers[attribute] = value

    with pytest.raises(TransportError, match=says) as caught:
        device.export(0x2030)
    assert caught.value.status == "NO_IPC"
    assert api.current == [THEIRS]


def test_a_handle_is_mapped_as_it_was_exported(api: Script, device: CudaDevice) -> None:
    known = bytes(reversed(range(64)))

    assert device.map(known) == 0x3000
    (_, handle, flags), *_ = api.named("cuIpcOpenMemHandle")
    assert ctypes.string_at(handle.getPtr(), 64) == known
    assert flags == 1
    with pytest.raises(InvalidArgument, match="an IPC handle of 63 bytes was given: it must have"):
        device.map(known[:-1])


def test_a_buffer_has_the_drivers_number(api: Script, device: CudaDevice) -> None:
    assert device.buffer_id(0x2030) == 41


def test_memory_that_was_freed_has_no_number(api: Script, device: CudaDevice) -> None:
    api.failures["cuPointerGetAttribute"] = Result.CUDA_ERROR_INVALID_VALUE
    assert device.buffer_id(0x2030) == 0
    api.failures["cuPointerGetAttribute"] = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(TransportError, match="ILLEGAL_ADDRESS"):
        device.buffer_id(0x2030)


def test_inside_of_current_no_call_ends_anothers_capture(api: Script, device: CudaDevice) -> None:
    before = api.mode
    with device.current(), device.current():
        assert api.mode == api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    assert api.mode == before
    assert len(api.named("cuThreadExchangeStreamCaptureMode")) == 2


def test_a_stream_says_whether_it_captures(api: Script, device: CudaDevice) -> None:
    status = api.CUstreamCaptureStatus
    for answer, is_capturing in (("NONE", False), ("ACTIVE", True), ("INVALIDATED", True)):
        api.results["cuStreamIsCapturing"] = getattr(status, f"CU_STREAM_CAPTURE_STATUS_{answer}")
        assert device.is_capturing(Stream(0x51)) is is_capturing
    api.failures["cuStreamIsCapturing"] = Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    assert device.is_capturing(Stream(0))
    api.failures["cuStreamIsCapturing"] = Result.CUDA_ERROR_INVALID_HANDLE
    with pytest.raises(TransportError, match="INVALID_HANDLE"):
        device.is_capturing(Stream(3))


def test_rows_are_copied_in_one_call(api: Script, device: CudaDevice) -> None:
    device.copy_rows(0x100, 64, 0x900, 48, 32, 5, Stream(2))

    ((name, rows, stream),) = api.work()
    assert (name, stream) == ("cuMemcpy2DAsync", 2)
    unified = api.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    assert rows.srcMemoryType == rows.dstMemoryType == unified
    assert (int(rows.dstDevice), rows.dstPitch) == (0x100, 64)
    assert (int(rows.srcDevice), rows.srcPitch) == (0x900, 48)
    assert (rows.WidthInBytes, rows.Height) == (32, 5)


@pytest.mark.parametrize("side", [0, 1])
def test_rows_too_far_apart_for_the_hardware_are_copied_singly(
    api: Script, device: CudaDevice, side: int
) -> None:
    pitches = [64, 64]
    pitches[side] = 2**31
    target, source = pitches

    device.copy_rows(0x100, target, 0x900, source, 32, 3, Stream(2))

    assert api.work() == [
        ("cuMemcpyAsync", 0x100 + row * target, 0x900 + row * source, 32, 2) for row in range(3)
    ]


def test_a_kernel_is_loaded_before_its_first_launch(api: Script, device: CudaDevice) -> None:
    assert device.load(b".entry add", "add") == 0xF1

    (load, *given), find, whole = api.work()
    assert (load, given[0], given[1]) == ("cuModuleLoadDataEx", b".entry add\0", 2)
    assert [str(getattr(each, "name", each)) for each in given[2]] == [
        "CU_JIT_ERROR_LOG_BUFFER",
        "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES",
    ]
    log, size = given[3]
    assert len(log) == size
    assert find == ("cuModuleGetFunction", 0xA1, b"add")
    assert whole == ("cuFuncLoad", 0xF1)


def test_what_the_drivers_compiler_says_is_told(api: Script, device: CudaDevice) -> None:
    def refuse(image: bytes, count: int, names: Any, values: Any) -> tuple[Any, ...]:
        said = b"ptxas fatal : line 3: unknown .version\n\0"
        values[0][: len(said)] = said
        return (Result.CUDA_ERROR_INVALID_PTX, None)

    api.__dict__["cuModuleLoadDataEx"] = refuse

    with pytest.raises(TransportError, match=r"kernel add .*line 3: unknown \.version$") as caught:
        device.load(b"nonsense", "add")
    assert caught.value.status == "CUDA_ERROR_INVALID_PTX"


def test_a_compiler_that_says_nothing_is_no_empty_message(api: Script, device: CudaDevice) -> None:
    api.failures["cuModuleLoadDataEx"] = Result.CUDA_ERROR_OUT_OF_MEMORY

    with pytest.raises(TransportError, match="it gives no reason"):
        device.load(b".entry add", "add")


@pytest.mark.parametrize("name", ["cuModuleGetFunction", "cuFuncLoad"])
def test_a_module_without_the_entry_is_unloaded(api: Script, device: CudaDevice, name: str) -> None:
    api.failures[name] = Result.CUDA_ERROR_NOT_FOUND

    with pytest.raises(TransportError) as caught:
        device.load(b".entry add", "other")
    assert caught.value.status == "CUDA_ERROR_NOT_FOUND"
    assert api.work()[-1] == ("cuModuleUnload", 0xA1)


# What NICs write


def test_what_nics_wrote_is_flushed_for_its_own_gpu(api: Script) -> None:
    api.attributes["GPU_DIRECT_RDMA_WRITES_ORDERING"] = 0
    device = CudaDevice(1)
    api.calls.clear()

    device.flush_remote_writes()

    (push, (name, *given), pop) = api.calls[1:]
    assert (push, pop) == (("cuCtxPushCurrent", OURS), ("cuCtxPopCurrent",))
    assert name == "cuFlushGPUDirectRDMAWrites"
    assert [str(getattr(each, "name", each)) for each in given] == [
        "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX",
        "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER",
    ]
    api.failures[name] = Result.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(TransportError, match=f"{name} failed"):
        device.flush_remote_writes()


def test_a_gpu_that_orders_what_nics_write_is_not_asked(api: Script, device: CudaDevice) -> None:
    api.attributes["GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS"] = 0

    device.flush_remote_writes()

    assert api.calls == []


@pytest.mark.parametrize("options", [0, 2])
def test_a_gpu_that_its_host_cannot_flush_says_so(api: Script, options: int) -> None:
    api.attributes["GPU_DIRECT_RDMA_WRITES_ORDERING"] = 0
    api.attributes["GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS"] = options
    device = CudaDevice(1)
    api.calls.clear()

    with pytest.raises(TransportError, match=r"GPU 1 reorders .* R2CC_HCA=none") as caught:
        device.flush_remote_writes()
    assert caught.value.status == "NO_FLUSH"
    assert api.calls == []


@pytest.mark.parametrize("ordering", [0, 100])
def test_a_gpu_whose_writes_others_would_miss_is_not_reached(api: Script, ordering: int) -> None:
    api.attributes["GPU_DIRECT_RDMA_WRITES_ORDERING"] = ordering
    api.attributes["GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS"] = 0
    device, peer = CudaDevice(1), peer_of(api)

    with pytest.raises(TransportError, match=r"other GPUs may miss NIC writes") as caught:
        device.reach(peer)
    assert caught.value.status == "NO_FLUSH"
    assert peer.reorders_remote_writes == (ordering == 0)


# Which GPU is which, and whose memory it reaches


@pytest.mark.parametrize(
    ("told", "spelt"),
    [
        (b"0000:1B:00.0\0", "0000:1b:00.0"),
        (b"00000000:1b:00.0\0", "0000:1b:00.0"),
        (b"10000:E1:00.0\0     ", "10000:e1:00.0"),
        (b"0002:0a:1f.1", "0002:0a:1f.1"),
    ],
)
def test_a_bus_id_is_spelt_as_the_topology_does(api: Script, told: bytes, spelt: str) -> None:
    api.results["cuDeviceGetPCIBusId"] = told

    assert CudaDevice(1).bus_id == parse_bus_id(spelt) == spelt


def test_a_bus_id_has_the_number_that_it_has_in_this_process(api: Script) -> None:
    buses = [b"0000:1B:00.0\0", b"0000:9A:00.0\0"]
    api.results["cuDeviceGetCount"] = 2
    api.__dict__["cuDeviceGet"] = lambda ordinal: (Result.CUDA_SUCCESS, ordinal)
    api.__dict__["cuDeviceGetPCIBusId"] = lambda _, each: (Result.CUDA_SUCCESS, buses[each])

    assert [ordinal_of(each) for each in ("0000:1b:00.0", "0000:9a:00.0")] == [0, 1]
    assert ordinal_of("0000:9b:00.0") is None
    assert ordinal_of("no bus id") is None


def peer_of(api: Script) -> CudaDevice:
    """Another GPU, in the same process."""
    api.results["cuDeviceGet"] = "device 2" if api.real is None else api.real.CUdevice(2)
    api.results["cuDeviceGetUuid"] = types.SimpleNamespace(bytes=bytes(range(16, 32)))
    api.results["cuDevicePrimaryCtxRetain"] = PEERS
    made = CudaDevice(2)
    api.calls.clear()
    return made


def test_a_gpu_is_let_reach_its_peers_memory(api: Script, device: CudaDevice) -> None:
    ours = api.results["cuDeviceGet"]
    peer = peer_of(api)

    device.reach(peer)

    assert api.calls == [
        ("cuDeviceCanAccessPeer", ours, api.results["cuDeviceGet"]),
        ("cuCtxGetCurrent",),
        ("cuCtxPushCurrent", OURS),
        ("cuCtxEnablePeerAccess", PEERS, 0),
        ("cuCtxPopCurrent",),
    ]
    assert api.current == [THEIRS]


def test_peer_access_enabled_by_another_library_is_no_failure(
    api: Script, device: CudaDevice
) -> None:
    peer = peer_of(api)
    api.failures["cuCtxEnablePeerAccess"] = Result.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED

    device.reach(peer)
    device.reach(peer)

    assert len(api.named("cuCtxEnablePeerAccess")) == 2
    assert api.current == [THEIRS]


def test_a_driver_that_refuses_peers_says_so(api: Script, device: CudaDevice) -> None:
    peer = peer_of(api)
    api.failures["cuCtxEnablePeerAccess"] = Result.CUDA_ERROR_TOO_MANY_PEERS

    with pytest.raises(TransportError, match="cuCtxEnablePeerAccess failed") as caught:
        device.reach(peer)
    assert caught.value.status == "CUDA_ERROR_TOO_MANY_PEERS"
    assert not peer.reorders_remote_writes


def test_gpus_that_no_way_connects_say_so(api: Script, device: CudaDevice) -> None:
    peer = peer_of(api)
    api.results["cuDeviceCanAccessPeer"] = 0

    with pytest.raises(TransportError, match="GPU 1 cannot reach the memory of GPU 2") as caught:
        device.reach(peer)
    assert caught.value.status == "NO_PEER_ACCESS"
    assert not api.named("cuCtxEnablePeerAccess")


def test_a_gpu_reaches_its_own_memory(api: Script, device: CudaDevice) -> None:
    again = CudaDevice(1)
    api.calls.clear()

    device.reach(again)

    assert api.calls == []


def test_only_an_open_gpu_of_cudas_is_reached(api: Script, device: CudaDevice) -> None:
    peer = peer_of(api)
    peer.close()
    with pytest.raises(InternalError, match="GPU 2 was used after it was closed"):
        device.reach(peer)
    other: Any = types.SimpleNamespace(uuid=bytes(16))
    with pytest.raises(InternalError, match=r"GPU 1 cannot reach .* not a CudaDevice"):
        device.reach(other)


def test_nic_writes_to_memory_others_reach_are_flushed_for_all(
    api: Script, device: CudaDevice
) -> None:
    peer = peer_of(api)
    assert not peer.reorders_remote_writes

    device.reach(peer)

    assert (peer.reorders_remote_writes, device.reorders_remote_writes) == (True, False)
    peer.flush_remote_writes()
    ((_, _, scope),) = api.named("cuFlushGPUDirectRDMAWrites")
    assert str(getattr(scope, "name", scope)) == "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES"


def test_a_gpu_that_keeps_the_order_for_all_is_not_flushed(api: Script, device: CudaDevice) -> None:
    api.attributes["GPU_DIRECT_RDMA_WRITES_ORDERING"] = 200
    peer = peer_of(api)

    device.reach(peer)
    peer.flush_remote_writes()

    assert not peer.reorders_remote_writes
    assert not api.named("cuFlushGPUDirectRDMAWrites")


# Waiting


def is_ready_after(api: Script, npolls: int) -> None:
    """Have every event be done when it is asked that often, and then again."""
    left = [npolls]

    def query(event: int) -> tuple[Any, ...]:
        left[0] -= 1
        return (Result.CUDA_ERROR_NOT_READY if left[0] >= 0 else Result.CUDA_SUCCESS,)

    api.__dict__["cuEventQuery"] = query


def test_an_event_is_done_not_done_or_failed(api: Script, device: CudaDevice) -> None:
    assert device.is_done(Event(3))
    api.failures["cuEventQuery"] = Result.CUDA_ERROR_NOT_READY
    assert not device.is_done(Event(3))
    api.failures["cuEventQuery"] = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(TransportError, match="cuEventQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        device.is_done(Event(3))


def test_a_wait_yields_then_pauses_no_longer_than_it_waited(
    api: Script, device: CudaDevice, clock: Clock
) -> None:
    is_ready_after(api, 30)

    assert device.synchronize(Event(3), 10.0)

    assert clock.pauses[:8] == [0.0] * 8
    passed = 0.0
    for pause in clock.pauses[8:]:
        assert pause == pytest.approx(min(max(passed, 20e-6), 1e-3))
        passed += pause
    assert clock.pauses[-1] == 1e-3


def test_a_wait_ends_at_its_deadline(api: Script, device: CudaDevice, clock: Clock) -> None:
    api.failures["cuEventQuery"] = Result.CUDA_ERROR_NOT_READY

    assert not device.synchronize(Event(3), 0.25)

    assert clock.now == pytest.approx(100.25)


def test_a_wait_of_no_time_asks_once(api: Script, device: CudaDevice, clock: Clock) -> None:
    assert device.synchronize(Event(3), 0.0)
    api.failures["cuEventQuery"] = Result.CUDA_ERROR_NOT_READY
    assert not device.synchronize(Event(3), 0.0)
    assert clock.pauses == []
    assert len(api.named("cuEventQuery")) == 2


# The end


def make_one_of_each(api: Script, device: CudaDevice) -> None:
    device.allocate(64)
    device.allocate_pinned(64)
    device.pin(api.pinned)
    device.map(bytes(64))
    device.make_stream()
    device.make_event()
    device.load(b".entry add", "add")
    api.calls.clear()


FREEING = [
    ("cuEventDestroy", 0xE1),
    ("cuStreamDestroy", 0x51),
    ("cuIpcCloseMemHandle", 0x3000),
    ("cuModuleUnload", 0xA1),
    ("cuMemHostUnregister", "pinned"),
    ("cuMemFreeHost", "pinned"),
    ("cuMemFree", 0x1000),
]


def freeing(api: Script) -> list[tuple[Any, ...]]:
    at = api.pinned.ctypes.data
    return [(name, at if what == "pinned" else what) for name, what in FREEING]


def test_closing_frees_all_that_was_made_after_its_work(api: Script, device: CudaDevice) -> None:
    make_one_of_each(api, device)

    device.close()

    release = ("cuDevicePrimaryCtxRelease", api.results["cuDeviceGet"])
    assert api.work() == [("cuStreamQuery", 0x51), ("cuEventQuery", 0xE1), *freeing(api), release]
    assert api.current == [THEIRS]


def test_closing_frees_nothing_that_is_gone_or_anothers(api: Script, device: CudaDevice) -> None:
    device.free(device.allocate(64))
    api.calls.clear()

    device.close()

    assert [call[0] for call in api.work()] == ["cuDevicePrimaryCtxRelease"]


def test_closing_again_does_nothing(api: Script, device: CudaDevice) -> None:
    device.close()
    api.calls.clear()

    device.close()

    assert api.calls == []


def test_after_closing_a_call_says_so(api: Script, device: CudaDevice) -> None:
    device.close()

    with pytest.raises(InternalError, match="GPU 1 was used after it was closed"):
        device.make_stream()
    api.current = [0]
    with pytest.raises(InternalError, match="GPU 1 was used after it was closed"):
        device.make_stream()


def test_closing_does_not_wait_for_ever_and_can_be_tried_again(
    api: Script, device: CudaDevice, clock: Clock
) -> None:
    make_one_of_each(api, device)
    api.failures["cuStreamQuery"] = Result.CUDA_ERROR_NOT_READY

    with pytest.raises(TransportTimeout, match=r"work of stream 0x51 did not end within 2 s") as e:
        device.close()

    assert e.value.status == "CUDA_ERROR_NOT_READY"
    assert clock.now == pytest.approx(102.0)
    assert not api.named(*(name for name, _ in FREEING), "cuDevicePrimaryCtxRelease")
    assert api.current == [THEIRS]
    api.failures.clear()
    device.close()
    assert len(api.named(*(name for name, _ in FREEING))) == len(FREEING)


def test_what_cannot_be_freed_keeps_nothing_else(api: Script, device: CudaDevice) -> None:
    make_one_of_each(api, device)
    api.failures["cuModuleUnload"] = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    api.failures["cuMemFree"] = Result.CUDA_ERROR_INVALID_VALUE

    with pytest.raises(TransportError, match="could not free 2 of its resources: cuModule") as e:
        device.close()

    assert e.value.status == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert [call for call in api.work() if call in freeing(api)] == freeing(api)
    assert api.work()[-1][0] == "cuDevicePrimaryCtxRelease"
    device.close()


def test_a_context_that_failed_is_not_waited_for(
    api: Script, device: CudaDevice, clock: Clock
) -> None:
    make_one_of_each(api, device)
    api.failures["cuStreamQuery"] = Result.CUDA_ERROR_ILLEGAL_ADDRESS

    device.close()

    assert clock.pauses == []
    assert len(api.named(*(name for name, _ in FREEING))) == len(FREEING)


# What is called, and what there is


def test_every_function_and_constant_exists_in_nvidias_package() -> None:
    try:
        real = importlib.import_module("cuda.bindings.driver")
    except ImportError as exc:
        pytest.skip(f"cuda.bindings cannot be imported: {exc}")
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    functions = {text for text in texts if re.fullmatch(r"cu[A-Z]\w+", text)}
    assert len(functions) > 30
    assert {name for name in functions if not hasattr(real, name)} == set()
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    enums = {name for name in names if re.fullmatch(r"CU[a-z]\w+|CUDA_MEMCPY2D", name)}
    assert {name for name in enums if not hasattr(real, name)} == set()
    members = {name for name in names if re.fullmatch(r"CU_\w+|CUDA_(ERROR|SUCCESS)\w*", name)}
    known = {name for each in enums for name in dir(getattr(real, each))}
    assert members - known == set()
    for path, tree in zip(SOURCES, trees, strict=True):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                check_attribute(real, node, path)


def check_attribute(real: Any, call: ast.Call, path: Path) -> None:
    """Hold the names of attributes, which are put together, against the package."""
    called = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id  # type: ignore[union-attr]
    kinds = {
        "_attribute": ("CUdevice_attribute", "CU_DEVICE_ATTRIBUTE_"),
        "device_attribute": ("CUdevice_attribute", "CU_DEVICE_ATTRIBUTE_"),
        "attribute": ("CUpointer_attribute", "CU_POINTER_ATTRIBUTE_"),
        "pointer_attribute": ("CUpointer_attribute", "CU_POINTER_ATTRIBUTE_"),
        "_pointer": ("CUpointer_attribute", "CU_POINTER_ATTRIBUTE_"),
    }
    if called in kinds and call.args and isinstance(call.args[0], ast.Constant):
        enum_name, prefix = kinds[called]
        assert hasattr(getattr(real, enum_name), prefix + call.args[0].value), path


def test_the_numbers_in_the_source_are_those_of_nvidias_package() -> None:
    try:
        real = importlib.import_module("cuda.bindings.driver")
    except ImportError as exc:
        pytest.skip(f"cuda.bindings cannot be imported: {exc}")
    driver = importlib.import_module("r2ccl.device.driver")
    assert driver._NON_BLOCKING == real.CUstream_flags.CU_STREAM_NON_BLOCKING
    assert driver._NO_TIMING == real.CUevent_flags.CU_EVENT_DISABLE_TIMING
    assert real.CU_MEMHOSTALLOC_PORTABLE | real.CU_MEMHOSTALLOC_DEVICEMAP == 3
    assert real.CU_MEMHOSTREGISTER_PORTABLE | real.CU_MEMHOSTREGISTER_DEVICEMAP == 3
    assert driver._PORTABLE_AND_MAPPED == 3
    assert driver._PEER_ACCESS == real.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    words = real.CUstreamWriteValue_flags, real.CUstreamWaitValue_flags
    assert driver._AFTER_A_FENCE == words[0].CU_STREAM_WRITE_VALUE_DEFAULT
    assert driver._GREATER_OR_EQUAL == words[1].CU_STREAM_WAIT_VALUE_GEQ
    remote = importlib.import_module("r2ccl.device.remote")
    ordering, scopes = real.CUGPUDirectRDMAWritesOrdering, real.CUflushGPUDirectRDMAWritesScope
    assert ordering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE < remote._OWNER
    assert remote._OWNER == ordering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
    assert remote._OWNER == scopes.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
    assert remote._ALL_DEVICES == ordering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES
    assert remote._ALL_DEVICES == scopes.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES
    options = real.CUflushGPUDirectRDMAWritesOptions
    assert remote._BY_HOST == options.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
    for each in Result:
        assert getattr(real.CUresult, each.name) == each


@pytest.mark.parametrize("implementation", [CudaDevice, FakeDevice])
def test_it_has_the_methods_of_a_device(implementation: type) -> None:
    for name, wanted in vars(Device).items():
        if not name.startswith("_"):
            given = getattr(implementation, name)
            assert isinstance(given, property) == isinstance(wanted, property), name
            if not isinstance(wanted, property):
                assert list(inspect.signature(given).parameters) == list(
                    inspect.signature(wanted).parameters
                ), name


def test_a_function_that_an_older_driver_lacks_is_named(api: Script) -> None:
    cuda = Cuda()

    def missing(*arguments: Any) -> Any:
        raise RuntimeError('Function "cuFuncLoad" not found')

    api.__dict__["cuFuncLoad"] = missing
    with pytest.raises(TransportError, match="no CUDA driver with cuFuncLoad") as caught:
        cuda.call("cuFuncLoad", 1)
    assert caught.value.status == "NO_CUDA"

"""NVIDIA's package as a script, and a `CudaDevice` on it.

Where NVIDIA's package is installed and finds no driver, every call is shown to it first: it
converts the arguments, and fails only then.
"""

from __future__ import annotations

import ctypes
import enum
import importlib
import mmap
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from r2ccl.device.driver import CudaDevice

PAGE = mmap.PAGESIZE
#: Handles of contexts: this device's, and another that the caller has current.
OURS, THEIRS = 0x77, 0x55
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
        # Only the package for CUDA 12 has a second name for cuDeviceGetUuid.
        is_known = not name.endswith("_v2") if self.real is None else hasattr(self.real, name)
        if not name.startswith("cu") or not is_known:
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
        return self.results.get(name.removesuffix("_v2"))

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


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def device(api: Script, clock: Clock) -> CudaDevice:
    made = CudaDevice(1, close_timeout_s=2.0, clock=clock, pause=clock.pause)
    api.calls.clear()
    return made

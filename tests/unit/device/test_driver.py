"""A CUDA device: what it says when it is opened, and the context in which its calls are made."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from support.cuda_script import OURS, THEIRS, Result, Script
from support.cuda_script import api as api  # the fixtures
from support.cuda_script import clock as clock
from support.cuda_script import device as device

from r2ccl.device.base import Event, Stream
from r2ccl.device.driver import CudaDevice
from r2ccl.errors import TransportError

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

    exchange = "cuThreadExchangeStreamCaptureMode"
    assert [call[0] for call in api.calls] == [
        "cuCtxPushCurrent", exchange, "cuMemAlloc", exchange, "cuCtxPopCurrent"
    ]  # fmt: skip
    assert api.calls[0] == ("cuCtxPushCurrent", OURS)
    assert api.current == [THEIRS]


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


def test_inside_of_current_no_call_ends_anothers_capture(api: Script, device: CudaDevice) -> None:
    before = api.mode
    with device.current(), device.current():
        assert api.mode == api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    assert api.mode == before
    assert len(api.named("cuThreadExchangeStreamCaptureMode")) == 2


@pytest.mark.parametrize(
    "method", ["allocate", "free", "make_event", "is_done", "synchronize", "load", "close"]
)
def test_no_call_of_any_thread_ends_anothers_capture(
    api: Script, device: CudaDevice, method: str
) -> None:
    """The driver refuses unsafe calls of a thread in the global mode, and ends the capture."""
    global_mode, modes = api.mode, []
    arguments: dict[str, Any] = {
        "allocate": (64,), "free": (device.allocate(64),), "is_done": (Event(3),),
        "synchronize": (Event(3), 1.0), "load": (b".entry add", "add"),
    }  # fmt: skip
    asides = ("cuCtxPushCurrent", "cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode",
              "cuDevicePrimaryCtxRelease")  # fmt: skip
    answer = api.answer

    def record(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if name not in asides:
            modes.append(api.mode)
        return answer(name, arguments)

    api.__dict__["answer"] = record
    device.make_stream()
    modes.clear()
    getattr(device, method)(*arguments.get(method, ()))
    local = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    assert set(modes) == {local}
    assert api.mode == global_mode

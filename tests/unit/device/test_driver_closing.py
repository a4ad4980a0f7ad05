"""Waiting for the work of a CUDA device, and closing it: what is freed, and what of failures."""

from __future__ import annotations

from typing import Any

import pytest
from support.cuda_script import THEIRS, Clock, Result, Script
from support.cuda_script import api as api  # the fixtures
from support.cuda_script import clock as clock
from support.cuda_script import device as device

from r2ccl.device.base import Event
from r2ccl.device.driver import CudaDevice
from r2ccl.errors import InternalError, TransportError, TransportTimeout

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

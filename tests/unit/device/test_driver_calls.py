"""The calls of the CUDA driver that each method of a device makes, and what of their failures."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from support.cuda_script import PAGE, THEIRS, Result, Script
from support.cuda_script import api as api  # the fixtures
from support.cuda_script import clock as clock
from support.cuda_script import device as device

from r2ccl.device.base import Event, Kernel, Stream
from r2ccl.device.driver import CudaDevice
from r2ccl.errors import InternalError, InvalidArgument, TransportError

#: Types of kernels' arguments.
KINDS = (ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_float,
         ctypes.c_double)  # fmt: skip


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

"""Arrays and streams of the real libraries, on a real GPU."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from r2ccl.device.bindings import Cuda
from r2ccl.dtypes import DTYPES, EXTENSIONS, dtype_name
from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.runtime.arrays.buffers import is_in_place, like, like_part, part_of
from r2ccl.runtime.arrays.cuda import as_device_buffer, is_device_array, streams_of
from r2ccl.runtime.arrays.streams import LEGACY, PER_THREAD, stream_of

try:
    CUDA = Cuda()
except TransportError as exc:
    pytest.skip(f"arrays on a GPU: {exc}", allow_module_level=True)

NAMES = [
    dtype.name for code, dtype in DTYPES.items() if code not in EXTENSIONS and dtype.names is None
]


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="CuPy is not installed")


@pytest.fixture
def torch() -> Any:
    module = pytest.importorskip("torch", reason="torch is not installed")
    if not module.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return module


@pytest.fixture
def numba() -> Any:
    module = pytest.importorskip("numba.cuda", reason="Numba has no CUDA", exc_type=ImportError)
    if not module.is_available():
        pytest.skip("this Numba finds no CUDA")
    return module


class OnlyInterface:
    """An array of a library that nobody knows."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.inner.__cuda_array_interface__


class OnlyDlpack:
    """Likewise."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __dlpack__(self, **asked: Any) -> Any:
        return self.inner.__dlpack__(**asked)

    def __dlpack_device__(self) -> Any:
        return self.inner.__dlpack_device__()


class TestCupy:
    """CuPy arrays and streams."""

    @pytest.mark.parametrize("name", NAMES)
    def test_every_dtype(self, cupy: Any, name: str) -> None:
        x = cupy.zeros((3, 4), name)
        buffer = as_device_buffer(x, writable=True)
        assert (buffer.address, buffer.count, buffer.nbytes) == (x.data.ptr, 12, x.nbytes)
        assert DTYPES[buffer.dtype_code].name == name
        assert buffer.ordinal == x.device.id == CUDA.pointer_attribute("DEVICE_ORDINAL", x.data.ptr)

    def test_views(self, cupy: Any) -> None:
        x = cupy.zeros((4, 6), np.float32)
        whole, rows = as_device_buffer(x, writable=True), as_device_buffer(x[2:], writable=True)
        assert rows.address == whole.address + 48
        assert is_in_place(rows, part_of(whole, 1, 2), whole)
        for refused in (x.T, x[:, 1:], x[::-1]):
            with pytest.raises(InvalidArgument, match="not C-contiguous"):
                as_device_buffer(refused, writable=True)
        assert as_device_buffer(cupy.zeros((0, 3)), writable=True).count == 0

    def test_streams(self, cupy: Any) -> None:
        x = cupy.zeros(4)
        stream = cupy.cuda.Stream(non_blocking=True)
        assert as_device_buffer(x, writable=True).stream == LEGACY
        with stream:
            assert as_device_buffer(x, writable=True).stream == stream.ptr
        assert stream_of(stream, LEGACY) == stream.ptr
        assert stream_of(cupy.cuda.ExternalStream(stream.ptr), LEGACY) == stream.ptr
        assert stream_of(cupy.cuda.Stream.null, PER_THREAD) == LEGACY
        assert stream_of(cupy.cuda.Stream.ptds, LEGACY) == PER_THREAD
        with pytest.raises(InvalidArgument, match="allowed are None"):
            stream_of(cupy.cuda.Event(), LEGACY)

    def test_outputs(self, cupy: Any) -> None:
        x = cupy.zeros((4, 2), np.float16)
        assert like(x, 3).shape == (3, 4, 2)
        made = like_part(x, 2)
        assert (type(made), made.shape, made.dtype) == (cupy.ndarray, (2, 2), x.dtype)


class TestTorch:
    """torch tensors and streams."""

    @pytest.mark.parametrize("name", [*NAMES, *EXTENSIONS.values()])
    def test_every_dtype(self, torch: Any, name: str) -> None:
        x = torch.empty(3, 4, dtype=getattr(torch, name), device="cuda")
        buffer = as_device_buffer(x, writable=True)
        assert (buffer.address, buffer.count) == (x.data_ptr(), 12)
        assert (buffer.itemsize, buffer.ordinal) == (x.element_size(), x.device.index)
        assert dtype_name(buffer.dtype_code) == name

    def test_where_it_is(self, torch: Any) -> None:
        assert is_device_array(torch.zeros(3, device="cuda"))
        assert not is_device_array(torch.zeros(3))
        assert not is_device_array(torch.zeros(3).pin_memory())

    def test_what_cannot_be_viewed(self, torch: Any) -> None:
        for x, words in (
            (torch.zeros(4, device="cuda", requires_grad=True), "detach"),
            (torch.zeros(4, device="cuda").to_sparse(), "to_dense"),
            (torch.zeros(4, 3, device="cuda").T, "not C-contiguous"),
        ):
            with pytest.raises(InvalidArgument, match=words):
                as_device_buffer(x, writable=False)

    def test_streams(self, torch: Any) -> None:
        x, stream = torch.zeros(4, device="cuda"), torch.cuda.Stream()
        assert as_device_buffer(x, writable=True).stream == LEGACY
        with torch.cuda.stream(stream):
            assert as_device_buffer(x, writable=True).stream == stream.cuda_stream
        assert stream_of(stream, LEGACY) == stream.cuda_stream

    def test_outputs(self, torch: Any) -> None:
        x = torch.zeros(4, 2, dtype=torch.bfloat16, device="cuda")
        made = like_part(x, 2)
        assert (made.shape, made.dtype, made.device) == ((2, 2), x.dtype, x.device)

    def test_the_second_gpu(self, torch: Any) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("there is one GPU only")
        x = torch.zeros(4, device="cuda:1")
        stream = torch.cuda.Stream(device=1)
        with torch.cuda.stream(stream), torch.cuda.device(0):
            buffer = as_device_buffer(x, writable=True)
        assert buffer.ordinal == 1 == as_device_buffer(OnlyInterface(x), writable=True).ordinal
        assert buffer.stream == stream.cuda_stream
        assert like(x).device == x.device


class TestNumba:
    """Numba's arrays and streams."""

    def test_an_array(self, numba: Any) -> None:
        x = numba.device_array((3, 4), np.float32)
        buffer = as_device_buffer(x, writable=True)
        assert buffer.address == x.__cuda_array_interface__["data"][0]
        assert (buffer.count, buffer.ordinal) == (12, numba.current_context().device.id)
        assert as_device_buffer(x[1:], writable=True).address == buffer.address + 16
        assert as_device_buffer(numba.device_array((0, 4)), writable=True).count == 0

    def test_streams(self, numba: Any) -> None:
        stream = numba.stream()
        handle = int(stream)
        assert stream_of(stream, LEGACY) == handle
        assert stream_of(numba.default_stream(), PER_THREAD) == LEGACY
        assert stream_of(numba.per_thread_default_stream(), LEGACY) == PER_THREAD
        x = numba.device_array(4, stream=stream)
        assert as_device_buffer(x, writable=True).stream == handle
        assert as_device_buffer(numba.device_array(4), writable=True).stream == LEGACY

    def test_outputs(self, numba: Any) -> None:
        x = numba.device_array((4, 2), np.int16, stream=numba.stream())
        made = like(x, 3)
        assert (made.shape, made.dtype, made.stream) == ((3, 4, 2), x.dtype, x.stream)


class TestUnknownLibraries:
    """What is known of any array through the two protocols."""

    def test_the_interface(self, cupy: Any) -> None:
        x = cupy.zeros((3, 4), np.int32)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            buffer = as_device_buffer(OnlyInterface(x), writable=True)
        assert (buffer.address, buffer.ordinal) == (x.data.ptr, x.device.id)
        assert (buffer.stream, buffer.after) == (stream.ptr, stream.ptr)
        assert streams_of(PER_THREAD, buffer) == (PER_THREAD, (stream.ptr,))

    @pytest.mark.parametrize("library", ["cupy", "torch"])
    def test_dlpack(self, library: str, request: pytest.FixtureRequest) -> None:
        module = request.getfixturevalue(library)
        x = module.zeros((3, 4), dtype=module.float32, **on_gpu(library))
        buffer = as_device_buffer(OnlyDlpack(x), writable=True)
        known = as_device_buffer(x, writable=True)
        assert (buffer.address, buffer.ordinal) == (known.address, known.ordinal)
        assert (buffer.dtype_code, buffer.count) == (known.dtype_code, known.count)

    def test_dlpack_keeps_the_memory_and_lets_it_go(self, torch: Any) -> None:
        free = torch.cuda.memory_allocated()
        buffer = as_device_buffer(OnlyDlpack(torch.zeros(1 << 20, device="cuda")), writable=True)
        gc.collect()
        assert torch.cuda.memory_allocated() >= free + (4 << 20)
        del buffer
        assert torch.cuda.memory_allocated() == free

    def test_the_legacy_stream_comes_after_the_work_of_a_producer(self, torch: Any) -> None:
        x = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):  # torch's do not wait for the legacy one
            torch.cuda._sleep(200_000_000)
            x.fill_(7)
            buffer = as_device_buffer(OnlyDlpack(x), writable=False)
        host = np.empty(buffer.count, np.int32)
        CUDA.call(
            "cuMemcpyDtoHAsync", host.ctypes.data, buffer.address, buffer.nbytes, buffer.stream
        )
        CUDA.call("cuStreamSynchronize", buffer.stream)
        assert (host == 7).all()


def on_gpu(library: str) -> dict[str, str]:
    return {"device": "cuda"} if library == "torch" else {}

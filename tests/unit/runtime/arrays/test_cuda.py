"""What becomes a device buffer, on which stream, and what is refused with which words.

No GPU: memory of NumPy arrays poses as a GPU's, libraries are lookalikes.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.lookalikes import (
    CUDA,
    CUDA_HOST,
    MANAGED,
    ROCM,
    Cupy,
    Interface,
    Numba,
    NumbaStream,
    Producer,
    Torch,
    imported,
    posing,
    start_of,
)

from r2ccl.device.base import Stream
from r2ccl.dtypes import BFLOAT16_CODE, CODES, DTYPES, EXTENSIONS
from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.runtime.arguments import as_buffer
from r2ccl.runtime.arrays import cuda
from r2ccl.runtime.arrays.buffers import is_in_place, like, like_part, part_of
from r2ccl.runtime.arrays.cuda import DeviceBuffer, as_device_buffer, is_device_array, streams_of
from r2ccl.runtime.arrays.streams import LEGACY, PER_THREAD

#: What the driver says of every address.
ORDINAL = 5


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(attribute: str, address: int) -> int:
        assert attribute == "DEVICE_ORDINAL"
        assert address
        return ORDINAL

    monkeypatch.setattr(cuda, "Cuda", lambda: SimpleNamespace(pointer_attribute=ask))


def view(x: Any) -> DeviceBuffer:
    return as_device_buffer(x, writable=False)


class TestTheInterface:
    """Arrays of unknown libraries with ``__cuda_array_interface__``."""

    @pytest.mark.parametrize("version", [2, 3])
    @pytest.mark.parametrize(
        "dtype",
        [
            pytest.param(d, id=d.name)
            for code, d in DTYPES.items()
            if code not in EXTENSIONS and d.names is None
        ],
    )
    def test_an_array_of_every_dtype_is_viewed_flat(
        self, dtype: np.dtype[Any], version: int
    ) -> None:
        memory = np.zeros((3, 4, 5), dtype)
        x = posing(memory, version=version)

        buffer = as_device_buffer(x, writable=True)

        assert (buffer.address, buffer.count) == (start_of(memory), 60)
        assert (buffer.itemsize, buffer.nbytes) == (dtype.itemsize, memory.nbytes)
        assert DTYPES[buffer.dtype_code] == dtype
        assert buffer.owner is x
        assert buffer.ordinal == ORDINAL

    def test_types_of_ml_dtypes_are_known_by_the_owners_dtype(self) -> None:
        x = Interface(typestr="<V2")
        with pytest.raises(InvalidArgument, match="dtype void16 was given"):
            view(x)
        x.dtype = np.dtype(ml_dtypes.bfloat16)  # type: ignore[attr-defined]
        assert view(x).dtype_code == BFLOAT16_CODE
        x.dtype = np.dtype(ml_dtypes.float8_e5m2)  # type: ignore[attr-defined]
        with pytest.raises(InvalidArgument, match="dtype void16 was given"):
            view(x)
        for code in EXTENSIONS:
            own = Interface(typestr=DTYPES[code].str)
            own.dtype = DTYPES[code]  # type: ignore[attr-defined]
            assert view(own).dtype_code == code

    def test_strides_may_be_left_out(self) -> None:
        assert view(Interface(shape=(2, 3))).count == 6
        assert view(Interface(shape=(2, 3), strides=None)).count == 6
        assert view(Interface(shape=(2, 3), strides=(12, 4))).count == 6

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
    def test_shapes_without_dimensions_or_elements(self, shape: tuple[int, ...]) -> None:
        buffer = view(posing(np.zeros(shape, np.float32)))
        assert buffer.count == np.zeros(shape).size
        assert buffer.nbytes == 4 * buffer.count

    def test_no_elements_need_no_memory_nor_a_driver(self) -> None:
        buffer = as_device_buffer(Interface(shape=(0, 3), data=(0, False)), writable=True)
        assert (buffer.address, buffer.count, buffer.nbytes) == (0, 0, 0)
        assert buffer.ordinal == cuda.ANY_GPU

    @pytest.mark.parametrize(
        ("entries", "stream", "after"),
        [
            ({}, LEGACY, None),
            ({"stream": None}, LEGACY, None),
            ({"stream": 1}, LEGACY, LEGACY),
            ({"stream": 2}, PER_THREAD, PER_THREAD),
            ({"stream": 0x5000}, 0x5000, 0x5000),
            ({"stream": 0x5000, "version": 2}, 0x5000, 0x5000),
        ],
    )
    def test_a_stream_in_the_array_is_where_the_call_goes(
        self, entries: dict[str, Any], stream: int, after: int | None
    ) -> None:
        buffer = view(Interface(**entries))
        assert (buffer.stream, buffer.after) == (stream, after)

    @pytest.mark.parametrize(
        ("entries", "words"),
        [
            ({"stream": 0}, r"'stream' is 0.*allowed are None, 1"),
            ({"version": 1}, "has version 1; allowed are 2 and 3"),
            ({"version": 4}, "has version 4; allowed are 2 and 3"),
            ({"mask": Interface()}, "masked array was given and its mask"),
            ({"typestr": "<f4", "data": None}, "interface__ is broken"),
            ({"typestr": "nonsense"}, "interface__ is broken"),
            ({"shape": 3}, "interface__ is broken"),
            ({"typestr": ">f4"}, "dtype >f4 is byte-swapped: pass it"),
            ({"typestr": "|V8"}, r"dtype void64 was given: allowed are"),
            ({"typestr": "<f16"}, "dtype float128 was given: allowed are arrays in CUDA memory"),
            ({"typestr": "<M8[s]"}, r"dtype datetime64\[s\] was given: allowed are.*float32"),
            ({"typestr": "|V8"}, "dtype void64 was given"),
            (
                {"data": (0x7002, False)},
                r"shape \(4,\) is not aligned to 4 bytes: pass a copy of it .*read the result",
            ),
            (
                {"shape": (4, 4), "strides": (4, 16)},
                r"strides \(4, 16\) is not C-contiguous: pass .*read the result from there\)",
            ),
            ({"strides": (-4,)}, "not C-contiguous"),
            ({"strides": (0,)}, "not C-contiguous"),
            ({"strides": (16, 4)}, "not C-contiguous"),
            ({"strides": 4}, "interface__ is broken"),
        ],
    )
    def test_everything_else_is_refused_with_the_reason(
        self, entries: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(InvalidArgument, match=words):
            view(Interface(**entries))

    @pytest.mark.parametrize("entry", ["data", "shape", "typestr", "version"])
    def test_an_entry_that_is_missing_is_named(self, entry: str) -> None:
        x = Interface()
        del x.__cuda_array_interface__[entry]
        with pytest.raises(InvalidArgument, match=f"is broken.*{entry}"):
            view(x)

    def test_what_the_owner_says_is_passed_on(self) -> None:
        class Sharded:
            def __dlpack_device__(self) -> tuple[int, int]:
                return (CUDA, 0)

            @property
            def __cuda_array_interface__(self) -> Any:
                raise RuntimeError("lies on two GPUs")

        with pytest.raises(InvalidArgument, match=r"Sharded was given .*viewed: lies on two GPUs"):
            view(Sharded())


SLICES = [
    np.s_[...], np.s_[1:3], np.s_[:, 1], np.s_[:, ::2], np.s_[::-1], np.s_[:, :, :0],
    np.s_[2:3, 1:2], np.s_[None, :, None], np.s_[1:2, :, ::2], np.s_[2, 1:3], np.s_[:, :1],
]  # fmt: skip


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("part", SLICES, ids=str)
def test_the_same_memory_is_refused_on_a_gpu_and_on_the_host(part: Any, order: Any) -> None:
    x = np.zeros((3, 4, 6), np.float32, order)[part]
    if x.flags.c_contiguous:
        assert view(posing(x)).count == as_buffer(x, writable=True).count
        return
    for refuse in (lambda: as_buffer(x, writable=True), lambda: view(posing(x))):
        with pytest.raises(InvalidArgument, match="not C-contiguous"):
            refuse()


def test_read_only_memory_is_an_input_but_not_an_output() -> None:
    for x in (Interface(data=(0x7000, True)), Producer(flags=1)):
        assert view(x).count == 4
        with pytest.raises(InvalidArgument, match=r"read-only.*pass a copy, and read the result"):
            as_device_buffer(x, writable=True)


class TestDlpack:
    """Arrays of unknown libraries that speak DLPack only."""

    @pytest.mark.parametrize("version", [(1, 0), None])
    def test_what_a_capsule_says(self, version: tuple[int, int] | None) -> None:
        x = Producer(0x7000, (2, 3), (3, 1), device=(CUDA, 4), offset=64, version=version)
        buffer = view(x)
        assert (buffer.address, buffer.count, buffer.nbytes) == (0x7040, 6, 24)
        assert DTYPES[buffer.dtype_code] == np.float32
        assert (buffer.ordinal, buffer.owner) == (4, x)

    def test_bfloat16_and_bool(self) -> None:
        assert view(Producer(dtype=(4, 16, 1))).dtype_code == BFLOAT16_CODE
        assert view(Producer(dtype=(6, 8, 1))).dtype_code == CODES[np.dtype(bool)]

    def test_managed_memory_is_where_the_driver_says(self) -> None:
        assert view(Producer(device=(MANAGED, 0))).ordinal == ORDINAL

    def test_the_legacy_stream_waits_for_the_producer_others_for_it(self) -> None:
        x = Producer()
        buffer = view(x)
        assert x.asked[0]["stream"] == LEGACY
        assert (buffer.stream, buffer.after) == (LEGACY, LEGACY)

    def test_the_memory_lives_as_long_as_the_last_part_of_the_buffer(self) -> None:
        x = Producer()
        buffer = view(x)
        part = part_of(buffer, 1, 2)
        del buffer
        assert x.released == []
        del part
        assert x.released == [b"dltensor_versioned"]

    def test_a_buffer_that_is_refused_is_let_go(self) -> None:
        x = Producer(shape=(2, 2), strides=(1, 2))
        with pytest.raises(InvalidArgument, match=r"strides \(4, 8\) is not C-contiguous"):
            view(x)
        assert x.released == [b"dltensor_versioned"]

    def test_no_elements(self) -> None:
        buffer = view(Producer(0, (0,), (1,)))
        assert (buffer.address, buffer.count) == (0, 0)

    @pytest.mark.parametrize(
        ("dtype", "words"),
        [
            ((2, 32, 4), r"lanes=4.*; allowed are dtypes"),
            ((12, 8, 1), r"dtype code: 12.*; allowed are dtypes"),
        ],
    )
    def test_other_dtypes_are_refused(self, dtype: tuple[int, int, int], words: str) -> None:
        with pytest.raises(InvalidArgument, match=words):
            view(Producer(dtype=dtype))

    def test_the_producer_is_asked_for_no_copy(self) -> None:
        new, old = Producer(), Producer(version=None)
        view(new)
        view(old)
        assert new.asked[0]["copy"] is False
        assert old.asked == [{"stream": LEGACY}]

    @pytest.mark.parametrize("error", [BufferError, RuntimeError, TypeError, ValueError])
    def test_the_producers_refusal_is_passed_on(self, error: type[Exception]) -> None:
        class Refusing(Producer):
            def __dlpack__(self, **_: Any) -> Any:
                raise error("another device")

        with pytest.raises(InvalidArgument, match=r"Refusing was given .*viewed: another device"):
            view(Refusing())

    @pytest.mark.parametrize("given", [None, 7, (CUDA, 0)])
    def test_anything_but_a_capsule_is_refused(self, given: Any) -> None:
        class Wrong(Producer):
            def __dlpack__(self, **_: Any) -> Any:
                return given

        with pytest.raises(InvalidArgument, match="unused DLPack capsule"):
            view(Wrong())

    def test_without_cuda_core_the_error_names_the_package(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "cuda.core.utils", None)
        with pytest.raises(TransportError, match=r"cuda\.core cannot be imported.*r2ccl\[gpu\]"):
            view(Producer())


class TestTorch:
    """torch tensors are asked directly."""

    @pytest.fixture(autouse=True)
    def _torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        imported(monkeypatch, Torch())

    def test_a_tensor(self) -> None:
        memory = np.zeros((2, 3), np.float16)
        x = Torch.Tensor(memory)
        buffer = as_device_buffer(x, writable=True)
        assert (buffer.address, buffer.count, buffer.nbytes) == (start_of(memory), 6, 12)
        assert DTYPES[buffer.dtype_code] == np.float16
        assert (buffer.ordinal, buffer.owner) == (1, x)

    def test_types_that_numpy_lacks(self) -> None:
        for code, name in EXTENSIONS.items():
            x = Torch.Tensor(np.zeros(4, f"u{DTYPES[code].itemsize}"), name)
            assert view(x).dtype_code == code

    def test_the_stream_is_the_current_one_of_the_tensors_gpu(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert view(Torch.Tensor(np.zeros(4))).stream == 0x70AC + 1
        imported(monkeypatch, Torch(current=-1))  # 0 on GPU 1
        buffer = view(Torch.Tensor(np.zeros(4)))
        assert (buffer.stream, buffer.after) == (LEGACY, None)

    @pytest.mark.parametrize(
        ("facts", "words"),
        [
            ({"requires_grad": True}, r"cannot be viewed: it requires grad; pass x.detach\(\)$"),
            ({"layout": "torch.sparse_coo"}, r"layout is torch.sparse_coo; pass x.to_dense\(\)"),
            ({"is_lazy": "conj"}, "resolve_conj"),
            ({"is_lazy": "neg"}, "resolve_neg"),
            ({"dtype": "float8_e8m0fnu"}, "dtype float8_e8m0fnu was given: allowed are"),
            ({"is_cuda": False}, "is not an array in CUDA memory: pass input and output both"),
        ],
    )
    def test_what_cannot_be_viewed_is_refused(self, facts: dict[str, Any], words: str) -> None:
        with pytest.raises(InvalidArgument, match=words):
            view(Torch.Tensor(np.zeros(4, np.uint8), **facts))

    def test_strides_are_bytes(self) -> None:
        with pytest.raises(InvalidArgument, match=r"strides \(4, 16\) is not C-contiguous"):
            view(Torch.Tensor(np.zeros((4, 4), np.float32).T))

    def test_outputs_are_tensors_on_its_gpu(self) -> None:
        x = Torch.Tensor(np.zeros((6, 2), np.float32))
        assert like(x).shape == (6, 2)
        assert like(x, 4).shape == (4, 6, 2)
        part = like_part(x, 3)
        assert (type(part), part.shape, part.dtype) == (Torch.Tensor, (2, 2), x.dtype)
        assert part.device is x.device


class TestRealTensors:
    """Tensors of the torch that is installed, posing as a GPU's."""

    @pytest.fixture
    def posing(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        torch = pytest.importorskip("torch", reason="torch is not installed")

        class Posing(torch.Tensor):  # type: ignore[misc, name-defined]
            is_cuda = True

            def get_device(self) -> int:
                return 0

        current = SimpleNamespace(cuda_stream=0x5000)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
        return lambda x: x.as_subclass(Posing)

    @pytest.mark.parametrize("name", [d.name for d in DTYPES.values() if d.names is None])
    def test_every_dtype(self, posing: Any, name: str) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        x = torch.zeros(3, 2, dtype=getattr(torch, name))
        buffer = as_device_buffer(posing(x), writable=True)
        assert (buffer.address, buffer.count) == (x.data_ptr(), 6)
        assert (buffer.itemsize, buffer.stream) == (x.element_size(), 0x5000)
        assert DTYPES[buffer.dtype_code].name == name

    def test_no_elements(self, posing: Any) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        assert view(posing(torch.zeros(3, 0))).nbytes == 0

    def test_what_cannot_be_viewed_is_refused(self, posing: Any) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        for x, words in (
            (torch.zeros(4, requires_grad=True), r"x.detach\(\)"),
            (torch.zeros(4, dtype=torch.complex64).conj(), r"x.resolve_conj\(\)"),
            (torch.zeros(4, dtype=torch.complex64).conj().imag, r"resolve_neg\(\)"),
            (torch.zeros(4, 3).T, r"strides \(4, 12\) is not C-contiguous"),
            (torch.zeros(4, dtype=torch.float8_e4m3fnuz), "dtype float8_e4m3fnuz was given"),
        ):
            with pytest.raises(InvalidArgument, match=words):
                view(posing(x))


class TestCupy:
    """CuPy arrays have ``__cuda_array_interface__``; streams and GPUs are asked of CuPy."""

    def test_an_array(self, monkeypatch: pytest.MonkeyPatch) -> None:
        imported(monkeypatch, Cupy(stream=0x5000))
        memory = np.zeros((2, 3), np.int16)
        x = Cupy.ndarray(memory)
        buffer = as_device_buffer(x, writable=True)
        assert (buffer.address, buffer.count, buffer.owner) == (start_of(memory), 6, x)
        assert (buffer.ordinal, buffer.stream, buffer.after) == (2, 0x5002, None)

    def test_the_null_stream_is_the_legacy_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        imported(monkeypatch, Cupy(stream=0))
        assert view(Cupy.ndarray(np.zeros(4))).stream == LEGACY

    def test_outputs_are_on_its_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        imported(monkeypatch, Cupy())
        x = Cupy.ndarray(np.zeros((2, 6), ml_dtypes.bfloat16))
        assert like(x, 3).shape == (3, 2, 6)
        part = like_part(x, 3)
        assert (type(part), part.shape, part.dtype) == (Cupy.ndarray, (4,), x.dtype)
        assert part.device.id == 2
        assert view(part).dtype_code == BFLOAT16_CODE


class TestNumba:
    """Numba has no current stream; its arrays can have one."""

    @pytest.fixture(autouse=True)
    def _numba(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = ModuleType("numba.cuda.cudadrv.driver")
        vars(driver)["Stream"] = NumbaStream
        monkeypatch.setitem(sys.modules, driver.__name__, driver)
        imported(monkeypatch, Numba())

    @pytest.mark.parametrize(
        ("stream", "handle"), [(0, LEGACY), (NumbaStream(0), LEGACY), (NumbaStream(0x5000), 0x5000)]
    )
    def test_an_array(self, stream: Any, handle: int) -> None:
        buffer = view(Numba.DeviceNDArrayBase(np.zeros(4), stream))
        assert (buffer.ordinal, buffer.stream, buffer.after) == (3, handle, None)

    def test_outputs_are_on_its_gpu_and_stream(self) -> None:
        x = Numba.DeviceNDArrayBase(np.zeros((4, 2), np.float32), NumbaStream(7))
        made = like(x)
        assert (made.shape, made.dtype, made.stream) == (x.shape, x.dtype, x.stream)
        assert view(made).ordinal == 3


class TestRealNumba:
    """Arrays of the Numba that is installed, over memory that is none."""

    @pytest.fixture
    def array(self) -> Any:
        module = pytest.importorskip(
            "numba.cuda.cudadrv.devicearray", reason="this Numba has no CUDA", exc_type=ImportError
        )
        driver = sys.modules["numba.cuda.cudadrv.driver"]
        context = SimpleNamespace(device=SimpleNamespace(id=3))
        memory = driver.MemoryPointer(context, ctypes.c_void_p(0x7000), 4096)

        def make(shape: tuple[int, ...], first: int = 0, stream: Any = 0) -> Any:
            strides = np.empty(shape, np.float32).strides
            data = memory.view(4 * first) if first else memory
            return module.DeviceNDArray(shape, strides, np.float32, stream, data)

        return make

    def test_an_array(self, array: Any) -> None:
        buffer = as_device_buffer(array((3, 4)), writable=True)
        assert (buffer.address, buffer.count, buffer.ordinal) == (0x7000, 12, 3)
        assert (buffer.stream, buffer.after) == (LEGACY, None)

    def test_a_view(self, array: Any) -> None:
        buffer = as_device_buffer(array((3,), first=2), writable=True)
        assert (buffer.address, buffer.ordinal) == (0x7008, 3)

    def test_its_stream(self, array: Any) -> None:
        driver = sys.modules["numba.cuda.cudadrv.driver"]
        stream = object.__new__(driver.Stream)
        is_new = hasattr(stream, "__cuda_stream__")
        stream.handle = 0x5000 if is_new else ctypes.c_void_p(0x5000)
        assert view(array((3,), stream=stream)).stream == 0x5000


class TestWhatIsADeviceArray:
    """Cheap to say for all that is none."""

    @pytest.mark.parametrize(
        "x",
        [np.zeros(3), np.float32(1), np.ma.zeros(3), bytearray(3), [1.0], None, 3.0, "x",
         Producer(device=(CUDA_HOST, 0)), Producer(device=(ROCM, 0)), Producer(device=(1, 0))],
        ids=lambda x: type(x).__name__,
    )  # fmt: skip
    def test_not_these(self, x: Any) -> None:
        assert not is_device_array(x)
        with pytest.raises(InvalidArgument, match="is not an array in CUDA memory"):
            view(x)

    @pytest.mark.parametrize("x", [Interface(), Producer(), Producer(device=(MANAGED, 0))])
    def test_but_these(self, x: Any) -> None:
        assert is_device_array(x)

    def test_not_a_real_tensor_on_the_host(self) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        assert not is_device_array(torch.zeros(3))

    def test_an_interface_elsewhere_is_not_touched(self) -> None:
        class OnHost:
            def __dlpack_device__(self) -> tuple[int, int]:
                return (1, 0)

            @property
            def __cuda_array_interface__(self) -> Any:
                raise RuntimeError("not on a GPU")

        assert not is_device_array(OnHost())

    def test_no_library_is_imported(self) -> None:
        script = (
            "import sys, numpy as np\n"
            "from r2ccl.runtime.arrays.cuda import is_device_array\n"
            "from r2ccl.runtime.arrays.streams import stream_of\n"
            "is_device_array(bytearray(3)); stream_of(5, 1)\n"
            "print({'torch', 'cupy', 'numba', 'cuda'} & sys.modules.keys())"
        )
        run = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
        )
        assert run.stdout.strip() == "set()"


def test_an_output_of_an_unknown_library_is_asked_for() -> None:
    for x in (Interface(), Producer()):
        for make in (like, lambda x: like_part(x, 2)):
            with pytest.raises(InvalidArgument, match=r"without an output.*pass out="):
                make(x)


def test_parts_are_equal_and_point_into_the_memory() -> None:
    whole = view(Interface(shape=(6,), data=(0x7000, False), stream=9))
    parts = [part_of(whole, number, 3) for number in range(3)]
    assert [part.address for part in parts] == [0x7000, 0x7008, 0x7010]
    assert {(part.count, part.nbytes) for part in parts} == {(2, 8)}
    assert {(part.owner, part.stream, part.after) for part in parts} == {(whole.owner, 9, 9)}
    with pytest.raises(InvalidArgument, match="6 elements of float32 cannot be divided equally"):
        part_of(whole, 0, 4)


class TestInPlace:
    """Input and output are the same memory or have none in common."""

    @staticmethod
    def at(address: int, count: int = 4, typestr: str = "<f4") -> DeviceBuffer:
        return view(Interface(shape=(count,), data=(address, False), typestr=typestr))

    def test_same_memory(self) -> None:
        assert is_in_place(self.at(0x7000), self.at(0x7000))

    @pytest.mark.parametrize("address", [0x7010, 0x6FF0])
    def test_adjacent_memory_is_disjoint(self, address: int) -> None:
        assert not is_in_place(self.at(0x7000), self.at(address))

    def test_no_elements_never_overlap(self) -> None:
        assert not is_in_place(self.at(0, 0), self.at(0, 0))
        assert not is_in_place(
            self.at(0x7004, 0), self.at(0x7000, 0), whole_output=self.at(0x7000, 8)
        )

    @pytest.mark.parametrize(
        ("distance", "where"), [(4, "4 bytes after"), (-12, "12 bytes before")]
    )
    def test_partial_overlap_is_refused(self, distance: int, where: str) -> None:
        words = rf"starts {where} the start of the input.*16 bytes"
        with pytest.raises(InvalidArgument, match=words):
            is_in_place(self.at(0x7000), self.at(0x7000 + distance))

    def test_a_part_of_a_larger_output(self) -> None:
        whole = self.at(0x7000, 12)
        own = part_of(whole, 1, 3)
        assert is_in_place(self.at(0x7010), own, whole_output=whole)
        assert not is_in_place(self.at(0x7030), own, whole_output=whole)
        with pytest.raises(InvalidArgument, match="overlap in part"):
            is_in_place(self.at(0x7020), own, whole_output=whole)

    @pytest.mark.parametrize(("count", "typestr"), [(5, "<f4"), (4, "<f8"), (4, "<i4")])
    def test_another_count_or_dtype_is_refused(self, count: int, typestr: str) -> None:
        with pytest.raises(InvalidArgument, match="input has 4 elements of float32, the output"):
            is_in_place(self.at(0x7000), self.at(0x9000, count, typestr))


class TestStreamsOfACall:
    """A call goes to one stream and is ordered with the others it has to."""

    def test_without_a_stream_it_goes_where_the_inputs_library_works(self) -> None:
        one, other = view(Interface(stream=7)), view(Interface(stream=8))
        assert streams_of(None, one) == (7, ())
        assert streams_of(None, one, one) == (7, ())
        assert streams_of(None, one, other) == (7, (8,))

    def test_with_a_stream_only_producers_that_ask_are_ordered(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        imported(monkeypatch, Cupy(stream=0x5000))
        cupy, other = view(Cupy.ndarray(np.zeros(4))), view(Interface(stream=8))
        assert streams_of(9, cupy) == (9, ())
        assert streams_of(9, cupy, other) == (9, (8,))
        assert streams_of(9, other, other) == (9, (8,))
        assert streams_of(8, other) == (8, ())
        assert streams_of(9, view(Producer())) == (9, (LEGACY,))
        assert streams_of(0, view(Producer())) == (LEGACY, ())

    def test_what_is_no_stream_is_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="allowed are None"):
            streams_of("now", view(Interface()))

    def test_a_stream_of_any_library_will_do(self) -> None:
        class Given:
            def __cuda_stream__(self) -> tuple[int, int]:
                return (0, 0x5000)

        assert streams_of(Given(), view(Interface())) == (Stream(0x5000), ())

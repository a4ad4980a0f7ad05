"""What becomes a buffer, and what is refused with which words."""

from __future__ import annotations

import array
import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from r2ccl.dtypes import CODES, DTYPES, EXTENSIONS, pair_dtype, raw_dtype
from r2ccl.errors import InvalidArgument
from r2ccl.runtime import arguments
from r2ccl.runtime.arguments import as_buffer, view
from r2ccl.runtime.arrays.buffers import (
    Buffer,
    JaxBuffer,
    is_in_place,
    like,
    like_flat,
    like_part,
    part_of,
)
from r2ccl.types import ReduceOp


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, id=d.name) for d in DTYPES.values() if d.names is None]
)
def test_an_array_of_every_dtype_is_viewed_flat(dtype: np.dtype[Any]) -> None:
    x = np.zeros((3, 4, 5), dtype)

    buffer = as_buffer(x, writable=True)
    buffer.array[7] = 1

    assert x.reshape(-1)[7] == 1
    assert (buffer.count, buffer.itemsize, buffer.nbytes) == (60, dtype.itemsize, x.nbytes)
    assert DTYPES[buffer.dtype_code] == buffer.array.dtype == dtype
    assert buffer.array.shape == (60,)
    assert buffer.owner is x


@pytest.mark.parametrize("dtype", ["(2,f4", "f4,(", "nothing", 7])
def test_empty_refuses_what_is_no_dtype(dtype: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^shape=3, dtype="):
        arguments.form_of(3, dtype, None)


@pytest.mark.parametrize("shape", [1 << 62, 1 << 70, (1 << 40, 1 << 40)])
def test_no_array_is_larger_than_memory_can_be(shape: Any) -> None:
    with pytest.raises(InvalidArgument, match="no array can have"):
        arguments.form_of(shape, None, None)
    x, displs = np.ones(1), (0, 1 << 62)
    with pytest.raises(InvalidArgument, match="no array can have"):
        arguments.allgatherv(x, None, (1, 1), displs, 0, 2)


@pytest.mark.parametrize("value", ["f4", "f8", "i4", "i8"])
def test_pairs_are_viewed_as_bytes_of_whole_elements(value: str) -> None:
    x = np.zeros((3, 4), pair_dtype(value))

    buffer = as_buffer(x, writable=True)
    buffer.array[5] = np.array((2, 7), x.dtype).tobytes()

    assert x[1, 1].tolist() == (2, 7)
    assert DTYPES[buffer.dtype_code] == x.dtype
    assert buffer.array.dtype == raw_dtype(x.dtype)
    assert (buffer.count, buffer.itemsize, buffer.nbytes) == (12, x.dtype.itemsize, x.nbytes)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
def test_shapes_without_dimensions_or_elements(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32)

    buffer = as_buffer(x, writable=True)
    buffer.array[...] = 2

    assert buffer.array.shape == (x.size,)
    assert (x == 2).all()


def test_views_of_whole_rows_share_memory() -> None:
    x = np.arange(20, dtype=np.int16).reshape(4, 5)

    buffer = as_buffer(x[1:3], writable=True)
    buffer.array[0] = -1

    assert x[1, 0] == -1
    assert buffer.count == 10


def test_another_spelling_of_a_dtype_has_the_same_number() -> None:
    assert as_buffer(np.zeros(2, np.longlong), writable=False).dtype_code == CODES[np.dtype("i8")]


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_ndarray_subclasses_lose_their_behaviour_only() -> None:
    x = np.matrix([[1.0, 2.0], [3.0, 4.0]])  # never becomes 1-D by itself

    assert as_buffer(x, writable=True).array.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("x", "name"),
    [
        (bytearray(8), "uint8"),
        (array.array("f", [1, 2]), "float32"),
        ((ctypes.c_int32 * 3)(), "int32"),
        (memoryview(bytearray(16)).cast("d"), "float64"),
    ],
)
def test_the_buffer_protocol_shares_memory(x: Any, name: str) -> None:
    buffer = as_buffer(x, writable=True)
    buffer.array[0] = 77

    assert x[0] == 77
    assert buffer.array.dtype == name


def test_read_only_memory_is_an_input_but_not_an_output() -> None:
    frozen = np.ones(4, np.float32)
    frozen.flags.writeable = False

    for x in (frozen, b"abcd", np.float32(3)):
        assert as_buffer(x, writable=False).count in (1, 4)
        with pytest.raises(InvalidArgument, match=r"read-only.*pass a copy"):
            as_buffer(x, writable=True)


def unaligned() -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(17), np.uint8)[1:].view(np.float32)


class DeviceArray:
    """Looks as a CuPy array does to those who ask."""

    __cuda_array_interface__ = {"version": 3}  # noqa: RUF012


class DeviceTensor:
    """Looks as a tensor in CUDA memory does (kDLCUDA is 2)."""

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("must not be exported")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([1.0, 2.0], "builtins.list was given: .*; allowed are NumPy arrays"),
        ("text", "builtins.str was given"),
        (None, "builtins.NoneType was given"),
        (3.0, "builtins.float was given"),
        (unaligned(), "not aligned to 4 bytes"),
        (np.zeros(4, ">f4"), r"byte-swapped.*newbyteorder"),
        (np.zeros(4, object), "dtype object.*allowed are"),
        (np.zeros(4, "U3"), "dtype <U3.*allowed are"),
        (np.zeros(4, "M8[s]"), "dtype datetime64.*allowed are"),
        (np.zeros(4, [("a", "f4")]), "allowed are.*float32"),
        (np.zeros(4, np.longdouble), "allowed are.*complex128"),
        (np.zeros(4, ml_dtypes.float8_e4m3b11fnuz), "float8_e4m3b11fnuz.*allowed are"),
        (np.ma.zeros(4), "masked array"),
        (DeviceArray(), "device memory.*copy it to the host"),
        (DeviceTensor(), "device memory .*type 2.*copy it to the host"),
    ],
)
def test_everything_else_is_refused_with_the_reason(x: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        as_buffer(x, writable=False)


@pytest.mark.parametrize(
    "x",
    [
        np.arange(16.0).reshape(4, 4)[:, 1],
        np.arange(16.0).reshape(4, 4).T,
        np.arange(8)[::-1],
        np.broadcast_to(np.float32(1), (4,)),
        memoryview(bytearray(range(8)))[::2],
    ],
)
def test_inputs_that_are_not_contiguous_are_copied_in_c_order(x: Any) -> None:
    buffer = as_buffer(x, writable=False)
    assert buffer.array.tolist() == np.asarray(x).ravel().tolist()
    assert buffer.array.flags.c_contiguous
    assert not np.shares_memory(buffer.array, np.asarray(x))


@pytest.mark.parametrize("x", [np.zeros((4, 4))[:, 1], memoryview(bytearray(8))[::2]])
def test_outputs_must_be_contiguous(x: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"strides .* is not C-contiguous"):
        as_buffer(x, writable=True)


class JaxArray:
    """An array as JAX has them on the host: read-only, its buffer protocol lacks some types."""

    __module__ = "jaxlib._jax"

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values
        self.values.flags.writeable = False

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self.values

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise RuntimeError("NumPy's reader lacks this type")

    is_fully_addressable = True
    ndevices = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def sharding(self) -> Any:
        return SimpleNamespace(device_set=set(range(self.ndevices)))

    def is_deleted(self) -> bool:
        return False


class JaxTracer(JaxArray):
    """An array within a function that JAX traces."""

    def __dlpack_device__(self) -> tuple[int, int]:
        raise AttributeError("JaxTracer has no attribute __dlpack_device__")


class DeletedJaxArray(JaxArray):
    """An array that was deleted or donated."""

    def __dlpack_device__(self) -> tuple[int, int]:
        raise TypeError("object of type 'NoneType' has no len()")

    def is_deleted(self) -> bool:
        return True


class ShardedJaxArray(JaxArray):
    """An array on three devices of this process."""

    ndevices = 3

    def __dlpack_device__(self) -> tuple[int, int]:
        raise BufferError("__dlpack__ only supported for unsharded arrays.")


class RemoteJaxArray(ShardedJaxArray):
    """An array on three devices, some of other processes."""

    is_fully_addressable = False


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The module ``jax``, as far as the library uses it to view arrays."""
    module = SimpleNamespace(Array=JaxArray, core=SimpleNamespace(Tracer=JaxTracer))
    monkeypatch.setitem(sys.modules, "jax", module)
    return module


@pytest.mark.usefixtures("jax")
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)])
def test_an_array_of_jax_is_viewed_but_not_written(dtype: np.dtype[Any]) -> None:
    x = JaxArray(np.arange(4).astype(dtype))
    found = view(x, writable=False)
    assert isinstance(found, JaxBuffer)
    assert found.array.dtype == dtype
    assert np.shares_memory(found.array, x.values)
    for make in (view, as_buffer):
        with pytest.raises(InvalidArgument, match=r"immutable.*leave out `out`.*np\.array\(x\)"):
            make(x, writable=True)


@pytest.mark.usefixtures("jax")
@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (100, 3)])
def test_an_output_for_jax_is_memory_that_jax_can_share(shape: tuple[int, ...]) -> None:
    x = JaxArray(np.ones(shape, ml_dtypes.bfloat16))
    for out, form in ((like(x), shape), (like(x, 2), (2, *shape)), (like_flat(x, 5), (5,))):
        assert type(out) is np.ndarray
        assert (out.shape, out.dtype, out.flags.c_contiguous) == (form, x.values.dtype, True)
        assert out.size == 0 or out.ctypes.data % 64 == 0


@pytest.mark.usefixtures("jax")
def test_a_call_in_place_for_jax_has_a_new_output() -> None:
    x, y = JaxArray(np.arange(4.0)), np.zeros(4)
    for request in (
        arguments.allreduce(x, None, ReduceOp.SUM),
        arguments.broadcast(x, None, 0, 1),
        arguments.reduce(x, None, ReduceOp.SUM, 0, 0),
        arguments.scan(x, None, ReduceOp.SUM, False),
        arguments.scan(x, None, ReduceOp.SUM, True),
    ):
        assert isinstance(request.output, Buffer)
        assert np.shares_memory(request.output.array, request.result)
        assert not np.shares_memory(request.result, x.values)
        assert not request.is_in_place
    assert request.result.tolist() == x.values.tolist()  # exscan on rank 0 returns its input
    assert arguments.allreduce(x, y, ReduceOp.SUM).result is y
    for out in (x, JaxArray(np.zeros(4))):
        with pytest.raises(InvalidArgument, match="immutable"):
            arguments.allreduce(x, out, ReduceOp.SUM)


@pytest.mark.usefixtures("jax")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (JaxTracer, r"JaxTracer .* traces \(jit, grad, vmap\).*outside of the function"),
        (DeletedJaxArray, "deleted, or donated to a jitted function; make the call before"),
        (ShardedJaxArray, r"sharded over 3 devices.*shards\[i\]\.data, or np\.asarray\(x\)"),
        (RemoteJaxArray, r"sharded over 3 devices; pass one shard .*shards\[i\]\.data$"),
    ],
)
def test_arrays_of_jax_without_memory_here_are_refused(kind: type[JaxArray], words: str) -> None:
    x = kind(np.ones(4))
    for make in (view, as_buffer):
        with pytest.raises(InvalidArgument, match=words):
            make(x, writable=False)
    for out in (None, np.ones(4)):
        with pytest.raises(InvalidArgument, match=words):
            arguments.allreduce(x, out, ReduceOp.SUM)
    with pytest.raises(InvalidArgument, match=words):
        arguments.allgather(x, None, 0, 2)


def test_a_released_memoryview_is_refused() -> None:
    view = memoryview(bytearray(4))
    view.release()

    with pytest.raises(InvalidArgument, match="released"):
        as_buffer(view, writable=False)


def test_parts_are_equal_and_share_memory() -> None:
    x = np.arange(6, dtype=np.int16)
    whole = as_buffer(x, writable=True)
    parts = [part_of(whole, number, 3) for number in range(3)]
    assert [part.array.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert {(part.count, part.itemsize, part.nbytes) for part in parts} == {(2, 2, 4)}
    parts[1].array[:] = 9
    assert x.tolist() == [0, 1, 9, 9, 4, 5]
    with pytest.raises(InvalidArgument, match="6 elements of int16 cannot be divided equally"):
        part_of(whole, 0, 4)


@pytest.mark.parametrize(
    ("shape", "nparts", "part"),
    [((6, 2), 3, (2, 2)), ((2, 6), 3, (4,)), ((6,), 2, (3,)), ((0, 4), 5, (0, 4)), ((), 1, (1,))],
)
def test_a_part_has_rows_if_they_can_be_shared_out(
    shape: tuple[int, ...], nparts: int, part: tuple[int, ...]
) -> None:
    made = like_part(np.zeros(shape, np.float32), nparts)
    assert (made.shape, made.dtype) == (part, np.float32)


def test_an_output_for_every_rank_has_a_dimension_more() -> None:
    assert like(np.zeros((2, 3)), 4).shape == (4, 2, 3)
    assert like(np.zeros(()), 4).shape == (4,)


def test_outputs_look_like_their_input() -> None:
    x = np.asfortranarray(np.zeros((3, 4), ml_dtypes.bfloat16))

    out = like(x)

    assert (out.shape, out.dtype, out.flags.c_contiguous) == (x.shape, x.dtype, True)
    assert like(np.zeros((), np.int8)).shape == ()
    assert like(bytearray(5)).shape == (5,)
    with pytest.raises(InvalidArgument, match=r"builtins\.list"):
        like([1.0])


class NoMemory:
    """A tensor of torch's device meta, or an array within jax.jit, to those who ask for memory."""

    def __init__(self, device: Any, error: type[Exception]) -> None:
        self.device, self.error = device, error

    def __dlpack_device__(self) -> Any:
        if self.device is None:
            raise self.error("there is no memory")
        return self.device

    def __dlpack__(self, **_: Any) -> Any:
        raise self.error("there is no memory")


@pytest.mark.parametrize("device", [None, (1, 0), (2, 0)])
@pytest.mark.parametrize("error", [AttributeError, KeyError, OSError, ValueError, AssertionError])
def test_any_error_of_an_array_is_an_invalid_argument(device: Any, error: type[Exception]) -> None:
    x = NoMemory(device, error)
    with pytest.raises(InvalidArgument, match=r"NoMemory was given and cannot be viewed: ") as told:
        view(x, writable=False)
    assert isinstance(told.value.__cause__, error)


@pytest.mark.parametrize("device", [3, (), ("cpu", 0)])
def test_a_device_that_is_none_is_refused(device: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"NoMemory was given and cannot be viewed: "):
        view(NoMemory(device, ValueError), writable=True)


@pytest.mark.usefixtures("jax")
def test_another_error_of_jax_is_the_reason() -> None:
    class Broken(JaxArray):
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
            raise TypeError("no value")

    with pytest.raises(InvalidArgument, match=r"Broken was given and .*: no value"):
        view(Broken(np.ones(4)), writable=False)


class TestInPlace:
    """Input and output are the same memory or have none in common."""

    def test_same_memory(self) -> None:
        x = np.zeros((2, 3), np.float32)
        assert is_in_place(as_buffer(x, writable=False), as_buffer(x, writable=True))
        assert is_in_place(as_buffer(x, writable=False), as_buffer(x.reshape(6), writable=True))

    def test_disjoint_memory(self) -> None:
        x = np.zeros(8, np.float32)
        low, high = as_buffer(x[:4], writable=False), as_buffer(x[4:], writable=True)
        assert not is_in_place(low, high)
        assert not is_in_place(high, low)

    def test_no_elements_never_overlap(self) -> None:
        x = np.zeros(8, np.float32)
        first, second = as_buffer(x[3:3], writable=False), as_buffer(x[4:4], writable=True)
        assert not is_in_place(first, second)

    def test_partial_overlap_is_refused(self) -> None:
        x = np.zeros(8, np.float32)
        with pytest.raises(
            InvalidArgument, match=r"4 bytes after the start of the input.*16 bytes"
        ):
            is_in_place(as_buffer(x[:4], writable=False), as_buffer(x[1:5], writable=True))
        with pytest.raises(InvalidArgument, match="starts 4 bytes before the start of the input"):
            is_in_place(as_buffer(x[1:5], writable=False), as_buffer(x[:4], writable=True))

    def test_a_part_of_a_larger_output(self) -> None:
        out = np.zeros(6)
        whole = as_buffer(out, writable=True)
        own = part_of(whole, 1, 3)
        assert is_in_place(as_buffer(out[2:4], writable=False), own, whole_output=whole)
        assert not is_in_place(as_buffer(np.ones(2), writable=False), own, whole_output=whole)
        with pytest.raises(InvalidArgument, match="the output starts 16 bytes after the start"):
            is_in_place(as_buffer(out[:2], writable=False), own, whole_output=whole)

    def test_a_part_of_a_larger_input(self) -> None:
        x = np.zeros(6)
        whole = as_buffer(x, writable=False)
        own = part_of(whole, 1, 3)
        assert is_in_place(own, as_buffer(x[2:4], writable=True), whole_source=whole)
        assert not is_in_place(own, as_buffer(np.ones(2), writable=True), whole_source=whole)
        with pytest.raises(
            InvalidArgument, match="the output starts 16 bytes before the start of this"
        ):
            is_in_place(own, as_buffer(x[:2], writable=True), whole_source=whole)
        with pytest.raises(InvalidArgument, match=r"the input has 2 elements.*output has 3"):
            is_in_place(own, as_buffer(np.ones(3), writable=True), whole_source=whole)

    @pytest.mark.parametrize(
        "out", [np.zeros(5, np.float32), np.zeros(4, np.float64), np.zeros(4, np.int32)]
    )
    def test_another_count_or_dtype_is_refused(self, out: np.ndarray[Any, Any]) -> None:
        source = as_buffer(np.zeros(4, np.float32), writable=False)
        with pytest.raises(InvalidArgument, match=f"4 elements of float32.*{out.dtype}"):
            is_in_place(source, as_buffer(out, writable=True))


class TestTorch:
    """Host tensors come in through DLPack; torch is never imported by the library."""

    def test_a_tensor_shares_memory(self) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        x = torch.zeros(2, 3)

        buffer = as_buffer(x, writable=True)
        buffer.array[4] = 5

        assert float(x[1, 1]) == 5.0
        assert buffer.array.dtype == np.float32

    @pytest.mark.parametrize("name", EXTENSIONS.values())
    def test_types_that_numpy_lacks_share_memory(self, name: str) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        x = torch.zeros(4, dtype=getattr(torch, name))

        buffer = as_buffer(x, writable=True)
        buffer.array[1] = 1.5

        assert x.float().tolist() == [0.0, 1.5, 0.0, 0.0]
        assert buffer.array.dtype == getattr(ml_dtypes, name)

    def test_bool_shares_memory(self) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        x = torch.zeros(2, dtype=torch.bool)

        as_buffer(x, writable=True).array[1] = True

        assert x.tolist() == [False, True]

    def test_outputs_are_tensors(self) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        x = torch.zeros(2, 3, dtype=torch.bfloat16)

        out = like(x)

        assert (type(out), out.shape, out.dtype) == (torch.Tensor, x.shape, x.dtype)

    def test_what_cannot_be_viewed_is_refused(self) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        for x, words in (
            (torch.zeros(4, requires_grad=True), "requires? grad"),
            (torch.zeros(4).to_sparse(), "torch.Tensor was given and cannot be viewed"),
        ):
            with pytest.raises(InvalidArgument, match=words):
                as_buffer(x, writable=False)

    def test_it_is_not_imported(self) -> None:
        script = (
            "import sys, numpy as np; from r2ccl.runtime.arguments import as_buffer\n"
            "from r2ccl.runtime.arrays.buffers import like\n"
            "like(bytearray(3)); as_buffer(np.ones(3), writable=True)\n"
            "print('torch' in sys.modules)"
        )
        run = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
        )
        assert run.stdout.strip() == "False"

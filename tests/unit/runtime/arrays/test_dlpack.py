"""DLPack capsules say what their arrays are, and are let go without being consumed."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from support.lookalikes import CUDA, MANAGED, Producer

from r2ccl.dtypes import BFLOAT16_CODE, DTYPES
from r2ccl.errors import InvalidArgument
from r2ccl.runtime.arrays import dlpack
from r2ccl.runtime.arrays.streams import LEGACY

VERSIONS = pytest.mark.parametrize("version", [(1, 0), (1, 7), None])


class Older:
    """Exports as before there were versions."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, stream: int | None = None) -> Any:
        return self.array.__dlpack__()


@pytest.mark.parametrize("wrap", [lambda x: x, Older], ids=["versioned", "unversioned"])
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, id=d.name) for code, d in DTYPES.items() if code != BFLOAT16_CODE],
)
def test_numpys_capsules_say_what_the_array_is(dtype: np.dtype[Any], wrap: Any) -> None:
    whole = np.zeros((4, 3, 5), dtype)
    x = whole[1:, :, ::2]

    tensor = dlpack.view(wrap(x), None)

    assert tensor.address == x.ctypes.data
    assert (tensor.shape, tensor.strides) == (x.shape, x.strides)
    assert (tensor.dtype, tensor.device, tensor.is_read_only) == (dtype.name, (1, 0), False)


@pytest.mark.parametrize("wrap", [lambda x: x, Older], ids=["versioned", "unversioned"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int16", "complex64", "bool"])
def test_torchs_capsules_say_what_the_tensor_is(name: str, wrap: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.zeros(4, 3, 6, dtype=getattr(torch, name))[1:, :, ::3]

    tensor = dlpack.view(wrap(x), None)

    assert tensor.address == x.data_ptr()
    assert tensor.shape == tuple(x.shape)
    assert tensor.strides == tuple(each * x.element_size() for each in x.stride())
    assert (tensor.dtype, tensor.device) == (name, (1, 0))


def test_read_only_memory_is_known_as_such() -> None:
    x = np.zeros(3)
    x.flags.writeable = False

    assert dlpack.view(x, None).is_read_only


@VERSIONS
def test_every_field_is_read_from_where_the_header_has_it(version: tuple[int, int] | None) -> None:
    x = Producer(0x7F00_1234_5000, (2, 3), (3, 1), dtype=(4, 16, 1), device=(MANAGED, 5),
                 offset=48, version=version)  # fmt: skip

    tensor = dlpack.view(x, LEGACY)

    assert tensor.address == 0x7F00_1234_5000 + 48
    assert (tensor.shape, tensor.strides) == ((2, 3), (6, 2))
    assert (tensor.dtype, tensor.device) == ("bfloat16", (MANAGED, 5))


@VERSIONS
def test_no_strides_mean_c_order_no_pointer_means_no_elements(
    version: tuple[int, int] | None,
) -> None:
    tensor = dlpack.view(Producer(0, (3, 0), version=version), LEGACY)

    assert (tensor.address, tensor.shape, tensor.strides) == (0, (3, 0), None)
    assert dlpack.view(Producer(shape=(), version=version), LEGACY).shape == ()


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ((2, 64, 1), "float64"),
        ((6, 8, 1), "bool"),
        ((2, 32, 4), "DLPack 2 (32 bits, 4 lanes)"),
        ((10, 8, 1), "DLPack 10 (8 bits, 1 lanes)"),
        ((17, 4, 1), "DLPack 17 (4 bits, 1 lanes)"),
    ],
)
def test_dtypes_have_numpys_names_where_numpy_has_them(
    dtype: tuple[int, int, int], name: str
) -> None:
    assert dlpack.view(Producer(dtype=dtype), LEGACY).dtype == name


def test_the_producer_is_told_the_stream_and_asked_for_no_copy() -> None:
    new, old = Producer(), Producer(version=None)

    dlpack.view(new, LEGACY)
    dlpack.view(old, LEGACY)

    assert new.asked == [{"stream": 1, "max_version": (1, 1), "copy": False}]
    assert old.asked == [{"stream": 1}]


@VERSIONS
def test_a_capsule_lives_as_long_as_its_tensor_unconsumed(
    version: tuple[int, int] | None,
) -> None:
    x = Producer(version=version)
    tensor = dlpack.view(x, LEGACY)
    assert x.released == []

    del tensor

    assert x.released == [b"dltensor" if version is None else b"dltensor_versioned"]


def test_letting_go_runs_the_deleter_of_a_real_producer() -> None:
    x = np.zeros(3)
    before = sys.getrefcount(x)

    tensor = dlpack.view(x, None)
    assert sys.getrefcount(x) == before + 1
    del tensor

    assert sys.getrefcount(x) == before


@pytest.mark.parametrize("version", [(0, 8), (2, 0)])
def test_a_layout_that_is_not_known_is_not_read(version: tuple[int, int]) -> None:
    x = Producer(shape=(1, 2, 3), version=version)

    with pytest.raises(InvalidArgument, match=rf"speaks DLPack {version[0]}\.{version[1]}"):
        dlpack.view(x, LEGACY)

    assert x.released == [b"dltensor_versioned"]


def test_a_copy_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="a copy, which would not get a result"):
        dlpack.view(Producer(flags=2), LEGACY)


@pytest.mark.parametrize("error", [BufferError, RuntimeError, TypeError, ValueError])
def test_what_the_producer_says_is_passed_on(error: type[Exception]) -> None:
    class Refusing:
        def __dlpack__(self, **_: Any) -> Any:
            raise error("another device")

    with pytest.raises(InvalidArgument, match=r"Refusing was given .*viewed: another device"):
        dlpack.view(Refusing(), LEGACY)


def test_something_else_than_a_fresh_capsule_is_refused() -> None:
    class Wrong:
        def __init__(self, capsule: Any) -> None:
            self.capsule = capsule

        def __dlpack__(self, **_: Any) -> Any:
            return self.capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    consumed = Wrong(np.zeros(3).__dlpack__())
    np.from_dlpack(consumed)
    for x in (consumed, Wrong(None), Wrong(7), Wrong((CUDA, 0))):
        with pytest.raises(InvalidArgument, match="no capsule of a tensor"):
            dlpack.view(x, LEGACY)

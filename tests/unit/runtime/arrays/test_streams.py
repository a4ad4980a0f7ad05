"""Every spelling of a stream becomes its handle; what is none is refused."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import Any

import pytest

from r2ccl.device.base import Stream
from r2ccl.errors import InvalidArgument
from r2ccl.runtime.arrays.streams import LEGACY, PER_THREAD, producer_stream, stream_of

DEFAULT = Stream(0xDEF)


def test_none_is_the_stream_the_library_works_on() -> None:
    assert stream_of(None, DEFAULT) == DEFAULT


@pytest.mark.parametrize(
    ("handle", "stream"),
    [(0, LEGACY), (1, LEGACY), (2, PER_THREAD), (0x55D0_1234, 0x55D0_1234), (2**64 - 1, 2**64 - 1)],
)
def test_a_handle_is_itself_and_the_legacy_stream_has_one_name(handle: int, stream: int) -> None:
    assert stream_of(handle, DEFAULT) == stream


@pytest.mark.parametrize("given", [True, False, -1, 2**64, 1.0, "0", b"", object(), (0, 5), []])
def test_everything_else_is_refused_with_what_is_allowed(given: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^stream=.*: allowed are None.*__cuda_stream__"):
        stream_of(given, DEFAULT)


class Method:
    """The protocol as it is."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __cuda_stream__(self) -> Any:
        return self.answer


class Property(Method):
    """The protocol as it was drafted."""

    __cuda_stream__ = property(lambda self: self.answer)


@pytest.mark.parametrize("kind", [Method, Property])
def test_the_protocol_gives_a_handle(kind: type[Method]) -> None:
    assert stream_of(kind((0, 0x5000)), DEFAULT) == 0x5000
    assert stream_of(kind((0, 0)), DEFAULT) == LEGACY


@pytest.mark.parametrize("answer", [(1, 0x5000), (0, 1, 2), (0,), [0, 5], (0, "5"), 5])
@pytest.mark.parametrize("kind", [Method, Property])
def test_another_version_of_the_protocol_is_refused(kind: type[Method], answer: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"__cuda_stream__ returned .*pass the handle itself"):
        stream_of(kind(answer), DEFAULT)


class Plain:
    """A stream of a library from before the protocol, and everything else that has a handle."""

    def __init__(self, handle: Any) -> None:
        self.ptr = self.cuda_stream = self.handle = handle


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.cuda", "Stream"),
        ("cupy.cuda", "Stream"),
        ("cupy.cuda", "ExternalStream"),
        ("numba.cuda.cudadrv.driver", "Stream"),
    ],
)
def test_streams_of_libraries_from_before_the_protocol(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    fake = ModuleType(module)
    setattr(fake, name, Plain)
    monkeypatch.setitem(sys.modules, module, fake)

    assert stream_of(Plain(0x5000), DEFAULT) == 0x5000
    assert stream_of(Plain(0), DEFAULT) == LEGACY


def test_what_has_a_pointer_but_is_no_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event of CuPy's has ``ptr`` too: as a stream it would crash the driver."""
    cupy = ModuleType("cupy.cuda")
    vars(cupy).update(Stream=type("Stream", (), {}), Event=Plain)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy)

    with pytest.raises(InvalidArgument, match="allowed are None"):
        stream_of(Plain(0x5000), DEFAULT)


@pytest.mark.parametrize(("handle", "stream"), [(0x5000, 0x5000), (0, LEGACY)])
def test_numbas_own_class(handle: int, stream: int) -> None:
    driver = pytest.importorskip(
        "numba.cuda.cudadrv.driver", reason="this Numba has no CUDA", exc_type=ImportError
    )
    real = object.__new__(driver.Stream)
    # From before the protocol it holds ctypes' type, since then one that is an integer.
    has_protocol = hasattr(real, "__cuda_stream__")
    real.handle = handle if has_protocol else ctypes.c_void_p(handle)
    assert stream_of(real, DEFAULT) == stream


@pytest.mark.parametrize(("handle", "stream"), [(0x5000, 0x5000), (0, LEGACY)])
def test_the_bindings_own_class(handle: int, stream: int) -> None:
    driver = pytest.importorskip(
        "cuda.bindings.driver", reason="cuda.bindings is not installed", exc_type=ImportError
    )
    given = driver.CUstream(handle)
    if not hasattr(given, "__cuda_stream__"):
        pytest.skip("this cuda.bindings has no __cuda_stream__")
    assert stream_of(given, DEFAULT) == stream


class TestOfTheInterface:
    """The entry ``stream`` of ``__cuda_array_interface__``, version 3."""

    @pytest.mark.parametrize("entry", [None, 1, 2, 0x5000])
    def test_what_it_may_say(self, entry: int | None) -> None:
        assert producer_stream(object(), entry) == entry

    @pytest.mark.parametrize("entry", [0, -1, 2**64, "1", 1.0, True])
    def test_what_it_must_not_say(self, entry: Any) -> None:
        with pytest.raises(InvalidArgument, match=r"'stream' is .*allowed are None, 1"):
            producer_stream(object(), entry)

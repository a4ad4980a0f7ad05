"""Arrays and libraries that imitate those of a machine with a GPU.

Addresses are made up, or those of host memory posing as GPU memory: nothing may be read from them.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pytest

CUDA, CUDA_HOST, ROCM, MANAGED = 2, 3, 10, 13


class Interface:
    """Array of an unknown library that has only ``__cuda_array_interface__``."""

    def __init__(self, **entries: Any) -> None:
        plain = {"version": 3, "shape": (4,), "typestr": "<f4", "data": (0x7000, False)}
        self.__cuda_array_interface__ = {**plain, **entries}


def posing(array: np.ndarray[Any, Any], **entries: Any) -> Interface:
    """Return an array interface that presents a NumPy array as GPU memory."""
    return Interface(
        shape=array.shape,
        strides=array.strides,
        typestr=array.dtype.str,
        data=(array.__array_interface__["data"][0], not array.flags.writeable),
        **entries,
    )


# DLPack structures, packed by hand according to dlpack.h

_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_GetName", ctypes.pythonapi))
_CALLBACK = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Producer:
    """Exporter of DLPack capsules; must outlive them.

    ``asked`` has the arguments of each export, ``released`` the name of each capsule whose deleter
    was called.
    """

    def __init__(
        self,
        address: int = 0x7000,
        shape: tuple[int, ...] = (4,),
        strides: tuple[int, ...] | None = None,
        *,
        dtype: tuple[int, int, int] = (2, 32, 1),
        device: tuple[int, int] = (CUDA, 0),
        offset: int = 0,
        flags: int = 0,
        version: tuple[int, int] | None = (1, 0),
    ) -> None:
        self.asked: list[dict[str, Any]] = []
        self.released: list[bytes] = []
        self._device = device
        self._version = version
        self._shape = struct.pack(f"={len(shape)}q", *shape)
        self._strides = None if strides is None else struct.pack(f"={len(strides)}q", *strides)
        tensor = struct.pack(
            "=QiiiBBHQQQ",
            address, *device, len(shape), *dtype, start(self._shape), start(self._strides), offset,
        )  # fmt: skip
        self._format = b"dltensor" if version is None else b"dltensor_versioned"
        self._deleter = _CALLBACK(lambda managed: self.released.append(self._format))
        deleter = ctypes.cast(self._deleter, ctypes.c_void_p).value
        if version is None:
            self._managed = tensor + struct.pack("=QQ", 0, deleter)
        else:
            self._managed = struct.pack("=IIQQQ", *version, 0, deleter, flags) + tensor
        self._destructor = _CALLBACK(self._destroy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **asked: Any) -> Any:
        if self._version is None and asked.keys() - {"stream"}:
            raise TypeError(f"unexpected keyword arguments {sorted(asked)}")
        self.asked.append(asked)
        destructor = ctypes.cast(self._destructor, ctypes.c_void_p)
        return _new(start(self._managed), self._format, destructor)

    def _destroy(self, capsule: int) -> None:
        if _name(capsule) == self._format:  # not consumed: nobody else calls the deleter
            self.released.append(self._format)


def start(block: bytes | None) -> int:
    """Return the address of `block`, valid as long as the object lives."""
    return 0 if block is None else int(ctypes.cast(block, ctypes.c_void_p).value or 0)


# Libraries


class Torch(ModuleType):
    """The part of torch that the library uses, on GPU 1 with a current stream."""

    strided = "torch.strided"

    class Tensor:
        """Tensor; its dtype is formatted as torch does."""

        def __init__(self, array: np.ndarray[Any, Any], dtype: str = "", **other: Any) -> None:
            self._array = array
            self.dtype = f"torch.{dtype or array.dtype.name}"
            self.shape = array.shape
            self.device = SimpleNamespace(type="cuda", index=1)
            self.layout = "torch.strided"
            self.is_cuda = True
            self.requires_grad = False
            self.is_lazy = ""
            vars(self).update(other)

        def data_ptr(self) -> int:
            return start_of(self._array)

        def element_size(self) -> int:
            return self._array.itemsize

        def stride(self) -> tuple[int, ...]:
            return tuple(each // self._array.itemsize for each in self._array.strides)

        def is_contiguous(self) -> bool:
            return self._array.flags.c_contiguous

        def get_device(self) -> int:
            return int(self.device.index)

        def is_conj(self) -> bool:
            return self.is_lazy == "conj"

        def is_neg(self) -> bool:
            return self.is_lazy == "neg"

    def __init__(self, current: int = 0x70AC) -> None:
        super().__init__("torch")
        self.cuda = SimpleNamespace(
            current_stream=lambda device: SimpleNamespace(cuda_stream=current + device.index)
        )

    def empty(self, shape: tuple[int, ...], *, dtype: str, device: Any) -> Any:
        array = np.empty(shape, dtype.removeprefix("torch."))
        return Torch.Tensor(array, device=device)


class Cupy(ModuleType):
    """The part of CuPy that the library uses, on GPU 2; ``current`` is the GPU it allocates on."""

    class ndarray(Interface):
        """Array of CuPy."""

        def __init__(self, array: np.ndarray[Any, Any], device: int = 2) -> None:
            super().__init__(**posing(array, stream=0xBAD).__cuda_array_interface__)
            self.dtype, self.shape = array.dtype, array.shape
            self.device = SimpleNamespace(id=device)

        def __dlpack_device__(self) -> tuple[int, int]:
            raise AssertionError("CuPy itself is asked")

    def __init__(self, stream: int = 0) -> None:
        super().__init__("cupy")
        self.current = 0
        self.cuda = SimpleNamespace(
            Device=self._use,
            get_current_stream=lambda ordinal: SimpleNamespace(ptr=stream and stream + ordinal),
        )

    @contextlib.contextmanager
    def _use(self, ordinal: int) -> Iterator[None]:
        before, self.current = self.current, ordinal
        yield
        self.current = before

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return Cupy.ndarray(np.empty(shape, dtype), self.current)


class Numba(ModuleType):
    """The part of numba.cuda that the library uses, on GPU 3."""

    class DeviceNDArrayBase(Interface):
        """Array; its stream is 0 or a `NumbaStream`."""

        def __init__(self, array: np.ndarray[Any, Any], stream: Any = 0, device: int = 3) -> None:
            super().__init__(**posing(array, stream=0).__cuda_array_interface__)
            self.dtype, self.shape, self.stream = array.dtype, array.shape, stream
            place = SimpleNamespace(device=SimpleNamespace(id=device))
            self.gpu_data = SimpleNamespace(context=place)

    def __init__(self) -> None:
        super().__init__("numba.cuda")
        self.current = 0
        self.gpus = {3: self._use(3)}

    @contextlib.contextmanager
    def _use(self, ordinal: int) -> Iterator[None]:
        before, self.current = self.current, ordinal
        yield
        self.current = before

    def device_array(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: Any) -> Any:
        return Numba.DeviceNDArrayBase(np.empty(shape, dtype), stream, self.current)


class NumbaStream:
    """Stream of Numba, which converts to an integer handle."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __int__(self) -> int:
        return self._handle


def start_of(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def imported(monkeypatch: pytest.MonkeyPatch, library: ModuleType) -> None:
    """Make `library` look imported, and no other."""
    for name in ("torch", "cupy", "numba.cuda", "numba.cuda.cudadrv.devicearray"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, library.__name__, library)
    if isinstance(library, Numba):
        monkeypatch.setitem(sys.modules, "numba.cuda.cudadrv.devicearray", library)

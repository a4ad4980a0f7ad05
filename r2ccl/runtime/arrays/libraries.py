"""Adapters of the array libraries other than NumPy: torch, CuPy and Numba; results for JAX.

An adapter reports whether an array is on a GPU, the number of that GPU, and the current stream of
the library. It also allocates arrays of the library. The adapters use the modules that the caller
has imported already, and import none of these libraries. JAX arrays are immutable: a result for
JAX is written to a NumPy array, which the function from `jax_converter` converts to JAX.

Invariant: no function here waits for a GPU. None reads the data of an array, except that the
function from `jax_converter` copies memory that JAX cannot share.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np

from r2ccl.runtime.advice import cannot_view
from r2ccl.transport.aligned import aligned_memory

#: DLPack device types of CUDA memory: kDLCUDA, kDLCUDAManaged (dlpack.h).
_CUDA_DEVICES = (2, 13)

#: Dtypes that JAX narrows to 32 bits per number, unless ``jax_enable_x64`` is set.
_JAX_WIDE = ("float64", "int64", "uint64", "complex128")


class Library(Protocol):
    """Interface to an array library; every method takes an array `x` of that library."""

    def is_on_device(self, x: Any) -> bool:
        """Return whether `x` is in CUDA memory; if not, only `empty` may be called for `x`."""
        ...

    def ordinal(self, x: Any) -> int:
        """Return the number, in this process, of the GPU that `x` is on."""
        ...

    def stream(self, x: Any) -> int:
        """Return the handle of the library's current stream on the GPU of `x`.

        If the library has one current stream per thread, return that of the calling thread.
        """
        ...

    def empty(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Allocate an uninitialized C-contiguous array on the device of `x`, with its dtype."""
        ...


def library_of(x: Any) -> Library | None:
    """Return the `Library` of a torch, CuPy or Numba array `x`; None for other objects."""
    if type(x) is np.ndarray:
        return None
    torch = torch_of(x)
    if torch is not None:
        return Torch(torch)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        return Cupy(cupy)
    numba = sys.modules.get("numba.cuda.cudadrv.devicearray")
    if numba is not None and isinstance(x, numba.DeviceNDArrayBase):
        return Numba(sys.modules["numba.cuda"])
    return None


def torch_of(x: Any) -> Any:
    """Return the module ``torch`` if `x` is a torch tensor, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def is_jax(x: Any) -> bool:
    """Return whether `x` is a JAX array."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def jax_memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Allocate an uninitialized array that JAX can share.

    Its address is a multiple of 64 bytes, which is ``MinAlign`` of XLA's CPU runtime.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    return aligned_memory(nbytes).view(dtype).reshape(shape)


def jax_converter(x: Any) -> Callable[[np.ndarray[Any, Any]], Any]:
    """Return a function that converts a NumPy array to a JAX array.

    The JAX array has the dtype and the shape of the NumPy array. It is on the device of `x`, which
    must be a JAX array on a single device; it is committed to this device if `x` is committed. If
    the device is a CPU and the NumPy array is from `jax_memory`, the two arrays share memory.
    """
    jax = sys.modules["jax"]
    (device,) = x.devices()
    placement = None
    if x.committed:
        kind = x.sharding.memory_kind
        placement = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)

    def convert(host: np.ndarray[Any, Any]) -> Any:
        with ExitStack() as settings:
            # Otherwise JAX would trace the array while it traces a function in this thread.
            settings.enter_context(jax.ensure_compile_time_eval())
            if host.dtype.name in _JAX_WIDE and not jax.config.jax_enable_x64:
                settings.enter_context(jax.enable_x64(True))  # else JAX would narrow the dtype
            if placement is None:
                settings.enter_context(jax.default_device(device))
            return jax.device_put(host, placement)  # jax.numpy.asarray would copy

    return convert


def shares_memory(x: Any, host: np.ndarray[Any, Any]) -> bool:
    """Return whether `x`, a JAX array made from `host`, shares the memory of `host` or is empty."""
    return not host.nbytes or x.unsafe_buffer_pointer() == host.__array_interface__["data"][0]


def dlpack_device_type(x: Any) -> int:
    """Return the DLPack device type (dlpack.h) of `x`, which has ``__dlpack_device__``.

    Raises
    ------
    InvalidArgument
        If `x` does not report a device type, such as a torch tensor on device ``meta`` or an array
        within ``jax.jit``, which have no memory.
    """
    try:
        return int(x.__dlpack_device__()[0])
    except Exception as exc:
        raise cannot_view(x, exc) from exc


def is_device_array(x: Any) -> bool:
    """Return whether `x` is an array in CUDA memory, either device or managed memory.

    Raises
    ------
    InvalidArgument
        As for `dlpack_device_type`.

    Notes
    -----
    *Cost*: under 0.1 µs for a NumPy array, 0.5 µs for a torch tensor.
    """
    if type(x) is np.ndarray:
        return False
    library = library_of(x)
    if library is not None:
        return library.is_on_device(x)
    # DLPack is asked first, because reading __cuda_array_interface__ of an array in other memory
    # may raise any exception.
    if getattr(x, "__dlpack_device__", None) is not None:
        return dlpack_device_type(x) in _CUDA_DEVICES
    return hasattr(x, "__cuda_array_interface__")


class Torch:
    """`Library` adapter of ``torch``."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def is_on_device(self, x: Any) -> bool:
        """Implement `Library.is_on_device`."""
        return bool(x.is_cuda)

    def ordinal(self, x: Any) -> int:
        """Implement `Library.ordinal`."""
        return int(x.get_device())

    def stream(self, x: Any) -> int:
        """Implement `Library.stream`."""
        return int(self._torch.cuda.current_stream(x.device).cuda_stream)

    def empty(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Implement `Library.empty`."""
        return self._torch.empty(shape, dtype=x.dtype, device=x.device)


class Cupy:
    """`Library` adapter of ``cupy``."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def is_on_device(self, x: Any) -> bool:
        """Implement `Library.is_on_device`."""
        return True

    def ordinal(self, x: Any) -> int:
        """Implement `Library.ordinal`."""
        return int(x.device.id)

    def stream(self, x: Any) -> int:
        """Implement `Library.stream`."""
        return int(self._cupy.cuda.get_current_stream(self.ordinal(x)).ptr)

    def empty(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Implement `Library.empty`."""
        with self._cupy.cuda.Device(self.ordinal(x)):
            return self._cupy.empty(shape, x.dtype)


class Numba:
    """`Library` adapter of ``numba.cuda``.

    Numba has no current stream, so `stream` returns the stream of the array or, without one, the
    default stream. With ``NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM``, Numba itself uses the thread's
    default stream instead of the legacy one; these two streams wait for each other (CUDA driver
    API, stream synchronization behavior).
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda

    def is_on_device(self, x: Any) -> bool:
        """Implement `Library.is_on_device`."""
        return True

    def ordinal(self, x: Any) -> int:
        """Implement `Library.ordinal`."""
        return int(x.gpu_data.context.device.id)

    def stream(self, x: Any) -> int:
        """Implement `Library.stream`."""
        return int(x.stream)

    def empty(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Implement `Library.empty`."""
        with self._cuda.gpus[self.ordinal(x)]:
            return self._cuda.device_array(shape, x.dtype, stream=x.stream)


__all__ = [
    "Library",
    "Torch",
    "dlpack_device_type",
    "is_device_array",
    "is_jax",
    "jax_converter",
    "jax_memory",
    "library_of",
    "shares_memory",
    "torch_of",
]

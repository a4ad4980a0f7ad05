"""Calls CUDA driver functions by name, through NVIDIA's ``cuda.bindings``.

No other module imports ``cuda.bindings.driver``. The import happens when a `Cuda` object is
created, so this library can be imported on a machine without the package or a GPU.

Invariant: a call that fails raises `TransportError`. Its ``status`` is ``NO_CUDA`` if the bindings,
the driver or a GPU are missing, or if the driver lacks the function; otherwise it is the driver's
name of the error.
"""

from __future__ import annotations

import importlib
from typing import Any

from r2ccl.errors import TransportError


class Cuda:
    """The initialized CUDA driver.

    Attributes
    ----------
    api : module
        ``cuda.bindings.driver``, which defines the driver's enumerations and structs.

    Raises
    ------
    TransportError
        If the bindings, the driver or a GPU are missing (status ``NO_CUDA``; the message says
        which), or if the driver cannot be initialized (status: the driver's name of the error).
    """

    def __init__(self) -> None:
        try:
            self.api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as exc:
            raise TransportError(
                f"cuda.bindings cannot be imported ({exc}): pip install 'r2ccl[gpu]', or, with "
                "CUDA 12, 'r2ccl[gpu12]'",
                status="NO_CUDA",
            ) from exc
        self._success = self.api.CUresult.CUDA_SUCCESS
        self._not_ready = self.api.CUresult.CUDA_ERROR_NOT_READY
        status = self._answer("cuInit", (0,))[0]
        if status == self.api.CUresult.CUDA_ERROR_NO_DEVICE:
            raise TransportError(
                "the CUDA driver sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES, or use "
                "host memory",
                status="NO_CUDA",
            )
        if status != self._success:
            raise _failure("cuInit", status)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function.

        Parameters
        ----------
        name : str
            Name of the function in ``cuda.bindings.driver``.
        *arguments
            Arguments of the function. Handles and addresses may be integers.

        Returns
        -------
        object
            The result of the function; a tuple if it has several, None if it has none.

        Raises
        ------
        TransportError
            If the function fails.
        """
        answer = self._answer(name, arguments)
        if answer[0] != self._success:
            raise _failure(name, answer[0])
        if len(answer) == 2:
            return answer[1]
        return answer[1:] or None

    def is_done(self, name: str, handle: int) -> bool:
        """Return whether an event or a stream is done.

        Parameters
        ----------
        name : str
            Driver function to call: ``cuEventQuery`` or ``cuStreamQuery``.
        handle : int
            Handle of the event or the stream.

        Raises
        ------
        TransportError
            If earlier work failed.
        """
        status = self._answer(name, (handle,))[0]
        if status == self._not_ready:
            return False
        if status != self._success:
            raise _failure(name, status)
        return True

    def uuid(self, device: Any) -> bytes:
        """Return the UUID of a GPU or, in MIG mode, of its MIG instance: 16 bytes."""
        # The bindings of CUDA 12 have two versions, of which the first returns the identifier of
        # the whole GPU in MIG mode. The bindings of CUDA 13 have the second alone, without suffix.
        name = "cuDeviceGetUuid"
        newer = f"{name}_v2"
        return bytes(self.call(newer if hasattr(self.api, newer) else name, device).bytes)

    def device_attribute(self, attribute: str, device: Any) -> int:
        """Return a device attribute; `attribute` is its name without ``CU_DEVICE_ATTRIBUTE_``."""
        which = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        return int(self.call("cuDeviceGetAttribute", which, device))

    def pointer_attribute(self, attribute: str, address: int) -> Any:
        """Return a pointer attribute; `attribute` is its name without ``CU_POINTER_ATTRIBUTE_``."""
        which = getattr(self.api.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{attribute}")
        return self.call("cuPointerGetAttribute", which, address)

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        try:
            answer: tuple[Any, ...] = getattr(self.api, name)(*arguments)
        except RuntimeError as exc:  # libcuda is missing, or lacks this function
            raise TransportError(
                f"there is no CUDA driver with {name} ({exc}): install a recent NVIDIA driver, or "
                "use host memory",
                status="NO_CUDA",
            ) from exc
        return answer


def _failure(name: str, status: Any) -> TransportError:
    return TransportError(f"{name} failed: {status.name}", status=status.name)


__all__ = ["Cuda"]

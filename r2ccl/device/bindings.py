"""The one place that imports NVIDIA's ``cuda.bindings``: calls of the CUDA driver by name.

The package is imported when a `Cuda` is made, so that a machine without it, or without a GPU, can
import everything else. Must import no other module of the library but `errors`.

Invariant: a call that fails raises `TransportError` whose ``status`` is the driver's own name for
it; where there is nothing to call, ``NO_CUDA``.
"""

from __future__ import annotations

import importlib
from typing import Any

from r2ccl.errors import TransportError


class Cuda:
    """The CUDA driver, initialised.

    Attributes
    ----------
    api : module
        ``cuda.bindings.driver``, for its enumerations and structs.

    Raises
    ------
    TransportError
        Status ``NO_CUDA``: the bindings or the driver are missing, or there is no GPU; says which.
    """

    def __init__(self) -> None:
        try:
            self.api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as exc:
            raise TransportError(
                f"cuda.bindings cannot be imported ({exc}): `pip install r2ccl[gpu]`",
                status="NO_CUDA",
            ) from exc
        self._success = self.api.CUresult.CUDA_SUCCESS
        self._not_ready = self.api.CUresult.CUDA_ERROR_NOT_READY
        status = self._answer("cuInit", (0,))[0]
        if status == self.api.CUresult.CUDA_ERROR_NO_DEVICE:
            raise TransportError(
                "the CUDA driver sees no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use "
                "host memory",
                status="NO_CUDA",
            )
        if status != self._success:
            raise _failure("cuInit", status)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver.

        Parameters
        ----------
        name : str
            As in ``cuda.bindings.driver``.
        *arguments
            Handles and addresses may be integers.

        Returns
        -------
        object
            Its only result, the tuple of its results, or None.
        """
        answer = self._answer(name, arguments)
        if answer[0] != self._success:
            raise _failure(name, answer[0])
        if len(answer) == 2:
            return answer[1]
        return answer[1:] or None

    def is_done(self, name: str, handle: int) -> bool:
        """Call a function that asks whether something is done.

        Parameters
        ----------
        name : str
            ``cuEventQuery`` or ``cuStreamQuery``.
        handle : int
        """
        status = self._answer(name, (handle,))[0]
        if status == self._not_ready:
            return False
        if status != self._success:
            raise _failure(name, status)
        return True

    def device_attribute(self, attribute: str, device: Any) -> int:
        """Return an attribute of a ``CUdevice`` by its name without ``CU_DEVICE_ATTRIBUTE_``."""
        which = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        return int(self.call("cuDeviceGetAttribute", which, device))

    def pointer_attribute(self, attribute: str, address: int) -> Any:
        """Return an attribute of an address by its name without ``CU_POINTER_ATTRIBUTE_``."""
        which = getattr(self.api.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{attribute}")
        return self.call("cuPointerGetAttribute", which, address)

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Call; return the status and the results."""
        try:
            answer: tuple[Any, ...] = getattr(self.api, name)(*arguments)
        except RuntimeError as exc:  # the bindings find no libcuda, or not this function in it
            raise TransportError(
                f"there is no CUDA driver with {name} ({exc}): install NVIDIA's driver for the GPU,"
                " or use host memory",
                status="NO_CUDA",
            ) from exc
        return answer


def _failure(name: str, status: Any) -> TransportError:
    return TransportError(f"{name} failed: {status.name}", status=status.name)


__all__ = ["Cuda"]

"""Creates `GpuDirectBackend` if, on every rank, all NICs can access the memory of the rank's GPU.

To find this out, every rank allocates the memory for its landing places and tries to register it
with every NIC.

Invariant: unless a device fails, either all ranks get the backend, or none does and no memory stays
allocated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from r2ccl.clock import Clock
from r2ccl.config import Config
from r2ccl.device.base import Device
from r2ccl.errors import TransportError
from r2ccl.gpu.device_reduction import ReductionKernels
from r2ccl.gpu.gpudirect import GpuDirectBackend
from r2ccl.gpu.plan_selector import EnterCall
from r2ccl.gpu.pxn.routes import PxnRoutes
from r2ccl.gpu.registered_memory import RegisteredDeviceMemory
from r2ccl.runtime.engine import Engine
from r2ccl.types import AllgatherBytes, pack_text, unpack_text


def connect_gpudirect(
    device: Device,
    kernels: ReductionKernels,
    *,
    engine: Engine,
    enter: EnterCall,
    config: Config,
    clock: Clock,
    allgather: AllgatherBytes,
    pxn_routes: PxnRoutes | None = None,
) -> GpuDirectBackend | str:
    """Register GPU memory with the NICs on all ranks; return the backend if all ranks succeed.

    Parameters
    ----------
    allgather : callable
        See `AllgatherBytes`.
    device, kernels, engine, enter, config, clock, pxn_routes
        See `GpuDirectBackend`.

    Returns
    -------
    GpuDirectBackend or str
        The backend. If a rank cannot use it, all ranks get a text instead, which names the first
        such rank and its reason.

    Raises
    ------
    TransportError
        If the device failed after this rank had registered memory; other ranks may have the
        backend, so the communicator must end.
    R2cclError
        If `allgather` raises it.

    Notes
    -----
    *Collective*: all ranks. *Cost*: a small allgather.
    """
    memory: RegisteredDeviceMemory | None = None
    why = ""
    try:
        memory = RegisteredDeviceMemory(
            device,
            engine.register_device,
            engine.call,
            config.staging_nbytes,
        )
    except TransportError as exc:
        why = str(exc)
    with contextlib.ExitStack() as stack:
        if memory is not None:
            stack.callback(memory.close)
        for rank, reason in enumerate(_exchanged(why, allgather)):
            if reason:
                return f"rank {rank}: {reason}"
        assert memory is not None
        direct = GpuDirectBackend(
            device,
            kernels,
            engine=engine,
            enter=enter,
            memory=memory,
            pxn_routes=pxn_routes,
            config=config,
            clock=clock,
        )
        stack.pop_all()
    return direct


def _exchanged(why: str, allgather: AllgatherBytes) -> Iterator[str]:
    """Exchange `why` among all ranks, and yield the text of each rank, in rank order.

    A rank's text is the reason why its NICs cannot access its GPU's memory; empty if they can.
    """
    return map(unpack_text, allgather(pack_text(why, _REASON_NBYTES)))


_REASON_NBYTES = 400

__all__ = ["connect_gpudirect"]

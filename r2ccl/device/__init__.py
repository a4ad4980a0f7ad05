"""The GPU interface that collectives use: memory, streams, events and kernels.

`base` defines the interface, `driver` implements it with the CUDA driver, and `views` represents
device memory as buffers for transports. `r2ccl.testing.fakedevice` implements the interface without
a GPU and raises an error if a write is not ordered with another access to the same memory.

Invariant: enqueuing work waits for the GPU only if the driver's launch queue is full, or if
CUDA_LAUNCH_BLOCKING is set. Allocating, freeing, mapping and loading may wait.
"""

from __future__ import annotations

from r2ccl.device.base import Device, Event, Kernel, Stream

__all__ = ["Device", "Event", "Kernel", "Stream"]

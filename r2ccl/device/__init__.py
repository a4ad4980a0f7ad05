"""A GPU as collectives see it: memory, streams, events, kernels; nothing of ranks or schedules.

`base` is the interface, `driver` makes it of the CUDA driver, `views` names device memory to
transports. `r2ccl.testing.fakedevice` is the same interface on a machine without a GPU, which fails
on work that is not ordered.

Must not import transports, kernels or anything above them. Invariant: no call here waits for the
GPU, except `Device.close` and the two that say so.
"""

from __future__ import annotations

from r2ccl.device.base import Device, Event, Kernel, Stream

__all__ = ["Device", "Event", "Kernel", "Stream"]

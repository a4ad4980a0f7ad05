"""Helpers of the tests on the fake GPU: two processes on one card, and a kernel."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest
from support.slow import slow_but

from r2ccl.device.base import Stream
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu, FakeKernel, Grid

NBYTES = 64
PAGE = mmap.PAGESIZE
#: Runs a test with few seeds of the order of work, and as a slow case with many.
by_seeds = pytest.mark.parametrize("nseeds", slow_but([40], [40, 200]))


def pattern(seed: int, nbytes: int = NBYTES) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return bytes that differ from poison and from the initial contents of memory."""
    return np.random.default_rng(seed).integers(1, 100, nbytes, np.uint8)


class Bench:
    """Two processes on a card, and objects that most tests need of the first."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        self.gpu = FakeGpu(seed, **options)
        self.device = FakeDevice(self.gpu, "rank 0", is_strict=True)
        self.peer = FakeDevice(self.gpu, "rank 1")
        self.first, self.second = self.device.make_stream(), self.device.make_stream()
        self.done = self.device.make_event()
        self.data = pattern(7)

    def memory(self, data: Any = None) -> int:
        """Return new device memory, written before any other work."""
        address = self.device.allocate(NBYTES)
        self.device.write(address, pattern(1) if data is None else data)
        return address

    def finish(self, stream: Stream, device: FakeDevice | None = None) -> None:
        """Wait for a stream as the library does."""
        device = device or self.device
        event = device.make_event()
        device.record(event, stream)
        assert device.synchronize(event, 10.0)
        device.destroy_event(event)

    def holds(self, address: int, data: Any) -> None:
        assert bytes(self.device.read(address, NBYTES)) == bytes(data)


def add(grid: Grid, out: int, left: int, right: int, nbytes: int) -> None:
    grid.write(out, nbytes)[:] = grid.read(left, nbytes) + grid.read(right, nbytes)


def load_add(device: FakeDevice, touches: Any = None) -> Any:
    device.kernels["add"] = FakeKernel(add, touches)
    return device.load(b".entry add", "add")


def launch_add(device: FakeDevice, kernel: Any, out: int, left: int, right: int, stream: Any,
               nbytes: int = NBYTES) -> None:  # fmt: skip
    addresses = [(each, ctypes.c_uint64) for each in (out, left, right)]
    device.launch(kernel, 1, 32, stream, [*addresses, (nbytes, ctypes.c_int64)])

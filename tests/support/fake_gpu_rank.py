"""Run a rank of the GPU bench on a fake GPU, for machines without a GPU.

Tests use `FakeDriver` and `fake_card`. Run as a program, this is ``bench/gpu_rank.py`` on its own
fake GPU; the rank in ``BENCH_SPOILED`` reads corrupted data.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from support.ranks import OneCard

from r2ccl.device import Stream
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu

BENCH = Path(__file__).parents[2] / "bench"
BLOCK_NBYTES = 4096
TIMEOUT_S = 20.0


class FakeDriver:
    """`gpu_card.Driver` over a fake device."""

    def __init__(self, device: FakeDevice, free_nbytes: int = 1 << 30) -> None:
        self.device = device
        self.free = free_nbytes
        self._event = device.make_event()

    def about(self) -> dict[str, Any]:
        return {"gpu": "fake", "free_mib": self.free >> 20}

    def free_nbytes(self) -> int:
        return self.free

    def fill(self, address: int, byte: int, nbytes: int, stream: Stream) -> None:
        pinned = self.device.allocate_pinned(nbytes)
        pinned[:] = byte
        self.device.copy(address, int(pinned.ctypes.data), nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        self.device.copy(target, source, nbytes, stream)

    def time(self, stream: Stream, work: Callable[[], None]) -> float:
        begun_s = time.perf_counter()
        work()
        self.device.record(self._event, stream)
        assert self.device.synchronize(self._event, TIMEOUT_S)
        return time.perf_counter() - begun_s


def fake_card(gpu_card: Any, seed: int = 0, free_nbytes: int = 1 << 30) -> Any:
    """Return a `gpu_card.Card` of the given module."""
    device = FakeDevice(FakeGpu(seed), f"process {os.getpid()}")
    return gpu_card.Card(device, FakeDriver(device, free_nbytes), BLOCK_NBYTES)


def main() -> None:
    """Run the rank."""
    sys.path.insert(0, str(BENCH))
    import gpu_card
    import gpu_rank

    from r2ccl import factory
    from r2ccl.runtime.arrays import cuda

    card = fake_card(gpu_card, int(os.environ["RANK"]))

    @contextmanager
    def open_card(ordinal: int) -> Iterator[Any]:
        yield card
        card.close()

    kernels: Any = None  # backends through the host launch none
    factory.CudaHardware = lambda: OneCard(card.device, kernels)
    cuda._ordinal = lambda address: 0
    gpu_rank.open_card = open_card
    if os.environ["RANK"] == os.environ.get("BENCH_SPOILED"):
        examine = card.examine

        def spoil(address: int, nbytes: int, look: Callable[[int, Any], int]) -> int:
            def look_at_spoiled(number: int, block: Any) -> int:
                block[-1] ^= np.uint8(0x10)
                return look(number, block)

            return int(examine(address, nbytes, look_at_spoiled))

        card.examine = spoil
    gpu_rank.main()


if __name__ == "__main__":
    main()

"""A resident kernel on a real GPU: every job once and in order, and it ends by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from r2ccl.device.driver import CudaDevice
from r2ccl.dtypes import CODES
from r2ccl.kernels.cuda import Form, Launcher, Patience, Resident
from r2ccl.types import ReduceOp

TIMEOUT_S = 30.0
COUNT = 100_003
ADD = Form(dtype_code=CODES[np.dtype(np.int64)], op=ReduceOp.SUM, is_resident=True)


class Totals:
    """A total in pinned memory, which device and host see, and what is added to it."""

    def __init__(self, device: CudaDevice) -> None:
        self.memory = device.allocate_pinned(2 * COUNT * 8)
        self.total, self.added = self.memory.view(np.int64).reshape(2, COUNT)
        self.added[:] = np.arange(COUNT)

    def post(self, kernel: Resident) -> int:
        total, added = (int(each.ctypes.data) for each in (self.total, self.added))
        return kernel.post((total, added), (total,), COUNT)

    def check(self, njobs: int) -> None:
        assert np.array_equal(self.total, njobs * np.arange(COUNT))


def wait(kernel: Resident, number: int) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while kernel.poll() < number:
        assert time.monotonic() < until_s


@pytest.fixture
def totals(device: CudaDevice) -> Iterator[Totals]:
    made = Totals(device)
    yield made
    device.free_pinned(made.memory)


@pytest.mark.parametrize(
    "patience",
    [
        Patience(),
        Patience(idle_s=0),
        Patience(life_s=1e-4),
    ],
    ids=["patient", "never-idle", "short-lived"],
)
@pytest.mark.parametrize("nblocks", [1, 32])
def test_jobs_are_done_once_and_in_order(
    nblocks: int, patience: Patience, device: CudaDevice, totals: Totals, tmp_path: Path
) -> None:
    launcher = Launcher(device, directory=tmp_path)
    kernel = Resident(device, launcher, ADD, nblocks=nblocks, patience=patience)
    njobs = 0
    for burst in (1, 64, 3, 20):
        for _ in range(burst):
            njobs = totals.post(kernel)
        wait(kernel, njobs)
        totals.check(njobs)

    kernel.close(TIMEOUT_S)

    totals.check(njobs)


def test_it_ends_by_itself_so_that_the_device_can_be_used(
    device: CudaDevice, totals: Totals, tmp_path: Path
) -> None:
    kernel = Resident(device, Launcher(device, directory=tmp_path), ADD, nblocks=4)
    wait(kernel, totals.post(kernel))

    device.free(device.allocate(1 << 20))  # waits for all kernels
    wait(kernel, totals.post(kernel))

    totals.check(2)
    kernel.close(TIMEOUT_S)

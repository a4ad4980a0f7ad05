"""A resident kernel on a real GPU: every job once and in order, or none of them, and it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from r2ccl.device.driver import CudaDevice
from r2ccl.dtypes import CODES
from r2ccl.gpu.offload import Offload
from r2ccl.kernels.cuda import Form, Launcher, Patience, Resident
from r2ccl.kernels.cuda.ptx import NBLOCKS_OF_RESIDENT
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


def test_what_does_not_come_to_run_begins_nothing(
    device: CudaDevice, totals: Totals, tmp_path: Path
) -> None:
    """Kernels that stay fill the GPU, all but a few places, and the next finds only these."""
    launcher = Launcher(device, directory=tmp_path)
    nblocks = NBLOCKS_OF_RESIDENT * device.nsms - 1
    patience = Patience(idle_s=60, life_s=60, stall_s=0.1)
    # A multiprocessor has room for 8 blocks of 256 threads. All are made before the first runs:
    # allocating may wait for it.
    kernels = [
        Resident(device, launcher, ADD, nblocks=nblocks, patience=patience) for _ in range(5)
    ]
    ndone = 0
    for kernel in kernels:
        totals.post(kernel)
        until_s = time.monotonic() + TIMEOUT_S
        while not kernel.poll() and not kernel.is_absent:
            assert time.monotonic() < until_s
        if kernel.is_absent:
            break
        ndone += 1

    assert kernel.is_absent
    totals.check(ndone)
    for each in kernels:
        each.close(TIMEOUT_S)
    totals.check(ndone)


@pytest.mark.parametrize("setting", ["auto", "1", "0"])
def test_work_keeps_its_order_whoever_does_it(
    setting: str, device: CudaDevice, tmp_path: Path
) -> None:
    """Of two forms one may stay; both change one array, in turn."""
    forms = [Form(dtype_code=ADD.dtype_code, op=op) for op in (ReduceOp.SUM, ReduceOp.PROD)]
    offload = Offload(device, Launcher(device, directory=tmp_path))
    places = [device.allocate(COUNT * 8) for _ in range(3)]
    is_kept = offload.settle_on(forms[0], 2, places, COUNT * 8, setting=setting)
    assert setting == "auto" or is_kept == (setting == "1")
    pinned = device.allocate_pinned(COUNT * 8)
    value = pinned.view(np.int64)
    value[:] = np.arange(COUNT)
    for place in places[:2]:
        offload.copy(place, int(pinned.ctypes.data), COUNT * 8)
    assert offload.drain(TIMEOUT_S)
    meant = np.arange(COUNT)
    for turn in range(50):
        form = forms[turn % 5 == 4]
        offload.run(form, (places[0], places[1]), places[0], COUNT, 2)
        meant = meant * np.arange(COUNT) if form is forms[1] else meant + np.arange(COUNT)
        if turn % 3 == 0:
            offload.commit()
            offload.poll()
    offload.copy(int(pinned.ctypes.data), places[0], COUNT * 8)
    assert offload.drain(TIMEOUT_S)
    assert np.array_equal(value, meant)
    offload.close(TIMEOUT_S)
    for place in places:
        device.free(place)
    device.free_pinned(pinned)

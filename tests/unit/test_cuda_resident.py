"""A resident kernel does every job once and in order, and ends whatever the host does.

Its PTX runs in an interpreter whose threads, and the host between them, go on in random order.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ptx_machine import Grid, Kernel

from r2ccl.dtypes import CODES
from r2ccl.errors import InvalidArgument, TransportError, TransportTimeout
from r2ccl.kernels.cuda import (
    Form,
    Launcher,
    Patience,
    Resident,
    nblocks_to_stay,
    ptx_of,
    resident,
)
from r2ccl.kernels.cuda.mailbox import Mailbox
from r2ccl.types import ReduceOp

FLOAT64 = CODES[np.dtype(np.float64)]
ADD = Form(dtype_code=FLOAT64, op=ReduceOp.SUM, is_resident=True)
NBLOCKS, NTHREADS = 3, 2
COUNT = 5
FOREVER = Patience(idle_s=1e3, life_s=1e3, stall_s=1e3)

compiles = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None,
    reason="numba-cuda is not installed: `pip install numba-cuda[cu13]`, which needs no GPU",
)


class InterpretedDevice:
    """A device with one stream, in host memory, that does a step when it is asked to."""

    capability = (9, 0)
    nsms = 132

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.memory: dict[int, np.ndarray[Any, Any]] = {}
        self.kernels: list[Kernel] = []
        self.queue: deque[Grid | Callable[[], object]] = deque()
        self.nlaunches = 0
        #: Blocks that never get a place on the GPU.
        self.kept_off: set[int] = set()

    def allocate_pinned(self, nbytes: int) -> np.ndarray[Any, Any]:
        memory = np.zeros(nbytes // 16 * 2 + 2, np.uint64).view(np.uint8)[:nbytes]
        self.memory[memory.ctypes.data] = memory
        return memory

    def allocate(self, nbytes: int) -> int:
        memory = self.allocate_pinned(nbytes)
        memory.fill(0xA5)
        return int(memory.ctypes.data)

    def free(self, address: int) -> None:
        del self.memory[address]

    def free_pinned(self, memory: np.ndarray[Any, Any]) -> None:
        del self.memory[memory.ctypes.data]

    def make_stream(self, *, waits: bool = False) -> int:
        return 1

    def make_event(self) -> int:
        return 2

    def destroy_stream(self, stream: int) -> None:
        assert not self.queue

    def destroy_event(self, event: int) -> None:
        assert not self.queue

    def record(self, event: int, stream: int) -> None:
        pass

    def synchronize(self, event: int, timeout_s: float) -> bool:
        return self.run(20_000)

    def load(self, ptx: bytes, entry: str) -> int:
        self.kernels.append(Kernel(ptx.decode()))
        return len(self.kernels) - 1

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.queue.append(lambda: ctypes.memmove(target, source, nbytes))

    def launch(
        self, kernel: int, nblocks: int, nthreads: int, stream: int, given: Sequence[Any]
    ) -> None:
        values = [int.from_bytes(bytes(kind(value)), "little") for value, kind in given]
        windows = [range(at, at + each.nbytes) for at, each in self.memory.items()]
        self.queue.append(Grid(self.kernels[kernel], nblocks, NTHREADS, values, windows))
        self.nlaunches += 1

    def run(self, nsteps: int) -> bool:
        """Go on by so many steps; whether there is nothing left to do."""
        for _ in range(nsteps):
            if not self.queue:
                break
            first = self.queue[0]
            if not isinstance(first, Grid):
                first()
                self.queue.popleft()
                continue
            owners = [i for i, block in enumerate(first.blocks) for _ in block.ready()]
            allowed = [at for at, owner in enumerate(owners) if owner not in self.kept_off]
            if allowed:
                chosen = int(self.rng.choice(allowed))
                first.step(lambda count, at=chosen: at)
            elif owners:
                break  # the others wait for a place
            else:
                self.queue.popleft()
        return not self.queue


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ptx")


def make(
    device: InterpretedDevice, cache: Path, patience: Patience | None = None, nblocks: int = NBLOCKS
) -> Resident:
    launcher = Launcher(device, directory=cache)  # type: ignore[arg-type]
    return Resident(device, launcher, ADD, nblocks=nblocks, patience=patience)  # type: ignore[arg-type]


class Sums:
    """Jobs that add to one array, each of which shows whether it was done, and how often."""

    def __init__(self, device: InterpretedDevice, njobs: int) -> None:
        self.added = [2.0**i for i in range(njobs)]
        self.arrays = device.allocate_pinned((njobs + 1) * COUNT * 8).view(np.float64)
        self.arrays = self.arrays.reshape(njobs + 1, COUNT)
        self.arrays[1:] = np.array(self.added)[:, None]

    def post(self, kernel: Resident, job: int) -> int:
        total, added = (int(self.arrays[i].ctypes.data) for i in (0, job))
        return kernel.post((total, added), (total,), COUNT)

    def check(self, done: int) -> None:
        assert self.arrays[0].tolist() == [sum(self.added[:done])] * COUNT


def work_off(device: InterpretedDevice, kernel: Resident, sums: Sums, njobs: int) -> None:
    """Post jobs and poll at random moments until all are done; each is done when it says so."""
    posted = done = 0
    while done < njobs:
        device.run(int(device.rng.integers(1, 150)))
        if posted < njobs and kernel.has_room and device.rng.random() < 0.3:
            posted += 1
            assert sums.post(kernel, posted) == posted
        now = kernel.poll()
        assert done <= now <= posted
        done = now
        if posted == done:
            sums.check(done)


@compiles
@pytest.mark.parametrize("seed", range(10))
def test_jobs_are_done_once_and_in_order(seed: int, cache: Path) -> None:
    device = InterpretedDevice(seed)
    kernel, sums = make(device, cache, FOREVER), Sums(device, 20)

    work_off(device, kernel, sums, 20)

    sums.check(20)
    assert device.nlaunches == 1
    kernel.close(1)


@compiles
def test_the_ring_goes_round(cache: Path) -> None:
    device = InterpretedDevice(3)
    njobs = resident.NSLOTS + 7
    kernel = make(device, cache, FOREVER, nblocks=1)
    sums = Sums(device, 50)
    for number in range(1, resident.NSLOTS + 1):
        assert sums.post(kernel, (number - 1) % 50 + 1) == number
    assert not kernel.has_room
    with pytest.raises(InvalidArgument, match="64 jobs are posted and not done"):
        sums.post(kernel, 1)

    while kernel.poll() < resident.NSLOTS:
        device.run(50)
    for number in range(resident.NSLOTS + 1, njobs + 1):
        assert sums.post(kernel, (number - 1) % 50 + 1) == number
    while kernel.poll() < njobs:
        device.run(50)

    expected = sum(sums.added[(number - 1) % 50] for number in range(1, njobs + 1))
    assert sums.arrays[0].tolist() == [expected] * COUNT
    kernel.close(1)


@compiles
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "patience",
    [
        Patience(idle_s=0, life_s=1e3, stall_s=1e3),
        Patience(idle_s=1e3, life_s=1e-6, stall_s=1e3),
    ],
    ids=["idle", "old"],
)
def test_a_kernel_that_ended_is_started_again_and_no_job_is_lost_or_done_twice(
    patience: Patience, seed: int, cache: Path
) -> None:
    device = InterpretedDevice(seed)
    kernel, sums = make(device, cache, patience), Sums(device, 12)

    work_off(device, kernel, sums, 12)

    sums.check(12)
    assert device.nlaunches > 1
    kernel.close(1)


@compiles
def test_without_jobs_it_ends_by_itself(cache: Path) -> None:
    device = InterpretedDevice()
    kernel, sums = make(device, cache, Patience(idle_s=1e-4)), Sums(device, 1)
    sums.post(kernel, 1)

    assert device.run(200_000)

    assert kernel.poll() == 1
    sums.check(1)


@compiles
def test_what_was_posted_before_the_stop_is_done(cache: Path) -> None:
    for seed in range(5):
        device = InterpretedDevice(seed)
        kernel, sums = make(device, cache, FOREVER), Sums(device, 3)
        for job in (1, 2, 3):
            sums.post(kernel, job)
            device.run(int(device.rng.integers(0, 100)))

        kernel.close(1)

        sums.check(3)
        assert len(device.memory) == 1  # that of the sums


def work_until_absent(device: InterpretedDevice, kernel: Resident) -> int:
    """Poll until the kernel has found that it is absent; return the last job that is done."""
    while not kernel.is_absent:
        device.run(100)
        done = kernel.poll()
    return done


@compiles
@pytest.mark.parametrize("kept_off", [{2}, {1, 2}, {1}])
def test_no_job_is_begun_unless_all_blocks_run(kept_off: set[int], cache: Path) -> None:
    device = InterpretedDevice()
    device.kept_off = kept_off
    kernel = make(device, cache, Patience(idle_s=1e3, life_s=1e3, stall_s=1e-5))
    sums = Sums(device, 3)
    for job in (1, 2):
        sums.post(kernel, job)

    assert work_until_absent(device, kernel) == 0

    sums.check(0)
    assert not kernel.has_room
    with pytest.raises(InvalidArgument, match="did not all come to run: launch kernels instead"):
        sums.post(kernel, 3)
    with pytest.raises(TransportTimeout, match="has not ended"):
        kernel.close(1)

    device.kept_off = set()  # what comes late finds nothing to do

    kernel.close(1)
    sums.check(0)
    assert device.nlaunches == 1


@compiles
@pytest.mark.parametrize("seed", range(3))
def test_a_kernel_that_ran_may_not_come_to_run_again(seed: int, cache: Path) -> None:
    """What it has done is told of, and what it has not done was not begun."""
    device = InterpretedDevice(seed)
    kernel, sums = make(device, cache, Patience(idle_s=1e-6, stall_s=1e-5)), Sums(device, 3)
    sums.post(kernel, 1)
    while kernel.poll() < 1:
        device.run(100)
    assert device.run(20_000)  # it is idle, and ends
    device.kept_off = {1}
    for job in (2, 3):
        sums.post(kernel, job)

    assert work_until_absent(device, kernel) == 1

    sums.check(1)
    device.kept_off = set()
    kernel.close(1)
    sums.check(1)


@compiles
def test_the_roll_may_take_longer_than_the_kernel_lives(cache: Path) -> None:
    device = InterpretedDevice(4)
    device.kept_off = {2}
    kernel = make(device, cache, Patience(idle_s=1e3, life_s=1e-5, stall_s=1e3))
    sums = Sums(device, 1)
    sums.post(kernel, 1)
    device.run(5000)
    assert kernel.poll() == 0

    device.kept_off = set()
    while kernel.poll() < 1:
        device.run(100)

    sums.check(1)
    assert device.nlaunches == 1
    kernel.close(1)


@compiles
def test_a_block_that_is_taken_off_the_gpu_is_an_error_and_no_hang(cache: Path) -> None:
    device = InterpretedDevice()
    kernel = make(device, cache, Patience(idle_s=1e3, life_s=1e3, stall_s=1e-5))
    sums = Sums(device, 2)
    sums.post(kernel, 1)
    while kernel.poll() < 1:
        device.run(10)
    device.kept_off = {2}
    sums.post(kernel, 2)

    def wait() -> None:
        while kernel.poll() == 1:
            device.run(100)

    with pytest.raises(TransportError, match="not ended by all of 3 blocks") as raised:
        wait()
    assert raised.value.status == "STALLED"
    with pytest.raises(TransportTimeout, match="has not ended"):
        kernel.close(1)

    device.kept_off = set()

    kernel.close(1)


@compiles
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_text_orders_what_it_tells_the_host_and_among_its_blocks(
    capability: tuple[int, int], cache: Path
) -> None:
    text = ptx_of(ADD, capability, cache).text.decode()

    names = [
        name for name, _ in ((m[2], m[1]) for m in re.finditer(r"\.param \.(\w+) (\w+)", text))
    ]
    assert len(names) == len(resident.PARAMETERS) + 2
    for wanted in (
        r"ld\.acquire\.sys\.global\.u64",
        r"ld\.acquire\.gpu\.global\.u64",
        r"st\.release\.gpu\.global\.u64",
        r"st\.release\.sys\.global\.u64",
        r"red\.release\.gpu\.global\.add\.u64",
        r"nanosleep\.u32",
        r"%globaltimer",
        r"bar\.sync",
        r"ld\.global\.v2\.f64",
        r"st\.global\.v2\.f64",
    ):
        assert re.findall(wanted, text), wanted
    assert not re.findall(r"\.local|\bcall\b", text)


# Numba's simulator


@pytest.mark.skipif(
    importlib.util.find_spec("numba.cuda") is None,
    reason="this Numba has no CUDA simulator: `pip install numba-cuda`",
)
def test_in_the_simulator_jobs_are_done_by_all_blocks_or_by_none() -> None:
    tests = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", tests / "resident_simulated.py"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(tests.parent)},
    )
    assert run.returncode == 0, run.stderr
    alone, absent = json.loads(run.stdout)
    assert alone["done"] == 3
    assert alone["ended"] == resident.STOPPED
    assert alone["total"] == [0, 3, 6, 9, 12]
    assert absent == {
        "done": 0,
        "ended": resident.ABSENT,
        "total": [0] * 5,
        "published": resident.END,
        "arrived": 2,
    }


# The mailbox


def test_jobs_are_numbered_and_written_before_they_are_posted() -> None:
    memory = np.zeros(resident.MAILBOX_NBYTES, np.uint8)
    mailbox, words = Mailbox(memory), memory.view(np.int64)

    assert [mailbox.post([10 * i, 20, 30, 40]) for i in (1, 2)] == [1, 2]

    slot = (resident.RING + 2 * resident.SLOT_NBYTES) // 8
    assert words[slot : slot + 4].tolist() == [20, 20, 30, 40]
    assert (words[resident.POSTED // 8], mailbox.posted, mailbox.done) == (2, 2, 0)


def test_lines_of_the_host_and_of_the_device_are_apart() -> None:
    assert {at // 64 for at in (resident.POSTED, resident.STOP)} == {0}
    assert {at // 64 for at in (resident.DONE, resident.ENDED)} == {1}
    assert resident.RING // 64 >= 2
    # 8 inputs, 8 outputs and the bytes.
    assert resident.SLOT_NBYTES >= 8 * 17


# What is refused


@pytest.mark.parametrize(
    ("form", "nblocks"),
    [(ADD, 0), (ADD, 132 * 2 + 1), (Form(dtype_code=FLOAT64, op=ReduceOp.SUM), 1)],
)
def test_too_many_blocks_and_other_forms_are_refused(form: Form, nblocks: int) -> None:
    device: Any = InterpretedDevice()
    with pytest.raises(InvalidArgument, match=r"give a form with is_resident, and 1 to 264"):
        Resident(device, Launcher(device), form, nblocks=nblocks)


def test_a_processor_that_reorders_stores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    device: Any = InterpretedDevice()
    with pytest.raises(InvalidArgument, match="a resident kernel on aarch64"):
        Resident(device, Launcher(device), ADD, nblocks=1)


def test_a_launcher_makes_one_for_what_it_launches(cache: Path) -> None:
    assert [nblocks_to_stay(nsms) for nsms in (1, 4, 132)] == [2, 8, 16]
    device: Any = InterpretedDevice()
    launcher = Launcher(device, directory=cache)
    launched = Form(dtype_code=FLOAT64, op=ReduceOp.SUM)
    with pytest.raises(InvalidArgument, match="0 blocks of r2ccl_sum_float64_2_1_resident"):
        launcher.stay(launched, nblocks=0)
    with pytest.raises(InvalidArgument, match="nranks=0"):
        launcher.stay(launched, nranks=0)


def test_a_form_cannot_have_both_a_table_and_a_mailbox() -> None:
    with pytest.raises(InvalidArgument, match="has_table and is_resident"):
        Form(dtype_code=FLOAT64, op=ReduceOp.SUM, has_table=True, is_resident=True)

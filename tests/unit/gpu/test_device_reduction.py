"""Work on a device beside the data loop: each done once, in the order given, and told when it is.

The GPU is a fake that runs work late, in any order that streams and events allow, and fails on
accesses that nothing orders.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any
from unittest import mock

import numpy as np
import pytest

from r2ccl.dtypes import CODES
from r2ccl.errors import TransportError
from r2ccl.gpu.device_reduction import ReductionStream
from r2ccl.kernels.cuda import Form
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu, Race, WrongOrder
from r2ccl.testing.fakedevice.forms import FakeLauncher
from r2ccl.types import ReduceOp

INT64 = CODES[np.dtype(np.int64)]
SUM = Form(dtype_code=INT64, op=ReduceOp.SUM)
PROD = Form(dtype_code=INT64, op=ReduceOp.PROD)
MEAN = Form(dtype_code=CODES[np.dtype(np.float64)], op=ReduceOp.AVG, is_divided=True)
COUNT, NSLOTS, NRANKS = 4, 6, 3
NBYTES = 8 * COUNT
TIMEOUT_S = 10.0
REDUCED = {SUM: np.add, PROD: np.multiply}


class Bench:
    """Some arrays on a fake GPU, what should be in them, and work on them."""

    def __init__(self, seed: int = 0, *, reorders: bool = True) -> None:
        self.random = random.Random(seed)
        self.gpu = FakeGpu(seed, reorders_remote_writes=reorders)
        self.device = FakeDevice(self.gpu)
        self.reductions = ReductionStream(self.device, FakeLauncher(self.device))
        self.word = self.device.allocate_pinned(64)
        self.slots = [self.device.allocate(NBYTES) for _ in range(NSLOTS)]
        self.meant = [np.full(COUNT, i + 1) for i in range(NSLOTS)]
        #: The number of the last work on each.
        self.used = [0] * NSLOTS
        self.nmarks = 0
        for slot, data in zip(self.slots, self.meant, strict=True):
            self.device.write(slot, data)

    def reduce(self, form: Form, a: int, b: int, to: int) -> int:
        number = self.reductions.run(
            form, (self.slots[a], self.slots[b]), self.slots[to], COUNT, NRANKS
        )
        self.meant[to] = REDUCED[form](self.meant[a], self.meant[b])
        return self._note(number, a, b, to)

    def copy(self, source: int, to: int) -> int:
        number = self.reductions.copy(self.slots[to], self.slots[source], NBYTES)
        self.meant[to] = self.meant[source].copy()
        return self._note(number, source, to)

    def mark(self) -> int:
        self.nmarks += 1
        return self.reductions.mark(int(self.word.ctypes.data), self.nmarks)

    def receive(self, slot: int) -> None:
        """Have a NIC write a slice."""
        self.meant[slot] = np.full(COUNT, self.random.randrange(100))
        self.device.nic_write(self.slots[slot], self.meant[slot])

    def _note(self, number: int, *slots: int) -> int:
        for slot in slots:
            self.used[slot] = number
        return number

    def finish(self) -> None:
        """Wait for all work, look at its results, and free everything."""
        assert self.reductions.drain(TIMEOUT_S)
        assert not self.reductions.is_busy
        for slot, meant in zip(self.slots, self.meant, strict=True):
            np.testing.assert_array_equal(self.device.read(slot, NBYTES).view(np.int64), meant)
        if self.nmarks:
            self.device.host_reads(self.word)
            assert self.word.view(np.uint32)[0] == self.nmarks
        self.reductions.close()
        self.device.close()


def program(bench: Bench, nturns: int = 25) -> None:
    """Go on as the data loop does: slices arrive, work is polled, given and committed."""
    draw = bench.random
    numbers = itertools.count(1)
    done = 0
    for _ in range(nturns):
        for slot in range(NSLOTS):
            if bench.used[slot] <= done and draw.random() < 0.2:
                bench.receive(slot)
        before, done = done, bench.reductions.poll()
        assert done >= before
        for _ in range(draw.randrange(4)):
            a, b, to = draw.sample(range(NSLOTS), 3)
            target = draw.choice((a, to))
            kind = draw.choice((SUM, SUM, SUM, PROD, "copy", "mark"))
            if kind == "copy":
                number = bench.copy(a, to)
            elif kind == "mark":
                number = bench.mark()
            else:
                assert isinstance(kind, Form)
                number = bench.reduce(kind, a, b, target)
            assert number == next(numbers)
        bench.reductions.commit()
    bench.finish()


@pytest.mark.parametrize("seed", range(12))
def test_all_work_is_done_once_in_the_order_given(seed: int) -> None:
    program(Bench(seed))


def _believed_done() -> contextlib.AbstractContextManager[Any]:
    """Work counts as done as soon as it is given."""
    return mock.patch.object(ReductionStream, "poll", lambda self: self._begun)


def _not_flushed() -> contextlib.AbstractContextManager[Any]:
    """What NICs wrote is not waited for."""
    return mock.patch.object(FakeDevice, "flush_remote_writes", return_value=None)


def _flushed_once() -> contextlib.AbstractContextManager[Any]:
    """What NICs wrote is waited for before the first work of all, and never again."""
    original = ReductionStream.commit

    def commit(self: ReductionStream) -> None:
        is_flushed = self._is_flushed
        original(self)
        self._is_flushed = is_flushed

    return mock.patch.object(ReductionStream, "commit", commit)


def _on_any_stream() -> contextlib.AbstractContextManager[Any]:
    """Copies are given to another stream than kernels."""

    def copy(self: ReductionStream, target: int, source: int, nbytes: int) -> int:
        self._flush()
        self._device.copy(target, source, nbytes, self._device.make_stream())
        self._begun += 1
        return self._begun

    return mock.patch.object(ReductionStream, "copy", copy)


MISTAKES = {
    "believed done": _believed_done,
    "not flushed": _not_flushed,
    "flushed once": _flushed_once,
    "on any stream": _on_any_stream,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    def sweep() -> None:
        for seed in range(30):
            program(Bench(seed))

    with MISTAKES[mistake](), pytest.raises((WrongOrder, AssertionError)):
        sweep()


def test_of_a_divided_form_the_number_of_ranks_counts() -> None:
    bench = Bench()
    for place in bench.slots:
        bench.device.write(place, np.full(COUNT, 6.0))
    places = bench.slots
    for nranks, to in ((NRANKS, 2), (4, 3)):
        bench.reductions.run(MEAN, (places[0], places[1]), places[to], COUNT, nranks)
    assert bench.reductions.drain(TIMEOUT_S)
    found = [bench.device.read(places[to], NBYTES).view(np.float64)[0] for to in (2, 3)]
    assert found == [4.0, 3.0]
    bench.reductions.close()
    bench.device.close()


@pytest.mark.parametrize("reorders", [True, False])
def test_the_first_work_after_a_commit_follows_a_needed_flush(
    reorders: bool,
) -> None:
    bench = Bench(reorders=reorders)
    with mock.patch.object(FakeDevice, "flush_remote_writes") as flush:
        bench.reductions.commit()
        flush.assert_not_called()
        for turn in range(1, 4):
            for _ in range(3):
                bench.reduce(SUM, 0, 1, 0)
            bench.reductions.commit()
            bench.reductions.commit()
            bench.reductions.poll()
            assert flush.call_count == turn * reorders
    bench.finish()


def test_a_commit_without_work_records_nothing() -> None:
    bench = Bench()
    with mock.patch.object(
        FakeDevice, "record", autospec=True, side_effect=FakeDevice.record
    ) as it:
        bench.reductions.commit()
        assert it.call_count == 0
        bench.reduce(SUM, 0, 1, 0)
        bench.reduce(SUM, 0, 1, 0)
        bench.reductions.commit()
        bench.reductions.commit()
        assert it.call_count == 1
    bench.finish()


# What fails


@pytest.mark.parametrize("refused", ["launch", "copy", "write_word", "flush_remote_writes"])
def test_work_that_the_device_refuses_is_dropped(refused: str) -> None:
    bench = Bench()
    act = {"copy": lambda: bench.copy(0, 2), "write_word": bench.mark}.get(
        refused, lambda: bench.reduce(SUM, 0, 1, 2)
    )
    bench.reductions.poll()
    assert bench.reduce(SUM, 0, 1, 0) == 1
    bench.reductions.commit()
    bench.device.refusals[refused] = "CUDA_ERROR_LAUNCH_FAILED"
    with pytest.raises(TransportError, match="CUDA_ERROR_LAUNCH_FAILED"):
        act()
    bench.nmarks = 0

    del bench.device.refusals[refused]
    assert bench.reductions.drain(TIMEOUT_S)
    assert bench.reductions.poll() == 1
    assert bench.reduce(SUM, 0, 1, 3) == 2
    bench.finish()


def test_a_host_that_does_not_wait_is_found() -> None:
    bench = Bench()
    bench.reduce(SUM, 0, 1, 0)
    bench.gpu.run()
    with pytest.raises(Race):
        bench.device.write(bench.slots[0], np.zeros(COUNT))


def test_drain_says_when_the_time_was_too_short() -> None:
    bench = Bench()
    flag = bench.device.allocate_pinned(64).view(np.uint32)
    bench.device.wait_word(bench.reductions._stream, int(flag.ctypes.data), 1)
    bench.reduce(SUM, 0, 1, 0)
    assert not bench.reductions.drain(0.0)
    assert bench.reductions.is_busy
    flag[0] = 1
    bench.finish()

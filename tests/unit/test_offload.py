"""Work on a device: by launches or a resident kernel, each done once, and in the order given.

The GPU is a fake that runs work late, in any order that streams, events and words allow, and fails
on accesses that nothing orders. The resident kernel behind the mailbox is a fake too: it ends at
random, and can be told not to come to run.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from r2ccl.dtypes import CODES
from r2ccl.errors import InvalidArgument, TransportError, TransportTimeout
from r2ccl.gpu.offload import Offload
from r2ccl.gpu.reducers import Posts
from r2ccl.gpu.settling import NFIRST, NROUNDS, NSLICES, slice_s
from r2ccl.kernels.cuda import Form, resident
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu, Race, WrongOrder
from r2ccl.testing.fakedevice.forms import FakeLauncher
from r2ccl.testing.fakedevice.staying import FakeResident, Whims
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

    def __init__(self, seed: int = 0, whims: Whims | None = None, clock: Any = None) -> None:
        self.random = random.Random(seed)
        gpu = FakeGpu(seed, reorders_remote_writes=True)
        self.device = FakeDevice(gpu)
        self.launcher = FakeLauncher(self.device, whims=whims or Whims(seed))
        given = {} if clock is None else {"clock": clock}
        self.offload = Offload(self.device, self.launcher, **given)
        self.word = self.device.allocate_pinned(64)
        self.slots = [self.device.allocate(NBYTES) for _ in range(NSLOTS)]
        self.meant = [np.full(COUNT, i + 1) for i in range(NSLOTS)]
        #: The number of the last work on each.
        self.used = [0] * NSLOTS
        self.nmarks = 0
        for slot, data in zip(self.slots, self.meant, strict=True):
            self.device.write(slot, data)

    def stay(self, *forms: Form) -> None:
        for form in forms:
            assert self.offload.settle_on(form, NRANKS, (), 0, setting="1")

    def reduce(self, form: Form, a: int, b: int, to: int) -> int:
        number = self.offload.run(
            form, (self.slots[a], self.slots[b]), self.slots[to], COUNT, NRANKS
        )
        self.meant[to] = REDUCED[form](self.meant[a], self.meant[b])
        return self._note(number, a, b, to)

    def copy(self, source: int, to: int) -> int:
        number = self.offload.copy(self.slots[to], self.slots[source], NBYTES)
        self.meant[to] = self.meant[source].copy()
        return self._note(number, source, to)

    def mark(self) -> int:
        self.nmarks += 1
        return self.offload.mark(int(self.word.ctypes.data), self.nmarks)

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
        assert self.offload.drain(TIMEOUT_S)
        assert not self.offload.is_busy
        for slot, meant in zip(self.slots, self.meant, strict=True):
            np.testing.assert_array_equal(self.device.read(slot, NBYTES).view(np.int64), meant)
        if self.nmarks:
            self.device.host_reads(self.word)
            assert self.word.view(np.uint32)[0] == self.nmarks
        self.offload.close(TIMEOUT_S)
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
        before, done = done, bench.offload.poll()
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
        bench.offload.commit()
    bench.finish()


RESIDENTS = {"none": (), "one": (SUM,), "two": (SUM, PROD)}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("forms", RESIDENTS.values(), ids=RESIDENTS)
def test_all_work_is_done_once_in_the_order_given(forms: tuple[Form, ...], seed: int) -> None:
    bench = Bench(seed)
    bench.stay(*forms)
    program(bench)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("absent_from", [1, 2, 4])
def test_what_an_absent_kernel_has_not_begun_is_launched(absent_from: int, seed: int) -> None:
    bench = Bench(seed, Whims(seed, absent_from=absent_from))
    bench.stay(SUM, PROD)
    program(bench)


def _not_held() -> contextlib.AbstractContextManager[Any]:
    """Work is issued though another reducer has work under way."""

    def issue(self: Offload) -> None:
        while self._held:
            number, work = self._held.popleft()
            self._current = self._reducer_of(work)
            self._flush()
            self._current.issue(number, work)

    return mock.patch.object(Offload, "_issue", issue)


def _believed_done() -> contextlib.AbstractContextManager[Any]:
    """A job counts as done as soon as it is posted."""

    original = Posts.poll

    def poll(self: Posts) -> int:
        last = self._jobs[-1].number
        original(self)
        return last

    return mock.patch.object(Posts, "poll", poll)


def _not_flushed() -> contextlib.AbstractContextManager[Any]:
    """What NICs wrote is not waited for."""
    return mock.patch.object(FakeDevice, "flush_remote_writes", return_value=None)


def _launched_twice() -> contextlib.AbstractContextManager[Any]:
    """The last job that an absent kernel has done is launched again."""
    original = Posts.poll
    done: list[tuple[int, Any]] = []

    def poll(self: Posts) -> int:
        before = [(each.number, each.work) for each in self._jobs]
        number = original(self)
        done.extend(each for each in before if each[0] <= number)
        return number

    def take_back(self: Posts) -> list[tuple[int, Any]]:
        left = [(each.number, each.work) for each in self._jobs]
        self._jobs.clear()
        return [*done[-1:], *left]

    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.object(Posts, "poll", poll))
    patches.enter_context(mock.patch.object(Posts, "take_back", take_back))
    return patches


MISTAKES = {
    "not held": _not_held,
    "believed done": _believed_done,
    "not flushed": _not_flushed,
    "launched twice": _launched_twice,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    def sweep() -> None:
        for seed in range(30):
            bench = Bench(seed, Whims(seed, absent_from=3))
            bench.stay(SUM)
            program(bench)

    with MISTAKES[mistake](), pytest.raises((WrongOrder, AssertionError)):
        sweep()


def test_a_full_mailbox_holds_jobs_back() -> None:
    bench = Bench(3, Whims(3, most_jobs=1000))
    bench.stay(SUM)
    njobs = 2 * resident.NSLOTS + 5
    posted = 0
    for _ in range(njobs):
        bench.reduce(SUM, 0, 1, 0)
        posted = max(posted, len(bench.offload._posts[SUM, NRANKS]._jobs))
    assert posted == resident.NSLOTS
    bench.finish()


@pytest.mark.parametrize(
    "whims",
    [Whims(1, most_jobs=1), Whims(1, most_looks=1), Whims(1, most_jobs=1, most_looks=1)],
    ids=["old", "idle", "both"],
)
def test_a_kernel_that_ended_goes_on(whims: Whims) -> None:
    bench = Bench(1, whims)
    bench.stay(SUM)
    for _ in range(30):
        bench.reduce(SUM, 0, 1, 0)
        bench.offload.commit()
        bench.offload.poll()
    bench.finish()


def test_a_resident_kernel_does_without_launches_and_others_are_launched() -> None:
    bench = Bench()
    bench.stay(SUM)
    with mock.patch.object(FakeLauncher, "launch", autospec=True) as launch:
        for _ in range(5):
            bench.reduce(SUM, 0, 1, 0)
        assert bench.offload.drain(TIMEOUT_S)
        launch.assert_not_called()
    bench.reduce(PROD, 0, 1, 2)
    bench.finish()


def test_of_a_divided_form_the_number_of_ranks_counts() -> None:
    bench = Bench()
    bench.stay(MEAN)
    for place in bench.slots:
        bench.device.write(place, np.full(COUNT, 6.0))
    places = bench.slots
    for nranks, to in ((NRANKS, 2), (4, 3)):
        bench.offload.run(MEAN, (places[0], places[1]), places[to], COUNT, nranks)
    assert bench.offload.drain(TIMEOUT_S)
    found = [bench.device.read(places[to], NBYTES).view(np.float64)[0] for to in (2, 3)]
    assert found == [4.0, 3.0]
    bench.offload.close()
    bench.device.close()


# An absent kernel


def test_an_absent_kernel_is_told_of_once_and_not_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(0, Whims(absent_from=1))
    bench.stay(SUM, PROD)
    with caplog.at_level(logging.INFO, "r2ccl.gpu.offload"):
        for _ in range(10):
            bench.reduce(SUM, 0, 1, 0)
        assert bench.offload.drain(TIMEOUT_S)
        for _ in range(10):
            bench.reduce(PROD, 0, 1, 0)
        assert not bench.offload.settle_on(SUM, NRANKS, (), 0, setting="1")
    told = [each.message for each in caplog.records]
    assert len(told) == 1
    assert "first for 10 slices that it had not begun" in told[0]
    bench.finish()


def test_a_kernel_that_is_absent_while_it_is_measured_is_not_used() -> None:
    bench = Bench(0, Whims(absent_from=2))
    assert not bench.offload.settle_on(SUM, NRANKS, bench.slots[1:4], NBYTES)
    bench.meant[3] = bench.meant[1] + bench.meant[2]
    bench.reduce(SUM, 0, 1, 0)
    bench.finish()


# What is faster


class Ticks:
    """A clock that goes on when work is given."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextlib.contextmanager
def costs(clock: Ticks, launch_s: float, post_s: float) -> Iterator[dict[str, int]]:
    """Have launches and posts take so long."""
    counts = {"launch": 0, "post": 0}

    def slow(owner: type, name: str, cost_s: float) -> Any:
        original: Callable[..., Any] = getattr(owner, name)

        def take(self: Any, *given: Any, **named: Any) -> Any:
            clock.now_s += cost_s
            counts[name] += 1
            return original(self, *given, **named)

        return mock.patch.object(owner, name, take)

    with slow(FakeLauncher, "launch", launch_s), slow(FakeResident, "post", post_s):
        yield counts


@pytest.mark.parametrize(
    ("launch_us", "post_us", "is_kept"), [(5, 1, True), (1, 5, False), (3, 3, False)]
)
def test_what_is_measured_to_be_faster_is_used(launch_us: int, post_us: int, is_kept: bool) -> None:
    clock = Ticks()
    bench = Bench(2, clock=clock)
    with costs(clock, launch_us * 1e-6, post_us * 1e-6) as counts:
        assert bench.offload.settle_on(SUM, NRANKS, bench.slots[1:4], NBYTES) == is_kept
        each = NROUNDS * (NFIRST + NSLICES)
        assert counts == {"launch": each, "post": each}
        bench.meant[3] = bench.meant[1] + bench.meant[2]
        bench.reduce(SUM, 0, 1, 0)
        assert counts["post"] == each + is_kept
        # It is known: nothing is measured again.
        if is_kept:
            assert bench.offload.settle_on(SUM, NRANKS, bench.slots[1:4], NBYTES)
            assert counts["launch"] == each
    bench.finish()


def test_settings_decide_without_measuring() -> None:
    bench = Bench()
    with costs(Ticks(), 0, 0) as counts:
        assert not bench.offload.settle_on(SUM, NRANKS, bench.slots[1:4], NBYTES, setting="0")
        assert bench.offload.settle_on(PROD, NRANKS, bench.slots[1:4], NBYTES, setting="1")
        assert counts == {"launch": 0, "post": 0}
    with pytest.raises(InvalidArgument, match="allowed is 'auto', '0' or '1'"):
        bench.offload.settle_on(SUM, NRANKS, bench.slots[1:4], NBYTES, setting="yes")
    bench.finish()


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("error", [InvalidArgument("no order"), TransportError("no memory")])
def test_where_there_can_be_no_resident_kernel_work_is_launched(
    error: Exception, is_forced: bool
) -> None:
    bench = Bench()
    with mock.patch.object(FakeLauncher, "stay", side_effect=error):
        if is_forced:
            with pytest.raises(type(error)):
                bench.offload.settle_on(SUM, NRANKS, (), 0, setting="1")
        else:
            assert not bench.offload.settle_on(SUM, NRANKS, bench.slots[1:4], NBYTES)
    bench.reduce(SUM, 0, 1, 0)
    bench.finish()


def test_a_kernel_that_the_device_refuses_is_not_used() -> None:
    bench = Bench()
    with mock.patch.object(FakeResident, "post", side_effect=TransportError("no resources")):
        assert not bench.offload.settle_on(SUM, NRANKS, bench.slots[1:4], NBYTES)
    bench.meant[3] = bench.meant[1] + bench.meant[2]
    bench.finish()


def test_slices_that_do_not_end_are_an_error() -> None:
    clock = Ticks()

    class Stuck:
        def commit(self) -> None:
            clock.now_s += 1

        def poll(self) -> int:
            return 0

    with pytest.raises(TransportTimeout, match="has not reduced 40 slices in 3 s"):
        slice_s(Stuck(), lambda: 1, clock=clock, timeout_s=3)


# What fails


def test_what_could_not_be_issued_is_forgotten() -> None:
    bench = Bench()
    bench.stay(SUM)
    bench.reduce(SUM, 0, 1, 0)
    assert bench.copy(0, 2) == 2  # held: the kernel has not reduced it
    assert bench.copy(0, 3) == 3
    bench.device.refusals["copy"] = "CUDA_ERROR_LAUNCH_FAILED"

    def go_on() -> None:
        while bench.offload.is_busy:
            bench.offload.commit()
            bench.offload.poll()

    with pytest.raises(TransportError, match="CUDA_ERROR_LAUNCH_FAILED"):
        go_on()

    del bench.device.refusals["copy"]
    assert bench.offload.drain(TIMEOUT_S)
    assert bench.offload.poll() == 1
    bench.meant[2:4] = [np.full(COUNT, i + 1) for i in (2, 3)]
    bench.finish()


def test_a_host_that_does_not_wait_is_found() -> None:
    bench = Bench()
    bench.stay(SUM)
    bench.reduce(SUM, 0, 1, 0)

    def overwrite() -> None:
        for _ in range(100):
            bench.device.write(bench.slots[0], np.zeros(COUNT))
            bench.device.host_sees(bench.word[:4])

    with pytest.raises(Race):
        overwrite()


def test_drain_says_when_the_time_was_too_short() -> None:
    bench = Bench()
    bench.stay(SUM)
    with mock.patch.object(FakeResident, "poll", return_value=0):
        bench.reduce(SUM, 0, 1, 0)
        assert not bench.offload.drain(0.0)
    bench.finish()

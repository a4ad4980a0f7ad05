"""Who runs the data loop: one thread at a time, and nothing that fails in it is lost."""

from __future__ import annotations

import array
import itertools
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.still import make_engine, plan

from r2ccl.errors import (
    CommunicatorRevoked,
    ConcurrentCalls,
    InternalError,
    InvalidArgument,
    PeerLost,
    TransportTimeout,
)
from r2ccl.failover.migration.links import Links
from r2ccl.planning.plan_cache import Plan
from r2ccl.runtime.arguments import as_buffer
from r2ccl.runtime.executor import LaneRun
from r2ccl.transport.verbs.lifetime import Lifetime, allocation_of
from r2ccl.types import CallSignature, Collective


def test_lanes_are_made_by_the_owner_of_the_loop() -> None:
    """They make links: no other thread may go through those at the same time."""
    engine, still = make_engine()
    done: list[str] = []

    def make(plan: Plan, links: Links) -> list[LaneRun]:
        engine.submit(done.append, "in between")
        assert done == []
        return []

    engine.run(plan(), make)
    for fn in still.soon:
        fn()
    assert done == ["in between"]


def test_a_failure_in_the_background_ends_the_communicator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was being handled is lost; a call would wait for it until its deadline."""
    engine, _ = make_engine()

    def fail() -> None:
        raise RuntimeError("dictionary changed size during iteration")

    with caplog.at_level(logging.ERROR, "r2ccl"):
        engine.submit(fail)
    assert any(record.exc_info for record in caplog.records)
    with pytest.raises(InternalError, match=r"rank 0: the data loop failed.*dictionary") as caught:
        engine.run(plan(1), lambda *_: [])
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(CommunicatorRevoked):
        engine.run(plan(1), lambda *_: [])


class Kernels:
    """A computer that is busy for some looks at it."""

    def __init__(self, nlooks: int) -> None:
        self.nlooks = nlooks
        self.computed = 0

    @property
    def is_busy(self) -> bool:
        return self.nlooks > 0

    def commit(self) -> None: ...

    def poll(self) -> int:
        self.nlooks -= 1
        self.computed = int(self.nlooks <= 0)
        return self.computed


@pytest.mark.parametrize("make", [bytearray, lambda nbytes: array.array("B", bytes(nbytes))])
def test_registered_memory_lives_until_it_is_closed(make: Any) -> None:
    engine, still = make_engine()
    x = make(64)
    died: list[bool] = []
    lifetimes = []

    def register(memory: Any) -> Any:
        found = allocation_of(memory.ctypes.data, memory.nbytes, memory)
        lifetimes.append(Lifetime(found.owner, lambda: died.append(True)))
        return SimpleNamespace(close=lifetimes[0].end)

    still.register = register  # type: ignore[attr-defined]
    registered = engine.register(as_buffer(x, writable=True).array.view(np.uint8))
    assert not died
    with pytest.raises(BufferError):
        x.extend(b"1")
    registered.close()
    x.extend(b"1")
    assert not died, "the registration ended before its memory was freed"


def test_a_registration_that_could_not_end_can_end_later() -> None:
    engine, still = make_engine()
    nended = 0

    def end() -> None:
        nonlocal nended
        nended += 1

    still.register = lambda memory: SimpleNamespace(close=end)  # type: ignore[attr-defined]
    registered = engine.register(np.zeros(64, np.uint8))

    def handler() -> None:
        with pytest.raises(ConcurrentCalls, match="signal handler"):
            registered.close()

    engine.call(handler)
    assert nended == 0
    for _ in range(2):
        registered.close()
    assert nended == 1


def test_empty_memory_needs_no_registration() -> None:
    engine, still = make_engine()

    def register(memory: Any) -> Any:
        return allocation_of(memory.ctypes.data, memory.nbytes, memory)

    still.register = register  # type: ignore[attr-defined]
    x = bytearray()
    with (
        engine.register(as_buffer(x, writable=True).array.view(np.uint8)),
        pytest.raises(BufferError),
    ):
        x.extend(b"1")
    x.extend(b"1")
    with engine.register(as_buffer(np.empty((3, 0)), writable=True).array.view(np.uint8)):
        pass


def test_nobody_sleeps_while_kernels_are_under_way() -> None:
    """No descriptor would wake the loop: it looks, and lets others run in between."""
    engine, still = make_engine()
    now = itertools.count()
    engine._clock = lambda: next(now) * 0.01
    slept: list[float] = []
    still.poll = lambda timeout_s: slept.append(timeout_s) or []  # type: ignore[method-assign, func-returns-value]

    kernels = Kernels(50)

    class Run:
        """Waits for one kernel."""

        channels = (0,)

        @property
        def remaining(self) -> int:
            return 1 - kernels.computed

        def advance(self) -> None: ...

    run: Any = Run()
    engine.run(plan(), lambda *_: [run], kernels)
    assert slept == [0.0] * 50
    assert not engine._progress.is_computing


# Calls in shared memory


def test_a_late_rank_in_shared_memory_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    now = itertools.count()
    engine, _ = make_engine(clock=lambda: next(now) * 0.1)
    call = CallSignature(Collective.BARRIER, 0, 0, 0).pack()

    def wait(op: int) -> list[str]:
        caplog.clear()
        left = iter([False] * 30)
        with caplog.at_level(logging.INFO, "r2ccl"):
            engine.waits.await_local(op, call, lambda: next(left, True), lambda: ([2], 2))
        return [record.getMessage() for record in caplog.records]

    (line,) = wait(1)
    assert line.startswith("rank 0: call 1, barrier")
    assert "ranks [2] have not called it" in line
    assert wait(2) == [], "a rank is named at most once a minute"


# Excluded rails

NICS = "rank 2 on b has eth0 (rail 0)"


def test_an_order_that_no_rank_answers_times_out() -> None:
    ticks = itertools.count()
    engine, _ = make_engine(1, lambda: float(next(ticks)), timeout_s=20.0)
    with pytest.raises(TransportTimeout, match="have not agreed to exclude or include"):
        engine.exclusions.change([(1, 0)], is_excluded=True, nics=NICS)
    engine.check()


def test_an_order_that_is_refused_changes_nothing() -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidArgument, match="would have no rail left; rank 2 on b has eth0"):
        engine.exclusions.change([(2, 0)], is_excluded=True, nics=NICS)
    assert engine.exclusions.rails() == ()
    engine.exclusions.change([(2, 0)], is_excluded=False, nics=NICS)
    engine.check()


def test_the_error_that_ends_a_communicator_is_left_to_its_call() -> None:
    engine, _ = make_engine()
    engine.on_peer_lost(2, "silent", 1.0)
    with pytest.raises(CommunicatorRevoked, match=r"was revoked: .*silent") as caught:
        engine.exclusions.change([(2, 0)], is_excluded=True, nics=NICS)
    assert isinstance(caught.value.reason, PeerLost)
    with pytest.raises(PeerLost):
        engine.check()


def test_an_error_that_two_ranks_find_is_raised_once() -> None:
    """The other rank may report a difference of calls before this rank's call finds it."""
    engine, _ = make_engine()
    engine._loop.fail(InvalidArgument("call 1 differs between ranks"))
    engine.fail_local(InvalidArgument("call 1 differs between ranks"))
    with pytest.raises(CommunicatorRevoked, match="call 1 differs between ranks"):
        engine.check()


def test_mode_failstop_excludes_nothing() -> None:
    engine, _ = make_engine(mode="failstop")
    with pytest.raises(InvalidArgument, match="R2CC_MODE=failstop"):
        engine.exclusions.change([(2, 0)], is_excluded=True, nics=NICS)


def test_calls_of_closed_shared_memory_stay_counted() -> None:
    engine, _ = make_engine()
    local = SimpleNamespace(ncalls=7, end=lambda: None)
    engine.attach(local)
    engine.detach(local)
    local.ncalls = 0  # its memory is freed
    assert engine.op == 7
    engine.enter()
    assert (engine.op, engine._calls.op) == (7, 7)

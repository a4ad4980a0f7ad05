"""Which thread runs the data loop, and what Ctrl-C leaves behind at any line."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import interrupted
from support.still import make_engine, plan

from r2ccl.clock import monotonic
from r2ccl.errors import ConcurrentCalls
from r2ccl.runtime.arrays.buffers import Buffer
from r2ccl.runtime.data_loop import DataLoop
from r2ccl.runtime.patience import Patience

JOIN_S = 30.0


def blocked_call(caller: Any, is_done: Any, loop: DataLoop) -> None:
    """Wait until ``is_done()``, as a call that has memory registered does."""

    def run() -> None:
        caller.is_calling = is_calling = True
        try:
            loop.wait(caller, is_done, Patience(60.0, "", lambda: None))  # type: ignore[arg-type, return-value]
            is_calling = False
        except BaseException as exc:
            loop.give_up(caller, exc)
            raise
        finally:
            caller.is_calling = is_calling and not loop.is_settled

    loop.owned(run)


def interrupt_beside_another(line: int) -> bool:
    """Press Ctrl-C before a line of a call while another thread takes the loop; check the rest."""
    engine, _ = make_engine()
    loop = engine._loop
    settled_by_owner: list[bool] = []
    settle = loop._settle

    def spied(is_sound: bool) -> None:
        settled_by_owner.append(loop.owner._is_owned())
        settle(is_sound)

    loop._settle = spied  # type: ignore[method-assign]
    other = threading.Thread(target=engine.call, args=(lambda: None,))

    def is_done() -> bool:
        if other.ident is None:
            other.start()
            while not loop._newcomers:
                pass
        return not other.is_alive()

    came = interrupted.at_line(line, lambda: blocked_call(engine, is_done, loop))
    if other.ident is not None:
        other.join(JOIN_S)
        assert not other.is_alive(), line
    assert all(settled_by_owner), line
    assert not loop._followers, line
    assert not loop._newcomers, line
    assert not engine.is_calling, line
    return came


@pytest.mark.parametrize("first", range(1, 9))
def test_control_c_beside_another_call_ends_both(first: int) -> None:
    line, came = first, True
    while came:
        came = interrupt_beside_another(line)
        line += 8
    assert line > 40


def test_only_the_owner_asks_whether_a_wait_is_over() -> None:
    """The answer may depend on what the loop changes, and change it."""
    engine, _ = make_engine(0, monotonic)
    loop = engine._loop
    asked: list[bool] = []
    ends = threading.Event()
    aside = threading.Event()

    def second() -> bool:
        aside.set()
        return ends.is_set()

    other = threading.Thread(target=blocked_call, args=(engine.messenger, second, loop))

    def first() -> bool:
        asked.append(loop.owner._is_owned())  # type: ignore[attr-defined]
        if other.ident is None:
            other.start()
        if len(asked) > 5:
            ends.set()
        return len(asked) > 10

    blocked_call(engine, first, loop)
    other.join(JOIN_S)
    assert aside.is_set()
    assert all(asked)


def test_a_poll_lets_a_blocking_call_own_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that polls without pause would keep the loop from the call for seconds."""
    engine, _ = make_engine()
    loop, out = engine._loop, np.zeros(1, np.uint8)
    request = engine.messenger.receive(Buffer(out, 0, 1, 1, 1, out), 1, 7)
    pauses: list[bool] = []

    def sleep(duration_s: float) -> None:
        pauses.append(bool(loop._followers) and not loop.owner._is_owned())
        time.sleep(duration_s)

    monkeypatch.setattr("r2ccl.runtime.data_loop.time", SimpleNamespace(sleep=sleep))
    asked, is_over = threading.Event(), threading.Event()

    def is_done() -> bool:
        asked.set()
        return is_over.is_set()

    other = threading.Thread(target=blocked_call, args=(engine, is_done, loop))
    other.start()
    assert asked.wait(JOIN_S)
    for _ in range(1000):
        assert not request.is_done()
    is_over.set()
    other.join(JOIN_S)
    assert True in pauses


def test_control_c_in_a_probe_ends_the_job() -> None:
    """It may have lost events that the transport had reported."""
    engine, still = make_engine()

    def poll(timeout_s: float) -> list[Any]:
        raise KeyboardInterrupt

    still.poll = poll  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.messenger.probe(1, 0, is_blocking=False)
    assert "interrupted" in str(engine.error)


def test_a_handler_within_the_loop_may_not_call() -> None:
    engine, _ = make_engine()

    def handler() -> None:
        with pytest.raises(ConcurrentCalls, match="signal handler"):
            engine.messenger.probe(1, 0, is_blocking=False)
        with pytest.raises(ConcurrentCalls, match="signal handler"):
            engine.call(lambda: None)
        with pytest.raises(ConcurrentCalls, match="signal handler"):
            engine.run(plan(), lambda *_: [])

    engine.call(handler)
    assert engine.error is None
    free = threading.Thread(target=engine.call, args=(lambda: None,))
    free.start()
    free.join(JOIN_S)
    assert not free.is_alive()


def test_the_second_tick_interrupts_a_call() -> None:
    engine, still = make_engine()
    loop = engine._loop
    seen: list[tuple[int, int]] = []
    woken: list[None] = []
    still.wake = lambda: woken.append(None)  # type: ignore[method-assign]

    def tick_twice() -> None:
        for _ in range(2):
            engine.on_tick(monotonic())
            seen.append((len(woken), len(loop.inbox)))

    with loop.owner:
        loop._sleeping = True
        other = threading.Thread(target=tick_twice)
        other.start()
        other.join(JOIN_S)
        loop._sleeping = False
    assert seen == [(0, 0), (1, 1)]


def test_a_late_tick_leaves_a_closed_transport_alone() -> None:
    """On a busy machine the control thread may end after the transport is freed."""
    engine, still = make_engine()
    polled: list[float] = []

    def poll(timeout_s: float) -> list[Any]:
        polled.append(timeout_s)
        return []

    still.poll = poll  # type: ignore[method-assign]
    engine.on_tick(monotonic())
    assert polled
    polled.clear()
    engine.close()
    engine.on_tick(monotonic())
    assert not polled
    assert engine.error is None


def test_a_wait_outside_of_the_loop_sees_an_end_during_its_poll() -> None:
    """The control thread may have ended, so it cannot be asked to handle the event."""
    engine, still = make_engine()

    def poll(timeout_s: float) -> list[Any]:
        other = threading.Thread(target=engine.revoke, args=("TEST: over",))
        other.start()
        other.join(JOIN_S)
        assert engine.error is None
        return []

    still.poll = poll  # type: ignore[method-assign]
    engine._loop.poll(engine)
    assert "TEST: over" in str(engine.error)


def test_the_control_plane_is_busy_while_a_call_is_repeated() -> None:
    engine, _ = make_engine()
    loop, program, found = engine._loop, object(), []
    loop.compiled = SimpleNamespace(  # type: ignore[assignment]
        held=SimpleNamespace(program=program, delayed=()), settle=lambda: None
    )

    def repeat(x: Any, out: Any, rest: Any) -> str:
        found.append(loop._control.is_busy)
        return "done"

    switch = bool  # not called: the held program is the same
    done = loop.repeat(engine, program, switch, repeat, None, None, ())  # type: ignore[arg-type]
    assert done == "done"
    assert (found, loop._control.is_busy) == ([True], False)

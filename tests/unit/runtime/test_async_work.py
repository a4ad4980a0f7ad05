"""A worker does what it is given once, in order; a Work tells how it went."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from r2ccl.errors import (
    CommunicatorRevoked,
    InvalidArgument,
    PeerLost,
    TransportError,
    TransportTimeout,
)
from r2ccl.runtime.async_work import Task, Work, Worker


class Gate:
    """A task that runs until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.go.wait(10)


def make(errors: list[BaseException] | None = None) -> Worker:
    on_error = (errors if errors is not None else []).append
    return Worker("worker of a test", threading.Lock(), on_error)


def fail() -> None:
    raise PeerLost(rank=0, peer=1, last_heard_s=0.0, why="for a test")


def fail_to_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_tasks_are_done_in_order_in_one_thread() -> None:
    worker, done = make(), []
    tasks = [
        worker.submit(lambda at=at: done.append((at, threading.get_ident())))  # type: ignore[misc]
        for at in range(100)
    ]
    assert tasks[-1].wait(10)
    assert [at for at, _ in done] == list(range(100))
    assert len({ident for _, ident in done}) == 1
    assert done[0][1] != threading.get_ident()
    assert worker.is_idle
    assert worker.close(10)


def test_no_thread_is_made_for_nothing() -> None:
    before = threading.active_count()
    worker = make()
    assert worker.is_idle
    assert worker.drain(0)
    assert worker.close(0)
    assert threading.active_count() == before


def test_a_thread_that_cannot_start_queues_nothing() -> None:
    worker, task = make(), Task(int)
    with pytest.MonkeyPatch.context() as refused:
        refused.setattr(threading.Thread, "start", fail_to_start)
        with pytest.raises(TransportError, match="can't start new thread"):
            worker.enqueue(task)
    worker.settle(task)
    assert worker.is_idle
    assert worker.submit(int).wait(10)
    assert worker.close(10)


def test_an_error_is_told_before_waiters_wake_and_ends_no_more() -> None:
    errors: list[BaseException] = []
    worker = make(errors)
    task = worker.submit(fail)
    assert task.wait(10)
    assert errors == [task.error]
    assert isinstance(task.error, PeerLost)
    after = worker.submit(lambda: None)
    assert after.wait(10)
    assert after.error is None
    assert worker.close(10)


def test_closing_refuses_what_has_not_begun_and_awaits_what_has() -> None:
    worker, gate = make(), Gate()
    first = worker.submit(gate)
    second = worker.submit(lambda: None)
    assert gate.begun.wait(10)
    assert not worker.close(0)
    assert second.has_ended
    assert isinstance(second.error, CommunicatorRevoked)
    assert not first.has_ended
    gate.go.set()
    assert worker.close(10)
    assert first.error is None
    with pytest.raises(CommunicatorRevoked, match="closed"):
        worker.submit(lambda: None)


def test_what_a_task_holds_is_let_go_when_it_is_over() -> None:
    import weakref

    class Held:
        def __call__(self) -> None:
            pass

    held = Held()
    gone = weakref.ref(held)
    worker = make()
    task = worker.submit(held)
    assert task.wait(10)
    del held
    assert worker.close(10)
    assert gone() is None


def test_work_gives_its_result_and_raises_what_ended_it() -> None:
    worker, result = make(), object()
    work = Work(worker.submit(lambda: None), result, 10)
    assert work.wait() is result
    assert work.is_done()
    broken = Work(worker.submit(fail), result, 10)
    with pytest.raises(PeerLost):
        broken.wait()
    assert broken.is_done()
    assert worker.close(10)


def test_work_converts_its_result_once_and_after_the_end() -> None:
    worker, gate, converted = make(), Gate(), []

    def convert(result: str) -> list[str]:
        converted.append(result)
        return [result]

    work = Work[Any](worker.submit(gate), "host", 10, convert=convert)
    with pytest.raises(TransportTimeout):
        work.wait(timeout_s=0.01)
    assert not converted
    gate.go.set()
    found = work.wait()
    assert found == ["host"]
    assert work.wait() is found
    assert converted == ["host"]
    assert worker.close(10)


def test_work_is_waited_for_with_a_deadline_and_again() -> None:
    worker, gate = make(), Gate()
    work = Work(worker.submit(gate), 5, 10)
    assert not work.is_done()
    with pytest.raises(TransportTimeout, match=r"has not finished .* and continues"):
        work.wait(timeout_s=0.01)
    gate.go.set()
    assert work.wait() == 5
    assert worker.close(10)


def test_work_in_host_memory_orders_no_stream() -> None:
    worker = make()
    with pytest.raises(InvalidArgument, match="host memory"):
        Work(worker.submit(lambda: None), None, 10).order()
    assert worker.close(10)


class FakeEffects:
    """Effects that are done when a test says so."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.ordered: list[Any] = []

    def is_done(self) -> bool:
        return self.done.is_set()

    def synchronize(self, timeout_s: float) -> bool:
        return self.done.wait(timeout_s)

    def order(self, stream: Any) -> None:
        self.ordered.append(stream)


def test_work_on_a_device_is_over_when_the_device_is() -> None:
    worker, effects = make(), FakeEffects()
    task = worker.submit(lambda: None)
    work = Work(task, 7, 10, effects)
    assert task.wait(10)
    assert not work.is_done()
    with pytest.raises(TransportTimeout):
        work.wait(timeout_s=0.01)
    assert work.order(3) == 7
    assert effects.ordered == [3]
    effects.done.set()
    assert work.is_done()
    assert work.wait() == 7
    assert worker.close(10)


def test_an_error_of_the_host_needs_no_device() -> None:
    worker, effects = make(), FakeEffects()
    work = Work(worker.submit(fail), 7, 10, effects)
    with pytest.raises(PeerLost):
        work.wait()
    assert work.is_done()
    assert worker.close(10)

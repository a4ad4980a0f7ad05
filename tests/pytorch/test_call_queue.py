"""The calls of a group run one at a time, in their order, whatever the callbacks do."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import interrupted

pytest.importorskip("torch.distributed", reason="torch is not installed: make test-torch")

from r2ccl.interop.torch.call_queue import CallQueue, QueuedCall


def test_calls_run_in_their_order_and_never_two_at_once() -> None:
    queue, seen, turn = CallQueue("test"), [], threading.Lock()

    def fn(number: int) -> None:
        assert turn.acquire(blocking=False)
        seen.append(number)
        turn.release()

    calls = [QueuedCall(lambda i=i: fn(i), []) for i in range(200)]  # type: ignore[misc]
    for call in calls:
        if call is calls[150]:
            queue.run(call)
            assert seen == list(range(151))
        else:
            queue.add(call)
    assert queue.drain(10)
    assert seen == list(range(200))
    assert [call.error for call in calls] == [None] * 200
    queue.close()


def test_a_blocking_call_runs_in_the_thread_of_the_caller() -> None:
    queue, threads = CallQueue("test"), []
    queue.run(QueuedCall(lambda: threads.append(threading.get_ident()), []))
    assert threads == [threading.get_ident()]


def test_a_callback_may_wait_for_a_later_call() -> None:
    queue, begin = CallQueue("test"), threading.Event()
    later = [QueuedCall(lambda: None, [i]) for i in range(3)]

    def wait_for_all(_: object) -> list[int]:
        for call in later:
            queue.add(call)
        return [call.future().wait()[0] for call in later]

    first = QueuedCall(begin.wait, [])  # type: ignore[arg-type]
    future = first.future().then(wait_for_all)
    queue.add(first)
    begin.set()
    assert future.wait() == [0, 1, 2]
    queue.close()


def test_a_future_that_is_asked_for_late_has_the_result() -> None:
    queue, call = CallQueue("test"), QueuedCall(lambda: None, [7])
    queue.run(call)
    assert call.future().value() == [7]
    assert call.future() is call.future()


def test_a_late_future_has_the_result_while_threads_wait() -> None:
    calls = [QueuedCall(lambda: None, [i]) for i in range(300)]
    for call in calls:
        CallQueue("test").run(call)
    is_over, before = threading.Event(), sys.getswitchinterval()

    def wait_again_and_again() -> None:
        while not is_over.is_set():
            assert all(call.wait(0) for call in calls)

    with ThreadPoolExecutor(2) as pool:
        sys.setswitchinterval(1e-6)
        try:
            waiters = [pool.submit(wait_again_and_again) for _ in range(2)]
            for number, call in enumerate(calls):
                assert call.has_ended
                future = call.future()
                assert future.done()
                assert future.value() == [number]
        finally:
            sys.setswitchinterval(before)
            is_over.set()
    assert [waiter.result() for waiter in waiters] == [None, None]


def test_an_error_reaches_those_that_wait_and_the_future() -> None:
    def fail() -> None:
        raise OSError("no more")

    queue, call = CallQueue("test"), QueuedCall(fail, [])
    future = call.future()
    queue.add(call)
    assert call.wait(10)
    assert str(call.error) == "no more"
    with pytest.raises(RuntimeError, match="no more"):
        future.wait()
    queue.close()


def test_closing_ends_the_threads_after_their_calls() -> None:
    queue, before = CallQueue("closing"), threading.active_count()
    calls = [QueuedCall(lambda: None, []) for _ in range(20)]
    for call in calls:
        queue.add(call)
    assert all(call.wait(10) for call in calls)
    queue.close()
    assert threading.active_count() <= before


CLOSED_IN_A_CALLBACK = """
import threading, time
from r2ccl.interop.torch.call_queue import CallQueue, QueuedCall

queue, call, is_closed = CallQueue("queue"), QueuedCall(lambda: None, []), threading.Event()

def callback(future):
    queue.close()
    is_closed.set()
    time.sleep(0.2)  # the interpreter ends meanwhile
    print("over")

call.future().then(callback)
queue.add(call)
is_closed.wait()
"""


def test_ctrl_c_in_a_wait_that_ends_holds_up_no_other() -> None:
    call = QueuedCall(lambda: None, [])
    ended = call._ended

    call.run()
    threading.Timer(0.1, call.end).start()
    with pytest.raises(KeyboardInterrupt), interrupted.as_acquired(ended):
        call.wait(10)
    assert not ended.locked(), "a thread that waits, too, would wait for its timeout"
    assert call.wait(10)


def test_a_program_may_end_while_a_callback_closes_the_queue() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLOSED_IN_A_CALLBACK],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr

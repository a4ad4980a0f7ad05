"""Contract tests of control messages, of ranks that leave or are lost, and of the ticks."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.planes import RAILS, WAIT_S, Job, Number, Recorder, Text, join
from support.planes import start_job as start_job  # the fixture

from r2ccl.bootstrap import ControlPlane, Goodbye
from r2ccl.bootstrap.launch import LocalJob
from r2ccl.bootstrap.session import MAX_FRAME_NBYTES
from r2ccl.errors import InvalidArgument


def test_messages_from_any_thread_arrive_once_and_in_order(start_job: Callable[..., Job]) -> None:
    job = start_job(3)
    for plane in job.planes:  # the sessions may not be connected yet
        for value in range(200):
            plane.broadcast(Number(value))
    for rank, recorder in enumerate(job.seen):
        recorder.wait_for(lambda r=recorder: len(r.messages) == 400)
        for peer in {0, 1, 2} - {rank}:
            values = [m.value for p, m in recorder.messages if p == peer]  # type: ignore[attr-defined]
            assert values == list(range(200))


def test_what_was_asked_before_start_happens_then() -> None:
    with LocalJob(2) as job, ThreadPoolExecutor(2) as pool:
        planes = list(pool.map(lambda rank: join(job, rank, {}), range(2)))
    seen = [Recorder(), Recorder()]
    planes[0].send(1, Text("before"))
    planes[0].dial_path(1, 0, 7)
    planes[1].accept_path(0, 0, 7)
    for plane, recorder in zip(planes, seen, strict=True):
        plane.start(recorder)
    seen[1].wait_for(lambda: seen[1].messages == [(0, Text("before"))])
    for rank in range(2):
        seen[rank].wait_for(lambda rank=rank: (1 - rank, 0, 7) in seen[rank].paths)
    for plane, recorder in zip(planes, seen, strict=True):
        plane.close(0)
        recorder.close()


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_a_wrong_peer_is_refused(start_job: Callable[..., Job], peer: int) -> None:
    job = start_job(2)
    with pytest.raises(InvalidArgument, match="must be a rank from 0 to"):
        job.planes[0].send(peer, Text("x"))


def test_an_unregistered_message_is_refused(start_job: Callable[..., Job]) -> None:
    job = start_job(2)
    with pytest.raises(InvalidArgument, match="is not registered; known:"):
        job.planes[0].send(1, RAILS[0])


def test_a_message_that_is_too_long_is_refused_in_the_call(
    start_job: Callable[..., Job],
) -> None:
    job = start_job(2)
    long = Text("x" * MAX_FRAME_NBYTES)
    plane = job.planes[0]
    for send in (lambda: plane.send(1, long), lambda: plane.broadcast(long)):
        with pytest.raises(InvalidArgument, match=r"control message Text has .* at most"):
            send()
    plane.send(1, Text("after"))
    job.seen[1].wait_for(lambda: job.seen[1].messages == [(0, Text("after"))])


def cut_control_connections(plane: ControlPlane) -> int:
    """Reset every control connection of `plane` from inside; return their number."""
    carriers = [c for peer in plane._sessions.values() for c in peer._carriers.values()]
    for carrier in carriers:
        plane.call_soon(carrier.abort)
    return len(carriers)


def test_cut_connections_lose_and_repeat_nothing(start_job: Callable[..., Job]) -> None:
    job = start_job(2)
    job.wait_until_connected()
    total, ncut = 2000, 0
    for value in range(total):
        for rank in range(2):
            job.planes[rank].send(1 - rank, Number(value))
        if value % 200 == 100:
            # All messages sent since the last cut have arrived: a connection exists again.
            recorder = job.seen[0]
            recorder.wait_for(lambda r=recorder, n=value: len(r.messages) > n - 50)
            ncut += cut_control_connections(job.planes[value // 200 % 2])
    for recorder in job.seen:
        recorder.wait_for(lambda r=recorder: len(r.messages) == total)
        assert [m.value for _, m in recorder.messages] == list(range(total))  # type: ignore[attr-defined]
        assert recorder.lost == {}
    assert ncut >= 10


def test_a_rank_that_says_goodbye_is_not_lost(start_job: Callable[..., Job]) -> None:
    job = start_job(3)
    job.wait_until_connected()
    job.planes[2].send(0, Text("last words"))
    job.planes[2].close(2.0)
    for rank in (0, 1):
        recorder = job.seen[rank]
        recorder.wait_for(lambda r=recorder: (2, Goodbye()) in r.messages)
    assert job.seen[0].messages == [(2, Text("last words")), (2, Goodbye())]
    job.planes[0].send(2, Text("nobody is there"))
    job.planes[0].send(1, Text("still here"))
    job.seen[1].wait_for(lambda: (0, Text("still here")) in job.seen[1].messages)
    ticks = job.seen[0].ticks
    job.seen[0].wait_for(lambda: job.seen[0].ticks >= ticks + 3)
    assert job.seen[0].lost == job.seen[1].lost == {}


def test_close_waits_until_everything_is_acknowledged(start_job: Callable[..., Job]) -> None:
    job = start_job(2)
    job.wait_until_connected()
    is_blocked, go_on = threading.Event(), threading.Event()
    job.planes[1].call_soon(lambda: (is_blocked.set(), go_on.wait(WAIT_S)))
    assert is_blocked.wait(WAIT_S)
    job.planes[0].send(1, Text("last"))
    closing = threading.Thread(target=job.planes[0].close, args=(WAIT_S,))
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    go_on.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    job.seen[1].wait_for(lambda: job.seen[1].messages == [(0, Text("last")), (0, Goodbye())])


def test_close_gives_up_at_its_deadline(
    start_job: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    job = start_job(2)
    job.wait_until_connected()
    is_blocked, go_on = threading.Event(), threading.Event()
    job.planes[1].call_soon(lambda: (is_blocked.set(), go_on.wait(WAIT_S)))
    assert is_blocked.wait(WAIT_S)
    started = time.monotonic()
    job.planes[0].close(0.2)
    assert 0.2 <= time.monotonic() - started < 2.0
    assert "ranks [1] did not acknowledge close()" in caplog.text
    go_on.set()


def test_a_rank_that_just_closes_is_lost_at_once(start_job: Callable[..., Job]) -> None:
    job = start_job(3)
    job.wait_until_connected()
    started = time.monotonic()
    job.planes[0].close(0)
    for rank in (1, 2):
        recorder = job.seen[rank]
        recorder.wait_for(lambda r=recorder: 0 in r.lost)
        assert "connection refused" in recorder.lost[0]
    assert time.monotonic() - started < 1.0


def test_what_one_rank_finds_out_all_report(start_job: Callable[..., Job]) -> None:
    job = start_job(3)
    job.wait_until_connected()
    job.planes[0].call_soon(lambda: job.planes[0]._sessions[2].lose("a test says so"))
    job.seen[0].wait_for(lambda: job.seen[0].lost == {2: "a test says so"})
    job.seen[1].wait_for(lambda: job.seen[1].lost == {2: "a test says so, says rank 0"})
    job.seen[2].wait_for(lambda: {0, 1} == set(job.seen[2].lost))


def test_the_end_of_a_process_follows_its_messages(start_job: Callable[..., Job]) -> None:
    job = start_job(3)
    job.wait_until_connected()
    first, *_ = job.planes
    seen = job.seen[0]

    def stay_busy() -> None:
        """Report the end of rank 2 while this thread keeps its messages waiting in the kernel."""
        for words in ("first words", "last words"):
            job.planes[2].gossip(Text(words))
        # Rank 2 sends each message to both ranks before it sends the next one.
        job.seen[1].wait_for(lambda: (2, Text("last words")) in job.seen[1].messages)
        first.report_exit(2)

    first.call_soon(stay_busy)
    seen.wait_for(lambda: 2 in seen.lost)
    assert (2, Text("first words")) in seen.messages
    assert seen.lost[2].startswith("its process is gone: the kernel has released its mutex")
    job.seen[1].wait_for(lambda: 2 in job.seen[1].lost)
    assert job.seen[1].lost[2].endswith("says rank 0")


def test_a_rank_that_has_left_is_not_lost_when_it_exits(start_job: Callable[..., Job]) -> None:
    job = start_job(2)
    job.wait_until_connected()
    plane, seen = job.planes[0], job.seen[0]
    job.planes[1].close(2.0)
    seen.wait_for(lambda: (1, Goodbye()) in seen.messages)
    plane.report_exit(1)
    handled = threading.Event()
    plane.call_soon(lambda: plane.call_soon(lambda: plane.call_soon(handled.set)))
    assert handled.wait(WAIT_S)
    assert seen.lost == {}


def test_an_unreadable_message_ends_its_sender(start_job: Callable[..., Job]) -> None:
    job = start_job(2)
    job.wait_until_connected()
    job.planes[0].call_soon(lambda: job.planes[0]._sessions[1].send(b"\xc1"))
    job.seen[1].wait_for(lambda: 0 in job.seen[1].lost)
    assert "cannot be read" in job.seen[1].lost[0]


def test_a_failing_callback_ends_nothing_else(
    start_job: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    job = start_job(2)
    done = threading.Event()
    job.planes[0].call_soon(lambda: 1 // 0)
    job.planes[0].call_later(0.01, done.set)
    assert done.wait(WAIT_S)
    assert "a callback failed" in caplog.messages[0]
    job.wait_until_connected()


def test_a_descriptor_is_watched_until_removed(start_job: Callable[..., Job]) -> None:
    job = start_job(1)
    read_fd, write_fd = os.pipe()
    came: queue.Queue[bytes] = queue.Queue()
    job.planes[0].add_reader(read_fd, lambda: came.put(os.read(read_fd, 1)))
    os.write(write_fd, b"x")
    assert came.get(timeout=WAIT_S) == b"x"
    removed = threading.Event()
    job.planes[0].remove_reader(read_fd)
    job.planes[0].call_soon(removed.set)
    assert removed.wait(WAIT_S)
    os.write(write_fd, b"y")
    ticks = job.seen[0].ticks
    job.seen[0].wait_for(lambda: job.seen[0].ticks > ticks)
    assert came.empty()
    os.close(read_fd)
    os.close(write_fd)


def test_ticks_are_faster_while_busy(start_job: Callable[..., Job]) -> None:
    job = start_job(1)
    recorder = job.seen[0]

    def duration_s(nticks: int) -> float:
        first = recorder.ticks
        started = time.monotonic()
        recorder.wait_for(lambda: recorder.ticks >= first + nticks)
        return time.monotonic() - started

    idle_s = duration_s(4)
    job.planes[0].is_busy = True
    duration_s(1)
    assert duration_s(4) < idle_s / 2

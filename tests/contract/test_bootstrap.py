"""Contract tests of the control plane; every rank is a thread with its own environment."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.planes import RAILS, WAIT_S, Job, Number, Recorder, Text, environment, join, turn_away
from support.planes import start_job as start_job  # the fixture
from support.slow import slow_but

from r2ccl.bootstrap import ControlPlane, Goodbye, connect, leader, rendezvous, startup, wire
from r2ccl.bootstrap.auth import (
    OPENING_NBYTES,
    PROOF_NBYTES,
    PROTOCOL_VERSION,
    Claim,
    Dialer,
    Purpose,
    Secret,
)
from r2ccl.bootstrap.identity import Identity, identify
from r2ccl.bootstrap.launch import LocalJob
from r2ccl.bootstrap.listener import Listener
from r2ccl.bootstrap.messages import Codec
from r2ccl.bootstrap.session import MAX_FRAME_NBYTES, SessionFrame
from r2ccl.config import Config
from r2ccl.errors import InvalidArgument, R2cclError, TransportTimeout
from r2ccl.types import BYPASS, Nic


def join_all(
    job: LocalJob, changes: Mapping[int, Mapping[str, str]], ranks: list[int] | None = None
) -> list[BaseException | None]:
    """Join with changed environments; return the error of each rank, or None."""
    chosen = list(range(job.nranks)) if ranks is None else ranks
    with ThreadPoolExecutor(len(chosen)) as pool:
        futures: list[Future[ControlPlane]] = [
            pool.submit(join, job, rank, changes.get(rank, {}), init_timeout_s=1.0)
            for rank in chosen
        ]
        errors = [future.exception(15) for future in futures]
    for future, error in zip(futures, errors, strict=True):
        if error is None:
            future.result().close(0)
    return errors


# -- rendezvous -----------------------------------------------------------------------------


def test_all_ranks_end_with_the_same_table(start_job: Callable[..., Job]) -> None:
    job = start_job(4)
    assert len({plane.peers for plane in job.planes}) == 1
    assert len({plane.communicator_id for plane in job.planes}) == 1
    assert [info.rank for info in job.planes[0].peers] == [0, 1, 2, 3]
    assert all(plane.is_on_one_host for plane in job.planes)
    assert {len(info.rails) for info in job.planes[0].peers} == {2}


def test_the_rank_with_the_fewest_rails_decides() -> None:
    with LocalJob(2) as job, ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(
                connect,
                Config.from_env(environment(job, rank)),
                codec=Codec(Number),
                nics_for=lambda _nranks, _one, _address, count=2 - rank: RAILS[:count],
                env=environment(job, rank),
            )
            for rank in range(2)
        ]
        planes = [future.result(WAIT_S) for future in futures]
    assert [len(plane.nics) for plane in planes] == [1, 1]
    for plane in planes:
        plane.close(0)


@pytest.mark.parametrize("rank", [0, 1])
def test_opening_the_listeners_opens_no_other_file(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without a descriptor would take the error for one of its connection to rank 0."""

    def no_file_from_now_on(*_: Any) -> tuple[Nic, ...]:
        monkeypatch.setattr(startup, "host_id", exhausted)
        return RAILS

    def exhausted() -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with LocalJob(2) as job, ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(
                connect,
                Config.from_env(environment(job, each), init_timeout_s=2.0),
                codec=Codec(Number),
                nics_for=no_file_from_now_on if each == rank else lambda *_: RAILS,
                env=environment(job, each),
            )
            for each in range(2)
        ]
        planes = [future.result(WAIT_S) for future in futures]
    for plane in planes:
        plane.close(0)


def test_a_single_rank_needs_no_rendezvous(start_job: Callable[..., Job]) -> None:
    job = start_job(1)
    assert job.planes[0].nranks == 1
    job.seen[0].wait_for(lambda: job.seen[0].ticks > 0)


def test_a_missing_rank_is_named_on_all_others() -> None:
    with LocalJob(4) as job:
        errors = join_all(job, {}, ranks=[0, 1, 3])
    assert all(isinstance(error, TransportTimeout) for error in errors)
    assert all("ranks [2] have not arrived" in str(error) for error in errors)


def test_rank_0_says_for_whom_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leader, "_FIRST_REPORT_S", 0.1)
    with caplog.at_level(logging.INFO, "r2ccl"), LocalJob(4) as job:
        join_all(job, {}, ranks=[0, 1, 3])
    said = [text for text in caplog.messages if "init has waited" in text]
    assert re.search(r"^rank 0: init has waited 0\.1 s \(of [\d.]+ s\) for ranks ", said[0])
    assert all(text.endswith("for ranks [2]") for text in said[1:])
    assert 2 <= len(said) <= 5, "the interval doubles"


def test_a_rank_says_once_that_rank_0_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "_REPORT_AFTER_S", 0.1)
    with caplog.at_level(logging.INFO, "r2ccl"), LocalJob(2) as job:
        port = free_port()
        join_all(job, {1: {"R2CC_PORT": port}}, ranks=[1])
    (said,) = [text for text in caplog.messages if "was not reached yet" in text]
    assert said.startswith(f"rank 1: rank 0 was not reached yet at 127.0.0.1:{port} (")


def test_a_rank_without_rank_0_says_where_it_looked() -> None:
    with LocalJob(2) as job:
        port = free_port()
        (error,) = join_all(job, {1: {"R2CC_PORT": port}}, ranks=[1])
    assert isinstance(error, TransportTimeout)
    assert f"127.0.0.1:{port}" in str(error)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Return a function that makes the resolver fail the first `n` queries with `code`."""
    resolve = socket.getaddrinfo

    def arrange(code: int, n: int = 1 << 30) -> None:
        left = [n]

        def answer(host: Any, *args: Any, **more: Any) -> Any:
            if host == "head-node" and left[0] > 0:
                left[0] -= 1
                raise socket.gaierror(code, "the resolver's words")
            return resolve("127.0.0.1" if host == "head-node" else host, *args, **more)

        monkeypatch.setattr(socket, "getaddrinfo", answer)

    return arrange


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        return str(reserved.getsockname()[1])


def join_named(job: LocalJob, rank: int, **changes: str) -> BaseException | None:
    env = {**job.environment(rank), "MASTER_ADDR": "head-node", **changes}
    config = Config.from_env(env, init_timeout_s=1.0)
    try:
        connect(config, codec=Codec(Number), nics_for=lambda *_: RAILS, env=env).close(0)
    except R2cclError as exc:
        return exc
    return None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_cannot_exist_ends_init_at_once(
    resolver: Callable[..., None], rank: int
) -> None:
    resolver(socket.EAI_FAIL)
    began_s = time.monotonic()
    with LocalJob(2) as job:
        error = join_named(job, rank)
    assert time.monotonic() < began_s + 0.9
    assert isinstance(error, InvalidArgument)
    assert f"rank {rank}: the host of rank 0, 'head-node', cannot be resolved (EAI_FAIL" in str(
        error
    )


@pytest.mark.parametrize(
    ("rank", "code"),
    slow_but(
        [(0, socket.EAI_AGAIN), (1, socket.EAI_NONAME)],
        itertools.product([0, 1], [socket.EAI_AGAIN, socket.EAI_NONAME]),
    ),
)
def test_a_name_that_does_not_come_in_time_is_invalid(
    resolver: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    rank: int,
    code: int,
) -> None:
    resolver(code)
    with LocalJob(2) as job:
        error = join_named(job, rank)
    assert isinstance(error, InvalidArgument)
    assert f"rank {rank}: the host of rank 0, 'head-node', cannot be resolved" in str(error)
    assert "the resolver's words" in str(error)
    said = [each for each in caplog.records if "cannot be resolved yet" in each.getMessage()]
    assert len(said) == 1


@pytest.mark.parametrize("code", [socket.EAI_AGAIN, socket.EAI_NONAME])
def test_a_name_that_comes_while_the_job_starts_is_waited_for(
    resolver: Callable[..., None], code: int
) -> None:
    resolver(code, 2)
    with LocalJob(2) as job, ThreadPoolExecutor(2) as pool:
        port = free_port()
        futures = [pool.submit(join_named, job, rank, R2CC_PORT=port) for rank in range(2)]
        assert [future.result(15) for future in futures] == [None, None]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({2: {"RANK": "1"}}, "rank 1 was started twice"),
        ({2: {"WORLD_SIZE": "5"}}, "rank 2 was started for 5 ranks, rank 0 for 3"),
        ({2: {"R2CC_SLICE_NBYTES": "4096"}}, r"ranks \[2\] have settings that differ"),
    ],
    ids=["duplicate", "nranks", "settings"],
)
def test_ranks_that_do_not_fit_are_named_on_all(
    changes: dict[int, dict[str, str]], named: str
) -> None:
    with LocalJob(3) as job:
        errors = join_all(job, changes)
    assert all(isinstance(error, InvalidArgument) for error in errors), errors
    for error in errors:
        with pytest.raises(InvalidArgument, match=named):
            raise error or AssertionError


def test_a_second_rank_0_is_told_that_the_port_is_taken() -> None:
    with LocalJob(2) as job:  # the job's socket acts as the first rank 0
        (error,) = join_all(job, {1: {"RANK": "0"}}, ranks=[1])
    assert isinstance(error, InvalidArgument)
    assert "another process uses the port" in str(error)
    assert "R2CC_PORT" in str(error)


def test_one_rank_without_rails_fails_all() -> None:
    with LocalJob(2) as job, ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(
                connect,
                Config.from_env(environment(job, rank)),
                codec=Codec(Number),
                nics_for=lambda _nranks, _one, _address, count=1 - rank: RAILS[:count],
                env=environment(job, rank),
            )
            for rank in range(2)
        ]
        for future in futures:
            with pytest.raises(InvalidArgument, match="rank 1: no usable network interface"):
                future.result(WAIT_S)


def test_without_a_control_thread_the_listener_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Identity] = []

    def remember(*given: Any) -> Identity:
        made.append(identify(*given))
        return made[0]

    def fail(name: str) -> None:
        raise OSError(errno.EMFILE, f"no descriptor left for {name}")

    monkeypatch.setattr(startup, "identify", remember)
    monkeypatch.setattr(startup, "ControlLoop", fail)
    with LocalJob(2) as job, pytest.raises(OSError, match="no descriptor left"):
        join(job, 0, {})
    assert made[0].listener is not None
    assert made[0].listener.fileno() == -1


def test_ranks_of_one_host_share_the_secret_through_a_file(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    stale = tmp_path / "r2ccl" / f"secret-127.0.0.1-{port}"
    stale.parent.mkdir(mode=0o700)
    stale.touch(0o600)
    stale.write_text("ab" * 32)  # left by a crashed job

    def start(rank: int) -> ControlPlane:
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port - 1),
            "XDG_RUNTIME_DIR": str(tmp_path),
        }
        return connect(Config(), codec=Codec(Number), nics_for=lambda *_: RAILS, env=env)

    with ThreadPoolExecutor(3) as pool:
        planes = list(pool.map(start, [1, 2, 0]))  # the others may read the stale file first
    assert os.listdir(stale.parent) == []
    for plane in planes:
        plane.close(0)


# -- messages -------------------------------------------------------------------------------


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
    assert "cannot read" in job.seen[1].lost[0]


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


# -- paths ----------------------------------------------------------------------------------


def test_a_path_connects_both_ends_over_its_rail(start_job: Callable[..., Job]) -> None:
    job = start_job(2)
    job.planes[1].accept_path(0, 1, 5)
    job.planes[0].dial_path(1, 1, 5)
    for rank in range(2):
        job.seen[rank].wait_for(lambda rank=rank: (1 - rank, 1, 5) in job.seen[rank].paths)
    left, right = job.seen[0].paths[1, 1, 5], job.seen[1].paths[0, 1, 5]
    assert left.getsockname()[0] == right.getsockname()[0] == "127.0.0.2"
    assert left.getsockname() == right.getpeername()
    assert not left.getblocking()
    assert not right.getblocking()
    assert left.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    left.send(b"first byte")
    right.settimeout(WAIT_S)
    assert right.recv(100) == b"first byte"


@pytest.mark.parametrize("rail", [BYPASS, 2, -1])
def test_only_rails_are_dialed_and_kicked(rail: int, start_job: Callable[..., Job]) -> None:
    plane = start_job(2).planes[0]
    refused = f"rail {rail} was given; the number of rails is 2"
    with pytest.raises(InvalidArgument, match=refused):
        plane.dial_path(1, rail, 0)
    with pytest.raises(InvalidArgument, match=refused):
        plane.kick(rail)


def test_a_dial_goes_on_until_it_is_expected(start_job: Callable[..., Job]) -> None:
    job = start_job(2)
    failures: list[str] = []
    failed = threading.Event()
    job.planes[0].dial_path(1, 0, 3, lambda why: (failures.append(why), failed.set()))
    assert failed.wait(WAIT_S)  # the peer does not expect the path yet
    job.planes[1].accept_path(0, 0, 3)
    job.seen[0].wait_for(lambda: (1, 0, 3) in job.seen[0].paths)
    assert job.planes[1].rejections()["path not expected"] == 1
    host, port = job.planes[1].peers[1].rails[0]
    (why,) = failures
    assert why.startswith(f"the handshake with {host}:{port} failed (closed during the handshake)")


def test_a_fork_knows_a_connection_that_waits(start_job: Callable[..., Job]) -> None:
    """A forked child replaces the descriptors, so that the connection ends with its owner."""
    job = start_job(2)
    job.wait_until_connected()
    plane = job.planes[1]
    known = set(plane.descriptors())
    job.planes[0].dial_path(1, 0, 3, lambda _: None)  # the peer does not expect the path yet
    give_up = time.monotonic() + WAIT_S
    while not plane._listener._tasks:
        assert time.monotonic() < give_up
    assert set(plane.descriptors()) - known


def exhausted(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_both_ends_tell_why_a_path_is_not_connected(
    start_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_job(2)
    job.wait_until_connected()
    host, port = job.planes[1].peers[1].rails[0]
    failed = threading.Event()
    job.planes[0].dial_path(1, 0, 3, lambda _: failed.set())
    assert failed.wait(WAIT_S)
    turned_away, hint = job.planes[0].obstacles(1)
    assert turned_away.startswith(f"rail 0: the handshake with {host}:{port} failed")
    assert hint == "see the log of the rank there"
    (told,) = job.planes[1].obstacles(0)
    assert "path not expected (1 times)" in told

    with monkeypatch.context() as patch:
        patch.setattr(wire, "open_socket", exhausted)
        failed.clear()
        job.planes[0].dial_path(1, 0, 4, lambda _: failed.set())
        assert failed.wait(WAIT_S)
        used_up, hint = job.planes[0].obstacles(1)
    assert used_up == f"rail 0: {host}:{port}: EMFILE: Too many open files"
    assert "raise `ulimit -n`" in hint

    job.planes[1].accept_path(0, 0, 4)
    job.seen[0].wait_for(lambda: (1, 0, 4) in job.seen[0].paths)
    assert job.planes[0].obstacles(1) == []


def test_a_listener_without_a_descriptor_pauses_and_says_so(
    start_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = start_job(2)
    job.wait_until_connected()
    naccepts = [0]

    def accept(self: socket.socket) -> Any:
        naccepts[0] += 1
        return exhausted()

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", accept)
        with socket.create_connection(job.planes[1].peers[1].rails[0], WAIT_S):
            begun_s = time.monotonic()
            reason = "accept failed: EMFILE: Too many open files"
            while not (found := turned_away_by(job.planes[1], reason)) or found < 3:
                time.sleep(0.01)
            took_s = time.monotonic() - begun_s
    assert naccepts[0] <= took_s / 0.1 + 2
    (line,) = [each.getMessage() for each in caplog.records if "EMFILE" in each.getMessage()]
    assert line.startswith("rank 1: cannot accept a connection at 127.0.0.1:")
    assert "raise `ulimit -n`" in line
    assert reason in job.planes[1].obstacles(0)[0]


def turned_away_by(plane: ControlPlane, reason: str) -> int:
    return sum(n for each, n in plane.rejections().items() if each.startswith(reason))


def test_rank_0_tells_all_why_it_let_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "accept", exhausted)
    with LocalJob(2) as job, socket.create_connection(job.listener.getsockname(), WAIT_S):
        (error,) = join_all(job, {}, ranks=[0])
    assert isinstance(error, TransportTimeout)
    assert "ranks [1] have not arrived" in str(error)
    assert "rank 0 rejected connections meanwhile: accept failed: EMFILE" in str(error)
    assert "raise `ulimit -n`" in str(error)


def test_a_rank_without_a_descriptor_says_so_in_its_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "open_socket", exhausted)
    with LocalJob(2) as job:
        (error,) = join_all(job, {}, ranks=[1])
        where = "{}:{}".format(*job.listener.getsockname())
    assert isinstance(error, TransportTimeout)
    assert f"last attempt: {where}: EMFILE: Too many open files" in str(error)
    assert "raise `ulimit -n`" in str(error)


def test_a_peer_lost_for_want_of_a_descriptor_says_so(
    start_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_job(2, peer_timeout_s=1.0)
    job.wait_until_connected()
    monkeypatch.setattr(wire, "open_socket", exhausted)
    session = job.planes[0]._sessions[1]

    def is_lost() -> bool:
        # Repeated, because a connection begun before may still succeed.
        job.planes[0].call_soon(lambda: [each.abort() for each in list(session._carriers.values())])
        return 1 in job.seen[0].lost

    job.seen[0].wait_for(is_lost)
    assert "silent for" in job.seen[0].lost[1]
    assert "; the last dial failed: 127.0.0." in job.seen[0].lost[1]
    assert "EMFILE: Too many open files; " in job.seen[0].lost[1]


def test_only_the_expected_epoch_gets_in(start_job: Callable[..., Job]) -> None:
    job = start_job(2)
    failed = threading.Event()
    job.planes[1].accept_path(0, 0, 9)
    job.planes[0].dial_path(1, 0, 8, lambda _: failed.set())
    assert failed.wait(WAIT_S)
    job.planes[0].dial_path(1, 0, 9)  # replaces the first dial
    for rank in range(2):
        job.seen[rank].wait_for(lambda rank=rank: (1 - rank, 0, 9) in job.seen[rank].paths)
        assert len(job.seen[rank].paths) == 1
    assert job.planes[1].rejections()["path of an older epoch"] >= 1


def test_a_cancelled_dial_ends(start_job: Callable[..., Job]) -> None:
    job = start_job(2)
    failed = threading.Event()

    def dial_and_cancel() -> None:
        job.planes[0].dial_path(1, 0, 1, lambda _: failed.set())
        job.planes[0].cancel_path(1, 0)

    # In the control thread: from another thread, the dial may succeed before it is cancelled.
    job.planes[0].call_soon(dial_and_cancel)
    job.planes[1].accept_path(0, 0, 1)
    job.planes[0].dial_path(1, 1, 1)
    job.planes[1].accept_path(0, 1, 1)
    job.seen[1].wait_for(lambda: (0, 1, 1) in job.seen[1].paths)
    assert (0, 0, 1) not in job.seen[1].paths
    assert not failed.is_set()


def test_a_kick_ends_the_pause(start_job: Callable[..., Job]) -> None:
    job = start_job(2)
    nfailures, fifth = [0], threading.Event()

    def count(_: str) -> None:
        nfailures[0] += 1
        if nfailures[0] == 5:
            fifth.set()

    job.planes[1].accept_path(0, 0, 2)
    job.planes[0].dial_path(1, 0, 1, count)  # rejected at once, every time
    assert fifth.wait(WAIT_S)  # now in a pause of 0.8 s
    job.planes[1].accept_path(0, 0, 1)
    started = time.monotonic()
    job.planes[0].kick(0)
    job.seen[0].wait_for(lambda: (1, 0, 1) in job.seen[0].paths)
    assert time.monotonic() - started < 0.5


# -- strangers ------------------------------------------------------------------------------


def stranger(plane: ControlPlane, data: bytes) -> bytes:
    """Send `data` to a rail listener as an outsider; return all that it sends, up to its end."""
    with socket.create_connection(plane.peers[plane.rank].rails[0], WAIT_S) as sock:
        sock.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(4096):
                answer += piece
    return answer


OPENING = b"r2ccl\r" + PROTOCOL_VERSION.to_bytes(2, "big") + b"n" * 32


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (os.urandom(4096), "wrong magic"),
        (b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n", "wrong magic"),
        (b"r2ccl\r" + b"\0\0" + b"n" * 32, "wrong version"),
        (OPENING.ljust(PROOF_NBYTES, b"\1"), "wrong proof"),
    ],
    ids=["noise", "http", "old-version", "wrong-proof"],
)
def test_a_stranger_is_counted_and_logged_and_the_job_goes_on(
    start_job: Callable[..., Job],
    caplog: pytest.LogCaptureFixture,
    data: bytes,
    reason: str,
) -> None:
    job = start_job(2)
    with caplog.at_level(logging.WARNING, "r2ccl.bootstrap"):
        for _ in range(3):
            assert len(stranger(job.planes[1], data)) <= OPENING_NBYTES
    assert job.planes[1].rejections() == {reason: 3}
    assert sum(reason in line for line in caplog.messages) == 1
    job.wait_until_connected()


def test_a_replayed_handshake_stays_outside(start_job: Callable[..., Job]) -> None:
    job = start_job(2)
    plane = job.planes[1]
    claim = Claim(Purpose.CONTROL, plane.communicator_id, 0, 1)
    secret = plane._sessions[0]._setting.secret
    with socket.create_connection(plane.peers[1].rails[0], WAIT_S) as sock:
        dialer = Dialer(secret, claim, b"n" * 32)
        proof = dialer.prove(sock.recv(40, socket.MSG_WAITALL))
        sock.sendall(proof)
        dialer.confirm(sock.recv(32, socket.MSG_WAITALL))
    stranger(plane, proof)
    assert plane.rejections() == {"wrong proof": 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"communicator": b"x" * 16}, "another communicator"),
        ({"dst": 0}, "wrong pair of ranks"),
        ({"src": 1}, "wrong pair of ranks"),
        ({"src": 2}, "wrong pair of ranks"),
        ({"purpose": Purpose.RENDEZVOUS}, "rendezvous is over"),
        ({"purpose": Purpose.DATA, "rail": 1}, "path on the wrong rail"),
    ],
)
def test_a_claim_that_is_proved_but_wrong_stays_outside(
    start_job: Callable[..., Job], change: dict[str, Any], reason: str
) -> None:
    job = start_job(2)
    plane = job.planes[1]
    claim = Claim(Purpose.CONTROL, plane.communicator_id, 0, 1)._replace(**change)
    turn_away(plane, claim)
    assert plane.rejections() == {reason: 1}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            (MAX_FRAME_NBYTES + 1).to_bytes(4, "big") + SessionFrame(1, 0, b"").pack()[4:],
            "oversized frame",
        ),
        (b"\xff" * 100, "wrong frame version"),
    ],
)
def test_a_bad_frame_ends_its_connection_only(
    start_job: Callable[..., Job], data: bytes, reason: str
) -> None:
    job = start_job(2)
    job.wait_until_connected()
    (carrier, *_) = job.planes[0]._sessions[1]._carriers.values()
    job.planes[0].call_soon(lambda: carrier.write(data))
    job.planes[0].send(1, Text("after"))
    job.seen[1].wait_for(lambda: job.seen[1].messages == [(0, Text("after"))])
    deadline = time.monotonic() + WAIT_S
    while reason not in job.planes[1].rejections() and time.monotonic() < deadline:
        job.seen[1].wait_for(lambda n=job.seen[1].ticks: job.seen[1].ticks > n)
    assert job.planes[1].rejections() == {reason: 1}
    assert job.seen[0].lost == job.seen[1].lost == {}


def test_slow_strangers_cannot_keep_ranks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = Listener.__init__.__kwdefaults__ | {"timeout_s": 0.3}
    monkeypatch.setattr(Listener.__init__, "__kwdefaults__", defaults)
    for module in ("leader", "control"):
        monkeypatch.setattr(f"r2ccl.bootstrap.{module}.MAX_PENDING", 4)
    with LocalJob(2) as local, contextlib.ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(local.listener.getsockname(), WAIT_S))
            for _ in range(6)
        ]
        for sock in slow:
            sock.sendall(OPENING[:10])
        job = Job(local, {})
        stack.callback(job.close)
        counts = job.planes[0].rejections()
        assert counts["too many unproved connections"] >= 1
        job.wait_until_connected()
        late = stack.enter_context(
            socket.create_connection(job.planes[1].peers[1].rails[0], WAIT_S)
        )
        late.sendall(OPENING[:10])
        assert len(late.recv(OPENING_NBYTES, socket.MSG_WAITALL)) == OPENING_NBYTES
        assert late.recv(1) == b""  # closed when the handshake times out
        assert job.planes[1].rejections() == {"handshake timed out": 1}


def test_two_jobs_at_once_do_not_meet(start_job: Callable[..., Job]) -> None:
    first, second = start_job(2), start_job(2)
    for job, text in ((first, "one"), (second, "two")):
        job.planes[0].send(1, Text(text))
    first.seen[1].wait_for(lambda: first.seen[1].messages == [(0, Text("one"))])
    second.seen[1].wait_for(lambda: second.seen[1].messages == [(0, Text("two"))])
    assert first.planes[0].communicator_id != second.planes[0].communicator_id


def test_a_rank_with_another_secret_stays_outside() -> None:
    other = {"R2CC_SECRET": Secret(b"?" * 32).hex()}
    with LocalJob(2) as job:
        errors = join_all(job, {1: other})
    assert [type(error) for error in errors] == [TransportTimeout, TransportTimeout]
    assert "ranks [1] have not arrived" in str(errors[0])
    assert "secret" in str(errors[1])
    assert other["R2CC_SECRET"] not in str(errors[1])


def test_a_probe_like_visitor_is_no_stranger(start_job: Callable[..., Job]) -> None:
    job = start_job(2)
    address = job.planes[1].peers[1].rails[0]
    socket.create_connection(address, WAIT_S).close()
    with socket.create_connection(address, WAIT_S) as sock:
        wire.close_hard(sock)
    job.wait_until_connected()
    assert job.planes[1].rejections() == {}

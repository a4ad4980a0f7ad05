"""Contract tests of how paths are dialed and expected; every rank is a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest
from support.planes import WAIT_S, Job
from support.planes import start_job as start_job  # the fixture

from r2ccl.errors import InvalidArgument
from r2ccl.types import BYPASS


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

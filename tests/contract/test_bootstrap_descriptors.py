"""Contract tests of what ranks say that have no file descriptor left; every rank is a thread."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.planes import WAIT_S, Job, join_all
from support.planes import start_job as start_job  # the fixture

from r2ccl.bootstrap import ControlPlane, wire
from r2ccl.bootstrap.launch import LocalJob
from r2ccl.errors import TransportTimeout


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

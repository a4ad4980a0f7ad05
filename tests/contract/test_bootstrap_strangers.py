"""Contract tests of connections that are not of the job; every rank is a thread."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.planes import WAIT_S, Job, Text, join_all, turn_away
from support.planes import start_job as start_job  # the fixture

from r2ccl.bootstrap import ControlPlane, wire
from r2ccl.bootstrap.auth import (
    OPENING_NBYTES,
    PROOF_NBYTES,
    PROTOCOL_VERSION,
    Claim,
    Dialer,
    Purpose,
    Secret,
)
from r2ccl.bootstrap.launch import LocalJob
from r2ccl.bootstrap.listener import Listener
from r2ccl.bootstrap.session import MAX_FRAME_NBYTES, SessionFrame
from r2ccl.errors import TransportTimeout


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

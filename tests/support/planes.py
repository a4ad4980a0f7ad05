"""Control planes of one job; every rank is a thread of this process with its own environment."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from r2ccl.bootstrap import ControlPlane, connect
from r2ccl.bootstrap.auth import Claim, Dialer
from r2ccl.bootstrap.launch import LocalJob
from r2ccl.bootstrap.messages import Codec
from r2ccl.config import Config
from r2ccl.types import Nic

WAIT_S = 5.0
RAILS = (Nic("lo", "127.0.0.1"), Nic("lo", "127.0.0.2"))


class Number(msgspec.Struct, tag="number"):
    value: int


class Text(msgspec.Struct, tag="text"):
    value: str


class Recorder:
    """Handler that records its calls and lets a test wait for them."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, object]] = []
        self.paths: dict[tuple[int, int, int], socket.socket] = {}
        self.lost: dict[int, str] = {}
        #: Seconds since each lost rank was last heard; None: not known.
        self.silent_s: dict[int, float | None] = {}
        self.ticks = 0
        self._changed = threading.Condition()

    def on_message(self, peer: int, message: object) -> None:
        with self._changed:
            self.messages.append((peer, message))
            self._changed.notify_all()

    def on_path(self, peer: int, rail: int, epoch: int, sock: socket.socket) -> None:
        with self._changed:
            self.paths[peer, rail, epoch] = sock
            self._changed.notify_all()

    def on_peer_lost(self, peer: int, why: str, last_heard_s: float | None) -> None:
        with self._changed:
            assert peer not in self.lost
            self.lost[peer] = why
            self.silent_s[peer] = last_heard_s
            self._changed.notify_all()

    def on_tick(self, now: float) -> None:
        with self._changed:
            self.ticks += 1
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), vars(self)

    def close(self) -> None:
        for sock in self.paths.values():
            sock.close()


class Job:
    """Ranks of one job: planes and their recorders, closed at the end."""

    def __init__(self, job: LocalJob, settings: Mapping[str, Any]) -> None:
        self.planes: list[ControlPlane] = []
        self.seen: list[Recorder] = []
        with ThreadPoolExecutor(job.nranks) as pool:
            futures = [pool.submit(join, job, rank, {}, **settings) for rank in range(job.nranks)]
            for future in futures:
                self.planes.append(future.result(WAIT_S))
                self.seen.append(Recorder())
        for plane, recorder in zip(self.planes, self.seen, strict=True):
            plane.start(recorder)

    def wait_until_connected(self) -> None:
        """Wait until every neighbor can be heard, and every connection of the sessions is up.

        A message on a connection that one end has not taken over yet would be read later than
        others.
        """
        for plane in self.planes:
            plane.gossip(Text("here"))
        for plane, recorder in zip(self.planes, self.seen, strict=True):
            number = len(plane.neighbors)
            recorder.wait_for(lambda r=recorder, n=number: len(r.messages) == n)
            recorder.messages.clear()
        deadline = time.monotonic() + WAIT_S
        while not all(
            len(session._carriers) == len(RAILS)
            for plane in self.planes
            for session in plane._sessions.values()
        ):
            assert time.monotonic() < deadline, "a session has fewer connections than rails"
            time.sleep(0.001)

    def close(self) -> None:
        with ThreadPoolExecutor(len(self.planes)) as pool:
            list(pool.map(lambda plane: plane.close(2.0), self.planes))
        for recorder in self.seen:
            recorder.close()


def environment(job: LocalJob, rank: int) -> dict[str, str]:
    env = job.environment(rank)
    if rank == 0:
        env["R2CC_LISTEN_FD"] = str(job.listener.fileno())
    return env


def join(job: LocalJob, rank: int, changes: Mapping[str, str], **settings: Any) -> ControlPlane:
    env = {**environment(job, rank), **changes}
    config = Config.from_env(env, **{"init_timeout_s": WAIT_S, **settings})
    return connect(config, codec=Codec(Number | Text), nics_for=lambda *_: RAILS, env=env)


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


def turn_away(plane: ControlPlane, claim: Claim) -> None:
    """Prove `claim` at the first rail of `plane`; assert that the connection is closed."""
    secret = next(iter(plane._sessions.values()))._setting.secret
    with socket.create_connection(plane.peers[plane.rank].rails[0], WAIT_S) as sock:
        dialer = Dialer(secret, claim, b"n" * 32)
        sock.sendall(dialer.prove(sock.recv(40, socket.MSG_WAITALL)))
        assert sock.recv(1) == b""


@pytest.fixture
def start_job() -> Iterator[Callable[..., Job]]:
    """Start jobs of a given number of ranks; close them when the test is over."""
    with contextlib.ExitStack() as stack:

        def start(nranks: int, **settings: Any) -> Job:
            job = Job(stack.enter_context(LocalJob(nranks)), settings)
            stack.callback(job.close)
            return job

        yield start

"""Behaviour of the control plane when real processes die, stop, or hold the interpreter lock."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.mpi import find_mpiexec
from support.slow import slow_but

from r2ccl.bootstrap.launch import LocalJob

WAIT_S = 10.0

RANK_PROGRAM = """
import json, os, sys, threading, time
import msgspec
from r2ccl.bootstrap import connect
from r2ccl.bootstrap.messages import Codec
from r2ccl.config import Config
from r2ccl.transport.tcp.transport import TcpTransport
from r2ccl.types import Nic, PathKey, ProbeKey

class Text(msgspec.Struct, tag="text"):
    value: str

def say(kind, **fields):
    print(json.dumps({"kind": kind, **fields}), flush=True)

class Handler:
    def on_message(self, peer, message):
        say("message", peer=peer, value=getattr(message, "value", type(message).__name__))
    def on_path(self, peer, rail, epoch, sock):
        sock.close()
    def on_peer_lost(self, peer, why, last_heard_s):
        say("lost", peer=peer, why=why)
    def on_tick(self, now):
        pass

plane = connect(
    Config.from_env(os.environ),
    codec=Codec(Text),
    nics_for=lambda *_: (Nic("lo", "127.0.0.1"), Nic("lo", "127.0.0.2")),
)
plane.start(Handler())
for line in sys.stdin:
    word, _, rest = line.strip().partition(" ")
    if word == "tell":
        plane.broadcast(Text(rest))
    elif word == "probe":
        peer = int(rest)
        tcp = TcpTransport(
            plane.rank, 1, eager_nbytes=64, probe_timeout_s=2.0,
            sources={0: plane.nics[0]}, targets={PathKey(peer, 0): plane.peers[peer].rails[0]},
        )
        tcp.probe(ProbeKey(peer, 0, 0))
        events = []
        while not events:
            events = tcp.poll(1.0)
        say("probe", answer=events[0].is_answered)
        tcp.close()
    elif word == "hold":  # the interpreter lock: a long call into C that does not release it
        import ctypes
        ctypes.PyDLL(None).usleep(int(float(rest) * 1e6))
        say("released")
    elif word == "rejections":
        say("rejections", counts=dict(plane.rejections()))
    elif word == "close":
        plane.close(5.0)
        say("closed")
        break
"""


class Rank:
    """Process of a rank, its commands and its reports."""

    def __init__(self, job: LocalJob, rank: int, settings: dict[str, str]) -> None:
        env = {**os.environ, **job.environment(rank), **settings}
        fds = []
        if rank == 0:
            fds = [job.listener.fileno()]
            env["R2CC_LISTEN_FD"] = str(fds[0])
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM],
            env=env,
            pass_fds=fds,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.kept: list[dict[str, Any]] = []
        self._reports: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._reports.put(json.loads(line))

    def order(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def wait_for(self, kind: str, timeout_s: float = WAIT_S, **fields: Any) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            report = self._reports.get(timeout=max(0.0, deadline - time.monotonic()))
            self.kept.append(report)
            if report["kind"] == kind and all(report[key] == fields[key] for key in fields):
                return report

    def all_reports(self) -> list[dict[str, Any]]:
        while not self._reports.empty():
            self.kept.append(self._reports.get())
        return self.kept

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def start_ranks() -> Iterator[Callable[..., list[Rank]]]:
    with ExitStack() as stack:

        def start(nranks: int, **settings: str) -> list[Rank]:
            with LocalJob(nranks) as job:
                ranks = [Rank(job, rank, settings) for rank in range(nranks)]
            for rank in ranks:
                stack.callback(rank.end)
            for rank in ranks:
                rank.order("tell hello")
            for rank in ranks:
                for _ in range(nranks - 1):
                    rank.wait_for("message", value="hello")
            return ranks

        yield start


def lost(rank: Rank) -> list[int]:
    return [report["peer"] for report in rank.all_reports() if report["kind"] == "lost"]


@pytest.mark.parametrize("victim", slow_but([0, 2], [0, 1, 2]))
def test_a_killed_rank_is_lost_quickly_on_all_others(
    start_ranks: Callable[..., list[Rank]], victim: int
) -> None:
    ranks = start_ranks(3)
    started = time.monotonic()
    ranks[victim].process.kill()
    survivors = [rank for rank in range(3) if rank != victim]
    for rank in survivors:
        report = ranks[rank].wait_for("lost", peer=victim)
        assert "connection refused" in report["why"]
    assert time.monotonic() - started < 2.0
    a, b = survivors
    ranks[a].order("tell still here")
    ranks[b].wait_for("message", peer=a, value="still here")
    assert lost(ranks[b]) == lost(ranks[a]) == [victim]


def test_a_stopped_rank_is_not_lost_its_kernel_answers_probes(
    start_ranks: Callable[..., list[Rank]],
) -> None:
    ranks = start_ranks(3, R2CC_PEER_TIMEOUT_S="4")
    ranks[1].process.send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    ranks[0].order("tell one")
    ranks[0].order("probe 1")
    assert ranks[0].wait_for("probe")["answer"]
    ranks[2].wait_for("message", value="one")
    threading.Event().wait(max(0.0, stopped_at + 1.0 - time.monotonic()))
    ranks[1].process.send_signal(signal.SIGCONT)
    ranks[1].wait_for("message", peer=0, value="one")
    ranks[1].order("tell back")
    for rank in (0, 2):
        ranks[rank].wait_for("message", peer=1, value="back")
    assert [lost(rank) for rank in ranks] == [[], [], []]


def test_a_rank_that_stays_silent_is_lost_after_the_timeout(
    start_ranks: Callable[..., list[Rank]],
) -> None:
    ranks = start_ranks(3, R2CC_PEER_TIMEOUT_S="1")
    ranks[2].process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    for rank in (0, 1):
        assert "silent for" in ranks[rank].wait_for("lost", peer=2)["why"]
    assert 0.5 < time.monotonic() - started < 3.0


def test_ranks_that_were_stopped_themselves_declare_nobody_lost(
    start_ranks: Callable[..., list[Rank]],
) -> None:
    """Suspend a machine: on waking, every rank has missed its peers for longer than the timeout."""
    ranks = start_ranks(3, R2CC_PEER_TIMEOUT_S="1")
    for rank in ranks:
        rank.process.send_signal(signal.SIGSTOP)
    threading.Event().wait(1.5)
    # One after the other: when the first rank resumes, the others are still stopped.
    for rank in ranks:
        rank.process.send_signal(signal.SIGCONT)
        threading.Event().wait(0.3)
    for rank in ranks:
        rank.order("tell awake")
    for rank in ranks:
        for _ in range(2):
            rank.wait_for("message", value="awake")
    assert [lost(rank) for rank in ranks] == [[], [], []]


def test_holding_the_interpreter_lock_is_no_death(start_ranks: Callable[..., list[Rank]]) -> None:
    ranks = start_ranks(2, R2CC_PEER_TIMEOUT_S="2")
    ranks[1].order("hold 1.0")
    ranks[1].wait_for("released")
    ranks[1].order("tell back")
    ranks[0].wait_for("message", value="back")
    assert [lost(rank) for rank in ranks] == [[], []]


def test_ranks_take_leave_in_order(start_ranks: Callable[..., list[Rank]]) -> None:
    ranks = start_ranks(3)
    ranks[1].order("close")
    ranks[1].wait_for("closed")
    assert ranks[1].process.wait(WAIT_S) == 0
    for rank in (0, 2):
        ranks[rank].wait_for("message", peer=1, value="Goodbye")
        ranks[rank].order("tell last")
    ranks[0].order("close")
    ranks[2].order("close")
    for rank in (0, 2):
        ranks[rank].wait_for("closed")
        assert ranks[rank].process.wait(WAIT_S) == 0
    assert [lost(rank) for rank in ranks] == [[], [], []]


def test_the_launcher_of_another_mpi_makes_no_job_of_one_rank() -> None:
    """Use the real mpi4py, under the variables of a launcher it does not understand."""
    pytest.importorskip("mpi4py")
    find_mpiexec()  # skips if this MPI cannot run
    other = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
    done = subprocess.run(
        [sys.executable, "-c", "import r2ccl; print(r2ccl.init().nranks)"],
        env={**os.environ, **other},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0, done.stdout
    assert "InvalidArgument" in done.stderr
    assert "OMPI_COMM_WORLD_SIZE=4" in done.stderr
    assert "belongs to another MPI" in done.stderr

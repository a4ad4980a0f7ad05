"""Endings and misuse that need only threads and processes of one machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import r2ccl
from r2ccl import launch
from r2ccl.algos import ring, tree

TIMEOUT_S = 60.0


def two_threads() -> list[str]:
    """Call from two threads of every rank; return errors other than a refused call."""
    said: list[str] = []
    sent = {number * 100 + step for number in (1, 2) for step in range(50)}
    with r2ccl.init() as comm:
        start = threading.Barrier(2)

        def call(number: int) -> None:
            start.wait()
            for step in range(50):
                x = np.full(50_000, number * 100 + step, np.int64)
                try:
                    comm.allreduce(x)
                except r2ccl.ConcurrentCalls as exc:
                    said.append(str(exc))
                    return
                except r2ccl.R2cclError as exc:
                    said.append(type(exc).__name__)
                    return
                # At the other rank, the thread with the other number may have been accepted.
                of_other = x[0] - (number * 100 + step)
                if of_other not in sent or (x != x[0]).any():
                    said.append("wrong")

        threads = [threading.Thread(target=call, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        comm.abort()
    return said


def test_two_threads_of_a_communicator_never_get_wrong_results() -> None:
    said = [each for of_rank in launch(two_threads, 2, timeout_s=TIMEOUT_S) for each in of_rank]
    assert "wrong" not in said
    assert any("one thread at a time" in each for each in said), said


def other_schedule() -> str:
    with r2ccl.init() as comm:
        x = np.ones(100_000)
        schedule = ring.allreduce(2) if comm.rank == 0 else tree.allreduce(tree.double_binary(2))
        try:
            comm.run_schedule(schedule, x)
        except r2ccl.R2cclError as exc:
            return str(exc)
    return "it ran"


def test_ranks_that_disagree_on_the_schedule_are_told() -> None:
    for said in launch(other_schedule, 2, timeout_s=TIMEOUT_S):
        assert "schedule=" in said, said
        assert "differs between ranks" in said


def lets_go() -> list[bool]:
    """Return whether each rank releases the arrays of a failed call."""
    import gc
    import weakref

    gone: list[bool] = []
    with r2ccl.init() as comm:
        comm.barrier()
        x = np.ones(1_000_000)
        watch = weakref.ref(x)
        if comm.rank == 0:
            threading.Timer(0.2, comm.revoke).start()
        if comm.rank == 1:
            time.sleep(0.5)
        with contextlib.suppress(r2ccl.CommunicatorRevoked):
            comm.allreduce(x)
        del x
        gc.collect()
        gone.append(watch() is None)
    return gone


def test_after_an_error_the_callers_arrays_are_let_go() -> None:
    assert launch(lets_go, 3, timeout_s=TIMEOUT_S) == [[True]] * 3


CLOSED_BY_DEL = """
import time
import numpy as np
import r2ccl

class Owner:
    def __init__(self):
        self.comm = r2ccl.init()

    def __del__(self):
        self.comm.close()

owner = Owner()
owner.comm.allreduce(np.ones(1000))
time.sleep(1.0)  # until the other rank has finished its call, too
owner.itself = owner  # so that only the end of Python deletes it
"""


@pytest.mark.parametrize("shm", ["0", "auto"])
def test_close_while_python_ends_waits_for_nothing(shm: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(CLOSED_BY_DEL)
    env = {**os.environ, "R2CC_SHM": shm, "R2CC_INIT_TIMEOUT_S": "20"}
    command = [sys.executable, "-m", "r2ccl", "launch", "-n", "2", str(tmp_path / "program.py")]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=2 * TIMEOUT_S)
    assert ran.returncode == 0
    assert "close() was called during interpreter shutdown" in ran.stdout
    assert "TransportTimeout" not in ran.stdout


def returns_early() -> bool:
    """Return whether unsent eager data leaves while its sender runs other work.

    Rank 1 reads nothing at first, so that rank 0's sockets fill up; then rank 0 makes no calls.
    """
    os.environ["R2CC_EAGER_SLOTS"] = "256"
    with r2ccl.init() as comm:
        x = np.ones(8192)
        comm.barrier()
        transport = comm._engine._transport
        if comm.rank == 1:
            time.sleep(1.0)
        for _ in range(200):
            comm.broadcast(x, root=0)
        was_full = transport.has_unsent()
        # The periodic check of the rails would send a little each time.
        comm._engine._loop.on_tick = lambda now: None  # type: ignore[method-assign]
        until_s = time.monotonic() + TIMEOUT_S / 2
        while transport.has_unsent() and time.monotonic() < until_s:
            time.sleep(0.01)
        is_empty = not transport.has_unsent()
        comm.barrier()
        return is_empty and was_full == (comm.rank == 0)


def test_eager_data_leaves_while_its_sender_calls_nothing() -> None:
    assert launch(returns_early, 2, timeout_s=TIMEOUT_S) == [True, True]


RANKS = """
    import os, sys, time
    import r2ccl
    def main():
        with r2ccl.init() as comm:
            wait(comm)
    def wait(comm):
        comm.barrier()
        os.write(1, b"%d\\n" % os.getpid())
        time.sleep(60)
    if __name__ == "__main__":
        {start}
"""


@pytest.mark.parametrize("how", ["command", "function", "pool"])
def test_ranks_end_with_their_launcher(how: str, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    start = {
        "command": "main()",
        "function": "r2ccl.launch(main, 2)",
        "pool": "r2ccl.launch_pool(2).run(wait)",
    }[how]
    script.write_text(textwrap.dedent(RANKS).format(start=start))
    command = [sys.executable, str(script)]
    if how == "command":
        launch_two = ("r2ccl", "launch", "--tag", "never", "-n", "2", "--")
        command = [sys.executable, "-m", *launch_two, *command]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    ranks = [int(launcher.stdout.readline()) for _ in range(2)]
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait(TIMEOUT_S)
    until_s = time.monotonic() + 5.0
    while any(_is_alive(rank) for rank in ranks) and time.monotonic() < until_s:
        time.sleep(0.02)
    left = [rank for rank in ranks if _is_alive(rank)]
    for rank in left:
        os.kill(rank, signal.SIGKILL)
    launcher.stdout.close()
    assert not left, "they outlived their launcher"


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False

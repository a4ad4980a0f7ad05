"""Programs that ranks run in the tests of the status, which is read while calls wait."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from support.raising import raises

import r2ccl
from r2ccl.runtime.status import RankStatus
from r2ccl.testing import FaultPlan
from r2ccl.transport.base import Transport, WrappedTransport

PATIENCE_S = 30.0


def until(is_true: Callable[[], Any], what: str) -> Any:
    """Poll until `is_true` returns a true value, and return it; fail after `PATIENCE_S`."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not (found := is_true()):
        assert time.monotonic() < give_up_at, what
        time.sleep(0.01)
    return found


def status_of(comm: r2ccl.Communicator) -> RankStatus:
    return msgspec.json.decode(comm.dump(), type=RankStatus)


def stopped_peer(victim: int) -> tuple[str, bool]:
    """Stop `victim`, read on rank 0 what its call waits for, and let `victim` continue."""
    with r2ccl.init() as comm:
        x = np.ones(1 << 18, np.float32)
        comm.allreduce(x)
        if comm.rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        said: list[str] = []

        def look() -> None:
            until(lambda: set(comm.pending().absent) == {victim}, "the victim alone is missing")
            said.append(str(comm.pending()))
            (pid,) = (each.pid for each in status_of(comm).peers if each.rank == victim)
            os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=look)
        if comm.rank == 0:
            thread.start()
        comm.allreduce(x)
        if comm.rank == 0:
            thread.join()
        assert not comm.pending().doing
        return "".join(said), bool((x == comm.nranks**2).all())


def dumped_by_signal(folder: str) -> tuple[str, bool]:
    """Signal rank 0 inside its second call; rank 1 joins that call once the dump is written."""
    with r2ccl.init(dump_signal="SIGUSR1", dump_file=f"{folder}/{{rank}}.json") as comm:
        x = np.ones(1 << 18, np.float32)
        comm.allreduce(x)
        text = ""
        if comm.rank == 1:
            until(lambda: status_of(comm).peers[0].last_op == 2, "rank 0 is in its second call")
            os.kill(status_of(comm).peers[0].pid, signal.SIGUSR1)
            file = Path(folder, "0.json")
            until(lambda: file.exists() and file.read_text().endswith("\n"), "the dump is there")
            text = file.read_text()
        comm.allreduce(x)
        return text, bool((x == comm.nranks**2).all())


class _Signalling(FaultPlan):
    """Plan without faults that signals this process when `init` opens its transport."""

    def wrap(self, inner: Transport, rank: int, nranks: int) -> WrappedTransport:
        os.kill(os.getpid(), signal.SIGUSR1)
        return super().wrap(inner, rank, nranks)


def signalled_in_init(folder: str) -> tuple[bool, bool]:
    """Signal rank 0 while its `init` waits for rank 1; then signal both ranks twice.

    They get a signal as `init` opens their transport, and one after `init`.
    """
    go = Path(folder, "go")

    def ask() -> None:
        until(lambda: signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL, "init() handles it")
        os.kill(os.getpid(), signal.SIGUSR1)
        go.touch()

    if os.environ["RANK"] == "0":
        threading.Thread(target=ask).start()
    else:
        until(go.exists, "rank 0 has got the signal")
    file = Path(folder, f"{os.environ['RANK']}.json")
    with r2ccl.init(faults=_Signalling(), dump_signal="SIGUSR1", dump_file=str(file)):
        was_dumped = file.exists()
        os.kill(os.getpid(), signal.SIGUSR1)
        until(file.exists, "the dump is there")
    return was_dumped, signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def handler_after_close() -> list[bool]:
    """Return whether the signal's handler is the program's, except while a dump is requested.

    A request with a signal that cannot be handled changes nothing.
    """
    mine = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    mine = signal.getsignal(signal.SIGUSR1)
    seen = []
    with r2ccl.init() as comm:
        seen.append(signal.getsignal(signal.SIGUSR1) == mine)
        comm.dump_on_signal()
        seen.append(signal.getsignal(signal.SIGUSR1) != mine)
        with raises(r2ccl.InvalidArgument, match="cannot be handled"):
            comm.dump_on_signal(signal.SIGKILL)
        seen.append(signal.getsignal(signal.SIGUSR1) != mine)
        comm.dump_on_signal()
        comm.dump_on_signal(signal.SIGUSR2)
        seen.append(signal.getsignal(signal.SIGUSR1) == mine)
    seen.append(signal.getsignal(signal.SIGUSR1) == mine)
    return seen


def not_joined(victim: int) -> tuple[str, str]:
    """Call on all ranks but `victim`; return the error's type and text."""
    with r2ccl.init(timeout_s=2.0) as comm:
        x = np.ones(1 << 20, np.float32)
        comm.allreduce(x)
        kind = text = ""
        if comm.rank == victim:
            until(lambda: status_of(comm).error, "the others gave up")
        else:
            try:
                comm.allreduce(x)
            except r2ccl.R2cclError as exc:
                kind, text = type(exc).__name__, str(exc)
        comm.abort()
        return kind, text


def health_after_a_loss() -> tuple[list[str], list[str]]:
    """Cut rail 0 of rank 0 until it returns; return the states and the causes that rank 0 sees."""
    from r2ccl.testing import Action, Fault, FaultPlan

    plan = FaultPlan([Fault(action=Action.NIC_DOWN, node=0, rail=0, rank=0, at_op=0, at_step=0)])
    with r2ccl.init(faults=plan) as comm:
        comm.allreduce(np.ones(1 << 20, np.float32))
        until(lambda: all(rail.state == "up" for rail in comm.health().rails), "it came back")
        rails = comm.health().rails
        comm.barrier()
        return [rail.state for rail in rails], [rail.paths[0].cause for rail in rails]

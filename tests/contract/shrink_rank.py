"""One rank of a job that continues without the ranks it loses, and its report.

Its plan: ``steps`` allreduces of ``count`` int64, ``quorum``, ``settings`` of `r2ccl.init`, and the
fault of this rank, if any. The rank ``dies`` with its process group in the middle of a step or when
the named method of `Shrinking` is called; ``stops`` before a step; ``lingers_s`` before it first
meets the other survivors, while its control thread runs; or ``aborts_after_s`` in another thread,
and then does not shrink. If all ranks have ``tells_pids``, it ``wakes`` a stopped rank when the
survivors have shrunk, or ``kills`` one at its end.

As a program, it takes the plan as its first argument, and prints the report as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

import r2ccl
from r2ccl.bootstrap.succession import Succession
from r2ccl.failover.shrink.protocol import Shrinking

_IN_MID_CALL_S = 0.01
_JOIN_S = 60.0


class Worker:
    """Steps of work, and the original ranks of the members that do them."""

    def __init__(self, comm: r2ccl.Communicator, plan: Mapping[str, Any]) -> None:
        self.comm = comm
        self.names = list(range(comm.nranks))
        self.plan = plan
        self.step = 0
        self.errors: list[str] = []
        self.shrink_s: list[float] = []
        self.x = np.empty(plan["count"], np.int64)
        self.pids: list[int] = []
        if plan.get("tells_pids"):
            self.pids = comm.allgather(np.array([os.getpid()])).ravel().tolist()

    @property
    def name(self) -> int:
        return self.names[self.comm.rank]

    def work(self) -> None:
        """Do the remaining steps; check every sum."""
        while self.step < self.plan["steps"]:
            self.suffer()
            self.x[:] = (self.step + 1) * 10**self.name
            self.comm.allreduce(self.x)
            if self.plan.get("dies") == self.step:
                signal.pause()  # without fault, the others wait for this rank in their next step
            right = (self.step + 1) * sum(10**name for name in self.names)
            assert np.all(self.x == right), f"step {self.step}: {self.x[:5]}, not {right}"
            self.step += 1

    def suffer(self) -> None:
        if self.plan.get("dies") == self.step:
            threading.Timer(_IN_MID_CALL_S, die).start()
        if self.plan.get("stops") == self.step:
            os.kill(os.getpid(), signal.SIGSTOP)

    def shrink(self) -> None:
        """Shrink to the survivors, and resume at the lowest step that all have completed."""
        begin = time.monotonic()
        old, self.comm = self.comm, self.comm.shrink(quorum=self.plan.get("quorum", "majority"))
        self.shrink_s.append(time.monotonic() - begin)
        self.names = [self.names[rank] for rank in self.comm.members]
        refusal = ""
        try:
            old.barrier()
        except r2ccl.CommunicatorRevoked as exc:
            refusal = str(exc)
        assert "closed" in refusal
        done = np.array([self.step])
        self.comm.allreduce(done, op=r2ccl.MIN)
        self.step = int(done[0])
        if "wakes" in self.plan:
            os.kill(self.pids[self.plan["wakes"]], signal.SIGCONT)

    def run(self) -> None:
        is_shrinking = False
        while True:
            try:
                if is_shrinking:
                    self.shrink()
                is_shrinking = False
                self.work()
                self.comm.close()
                return
            except (r2ccl.PeerLost, r2ccl.CommunicatorRevoked) as exc:
                self.errors.append(type(exc).__name__)
                if "aborts_after_s" in self.plan:
                    raise
                is_shrinking = True


def die(*_: object) -> None:
    """Kill the process group: this rank, and those that die at the same step."""
    os.killpg(0, signal.SIGKILL)


def linger_once(seconds: float) -> None:
    make = Succession.make

    def make_late(*args: Any) -> Any:
        Succession.make = make  # type: ignore[method-assign]
        time.sleep(seconds)
        return make(*args)

    Succession.make = make_late  # type: ignore[method-assign]


def run(plans: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Run the plan of this rank; return the report."""
    plan = plans[int(os.environ["RANK"])]
    if isinstance(plan.get("dies"), str):
        setattr(Shrinking, plan["dies"], die)
    if "lingers_s" in plan:
        linger_once(plan["lingers_s"])
    worker = Worker(r2ccl.init(**plan.get("settings", {})), plan)
    begin = time.monotonic()
    if "aborts_after_s" in plan:
        threading.Timer(plan["aborts_after_s"], worker.comm.abort).start()
    failure = ""
    try:
        worker.run()
    except r2ccl.R2cclError as exc:
        failure = f"{type(exc).__name__}: {exc}"
    for thread in threading.enumerate():  # those that the end of the process waits for
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(_JOIN_S)
    took_s = time.monotonic() - begin
    if "kills" in plan:
        os.kill(worker.pids[plan["kills"]], signal.SIGKILL)
    return {
        "steps": worker.step,
        "names": worker.names,
        "errors": worker.errors,
        "shrink_s": worker.shrink_s,
        "failure": failure,
        "took_s": took_s,
    }


if __name__ == "__main__":
    print(json.dumps(run({int(os.environ["RANK"]): json.loads(sys.argv[1])})), flush=True)

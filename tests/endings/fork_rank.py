"""Run one rank of a job that forks a child that unwinds, calls, or outlives its killed parent.

Argument: ``unwinds``, ``calls`` or ``outlives``; rank 1 forks. Prints its findings as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from ending_rank import rails_in_use

import r2ccl

NCALLS = 20


def live(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {"error": "", "child": None}
    try:
        with r2ccl.init() as comm:
            comm.allreduce(np.ones(100_000))
            found["rails"] = rails_in_use(comm)
            child = fork(comm) if comm.rank == 1 else 0
            if comm.rank == 1 and child == 0:
                be_a_child(kind, comm)
            if kind == "outlives":
                comm.allreduce(np.ones(100_000))
            if kind == "outlives" and comm.rank == 1:
                print(f"ends {time.monotonic()}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            for call in range(NCALLS):
                x = np.full(100_000, call, np.int64)
                comm.allreduce(x)
                assert (x == call * comm.nranks).all()
                time.sleep(0.01)
            if child:
                found["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            comm.barrier()
    except r2ccl.R2cclError as exc:
        found |= {"error": type(exc).__name__, "text": str(exc), "raised_s": time.monotonic()}
    return found


def fork(comm: r2ccl.Communicator) -> int:
    """Fork while another thread holds a lock of the communicator, as its control thread may."""
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with comm._job.event_queue._changed:
            is_held.set()
            may_end.wait()

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    is_held.wait()
    child = os.fork()
    if child:
        may_end.set()
        holder.join()
    return child


def be_a_child(kind: str, comm: r2ccl.Communicator) -> None:
    # A mapping would keep the device open while this child lives.
    assert "/dev/infiniband/" not in Path("/proc/self/maps").read_text()
    if kind == "outlives":
        time.sleep(3.0)
        os._exit(0)
    if kind == "calls":
        try:
            comm.allreduce(np.ones(100_000))
        except r2ccl.CommunicatorRevoked as exc:
            os._exit(0 if "forked" in str(exc) else 3)
        os._exit(4)
    # Like a program that unwinds all its frames, and releases everything.
    comm.close()
    comm.abort()
    try:
        with comm:
            raise SystemExit
    except SystemExit:
        sys.exit(0)


def main(kind: str) -> None:
    try:
        print(json.dumps(live(kind)), flush=True)
    except SystemExit as exc:
        os._exit(exc.code if isinstance(exc.code, int) else 5)


if __name__ == "__main__":
    main(sys.argv[1])

"""One of two ranks, one a node: rank 0 asks for signs of life until every RDMA rail has one.

Started by ``r2ccl launch`` inside the lab. Then rank 1 is stopped, and its NIC asked once more.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import r2ccl
from r2ccl.types import ProbeKey

NICS = int(os.environ["R2CC_RDMALAB_NICS"])
PATIENCE_S = 60.0


def ask(comm: r2ccl.Communicator, key: ProbeKey) -> bool | None:
    """Ask, and wait for the answer; the control thread moves the loop."""
    engine: Any = comm._engine
    told: list[Any] = []
    engine.call(lambda: engine._failover.probes.ask(key, told.append))
    give_up = time.monotonic() + PATIENCE_S
    while not told:
        assert time.monotonic() < give_up, f"no word about {key}"
        time.sleep(0.01)
    answer: bool | None = told[0].is_answered
    return answer


def ask_until_answered(comm: r2ccl.Communicator, key: ProbeKey) -> bool:
    """Its connection comes up after the paths."""
    give_up = time.monotonic() + PATIENCE_S
    while not ask(comm, key):
        if time.monotonic() > give_up:
            return False
    return True


def main() -> None:
    """Probe from rank 0; rank 1 waits in a collective, or stands still."""
    rank = int(os.environ["RANK"])
    os.environ["R2CC_HCA"] = "=" + ",".join(f"rxe_n{rank}r{nic}" for nic in range(NICS))
    settings = {"init_timeout_s": 120.0, "peer_timeout_s": 60.0, "probe_timeout_s": 1.0}
    with r2ccl.init(**settings) as comm:
        pids = np.zeros(2, np.int64)
        pids[rank] = os.getpid()
        comm.allreduce(pids)
        if rank == 0:
            engine: Any = comm._engine
            first = engine._transport.nrails - NICS  # rails of TCP come before
            keys = [ProbeKey(1, first + nic, first + nic) for nic in range(NICS)]
            report: dict[str, Any] = {
                "joined": {nic: ask_until_answered(comm, key) for nic, key in enumerate(keys)}
            }
            os.kill(int(pids[1]), signal.SIGSTOP)
            try:
                report["peer stopped"] = ask(comm, keys[0])
            finally:
                os.kill(int(pids[1]), signal.SIGCONT)
            Path(sys.argv[1]).write_text(json.dumps(report))
        comm.barrier()


if __name__ == "__main__":
    main()

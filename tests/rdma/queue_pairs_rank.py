"""One rank that counts its queue pairs after `init()`, started by `test_queue_pairs`.

Prints what the kernel and the communicator report, as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import time

import r2ccl
from r2ccl.bootstrap import peer, wire
from r2ccl.bootstrap.listener import Listener
from r2ccl.failover import connector

#: Seconds for each step of a connection: eight ranks share two emulated processors, so a rank may
#: not run for longer than the library waits, which then begins again.
PATIENCE_S = 60.0


def be_patient() -> None:
    """Give each step of a connection `PATIENCE_S`."""
    wire.HANDSHAKE_TIMEOUT_S = peer._DIAL_TIMEOUT_S = PATIENCE_S
    connector._ANSWER_TIMEOUT_S = connector._PROOF_TIMEOUT_S = PATIENCE_S
    defaults = Listener.__init__.__kwdefaults__
    assert defaults is not None
    defaults["timeout_s"] = PATIENCE_S


def queue_pairs() -> int:
    """Return the number of queue pairs of this process, as the kernel reports it."""
    done = subprocess.run(
        ["rdma", "-j", "resource", "show", "qp"], capture_output=True, text=True, check=True,
        timeout=60.0,
    )  # fmt: skip
    return sum(each.get("pid") == os.getpid() for each in json.loads(done.stdout))


def main(_: str) -> None:
    """Start a communicator and print the counts."""
    be_patient()
    began_s = time.monotonic()
    with r2ccl.init() as comm:
        init_s = time.monotonic() - began_s
        print(f"init took {init_s:.1f} s", flush=True)
        comm.barrier()
        nqps = queue_pairs()
        peers = {path["peer"] for path in json.loads(comm.dump())["paths"]}
        print(json.dumps({"rank": comm.rank, "init_s": init_s, "nqps": nqps, "npeers": len(peers)}))
        comm.barrier()  # no rank destroys queue pairs while another one counts

"""One rank that counts its queue pairs after `init()`, started by `test_queue_pairs`.

The argument is the number of queue pairs to wait for: probes are connected after `init()`, one by
one. Prints what the kernel and the communicator report, as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter

import r2ccl

#: Longest wait for the queue pairs of probes, and the time after it in which no more may come.
_LIMIT_S, _STILL_S = 90.0, 3.0


def queue_pairs() -> int:
    """Return the number of queue pairs of this process, as the kernel reports it."""
    done = subprocess.run(
        ["rdma", "-j", "resource", "show", "qp"], capture_output=True, text=True, check=True,
        timeout=60.0,
    )  # fmt: skip
    return sum(each.get("pid") == os.getpid() for each in json.loads(done.stdout))


def main(argument: str) -> None:
    """Start a communicator, wait until its queue pairs are `argument`, and print the counts."""
    began_s = time.monotonic()
    with r2ccl.init() as comm:
        ready_s = time.monotonic() - began_s
        until_s = time.monotonic() + _LIMIT_S
        while (found := queue_pairs()) < int(argument) and time.monotonic() < until_s:
            time.sleep(0.5)
        comm.barrier()  # all ranks have theirs
        time.sleep(_STILL_S)
        status = json.loads(comm.dump())
        peers = Counter(path["peer"] for path in status["paths"])
        print(json.dumps({
            "rank": comm.rank, "init_s": ready_s, "reached": found, "nqps": queue_pairs(),
            "npeers": len(peers), "npaths": peers.total(),
        }))  # fmt: skip
        comm.barrier()  # no rank destroys queue pairs while another one counts

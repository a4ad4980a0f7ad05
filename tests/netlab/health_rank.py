"""Run one rank of a job that runs short allreduces until all ranks know of a lost rail.

Prints a JSON object as its last line.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import r2ccl

GIVE_UP_S = 20.0


def main() -> None:
    nbytes, busy_s = int(sys.argv[1]), float(sys.argv[2])
    with r2ccl.init() as comm:
        x = np.ones(nbytes // 4, np.float32)
        knows = np.zeros(1, np.float32)
        deadline = time.monotonic() + GIVE_UP_S
        nops = 0
        while knows[0] < 1 and time.monotonic() < deadline:
            out = comm.allreduce(x, np.empty_like(x))
            assert (out == comm.nranks).all()
            nops += 1
            knows[0] = 0 in comm.known_health().health.shares
            comm.allreduce(knows, op=r2ccl.ReduceOp.MIN)
            time.sleep(busy_s)  # stands for the user's own work
        known = comm.known_health()
        comm.barrier()
    print(
        json.dumps(
            {
                "rank": comm.rank,
                "version": known.health.version,
                "degraded": known.health.degraded(),
                "shares": list(known.health.shares),
                "nrails": known.health.nrails,
                "since_s": known.since_s,
                "nops": nops,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()

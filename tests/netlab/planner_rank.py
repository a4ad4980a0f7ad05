"""Run one rank of a job that reports the planner's choice before and after rails change.

Prints a JSON list as its last line: at each of `WHEN`, the schedule of a large allreduce, the load
of its busiest port, its predicted and measured time, and the lowest share of any working rail
(`r2ccl.failover.health.table`).
"""

from __future__ import annotations

import json
import logging
import sys
import time

import numpy as np

import r2ccl

WHEN = (2, 12)


def main() -> None:
    logging.getLogger("r2ccl").setLevel(logging.ERROR)
    nbytes = int(sys.argv[1])
    said = []
    with r2ccl.init() as comm:
        x, out = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
        for op in range(WHEN[-1] + 1):
            chosen = comm.explain(nbytes).chosen
            lowest = min(filter(None, comm.known_health().health.shares))
            begun_s = time.monotonic()
            comm.allreduce(x, out)
            took_s = time.monotonic() - begun_s
            assert (out == comm.nranks).all()
            if op in WHEN:
                said.append(
                    {
                        "schedule": chosen.schedule.name,
                        "load": float(chosen.load),
                        "predicted_s": chosen.predicted_ns / 1e9,
                        "took_s": took_s,
                        "lowest_share": lowest,
                    }
                )
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()

"""Run one rank of a job that excludes a NIC, loses it and includes it again; print a report.

Node 1 loses its NIC of rail 1 in the second phase. A phase ends when all ranks see its purpose.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np

import r2ccl

RAIL, OWNER, OPS = 1, 1, 5
GIVE_UP_S, UNPLUGGED_S = 30.0, 1.5
#: Between two operations, so that ranks that wait for an event leave the cores to others.
PAUSE_S = 0.03


def main() -> None:
    with r2ccl.init() as comm:
        x = np.ones(1 << 18, np.float32)

        def work(is_over: Callable[[], bool] = lambda: True) -> None:
            """Reduce `OPS` times, and on until ``is_over()`` on all ranks."""
            give_up_s = time.monotonic() + GIVE_UP_S
            over, nops = np.zeros(1), 0
            while not over[0] or nops < OPS:
                assert (comm.allreduce(x, np.empty_like(x)) == comm.nranks).all()
                assert time.monotonic() < give_up_s, f"{comm.health()}"
                over[0] = is_over()
                comm.allreduce(over, op=r2ccl.MIN)
                nops += 1
                time.sleep(PAUSE_S)

        def nslices() -> int:
            paths = comm.health().rails[RAIL].paths
            return sum(path.nslices_sent for path in paths if OWNER in (comm.rank, path.peer))

        name = comm.health().rails[RAIL].name
        declared = comm.known_health().health.excluded
        work()
        if comm.rank == 0:
            comm.exclude(OWNER, name)
        comm.barrier()
        before, until_s = nslices(), time.monotonic() + UNPLUGGED_S
        work(lambda: time.monotonic() > until_s)
        used = nslices() - before
        if comm.rank == comm.nranks - 1:
            comm.include(OWNER, name)
        work(lambda: not comm.known_health().health.degraded() and nslices() > before)
        report = {
            "declared": declared,
            "used": used,
            "causes": sorted({repair.cause for repair in comm.repairs()}),
            "down": [str(verdict) for verdict in comm.verdicts() if verdict.is_down],
        }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()

"""Run one rank of a job that loses rails until some ranks have no common rail.

For `test_netlab_apart`. Runs rounds of every collective, small and large, and checks each result.
Argument 1 is the number of rounds before the rank waits for a line on standard input, argument 2
the number after. Prints lines of JSON: ``{"ready": ...}`` before it waits, and a report at the end.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from support import values

import r2ccl
from r2ccl.types import BYPASS

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "broadcast", "reduce")
COUNTS = (64, 96_000)


def main() -> None:
    before, after = int(sys.argv[1]), int(sys.argv[2])
    wrong: list[str] = []
    slowest_s = 0.0
    with r2ccl.init() as comm:
        for number in range(before + after):
            if number == before:
                print(json.dumps({"ready": comm.rank}), flush=True)
                sys.stdin.readline()
                # One more call uses the plan from before the loss: see docs/agreement.md.
                comm.allreduce(np.ones(COUNTS[-1], np.float32))
            for collective in COLLECTIVES:
                for count in COUNTS:
                    begun_s = time.monotonic()
                    found, wanted = run(comm, collective, count, root=number % comm.nranks)
                    slowest_s = max(slowest_s, time.monotonic() - begun_s)
                    if not values.same(found, wanted):
                        wrong.append(f"round {number}: {collective} of {count}")
            comm.barrier()
        health = comm.known_health().health
        shares = [
            health.share(rank, rail) for rank in range(comm.nranks) for rail in range(health.nrails)
        ]
        # From the evidence to the first byte of a replayed slice.
        repairs_ms = [
            round((repair.first_byte_s - repair.failed_s) * 1e3, 1)
            for repair in comm.repairs()
            if repair.first_byte_s
        ]
        nbypasses = sum(path["rail"] == BYPASS for path in json.loads(comm.dump())["paths"])
    report = {
        "wrong": wrong,
        "shares": shares,
        "slowest_s": round(slowest_s, 3),
        "repairs_ms": repairs_ms,
        "nbypasses": nbypasses,
    }
    print(json.dumps(report), flush=True)


def run(
    comm: r2ccl.Communicator, collective: str, count: int, root: int
) -> tuple[np.ndarray, np.ndarray]:
    """Run a collective on small integers; return its result and the expected one."""
    count -= count % comm.nranks
    n, rank = comm.nranks, comm.rank
    total = values.expected(n, count, "float32", r2ccl.SUM)
    mine = values.data_of(rank, count, "float32")
    if collective == "allreduce":
        return comm.allreduce(mine.copy()), total
    if collective == "reduce_scatter":
        return comm.reduce_scatter(mine), total.reshape(n, -1)[rank]
    if collective == "allgather":
        every = [values.data_of(peer, count // n, "float32") for peer in range(n)]
        return comm.allgather(every[rank]), np.concatenate(every)
    if collective == "broadcast":
        return comm.broadcast(mine.copy(), root=root), values.data_of(root, count, "float32")
    found = comm.reduce(mine.copy(), root=root)
    return (found, total) if rank == root else (mine, mine)


if __name__ == "__main__":
    main()

"""Run one rank of a job of many collectives while NICs fail and recover.

For `test_netlab_schedules`. Argument 1 is a JSON list of operations, each [collective, dtype, op,
root], run in order. A name of `SCHEDULES` may replace the collective. Data are small integers,
whose results are exact in every element type and order. Only the float32 allreduce sums data that
must be rounded, so that its bits depend on the order. Prints a JSON object as its last line.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

import numpy as np
from support import values

import r2ccl
from r2ccl.testing.simulation import SCHEDULES

#: Elements of a whole buffer: the parts of all ranks.
COUNT = 32_000
#: Seconds between two operations, in which ranks detect changes of NICs and agree on plans.
PAUSE_S = 0.05
#: Channels of a schedule that is run by its name.
CHANNELS = 4


def main() -> None:
    wrong, digests, versions = [], [], []
    with r2ccl.init() as comm:
        for number, (collective, dtype, name, root) in enumerate(json.loads(sys.argv[1])):
            op = r2ccl.ReduceOp[name]
            if collective == "allreduce" and dtype == "float32":
                found, is_right = rounded(comm)
            else:
                found, wanted = call(comm, collective, dtype, op, root)
                is_right = values.same(found, wanted)
            if not is_right:
                wrong.append(f"operation {number}: {collective} {dtype} {name}")
            digests.append(hashlib.sha256(found.tobytes()).hexdigest())
            versions.append(comm.known_health().health.version)
            time.sleep(PAUSE_S)  # stands for the user's own work
        comm.barrier()
        nrepairs = len(comm.repairs())
    report = {"wrong": wrong, "digests": digests, "versions": versions, "nrepairs": nrepairs}
    print(json.dumps(report), flush=True)


def rounded(comm: r2ccl.Communicator) -> tuple[np.ndarray, bool]:
    """Sum data that must be rounded; return the sum, and whether its error is within bounds."""
    every = [
        np.random.default_rng(rank).standard_normal(COUNT).astype(np.float32)
        for rank in range(comm.nranks)
    ]
    found = comm.allreduce(every[comm.rank].copy())
    off = np.abs(found - np.sum(every, axis=0, dtype=np.float64))
    eps = np.finfo(np.float32).eps
    return found, bool(np.all(off <= comm.nranks * eps * np.sum(np.abs(every), axis=0)))


def call(
    comm: r2ccl.Communicator, collective: str, dtype: str, op: r2ccl.ReduceOp, root: int
) -> tuple[np.ndarray, np.ndarray]:
    """Run an operation; return the part of the result this rank gets, and the expected part."""
    part = slice(comm.rank * COUNT // comm.nranks, (comm.rank + 1) * COUNT // comm.nranks)
    x = values.data_of(comm.rank, COUNT, dtype)
    total = values.expected(comm.nranks, COUNT, dtype, op)
    match collective:
        case "allreduce":
            return comm.allreduce(x, op=op), total
        case "reduce_scatter":
            return comm.reduce_scatter(x, op=op), total[part]
        case "allgather":
            return comm.allgather(total[part]).reshape(-1), total
        case "broadcast":
            return comm.broadcast(x, root=root), values.data_of(root, COUNT, dtype)
        case "reduce":
            result = comm.reduce(x, op=op, root=root)
            return (total[:0], total[:0]) if result is None else (result, total)
        case _:  # an allreduce by a schedule of this name
            schedule = SCHEDULES[collective](comm.nranks, CHANNELS)
            return comm.run_schedule(schedule, x, op=op), total


if __name__ == "__main__":
    main()

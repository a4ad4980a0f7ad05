"""Run one rank of a campaign: collectives that must be exact, each with one fault.

The arguments are the number of runs, the size of the buffer in bytes, and the name of the
collective (default: allreduce). If a call counts as one collective of the network, op 2k of the job
is the call of run k (a planned fault occurs inside it), op 2k + 1 a barrier.
Between runs the rank waits, without communicating, until every path it lost is up again. Prints a
JSON object as its last line.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import r2ccl
from r2ccl.types import BYPASS

RESTORE_TIMEOUT_S = 20.0


def main() -> None:
    runs, nbytes = int(sys.argv[1]), int(sys.argv[2])
    name = sys.argv[3] if len(sys.argv) > 3 else "allreduce"
    with r2ccl.init() as comm:
        count = nbytes // 4 // (comm.nranks if name == "allgather" else 1)
        data = np.random.default_rng(comm.rank).standard_normal(count).astype(np.float32)
        reference = run_call(comm, name, data.copy()).copy()
        comm.barrier()
        exact, times = 0, []
        for run in range(1, runs + 1):
            scale = np.float32(2.0 ** (run % 8 - 4))  # a power of two scales every bit exactly
            x = data * scale
            begin = time.monotonic()
            found = run_call(comm, name, x)
            times.append((begin, time.monotonic()))
            wanted = reference * scale
            exact += bool(np.array_equal(found.view(np.uint32), wanted.view(np.uint32)))
            wait_until_whole(comm)
            comm.barrier()
        report = {
            "rank": comm.rank,
            "exact": exact,
            "times": times,
            "repairs": [
                {name: getattr(repair, name) for name in repair.__struct_fields__}
                for repair in comm.repairs()
            ],
        }
    print(json.dumps(report), flush=True)


def run_call(comm: r2ccl.Communicator, name: str, x: np.ndarray) -> np.ndarray:
    """Run a collective on `x`; return its result, or `x` on ranks that get none."""
    found = getattr(comm, name)(x)
    return x if found is None else found


def wait_until_whole(comm: r2ccl.Communicator) -> None:
    deadline = time.monotonic() + RESTORE_TIMEOUT_S
    while time.monotonic() < deadline:
        newest = {(repair.peer, repair.rail): repair for repair in comm.repairs()}
        # A bypass is connected again only when two ranks need it.
        lost = [each for each in newest.values() if not each.restored_s and each.rail != BYPASS]
        if not lost:
            return
        time.sleep(0.01)
    raise RuntimeError(f"rank {comm.rank}: paths did not come back: {lost}\n{comm.dump()}")


if __name__ == "__main__":
    main()

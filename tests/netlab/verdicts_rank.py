"""Run one rank of a job whose rail breaks once; print its verdicts after the given operations.

Prints a JSON object as its last line.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import r2ccl

#: Seconds in which verdicts are polled; a diagnosis of two rounds takes less.
SETTLE_S = 3.0


def main() -> None:
    nops, nbytes, rail = (int(word) for word in sys.argv[1:])
    with r2ccl.init() as comm:
        x = np.ones(nbytes // 4, np.float32)
        for _ in range(nops):
            comm.allreduce(x, np.empty_like(x))
        deadline = time.monotonic() + SETTLE_S
        while len(found(comm, rail)) < len({r.peer for r in comm.repairs() if r.rail == rail}):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        report = {
            "rank": comm.rank,
            "found": found(comm, rail),
            "all": [(each.path, each.kind.value, str(each)) for each in comm.verdicts()],
            "repairs": [(repair.peer, repair.rail, repair.cause) for repair in comm.repairs()],
        }
        comm.barrier()
    print(json.dumps(report), flush=True)


def found(comm: r2ccl.Communicator, rail: int) -> dict[str, str]:
    """Return the verdict on the path to each peer, without mere suspicions."""
    return {
        str(each.path.peer): each.kind.value
        for each in comm.verdicts()
        if each.path.rail == rail and each.is_down
    }


if __name__ == "__main__":
    main()

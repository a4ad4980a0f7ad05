"""One rank of a job whose rail breaks once: what it found, after the operations named in argv.

Writes a JSON object as its last line.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import r2ccl

#: A diagnosis of two rounds takes less; it is looked at again until it is over.
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
    """Peer to what was found of the path to it, of those that are no mere suspicion."""
    return {
        str(each.path.peer): each.kind.value
        for each in comm.verdicts()
        if each.path.rail == rail and each.is_down
    }


if __name__ == "__main__":
    main()

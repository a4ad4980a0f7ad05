"""Rank of `first_call.py`: exchanges a message with ranks to which it has no paths yet.

Prints a JSON object as its last line: ``calls``, for each pair of which this rank is one, the times
in milliseconds of the first call and of its repetition; and ``nconnects``, the number of calls of
this rank that waited for paths.
"""

from __future__ import annotations

import json
import time

import numpy as np

import r2ccl

#: Not a power of two: the schedules of a whole network name no ranks at this distance.
DISTANCE = 3
#: Seconds in which the ranks come to rest before a message, and in which the others do nothing.
_REST_S = 0.2


def main() -> None:
    """Let each pair of ranks at `DISTANCE` exchange its messages, one pair after another."""
    found = []
    with r2ccl.init() as comm:
        data, out = np.ones(16), np.empty(16)
        for _ in range(2):
            comm.allreduce(data, out)
        for source in range(comm.nranks):
            destination = (source + DISTANCE) % comm.nranks
            comm.barrier()
            time.sleep(_REST_S)
            if comm.rank not in (source, destination):
                time.sleep(_REST_S)
                continue
            took_ms = []
            for _ in range(2):
                begun_s = time.perf_counter()
                if comm.rank == source:
                    comm.send(data, destination)
                else:
                    comm.recv(out, source)
                took_ms.append(1e3 * (time.perf_counter() - begun_s))
            found.append(took_ms)
        comm.barrier()
        nconnects = json.loads(comm.dump())["nconnects"]
    print(json.dumps({"calls": found, "nconnects": nconnects}), flush=True)


if __name__ == "__main__":
    main()

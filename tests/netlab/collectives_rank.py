"""Run one rank of a campaign of all collectives, each call with one fault.

Arguments: the runs of each collective, and the bytes of a part. Call k of the job is op 2k (a
planned fault occurs inside it), op 2k + 1 is a barrier. Between calls the rank waits until every
path it lost is up again. Prints a JSON object as its last line, with the runs in which a result was
wrong.
"""

from __future__ import annotations

import json
import sys
import time

from campaign_rank import wait_until_whole
from support import matrix_programs, values

import r2ccl

CALLS = (*matrix_programs.COLLECTIVES, "barrier")


def main() -> None:
    runs, nbytes = int(sys.argv[1]), int(sys.argv[2])
    wrong: dict[str, list[int]] = {name: [] for name in CALLS}
    slowest_s = dict.fromkeys(CALLS, 0.0)
    nrepairs = dict.fromkeys(CALLS, 0)
    with r2ccl.init() as comm:
        for run in range(runs):
            for name in CALLS:
                cell = cell_of(comm, name, run, nbytes)
                mode = list(matrix_programs.MODES.values())[run % 3 if cell.arrays else 0]
                before, begin = len(comm.repairs()), time.monotonic()
                mode(comm, [cell])
                slowest_s[name] = max(slowest_s[name], time.monotonic() - begin)
                if not cell.is_right:
                    wrong[name].append(run)
                wait_until_whole(comm)
                nrepairs[name] += len(comm.repairs()) - before
                comm.barrier()
    print(json.dumps({"wrong": wrong, "slowest_s": slowest_s, "nrepairs": nrepairs}), flush=True)


def cell_of(comm: r2ccl.Communicator, name: str, run: int, nbytes: int) -> matrix_programs.Cell:
    """Return a call of `run`, with another dtype, operation, place and root in each run."""
    if name == "barrier":
        return matrix_programs.Cell(comm.barrier, [])
    dtype = values.DTYPES[run % len(values.DTYPES)]
    operation = None
    if name in matrix_programs.REDUCING:
        found = matrix_programs.reductions(name, dtype, comm.rank)
        operation = found[run % len(found)]
    count = nbytes // values.dtype_of(dtype).itemsize
    return matrix_programs.COLLECTIVES[name](
        matrix_programs.Case(
            comm, dtype, operation, count, is_in_place=run % 2 == 1,
            root=run % comm.nranks,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()

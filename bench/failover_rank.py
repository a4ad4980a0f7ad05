"""Run one rank of the failover bench: verified allreduces without end.

Started by ``failover.py`` in a netlab. Prints lines of JSON: the times of each operation (rank 0),
and repairs that are new or have changed. Ends when rank 0's stdin ends; a wrong element ends the
rank at once, with an error.
"""

from __future__ import annotations

import json
import logging
import select
import sys
import time
from typing import Any

import msgspec
import numpy as np

import r2ccl

Array = np.ndarray[Any, np.dtype[np.float32]]

#: Repairs last reported to the bench, by peer, rail and time of failure.
Said = dict[tuple[int, int, float], dict[str, Any]]

#: First element of rank 0's input in the last operation; the other ranks see it in the result.
_STOP = 1 << 20
#: Latest repairs to compare again after each operation; older ones no longer change.
_RECENT = 64


def make_arrays(comm: r2ccl.Communicator, nbytes: int) -> list[tuple[Array, Array]]:
    """Return two inputs with their exact sums, which differ from each other in every element.

    The inputs alternate, so that a lost slice shows as the previous operation's result. A misplaced
    slice shows because neighbouring elements differ.
    """
    ramp = np.arange(nbytes // 4, dtype=np.float32) % 1021
    n = comm.nranks
    made = []
    for turn in range(2):
        mine, total = ramp * (comm.rank + 1) + turn, ramp * (n * (n + 1) // 2) + n * turn
        mine[0] = total[0] = 0  # reserved for _STOP
        made.append((mine, total))
    return made


def is_told_to_stop() -> bool:
    """Return whether stdin has ended."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def say(**fields: Any) -> None:
    """Print a report to the bench."""
    print(json.dumps(fields), flush=True)


def say_repairs(comm: r2ccl.Communicator, said: Said) -> None:
    """Report repairs that are new or have changed since `said`, and update `said`."""
    for repair in comm.repairs()[-_RECENT:]:
        key, fields = (repair.peer, repair.rail, repair.failed_s), msgspec.to_builtins(repair)
        if said.get(key) != fields:
            said[key] = fields
            say(rank=comm.rank, repair=fields)


def main() -> None:
    """Run operations of ``sys.argv[1]`` bytes until stdin ends."""
    logging.getLogger("r2ccl").setLevel(logging.ERROR)  # failures are intended
    said: Said = {}
    with r2ccl.init() as comm:
        arrays = make_arrays(comm, int(sys.argv[1]))
        out = np.empty_like(arrays[0][0])
        op = 0
        while out[0] != _STOP or not op:
            x, expected = arrays[op % 2]
            x[0] = _STOP if comm.rank == 0 and is_told_to_stop() else 0
            begun = time.monotonic()
            comm.allreduce(x, out)
            ended = time.monotonic()
            if not np.array_equal(out[1:], expected[1:]):
                wrong = np.flatnonzero(out[1:] != expected[1:]) + 1
                raise SystemExit(
                    f"rank {comm.rank}: operation {op} has {len(wrong)} wrong elements, "
                    f"from {wrong[0]} to {wrong[-1]}"
                )
            if comm.rank == 0:
                say(op=op, begun_s=begun, ended_s=ended)
            say_repairs(comm, said)
            op += 1


if __name__ == "__main__":
    main()

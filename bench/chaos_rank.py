"""Run one rank of a chaos job: random calls, each checked, until the time is over.

All ranks draw the same calls from one seed. Data is drawn from seed, call and rank, in integers
that every dtype holds exactly, so every result is known to the last bit. Prints one line of JSON.

Argument: JSON with ``seed``, ``seconds``, ``ends`` (``close``, ``abort`` or ``kill``), and
``victim``, the rank that aborts or is killed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections import deque
from typing import Any

import numpy as np

import r2ccl

DTYPES = (np.uint8, np.int32, np.int64, np.float32, np.float64)
KINDS = (
    "allreduce", "allgather", "reduce_scatter", "broadcast", "reduce", "gather", "scan", "alltoall",
    "alltoallv", "sendrecv",
)  # fmt: skip
OPS = {r2ccl.SUM: np.add, r2ccl.MIN: np.minimum, r2ccl.MAX: np.maximum}
#: Calls between two checks of the clock, and largest number of asynchronous calls in flight.
LOOK_EVERY, MOST_AHEAD = 20, 3
MOST_NBYTES = 4 << 20


class Chaos:
    """Random calls of one rank, compared with NumPy's results."""

    def __init__(self, comm: r2ccl.Communicator, seed: int) -> None:
        self.comm = comm
        self.draw = np.random.default_rng(seed)
        self.seed = seed
        self.ncalls = 0
        self.wrong: list[str] = []
        self.slowest_s = 0.0
        self._ahead: deque[tuple[str, Any, Any, np.ndarray | None]] = deque()

    def data(self, call: int, rank: int, count: int, dtype: Any) -> np.ndarray:
        """Return the input of `rank` for a call: integers small enough to sum over all ranks."""
        rng = np.random.default_rng((self.seed, call, rank))
        return rng.integers(0, 16, count).astype(dtype)

    def step(self) -> None:
        """Issue one random call; wait for its result, unless it is asynchronous."""
        comm, draw = self.comm, self.draw
        self.ncalls += 1
        call, n = self.ncalls, comm.nranks
        kind = str(draw.choice(KINDS))
        dtype = np.dtype(DTYPES[draw.integers(len(DTYPES))])
        nbytes = int(np.exp(draw.uniform(np.log(8), np.log(MOST_NBYTES))))
        count = max(1, nbytes // dtype.itemsize // n) * n
        op = list(OPS)[draw.integers(len(OPS))]
        root = int(draw.integers(n))
        is_async, shift = bool(draw.integers(2)), int(draw.integers(1, n))
        every = [self.data(call, rank, count, dtype) for rank in range(n)]
        x = every[comm.rank].copy()
        total = every[0]
        for other in every[1:]:
            total = OPS[op](total, other)
        part = slice(comm.rank * count // n, (comm.rank + 1) * count // n)
        named: dict[str, Any] = {"async_op": is_async}
        if kind in ("allreduce", "reduce_scatter", "reduce", "scan"):
            named["op"] = op
        if kind in ("broadcast", "reduce", "gather"):
            named["root"] = root
        given: np.ndarray = x
        want: np.ndarray | None = total
        if kind == "allgather":
            given = np.ascontiguousarray(x[: count // n])
            want = np.concatenate([each[: count // n] for each in every])
        elif kind == "reduce_scatter":
            want = total[part]
        elif kind == "broadcast":
            want = every[root]
        elif kind == "reduce" and comm.rank != root:
            want = None
        elif kind == "gather":
            given = np.ascontiguousarray(x[: count // n])
            gathered = np.concatenate([each[: count // n] for each in every])
            want = gathered if comm.rank == root else None
        elif kind == "scan":
            want = every[0]
            for other in every[1 : comm.rank + 1]:
                want = OPS[op](want, other)
        elif kind == "alltoall":
            want = np.concatenate([each[part] for each in every])
        elif kind == "alltoallv":
            sizes = [[count // n * ((i + 2 * j) % 3) // 2 for j in range(n)] for i in range(n)]
            named |= {"sendcounts": sizes[comm.rank], "recvcounts": [s[comm.rank] for s in sizes]}
            firsts = [sum(row[: comm.rank]) for row in sizes]
            want = np.concatenate(
                [
                    each[first : first + row[comm.rank]]
                    for each, first, row in zip(every, firsts, sizes, strict=True)
                ]
            )
        elif kind == "sendrecv":
            source, is_async = (comm.rank - shift) % n, False
            want = every[source]
            named = {"to": (comm.rank + shift) % n, "out": np.empty_like(x), "source": source}
            if draw.integers(2) and comm.rank == root:
                time.sleep(0.05)  # the others wait for a rank that may have no paths to them
        begun_s = time.monotonic()
        result = getattr(comm, kind)(given, **named)
        if kind == "sendrecv":
            result = named["out"]
        self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)
        name = f"call {call}: {kind} of {count} {dtype.name}, {op.name}, root {root}"
        self._ahead.append((name, result if is_async else None, result, want))
        while len(self._ahead) > MOST_AHEAD or not is_async:
            if not self._ahead:
                break
            self.check()

    def check(self) -> None:
        """Wait for the oldest call in flight, and compare its result."""
        name, work, result, want = self._ahead.popleft()
        if work is not None:
            begun_s = time.monotonic()
            result = work.wait()
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)
        if want is not None and not np.array_equal(np.ravel(result), want):
            self.wrong.append(name)

    def run(self, seconds: float) -> None:
        """Issue calls until `seconds` have passed on some rank."""
        until_s = time.monotonic() + seconds
        goes_on = np.ones(1, np.int32)
        while goes_on[0]:
            for _ in range(LOOK_EVERY):
                self.step()
            while self._ahead:
                self.check()
            goes_on[0] = time.monotonic() < until_s
            self.comm.allreduce(goes_on, op=r2ccl.MIN)


def main(task: dict[str, Any]) -> dict[str, Any]:
    """Run the job, end it as `task` says, and return the report of this rank."""
    logging.getLogger("r2ccl").setLevel(logging.ERROR)
    said: dict[str, Any] = {"error": "", "text": ""}
    chaos = None
    try:
        with r2ccl.init() as comm:
            chaos = Chaos(comm, task["seed"])
            chaos.run(task["seconds"])
            said["repairs"] = len(comm.repairs())
            if task["ends"] != "close":
                comm.barrier()
                if comm.rank == task["victim"]:
                    if task["ends"] == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    comm.abort()
                while True:
                    comm.allreduce(np.ones(100_000))
    except r2ccl.R2cclError as exc:
        said |= {"error": type(exc).__name__, "text": str(exc)[:500]}
    if chaos is not None:
        said |= {
            "calls": chaos.ncalls, "wrong": chaos.wrong, "slowest_s": round(chaos.slowest_s, 3),
        }  # fmt: skip
    return said


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)

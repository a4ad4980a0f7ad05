"""Run one rank of a job of continuous allreduces while faults of one NIC come and go.

Every element of every operation is checked; a wrong one ends the job. Prints a JSON object as its
last line: begin and end of each operation on this rank, the times at which payload arrived on the
watched rail, and the times at which the watched NIC lost its carrier. The first argument has the
fields of `Task`.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

import r2ccl

Array = np.ndarray[Any, np.dtype[np.float32]]

#: First element of rank 0's input in the last operation; the other ranks see it in the result.
_STOP = 1 << 20
#: Seconds between readings of the rail's counters.
_LOOK_S = 0.01
#: Seconds beyond the requested time that the job waits for the rail.
_PATIENCE_S = 30.0


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a job.

    Attributes
    ----------
    nbytes : int
        Bytes of each allreduce.
    node, rail : int
        The watched NIC.
    from_op : int
        Operation (from 0) whose begin starts the clock.
    lasting_s : float
        Seconds that the job continues from then.
    whole_s : float
        Seconds that the job continues with every path in use before it ends.
    """

    nbytes: int
    node: int
    rail: int
    from_op: int
    lasting_s: float
    whole_s: float = 0.0


class Watch:
    """Thread that records events of one rail, as a context manager.

    Payload counts when a whole slice has arrived. Times are late by that and by `_LOOK_S`.

    Attributes
    ----------
    arrivals : dict of int to list of float
        Times at which the received payload had grown, by peer.
    losses : list of float
        Times at which this node's NIC lost its carrier.
    """

    def __init__(self, comm: r2ccl.Communicator, rail: int, peers: list[int]) -> None:
        self.arrivals: dict[int, list[float]] = {peer: [] for peer in peers}
        self.losses: list[float] = []
        self._comm = comm
        self._rail = rail
        self._nbytes = dict.fromkeys(peers, 0)
        nic = comm.health().rails[rail].name
        self._carrier = Path(f"/sys/class/net/{nic}/carrier_down_count")
        self._nlosses = self._count_losses()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            report = self._comm.health()
            for path in report.rails[self._rail].paths:
                if path.nbytes_received > self._nbytes.get(path.peer, path.nbytes_received):
                    self._nbytes[path.peer] = path.nbytes_received
                    self.arrivals[path.peer].append(report.now_s)
            nlosses = self._count_losses()
            self.losses += [report.now_s] * (nlosses - self._nlosses)
            self._nlosses = nlosses

    def _count_losses(self) -> int:
        return int(self._carrier.read_text())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()


class End:
    """Condition for rank 0 to end the job."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._from_s: float | None = None
        self._whole_since_s: float | None = None

    def is_due(self, op: int, is_whole: bool) -> bool:
        """Return whether `op` is the last operation; `is_whole`: all rails were up before it."""
        now = time.monotonic()
        if op < self._task.from_op:
            return False
        if self._from_s is None:
            self._from_s = now
        if not is_whole:
            self._whole_since_s = None
        elif self._whole_since_s is None:
            self._whole_since_s = now
        left_s = self._from_s + self._task.lasting_s - now
        has_been_whole = (
            self._whole_since_s is not None and now >= self._whole_since_s + self._task.whole_s
        )
        return left_s <= 0 and (self._task.whole_s == 0 or has_been_whole or left_s < -_PATIENCE_S)


def make_arrays(comm: r2ccl.Communicator, nbytes: int) -> list[tuple[Array, Array]]:
    """Return two inputs with their exact sums, which differ from each other in every element.

    The inputs alternate, so that a lost slice shows as the previous operation's result. A misplaced
    slice shows because neighbouring elements differ. The first two elements carry control values.
    """
    ramp = np.arange(nbytes // 4, dtype=np.float32) % 1021
    n = comm.nranks
    return [
        (ramp * (comm.rank + 1) + turn, ramp * (n * (n + 1) // 2) + n * turn) for turn in range(2)
    ]


def work(comm: r2ccl.Communicator, task: Task) -> list[Mapping[str, Any]]:
    """Run operations until the end; return the record of each."""
    arrays = make_arrays(comm, task.nbytes)
    out = np.empty_like(arrays[0][0])
    end = End(task)
    done: list[Mapping[str, Any]] = []
    while not done or out[0] != _STOP:
        is_whole = bool(done) and out[1] == comm.nranks
        x, expected = arrays[len(done) % 2]
        x[0] = _STOP if comm.rank == 0 and end.is_due(len(done), is_whole) else 0
        x[1] = all(rail.state == "up" for rail in comm.health().rails)
        begun_s = time.monotonic()
        comm.allreduce(x, out)
        ended_s = time.monotonic()
        wrong = np.flatnonzero(out[2:] != expected[2:])
        if len(wrong):
            raise SystemExit(f"operation {len(done)}: {len(wrong)} wrong, the first at {wrong[0]}")
        done.append(
            {
                "begun_s": begun_s,
                "ended_s": ended_s,
                "shares": list(comm.known_health().health.shares),
            }
        )
    return done


def main() -> None:
    # Its warnings are expected here.
    logging.getLogger("r2ccl").setLevel(logging.ERROR)
    task = msgspec.json.decode(sys.argv[1], type=Task)
    with r2ccl.init() as comm:
        others = [peer for peer in range(comm.nranks) if peer != comm.rank]
        watched = others if comm.rank == task.node else [task.node]
        with Watch(comm, task.rail, watched) as watch:
            operations = work(comm, task)
        report = {
            "operations": operations,
            "arrivals": watch.arrivals,
            "losses": watch.losses,
            "repairs": msgspec.to_builtins(comm.repairs(), str_keys=True),
        }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()

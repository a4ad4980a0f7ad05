"""Run the job of the failover bench; read the reports of its ranks in a thread."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from labs import Failure

from r2ccl.testing.netlab import Lab, LabJob

#: Seconds that any awaited event, and the whole job, may take.
_PATIENCE_S = 60.0
_JOB_TIMEOUT_S = 7200.0


class Operation(NamedTuple):
    """Begin and end of one allreduce on rank 0, in CLOCK_MONOTONIC seconds."""

    begun_s: float
    ended_s: float


class Cluster:
    """Running job: its operations and repairs so far.

    Parameters
    ----------
    lab : Lab
    nbytes : int
        Bytes per operation.
    """

    def __init__(self, lab: Lab, nbytes: int) -> None:
        self.operations: list[Operation] = []
        #: By rank, peer, rail and time of failure; a later report replaces an earlier one.
        self._repairs: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._news = threading.Condition()
        self._is_over = False
        self._words: list[str] = []
        program = str(Path(__file__).with_name("failover_rank.py"))
        self._job: LabJob = lab.start([sys.executable, program, str(nbytes)])
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait(self, is_there: Callable[[], bool], what: str) -> None:
        """Wait until `is_there` returns true; evaluate it whenever a rank reports something."""
        with self._news:
            if not self._news.wait_for(lambda: is_there() or self._is_over, _PATIENCE_S):
                raise Failure(f"waited {_PATIENCE_S:g} s in vain for {what}")
            if self._is_over:
                raise Failure("a rank ended: " + "; ".join(self._words[-4:]))

    def wait_operations(self, count: int, since_s: float) -> list[Operation]:
        """Wait for `count` operations begun after `since_s`, and return the first ones."""

        def found() -> list[Operation]:
            return [each for each in self.operations if each.begun_s >= since_s][:count]

        self.wait(lambda: len(found()) == count, f"{count} operations")
        return found()

    def repairs(self, since_s: float) -> list[dict[str, Any]]:
        """Return the repairs of all ranks that began after `since_s`."""
        with self._news:
            return [each for each in self._repairs.values() if each["failed_s"] >= since_s]

    def close(self) -> None:
        """End the job by closing rank 0's stdin, and kill what is left."""
        try:
            with self._news:
                for process in self._job.ranks[:1] if not self._is_over else ():
                    assert process.popen.stdin is not None
                    process.popen.stdin.close()
                self._news.wait_for(lambda: self._is_over, _PATIENCE_S)
        finally:
            self._job.close()
            self._reader.join()

    def _read(self) -> None:
        try:
            self._job.stream(_JOB_TIMEOUT_S, self._take)
        finally:
            with self._news:
                self._is_over = True
                self._news.notify_all()

    def _take(self, rank: int, line: str) -> None:
        with self._news:
            if not line.startswith("{"):
                self._words.append(f"rank {rank}: {line}")
                return
            said = json.loads(line)
            if "repair" in said:
                repair = said["repair"]
                key = (rank, repair["peer"], repair["rail"], repair["failed_s"])
                self._repairs[key] = repair
            else:
                self.operations.append(Operation(said["begun_s"], said["ended_s"]))
            self._news.notify_all()


__all__ = ["Cluster", "Operation"]

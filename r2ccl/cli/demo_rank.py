"""Program of each rank of ``r2ccl demo``: runs allreduces; in one of them, rank 0 loses a rail."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import numpy as np

from r2ccl.cli.perf.forms import busbw
from r2ccl.cli.values import format_size
from r2ccl.clock import monotonic
from r2ccl.communicator import Communicator
from r2ccl.factory import init
from r2ccl.failover.migration.repairs import Repair
from r2ccl.testing.fault_plan import fail_at

#: Rail that rank 0 loses in the middle call.
_RAIL = 1


class DemoResult(msgspec.Struct, frozen=True):
    """Result of the demo on a rank.

    Attributes
    ----------
    nwrong : int
        Number of wrong elements of all calls on all ranks.
    seconds : list of float
        Duration of each call on this rank.
    repairs : tuple of Repair
        Repairs that this rank has made.
    """

    nwrong: int
    seconds: list[float]
    repairs: tuple[Repair, ...]


def run_rank(calls: int, nbytes: int, step: int) -> DemoResult:
    """Run `calls` allreduces of `nbytes` and return the results.

    In the middle call, rank 0 loses a rail before it sends slice `step`, counted from 0. Rank 0
    prints one line about the job, one about each call and one about the result. Up to two more
    lines say that the traffic of the lost rail has moved, and that the rail is connected again.

    Raises
    ------
    AssertionError
        In rank 0, if the rail was not cut.
    """
    logging.getLogger("r2ccl").setLevel(logging.ERROR)  # the demo prints the repair itself
    plan = fail_at(rank=0, rail=_RAIL, op=calls // 2, step=step)
    with plan, init(faults=plan) as comm:
        reporter = _Reporter(comm, calls, nbytes)
        took = [_call(comm, number, nbytes, reporter) for number in range(calls)]
        nwrong = sum(wrong for wrong, _ in took)
        total = int(comm.allreduce(np.array([nwrong], np.int64))[0])
        plan.assert_all_fired()
        reporter.finish(total)
        return DemoResult(total, [took_s for _, took_s in took], tuple(comm.repairs()))


def _call(comm: Communicator, number: int, nbytes: int, reporter: _Reporter) -> tuple[int, float]:
    """Run one allreduce; return the number of wrong elements on this rank, and the duration in s.

    The inputs are whole numbers so small that their sum is exact.
    """
    x = np.arange(nbytes // 4, dtype=np.float32) % 1000 + comm.rank
    wanted = comm.nranks * (np.arange(x.size, dtype=np.float32) % 1000)
    wanted += comm.nranks * (comm.nranks - 1) // 2
    start_s = monotonic()
    comm.allreduce(x)
    took_s = monotonic() - start_s
    nwrong = int(np.count_nonzero(x != wanted))
    reporter.called(number, took_s, nwrong)
    return nwrong, took_s


class _Reporter:
    """Printer of the progress on rank 0; prints nothing on other ranks."""

    def __init__(self, comm: Communicator, calls: int, nbytes: int) -> None:
        self._comm = comm
        self._calls = calls
        self._nbytes = nbytes
        self._is_moved = self._is_restored = False
        self._say(
            f"{comm.nranks} ranks, {len(comm.health().rails)} rails each: {calls} allreduces of "
            f"{format_size(nbytes)}"
        )

    def called(self, number: int, took_s: float, nwrong: int) -> None:
        """Print the time and bandwidth of call `number`, and whether its result is right.

        Once the traffic of the lost rail has moved, print a line about it. Once the rail is
        connected again, print another line.
        """
        gbps = busbw("allreduce", self._comm.nranks, self._nbytes, took_s)
        state = f"{nwrong} wrong elements" if nwrong else "right"
        self._say(f"call {number}: {1e3 * took_s:7.1f} ms, busbw {gbps:5.2f} GB/s, {state}")
        repairs = self._comm.repairs()
        if repairs and not self._is_moved and all(each.resumed_s for each in repairs):
            self._is_moved = True
            self._say(_describe(repairs))
        if self._is_moved and not self._is_restored and all(each.restored_s for each in repairs):
            self._is_restored = True
            self._say(f"        rail {_RAIL} is connected again, and used from now on")

    def finish(self, nwrong: int) -> None:
        """Print the result; `nwrong` counts the wrong elements of all calls on all ranks."""
        if nwrong:
            self._say(f"FAILED: {nwrong} elements are wrong")
        else:
            self._say(
                f"OK: rail {_RAIL} of rank 0 was cut in mid-call, and every element of all "
                f"{self._calls} results is right on every rank"
            )

    def _say(self, line: str) -> None:
        if self._comm.rank == 0:
            print(line, flush=True)


def _describe(repairs: Sequence[Repair]) -> str:
    """Return a line about the failure, as rank 0 saw it."""
    moved = {channel: rail for each in repairs for channel, rail in each.moved.items()}
    took_s = max(each.resumed_s - each.failed_s for each in repairs)
    where = ", ".join(f"channel {channel} to rail {rail}" for channel, rail in moved.items())
    return (
        f"        rail {_RAIL} of rank 0 was cut; its traffic moved ({where or 'no channel'}) "
        f"within {1e3 * took_s:.1f} ms, and the call went on"
    )


__all__ = ["DemoResult", "run_rank"]

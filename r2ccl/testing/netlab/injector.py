"""Injector of faults into the NICs and ranks of a lab.

The injector applies a fault at once. The driver's thread undoes the fault after `duration_s`, and
sets the NIC of a flap up and down. A lock serializes all changes of NICs, so that no other fault
changes a NIC between the two times of a `Firing`.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable

from r2ccl.clock import monotonic
from r2ccl.errors import InvalidArgument
from r2ccl.testing.faults import Action, Fault, Firing, check_fits
from r2ccl.testing.netlab.driver import Driver
from r2ccl.testing.netlab.fabric import LabShape
from r2ccl.testing.netlab.nicfaults import FaultHold, NicFaults
from r2ccl.testing.netlab.ranks import LabJob

#: Default mean interval in seconds between the changes of a flap.
FLAP_MEAN_S = 0.1


class Injector:
    """Injector of faults into the NICs of a lab and the ranks of its job.

    Parameters
    ----------
    shape : LabShape
        Size of the lab, which faults must fit.
    nics : NicFaults
        Applies and undoes NIC faults; only the injector may use it.
    driver : Driver
        Driver whose thread ends faults and makes the changes of a flap.
    find_job : callable
        Returns the running job, or None if no job runs.
    """

    def __init__(
        self,
        shape: LabShape,
        nics: NicFaults,
        driver: Driver,
        find_job: Callable[[], LabJob | None],
    ) -> None:
        self._shape = shape
        self._nics = nics
        self._driver = driver
        self._find_job = find_job
        self._lock = threading.Lock()

    def apply(self, fault: Fault) -> Firing:
        """Apply a fault now; see `Lab.apply`. Any thread may call this."""
        shape = self._shape
        check_fits(fault, nodes=shape.nodes, rails=shape.rails, ranks_per_node=shape.ranks_per_node)
        with self._lock:
            time_s = monotonic()
            if fault.action is Action.RESTORE:
                self._nics.restore(fault.node, fault.rail)
            elif fault.is_on_nic:
                self._apply_to_nic(fault)
            else:
                self._apply_to_rank(fault)
            return Firing(index=-1, fault=fault, time_s=time_s, applied_s=monotonic())

    def _apply_to_nic(self, fault: Fault) -> None:
        hold = self._nics.apply(fault)
        if fault.duration_s is not None:
            self._driver.call_later(fault.duration_s, lambda: self._undo(hold))
        if fault.action is Action.FLAP:
            intervals = random.Random(fault.seed or 0)
            self._schedule_flap(hold, intervals, is_up=True)

    def _undo(self, hold: FaultHold) -> None:
        with self._lock:
            self._nics.undo(hold)

    def _schedule_flap(self, hold: FaultHold, intervals: random.Random, *, is_up: bool) -> None:
        def change() -> None:
            with self._lock:
                if self._nics.is_held(hold):
                    self._nics.set_flapping(hold, is_up=is_up)
                    self._schedule_flap(hold, intervals, is_up=not is_up)

        mean_s = hold.fault.mean_s or FLAP_MEAN_S
        self._driver.call_later(intervals.expovariate(1 / mean_s), change)

    def _apply_to_rank(self, fault: Fault) -> None:
        job = self._find_job()
        if job is None or fault.rank is None:
            raise InvalidArgument(f"fault {fault}: no job runs in this lab; start one first")
        if fault.action is Action.KILL:
            job.signal(fault.rank, signal.SIGKILL)
            return
        rank = fault.rank
        job.signal(rank, signal.SIGSTOP)
        self._driver.call_later(fault.duration_s or 0.0, lambda: job.signal(rank, signal.SIGCONT))


__all__ = ["FLAP_MEAN_S", "Injector"]

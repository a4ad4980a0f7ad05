"""Calls of a simulated job: their schedules, plans, data and expected results.

Schedules and plans are cached across runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from r2ccl import kernels
from r2ccl.config import Config
from r2ccl.dtypes import dtype_of
from r2ccl.failover.health.table import Health
from r2ccl.planning.cost_model import Fabric
from r2ccl.planning.lowering import Layout, lower
from r2ccl.planning.placement import place, place_edges
from r2ccl.planning.plan_cache import PlanCache
from r2ccl.planning.planner import Planner
from r2ccl.schedule.chunks import Parts
from r2ccl.schedule.ir import Schedule
from r2ccl.testing.simulation import data
from r2ccl.testing.simulation.data import Array
from r2ccl.testing.simulation.plan import CallSpec, Workload
from r2ccl.testing.simulation.schedules import RINGS, SCHEDULES
from r2ccl.types import CallSignature, Collective


class SimTask(NamedTuple):
    """Plan of one rank for one call: its schedule, its signature, and this rank's slices."""

    schedule: Schedule
    signature: CallSignature
    layout: Layout


class SimWork:
    """Calls, data and expected results of one `Workload`.

    Parameters
    ----------
    workload : Workload
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.calls = workload.calls
        self.config = _config(workload)

    def task(self, call: int, rank: int, homes: Sequence[int], health: Health) -> SimTask:
        """Return the plan of `rank` for a call.

        Its channels are placed on the rails for `health`, with shares limited by `Workload.slow`.

        Parameters
        ----------
        call : int
            Position in the workload's calls.
        rank : int
        homes : sequence of int
            Numbers of the home rails.
        health : Health
            The health on which the ranks agreed for this call.
        """
        spec = self.calls[call]
        make = _planned if spec.is_planned else _chosen
        return make(spec, rank, tuple(homes), self._seen(health), self.config)

    def arithmetic(self, task: SimTask) -> tuple[kernels.Reducer, kernels.Divider | None]:
        """Return the function that combines two slices, and for AVG the one that divides the sum.

        The second function is None for every other operation.
        """
        return kernels.arithmetic(task.signature, self.workload.nranks)

    def memory(self, call: int, rank: int, schedule: Schedule) -> tuple[Array, Array]:
        """Return the filled input array of `rank` for a call, and a new output array.

        Both are the same array if the call is in place and its `schedule` allows it.
        """
        spec = self.calls[call]
        source = data.draw(spec.dtype, spec.count, call, rank).copy()
        is_in_place = spec.is_in_place and schedule.can_be_in_place
        return source, source if is_in_place else np.empty_like(source)

    def result(self, call: int, rank: int, task: SimTask, output: Array) -> tuple[bytes, bytes]:
        """Return the bytes in the defined part of the output of `rank`, and the expected bytes."""
        spec = self.calls[call]
        found = output[data.part(task.schedule, rank, spec.count, spec.sizes)].tobytes()
        wanted = data.expected(task.schedule, spec.dtype, spec.count, call, spec.op, spec.sizes)
        return found, wanted[rank]

    def busy_s(self, rank: int) -> float:
        """Return the time in seconds for which `rank` computes before each call."""
        busy = self.workload.busy_ms
        return busy[rank % len(busy)] / 1e3 if busy else 0.0

    def _seen(self, health: Health) -> Health:
        """Return `health` with the share of each NIC limited to its share in `Workload.slow`."""
        slow = self.workload.slow
        worst = [each._replace(share=min(each.share, health.share(*each[:2]))) for each in slow]
        return health.changed(worst) if worst else health


@functools.lru_cache(maxsize=4096)
def _chosen(
    spec: CallSpec, rank: int, homes: tuple[int, ...], health: Health, config: Config
) -> SimTask:
    """Plan a call with the schedule that `spec` names; `health` affects only the placement."""
    schedule = _schedule(spec.algorithm, health.nranks, spec.channels)
    if spec.algorithm in RINGS:
        placement = place(schedule.nchannels, homes, health)
    else:
        placement = place_edges(schedule, homes, health)
    signature = _signature(spec, schedule)
    places = data.parts_of(schedule, spec.count, spec.sizes)
    layout = lower(
        schedule.program(rank),
        spec.count,
        dtype_of(signature.dtype).itemsize,
        slice_nbytes=config.slice_nbytes,
        eager_nbytes=config.eager_nbytes,
        weights=placement.weights,
        channels=placement.channels,
        numbers=placement.numbers(rank, health.nranks),
        parts=Parts(places, places),
        whole_nbytes=config.eager_nbytes if schedule.name == "direct" else 0,
        announces_parts=bool(spec.sizes),
    )
    return SimTask(schedule, signature, layout)


@functools.lru_cache(maxsize=4096)
def _planned(
    spec: CallSpec, rank: int, homes: tuple[int, ...], health: Health, config: Config
) -> SimTask:
    """Plan an allreduce with the schedule that the planner makes for `health`."""
    config = msgspec.structs.replace(config, algo=spec.algorithm)
    fabric = Fabric(homes, health.nrails)
    code = data.CODES[spec.dtype]
    call = CallSignature(Collective.ALLREDUCE, code, spec.op, spec.count)
    nbytes = spec.count * dtype_of(code).itemsize
    schedule = Planner(fabric, config).plan(call, nbytes, health).schedule
    return SimTask(
        schedule, call, PlanCache(rank, health.nranks, fabric, config)(call, health).layout
    )


@functools.lru_cache(maxsize=256)
def _schedule(algorithm: str, nranks: int, nchannels: int) -> Schedule:
    return SCHEDULES[algorithm](nranks, nchannels)


def _signature(spec: CallSpec, schedule: Schedule) -> CallSignature:
    collective = Collective[schedule.collective.upper()]
    return CallSignature(collective, data.CODES[spec.dtype], spec.op, spec.count, schedule.root)


@functools.lru_cache(maxsize=256)
def _config(workload: Workload) -> Config:
    return Config(
        slice_nbytes=workload.slice_nbytes,
        eager_nbytes=workload.eager_nbytes,
        eager_slots=workload.eager_slots,
        landing_depth=workload.landing_depth,
        fabric="none" if workload.fabric == "none" else "auto",
        no_rail_timeout_s=workload.no_rail_timeout_ms / 1e3,
        max_connections=workload.max_connections,
        peer_timeout_s=5.0,
        connect_timeout_s=1.0,
        init_timeout_s=30.0,
        timeout_s=60.0,
    )


__all__ = ["SimTask", "SimWork"]

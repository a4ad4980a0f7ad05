"""Collectives on device memory that NICs reach: exact under every fault, and ordered on the GPU.

The GPUs are fakes that run kernels late, in any order that streams and events allow, and fail on
unordered accesses, including those of NICs. With ``R2CC_SIM_EXAMPLES`` of 20,000 or more, every
path is cut at every event.
"""

import contextlib
import itertools
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec
import pytest
from support.slow import slow_but, sweep

from r2ccl.gpu.device_reduction import ReductionStream
from r2ccl.gpu.operands import DeviceOperands
from r2ccl.planning.lowering import Step
from r2ccl.runtime.executor import LaneRun
from r2ccl.schedule.ir import OpKind
from r2ccl.testing.fakedevice import FakeDevice
from r2ccl.testing.simulation import (
    SCHEDULES,
    CallSpec,
    CutPath,
    FailurePlan,
    Kill,
    NicDown,
    SimOutcome,
    Violation,
    Workload,
    simulate,
)
from r2ccl.testing.simulation.gpus import GpuNetwork, GpuPool, GpuRank
from r2ccl.types import ReduceOp

PATHS = [(a, b, rail) for a, b in ((0, 1), (0, 2), (1, 2)) for rail in range(2)]
IS_THOROUGH = int(os.environ.get("R2CC_SIM_EXAMPLES", "0")) >= 20_000
RING = Workload(3, 2, (CallSpec(18, channels=2, op=ReduceOp.AVG),), slice_nbytes=8, eager_nbytes=0)
TREES = Workload(
    3,
    2,
    (CallSpec(8, "packed_trees", 2, is_in_place=False, dtype="int64"),),
    slice_nbytes=16,
    eager_nbytes=0,
)


def run(workload: Workload, plan: FailurePlan | None = None, seed: int = 0) -> SimOutcome:
    return simulate(workload, plan, seed, network_type=GpuNetwork, rank_type=GpuRank)


REDUCTIONS = [("int64", ReduceOp.SUM), ("float32", ReduceOp.SUM), ("float32", ReduceOp.AVG),
              ("float32", ReduceOp.MIN), ("int64", ReduceOp.AVG)]  # fmt: skip
QUICK = [("ring", *REDUCTIONS[i]) for i in (0, 2)]
QUICK += [("packed_trees", *REDUCTIONS[i]) for i in (1, 3, 4)]


@pytest.mark.parametrize(
    ("algorithm", "dtype", "op"),
    slow_but(QUICK, ((name, *each) for name in SCHEDULES for each in REDUCTIONS)),
)
def test_every_schedule_has_the_bits_of_its_definition(
    algorithm: str, dtype: str, op: ReduceOp
) -> None:
    collective = SCHEDULES[algorithm](4, 3).collective
    is_reduced = collective not in ("allgather", "broadcast")
    # A scan has no mean: each rank reduces another number of ranks.
    is_other = not is_reduced or (op is ReduceOp.AVG and "scan" in collective)
    calls = tuple(
        CallSpec(count, algorithm, 3, is_in_place, dtype, ReduceOp.SUM if is_other else op)
        for count, is_in_place in ((60, True), (60, False), (4, False), (0, True))
    )
    workload = Workload(4, 2, calls, slice_nbytes=16, eager_nbytes=8)
    outcome = run(workload, seed=len(algorithm))
    assert outcome.is_clean, outcome.errors


@pytest.mark.slow
@pytest.mark.timeout(3600 if IS_THOROUGH else 120)
@pytest.mark.parametrize("workload", [RING, TREES], ids=["ring", "trees"])
def test_a_path_is_cut_at_every_event(workload: Workload) -> None:
    for at in range(run(workload).nevents):
        for a, b, rail in PATHS if IS_THOROUGH else [PATHS[at % len(PATHS)]]:
            told = ((a, b), (a,), (), (b,))[at // len(PATHS) % 4]
            cut = CutPath(
                at, a, b, rail, told, keep=at % 4, late_us=(0, 50, 500)[at % 3],
                is_stall=at % 5 == 0, restore_us=400 * (at // len(PATHS) % 2),
            )  # fmt: skip
            outcome = run(workload, FailurePlan((cut,)), at)
            assert outcome.is_clean, (cut, outcome.errors)


@sweep(105, 1 if IS_THOROUGH else 7)
def test_a_nic_goes_down_at_any_event(step: int) -> None:
    for at in range(0, run(RING).nevents, step):
        down = NicDown(at, at % 3, at // 3 % 2, is_seen=at % 2 == 0, restore_us=300 * (at % 2))
        assert run(RING, FailurePlan((down,)), at).is_clean, down


@sweep(230, 23)
def test_calls_that_end_early_leave_their_memory_alone(step: int) -> None:
    """Kill a rank: the others do not wait for it, and no NIC or kernel touches released memory."""
    for at in range(150, 500, step):
        outcome = run(RING, FailurePlan((Kill(at, 1),)), at)
        assert all(outcome.errors[rank] is not None or outcome.ncalls[rank] for rank in (0, 2))


def _sent_early() -> contextlib.AbstractContextManager[Any]:
    """Send after kernels have been launched, before they complete."""

    def is_ready(self: LaneRun, step: Step, k: int) -> bool:
        is_early = step.kind is OpKind.SEND
        for index, is_by_slice, is_proved in step.after:
            needed = k + 1 if is_by_slice else self._steps[index].nslices
            done = (self._retired if is_proved else self._done)[index]
            if max(done, self._begun[index] if is_early else 0) < needed:
                return False
        return True

    return mock.patch.object(LaneRun, "_is_ready", is_ready)


def _believed_done() -> contextlib.AbstractContextManager[Any]:
    """Count kernels as done as soon as they are launched."""
    return mock.patch.object(ReductionStream, "computed", property(lambda self: self._begun))


def _place_given_at_once() -> contextlib.AbstractContextManager[Any]:
    """Reuse a landing place for another slice while the kernel still reads it."""
    original = DeviceOperands.apply
    pools: list[GpuPool] = []
    init: Callable[..., None] = GpuPool.__init__

    def make(self: GpuPool, device: Any, depth: int) -> None:
        init(self, device, depth)
        pools.append(self)

    def apply(self: DeviceOperands, step: Step, lo: int, hi: int, received: Any) -> int:
        number = original(self, step, lo, hi, received)
        device = self._reductions._device
        for pool in pools:
            if pool._device is device and isinstance(received, memoryview) and received.nbytes:
                pool._poison(received)
        return number

    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.object(GpuPool, "__init__", make))
    patches.enter_context(mock.patch.object(DeviceOperands, "apply", apply))
    return patches


def _divided_twice() -> contextlib.AbstractContextManager[Any]:
    """Divide every contribution, not only the last."""
    original = DeviceOperands.apply

    def apply(self: DeviceOperands, step: Step, lo: int, hi: int, received: Any) -> int:
        return original(self, msgspec.structs.replace(step, is_final=True), lo, hi, received)

    return mock.patch.object(DeviceOperands, "apply", apply)


def _not_flushed() -> contextlib.AbstractContextManager[Any]:
    """Skip the flush, so that kernels may miss data that NICs wrote."""
    return mock.patch.object(FakeDevice, "flush_remote_writes", return_value=None)


MISTAKES = {
    "sent before it is reduced": _sent_early,
    "believed done": _believed_done,
    "place given at once": _place_given_at_once,
    "divided twice": _divided_twice,
    "not flushed": _not_flushed,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    with MISTAKES[mistake](), pytest.raises(Violation):
        _sweep()


def _sweep() -> None:
    for seed, workload in itertools.product(range(20), (RING, TREES)):
        run(workload, seed=seed)


def _counted(counts: dict[str, int], owner: type, name: str) -> Any:
    """Count the calls of a method."""
    original: Callable[..., Any] = getattr(owner, name)

    def call(self: Any, *given: Any) -> Any:
        counts[name] = counts.get(name, 0) + 1
        return original(self, *given)

    return mock.patch.object(owner, name, call)


def test_one_event_tells_of_several_kernels() -> None:
    counts: dict[str, int] = {}
    with _counted(counts, ReductionStream, "run"), _counted(counts, FakeDevice, "record"):
        assert run(RING).is_clean
    # Each of 3 ranks receives, on 2 channels, 2 chunks of 2 slices that it must reduce.
    assert counts["run"] == 3 * 2 * 2 * 2
    assert 0 < counts["record"] < counts["run"]

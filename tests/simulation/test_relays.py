"""Slices that go through a relay: exact under every fault, and no foreign memory touched.

Copies end late, in any order that streams and events allow; the fakes detect unordered accesses of
NICs, copies and kernels. With ``R2CC_SIM_EXAMPLES`` of 20,000 or more, every path is cut at every
event.
"""

import contextlib
import itertools
import os
from typing import Any
from unittest import mock

import pytest
from support.slow import slow_but, sweep

from r2ccl.errors import TransportError
from r2ccl.gpu.pxn.relay import Relay, Slot
from r2ccl.gpu.pxn.transport import PxnTransport
from r2ccl.testing.simulation import (
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
from r2ccl.testing.simulation.gpus import GpuNetwork
from r2ccl.testing.simulation.relays import RelayRank
from r2ccl.testing.simulation.run import MAX_EVENTS, World
from r2ccl.transport.base import Sent
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
#: Two calls, whose last slices are shorter than the others.
CALLS = Workload(2, 2, (CallSpec(24, channels=4), CallSpec(9)), slice_nbytes=12, landing_depth=4)


class OneRail(RelayRank):
    """Rank that relays only the first rail, with a single slot."""

    nslots = 1

    def __init__(self, rank: int, network: GpuNetwork, *others: Any) -> None:
        super().__init__(rank, network, *others)
        for rail in range(network.nrails):
            self.pxn.use(rail, None if rail else self.relay)


class Wide(RelayRank):
    """Rank that relays all rails, and has slots for every slice."""

    nslots = 16

    def __init__(self, rank: int, network: GpuNetwork, *others: Any) -> None:
        super().__init__(rank, network, *others)
        for rail in range(network.nrails):
            self.pxn.use(rail, self.relay)


class Late(OneRail):
    """Rank that notices late that copies are over: slices may have moved to another path."""

    nslots = 4
    nth_look = 100


RANKS = (RelayRank, OneRail, Wide, Late)


def run(
    workload: Workload,
    plan: FailurePlan | None = None,
    seed: int = 0,
    rank_type: type[RelayRank] = RelayRank,
) -> SimOutcome:
    return simulate(workload, plan, seed, network_type=GpuNetwork, rank_type=rank_type)


def plan_of_cut(at: int, a: int, b: int, rail: int) -> FailurePlan:
    told = ((a, b), (a,), (), (b,))[at // len(PATHS) % 4]
    cut = CutPath(
        at, a, b, rail, told, keep=at % 4, late_us=(0, 50, 500)[at % 3],
        is_stall=at % 5 == 0, restore_us=400 * (at // len(PATHS) % 2),
    )  # fmt: skip
    return FailurePlan((cut,))


@pytest.mark.parametrize("rank_type", RANKS)
@pytest.mark.parametrize("workload", [RING, TREES, CALLS], ids=["ring", "trees", "calls"])
@pytest.mark.parametrize("nseeds", slow_but([1], [1, 5]))
def test_slices_are_relayed_and_exact(
    nseeds: int, workload: Workload, rank_type: type[RelayRank]
) -> None:
    with (
        mock.patch.object(Relay, "copy_in", autospec=True, side_effect=Relay.copy_in) as filled,
        mock.patch.object(Relay, "copy_out", autospec=True, side_effect=Relay.copy_out) as emptied,
    ):
        for seed in range(nseeds):
            assert run(workload, seed=seed, rank_type=rank_type).is_clean
    assert filled.call_count
    assert emptied.call_count


@pytest.mark.slow
@pytest.mark.timeout(3600 if IS_THOROUGH else 300)
@pytest.mark.parametrize("workload", [RING, TREES], ids=["ring", "trees"])
def test_a_path_is_cut_at_every_event(workload: Workload) -> None:
    for at in range(run(workload).nevents):
        rank_type = RANKS[at % len(RANKS)]
        for a, b, rail in PATHS if IS_THOROUGH else [PATHS[at % len(PATHS)]]:
            plan = plan_of_cut(at, a, b, rail)
            outcome = run(workload, plan, at, rank_type)
            assert outcome.is_clean, (plan, rank_type, outcome.errors)


@sweep(105, 1 if IS_THOROUGH else 7)
def test_a_nic_goes_down_at_any_event(step: int) -> None:
    for at in range(0, run(RING).nevents, step):
        down = NicDown(at, at % 3, at // 3 % 2, is_seen=at % 2 == 0, restore_us=300 * (at % 2))
        assert run(RING, FailurePlan((down,)), at, RANKS[at % len(RANKS)]).is_clean, down


@sweep(230, 23)
@pytest.mark.parametrize("rank_type", RANKS)
def test_calls_that_end_early_leave_their_memory_alone(
    rank_type: type[RelayRank], step: int
) -> None:
    """Kill a rank: no copy reads or writes released memory, or makes other ranks wait."""
    for at in range(150, 500, step):
        outcome = run(RING, FailurePlan((Kill(at, 1),)), at, rank_type)
        assert all(outcome.errors[rank] is not None or outcome.ncalls[rank] for rank in (0, 2))


@sweep(101, 11)
def test_slots_come_back_whatever_happens(step: int) -> None:
    """Check the slots of every live rank once nothing moves any more."""
    for at in range(150, 450, step):
        world = World(RING, plan_of_cut(at, *PATHS[at % 6]), at, GpuNetwork, RANKS[at % 4])
        assert world.run(MAX_EVENTS).is_clean
        end = world.timeline.now + 1.0
        while world.timeline.now < end and world.timeline.step():
            pass
        for rank in world.ranks:
            assert isinstance(rank, RelayRank)
            assert rank.relay.nfree == rank.nslots
            assert not rank.pxn.is_busy


@pytest.mark.parametrize("method", ["copy", "record", "is_done"])
@pytest.mark.parametrize("nseeds", slow_but([4], [4, 20]))
def test_a_relay_that_fails_costs_a_path_and_no_call(method: str, nseeds: int) -> None:
    """Lose the context of the relay, not of the rank's own GPU."""
    for seed in range(nseeds):
        outcome = run(CALLS, seed=seed, rank_type=_failing(method, 1 + seed % 2))
        assert outcome.is_clean, (seed, outcome.errors)
        assert outcome.repairs, seed


def _failing(method: str, nth: int) -> type[RelayRank]:
    """Return ranks of which rank 0's relay fails from the `nth` call of `method` on."""

    class Failing(OneRail):
        def __init__(self, rank: int, network: GpuNetwork, *others: Any) -> None:
            super().__init__(rank, network, *others)
            if rank == 0:
                for lane in (self.relay._inwards, self.relay._outwards):
                    lane._device = _Failing(lane, method, nth)  # type: ignore[assignment]

    return Failing


class _Failing:
    """Device that loses its context in the n-th call of a method; pending work then is done."""

    def __init__(self, lane: Any, method: str, nth: int) -> None:
        self._device = lane._device
        self._stream = lane._stream
        self._method = method
        self._left = nth

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._left -= 1
        return self._refuse if self._left <= 0 else getattr(self._device, name)

    def _refuse(self, *given: Any) -> Any:
        event = self._device.make_event()
        self._device.record(event, self._stream)
        assert self._device.synchronize(event, 1.0)
        self._device.destroy_event(event)
        raise TransportError("refused", status="CUDA_ERROR_LAUNCH_FAILED")


def _sent_early() -> contextlib.AbstractContextManager[Any]:
    """Count copies as done as soon as they begin."""

    def collect(self: Relay) -> list[Slot]:
        over = self._inwards.abandon() + self._outwards.abandon()
        for slot in over:
            slot.is_copying = False
            self._release(slot)
        return over

    return mock.patch.object(Relay, "collect", collect)


def _fenced_while_copied() -> contextlib.AbstractContextManager[Any]:
    """Report `Fenced` before the copies of dropped slices end."""
    original = PxnTransport._release

    def hand_on(self: PxnTransport, state: Any, events: Any) -> None:
        ncopies, state.ncopies = state.ncopies, 0
        original(self, state, events)
        state.ncopies = ncopies
        if ncopies and state.path not in self._states:
            self._states[state.path] = state  # it still polls for the ends of its copies
            state.has_failed = False

    return mock.patch.object(PxnTransport, "_release", hand_on)


def _arrived_early() -> contextlib.AbstractContextManager[Any]:
    """Report a slice that landed in a slot before it is at its destination."""
    original = PxnTransport._release

    def hand_on(self: PxnTransport, state: Any, events: Any) -> None:
        for item in state.held:
            if hasattr(item, "slot"):
                item.slot.is_copying = False
        original(self, state, events)

    return mock.patch.object(PxnTransport, "_release", hand_on)


def _slot_given_at_once() -> contextlib.AbstractContextManager[Any]:
    """Reuse a slot for another slice while the NIC still reads it."""
    original = PxnTransport._send_waiting

    def send(self: PxnTransport, state: Any) -> bool:
        has_sent = original(self, state)
        for name in tuple(state.sending):
            self._hold(state, Sent(state.path, *name))
        return has_sent

    return mock.patch.object(PxnTransport, "_send_waiting", send)


#: Event of the cut at which the search for a mistake begins: where it was found last.
FIRST = {"fenced while copied": 210}
MISTAKES = {
    "sent early": _sent_early,
    "fenced while copied": _fenced_while_copied,
    "arrived early": _arrived_early,
    "slot given at once": _slot_given_at_once,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    with MISTAKES[mistake](), pytest.raises(Violation):
        _sweep(FIRST.get(mistake, 150))


def _sweep(first: int) -> None:
    moments = (*range(first, 600, 3), *range(150, first, 3))
    for at, workload in itertools.product(moments, (TREES, RING)):
        run(workload, plan_of_cut(at, *PATHS[at % 6]), at, Late)

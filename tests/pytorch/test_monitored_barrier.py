"""`monitored_barrier` of a group ends within its timeout and leaves no receive behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch.distributed", reason="torch is not installed: make test-torch")

import torch.distributed as dist

from r2ccl import TransportTimeout
from r2ccl.interop.torch import methods

LIMIT_S = 10.0
NEVER = float("inf")


class TimedRequest:
    """Message that is done at a time of a clock, which only waits advance."""

    def __init__(self, clock: TimedCommunicator, done_s: float) -> None:
        self._clock = clock
        self._done_s = done_s
        self.is_cancelled = False

    def is_done(self) -> bool:
        return self._clock.now_s >= self._done_s

    def wait(self, timeout_s: float) -> None:
        self._clock.now_s = max(self._clock.now_s, min(self._done_s, self._clock.now_s + timeout_s))
        if not self.is_done():
            raise TransportTimeout("late", status="TIMEOUT")

    def cancel(self) -> bool:
        self.is_cancelled = True
        return True


class TimedCommunicator:
    """Rank of a communicator whose peers call at given times."""

    def __init__(self, rank: int, done_s: dict[int, float]) -> None:
        self.now_s = 100.0
        self.rank, self.nranks = rank, 1 + max(rank, *done_s)
        self._done_s = done_s
        self.received: dict[int, TimedRequest] = {}
        self.sent: list[int] = []

    def recv(self, out: Any, source: int, tag: int, *, async_op: bool) -> TimedRequest:
        assert async_op
        self.received[source] = TimedRequest(self, self.now_s + self._done_s[source])
        return self.received[source]

    def send(self, x: Any, to: int, tag: int, *, async_op: bool) -> TimedRequest:
        assert async_op
        self.sent.append(to)
        return TimedRequest(self, self.now_s)


Entered = Callable[..., tuple[TimedCommunicator, str]]


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Entered:
    """Run a barrier of one rank; return its communicator and the error."""

    def run(
        rank: int, done_s: dict[int, float], *, wait_all_ranks: bool = False
    ) -> tuple[TimedCommunicator, str]:
        comm = TimedCommunicator(rank, done_s)
        monkeypatch.setattr(methods, "monotonic", lambda: comm.now_s)
        state: Any = SimpleNamespace(communicator=comm, timeout_s=99.0, nbarriers=itertools.count())
        barrier = methods.GroupMethods(state).monitored_barrier
        try:
            barrier(timedelta(seconds=LIMIT_S), wait_all_ranks)
        except dist.DistBackendError as exc:
            return comm, str(exc)
        return comm, ""

    return run


@pytest.mark.parametrize(
    ("wait_all_ranks", "named"), [(False, "rank 2"), (True, "ranks 2, 3")]
)  # fmt: skip
def test_all_ranks_share_one_deadline(enter: Entered, wait_all_ranks: bool, named: str) -> None:
    late = {1: 0.9 * LIMIT_S, 2: 1.8 * LIMIT_S, 3: 2.7 * LIMIT_S}
    comm, error = enter(0, late, wait_all_ranks=wait_all_ranks)
    assert error.startswith(f"rank 0: {named} did not pass monitored_barrier in time")
    assert comm.now_s == 100.0 + LIMIT_S
    assert [rank for rank, each in comm.received.items() if each.is_cancelled] == [2, 3]
    assert comm.sent == []


@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_a_rank_after_a_missing_one_may_be_there(enter: Entered, wait_all_ranks: bool) -> None:
    comm, error = enter(0, {1: NEVER, 2: 1.0}, wait_all_ranks=wait_all_ranks)
    assert error.startswith("rank 0: rank 1 did not pass")
    assert not comm.received[2].is_cancelled


def test_rank_0_answers_when_all_have_called(enter: Entered) -> None:
    comm, error = enter(0, {1: 9.0, 2: 1.0, 3: 9.5})
    assert (error, comm.sent, comm.now_s) == ("", [1, 2, 3], 109.5)


def test_another_rank_names_rank_0(enter: Entered) -> None:
    comm, error = enter(2, {0: NEVER})
    assert error.startswith("rank 2: rank 0 did not pass")
    assert (comm.sent, comm.received[0].is_cancelled) == ([0], True)
    assert enter(2, {0: 9.0})[1] == ""

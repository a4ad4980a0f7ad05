"""Parts of the compiled loops whose faults a simulated time would hide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from r2ccl.flowsim.build import with_room
from r2ccl.flowsim.loops import fair_queue, heaps, jit, max_min
from r2ccl.flowsim.loops.changes import reroute
from r2ccl.flowsim.loops.jit import STAMP, compiled
from r2ccl.flowsim.loops.state import HEAP, LANDING_DTYPE, NCOUNTS, FlowState


def state_with(**fields):
    """A state of nothing but some fields."""
    return FlowState(*[None] * len(FlowState._fields))._replace(**fields)


def test_landings_keep_their_order_when_they_get_more_room() -> None:
    landings = np.zeros((2, 4), LANDING_DTYPE)
    landings["link"] = [[2, 3, 0, 1], [0, 1, 2, 3]]
    grown = with_room(state_with(landings=landings, landing_first=np.array([2, 0])))
    assert grown.landings["link"][:, :4].tolist() == [[0, 1, 2, 3]] * 2
    assert grown.landings.shape == (2, 8)
    assert grown.landing_first.tolist() == [0, 0]


def test_a_heap_gives_the_earliest_whatever_was_set_and_cleared() -> None:
    """The functions are compiled into loops; called from Python they are as they are written."""
    rng = np.random.default_rng(7)
    state = state_with(
        heap_key=np.empty(40),
        heap=np.empty(40, np.int32),
        heap_at=np.full(40, -1, np.int32),
        counts=np.zeros(NCOUNTS, np.int64),
    )
    times: dict[int, float] = {}
    for _ in range(2000):
        number = int(rng.integers(40))
        if rng.random() < 0.4:
            heaps.clear_time(state, number)
            times.pop(number, None)
        else:
            times[number] = float(rng.integers(100))
            heaps.set_time(state, number, times[number])
        assert state.counts[HEAP] == len(times)
        for at in range(len(times)):
            assert state.heap_key[at] == times[int(state.heap[at])]
            assert state.heap_at[state.heap[at]] == at
            assert state.heap_key[at] >= state.heap_key[max(0, (at - 1) // 2)]


def test_a_plain_heap_sorts() -> None:
    rng = np.random.default_rng(8)
    keys, numbers = np.empty(100), np.empty(100, np.int32)
    given = rng.integers(30, size=100).tolist()
    for count, key in enumerate(given):
        heaps.push(keys, numbers, count, key, key)
    sorted_keys = []
    for count in range(100, 0, -1):
        assert numbers[0] == keys[0]
        sorted_keys.append(keys[0])
        heaps.drop_first(keys, numbers, count)
    assert sorted_keys == sorted(given)


@pytest.mark.parametrize("loop", [max_min.run, fair_queue.run, reroute])
def test_a_loop_in_the_cache_is_told_from_one_of_other_sources(loop) -> None:
    assert STAMP in [cell.cell_contents for cell in loop.__wrapped__.__closure__]


def test_a_loop_is_compiled_under_a_lock_of_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    held: list[str] = []

    @contextmanager
    def lock(name: str) -> Iterator[None]:
        held.append(name)
        yield
        held.append("released")

    def entry(stamp: int) -> Callable[[int], int]:
        def loop(count: int) -> int:
            return count + (stamp - stamp)

        return loop

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "compile_lock", lock)
    loop = compiled(entry(STAMP))
    assert held == []
    assert [loop(1), loop(2)] == [1, 2]
    assert held == ["flowsim", "released"]

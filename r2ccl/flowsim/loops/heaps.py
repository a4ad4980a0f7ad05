"""Binary min-heaps in flat arrays: an array of keys and an array of item numbers.

The arrays have room for all items. The caller of `push` and `drop_first` counts the entries;
`set_time` and `clear_time` count the entries of `FlowState.heap` themselves, in ``counts[HEAP]``.

The order in which equal keys leave a heap depends only on the earlier calls, so simulations are
deterministic.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from r2ccl.flowsim.loops.jit import inlined
from r2ccl.flowsim.loops.state import HEAP, FlowState

Keys = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int32]


@inlined
def push(keys: Keys, numbers: Numbers, count: int, key: float, number: int) -> None:
    """Add the entry (`key`, `number`) to a heap of `count` entries."""
    at = count
    while at > 0 and keys[(at - 1) >> 1] > key:
        parent = (at - 1) >> 1
        keys[at], numbers[at] = keys[parent], numbers[parent]
        at = parent
    keys[at], numbers[at] = key, number


@inlined
def replace_first(keys: Keys, numbers: Numbers, count: int, key: float, number: int) -> None:
    """Replace the entry with the smallest key by (`key`, `number`) in a heap of `count` entries."""
    at = 0
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and keys[child + 1] < keys[child]:
            child += 1
        if keys[child] >= key:
            break
        keys[at], numbers[at] = keys[child], numbers[child]
        at = child
    keys[at], numbers[at] = key, number


@inlined
def drop_first(keys: Keys, numbers: Numbers, count: int) -> None:
    """Remove the entry with the smallest key from a heap of `count` entries."""
    replace_first(keys, numbers, count - 1, keys[count - 1], numbers[count - 1])


@inlined
def _place(s: FlowState, at: int, key: float, number: int) -> None:
    s.heap_key[at], s.heap[at] = key, number
    s.heap_at[number] = at


@inlined
def _sift(s: FlowState, start: int, key: float, number: int) -> None:
    """Put an entry at `start` of `FlowState.heap`, then move it to restore the heap order."""
    at = start
    while at > 0 and s.heap_key[(at - 1) >> 1] > key:
        parent = (at - 1) >> 1
        _place(s, at, s.heap_key[parent], s.heap[parent])
        at = parent
    count = s.counts[HEAP]
    while at >= start and 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and s.heap_key[child + 1] < s.heap_key[child]:
            child += 1
        if s.heap_key[child] >= key:
            break
        _place(s, at, s.heap_key[child], s.heap[child])
        at = child
    _place(s, at, key, number)


@inlined
def set_time(s: FlowState, number: int, time: float) -> None:
    """Set the time of the next event of item `number`, a link or a port, to `time`."""
    at = s.heap_at[number]
    if at < 0:
        at = s.counts[HEAP]
        s.counts[HEAP] += 1
    _sift(s, at, time, number)


@inlined
def clear_time(s: FlowState, number: int) -> None:
    """Remove the next event of item `number` from the heap, if the heap has one."""
    at = s.heap_at[number]
    if at < 0:
        return
    s.heap_at[number] = -1
    s.counts[HEAP] -= 1
    last = s.counts[HEAP]
    if at < last:
        _sift(s, at, s.heap_key[last], s.heap[last])


__all__ = ["clear_time", "drop_first", "push", "replace_first", "set_time"]

"""Waiting in compiled code until a word of a peer has reached a value, and waking the peers.

A wait has three phases: `pause` in a loop, ``sched_yield`` in a loop, sleep in the kernel. With a
core for each rank, a thread makes many pauses and never yields, because a yield to a background
process may take milliseconds. With more ranks than cores, it makes few pauses and then yields. The
number of pauses grows as long as waits end during the pauses, and shrinks as long as they do not.
It therefore also adapts to two ranks that the scheduler has put on one core, to another busy
process, and to a peer that computes for a long time.

A sleep ends when the peer advances, after the time in the state (`SLEEP_S`, `SLEEP_NS`), by
``wake_all``, or when the thread receives a signal. If the peer has not advanced, the compiled
collective returns `WAITING`, so that its caller, in Python, handles signals, deadlines and failures
and continues the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r2ccl.kernels.compiling import inlined
from r2ccl.shm.atomics import (
    add,
    current_cpu,
    fence,
    futex_wait,
    futex_wake,
    load_acquire,
    load_ordered,
    pause,
    read_affinity,
    sched_yield,
    store_release,
    words_at,
    write_affinity,
)
from r2ccl.shm.layout import (
    BASES,
    CPU,
    CPU_SET_NBYTES,
    DONE,
    HEADERS,
    HOME,
    LINE_NBYTES,
    MISSES,
    NHEADERS,
    NRANKS,
    PAGE_NBYTES,
    POSTED,
    RANK,
    SLEEP_S,
    SPIN,
    SPIN_MAX,
    SPIN_MIN,
    WAITERS,
    YIELDS,
)

#: After this number of successive waits for which the pauses did not suffice, a wait pauses for the
#: longest time. Two ranks that wake each other are always late, so short pauses alone would never
#: suffice again.
_PROBE_EVERY = 16


@inlined
def publish(word: Any, value: Any) -> None:
    """Store `value` at the address `word` and wake the threads that sleep until it changes."""
    store_release(word, value)
    fence()
    if load_acquire(word + WAITERS) > 0:
        futex_wake(word)


@inlined
def move_to_cpu(cpu: Any, sets: Any) -> None:
    """Move this thread to the CPU `cpu`, unless the thread is not allowed to run there.

    The thread may leave the CPU again: the set of its allowed CPUs is the same afterwards. `sets`
    is the address of memory for two sets of CPUs of `CPU_SET_NBYTES` bytes. Before the call, the
    second set must be empty or contain only `cpu`. The first set is overwritten.
    """
    allowed, only = sets, sets + CPU_SET_NBYTES
    if read_affinity(allowed, CPU_SET_NBYTES) <= 0:
        return
    if words_at(allowed)[cpu >> 6] >> (cpu & 63) & 1:
        words_at(only)[cpu >> 6] = 1 << (cpu & 63)
        write_affinity(only, CPU_SET_NBYTES)
        write_affinity(allowed, CPU_SET_NBYTES)


@inlined
def leave_cpu_of_peer(state: Any, address: Any, word: Any) -> None:
    """Move this thread to CPU `HOME` if it shares its CPU with the owner of `word`.

    `word` is an address in the first page of the owner's segment. Each call publishes the CPU of
    the calling thread; the owner's CPU is the CPU that the owner last published. If `HOME` is -1,
    do nothing.

    The scheduler often wakes a thread on the CPU of the thread that wakes it. Two ranks on one CPU
    run alternately, and the scheduler rarely separates them, because one of them sleeps while the
    other runs.
    """
    home = state[HOME]
    if home < 0:
        return
    cpu = current_cpu()
    store_release(state[BASES + state[RANK]] + CPU, cpu + 1)
    segment = word & -PAGE_NBYTES
    if cpu == home or load_acquire(segment + CPU) != cpu + 1:
        return
    move_to_cpu(home, address + 8 * (BASES + 3 * state[NRANKS]))


@inlined
def number_of_pauses(state: Any, address: Any, word: Any) -> Any:
    """Return the maximum number of pauses in a wait for the owner of `word`.

    `word` is an address in the first page of the owner's segment. After `_PROBE_EVERY` successive
    waits for which the pauses did not suffice, call `leave_cpu_of_peer` and return `SPIN_MAX`.
    """
    if state[MISSES] < _PROBE_EVERY:
        return state[SPIN]
    leave_cpu_of_peer(state, address, word)
    state[MISSES] = 0
    return state[SPIN_MAX]


@inlined
def note_pauses(state: Any, limit: Any, has_sufficed: Any) -> None:
    """Adapt the number of pauses after a wait in which `limit` pauses were allowed.

    `has_sufficed` is True if the wait ended during the pauses.
    """
    if has_sufficed:
        state[SPIN] = min(state[SPIN_MAX], max(limit, 2 * state[SPIN]))
        state[MISSES] = 0
    else:
        state[SPIN] = max(state[SPIN_MIN], state[SPIN] - (state[SPIN] >> 2))
        state[MISSES] += 1


@inlined
def wait(state: Any, address: Any, word: Any, value: Any) -> Any:
    """Wait until a word of a peer has reached `value`, and return True.

    Words are compared modulo 2**64: a word has reached `value` if the signed 64-bit difference of
    the word and `value` is 0 or more.

    Return False if the word has not changed when a sleep ends: after its full length, by a signal,
    by ``wake_all``, or by a wake for a change that this thread had already seen.

    Parameters
    ----------
    state : pointer to int64
    address : int64
        Address of the state.
    word : int64
        Address of the word: POSTED, DONE or a header of a segment.
    value : int64
    """
    if load_acquire(word) - value >= 0:
        return True
    limit = number_of_pauses(state, address, word)
    for _ in range(limit):
        pause()
        if load_acquire(word) - value >= 0:
            note_pauses(state, limit, True)
            return True
    note_pauses(state, limit, False)
    for _ in range(state[YIELDS]):
        sched_yield()
        if load_acquire(word) - value >= 0:
            return True
    while True:
        # A peer that stores the word after this thread has read it sees the count, as `add` here
        # and `fence` in `publish` are sequentially consistent, and wakes this thread.
        add(word + WAITERS, 1)
        seen = load_ordered(word)
        if seen - value < 0:
            futex_wait(word, seen, address + 8 * SLEEP_S)
        add(word + WAITERS, -1)
        found = load_acquire(word)
        if found - value >= 0:
            return True
        if found == seen:  # slept for long enough, or was woken for another reason
            return False


def make_wake_all() -> Callable[[int], int]:
    """Return the function ``wake_all``, which `r2ccl.kernels.native` compiles.

    ``wake_all(state)`` wakes all threads, of all ranks of the group, that sleep in a collective; a
    collective whose peer has not advanced then returns WAITING. `state` is the address of this
    rank's state (`r2ccl.shm.layout`). Earlier stores of this thread become visible to the peers
    before its later stores.
    """

    def wake_all(address: Any) -> int:
        fence()
        state = words_at(address)
        for peer in range(state[NRANKS]):
            futex_wake(state[BASES + peer] + POSTED)
            futex_wake(state[BASES + peer] + DONE)
            for number in range(NHEADERS):
                futex_wake(state[BASES + peer] + HEADERS + LINE_NBYTES * number)
        return 0

    return wake_all


__all__ = [
    "leave_cpu_of_peer",
    "make_wake_all",
    "move_to_cpu",
    "note_pauses",
    "number_of_pauses",
    "publish",
    "wait",
]

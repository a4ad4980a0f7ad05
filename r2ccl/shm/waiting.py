"""Waiting in compiled code until a word of a peer has reached a value, and waking the peers.

A wait has three phases: `pause` in a loop, ``sched_yield`` in a loop, sleep in the kernel. With a
core for each rank, a thread makes many pauses and never yields, because a yield to a background
process may take milliseconds. With more ranks than cores, it makes few pauses and then yields. The
number of pauses grows as long as waits end during the pauses, and shrinks as long as they do not.
It therefore also adapts to another busy process, and to a peer that computes for a long time.

The scheduler may wake a thread on the CPU of the thread that wakes it, although its own CPU is
idle; in a virtual machine, where an idle CPU counts as taken by the hypervisor, it usually does.
Two ranks on one CPU run alternately, which takes two to three times as long, and the scheduler
rarely separates them, because one of them sleeps while the other runs. With a core for each rank,
a thread that was woken in this way therefore moves to another CPU, and may only run on its own CPU
in its next sleeps.

With more ranks than cores, the scheduler may keep three ranks on one CPU and one rank, which often
waits, on the other. A rank that waits on a CPU with more ranks than necessary therefore moves to
the CPU that `r2ccl.shm.machine.assign_cpu` has assigned to it. Measured with 4 ranks on 2 CPUs, 256
bytes: scan 4.9 and 2.4 us, gather 3.4 and 2.0 us.

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
    clock_ns,
    cpu_sets,
    current_cpu,
    fence,
    futex_wait,
    futex_wake,
    load_acquire,
    load_ordered,
    pause,
    sched_yield,
    store_release,
    words_at,
)
from r2ccl.shm.cpus import leave_free, move_to_cpu, stay_on
from r2ccl.shm.layout import (
    BASES,
    CPU,
    DELAY_NS,
    DONE,
    HEADERS,
    HOME,
    KEPT,
    LINE_NBYTES,
    MISSES,
    MOVED_NS,
    NHEADERS,
    NRANKS,
    POSTED,
    RANK,
    SHARERS,
    SLEEP_S,
    SPIN,
    SPIN_MAX,
    SPIN_MIN,
    TIME,
    WAITERS,
    WAKER,
    YIELDS,
)

#: After this number of successive waits for which the pauses did not suffice, a wait pauses for the
#: longest time. Two ranks that wake each other are always late, so short pauses alone would never
#: suffice again.
_PROBE_EVERY = 16
#: Number of sleeps in which a thread keeps its CPU after it was woken on the CPU of its waker.
_NKEPT = 64
#: Delays between two moves to the assigned CPU, see `leave_full_cpu`.
_LEAST_DELAY_NS, _MOST_DELAY_NS, _RARE_SHIFT = 1 << 20, 1 << 30, 4


@inlined
def publish(word: Any, value: Any) -> None:
    """Store `value` at the address `word` and wake the threads that sleep until it changes."""
    store_release(word, value)
    fence()
    if load_acquire(word + WAITERS) > 0:
        wake(word)


@inlined
def wake(word: Any) -> None:
    """Wake the threads that sleep until the word at the address `word` changes.

    Tell them on which CPU this thread is.
    """
    store_release(word + WAKER, current_cpu() + 1)
    futex_wake(word)


@inlined
def sleep(state: Any, address: Any, word: Any, seen: Any) -> Any:
    """Sleep until this thread is woken; return whether it was.

    The sleep ends earlier if the word at address `word` differs from `seen`, after the time in the
    state (`SLEEP_S`), and by a signal. If the thread finds itself on the CPU of the thread that
    woke it, it leaves this CPU, and keeps its CPU in its next `_NKEPT` sleeps. `address` is the
    address of the state.
    """
    sets, before, nbytes = cpu_sets(), current_cpu(), 0
    if state[KEPT] > 0:
        state[KEPT] -= 1
        nbytes = stay_on(before, sets)
    is_woken = futex_wait(word, seen, address + 8 * SLEEP_S) == 0
    if nbytes > 0:
        leave_free(nbytes, sets)
    home, cpu = state[HOME], current_cpu()
    if state[SHARERS] == 1 and is_woken and load_acquire(word + WAKER) == cpu + 1:
        state[KEPT] = _NKEPT
        target = before if cpu != before else home
        if target >= 0 and target != cpu:
            move_to_cpu(target, sets)
    return is_woken


@inlined
def number_of_pauses(state: Any, address: Any) -> Any:
    """Return the maximum number of pauses in a wait.

    After `_PROBE_EVERY` successive waits for which the pauses did not suffice, call
    `leave_full_cpu`, and return `SPIN_MAX`.
    """
    if state[MISSES] < _PROBE_EVERY:
        return state[SPIN]
    leave_full_cpu(state, address)
    state[MISSES] = 0
    return state[SPIN_MAX]


@inlined
def leave_full_cpu(state: Any, address: Any) -> None:
    """Move this thread to its CPU `HOME` if more than `SHARERS` ranks are on the CPU where it is.

    The CPU of another rank is the one that it published when it last called this function.

    If the scheduler moves the thread back, because another program keeps that CPU busy, the thread
    moves less and less often: the delay between two moves doubles, from `_LEAST_DELAY_NS` to
    `_MOST_DELAY_NS`, until it has not moved for 2**`_RARE_SHIFT` times this delay.
    """
    if state[HOME] < 0:
        return
    cpu, nhere = current_cpu(), 1
    store_release(state[BASES + state[RANK]] + CPU, cpu + 1)
    for peer in range(state[NRANKS]):
        if peer != state[RANK] and load_acquire(state[BASES + peer] + CPU) == cpu + 1:
            nhere += 1
    if nhere <= state[SHARERS] or cpu == state[HOME]:
        return
    now = clock_ns(address + 8 * TIME)
    elapsed_ns = now - state[MOVED_NS]
    if elapsed_ns < state[DELAY_NS]:
        return
    is_rare = elapsed_ns >> _RARE_SHIFT > state[DELAY_NS]
    state[DELAY_NS] = _LEAST_DELAY_NS if is_rare else min(2 * state[DELAY_NS], _MOST_DELAY_NS)
    state[MOVED_NS] = now
    move_to_cpu(state[HOME], cpu_sets())


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
    limit = number_of_pauses(state, address)
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
            sleep(state, address, word, seen)
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
    "leave_full_cpu",
    "make_wake_all",
    "note_pauses",
    "number_of_pauses",
    "publish",
    "sleep",
    "wait",
    "wake",
]

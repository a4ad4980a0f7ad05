"""Main loop of a call in compiled code: `make_loop`. For the tables, see `layout`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r2ccl.kernels.compiling import inlined
from r2ccl.runtime.compiled.layout import (
    BUSY_NS,
    EAGER_ADDED,
    EAGER_TAKEN,
    ENTERED,
    ERRNO,
    FAILED,
    FAILED_CONN,
    FD,
    FILLED,
    FINISHED,
    FRAGMENT_NBYTES,
    HAS_OTHERS,
    HEADER_NBYTES,
    HOME,
    IDLE_SINCE,
    IS_DELAYING,
    IS_FULL,
    IS_LOOPBACK,
    IS_READABLE,
    IS_STALLED,
    IS_UNCONFIRMED,
    LEFT,
    LIMIT,
    MOST_LOGGED,
    NCONNS,
    NEXT_NBYTES,
    NFOREIGN,
    NIDLE,
    NLOGGED,
    NOW_DONE,
    NOW_NBYTES,
    NPAIRS,
    OPERANDS,
    PARSED,
    PASS_NS,
    PAUSED,
    POLLS,
    REMAINING,
    SLEEP_NS,
    SPIN_NS,
    TARGET_LEFT,
    TIME,
    UNSETTLED,
)
from r2ccl.runtime.compiled.receiving import EVENT, FOREIGN, MORE, parse, read_buffer, read_target
from r2ccl.runtime.compiled.sending import (
    ask,
    confirm_consumed,
    post_sends,
    write_conn,
)
from r2ccl.runtime.compiled.steps import run_locals, use_slices
from r2ccl.runtime.compiled.system import (
    EAGAIN,
    EINTR,
    errno,
    load32,
    poll_until,
    read_option,
    store64,
)
from r2ccl.runtime.compiled.tables import conn_of, now_ns, pair_of
from r2ccl.shm.atomics import cpu_sets, current_cpu, sched_yield, words_at
from r2ccl.shm.cpus import move_to_cpu

_POLLIN, _POLLOUT = 1, 4
#: The kernel refuses a ``struct timespec`` with as many nanoseconds or more.
_SECOND_NS = 1_000_000_000
#: SO_INCOMING_CPU: the CPU that handled the last packet; on loopback, that of its sender.
_INCOMING_CPU = 49
#: Idle time after which a call that delays other calls leaves compiled code, because its peers may
#: be waiting for these calls.
_DELAY_NS = 1_000_000
#: Number of idle passes between two checks of the CPUs of the peers.
_LOOK_EVERY = 16


@inlined
def advance(state: Any) -> None:
    """Post sends and receives, and copy and reduce slices, until nothing more is possible.

    End early if `LIMIT` is negative: the call then leaves compiled code.
    """
    has_moved = True
    while has_moved and state[LIMIT] >= 0:
        has_moved = False
        for number in range(state[NPAIRS]):
            pair = pair_of(state, number)
            has_moved |= use_slices(state, pair)
            has_moved |= post_sends(state, pair)
            ask(state, pair)
        has_moved |= run_locals(state)


@inlined
def flush(state: Any) -> Any:
    """Write as much as the sockets accept.

    Return 1 if a cleared slice was written completely, 0 if not, -1 if a connection failed.
    """
    has_sent = 0
    for number in range(state[NCONNS]):
        conn = conn_of(state, number)
        result = write_conn(state, number, conn)
        if result < 0:
            return -1
        has_sent |= result
    return has_sent


@inlined
def has_unsent(state: Any) -> Any:
    """Return whether a slice has not been written completely, because its socket is full.

    Staged frames, which include small eager slices, do not count: `restore_bytes` passes them to
    the data loop.
    """
    for number in range(state[NCONNS]):
        conn = conn_of(state, number)
        if conn[FRAGMENT_NBYTES] or conn[EAGER_TAKEN] < conn[EAGER_ADDED]:
            return True
    return False


@inlined
def has_rest(state: Any) -> Any:
    """Return whether a complete call leaves frames or confirmations for the data loop to send."""
    for number in range(state[NCONNS]):
        conn = conn_of(state, number)
        if conn[NOW_DONE] < conn[NOW_NBYTES] or conn[NEXT_NBYTES]:
            return True
    for number in range(state[NPAIRS]):  # noqa: SIM110 - compiled code has no generators
        if pair_of(state, number)[IS_UNCONFIRMED]:
            return True
    return False


@inlined
def read_all(state: Any) -> Any:
    """Read from each socket until it is empty, its connection is stalled, or an event occurs.

    Return EVENT if `parse` or `read_target` returned it for any socket, otherwise MORE. Return
    FOREIGN immediately for a frame that compiled code does not handle, and -2 immediately if a
    connection failed.
    """
    found = MORE
    for number in range(state[NCONNS]):
        conn = conn_of(state, number)
        while not conn[IS_STALLED]:
            if conn[TARGET_LEFT]:
                if not conn[IS_READABLE]:
                    break
                result = read_target(state, number, conn)
            else:
                result = MORE
                if conn[FILLED] - conn[PARSED] >= HEADER_NBYTES:
                    result = parse(state, number, conn)
                    if result == FOREIGN:
                        return FOREIGN
                if result == MORE:
                    if conn[IS_STALLED] or not conn[IS_READABLE]:
                        break
                    result = read_buffer(conn)
            if result < 0:
                code = errno() if result == -3 else 0
                if code in (EAGAIN, EINTR):
                    conn[IS_READABLE] = 0
                    break
                state[FAILED_CONN] = number
                state[ERRNO] = code
                return -2
            if result == EVENT:
                found = EVENT
                break
    return found


@inlined
def poll(state: Any, timeout_ns: Any) -> Any:
    """Wait at most `timeout_ns` for the sockets, and record the ready ones.

    Return the number of ready descriptors, or -1 after a wake-up, a signal or an error.
    """
    polls, nconns = words_at(state[POLLS]), state[NCONNS]
    for number in range(nconns):
        conn = conn_of(state, number)
        wanted = 0 if conn[IS_STALLED] else _POLLIN
        wanted |= _POLLOUT if conn[IS_FULL] else 0
        polls[number] = conn[FD] | wanted << 32 if wanted else 0xFFFFFFFF
    time = words_at(state[TIME])
    time[0] = timeout_ns // _SECOND_NS
    time[1] = timeout_ns % _SECOND_NS
    n = poll_until(state[POLLS], nconns + 1, state[TIME])
    if n < 0:
        return -1
    if n:
        for number in range(nconns):
            events = polls[number] >> 48
            if events:
                conn = conn_of(state, number)
                if events & _POLLOUT:
                    conn[IS_FULL] = 0
                if events & ~_POLLOUT:
                    conn[IS_READABLE] = 1
        if polls[nconns] >> 48:
            return -1
    return n


@inlined
def leave_cpu_of_peer(state: Any) -> None:
    """Move this thread to the CPU `HOME` if a peer on loopback sends from the thread's CPU.

    The scheduler may leave two waiting ranks on one CPU for a long time, because both yield it. The
    CPU affinity of this thread is the same afterwards.
    """
    cpu = current_cpu()
    if state[HOME] < 0 or state[HOME] == cpu:
        return
    operands = state[OPERANDS]
    for number in range(state[NCONNS]):
        conn = conn_of(state, number)
        store64(operands + 8, 4)
        if not conn[IS_LOOPBACK] or read_option(conn[FD], _INCOMING_CPU, operands) < 0:
            continue
        if load32(operands) == cpu:
            move_to_cpu(state[HOME], cpu_sets())
            return


def make_loop() -> Callable[[int], int]:
    """Return the loop of a call, for compilation by `r2ccl.kernels.native`.

    Returns
    -------
    callable
        ``loop(address)`` runs the call whose state is at `address`, without the GIL, and returns
        FINISHED, UNSETTLED, HAS_OTHERS, PAUSED, LEFT or FAILED, see `layout`.
    """

    def loop(address: Any) -> Any:
        state = words_at(address)
        state[ENTERED] = now_ns(state)
        while True:
            state[PASS_NS] = now_ns(state)
            advance(state)
            confirm_consumed(state)
            result = flush(state)
            if result < 0:
                return FAILED
            if result:
                continue
            if state[REMAINING] == 0:
                if has_unsent(state):
                    return LEFT
                if has_rest(state):
                    return UNSETTLED
                return HAS_OTHERS if state[NFOREIGN] or state[IS_DELAYING] else FINISHED
            if state[PASS_NS] - state[ENTERED] > state[BUSY_NS]:
                return PAUSED
            if state[NLOGGED] >= state[LIMIT] or state[NLOGGED] > state[MOST_LOGGED]:
                return LEFT
            result = read_all(state)
            if result in (FOREIGN, -2):
                advance(state)  # the data loop assumes that all possible work is done
                return LEFT if result == FOREIGN else FAILED
            now = now_ns(state)
            if result == EVENT:
                state[IDLE_SINCE] = 0
                continue
            if state[IDLE_SINCE] == 0:
                state[IDLE_SINCE] = now
            idle, spin, most = now - state[IDLE_SINCE], state[SPIN_NS], state[SLEEP_NS]
            if state[IS_DELAYING]:
                spin, most = min(spin, _DELAY_NS), min(most, _DELAY_NS)
            if idle < spin:
                result = poll(state, 0)
                if result == 0:
                    state[NIDLE] += 1
                    if state[NIDLE] % _LOOK_EVERY == 0:
                        leave_cpu_of_peer(state)
                    sched_yield()
            elif idle < most:
                result = poll(state, most - idle)
            else:
                return LEFT
            if result < 0:
                return PAUSED

    return loop


__all__ = ["make_loop"]

"""Compiled choice of a call's transfer: how a rank passes its data to its peers.

- CACHED: the rank copies the data into slots, which stay in the caches.
- PAST_CACHES: it writes the slots past the caches, to memory.
- READ: it uses no slots; the peers read its array (`r2ccl.shm.reading`). Only calls that copy large
  parts may do so.

Which transfer is fastest depends on the cores of the ranks. If they share a last-level cache, the
peer finds slots there. If not, it fetches each line from the other core's cache, which takes
several times as long as reading memory. The scheduler, or a hypervisor, may move a rank to another
core at any time. Each prepared call therefore first uses each transfer for some calls, and
remembers how long these calls usually take. It then uses the fastest transfer, except in occasional
trial calls, which may use any transfer. A transfer is used for several successive calls, because
the first of them still finds the data of the previous transfer in the caches.

The ranks gain from a transfer only if all of them use it. Each rank therefore tells, in the header
of its next call of the same kind, how long its last call took. All ranks then learn from the same
numbers, and make the same choice. If their choices differ, for example because one rank has
prepared its call again, the ranks learn nothing from the call.

Small calls (see `LEAST_NBYTES`), calls with a root, and scans do not choose: they use CACHED.

Messages have two transfers of their own, and choose between them with `next_transfer` and
`remember` (`r2ccl.shm.message_transfer`).
"""

from __future__ import annotations

from typing import Any

from r2ccl.kernels.compiling import inlined
from r2ccl.shm.atomics import clock_ns, load_acquire, store_release
from r2ccl.shm.layout import (
    BEGUN_NS,
    LAST,
    LOOP_BEFORE,
    LOOP_LAST,
    LOOP_NCALLS,
    LOOP_TRANSFERS_NS,
    NRANKS,
    RANK,
    TIME,
    TRANSFER,
)
from r2ccl.shm.rounds import first_round, header_of

CACHED, PAST_CACHES, READ = 0, 1, 2

#: Smallest size in bytes of a part, or of the input of an allreduce, for which a call chooses.
LEAST_NBYTES = 1 << 14
#: Calls use the same transfer 2**2 times in a row.
_ROW_BITS = 2
#: The transfers are used in turn from row 0 on, and again from these rows on and the powers of two
#: between them, because many things may make the first calls slow.
_FIRST_TURN, _LAST_TURN = 8, 128
#: One of 2**6 rows is a trial, at irregular intervals, which no loop of a program can match.
_TRIAL_BITS = 6
_MULTIPLIER, _SHIFT = 0x9E3779B1, 20
_DOWN_SHIFT, _UP_SHIFT = 1, 3
#: Number of the lowest bits of a told duration that contain the transfer.
_TRANSFER_BITS = 2
_TRANSFER_MASK = (1 << _TRANSFER_BITS) - 1
#: Word in place of a duration: no transfer has this number.
_NEUTRAL = _TRANSFER_MASK


@inlined
def choose(state: Any, given: Any, is_choosing: Any, may_read: Any) -> None:
    """Choose the transfer of a call that begins, and store it in TRANSFER.

    Parameters
    ----------
    state : pointer to int64
    given : pointer to int64
        Words of the prepared call.
    is_choosing : bool
        False: the transfer is CACHED.
    may_read : bool
        True if the transfer may be READ; the same on all ranks. A rank that cannot let its array be
        read uses CACHED instead of READ.
    """
    state[BEGUN_NS] = 0
    state[TRANSFER] = CACHED
    if is_choosing:
        ntransfers = 3 if may_read else 2
        state[TRANSFER] = next_transfer(
            given, LOOP_NCALLS, LOOP_TRANSFERS_NS, ntransfers, _ROW_BITS
        )


@inlined
def next_transfer(
    words: Any, ncalls_at: Any, durations_at: Any, ntransfers: Any, row_bits: Any
) -> Any:
    """Return the number of the transfer to use, from 0 to ``ntransfers - 1``, and count the use.

    `ncalls_at` is the index in `words` of this count. `durations_at` is the index of the remembered
    durations, one word per transfer; 0 is an unknown duration. A transfer is used 2**`row_bits`
    times in a row.
    """
    row = words[ncalls_at] >> row_bits
    words[ncalls_at] += 1
    turn = _FIRST_TURN
    while 2 * turn <= min(row, _LAST_TURN):
        turn *= 2
    if row < ntransfers:
        return row
    if 0 <= row - turn < ntransfers:
        return row - turn
    best = 0
    for each in range(1, ntransfers):
        if 0 < words[durations_at + each] < words[durations_at + best]:
            best = each
    number = row * _MULTIPLIER >> _SHIFT
    is_trial = number & ((1 << _TRIAL_BITS) - 1) == 0
    return (number >> _TRIAL_BITS) % ntransfers if is_trial else best


@inlined
def remember(words: Any, at: Any, duration_ns: Any) -> None:
    """Move the duration at index `at` toward `duration_ns`, by at most 1/2 down or 1/8 up.

    The limits matter because single calls or messages may be slow or fast by chance. A duration of
    0, not known, becomes `duration_ns`.
    """
    before = words[at]
    if before:
        duration_ns = max(duration_ns, before - (before >> _DOWN_SHIFT))
        duration_ns = min(duration_ns, before + (before >> _UP_SHIFT) + 1)
    words[at] = duration_ns


@inlined
def tell(state: Any, given: Any, is_choosing: Any) -> None:
    """Write into this rank's header how long the last call of this kind took.

    With `is_choosing` False, drop the duration of the last call, and tell instead that this rank
    has no part in the choice. The reason is that its parts are small or that all ranks map its
    array. Call this function after `r2ccl.shm.rounds.write_header`.
    """
    if not is_choosing:
        given[LOOP_LAST] = 0
    header = header_of(state, state[RANK], first_round(state))
    store_release(header + LAST, given[LOOP_LAST] if is_choosing else _NEUTRAL)


@inlined
def learn(state: Any, given: Any) -> None:
    """Remember the duration of the last call, which all ranks have told in their headers.

    The duration is that of the slowest rank that has a part in the choice. Remember nothing if one
    of these ranks, or this rank, has measured no duration; if they used different transfers; or if
    the call before the last one used another transfer.
    """
    last, first = given[LOOP_LAST], first_round(state)
    if last == 0:
        return
    given[LOOP_LAST] = 0
    is_again = given[LOOP_BEFORE] == last & _TRANSFER_MASK
    given[LOOP_BEFORE] = last & _TRANSFER_MASK
    longest = last
    for peer in range(state[NRANKS]):
        told = load_acquire(header_of(state, peer, first) + LAST)
        if told == _NEUTRAL:
            continue
        longest = max(longest, told)
        if told == 0 or (told ^ last) & _TRANSFER_MASK != 0:
            return
    if is_again:
        transfer = last & _TRANSFER_MASK
        remember(given, LOOP_TRANSFERS_NS + transfer, longest >> _TRANSFER_BITS)


@inlined
def note_begin(state: Any, address: Any, given: Any) -> None:
    """Store the time at which all ranks have begun the call, to measure its duration.

    Do nothing before the second call that has chosen a transfer.
    """
    if given[LOOP_NCALLS] > 1:  # in its first call, an array may get its memory
        state[BEGUN_NS] = clock_ns(address + 8 * TIME)


@inlined
def note_end(state: Any, address: Any, given: Any) -> None:
    """Store the duration of a call that has finished, if `note_begin` stored its beginning."""
    if state[BEGUN_NS]:
        duration_ns = clock_ns(address + 8 * TIME) - state[BEGUN_NS]
        given[LOOP_LAST] = duration_ns << _TRANSFER_BITS | state[TRANSFER]


__all__ = [
    "CACHED",
    "LEAST_NBYTES",
    "PAST_CACHES",
    "READ",
    "choose",
    "learn",
    "next_transfer",
    "note_begin",
    "note_end",
    "remember",
    "tell",
]

"""Compiled steps that find arrays in memory which all ranks map; see `r2ccl.shm.symmetric`.

The *place* of such an array is a word that has the same meaning on all ranks: the number of its
segment and the offset in it. In the first round of a call that allows direct access, each rank
publishes in its header the places that its arrays have, so all ranks know how the call continues:

- If all ranks that send have published places, peers access the arrays directly.
- If none of them has, data passes through slots.
- If only some of them have, all ranks begin the call again and then publish no places.
"""

from __future__ import annotations

from typing import Any

from r2ccl.kernels.compiling import inlined
from r2ccl.shm.atomics import fence, load_acquire, store_release, words_at
from r2ccl.shm.layout import (
    AWAITED,
    BASES,
    DONE,
    INPUT,
    LEFT,
    MODE,
    NRANKS,
    NREPEATED,
    NSYMMETRIC,
    NUSED,
    OUTPUT,
    OWN_SYMMETRIC,
    RANK,
    ROW_NWORDS,
    STAGED,
    SYMMETRIC,
)
from r2ccl.shm.rounds import begin, first_round, header_of
from r2ccl.shm.waiting import wait

_OFFSET_BITS = 44
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1


@inlined
def place_of(state: Any, start: Any, nbytes: Any) -> Any:
    """Return the place of the `nbytes` bytes at address `start`; 0 if peers do not map them all."""
    rows = words_at(state[OWN_SYMMETRIC])
    low, high = 0, state[NSYMMETRIC]
    while low < high:
        middle = (low + high) >> 1
        if rows[ROW_NWORDS * middle] <= start:
            low = middle + 1
        else:
            high = middle
    if low == 0:
        return 0
    at = ROW_NWORDS * (low - 1)
    if start + nbytes > rows[at + 1]:
        return 0
    return ((rows[at + 2] + 1) << _OFFSET_BITS) | (start - rows[at])


@inlined
def publish_places(state: Any, source: Any, target: Any) -> None:
    """Write the places of the input and of the output into this rank's header; 0 means none."""
    header = header_of(state, state[RANK], first_round(state))
    store_release(header + INPUT, source)
    store_release(header + OUTPUT, target)


@inlined
def input_of(state: Any, peer: Any) -> Any:
    """Return the address in this process of the input of rank `peer`.

    The header of that rank must have the place of the array.
    """
    return _address_of(state, peer, INPUT)


@inlined
def output_of(state: Any, peer: Any) -> Any:
    """Return the address in this process of the output of rank `peer`.

    The header of that rank must have the place of the array.
    """
    return _address_of(state, peer, OUTPUT)


@inlined
def has_input(state: Any, peer: Any) -> Any:
    """Return whether the header of rank `peer` has the place of its input."""
    return load_acquire(header_of(state, peer, first_round(state)) + INPUT) != 0


@inlined
def have_stayed(state: Any, address: Any, peers: Any) -> Any:
    """Return whether the arrays of the ranks in the range `peers` were unchanged during an access.

    Call this function after a direct access to these arrays. If a rank has left the call with an
    error, it may have changed its arrays before they were read. Then sleep, store the rank in
    AWAITED, and return False.
    """
    fence()
    for peer in peers:
        if load_acquire(state[BASES + peer] + LEFT) != 0:
            state[AWAITED] = peer
            word = state[BASES + peer] + DONE
            wait(state, address, word, load_acquire(word) + 1)
            return False
    return True


@inlined
def begin_anew(state: Any, total: Any) -> None:
    """Begin the call again, through slots; all ranks do so after they have compared the headers.

    `total` is the number of rounds in which this rank has data.
    """
    state[NUSED] += 1  # in the first round, this rank may have used a slot
    state[NREPEATED] += 1
    begin(state, total)
    state[MODE] = STAGED


@inlined
def _address_of(state: Any, peer: Any, offset: Any) -> Any:
    place = load_acquire(header_of(state, peer, first_round(state)) + offset)
    row = words_at(state[SYMMETRIC] + 8 * state[NRANKS] * ((place >> _OFFSET_BITS) - 1))
    return row[peer] + (place & _OFFSET_MASK)


__all__ = [
    "begin_anew",
    "has_input",
    "have_stayed",
    "input_of",
    "output_of",
    "place_of",
    "publish_places",
]

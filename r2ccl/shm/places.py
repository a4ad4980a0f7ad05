"""Compiled steps by which a rank lets its peers access an array directly.

The *place* of an array is a word that all ranks understand. If all ranks map the memory of the
array (`r2ccl.shm.symmetric`), the place has the number of the segment and the offset in the
segment. Otherwise it has the bit `UNMAPPED` and the address in the owner's process, whose memory
peers may read (`r2ccl.shm.reading`).

Each rank publishes in its header the place of its input, or no place. Peers access an input with a
place directly; the data of all other ranks passes through slots. In an allreduce, peers access the
arrays of all ranks or of none. If only some ranks have published places, all ranks begin the call
again and then publish none.
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

#: The highest bit of a word.
UNMAPPED = -(1 << 63)
_ADDRESS_MASK = (1 << 63) - 1
_OFFSET_BITS = 44
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1


@inlined
def place_of(state: Any, start: Any, nbytes: Any) -> Any:
    """Return the place of the `nbytes` bytes at address `start`; 0 unless peers map all of them."""
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
    """Write the places of the input and of the output into this rank's header; 0: no place."""
    header = header_of(state, state[RANK], first_round(state))
    store_release(header + INPUT, source)
    store_release(header + OUTPUT, target)


@inlined
def has_input(state: Any, peer: Any) -> Any:
    """Return whether the header of rank `peer` has the place of its input."""
    return load_acquire(header_of(state, peer, first_round(state)) + INPUT) != 0


@inlined
def has_any_input(state: Any, peers: Any) -> Any:
    """Return whether the header of any other rank in the range `peers` has an input's place."""
    ninputs = 0
    for peer in peers:
        ninputs += peer != state[RANK] and has_input(state, peer)
    return ninputs > 0


@inlined
def input_of(state: Any, peer: Any) -> Any:
    """Return the address in this process of the input of rank `peer`.

    The header of that rank must have the place of the input, in memory that all ranks map.
    """
    return _address_of(state, peer, INPUT)


@inlined
def output_of(state: Any, peer: Any) -> Any:
    """Return the address in this process of the output of rank `peer`; see `input_of`."""
    return _address_of(state, peer, OUTPUT)


@inlined
def unmapped_input_of(state: Any, peer: Any) -> Any:
    """Return the address of rank `peer`'s input in its own process; 0 if all ranks map the input.

    The header of that rank must have the place of the input.
    """
    place = load_acquire(header_of(state, peer, first_round(state)) + INPUT)
    return place & _ADDRESS_MASK if place < 0 else 0


@inlined
def have_stayed(state: Any, address: Any, peers: Any) -> Any:
    """Return whether the inputs of the ranks in the range `peers` were unchanged during an access.

    Call this function after the access to all inputs that have places. If a rank has left the call
    with an error, it may have changed its arrays before they were read. Then call `sleep_for` and
    return False.
    """
    fence()
    for peer in peers:
        if has_input(state, peer) and load_acquire(state[BASES + peer] + LEFT) != 0:
            sleep_for(state, address, peer)
            return False
    return True


@inlined
def sleep_for(state: Any, address: Any, peer: Any) -> None:
    """Sleep once because of rank `peer`, whose array cannot be used; store the rank in AWAITED."""
    state[AWAITED] = peer
    word = state[BASES + peer] + DONE
    wait(state, address, word, load_acquire(word) + 1)


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
    "UNMAPPED",
    "begin_anew",
    "has_any_input",
    "has_input",
    "have_stayed",
    "input_of",
    "output_of",
    "place_of",
    "publish_places",
    "sleep_for",
    "unmapped_input_of",
]

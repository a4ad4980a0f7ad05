"""Reading of the memory of other ranks' processes: process_vm_readv(2).

Linux allows this between processes of one user, unless the process that is read, a filter of system
calls or a security module forbids it. For example, Yama with ``ptrace_scope`` 1 or more forbids it.
Each rank therefore tries to read a word of each peer when the group is made, and publishes the
result in its segment. If any rank fails, the data of all collectives, and of all messages to that
rank, passes through memory that the ranks share.

Data that a peer reads directly is copied once instead of twice, and needs no slots, but the kernel
looks up each page of the array.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl.kernels.arrays import data_of
from r2ccl.kernels.compiling import inlined
from r2ccl.shm.atomics import load_acquire, read_memory, store_release, words_at
from r2ccl.shm.layout import BASES, CAN_READ, NRANKS, PID, PROBE, RANK, TIME, TOKEN
from r2ccl.shm.segment import Segment

#: Largest number of bytes that one system call reads, because Ctrl-C waits for its end.
_MOST_NBYTES = 1 << 26


def offer_word(own: Segment) -> npt.NDArray[np.int64]:
    """Publish the address and the value of a word that peers try to read; return the word.

    Call this function before peers map the segment `own`. The caller must keep the returned word
    alive while peers may read it.
    """
    word = np.frombuffer(secrets.token_bytes(8), np.int64)
    own.words[PID // 8], own.words[PROBE // 8] = os.getpid(), data_of(word)
    own.words[TOKEN // 8] = word[0]
    return word


def make_try_to_read() -> Callable[[int], int]:
    """Return the function ``try_to_read``, which `r2ccl.kernels.native` compiles.

    ``try_to_read(state)`` tries to read the words of all peers. It returns 1 if it could read all
    of them, else 0, and stores this result in this rank's segment. `state` is the address of this
    rank's state (`r2ccl.shm.layout`).
    """

    def try_to_read(address: Any) -> Any:
        state = words_at(address)
        nread = 0
        for peer in range(state[NRANKS]):
            nread += peer != state[RANK] and can_read(state, address, peer)
        can_read_all = 1 if nread == state[NRANKS] - 1 else 0
        store_release(state[BASES + state[RANK]] + CAN_READ, can_read_all)
        return can_read_all

    return try_to_read


@inlined
def can_read(state: Any, address: Any, peer: Any) -> Any:
    """Return whether this rank can read the word that rank `peer` has published."""
    segment, at = state[BASES + peer], address + 8 * TIME
    state[TIME] = ~load_acquire(segment + TOKEN)
    is_read = read_array(state, peer, at, load_acquire(segment + PROBE), 8)
    return is_read and load_acquire(at) == load_acquire(segment + TOKEN)


@inlined
def refuse_to_read(state: Any) -> None:
    """Publish that this rank cannot read the memory of all other ranks."""
    store_release(state[BASES + state[RANK]] + CAN_READ, 0)


@inlined
def can_all_read(state: Any) -> Any:
    """Return whether each rank has published that it can read the memory of all other ranks."""
    nable = 0
    for peer in range(state[NRANKS]):
        nable += load_acquire(state[BASES + peer] + CAN_READ)
    return nable == state[NRANKS]


@inlined
def is_readable(state: Any, address: Any, start: Any, nbytes: Any) -> Any:
    """Return whether peers that can read this process can read the `nbytes` bytes at `start`.

    Only the first and the last byte are tried; `nbytes` must be above 0. The memory of a device,
    mapped into the process, cannot be read. `address` is the address of the state.
    """
    at = address + 8 * TIME
    if not read_array(state, state[RANK], at, start, 1):
        return False
    return read_array(state, state[RANK], at, start + nbytes - 1, 1)


@inlined
def read_array(state: Any, peer: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Copy `nbytes` bytes at address `source` of the process of rank `peer` to address `target`.

    Return False if the process cannot be read or has no such memory; part of the bytes may then
    have been copied.
    """
    process = load_acquire(state[BASES + peer] + PID)
    done = 0
    while done < nbytes:
        length = min(nbytes - done, _MOST_NBYTES)
        nread = read_memory(process, target + done, source + done, length)
        if nread <= 0:
            return False
        done += nread
    return True


__all__ = [
    "can_all_read",
    "can_read",
    "is_readable",
    "make_try_to_read",
    "offer_word",
    "read_array",
    "refuse_to_read",
]

"""Compiled steps of collectives that read and write the arrays of all ranks directly.

The caller has compared the headers of the call. The headers of the ranks whose arrays a step
accesses have the places of these arrays.
"""

from __future__ import annotations

from typing import Any

from r2ccl.kernels.compiling import inlined
from r2ccl.shm.atomics import call_kernel, words_at
from r2ccl.shm.layout import BASES, NRANKS, RANK, SCRATCH, SCRATCH_NBYTES, STREAM_NBYTES
from r2ccl.shm.places import input_of, output_of, unmapped_input_of
from r2ccl.shm.reading import can_read, read_array
from r2ccl.shm.rounds import copy


@inlined
def reduce_share(state: Any, sources: Any, nbytes: Any, kernel: Any) -> None:
    """Reduce this rank's share of an allreduce, from the inputs to the outputs of all ranks.

    Parameters
    ----------
    state : pointer to int64
    sources : int64
        Address of a table of one word per rank, which the function fills with addresses in the
        inputs.
    nbytes : int64
        Size of each input in bytes.
    kernel : int64
        Address of a kernel of `r2ccl.kernels.fold`.

    Notes
    -----
    Outputs of at least ``state[STREAM_NBYTES]`` bytes are written past the caches, except in place,
    where the output is the input that has just been read. The caller must therefore call
    `r2ccl.shm.atomics.stream_fence` before it tells other ranks that the outputs are written.
    """
    rank, nranks = state[RANK], state[NRANKS]
    scratch = state[BASES + rank] + SCRATCH
    kernel_sources = words_at(sources)
    share = ((nbytes + nranks - 1) // nranks + 63) & -64
    before = min(nbytes, rank * share)
    after = min(nbytes, before + share)
    is_large = nbytes >= state[STREAM_NBYTES]
    for at in range(before, after, SCRATCH_NBYTES):
        length = min(SCRATCH_NBYTES, after - at)
        for peer in range(nranks):
            kernel_sources[peer] = input_of(state, peer) + at
        call_kernel(kernel, sources, nranks, scratch, length)
        for step in range(nranks):
            peer = (rank + step) % nranks
            target = output_of(state, peer) + at
            copy(target, scratch, length, is_large and target != kernel_sources[peer])


@inlined
def copy_input(
    state: Any, address: Any, peer: Any, offset: Any, target: Any, nbytes: Any, is_streamed: Any
) -> Any:
    """Copy `nbytes` bytes at `offset` in the input of rank `peer` to address `target`.

    Return False if the memory of the rank cannot be read, otherwise True. `address` is the address
    of the state. If `is_streamed`, the bytes may be written past the caches: the caller must call
    `r2ccl.shm.atomics.stream_fence` before it tells other ranks that they are written.
    """
    unmapped = unmapped_input_of(state, peer)
    if unmapped != 0:
        is_read = read_array(state, peer, target, unmapped + offset, nbytes)
        # If the process has ended, another process may have its id by now.
        return is_read and can_read(state, address, peer)
    copy(target, input_of(state, peer) + offset, nbytes, is_streamed)
    return True


__all__ = ["copy_input", "reduce_share"]

"""Compiled steps of collectives that read and write the arrays of all ranks directly.

The caller has compared the headers of the call. The headers of the ranks whose arrays a step
accesses have the places of these arrays.
"""

from __future__ import annotations

from typing import Any

from r2ccl.kernels.compiling import inlined
from r2ccl.shm.atomics import call_kernel, words_at
from r2ccl.shm.layout import BASES, NRANKS, RANK, SCRATCH, SCRATCH_NBYTES, STREAM_NBYTES
from r2ccl.shm.places import input_of, output_of
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
def reduce_inputs(
    state: Any, sources: Any, offset: Any, kernel: Any, target: Any, nbytes: Any
) -> None:
    """Reduce `nbytes` bytes of the inputs of all ranks, from `offset` on, to address `target`.

    `sources` is the address of a table of one word per rank, which the function fills with
    addresses in the inputs, and `kernel` the address of a kernel of `r2ccl.kernels.fold`.
    """
    nranks = state[NRANKS]
    kernel_sources = words_at(sources)
    for peer in range(nranks):
        kernel_sources[peer] = input_of(state, peer) + offset
    call_kernel(kernel, sources, nranks, target, nbytes)


@inlined
def copy_inputs(
    state: Any, senders: Any, offset: Any, target: Any, step: Any, nbytes: Any, is_streamed: Any
) -> None:
    """Copy `nbytes` bytes, from `offset` on, of the input of each rank in the range `senders`.

    The bytes of rank s are copied to address ``target + s * step``. Each rank begins with its own
    input and continues with that of the next rank, so that the ranks do not all read the same
    memory at the same time. If `is_streamed`, the bytes are written past the caches: the caller
    must call `r2ccl.shm.atomics.stream_fence` before it tells other ranks that they are written.
    """
    rank, nranks = state[RANK], state[NRANKS]
    for number in range(nranks):
        peer = (rank + number) % nranks
        if senders.start <= peer < senders.stop:
            at, to = input_of(state, peer) + offset, target + peer * step
            if at != to:
                copy(to, at, nbytes, is_streamed)


__all__ = ["copy_inputs", "reduce_inputs", "reduce_share"]

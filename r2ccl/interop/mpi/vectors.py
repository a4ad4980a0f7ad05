"""Buffer arguments of the collectives in which each rank's block has a count and a displacement.

A specification is as in `buffers`, but with a list or array of counts, one per rank, or one count
for all ranks: ``array``, ``[array, datatype]``, ``[array, counts]``, ``[array, counts, datatype]``,
``[array, (counts, displacements)]``, ``[array, (counts, displacements), datatype]`` or ``[array,
counts, displacements, datatype]``. In lists of two or three items, a tuple always stands for
``(counts, displacements)``, as in mpi4py. Counts and displacements are in elements; for Alltoallw
see `vector_of_datatypes`. Without counts, the array is divided evenly; if elements are left over,
each of the first blocks gets one more element. Without displacements, the blocks follow one
another; a single displacement is the distance from the start of each block to the start of the
next block.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from r2ccl.interop.mpi.buffers import (
    Array,
    BufferSpec,
    datatype_of,
    held,
    inferred_count,
    memory_of,
    parts_of,
    require_room,
    require_usable,
)


class VectorSpec(msgspec.Struct, frozen=True, eq=False):
    """Blocks of elements in the memory of the caller, one for each rank.

    Parameters
    ----------
    memory : ndarray of uint8, shape (nbytes,)
        Memory of the caller. Read-only unless the specification was read with ``writable=True``.
    blocks : tuple of BufferSpec
        Elements of each rank's block, in rank order.
    offsets : tuple of int
        Offset of each block in `memory`, in bytes; 0 for a block without elements.
    """

    memory: Array
    blocks: tuple[BufferSpec, ...]
    offsets: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """True if each block is contiguous; there may be gaps between the blocks."""
        return all(block.is_contiguous for block in self.blocks)

    @property
    def counts(self) -> list[int]:
        """Size of the data of each block, in bytes."""
        return [block.block_nbytes for block in self.blocks]

    @property
    def displs(self) -> list[int]:
        """Offset of each block, in bytes, in the array that `data` returns."""
        if self.is_contiguous:
            return list(self.offsets)
        return list(accumulate(self.counts, initial=0))[:-1]

    def data(self, *, writable: bool) -> Array:
        """Return bytes for a call of r2ccl: the caller's memory if possible, otherwise new memory.

        Call `pack` to write the elements to new memory. The blocks start at `displs`.
        `writable` is True if r2ccl needs memory that it can write to.
        """
        if not self.is_contiguous:
            return np.empty(sum(self.counts), np.uint8)
        return self.memory if self.memory.flags.writeable or not writable else self.memory.copy()

    def part(self, data: Array, rank: int) -> Array:
        """Return the block of `rank` in `data`, an array that the method `data` returned."""
        first = self.displs[rank]
        return data[first : first + self.counts[rank]]

    def pack(self, data: Array) -> None:
        """Pack the elements into `data`, unless `data` is the caller's memory."""
        for rank, block in enumerate(self.blocks):
            block.pack(self.part(data, rank))

    def unpack(self, data: Array) -> None:
        """Unpack `data` into the elements, unless `data` is the caller's memory."""
        for rank, block in enumerate(self.blocks):
            block.unpack(self.part(data, rank))


def vector(spec: Any, *, writable: bool, nblocks: int) -> VectorSpec:
    """Return the `VectorSpec` of a specification; the errors are those of `buffers.message`."""
    owner, counts, displs, datatype = parts_of(spec, (tuple,))
    memory = memory_of(owner, writable=writable)
    datatype = datatype_of(owner, datatype)
    if counts is None:
        entries = inferred_count(memory.size, datatype)
        sizes = [entries // nblocks + (entries % nblocks > rank) for rank in range(nblocks)]
    else:
        sizes = _per_block(counts, nblocks, lambda count, _: count)
    if displs is None:
        starts = list(accumulate(sizes, initial=0))[:-1]
    else:
        starts = _per_block(displs, nblocks, lambda stride, rank: stride * rank)
    extent = int(datatype.extent) if any(sizes) else 0
    return _made(memory, sizes, [start * extent for start in starts], [datatype] * nblocks)


def vector_of_datatypes(spec: Any, *, writable: bool, nblocks: int) -> VectorSpec:
    """Return the `VectorSpec` of a specification of mpi4py's Alltoallw.

    Its form is ``[array, (counts, displacements), datatypes]``, ``[array, counts, displacements,
    datatypes]``, or ``[array, datatypes]`` for counts of 1 and displacements of 0. Displacements
    are in bytes. The errors are those of `buffers.message`.
    """
    counts: Any = [1] * nblocks
    displs: Any = [0] * nblocks
    if len(spec) == 2:
        owner, datatypes = spec
    elif len(spec) == 3:
        owner, (counts, displs), datatypes = spec
    elif len(spec) == 4:
        owner, counts, displs, datatypes = spec
    else:
        raise ValueError("message: expecting 2 to 4 items")
    memory = memory_of(owner, writable=writable)
    if len(datatypes) != nblocks:
        raise ValueError(f"expecting {nblocks} items, got {len(datatypes)}")
    return _made(memory, sequence(counts, nblocks), sequence(displs, nblocks), datatypes)


def sequence(values: Any, nblocks: int) -> list[int]:
    """Return `values` as a list of integers; raise ValueError unless it has `nblocks` items."""
    found = [operator.index(value) for value in values]
    if len(found) != nblocks:
        raise ValueError(f"expecting {nblocks} items, got {len(found)}")
    return found


def _made(
    memory: Array, counts: Sequence[int], offsets: Sequence[int], datatypes: Sequence[Any]
) -> VectorSpec:
    # As in MPI, a block without elements may have any displacement.
    starts = [offset if count else 0 for count, offset in zip(counts, offsets, strict=True)]
    blocks = []
    usable: dict[int, Any] = {}  # by the handle of the caller's datatype
    for count, offset, given in zip(counts, starts, datatypes, strict=True):
        if count < 0 or offset < 0:
            raise ValueError(f"message: negative count {count} or displacement {offset} of a block")
        rest = memory[offset:]
        if count:
            if given.handle not in usable:
                require_usable(given)
                usable[given.handle] = held(given)
            require_room(rest.size, count, given)
        datatype = usable[given.handle] if count else given
        blocks.append(BufferSpec(rest, count, 1, datatype))
    return VectorSpec(memory, tuple(blocks), tuple(starts))


def _per_block(values: Any, nblocks: int, of_one: Any) -> list[int]:
    """Return one number per block: `values` if it is a sequence, else ``of_one(values, rank)``."""
    if isinstance(values, Sequence | np.ndarray) or hasattr(values, "__iter__"):
        return sequence(values, nblocks)
    one = operator.index(values)
    return [of_one(one, rank) for rank in range(nblocks)]


__all__ = ["VectorSpec", "sequence", "vector", "vector_of_datatypes"]

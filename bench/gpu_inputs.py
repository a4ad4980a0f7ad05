"""Random operands of any length for a GPU, any block of which can be had again on the host.

An operand is made of windows, each at a random place of the operand's own random numbers, so that a
block costs nothing to have again and a thing that reads or writes at a wrong place is found. What
an array must hold is worked out block by block from the same windows.

Pure. Invariant: an `Inputs` of the same arguments gives the same numbers, in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gpu_card import Array, Bytes, Card

from r2ccl.dtypes import DTYPES

#: Up to where a float type holds every integer.
_WHOLE = {"bfloat16": 1 << 8, "float16": 1 << 11, "float32": 1 << 24, "float64": 1 << 53}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}

#: What a block must hold, from the blocks of the operands.
Reference = Callable[[Sequence[Array]], Array]


class Inputs:
    """The operands of something.

    Parameters
    ----------
    dtype : dtype
    noperands : int
    count : int
        Elements of each.
    seed : sequence of int
    block_nbytes : int
        Of the blocks that `Card` cuts arrays in.
    is_exact : bool, optional
        Integers so small that no sum of the operands is rounded, in any order. Else floats of the
        normal distribution; integers of all values, whose sums wrap.
    """

    def __init__(
        self, dtype: np.dtype[Any], noperands: int, count: int, seed: Sequence[int],
        block_nbytes: int, *, is_exact: bool = False,
    ) -> None:  # fmt: skip
        self.dtype = dtype
        self.noperands = noperands
        self.count = count
        self._length = max(1, min(count, block_nbytes // dtype.itemsize))
        rng = np.random.default_rng(seed)
        most = _WHOLE[dtype.name] // noperands if is_exact else None
        self._bases = [_draw(rng, dtype, 2 * self._length, most) for _ in range(noperands)]
        nblocks = -(-count // self._length)
        self._places = rng.integers(0, self._length + 1, (noperands, nblocks))

    @property
    def nbytes(self) -> int:
        """Bytes of an operand."""
        return self.count * self.dtype.itemsize

    def block(self, operand: int, number: int) -> Array:
        """Return a block of an operand; not to be written."""
        at = self._places[operand, number]
        length = min(self._length, self.count - number * self._length)
        return self._bases[operand][at : at + length]

    def blocks(self, number: int) -> list[Array]:
        """Return a block of every operand."""
        return [self.block(operand, number) for operand in range(self.noperands)]

    def place(self, card: Card, operand: int, address: int) -> None:
        """Write an operand to a card."""
        card.place(address, self.nbytes, lambda number: self.block(operand, number))

    def count_wrong(self, card: Card, address: int, reference: Reference) -> int:
        """Count the elements of an array whose bits are not those of the reference."""

        def look(number: int, found: Bytes) -> int:
            return differing(found.view(self.dtype), reference(self.blocks(number)))

        return card.examine(address, self.nbytes, look)

    def count_wrong_sums(self, card: Card, address: int, *, is_exact: bool) -> int:
        """Count the elements that are no sum of all operands, in whatever order they were added.

        Exact sums have one value. Else each addition may be off by half a unit of its result: an
        element is wrong that is further than that from the sum in float64.
        """

        def look(number: int, found: Bytes) -> int:
            blocks = [each.astype(np.float64) for each in self.blocks(number)]
            off = np.abs(found.view(self.dtype).astype(np.float64) - sum(blocks))
            allowed: Array | float = 0.0
            if not is_exact:
                allowed = sum(map(np.abs, blocks)) * (self.noperands / _WHOLE[self.dtype.name])
            return int(np.count_nonzero(~(off <= allowed)))  # so that NaN is wrong

        return card.examine(address, self.nbytes, look)


def differing(left: Array, right: Array) -> int:
    """Count the elements of two arrays of one dtype whose bits differ."""
    bits = _BITS[left.dtype.itemsize]
    return int(np.count_nonzero(left.view(bits) != right.view(bits)))


def named(name: str) -> np.dtype[Any]:
    """Return the dtype of a name.

    Raises
    ------
    KeyError
        There is none; of bfloat16: without ml_dtypes.
    """
    return _BY_NAME[name]


def _draw(rng: np.random.Generator, dtype: np.dtype[Any], count: int, most: int | None) -> Array:
    if most is not None:
        return rng.integers(-most, most + 1, count).astype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, count, dtype, endpoint=True)
    precision: Any = np.float64 if dtype == np.float64 else np.float32
    return rng.standard_normal(count, precision).astype(dtype)


__all__ = ["Inputs", "Reference", "differing", "named"]

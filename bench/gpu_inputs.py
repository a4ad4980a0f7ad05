"""Random operands of any length for a GPU, whose blocks can be recomputed on the host.

Each block of an operand is a window at a random offset of a short array of random numbers. So the
host obtains a block again at no cost, and code that reads or writes at a wrong address is detected.
The correct contents of an array are computed block by block from the same windows.

Invariant: `Inputs` with the same arguments has the same numbers in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gpu_card import Array, Bytes, Card

from r2ccl.dtypes import DTYPES

#: Number up to which a float type represents every integer exactly.
_WHOLE = {"bfloat16": 1 << 8, "float16": 1 << 11, "float32": 1 << 24, "float64": 1 << 53}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}

#: Function that returns the correct contents of a block, given the blocks of the operands.
Reference = Callable[[Sequence[Array]], Array]


class Inputs:
    """Random operands of a kernel or a collective.

    Parameters
    ----------
    dtype : dtype
    noperands : int
    count : int
        Number of elements of each operand.
    seed : sequence of int
    block_nbytes : int
        Size in bytes of the blocks in which `Card` copies arrays.
    is_exact : bool, optional
        True for integer values so small that no sum of the operands is rounded, in any order. False
        for normally distributed floats, or for integers of all values, whose sums wrap around.
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
        """Size of an operand in bytes."""
        return self.count * self.dtype.itemsize

    def block(self, operand: int, number: int) -> Array:
        """Return block `number` of an operand; the caller must not write to it."""
        at = self._places[operand, number]
        length = min(self._length, self.count - number * self._length)
        return self._bases[operand][at : at + length]

    def blocks(self, number: int) -> list[Array]:
        """Return block `number` of every operand."""
        return [self.block(operand, number) for operand in range(self.noperands)]

    def place(self, card: Card, operand: int, address: int) -> None:
        """Write an operand to device memory at `address`."""
        card.place(address, self.nbytes, lambda number: self.block(operand, number))

    def count_wrong(self, card: Card, address: int, reference: Reference) -> int:
        """Count the elements of a device array whose bits differ from the reference."""

        def look(number: int, found: Bytes) -> int:
            return differing(found.view(self.dtype), reference(self.blocks(number)))

        return card.examine(address, self.nbytes, look)

    def count_wrong_sums(self, card: Card, address: int, *, is_exact: bool) -> int:
        """Count the elements of a device array that are not a sum of all operands in any order.

        Exact sums have a single value. In other sums, each addition may be off by half a unit in
        the last place. An element is wrong if it differs from the float64 sum by more than all
        additions together may be off.
        """

        def look(number: int, found: Bytes) -> int:
            blocks = [each.astype(np.float64) for each in self.blocks(number)]
            off = np.abs(found.view(self.dtype).astype(np.float64) - sum(blocks))
            allowed: Array | float = 0.0
            if not is_exact:
                allowed = sum(map(np.abs, blocks)) * (self.noperands / _WHOLE[self.dtype.name])
            return int(np.count_nonzero(~(off <= allowed)))  # NaN counts as wrong

        return card.examine(address, self.nbytes, look)


def differing(left: Array, right: Array) -> int:
    """Count the elements whose bits differ between two arrays of the same dtype."""
    bits = _BITS[left.dtype.itemsize]
    return int(np.count_nonzero(left.view(bits) != right.view(bits)))


def named(name: str) -> np.dtype[Any]:
    """Return the dtype with a given name.

    Raises
    ------
    KeyError
        If no such dtype exists; for bfloat16, if ml_dtypes is not installed.
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

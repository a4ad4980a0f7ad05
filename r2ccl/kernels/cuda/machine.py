"""Interface of the instruction set that kernels are written in.

Two modules implement `InstructionSet`: `r2ccl.kernels.cuda.primitives` in inline PTX for a GPU, and
`r2ccl.kernels.cuda.twins` in NumPy for the simulator.

A *lane* is the unit of arithmetic: one or two registers. Invariant: a lane holds one element or
several independent elements; unused bits are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Function = Callable[..., Any]

#: Sizes in bytes of the vectors that a thread loads or stores at once, the largest first.
VECTORS = (16, 8, 4)

#: Compute capability for which kernels are compiled. GPUs of a later one run the same PTX; for 9.0,
#: the compiler would write the same instructions.
TARGET = (8, 0)
#: Oldest PTX ISA version that supports `TARGET`, and all instructions that kernels contain. The
#: compiler writes the newest version it knows, which drivers older than the compiler refuse.
PTX_VERSION = "7.0"

#: Lane types and their sizes in bytes. ``x2`` means two registers, as a tuple: a complex number, or
#: two 16-bit floats as float32. 16-bit floats and integers of 8 and 16 bits are packed in ``u32``.
#: A routine also accepts and returns tuples of lanes: ``f32[4]`` is a tuple of four, ``f32[4][2]``
#: a tuple of two such tuples.
LANES = {"u32": 4, "u64": 8, "f32": 4, "f64": 8, "f32x2": 8, "f64x2": 16}

#: Instructions, with the types of their result and operands. Results are rounded once, to nearest,
#: ties to even. Subnormal numbers are not flushed to zero. A minimum or maximum is NaN if either
#: operand is, and -0 is below +0 (PTX ISA, ``min`` and ``max``). ``narrow`` rounds, ``widen`` is
#: exact. Integer division truncates toward zero. ``advance`` is an addition that compilers cannot
#: analyse.
INSTRUCTIONS: dict[str, tuple[str, ...]] = {
    **{f"{name}.{kind}": (kind, kind, kind)
       for name in ("add", "mul", "div", "min", "max") for kind in ("f32", "f64")},
    **{f"fma.{kind}": (kind, kind, kind, kind) for kind in ("f32", "f64")},
    **{f"{name}.{half}": ("u32", "u32", "u32")
       for name in ("add", "mul", "min", "max") for half in ("f16x2", "bf16x2")},
    **{f"widen.{half}": ("f32x2", "u32") for half in ("f16x2", "bf16x2")},
    **{f"narrow.{half}": ("u32", "f32x2") for half in ("f16x2", "bf16x2")},
    **{f"div.{kind}": (kind, kind, kind) for kind in ("s32", "u32", "s64", "u64")},
    "advance.s64": ("s64", "s64", "s64"),
}  # fmt: skip


class InstructionSet(Protocol):
    """Interface to the functions that kernels call; each method returns such a function."""

    def instruction(self, name: str) -> Function:
        """Return the function of the instruction `name`, one of `INSTRUCTIONS`."""
        ...

    def load_vector(self, lane: str, nbytes: int) -> Function:
        """Return ``load(address, offset)``, which loads the lanes of one vector as a tuple.

        The vector has `nbytes` bytes, one of `VECTORS`, and is at ``address + offset``, which must
        be a multiple of `nbytes`.
        """
        ...

    def store_vector(self, lane: str, nbytes: int) -> Function:
        """Return ``store(address, offset, lanes)``, which stores a tuple of lanes as one vector.

        For the size and the address of the vector, see `load_vector`.
        """
        ...

    def load_element(self, lane: str, itemsize: int) -> Function:
        """Return ``load(address, offset)``, which loads one element of `itemsize` bytes.

        The result is a lane of type `lane`. The element is at ``address + offset``, which must be
        aligned to the element, or to one part of a complex number.
        """
        ...

    def store_element(self, lane: str, itemsize: int) -> Function:
        """Return ``store(address, offset, value)``, which stores the first element of a lane.

        The element has `itemsize` bytes; for its address, see `load_element`.
        """
        ...

    def routine(self, function: Function, result: str, *operands: str) -> Function:
        """Return a function that kernels can call, made from a Python function.

        `result` and `operands` are the lane types of its result and of its parameters.
        """
        ...


__all__ = [
    "INSTRUCTIONS",
    "LANES",
    "PTX_VERSION",
    "TARGET",
    "VECTORS",
    "Function",
    "InstructionSet",
]

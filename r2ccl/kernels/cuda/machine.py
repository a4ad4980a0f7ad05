"""The instruction set that kernels are written in, and its interface.

Two modules implement `InstructionSet`: `r2ccl.kernels.cuda.primitives` in inline PTX for a GPU,
`r2ccl.kernels.cuda.twins` in NumPy for the simulator. Must not import either.

A *lane* is the unit of arithmetic: one or two registers. Invariant: a lane holds one element, or
several independent ones; unused bits are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Function = Callable[..., Any]

#: Bytes of a vector, which one thread moves at once.
VECTOR = 16

#: Kinds of lanes and their bytes. ``x2`` are two registers, as a tuple: a complex number, or two
#: halves in float32. Halves and integers of 8 and 16 bits lie packed in ``u32``. A routine also
#: takes and returns tuples of them: ``f32[4]`` is one of four, ``f32[4][2]`` two of those.
LANES = {"u32": 4, "u64": 8, "f32": 4, "f64": 8, "f32x2": 8, "f64x2": 16}

#: Instructions: their result and operands. Everything is rounded to nearest, ties to even, once;
#: subnormal numbers are numbers; a minimum or maximum is NaN where either operand is, and -0 is
#: below +0 (PTX ISA, ``min`` and ``max``). ``narrow`` rounds, ``widen`` is exact; division of
#: integers truncates toward zero; ``advance`` is an addition that compilers do not see through.
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
    """Provides the functions that kernels call."""

    def instruction(self, name: str) -> Function:
        """Return one of `INSTRUCTIONS`."""
        ...

    def load_vector(self, lane: str) -> Function:
        """Return ``load(address, offset)``: the lanes of `VECTOR` bytes, aligned to as many."""
        ...

    def store_vector(self, lane: str) -> Function:
        """Return ``store(address, offset, lanes)``."""
        ...

    def load_element(self, lane: str, itemsize: int) -> Function:
        """Return ``load(address, offset)``: the lane of one element, aligned as its parts are."""
        ...

    def store_element(self, lane: str, itemsize: int) -> Function:
        """Return ``store(address, offset, lane)``; what a lane holds besides it is left out."""
        ...

    def routine(self, function: Function, result: str, *operands: str) -> Function:
        """Make a Python function of these types callable from a kernel."""
        ...


__all__ = ["INSTRUCTIONS", "LANES", "VECTOR", "Function", "InstructionSet"]

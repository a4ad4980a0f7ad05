"""Arithmetic of integers in lanes: one of 32 or 64 bits, two of 16 bits, or four of 8 bits.

As in `r2ccl.kernels.cuda.arithmetic`, both Numba and NumPy run these functions; this module must
not import Numba.

Invariants: integers wrap, and integers in the same lane do not affect each other. Every expression
is converted to its type at once, because Numba computes in 64 bits and NumPy does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from r2ccl.kernels.cuda.machine import Function, InstructionSet
from r2ccl.types import ReduceOp

_U32 = np.uint32


def combine_integers(machine: InstructionSet, name: str, op: ReduceOp) -> Function:
    """Return ``combine(left, right)`` for lanes of integers of dtype `name`."""
    bits, is_signed = _split(name)
    if bits == 64:
        chosen = _whole(op, np.uint64, np.int64 if is_signed else np.uint64)
        return machine.routine(chosen, "u64", "u64", "u64")
    if bits == 32:
        chosen = _whole(op, _U32, np.int32 if is_signed else _U32)
        return machine.routine(chosen, "u32", "u32", "u32")
    if op is ReduceOp.SUM:
        return machine.routine(_sum(bits), "u32", "u32", "u32")
    one = machine.routine(_one(op, bits, is_signed), "u32", "u32", "u32", "u32")
    return machine.routine(_each(one, bits), "u32", "u32", "u32")


def divide_integers(machine: InstructionSet, name: str) -> Function:
    """Return ``leave(lane, divisor)``, which divides every integer, truncating toward zero."""
    bits, is_signed = _split(name)
    kind = ("s" if is_signed else "u") + str(max(bits, 32))
    div = machine.instruction(f"div.{kind}")
    if bits >= 32:
        word, signed = (np.uint64, np.int64) if bits == 64 else (_U32, np.int32)
        lane = f"u{bits}"
        if not is_signed:
            return div
        return machine.routine(lambda a, divisor: word(div(signed(a), divisor)), lane, lane, kind)
    one = machine.routine(_one_divided(div, bits, is_signed), "u32", "u32", kind, "u32")
    return machine.routine(_each(one, bits), "u32", "u32", kind)


def _split(name: str) -> tuple[int, bool]:
    return int(name.removeprefix("u").removeprefix("int")), name.startswith("int")


def _whole(op: ReduceOp, word: Any, compared: Any) -> Function:
    """Return ``f(left, right)`` for lanes of one integer; MIN and MAX compare as `compared`."""
    if op is ReduceOp.SUM:
        return lambda a, b: word(a + b)
    if op is ReduceOp.PROD:
        return lambda a, b: word(a * b)
    if op is ReduceOp.MIN:
        return lambda a, b: a if compared(a) < compared(b) else b
    return lambda a, b: a if compared(a) > compared(b) else b


def _sum(bits: int) -> Function:
    """Return a function that adds two lanes, all integers at once, without carries between them."""
    ones = (2**32 - 1) // (2**bits - 1)
    uppermost = _U32(ones << (bits - 1))
    lower = _U32(~uppermost)
    return lambda a, b: _U32(((a & lower) + (b & lower)) ^ ((a ^ b) & uppermost))


def _one(op: ReduceOp, bits: int, is_signed: bool) -> Function:
    """Return ``one(left, right, shift)``, which combines one integer of each lane.

    The integer begins `shift` bits below the top of the lane. It is shifted to the top, so that its
    sign bit is that of the lane and a comparison does not depend on the bits below it. The result
    is shifted back.
    """
    top = 32 - bits
    moved = np.int32 if is_signed else _U32
    mask = _U32((2**bits - 1) << top)

    def product(a: Any, b: Any, shift: Any) -> Any:
        x, y = _U32(_U32(a << shift) >> top), _U32(_U32(b << shift) >> top)
        return _U32(_U32((x * y) << top) >> shift)

    def minimum(a: Any, b: Any, shift: Any) -> Any:
        x, y = moved(_U32(a << shift)), moved(_U32(b << shift))
        return _U32(_U32(_U32(x if x < y else y) & mask) >> shift)

    def maximum(a: Any, b: Any, shift: Any) -> Any:
        x, y = moved(_U32(a << shift)), moved(_U32(b << shift))
        return _U32(_U32(_U32(x if x > y else y) & mask) >> shift)

    return {ReduceOp.PROD: product, ReduceOp.MIN: minimum, ReduceOp.MAX: maximum}[op]


def _one_divided(div: Function, bits: int, is_signed: bool) -> Function:
    """Return ``one(lane, divisor, shift)``, which divides one integer of a lane; see `_one`."""
    top = 32 - bits
    moved = np.int32 if is_signed else _U32

    def divide(a: Any, divisor: Any, shift: Any) -> Any:
        return _U32(_U32(div(moved(_U32(a << shift)) >> top, divisor) << top) >> shift)

    return divide


def _each(one: Function, bits: int) -> Function:
    """Return a function for all integers in a lane, given the function for one integer."""
    if bits == 16:
        return lambda a, b: _U32(one(a, b, _U32(0)) | one(a, b, _U32(16)))
    return lambda a, b: _U32(
        one(a, b, _U32(0)) | one(a, b, _U32(8)) | one(a, b, _U32(16)) | one(a, b, _U32(24))
    )


__all__ = ["combine_integers", "divide_integers"]

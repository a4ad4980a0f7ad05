"""Instruction set in plain Python for Numba's simulator, on host memory.

The module implements `r2ccl.kernels.cuda.machine.InstructionSet` with NumPy scalars, one thread at
a time. It is slow, and used only by tests. It must not import Numba.

Invariant: an access at an unaligned address, which a GPU would refuse, raises an error here.
"""

from __future__ import annotations

import ctypes
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from r2ccl.errors import InternalError
from r2ccl.kernels.cuda.machine import Function

_SCALARS: dict[str, Any] = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "f32": np.float32,
    "f64": np.float64,
}
_HALVES: dict[str, Any] = {"f16x2": np.float16, "bf16x2": ml_dtypes.bfloat16}


def instruction(name: str) -> Function:
    """Implement `InstructionSet.instruction`; NumPy's floating-point warnings are switched off."""
    quiet: Function = np.errstate(all="ignore")(_instruction(*name.split(".")))
    return quiet


def _instruction(operation: str, kind: str) -> Function:
    if operation == "fma":
        return _fused_multiply_add
    if operation == "widen":
        return lambda word: tuple(np.array([word]).view(_HALVES[kind]).astype(np.float32))
    if operation == "narrow":
        return lambda pair: np.array(pair, np.float32).astype(_HALVES[kind]).view(np.uint32)[0]
    function = _BINARY[operation]
    if kind in _HALVES:
        return lambda a, b: _packed(function, _HALVES[kind], a, b)
    scalar = _SCALARS[kind]
    return lambda a, b: scalar(function(scalar(a), scalar(b)))


def load_vector(lane: str, nbytes: int) -> Function:
    """Implement `InstructionSet.load_vector`."""
    scalar, nregisters = _SCALARS[lane[:3]], _nregisters(lane)

    def load(address: int, offset: int) -> tuple[Any, ...]:
        registers = tuple(_memory(address + offset, scalar, nbytes // scalar().itemsize, nbytes))
        if nregisters == 1:
            return registers
        return tuple(zip(registers[::2], registers[1::2], strict=True))

    return load


def store_vector(lane: str, nbytes: int) -> Function:
    """Implement `InstructionSet.store_vector`."""
    scalar = _SCALARS[lane[:3]]

    def store(address: int, offset: int, lanes: tuple[Any, ...]) -> None:
        _memory(address + offset, scalar, nbytes // scalar().itemsize, nbytes)[:] = np.ravel(lanes)

    return store


def load_element(lane: str, itemsize: int) -> Function:
    """Implement `InstructionSet.load_element`."""
    scalar, nregisters = _SCALARS[lane[:3]], _nregisters(lane)
    stored = _stored(lane, itemsize)

    def load(address: int, offset: int) -> Any:
        registers = [scalar(each) for each in _memory(address + offset, stored, nregisters)]
        return registers[0] if nregisters == 1 else tuple(registers)

    return load


def store_element(lane: str, itemsize: int) -> Function:
    """Implement `InstructionSet.store_element`."""
    stored, nregisters = _stored(lane, itemsize), _nregisters(lane)

    def store(address: int, offset: int, value: Any) -> None:
        _memory(address + offset, stored, nregisters)[:] = np.asarray(value).astype(stored)

    return store


def routine(function: Function, result: str, *operands: str) -> Function:
    """Implement `InstructionSet.routine` by returning the function unchanged."""
    return function


def _nregisters(lane: str) -> int:
    return 2 if lane.endswith("x2") else 1


def _stored(lane: str, itemsize: int) -> Any:
    """Return the NumPy type of the part of a stored element that one register holds.

    The type may be narrower than the register.
    """
    return np.dtype(f"{lane[0]}{itemsize // _nregisters(lane)}").type


def _memory(address: int, scalar: Any, count: int, alignment: int = 0) -> Any:
    """Return an array of `count` values at an address.

    `alignment` is the alignment in bytes that the address must have; 0: the size of one value.

    Raises
    ------
    InternalError
        If the address is not aligned.
    """
    nbytes = scalar().itemsize
    if address % (alignment or nbytes):
        raise InternalError(f"address {address:#x} is not aligned to {alignment or nbytes} bytes")
    return np.frombuffer((ctypes.c_uint8 * (count * nbytes)).from_address(int(address)), scalar)


def _packed(function: Function, half: Any, a: Any, b: Any) -> Any:
    """Apply a function to two words, each of two 16-bit floats; return the resulting word."""
    left, right = (np.array([word], np.uint32).view(half) for word in (a, b))
    return function(left, right).astype(half).view(np.uint32)[0]


def _divide(a: Any, b: Any) -> Any:
    if isinstance(a, np.floating):
        return np.divide(a, b)
    quotient = abs(int(a)) // abs(int(b))
    return quotient if (a < 0) == (b < 0) else -quotient


def _minimum(a: Any, b: Any) -> Any:
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.minimum(a, b))


def _maximum(a: Any, b: Any) -> Any:
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.maximum(a, b))


def _fused_multiply_add(a: Any, b: Any, c: Any) -> Any:
    plain = a * b + c
    if not all(map(np.isfinite, (a, b, c))):
        return plain
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    return _rounded(exact, type(a)) if exact else plain


def _rounded(exact: Fraction, scalar: Any) -> Any:
    """Return a fraction rounded once to the float type `scalar`: to nearest, ties to even.

    A conversion through float64 alone would round twice.
    """
    try:
        near = scalar(float(exact))
    except OverflowError:
        return scalar(np.copysign(np.inf, exact.numerator))
    if not np.isfinite(near):
        return near
    around = [near, np.nextafter(near, scalar(-np.inf)), np.nextafter(near, scalar(np.inf))]
    bits = np.uint32 if scalar is np.float32 else np.uint64

    def distance(each: Any) -> tuple[Fraction, int]:
        return abs(exact - Fraction(float(each))), int(each.view(bits) & bits(1))

    return min((each for each in around if np.isfinite(each)), key=distance)


_BINARY: dict[str, Function] = {
    "add": np.add,
    "advance": np.add,
    "mul": np.multiply,
    "div": _divide,
    "min": _minimum,
    "max": _maximum,
}

__all__ = [
    "instruction",
    "load_element",
    "load_vector",
    "routine",
    "store_element",
    "store_vector",
]

"""Arithmetic of one lane: converting an input, combining two, converting the result for storing.

The functions use only what Numba can compile and NumPy can also run, on the instructions of a given
`InstructionSet`, so the simulator runs the same source lines as a GPU. This module must not import
Numba.

Invariant: the result of an element does not depend on other elements in its lane.
"""

from __future__ import annotations

from typing import Any

import msgspec

from r2ccl.dtypes import dtype_name
from r2ccl.kernels.cuda.form import Form
from r2ccl.kernels.cuda.integers import combine_integers, divide_integers
from r2ccl.kernels.cuda.machine import Function, InstructionSet
from r2ccl.types import ReduceOp

_OPERATIONS = {
    ReduceOp.SUM: "add",
    ReduceOp.PROD: "mul",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
}
_PACKED = {"float16": "f16x2", "bfloat16": "bf16x2"}
_LANES = {
    "uint64": "u64",
    "int64": "u64",
    "float32": "f32",
    "float64": "f64",
    "complex64": "f32x2",
    "complex128": "f64x2",
}


class Arithmetic(msgspec.Struct, frozen=True):
    """Functions that compute one form; a function is None if it would change nothing.

    Parameters
    ----------
    lane : str
        Lane type in memory, one of `r2ccl.kernels.cuda.machine.LANES`.
    enter : callable or None
        ``enter(lane)`` converts an unscaled input to an accumulator.
    scale : callable or None
        ``scale(lane, factor)`` converts a scaled input to an accumulator.
    combine : callable
        ``combine(left, right)`` combines two accumulators.
    leave : callable or None
        ``leave(accumulator)`` converts an accumulator to the lane to store;
        ``leave(accumulator, divisor)`` if the form divides.
    """

    lane: str
    enter: Function | None
    scale: Function | None
    combine: Function
    leave: Function | None


def lane_of(form: Form) -> str:
    """Return the lane type of a canonical form in memory."""
    return _LANES.get(dtype_name(form.dtype_code), "u32")


def numbers_of(form: Form) -> tuple[str, str]:
    """Return the types of the factor and the divisor, the two numbers passed at launch."""
    name = dtype_name(form.dtype_code)
    if "int" in name:
        return "f32", ("u" if name.startswith("u") else "s") + ("64" if "64" in name else "32")
    kind = "f64" if name in ("float64", "complex128") else "f32"
    return kind, kind


def arithmetic(form: Form, machine: InstructionSet) -> Arithmetic:
    """Return the functions that compute a canonical form."""
    name = dtype_name(form.dtype_code)
    if name in _PACKED:
        return (_wide if form.is_wide else _packed)(form, machine, _PACKED[name])
    if name.startswith("complex"):
        return _complex(form, machine, _LANES[name])
    if name.startswith("float"):
        return _real(form, machine, _LANES[name])
    leave = divide_integers(machine, name) if form.is_divided else None
    combine = combine_integers(machine, name, form.op)
    return Arithmetic(lane_of(form), None, None, combine, leave)


def _real(form: Form, machine: InstructionSet, kind: str) -> Arithmetic:
    def named(operation: str) -> Function:
        return machine.instruction(f"{operation}.{kind}")

    scale, leave = named("mul"), named("div")
    return Arithmetic(
        kind,
        None,
        scale if form.is_scaled else None,
        named(_OPERATIONS[form.op]),
        leave if form.is_divided else None,
    )


def _complex(form: Form, machine: InstructionSet, kind: str) -> Arithmetic:
    """Return the functions of complex numbers, which only occur in products.

    `canonical` turns their sums into sums of reals. Each part of a product is one multiplication
    and one fused multiply-add, like NumPy's loops on processors with FMA (FMA3, NEON).
    """
    part = kind[:3]
    mul, fma = machine.instruction(f"mul.{part}"), machine.instruction(f"fma.{part}")

    def product(a: Any, b: Any) -> Any:
        return fma(a[0], b[0], -mul(a[1], b[1])), fma(a[0], b[1], mul(a[1], b[0]))

    def scale(a: Any, factor: Any) -> Any:
        return mul(a[0], factor), mul(a[1], factor)

    return Arithmetic(
        kind,
        None,
        machine.routine(scale, kind, kind, part) if form.is_scaled else None,
        machine.routine(product, kind, kind, kind),
        None,
    )


def _packed(form: Form, machine: InstructionSet, half: str) -> Arithmetic:
    """Return the functions of two 16-bit floats in one register, rounded at every step."""
    widen, narrow = machine.instruction(f"widen.{half}"), machine.instruction(f"narrow.{half}")

    def by(operation: str) -> Function:
        function = machine.instruction(f"{operation}.f32")

        def apply(word: Any, number: Any) -> Any:
            pair = widen(word)
            return narrow((function(pair[0], number), function(pair[1], number)))

        return machine.routine(apply, "u32", "u32", "f32")

    return Arithmetic(
        "u32",
        None,
        by("mul") if form.is_scaled else None,
        machine.instruction(f"{_OPERATIONS[form.op]}.{half}"),
        by("div") if form.is_divided else None,
    )


def _wide(form: Form, machine: InstructionSet, half: str) -> Arithmetic:
    """Return the functions of two 16-bit floats computed in float32, rounded once at the end."""
    widen, narrow = machine.instruction(f"widen.{half}"), machine.instruction(f"narrow.{half}")
    mul, div = machine.instruction("mul.f32"), machine.instruction("div.f32")
    function = machine.instruction(f"{_OPERATIONS[form.op]}.f32")

    def scale(word: Any, factor: Any) -> Any:
        pair = widen(word)
        return mul(pair[0], factor), mul(pair[1], factor)

    def combine(a: Any, b: Any) -> Any:
        return function(a[0], b[0]), function(a[1], b[1])

    def divide(pair: Any, divisor: Any) -> Any:
        return narrow((div(pair[0], divisor), div(pair[1], divisor)))

    return Arithmetic(
        "u32",
        widen,
        machine.routine(scale, "f32x2", "u32", "f32") if form.is_scaled else None,
        machine.routine(combine, "f32x2", "f32x2", "f32x2"),
        machine.routine(divide, "u32", "f32x2", "f32") if form.is_divided else narrow,
    )


__all__ = ["Arithmetic", "arithmetic", "lane_of", "numbers_of"]

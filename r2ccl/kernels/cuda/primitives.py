"""Instruction set of a GPU: inline PTX, and routines that Numba compiles.

The module implements `r2ccl.kernels.cuda.machine.InstructionSet`. Importing it imports Numba.

Invariants: every floating-point instruction that rounds names its rounding mode, so no compiler
fuses two of them; loads and stores keep their order in the source. Requires compute capability 8.0.

References
----------
PTX ISA, chapter "Instruction Set". bfloat16 sums and products use ``fma.rn.bf16x2``, which compute
capability 8.0 has, because ``add.rn.bf16x2`` needs 9.0: ``a + b`` is ``a * 1 + b`` and ``a * b`` is
``a * b + (-0)``, both exact before the single rounding, and with the right sign of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.cuda import cgutils
from numba.cuda.extending import intrinsic

from r2ccl.kernels.cuda.machine import INSTRUCTIONS, LANES, Function

_TYPES: dict[str, Any] = {
    "u32": types.uint32,
    "s32": types.int32,
    "u64": types.uint64,
    "s64": types.int64,
    "f32": types.float32,
    "f64": types.float64,
    "f32x2": types.UniTuple(types.float32, 2),
    "f64x2": types.UniTuple(types.float64, 2),
}
#: Constraint letter of an operand's register in inline PTX.
_LETTERS = {
    types.uint32: "r",
    types.int32: "r",
    types.uint64: "l",
    types.int64: "l",
    types.float32: "f",
    types.float64: "d",
}

_BINARY = "{} $0, $1, $2;"
_BFLOAT16 = "{{.reg .b32 c; mov.b32 c, {}; fma.rn.bf16x2 $0, {};}}"
# PTX has no ``min.NaN.f64``.
_ORDERED_F64 = (
    "{{.reg .pred p; .reg .f64 t; {0}.f64 t, $1, $2; setp.nan.f64 p, $1, $2; "
    "selp.f64 $0, 0d7FF8000000000000, t, p;}}"
)

#: PTX of the instructions with another name or form in PTX; ``$0`` is the result's first register.
_TEXTS = {
    "min.f32": _BINARY.format("min.NaN.f32"),
    "max.f32": _BINARY.format("max.NaN.f32"),
    "min.f64": _ORDERED_F64.format("min"),
    "max.f64": _ORDERED_F64.format("max"),
    "fma.f32": "fma.rn.f32 $0, $1, $2, $3;",
    "fma.f64": "fma.rn.f64 $0, $1, $2, $3;",
    "min.f16x2": _BINARY.format("min.NaN.f16x2"),
    "max.f16x2": _BINARY.format("max.NaN.f16x2"),
    "min.bf16x2": _BINARY.format("min.NaN.bf16x2"),
    "max.bf16x2": _BINARY.format("max.NaN.bf16x2"),
    "add.bf16x2": _BFLOAT16.format("0x3F803F80", "$1, c, $2"),
    "mul.bf16x2": _BFLOAT16.format("0x80008000", "$1, $2, c"),
    "widen.f16x2": "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}",
    # A bfloat16 is the upper half of a float32; `cvt.f32.bf16` needs compute capability 9.0.
    "widen.bf16x2": (
        "{.reg .b32 l, h; shl.b32 l, $2, 16; and.b32 h, $2, 0xFFFF0000; "
        "mov.b32 $0, l; mov.b32 $1, h;}"
    ),
    "narrow.f16x2": "cvt.rn.f16x2.f32 $0, $2, $1;",
    "narrow.bf16x2": "cvt.rn.bf16x2.f32 $0, $2, $1;",
    "advance.s64": _BINARY.format("add.s64"),
}


def type_of(kind: str) -> Any:
    """Return Numba's type for a lane type of `r2ccl.kernels.cuda.machine`, or for tuples of it."""
    name, *counts = kind.replace("]", "").split("[")
    made = _TYPES[name]
    for count in counts:
        made = types.UniTuple(made, int(count))
    return made


def instruction(name: str) -> Function:
    """Implement `InstructionSet.instruction` with inline PTX."""
    result, *operands = (type_of(kind) for kind in INSTRUCTIONS[name])
    operation, kind = name.split(".")
    rounding = ".rn" if "f" in kind else ""
    text = _TEXTS.get(name) or _BINARY.format(f"{operation}{rounding}.{kind}")

    def generate(context: Any, builder: Any, _: Any, values: Sequence[Any]) -> Any:
        return _inline(context, builder, text, result, operands, values)

    return _intrinsic(result(*operands), generate)


def load_vector(lane: str, nbytes: int) -> Function:
    """Implement `InstructionSet.load_vector` with one load."""
    lanes = type_of(f"{lane}[{nbytes // LANES[lane]}]")
    registers = [f"${i}" for i in range(len(_leaves(lanes)))]
    kind, operand = _transferred(lane, registers)
    return _access(f"ld.global.{kind} {operand}, [${len(registers)}];", lanes)


def store_vector(lane: str, nbytes: int) -> Function:
    """Implement `InstructionSet.store_vector` with one store."""
    lanes = type_of(f"{lane}[{nbytes // LANES[lane]}]")
    kind, operand = _transferred(lane, [f"${i + 1}" for i in range(len(_leaves(lanes)))])
    return _access(f"st.global.{kind} [$0], {operand};", types.void, lanes)


def load_element(lane: str, itemsize: int) -> Function:
    """Implement `InstructionSet.load_element` with one load per register."""
    kind, nbytes, count = _registers(lane, itemsize)
    text = " ".join(f"ld.global.{kind} ${i}, [${count}+{i * nbytes}];" for i in range(count))
    return _access(text, _TYPES[lane])


def store_element(lane: str, itemsize: int) -> Function:
    """Implement `InstructionSet.store_element` with one store per register."""
    kind, nbytes, count = _registers(lane, itemsize)
    text = " ".join(f"st.global.{kind} [$0+{i * nbytes}], ${i + 1};" for i in range(count))
    return _access(text, types.void, _TYPES[lane])


def routine(function: Function, result: str, *operands: str) -> Function:
    """Implement `InstructionSet.routine`; the function is compiled once, and inlined by NVVM."""
    signature = type_of(result)(*(type_of(kind) for kind in operands))
    compiled: list[Any] = []

    def generate(context: Any, builder: Any, _: Any, values: Sequence[Any]) -> Any:
        # Numba's own cache would confuse functions with equal code and different globals.
        if not compiled:
            made = context.compile_subroutine(builder, function, signature, caching=False)
            compiled.append(made)
        context.active_code_library.add_linking_library(compiled[0].library)
        return context.call_internal(builder, compiled[0].fndesc, signature, values)

    return _intrinsic(signature, generate)


def _transferred(lane: str, registers: Sequence[str]) -> tuple[str, str]:
    """Return the PTX type and operand with which one instruction loads or stores `registers`."""
    if len(registers) == 1:
        return lane[:3], registers[0]
    return f"v{len(registers)}.{lane[:3]}", f"{{{', '.join(registers)}}}"


def _registers(lane: str, itemsize: int) -> tuple[str, int, int]:
    """Return the PTX type, the size in memory in bytes and the number of an element's registers."""
    count = len(_leaves(_TYPES[lane]))
    nbytes = itemsize // count
    return f"{lane[0]}{8 * nbytes}", nbytes, count


def _access(text: str, result: Any, *stored: Any) -> Function:
    """Return a function of an address, an offset and, for stores, the value to store."""

    def generate(context: Any, builder: Any, _: Any, values: Sequence[Any]) -> Any:
        address, offset, *rest = values
        given = [builder.add(address, offset), *rest]
        operands = (types.int64, *stored)
        return _inline(context, builder, text, result, operands, given, is_ordered=True)

    return _intrinsic(result(types.int64, types.int64, *stored), generate)


def _inline(
    context: Any, builder: Any, text: str, result: Any, operands: Sequence[Any],
    values: Sequence[Any], *, is_ordered: bool = False,
) -> Any:  # fmt: skip
    """Emit the inline PTX `text`, and return its result of type `result`.

    A tuple among the operands and in the result takes one register per item. If `is_ordered`, the
    compiler keeps the order of this PTX and of other such PTX.
    """
    registers: list[Any] = []
    for kind, value in zip(operands, values, strict=True):
        registers += _flatten(builder, kind, value)
    outputs = _leaves(result)
    inputs = [leaf for operand in operands for leaf in _leaves(operand)]
    letters = ["=" + _LETTERS[leaf] for leaf in outputs] + [_LETTERS[leaf] for leaf in inputs]
    returned = _returned([context.get_value_type(leaf) for leaf in outputs])
    asm = ir.FunctionType(returned, [value.type for value in registers])
    given = builder.asm(asm, text, ",".join(letters), registers, side_effect=is_ordered)
    if not outputs:
        return context.get_dummy_value()
    many = len(outputs) > 1
    parts = cgutils.unpack_tuple(builder, given, len(outputs)) if many else [given]
    return _nest(builder, result, iter(parts))


def _returned(outputs: list[Any]) -> Any:
    """Return the LLVM return type of inline PTX with these outputs."""
    if not outputs:
        return ir.VoidType()
    return outputs[0] if len(outputs) == 1 else ir.LiteralStructType(outputs)


def _leaves(kind: Any) -> list[Any]:
    """Return the register types of a value, which may be a tuple of tuples."""
    if kind is types.void:
        return []
    if isinstance(kind, types.BaseTuple):
        return [leaf for part in kind for leaf in _leaves(part)]
    return [kind]


def _flatten(builder: Any, kind: Any, value: Any) -> list[Any]:
    """Return the registers of a value, which may be a tuple of tuples."""
    if not isinstance(kind, types.BaseTuple):
        return [value]
    parts = cgutils.unpack_tuple(builder, value, len(kind))
    return [
        leaf
        for part_kind, part in zip(kind, parts, strict=True)
        for leaf in _flatten(builder, part_kind, part)
    ]


def _nest(builder: Any, kind: Any, registers: Iterator[Any]) -> Any:
    """Build a value of type `kind` from its registers; the inverse of `_flatten`."""
    if not isinstance(kind, types.BaseTuple):
        return next(registers)
    return cgutils.pack_array(builder, [_nest(builder, part, registers) for part in kind])


def _intrinsic(signature: Any, generate: Function) -> Function:
    """Return an intrinsic with one signature, of one to three arguments.

    Numba needs a typing function with an explicit parameter for each argument, not ``*args``.
    """

    def unary(typing_context: Any, a: Any) -> Any:
        return signature, generate

    def binary(typing_context: Any, a: Any, b: Any) -> Any:
        return signature, generate

    def ternary(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
        return signature, generate

    declared: Function = intrinsic((unary, binary, ternary)[len(signature.args) - 1])
    return declared


__all__ = [
    "instruction",
    "load_element",
    "load_vector",
    "routine",
    "store_element",
    "store_vector",
    "type_of",
]

"""The one kernel: its source for a form, and the function made of it for a machine.

The source is flat and calls nothing but what the machine gives: a function of the GPU that another
calls Numba compiles only where a GPU is present, or joins to its callers at ten times the cost.

A thread takes every `nthreads`-th vector; where there is enough, several at once, all of them read
before one is written, so that many reads are under way. Before the first and after the last
multiple of 16 bytes, and everywhere if inputs and outputs do not share these, it takes single
elements. An output may be exactly an input: nobody else reads what a thread writes.

A loop goes on by ``advance``, an addition that the compiler does not see: where it does, it unrolls
the loop once more, after a division of 64 bits to learn how often it runs.

Must not import Numba. Invariant: operands are combined from the left, in the order of the inputs.
"""

from __future__ import annotations

import linecache
from typing import Any, NamedTuple

import numpy as np

from r2ccl.kernels.cuda.arithmetic import arithmetic, lane_of, numbers_of
from r2ccl.kernels.cuda.form import Form
from r2ccl.kernels.cuda.machine import LANES, VECTOR, Function, InstructionSet

#: Reads that a thread has under way at once, if its inputs are so few: 8 of 16 bytes by 1,024
#: threads are 128 KiB, over three times what 4.8 TB/s and 1 us ask of each of 132 multiprocessors.
_READS = 8
_MOST_AT_ONCE = 4


class _Unit(NamedTuple):
    """Unit that a thread moves at once: a vector of lanes, or one element, which is one lane."""

    name: str
    nbytes: int
    kind: str
    nlanes: int


def source(form: Form) -> str:
    """Write the kernel of a canonical form in Python, and before it what it does to one unit.

    Its arguments are `parameters`, then ``factor`` and ``divisor``.
    """
    element, vector = _units(form)
    lines = [
        *_result_of(form, element),
        *_result_of(form, vector),
        f"def {form.name}({', '.join(parameters(form))}, factor, divisor):",
        "    thread = cuda.grid(1)",
        "    nthreads = cuda.gridsize(1)",
    ]
    if form.has_table:
        lines += _look_up(_operands(form))
    lines += _work(form)
    return "\n".join(lines) + "\n"


def parameters(form: Form) -> list[str]:
    """Name a kernel's arguments of 64 bits.

    They are the addresses of the inputs, then of the outputs, or that of the table which has them,
    and ``nbytes`` of each.
    """
    return [*(["table"] if form.has_table else _operands(form)), "nbytes"]


def units_at_once(form: Form) -> int:
    """Say how many units of each input a thread reads before it writes one."""
    most = _MOST_AT_ONCE // 2 if form.is_divided else _MOST_AT_ONCE  # division takes registers
    return max(1, min(most, _READS // form.ninputs))


def build(form: Form, machine: InstructionSet, cuda: Any) -> Function:
    """Make the kernel of a canonical form.

    Parameters
    ----------
    form : Form
    machine : InstructionSet
    cuda : module
        ``numba.cuda``, or the simulator in its place.
    """
    lines = source(form)
    name = f"<{form.name}>"
    # Where Numba and tracebacks look for the lines of a function.
    linecache.cache[name] = (len(lines), None, lines.splitlines(keepends=True), name)
    calls = arithmetic(form, machine)
    scope: dict[str, Any] = {
        "cuda": cuda,
        "int64": np.int64,
        "advance": machine.instruction("advance.s64"),
        "load_address": machine.load_element("u64", 8),
        "load_vector": machine.load_vector(calls.lane),
        "store_vector": machine.store_vector(calls.lane),
        "load_element": machine.load_element(calls.lane, form.itemsize),
        "store_element": machine.store_element(calls.lane, form.itemsize),
        **{each: getattr(calls, each) for each in ("enter", "scale", "combine", "leave")},
    }
    exec(compile(lines, name, "exec"), scope)
    for unit in _units(form):
        result = f"result_of_{unit.name}"
        operands = (f"{unit.kind}[{form.ninputs}]", *numbers_of(form))
        scope[result] = machine.routine(scope[result], unit.kind, *operands)
    kernel: Function = scope[form.name]
    return kernel


def _units(form: Form) -> tuple[_Unit, _Unit]:
    lane = lane_of(form)
    nlanes = VECTOR // LANES[lane]
    return (
        _Unit("element", form.itemsize, lane, 1),
        _Unit("vector", VECTOR, f"{lane}[{nlanes}]", nlanes),
    )


def _names(kind: str, number: int) -> list[str]:
    return [f"{kind}{i}" for i in range(number)]


def _operands(form: Form) -> list[str]:
    return _names("input", form.ninputs) + _names("output", form.noutputs)


def _work(form: Form) -> list[str]:
    """Write all that is done to the operands."""
    element, vector = _units(form)
    at_once = units_at_once(form)
    return [
        *_split(form),
        *_sweep(form, element, "0", "head", at_once),
        *_sweep(form, vector, "head", "body", at_once),
        *_sweep(form, element, "body", "nbytes", 1),
    ]


def _look_up(operands: list[str]) -> list[str]:
    """Write how the addresses are read: once a block, for the table may lie in host memory."""
    return [
        f"    table_of_block = cuda.shared.array({len(operands)}, int64)",
        "    i = cuda.threadIdx.x",
        f"    while i < {len(operands)}:",
        "        table_of_block[i] = load_address(table, 8 * i)",
        "        i += cuda.blockDim.x",
        "    cuda.syncthreads()",
        *(f"    {name} = table_of_block[{i}]" for i, name in enumerate(operands)),
        # Whoever fills the table gave up.
        f"    if {operands[0]} == 0:",
        "        nbytes = int64(0)",
    ]


def _split(form: Form) -> list[str]:
    """Write where vectors begin and end: nowhere if the addresses do not allow any."""
    first, *rest = _operands(form)
    differ = " | ".join(f"({name} ^ {first})" for name in rest)
    return [
        f"    differ = {differ}",
        f"    head = -{first} & {VECTOR - 1}",
        f"    if (differ & {VECTOR - 1}) != 0 or (head & {form.itemsize - 1}) != 0:",
        "        head = nbytes",
        "    head = min(head, nbytes)",
        f"    body = nbytes - ((nbytes - head) & {VECTOR - 1})",
    ]


def _sweep(form: Form, unit: _Unit, begin: str, end: str, at_once: int) -> list[str]:
    """Write the loops over the units from `begin` to `end`, in bytes."""
    lines = [
        f"    step = {unit.nbytes} * nthreads",
        f"    at = {begin} + {unit.nbytes} * thread",
    ]
    for number in dict.fromkeys((at_once, 1)):  # what is left over goes one by one
        last = f" + {number - 1} * step" if number > 1 else ""
        lines.append(f"    while at{last} < {end}:")
        places = ["at", *(f"at{i}" for i in range(1, number))]
        lines += [f"        {place} = at + {i} * step" for i, place in enumerate(places) if i]
        for i, place in enumerate(places):
            lines += [
                f"        {name}_{i} = load_{unit.name}({name}, {place})"
                for name in _names("input", form.ninputs)
            ]
        for i, place in enumerate(places):
            inputs = "".join(f"{name}_{i}, " for name in _names("input", form.ninputs))
            lines.append(f"        result = result_of_{unit.name}(({inputs}), factor, divisor)")
            lines += [
                f"        store_{unit.name}({name}, {place}, result)"
                for name in _names("output", form.noutputs)
            ]
        lines.append(f"        at = advance(at, {number} * step)")
    return lines


def _result_of(form: Form, unit: _Unit) -> list[str]:
    """Write the function from the inputs of one unit to what is stored."""
    inputs = [f"inputs[{i}]" for i in range(form.ninputs)]
    if unit.name == "vector":
        lanes = (_lane(form, [f"{each}[{i}]" for each in inputs]) for i in range(unit.nlanes))
        result = f"({', '.join(lanes)},)"
    else:
        result = _lane(form, inputs)
    return [f"def result_of_{unit.name}(inputs, factor, divisor):", f"    return {result}"]


def _lane(form: Form, inputs: list[str]) -> str:
    """Write the expression of one lane."""
    value = ""
    for i, each in enumerate(inputs):
        if form.is_scaled and not (i == 0 and form.is_resumed):
            entered = f"scale({each}, factor)"
        else:
            entered = f"enter({each})" if form.is_wide else each
        value = f"combine({value}, {entered})" if i else entered
    if form.is_divided:
        return f"leave({value}, divisor)"
    return f"leave({value})" if form.is_wide else value


__all__ = ["build", "parameters", "source", "units_at_once"]

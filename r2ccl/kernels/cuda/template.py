"""Generates the source of a form's kernel, and builds a function from the source.

The source is flat: the kernel calls only functions that the instruction set provides. Numba
compiles other device functions only on a machine with a GPU, or inlines them at ten times the cost.

A thread processes every `nthreads`-th vector. If there are enough vectors, it processes several at
once and reads all of them before it writes one, so that many reads are in flight. Vectors have 16
bytes if all operands have the same offset from a multiple of 16 bytes, else 8 or 4 bytes if they
have the same offset from a multiple of these. Single elements are processed before the first and
after the last vector, and everywhere if no vector of several elements is possible. An output may be
exactly an input, because no other thread reads what a thread writes.

Loops advance by ``advance``, an addition that the compiler cannot analyse. Otherwise the compiler
would unroll the loop once more, after a 64-bit division that computes the number of iterations.

Invariant: operands are combined from the left, in the order of the inputs. This module must not
import Numba.
"""

from __future__ import annotations

import itertools
import linecache
from typing import Any, NamedTuple

import numpy as np

from r2ccl.kernels.cuda.arithmetic import arithmetic, lane_of, numbers_of
from r2ccl.kernels.cuda.form import Form
from r2ccl.kernels.cuda.machine import LANES, VECTORS, Function, InstructionSet

#: Threads per block.
NTHREADS = 256
#: Least number of resident blocks per multiprocessor. It leaves 64 registers per thread, so ptxas
#: does not spill registers to fit more threads.
NBLOCKS_AT_ONCE = 4
#: Number of reads that a thread keeps in flight, if `_MOST_AT_ONCE` allows as many. 8 reads of 16
#: bytes by 1,024 threads are 128 KiB, over three times the bandwidth-delay product of one of 132
#: multiprocessors at 4.8 TB/s and 1 us.
_READS = 8
#: Largest number of units of each input that a thread reads before it writes one.
_MOST_AT_ONCE = 4


class _Unit(NamedTuple):
    """Unit that a thread loads or stores at once: a vector of lanes, or one element in one lane."""

    name: str
    nbytes: int
    kind: str
    nlanes: int


def source(form: Form) -> str:
    """Return the Python source of the kernel of a canonical form.

    It contains the kernel and the functions that the kernel calls: one computes an element of the
    result, the others a vector of each size. The arguments of the kernel are those in `parameters`,
    then ``factor`` and ``divisor``.
    """
    lines = [
        *(line for unit in _units(form) for line in _result_of(form, unit)),
        f"def {form.name}({', '.join(parameters(form))}, factor, divisor):",
        "    thread = cuda.grid(1)",
        "    nthreads = cuda.gridsize(1)",
    ]
    if form.has_table:
        lines += _look_up(_operands(form))
    lines += _work(form)
    return "\n".join(lines) + "\n"


def parameters(form: Form) -> list[str]:
    """Return the names of a kernel's arguments before ``factor`` and ``divisor``.

    All are 64-bit integers: the addresses of the inputs, then of the outputs, or instead the
    address of the table with these addresses; the last one is ``nbytes``, the size of each operand
    in bytes.
    """
    return [*(["table"] if form.has_table else _operands(form)), "nbytes"]


def units_at_once(form: Form) -> int:
    """Return how many units of each input a thread reads before it writes one."""
    most = _MOST_AT_ONCE // 2 if form.is_divided else _MOST_AT_ONCE  # division needs registers
    return max(1, min(most, _READS // form.ninputs))


def build(form: Form, machine: InstructionSet, cuda: Any) -> Function:
    """Build the kernel function of a canonical form.

    Parameters
    ----------
    form : Form
    machine : InstructionSet
    cuda : module
        ``numba.cuda``, or its simulator.
    """
    lines = source(form)
    name = f"<{form.name}>"
    # Numba and tracebacks look up the source lines of a function in `linecache`.
    linecache.cache[name] = (len(lines), None, lines.splitlines(keepends=True), name)
    calls = arithmetic(form, machine)
    scope: dict[str, Any] = {
        "cuda": cuda,
        "int64": np.int64,
        "advance": machine.instruction("advance.s64"),
        "load_address": machine.load_element("u64", 8),
        "load_element": machine.load_element(calls.lane, form.itemsize),
        "store_element": machine.store_element(calls.lane, form.itemsize),
        **{each: getattr(calls, each) for each in ("enter", "scale", "combine", "leave")},
    }
    exec(compile(lines, name, "exec"), scope)
    for unit in _vectors(form):
        scope[f"load_{unit.name}"] = machine.load_vector(calls.lane, unit.nbytes)
        scope[f"store_{unit.name}"] = machine.store_vector(calls.lane, unit.nbytes)
    for unit in _units(form):
        result = f"result_of_{unit.name}"
        operands = (f"{unit.kind}[{form.ninputs}]", *numbers_of(form))
        scope[result] = machine.routine(scope[result], unit.kind, *operands)
    kernel: Function = scope[form.name]
    return kernel


def _units(form: Form) -> list[_Unit]:
    return [_Unit("element", form.itemsize, lane_of(form), 1), *_vectors(form)]


def _vectors(form: Form) -> list[_Unit]:
    """Return the vectors of a kernel, the largest first.

    Vectors of less than 16 bytes have several elements: one element has its own unit.
    """
    lane = lane_of(form)
    return [
        _Unit(f"vector{nbytes}", nbytes, f"{lane}[{nbytes // LANES[lane]}]", nbytes // LANES[lane])
        for nbytes in VECTORS
        if nbytes == max(VECTORS) or nbytes > form.itemsize
    ]


def _names(kind: str, number: int) -> list[str]:
    return [f"{kind}{i}" for i in range(number)]


def _operands(form: Form) -> list[str]:
    return _names("input", form.ninputs) + _names("output", form.noutputs)


def _work(form: Form) -> list[str]:
    """Return the lines that process all operands: head, vectors of each size, and tail."""
    element, *vectors = _units(form)
    at_once = units_at_once(form)
    lines = [*_split(form), *_sweep(form, element, "0", "head", at_once), "    begin = head"]
    for unit in vectors:
        lines += [
            f"    end = begin + ((nbytes - begin) & {-unit.nbytes})",
            f"    if (differ & {unit.nbytes - 1}) != 0:",
            "        end = begin",
            *_sweep(form, unit, "begin", "end", at_once),
            "    begin = end",
        ]
    return [*lines, *_sweep(form, element, "begin", "nbytes", 1)]


def _look_up(operands: list[str]) -> list[str]:
    """Return the lines that read the table, once per block, because host memory is slow to read."""
    return [
        f"    table_of_block = cuda.shared.array({len(operands)}, int64)",
        "    i = cuda.threadIdx.x",
        f"    while i < {len(operands)}:",
        "        table_of_block[i] = load_address(table, 8 * i)",
        "        i += cuda.blockDim.x",
        "    cuda.syncthreads()",
        *(f"    {name} = table_of_block[{i}]" for i, name in enumerate(operands)),
        # The first address is 0 if the filling of the table was given up.
        f"    if {operands[0]} == 0:",
        "        nbytes = int64(0)",
    ]


def _split(form: Form) -> list[str]:
    """Return the lines that compute where vectors begin (``head``), in bytes.

    A vector size is possible if the bits of ``differ`` below it are zero. If none is, or if an
    element lies across the start of a vector, there are no vectors: ``head`` is ``nbytes``.
    """
    first, *rest = _operands(form)
    differ = " | ".join(f"({name} ^ {first})" for name in rest)
    largest, *others = [unit.nbytes for unit in _vectors(form)]
    lines = [f"    differ = {differ}", f"    head = -{first} & {largest - 1}"]
    for before, nbytes in itertools.pairwise((largest, *others)):
        lines += [f"    if (differ & {before - 1}) != 0:", f"        head &= {nbytes - 1}"]
    smallest = min((largest, *others))
    return [
        *lines,
        f"    if (differ & {smallest - 1}) != 0 or (head & {form.itemsize - 1}) != 0:",
        "        head = nbytes",
        "    head = min(head, nbytes)",
    ]


def _sweep(form: Form, unit: _Unit, begin: str, end: str, at_once: int) -> list[str]:
    """Return the lines of the loops over the units between the offsets `begin` and `end`.

    The first loop processes `at_once` units of each input at a time, the second the remaining ones.
    """
    lines = [
        f"    step = {unit.nbytes} * nthreads",
        f"    at = {begin} + {unit.nbytes} * thread",
    ]
    for number in dict.fromkeys((at_once, 1)):  # remaining units are processed one by one
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
    """Return the lines of a function that computes one unit of the result from those of inputs."""
    inputs = [f"inputs[{i}]" for i in range(form.ninputs)]
    if unit.name != "element":
        lanes = (_lane(form, [f"{each}[{i}]" for each in inputs]) for i in range(unit.nlanes))
        result = f"({', '.join(lanes)},)"
    else:
        result = _lane(form, inputs)
    return [f"def result_of_{unit.name}(inputs, factor, divisor):", f"    return {result}"]


def _lane(form: Form, inputs: list[str]) -> str:
    """Return the source code that computes one lane from the expressions `inputs`."""
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


__all__ = ["NBLOCKS_AT_ONCE", "NTHREADS", "build", "parameters", "source", "units_at_once"]

"""Kernel forms, their inputs and expected results, for tests in the simulator and on GPUs.

Expected results are computed with the host's kernels, or in float32 for wide forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from r2ccl.dtypes import BFLOAT16_CODE, CODES, DTYPES
from r2ccl.kernels import ON_GPU, divider, quiet_context, reducer
from r2ccl.kernels.cuda import Form
from r2ccl.types import ReduceOp

Array = np.ndarray[Any, np.dtype[Any]]

FLOAT16_CODE = CODES[np.dtype(np.float16)]
HALVES = (FLOAT16_CODE, BFLOAT16_CODE)
REALS = (*HALVES, CODES[np.dtype(np.float32)], CODES[np.dtype(np.float64)])
COMPLEX = (CODES[np.dtype(np.complex64)], CODES[np.dtype(np.complex128)])
INTEGERS = tuple(code for code, dtype in DTYPES.items() if dtype.kind in "iu")

FACTOR = 0.3
NRANKS = 3


def pairs() -> list[Form]:
    """Return every operation on every type, for two inputs."""
    return [Form(dtype_code=code, op=op) for code in sorted(ON_GPU) for op in sorted(ON_GPU[code])]


def others() -> list[Form]:
    """Return the other forms: copies, more inputs and outputs, scaled, divided, wide."""
    sum_, prod, min_, max_ = ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX
    float32 = CODES[np.dtype(np.float32)]
    copies = [Form(dtype_code=code, op=sum_, ninputs=1) for code in sorted(ON_GPU)]
    averages = [Form(dtype_code=code, op=sum_, is_divided=True) for code in sorted(ON_GPU)]
    scaled = [Form(dtype_code=code, op=sum_, is_scaled=True) for code in (*REALS, *COMPLEX)]
    wide = [
        Form(dtype_code=code, op=op, ninputs=ninputs, is_wide=True, **more)
        for code in HALVES
        for op, ninputs, more in (
            (sum_, 2, {}),
            (sum_, 5, {}),
            (prod, 3, {}),
            (sum_, 4, {"is_divided": True}),
            (sum_, 3, {"is_scaled": True, "is_resumed": True, "is_divided": True}),
            (max_, 2, {"is_scaled": True}),
        )
    ]
    return [
        *copies,
        *averages,
        *scaled,
        *wide,
        *(Form(dtype_code=code, op=sum_, ninputs=4) for code in (0, float32, *HALVES)),
        *(Form(dtype_code=code, op=prod, ninputs=3) for code in (17, *COMPLEX)),
        Form(dtype_code=COMPLEX[0], op=prod, is_scaled=True),
        Form(dtype_code=4, op=min_, ninputs=8, noutputs=8),
        Form(dtype_code=float32, op=sum_, ninputs=8, noutputs=8),
        Form(dtype_code=BFLOAT16_CODE, op=sum_, ninputs=2, noutputs=2),
        Form(dtype_code=float32, op=sum_, ninputs=1, noutputs=3),
        Form(dtype_code=float32, op=sum_, ninputs=1, is_scaled=True),
        Form(dtype_code=FLOAT16_CODE, op=sum_, ninputs=1, is_divided=True, is_wide=True),
        Form(dtype_code=float32, op=sum_, ninputs=3, is_scaled=True, is_resumed=True),
        Form(dtype_code=FLOAT16_CODE, op=sum_, is_scaled=True, is_resumed=True, is_divided=True),
        Form(dtype_code=float32, op=sum_, has_table=True),
        Form(dtype_code=0, op=max_, ninputs=3, noutputs=2, has_table=True),
        Form(dtype_code=BFLOAT16_CODE, op=sum_, ninputs=8, is_divided=True, has_table=True),
    ]


def representative() -> list[Form]:
    """Return one form of each way through the template: all that quick tests run."""
    float32 = CODES[np.dtype(np.float32)]
    return [
        Form(dtype_code=float32, op=ReduceOp.SUM),
        Form(dtype_code=FLOAT16_CODE, op=ReduceOp.SUM, is_scaled=True),
        Form(dtype_code=BFLOAT16_CODE, op=ReduceOp.PROD),
        Form(dtype_code=BFLOAT16_CODE, op=ReduceOp.SUM, ninputs=8, noutputs=8, is_wide=True),
        Form(dtype_code=0, op=ReduceOp.MIN, ninputs=4),
        Form(dtype_code=8, op=ReduceOp.MAX),
        Form(dtype_code=4, op=ReduceOp.SUM, is_divided=True),
        Form(dtype_code=18, op=ReduceOp.PROD),
        Form(dtype_code=float32, op=ReduceOp.SUM, ninputs=8, noutputs=8, has_table=True),
        Form(dtype_code=float32, op=ReduceOp.SUM, ninputs=1),
    ]


def host_fuses() -> bool:
    """Return whether NumPy's complex product uses one fused multiply-add per part."""
    a, b = np.array([1 + 2.0**-30]), np.array([1 - 2.0**-30])
    rounded_away = 2.0**-60
    product = np.empty(1, np.complex128)
    # A fused product keeps -2**-60; otherwise 1 - 2**-60 is rounded before 1 is subtracted.
    np.multiply(a + 1j, b + 1j, out=product)
    return bool(product.real[0] == -rounded_away)


def title(form: Form) -> str:
    """Return the id of a form in test names."""
    return form.name.removeprefix("r2ccl_")


def special(dtype: np.dtype[Any]) -> Array:
    """Return values at the edges of a type."""
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return np.array([info.min, info.max, 0, 1, info.max - 1, info.min + 1], dtype)
    info = ml_dtypes.finfo(dtype)
    least = info.smallest_subnormal
    values = [0.0, least, 3 * float(least), info.tiny, 1.0, 1 + float(info.eps), info.max, np.inf]
    return np.array([*values, *(-np.array(values, np.float64)), np.nan]).astype(dtype)


def values(dtype: np.dtype[Any], count: int, rng: np.random.Generator) -> Array:
    """Draw values of all magnitudes, some of them special; products of many stay finite."""
    if dtype.kind in "iu":
        drawn = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()
    else:
        drawn = (rng.standard_normal(count) * 2.0 ** rng.integers(-3, 3, count)).astype(dtype)
        if dtype.kind == "c":
            drawn += (1j * rng.standard_normal(count)).astype(dtype)
    # No special complex values: whether a product with infinities is NaN depends on its additions.
    if dtype.kind != "c":
        at = rng.random(count) < 0.2
        drawn[at] = rng.choice(special(dtype), int(at.sum()))
    return drawn


def expected(form: Form, inputs: Sequence[Array]) -> Array:
    """Return the expected result of a form with `FACTOR` and `NRANKS`."""
    calculate = _wide if form.is_wide else _stepwise
    result: Array = quiet_context().run(calculate, form, inputs)
    return result


def _stepwise(form: Form, inputs: Sequence[Array]) -> Array:
    dtype = DTYPES[form.dtype_code]
    inputs = [
        _scaled(each) if form.is_scaled and not (form.is_resumed and i == 0) else each
        for i, each in enumerate(inputs)
    ]
    result = inputs[0].copy()
    for each in inputs[1:]:
        combined = np.empty(result.size, dtype)
        reducer(form.dtype_code, form.op)(result, each, combined)
        result = combined
    if form.is_divided:
        divider(form.dtype_code, NRANKS)(result)
    return result


def _scaled(x: Array) -> Array:
    dtype = x.dtype
    if dtype.kind == "c":
        real = np.empty(0, dtype).real.dtype
        return (x.view(real) * real.type(FACTOR)).view(dtype)
    if dtype.itemsize == 2:
        return (x.astype(np.float32) * np.float32(FACTOR)).astype(dtype)
    return x * dtype.type(FACTOR)


def _wide(form: Form, inputs: Sequence[Array]) -> Array:
    factor = np.float32(FACTOR if form.is_scaled else 1)
    function = {ReduceOp.SUM: np.add, ReduceOp.PROD: np.multiply, ReduceOp.MAX: np.maximum}[form.op]
    result = inputs[0].astype(np.float32) * (np.float32(1) if form.is_resumed else factor)
    for each in inputs[1:]:
        result = function(result, each.astype(np.float32) * factor)
    if form.is_divided:
        result = result / np.float32(NRANKS)
    return result.astype(DTYPES[form.dtype_code])


def differences(form: Form, given: Array, wanted: Array) -> Array:
    """Return the indices at which `given` is wrong, bit by bit.

    All NaNs are equal, and so are both zeros of MIN and MAX.
    """
    itemsize = given.dtype.itemsize // (2 if given.dtype.kind == "c" else 1)
    bits = np.dtype(f"u{itemsize}")
    differ = given.view(bits) != wanted.view(bits)
    if given.dtype.kind not in "iu":
        real = np.empty(0, given.dtype).real.dtype if given.dtype.kind == "c" else given.dtype
        left, right = given.view(real), wanted.view(real)
        differ &= ~(np.isnan(left) & np.isnan(right))
        if form.op in (ReduceOp.MIN, ReduceOp.MAX):
            differ &= ~((left == 0) & (right == 0))
    return np.flatnonzero(differ)


class Layout(NamedTuple):
    """Placement of inputs and outputs.

    Parameters
    ----------
    count : int
        Number of elements.
    offsets : tuple of int
        Elements from a multiple of 16 bytes to the start of input or output i, used cyclically.
    in_place : int or None
        Input that is also the first output.
    """

    count: int
    offsets: tuple[int, ...] = (0,)
    in_place: int | None = None


def shifted(form: Form) -> list[tuple[int, ...]]:
    """Return the offsets of layouts whose operands share an alignment of 8 or 4 bytes only.

    The first operand begins beside a multiple of 16 bytes. Only offsets of more than one element
    are returned; the other layouts have those of one element.
    """
    itemsize = DTYPES[form.dtype_code].itemsize
    unit = itemsize // (2 if DTYPES[form.dtype_code].kind == "c" else 1)
    steps = [nbytes // unit for nbytes in (8, 4) if nbytes > itemsize]
    return [(1, 1 + step) for step in steps]


class Arena:
    """Inputs, poisoned outputs and guards of one case, as one block of bytes.

    Parameters
    ----------
    form : Form
    layout : Layout
    seed : int
    """

    GUARD = 64
    POISON = 0xA5

    def __init__(self, form: Form, layout: Layout, seed: int) -> None:
        self.form, self.layout = form, layout
        dtype = DTYPES[form.dtype_code]
        rng = np.random.default_rng(seed)
        self.inputs = [values(dtype, layout.count, rng) for _ in range(form.ninputs)]
        unit = dtype.itemsize // (2 if dtype.kind == "c" else 1)
        nbytes = layout.count * dtype.itemsize
        self.places = list(self._places(nbytes, unit))
        self.bytes = np.full(self.places[-1] + nbytes + self.GUARD, self.POISON, np.uint8)
        self.write()

    def _places(self, nbytes: int, unit: int) -> Iterator[int]:
        """Yield the start of each array: a guard apart, `unit` bytes times its offset after 16."""
        offsets = self.layout.offsets
        at = 0
        for i in range(self.form.ninputs + self.form.noutputs):
            at = (at + self.GUARD + 15) // 16 * 16 + offsets[i % len(offsets)] * unit
            yield at
            at += nbytes

    @property
    def sources(self) -> list[int]:
        """Starts of the inputs in the block, in bytes."""
        return self.places[: self.form.ninputs]

    @property
    def targets(self) -> list[int]:
        """Starts of the outputs in the block, in bytes."""
        targets = self.places[self.form.ninputs :]
        if self.layout.in_place is not None:
            targets[0] = self.sources[self.layout.in_place]
        return targets

    def write(self) -> None:
        """Write the inputs to their places."""
        for place, each in zip(self.sources, self.inputs, strict=True):
            self._view(self.bytes, place)[:] = each

    def output(self, after: Array, number: int) -> Array:
        """Return the values of output `number` in the block `after` the kernel has run."""
        return self._view(after, self.targets[number]).copy()

    def placed(self) -> Array:
        """Return a copy of the block that starts at a multiple of 16 bytes."""
        room = np.empty(self.bytes.size + 16, np.uint8)
        start = -room.ctypes.data % 16
        memory = room[start : start + self.bytes.size]
        memory[:] = self.bytes
        return memory

    def _view(self, memory: Array, place: int) -> Array:
        dtype = DTYPES[self.form.dtype_code]
        nbytes = self.layout.count * dtype.itemsize
        # NumPy requires alignment of views that complex numbers here may not have.
        return np.ndarray(self.layout.count, dtype, memory[place : place + nbytes])

    def complaints(self, after: Array) -> list[str]:
        """Return a description of every error in the block after the kernel has run on it."""
        wanted = expected(self.form, self.inputs)
        said = []
        allowed = self.bytes.copy()
        for i, place in enumerate(self.targets):
            given = self.output(after, i)
            wrong = differences(self.form, given, wanted)
            if wrong.size:
                said.append(f"output {i}: {wrong.size} of {given.size} wrong, first {wrong[0]}")
            allowed[place : place + given.nbytes] = after[place : place + given.nbytes]
        beside = np.flatnonzero(allowed != after)
        if beside.size:
            said.append(f"{beside.size} bytes beside the outputs changed, first {beside[0]}")
        return said


__all__ = [
    "FACTOR",
    "NRANKS",
    "Arena",
    "Layout",
    "differences",
    "expected",
    "host_fuses",
    "others",
    "pairs",
    "shifted",
    "title",
    "values",
]

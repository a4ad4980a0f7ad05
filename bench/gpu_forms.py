"""The kernels that the GPU bench measures, with reference results computed on the host.

Invariant: a reference uses none of the library's kernels. It is computed in float64 and rounded
exactly where the kernel rounds, so that results can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from gpu_card import Array
from gpu_inputs import named

from r2ccl.dtypes import CODES
from r2ccl.kernels.cuda import Form
from r2ccl.types import ReduceOp

_COMBINE: dict[ReduceOp, Callable[[Array, Array], Array]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.MIN: np.minimum,
}
_FACTOR = 0.7
_NRANKS = 3


class Case(msgspec.Struct, frozen=True):
    """A kernel and the arguments that the bench calls it with.

    Parameters
    ----------
    name : str
        Operation of the kernel, with the numbers of arrays that it reads and writes.
    form : Form
    in_place : bool
        True if the output is the first input.
    """

    name: str
    form: Form
    in_place: bool = False
    #: Factor of a form that scales its inputs, and divisor of a form that divides its result.
    factor: float = 1.0
    nranks: int = 1

    @property
    def narrays(self) -> int:
        """Number of arrays that the kernel reads, plus the number that it writes."""
        return self.form.ninputs + self.form.noutputs

    def reference(self, operands: Sequence[Array]) -> Array:
        """Return the correct contents of the outputs."""
        form, dtype = self.form, operands[0].dtype
        combine = _COMBINE[form.op]
        if dtype.kind in "iu":
            total = operands[0]
            for each in operands[1 : form.ninputs]:
                total = combine(total, each)
            return total
        step = np.dtype(np.float32) if form.is_wide else dtype
        wide = [each.astype(np.float64) for each in operands[: form.ninputs]]
        if form.is_scaled:
            wide = [self._scaled(each, step) for each in wide]
        value = wide[0]
        for each in wide[1:]:
            value = _rounded(combine(value, each), step)
        if form.is_divided:
            value = _rounded(value / self.nranks, step)
        return value.astype(dtype)

    def _scaled(self, operand: Array, step: np.dtype[Any]) -> Array:
        """Multiply as a kernel does: float64 in float64, all shorter types in float32."""
        real = np.dtype(np.float64 if step == np.float64 else np.float32)
        return _rounded(_rounded(operand * float(real.type(self.factor)), real), step)


def cases() -> dict[str, tuple[Case, ...]]:
    """Return the kernels to measure, by element type."""
    return {
        "float32": (
            _case("sum 2->1", "float32"),
            _case("sum 2->1 in place", "float32", in_place=True),
            _case("sum 2->1 from a table", "float32", has_table=True),
            _case("sum 4->1", "float32", ninputs=4),
            _case("sum 2->2", "float32", noutputs=2),
            _case("copy 1->1", "float32", ninputs=1),
            _case("min 2->1", "float32", op=ReduceOp.MIN),
            _case("avg 2->1", "float32", op=ReduceOp.AVG),
            _case("scaled sum 2->1", "float32", is_scaled=True),
        ),
        "float16": (
            _case("sum 2->1", "float16"),
            _case("sum 2->1 in place", "float16", in_place=True),
            _case("sum 4->1, wide", "float16", ninputs=4, is_wide=True),
        ),
        "bfloat16": (
            _case("sum 2->1", "bfloat16"),
            _case("sum 2->1 in place", "bfloat16", in_place=True),
            _case("avg 2->1", "bfloat16", op=ReduceOp.AVG),
            _case("sum 4->1, wide", "bfloat16", ninputs=4, is_wide=True),
            _case("scaled sum 2->1, wide", "bfloat16", is_scaled=True, is_wide=True),
        ),
        "float64": (_case("sum 2->1", "float64"),),
        "int32": (_case("sum 2->1", "int32"),),
    }


def _case(
    name: str, dtype: str, *, in_place: bool = False, op: ReduceOp = ReduceOp.SUM, **how: Any
) -> Case:
    is_divided = op is ReduceOp.AVG
    form = Form(dtype_code=CODES[named(dtype)], op=op, is_divided=is_divided, **how)
    return Case(
        name,
        form,
        in_place,
        factor=_FACTOR if form.is_scaled else 1.0,
        nranks=_NRANKS if is_divided else 1,
    )


def _rounded(value: Array, dtype: np.dtype[Any]) -> Array:
    """Round float64 values to `dtype`; return them as float64."""
    return value.astype(dtype).astype(np.float64)


__all__ = ["Case", "cases"]

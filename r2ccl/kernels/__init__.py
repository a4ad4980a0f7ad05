"""Reductions of slices: one table of operations and element types, one module per device.

`table` lists the supported operations, `host` implements them with NumPy, `half` and `float8` have
the compiled loops for 16-bit and 8-bit floats, `conversion` scales and widens inputs, and `cuda`
implements the operations on GPUs.

Invariant: each element of a result depends only on the operands' elements at the same index, never
on where a slice begins or ends. A replayed or differently cut slice therefore gives the same bits.
"""

from __future__ import annotations

from r2ccl.dtypes import dtype_name
from r2ccl.kernels.conversion import (
    ConvertedOp,
    Converter,
    accumulate_float32,
    narrower,
    premul_sum,
)
from r2ccl.kernels.host import Divider, Reducer, arithmetic, divider, quiet_context, reducer
from r2ccl.kernels.table import ON_GPU, OPS, check_op

__all__ = [
    "ON_GPU",
    "OPS",
    "ConvertedOp",
    "Converter",
    "Divider",
    "Reducer",
    "accumulate_float32",
    "arithmetic",
    "check_op",
    "divider",
    "dtype_name",
    "narrower",
    "premul_sum",
    "quiet_context",
    "reducer",
]

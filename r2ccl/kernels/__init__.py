"""Reductions on slices: one table of operations and element types, one module per device.

`table` says what exists, `host` does it with NumPy, `half` holds the compiled loops for 16-bit
floats, `cuda` does it on GPUs. The package sees arrays, addresses and numbers only: no socket, no
clock, no schedule.

Invariant: a result depends on the operands' values alone, element by element, never on where a
slice begins or ends, so that a replayed or differently cut slice gives the same bits.
"""

from __future__ import annotations

from r2ccl.dtypes import dtype_name
from r2ccl.kernels.host import Divider, Reducer, divider, quiet_context, reducer
from r2ccl.kernels.table import OPS, check_op

__all__ = [
    "OPS",
    "Divider",
    "Reducer",
    "check_op",
    "divider",
    "dtype_name",
    "quiet_context",
    "reducer",
]

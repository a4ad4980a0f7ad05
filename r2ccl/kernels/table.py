"""Which reduction exists for which element type: one table for every device.

Values only. Each implementation (`host`) supports exactly these pairs; another pair
is refused before any byte moves. Must not import an implementation.
"""

from __future__ import annotations

import numpy as np

from r2ccl.dtypes import DTYPES, dtype_of
from r2ccl.errors import InvalidArgument
from r2ccl.types import ReduceOp

_ORDERED = frozenset(ReduceOp)
_UNORDERED = _ORDERED - {ReduceOp.MIN, ReduceOp.MAX}

#: Dtype number to the operations it supports; complex numbers have no order.
OPS: dict[int, frozenset[ReduceOp]] = {
    code: _UNORDERED if np.issubdtype(dtype, np.complexfloating) else _ORDERED
    for code, dtype in DTYPES.items()
}


def check_op(dtype_code: int, op: ReduceOp | int) -> ReduceOp:
    """Return `op` if the table has it for this dtype.

    Parameters
    ----------
    dtype_code : int
        Number from `r2ccl.dtypes`.
    op : ReduceOp or int

    Raises
    ------
    InvalidArgument
        Unknown dtype number or operation, or a pair that has no meaning (MIN of complex numbers).
    """
    dtype = dtype_of(dtype_code)
    supported = OPS[dtype_code]
    if op not in supported:
        given = op.name if isinstance(op, ReduceOp) else repr(op)
        allowed = ", ".join(member.name for member in sorted(supported))
        raise InvalidArgument(f"op={given} for dtype {dtype.name}: allowed are {allowed}")
    return ReduceOp(op)


__all__ = ["OPS", "check_op"]

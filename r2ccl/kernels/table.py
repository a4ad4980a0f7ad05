"""Table of the reductions that each element type supports, on every device.

`host` and `cuda` support exactly these pairs; any other pair is refused before data moves.
"""

from __future__ import annotations

import numpy as np

from r2ccl.dtypes import DTYPES, dtype_of
from r2ccl.errors import InvalidArgument
from r2ccl.types import ReduceOp

_ORDERED = frozenset(ReduceOp)
_UNORDERED = _ORDERED - {ReduceOp.MIN, ReduceOp.MAX}

#: Supported operations by dtype number. Complex numbers have no order, so no MIN and MAX.
OPS: dict[int, frozenset[ReduceOp]] = {
    code: _UNORDERED if np.issubdtype(dtype, np.complexfloating) else _ORDERED
    for code, dtype in DTYPES.items()
}


def check_op(dtype_code: int, op: ReduceOp | int) -> ReduceOp:
    """Return `op` as a `ReduceOp` if the dtype supports it.

    Parameters
    ----------
    dtype_code : int
        Number from `r2ccl.dtypes`.
    op : ReduceOp or int

    Raises
    ------
    InvalidArgument
        If the dtype number or the operation is unknown, or the dtype does not support the
        operation (MIN of complex numbers).
    """
    dtype = dtype_of(dtype_code)
    supported = OPS[dtype_code]
    try:
        found = ReduceOp(op)
    except ValueError:  # also for a value that is not hashable
        found = None
    if found is None or found not in supported:
        given = op.name if isinstance(op, ReduceOp) else repr(op)
        allowed = ", ".join(member.name for member in sorted(supported))
        raise InvalidArgument(f"op={given} for dtype {dtype.name}: allowed are {allowed}")
    return found


__all__ = ["OPS", "check_op"]

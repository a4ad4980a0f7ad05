"""Table of the reductions that each element type supports.

`host` supports exactly the pairs of type and operation in `OPS`. Pairs with a 16-bit or 8-bit float
are supported only if compiled code can be used. Any other pair is refused before data moves. `cuda`
supports the pairs in `ON_GPU`. All other pairs in `OPS` are reduced in host memory, even if the
arrays are on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from r2ccl.dtypes import BFLOAT16_CODE, DTYPES, EXTENSIONS, dtype_name, dtype_of
from r2ccl.errors import InvalidArgument
from r2ccl.types import ReduceOp

_ORDER = frozenset((ReduceOp.MIN, ReduceOp.MAX))
_ARITHMETIC = frozenset((ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG))
_LOGICAL = frozenset((ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR))
_BITWISE = frozenset((ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR))
_LOCATION = frozenset((ReduceOp.MINLOC, ReduceOp.MAXLOC))
#: By `dtype.kind`. Complex numbers have no order. A sum of bools is not a bool. As in MPI, floats
#: are neither truth values nor bits.
_OPS_OF_KIND = {
    "i": _ARITHMETIC | _ORDER | _LOGICAL | _BITWISE,
    "u": _ARITHMETIC | _ORDER | _LOGICAL | _BITWISE,
    "f": _ARITHMETIC | _ORDER,
    "c": _ARITHMETIC,
    "b": _ORDER | _LOGICAL | _BITWISE,
}


def _ops_of(code: int, dtype: np.dtype[Any]) -> frozenset[ReduceOp]:
    if dtype.names is not None:
        return _LOCATION
    return _OPS_OF_KIND["f" if code in EXTENSIONS else dtype.kind]


#: Supported operations by dtype number.
OPS: dict[int, frozenset[ReduceOp]] = {code: _ops_of(code, dtype) for code, dtype in DTYPES.items()}
#: Supported operations of the kernels for GPUs, by dtype number.
ON_GPU: dict[int, frozenset[ReduceOp]] = {
    code: ops & (_ARITHMETIC | _ORDER)
    for code, ops in OPS.items()
    if ReduceOp.SUM in ops and (code == BFLOAT16_CODE or code not in EXTENSIONS)
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
        operation, for example MIN of complex numbers.
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
        advice = "; for a sum, convert to an integer dtype" if dtype.kind == "b" else ""
        raise InvalidArgument(
            f"op={given} for dtype {dtype_name(dtype_code)}: allowed are {allowed}{advice}"
        )
    return found


__all__ = ["ON_GPU", "OPS", "check_op"]

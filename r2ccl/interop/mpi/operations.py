"""Tables of the operations and element types of MPI that r2ccl can reduce.

Invariant: an operation or datatype that is not in a table is refused by its name, before any data
moves. The error class is that of MPI for an operation that a datatype does not have: ``ERR_OP``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from r2ccl import ReduceOp
from r2ccl.interop.mpi.errors import MpiError

_INTEGERS = (
    "SIGNED_CHAR UNSIGNED_CHAR SHORT UNSIGNED_SHORT INT UNSIGNED LONG UNSIGNED_LONG LONG_LONG "
    "UNSIGNED_LONG_LONG INT8_T INT16_T INT32_T INT64_T UINT8_T UINT16_T UINT32_T UINT64_T "
    "AINT COUNT OFFSET INTEGER INTEGER1 INTEGER2 INTEGER4 INTEGER8"
)
_FLOATS = "FLOAT16_T FLOAT FLOAT32_T DOUBLE FLOAT64_T REAL DOUBLE_PRECISION REAL4 REAL8"
_COMPLEX = (
    "C_COMPLEX C_FLOAT_COMPLEX C_DOUBLE_COMPLEX CXX_FLOAT_COMPLEX CXX_DOUBLE_COMPLEX COMPLEX "
    "DOUBLE_COMPLEX COMPLEX8 COMPLEX16"
)


def _by_handle(names: str) -> dict[int, np.dtype[Any]]:
    """Return the dtype of each named datatype that this MPI has, by the handle of the datatype."""
    found = [getattr(MPI, name, MPI.DATATYPE_NULL) for name in names.split()]
    return {each.handle: np.dtype(each.typestr) for each in found if each != MPI.DATATYPE_NULL}


#: Reductions by the handle of the operation; objects of mpi4py are not hashable.
_ORDERED = {MPI.MIN.handle: ReduceOp.MIN, MPI.MAX.handle: ReduceOp.MAX}
_UNORDERED = {MPI.SUM.handle: ReduceOp.SUM, MPI.PROD.handle: ReduceOp.PROD}

_REAL_DTYPES = _by_handle(f"{_INTEGERS} {_FLOATS}")
_COMPLEX_DTYPES = _by_handle(_COMPLEX)

_OP_NAMES = {
    getattr(MPI, name).handle: name
    for name in dir(MPI)
    if isinstance(getattr(MPI, name), MPI.Op)
}  # fmt: skip


def reduction(op: Any, datatype: Any) -> tuple[ReduceOp, np.dtype[Any]]:
    """Return the operation and element type of r2ccl for those of MPI.

    Raises
    ------
    TypeError
        If `op` is not an ``MPI.Op``.
    MpiError
        ``ERR_OP``, if r2ccl cannot reduce elements of `datatype` with `op`.
    """
    if not isinstance(op, MPI.Op):
        raise TypeError(f"op={op!r}: an MPI.Op is needed, such as MPI.SUM")
    if datatype.handle in _REAL_DTYPES:
        dtype, ops = _REAL_DTYPES[datatype.handle], _UNORDERED | _ORDERED
    elif datatype.handle in _COMPLEX_DTYPES:
        dtype, ops = _COMPLEX_DTYPES[datatype.handle], _UNORDERED
    else:
        raise MpiError(
            f"datatype {datatype.name or 'without a name'} in a reduction: allowed are the "
            "integer, floating-point and complex datatypes of MPI with a dtype of r2ccl, not "
            "derived ones; use comm.mpi for a reduction by MPI itself",
            MPI.ERR_OP,
        )
    if op.handle not in ops:
        given = _OP_NAMES.get(op.handle, "made by MPI.Op.Create")
        allowed = ", ".join(found.name for found in ops.values())
        raise MpiError(
            f"op {given} for datatype {datatype.name}: allowed are {allowed}; use comm.mpi for a "
            "reduction by MPI itself",
            MPI.ERR_OP,
        )
    return ops[op.handle], dtype


__all__ = ["reduction"]

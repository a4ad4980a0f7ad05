"""Table of the operations and element types of MPI that r2ccl can reduce.

An operation can be combined with a datatype if the MPI standard allows the combination and r2ccl
has a dtype for the datatype. An operation made by `MpiOp.Create` takes all these datatypes except
pairs of a value and an index. Other combinations raise an `MpiError` before any data moves. The
error names the datatype and, if r2ccl has a dtype for it, the operation. Its error class is
``ERR_OP``, as in MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from r2ccl import ReduceOp, UserOp, pair_dtype, user_op
from r2ccl.interop.mpi.errors import MpiError

_ARITHMETIC = ("SUM", "PROD")
_ORDER = ("MIN", "MAX")
_LOGICAL = ("LAND", "LOR", "LXOR")
_BITWISE = ("BAND", "BOR", "BXOR")
_LOCATION = ("MINLOC", "MAXLOC")

#: Names of datatypes, and the operations that MPI allows on them.
_KINDS = (
    (
        "SIGNED_CHAR UNSIGNED_CHAR SHORT UNSIGNED_SHORT INT UNSIGNED LONG UNSIGNED_LONG LONG_LONG "
        "UNSIGNED_LONG_LONG INT8_T INT16_T INT32_T INT64_T UINT8_T UINT16_T UINT32_T UINT64_T",
        (*_ARITHMETIC, *_ORDER, *_LOGICAL, *_BITWISE),
    ),
    (
        "AINT COUNT OFFSET INTEGER INTEGER1 INTEGER2 INTEGER4 INTEGER8",
        (*_ARITHMETIC, *_ORDER, *_BITWISE),
    ),
    (
        "FLOAT16_T FLOAT FLOAT32_T DOUBLE FLOAT64_T REAL DOUBLE_PRECISION REAL4 REAL8",
        (*_ARITHMETIC, *_ORDER),
    ),
    (
        "C_COMPLEX C_FLOAT_COMPLEX C_DOUBLE_COMPLEX CXX_FLOAT_COMPLEX CXX_DOUBLE_COMPLEX COMPLEX "
        "DOUBLE_COMPLEX COMPLEX8 COMPLEX16",
        _ARITHMETIC,
    ),
    ("C_BOOL CXX_BOOL", _LOGICAL),
    ("BYTE", _BITWISE),
    ("FLOAT_INT DOUBLE_INT LONG_INT TWOINT", _LOCATION),
)

#: Types of the values in the datatypes that are pairs of a value and an index.
_PAIRS = {"FLOAT_INT": np.float32, "DOUBLE_INT": np.float64, "LONG_INT": np.int_, "TWOINT": np.intc}


def _dtype_of(name: str, datatype: Any) -> np.dtype[Any]:
    return pair_dtype(_PAIRS[name]) if name in _PAIRS else np.dtype(datatype.typestr)


def _table() -> dict[int, tuple[np.dtype[Any], tuple[str, ...]]]:
    found: dict[int, tuple[np.dtype[Any], tuple[str, ...]]] = {}
    for names, ops in _KINDS:
        for name in names.split():
            datatype = getattr(MPI, name, MPI.DATATYPE_NULL)  # an MPI may lack Fortran's
            if datatype != MPI.DATATYPE_NULL:
                found[datatype.handle] = (_dtype_of(name, datatype), ops)
    return found


#: Dtype and operations by the handle of the datatype; objects of mpi4py are not hashable.
_DATATYPES = _table()

_OP_NAMES = {
    getattr(MPI, name).handle: name for name in dir(MPI) if isinstance(getattr(MPI, name), MPI.Op)
}


class MpiOp(MPI.Op):
    """User-defined operation, in place of ``MPI.Op``.

    r2ccl can run a user-defined operation only if `Create` of this class made it. An operation that
    ``mpi4py.MPI.Op.Create`` made does not give access to its function.

    Attributes
    ----------
    converted : UserOp or None
        The operation for r2ccl; None if `Create` of this class did not make the operation, for
        example for ``Op(MPI.SUM)``.
    """

    converted: UserOp | None = None

    def __init__(self, op: Any = None) -> None:
        if isinstance(op, MpiOp):
            self.converted = op.converted

    @classmethod
    def Create(cls, function: Callable[..., Any], commute: bool = False) -> MpiOp:
        """Return an operation that combines elements by `function`.

        Parameters
        ----------
        function : callable
            A Python function with three parameters, as in mpi4py: the left operands (read-only),
            the right operands, which the function replaces by the results, and the datatype. The
            operands are buffers of bytes.
        commute : bool
            True if the function is commutative. If False, the data of the ranks is combined in rank
            order.

        Raises
        ------
        InvalidArgument
            If `r2ccl.user_op` refuses the function.

        Notes
        -----
        *Local*. All ranks of a reduction must pass operations with the same `commute`, whose
        functions have the same name and code; see `r2ccl.user_op`.
        """
        made = super().Create(function, commute)
        name = getattr(function, "__name__", "")
        made.converted = user_op(_of_arrays(function), name=name, is_commutative=commute)
        return made


def _of_arrays(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return `function` as a function of two arrays that returns the result, for `user_op`."""

    def combine(left: Any, right: Any) -> Any:
        result = right.copy()
        if result.size:
            datatype = MPI.Datatype.fromcode(result.dtype.char)
            function(
                MPI.buffer.frombuffer(left.view(np.uint8), readonly=True),
                MPI.buffer.frombuffer(result.view(np.uint8)),
                datatype,
            )
        return result

    return combine


def reduction(op: Any, datatype: Any) -> tuple[ReduceOp | UserOp, np.dtype[Any]]:
    """Return r2ccl's operation and element type for MPI's `op` and `datatype`.

    Raises
    ------
    TypeError
        If `op` is not an ``MPI.Op``.
    MpiError
        ``ERR_OP``, if r2ccl cannot reduce elements of `datatype` with `op`.
    """
    if not isinstance(op, MPI.Op):
        raise TypeError(f"op={op!r}: an MPI.Op is needed, such as MPI.SUM")
    if datatype.handle not in _DATATYPES:
        raise MpiError(
            f"datatype {datatype.name or 'without a name'} in a reduction: allowed are the "
            "predefined integer, floating-point, complex, logical and pair datatypes of MPI that "
            "have a dtype in r2ccl; to let MPI itself reduce, call the method of comm.mpi",
            MPI.ERR_OP,
        )
    dtype, allowed = _DATATYPES[datatype.handle]
    converted = op.converted if isinstance(op, MpiOp) and op != MPI.OP_NULL else None
    if converted is not None and dtype.names is None:
        return converted, dtype
    maker = "Op.Create" if isinstance(op, MpiOp) else "mpi4py's MPI.Op.Create"
    name = _OP_NAMES.get(op.handle, f"made by {maker}")
    if name not in allowed:
        raise MpiError(
            f"op {name} for datatype {datatype.name}: allowed are {', '.join(allowed)} and, except "
            "for pairs, operations made by r2ccl.interop.mpi.Op.Create; to let MPI itself reduce, "
            "call the method of comm.mpi",
            MPI.ERR_OP,
        )
    return ReduceOp[name], dtype


__all__ = ["MpiOp", "reduction"]

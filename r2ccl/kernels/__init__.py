"""Reductions of slices on the host and on GPUs.

`table` lists the supported operations, `host` implements them with NumPy, `half` and `float8` have
the compiled loops for 16-bit and 8-bit floats, `fold` and `fold_loop` reduce the arrays of several
ranks at once, `conversion` scales and widens inputs, `user` has the operations of the user, and
`cuda` has the kernels for GPUs. `compiling` and `native` compile, store and load the loops. For
compiled code, `arrays` has the layout of NumPy arrays, and `python_api` Python's C functions.

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
from r2ccl.kernels.host import Array, Divider, Reducer, divider, quiet_context, reducer
from r2ccl.kernels.table import ON_GPU, OPS, check_op
from r2ccl.kernels.user import UserOp, user_op, user_reducer
from r2ccl.types import REDUCTIONS, CallSignature, ReduceOp


def arithmetic(call: CallSignature, nranks: int) -> tuple[Reducer, Divider | None]:
    """Return the function that combines two slices, and for AVG the function that divides the sum.

    Parameters
    ----------
    call : CallSignature
        For a collective without reduction, the returned reducer must not be called.
    nranks : int
        Divisor of AVG, at least 1.

    Returns
    -------
    reducer : Reducer
    divider : Divider or None
        None unless the op is AVG.

    Raises
    ------
    InvalidArgument
        If `reducer`, `divider` or `UserOp.reducer` raises it.
    ImportError, TransportError
        If `reducer` or `divider` raises it.
    """
    if call.collective not in REDUCTIONS:
        return _refuse, None
    if call.user:
        return user_reducer(call.user, call.dtype), None
    finish = divider(call.dtype, nranks) if call.op == ReduceOp.AVG else None
    return reducer(call.dtype, call.op), finish


def _refuse(left: Array, right: Array, out: Array) -> None:
    raise AssertionError("a collective without reduction reduced a slice")


__all__ = [
    "ON_GPU",
    "OPS",
    "ConvertedOp",
    "Converter",
    "Divider",
    "Reducer",
    "UserOp",
    "accumulate_float32",
    "arithmetic",
    "check_op",
    "divider",
    "dtype_name",
    "narrower",
    "premul_sum",
    "quiet_context",
    "reducer",
    "user_op",
]

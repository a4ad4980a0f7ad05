"""Compiled kernels that reduce the arrays of several ranks at once, called by address.

Compiled code calls a kernel through a C function pointer, so the calling code is compiled once for
all operations and element types. A kernel combines its sources from the first to the last, one step
after another, as `r2ccl.kernels.reducer` would: integers wrap, 16-bit floats are computed in
float32 and rounded at every step, and AVG divides at the end by the number of sources, as
`r2ccl.kernels.divider` does. The results have the same bits as those of `reducer`. This is
necessary because a call may begin in compiled code and end in NumPy.
"""

from __future__ import annotations

from r2ccl.dtypes import dtype_of
from r2ccl.kernels.host import HALVES, SMALL
from r2ccl.kernels.native import address_of
from r2ccl.kernels.table import check_op
from r2ccl.types import ReduceOp


def fold_kernel(dtype_code: int, op: ReduceOp | int) -> int:
    """Return the address of the kernel for a dtype and op; 0 if there is none.

    There is no kernel for 8-bit floats, for the pairs of MINLOC and MAXLOC, or for products of
    complex numbers, in which NumPy fuses multiplications and additions.

    The address stays valid until the process ends. The first process of a host that needs a kernel
    compiles it, in 0.2-0.5 s.

    Parameters
    ----------
    dtype_code : int
        Number from `r2ccl.dtypes`.
    op : ReduceOp or int

    Returns
    -------
    int
        Address of ``int64_t kernel(const int64_t *sources, int64_t count, void *target, int64_t
        nbytes)``, which returns 0. `sources` holds `count` addresses, at least one, of arrays of
        `nbytes` bytes, a whole number of elements. `target` is the address of the result: it may be
        one of these arrays; otherwise it must not overlap them.

    Raises
    ------
    InvalidArgument
        If the dtype is unknown, or does not support `op`.
    ImportError, TransportError
        If `r2ccl.kernels.native.address_of` raises it.
    """
    op = check_op(dtype_code, op)
    dtype = dtype_of(dtype_code)
    if dtype.names is not None or (dtype.name in SMALL and dtype.name not in HALVES):
        return 0
    if dtype.kind == "c" and op is ReduceOp.PROD:
        return 0
    return address_of("r2ccl.kernels.fold_loop:make_fold", dtype_code, int(op))


__all__ = ["fold_kernel"]

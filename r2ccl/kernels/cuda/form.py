"""The form of a GPU kernel: a value that specifies what the kernel computes.

Invariant: two forms with the same `canonical` form give the same results on every input, bit for
bit, so they share one kernel. This module must not import Numba.
"""

from __future__ import annotations

import functools

import msgspec
import numpy as np

from r2ccl.dtypes import BFLOAT16_CODE, CODES, dtype_name, dtype_of
from r2ccl.errors import InvalidArgument
from r2ccl.kernels.table import ON_GPU, check_op
from r2ccl.types import REDUCTIONS, CallSignature, ReduceOp

#: Largest number of inputs, and of outputs, of one kernel; `r2ccl.kernels.cuda.chain` handles more
#: inputs.
MOST = 8

#: Dtype numbers of float16 and bfloat16.
HALVES = (CODES[np.dtype(np.float16)], BFLOAT16_CODE)
_COPIED_AS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """Specification of a kernel that stores ``in_0 (op) in_1 (op) ...`` in every output.

    The kernel combines element by element, from the left.

    Parameters
    ----------
    dtype_code : int
        Number from `r2ccl.dtypes` of all inputs and outputs.
    op : ReduceOp
        Operation; AVG combines like SUM.
    ninputs, noutputs : int
        Number of inputs and outputs, 1 to `MOST`. A single input is not combined: the kernel only
        scales, divides or copies it, and a copy ignores `op`.
    is_scaled : bool
        Multiply each input by a real factor first. The factor is passed at launch and rounded to
        float32 (float64 for float64 and complex128). Floats and complex numbers only.
    is_resumed : bool
        Do not scale the first input, because it is the result of an earlier kernel of the same
        reduction.
    is_divided : bool
        Divide the sum by ``nranks``, passed at launch, like `r2ccl.kernels.divider`.
    is_wide : bool
        float16 and bfloat16 only. False: round to the type at every step, as on the host. True:
        compute in float32 and round once, when storing.
    has_table : bool
        Read the addresses of inputs and outputs, in this order, from a table in memory when the
        kernel runs, instead of passing them at launch. If the first address is 0, the kernel does
        nothing.

    Raises
    ------
    InvalidArgument
        If the combination is invalid, or there are too many inputs or outputs.
    """

    dtype_code: int
    op: ReduceOp
    ninputs: int = 2
    noutputs: int = 1
    is_scaled: bool = False
    is_resumed: bool = False
    is_divided: bool = False
    is_wide: bool = False
    has_table: bool = False

    def __post_init__(self) -> None:
        """Raise InvalidArgument if the form is invalid."""
        kind = dtype_name(self.dtype_code)
        is_changed = self.ninputs > 1 or self.is_scaled or self.is_divided
        if is_changed and check_op(self.dtype_code, self.op) not in ON_GPU.get(self.dtype_code, ()):
            raise InvalidArgument(
                f"op={self.op.name} for dtype {kind}: there is no kernel for GPUs; reduce in host "
                "memory"
            )
        for name in ("ninputs", "noutputs"):
            number = getattr(self, name)
            if not 1 <= number <= MOST:
                raise InvalidArgument(f"{name}={number}: one kernel takes 1 to {MOST}")
        if self.is_scaled and dtype_of(self.dtype_code).kind in "iu":
            raise InvalidArgument(f"is_scaled for dtype {kind}: integers cannot be scaled")
        if self.is_resumed and not self.is_scaled:
            raise InvalidArgument(
                "is_resumed without is_scaled has no effect, because no input is scaled: leave out "
                "is_resumed"
            )
        if self.is_divided and self.op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise InvalidArgument(f"is_divided for op={self.op.name}: only a sum is averaged")
        if self.is_wide and self.dtype_code not in HALVES:
            raise InvalidArgument(f"is_wide for dtype {kind}: only float16 and bfloat16 have it")

    @property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return dtype_of(self.dtype_code).itemsize

    @property
    def name(self) -> str:
        """Name of the kernel, unique per form; letters, digits and underscores only."""
        flags = ("is_scaled", "is_resumed", "is_divided", "is_wide", "has_table")
        said = "".join(f"_{flag.partition('_')[2]}" for flag in flags if getattr(self, flag))
        kind = f"{self.op.name.lower()}_{dtype_name(self.dtype_code)}"
        return f"r2ccl_{kind}_{self.ninputs}_{self.noutputs}{said}"


def has_kernels(call: CallSignature) -> bool:
    """Return whether there are kernels for the dtype and op of a call.

    A call that does not reduce needs only copies, which exist for every dtype that arrays on a GPU
    can have.
    """
    return call.collective not in REDUCTIONS or call.op in ON_GPU.get(call.dtype, ())


@functools.cache
def canonical(form: Form) -> Form:
    """Return the form that represents all forms with the same results as `form`.

    Such forms share one kernel, so fewer kernels are compiled. A copy moves unsigned integers. A
    sum of complex numbers is a sum of twice as many real numbers. Sums and products that wrap have
    the same bits for signed and unsigned integers. With a single rounding, `is_wide` makes no
    difference.

    Notes
    -----
    Why `is_wide` makes no difference with a single rounding: float32 has p' = 24 significand bits,
    and 24 >= 2 p + 2 for the p = 11 bits of float16 and p = 8 of bfloat16. Rounding a sum or
    product of two to float32 first therefore does not change the result (Figueroa, "When is double
    rounding innocuous?", SIGNUM Newsletter 30(3), 1995). Products too small for a normal float32
    are exact in float32 if they reach half the smallest bfloat16.
    """
    op = ReduceOp.SUM if form.op is ReduceOp.AVG or form.ninputs == 1 else form.op
    is_scaled = form.is_scaled and (form.ninputs > 1 or not form.is_resumed)
    changed = is_scaled or form.is_divided or form.ninputs > 1
    return msgspec.structs.replace(
        form,
        op=op,
        dtype_code=_calculated_as(form, op) if changed else _copied_as(form),
        is_scaled=is_scaled,
        is_resumed=form.is_resumed and is_scaled,
        is_wide=form.is_wide and _roundings(form, op) > 1,
    )


def _roundings(form: Form, op: ReduceOp) -> int:
    """Return the number of times that a form without `is_wide` rounds each result element."""
    combined = form.ninputs - 1 if op in (ReduceOp.SUM, ReduceOp.PROD) else 0
    scaled = form.ninputs - form.is_resumed if form.is_scaled else 0
    return combined + scaled + form.is_divided


def _copied_as(form: Form) -> int:
    dtype = dtype_of(form.dtype_code)
    itemsize = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    return CODES[np.dtype(_COPIED_AS[itemsize])]


def _calculated_as(form: Form, op: ReduceOp) -> int:
    dtype = dtype_of(form.dtype_code)
    if dtype.kind == "c" and op is ReduceOp.SUM:
        return CODES[np.dtype(np.float32 if dtype.itemsize == 8 else np.float64)]
    if dtype.kind == "i" and op in (ReduceOp.SUM, ReduceOp.PROD) and not form.is_divided:
        return CODES[np.dtype(_COPIED_AS[dtype.itemsize])]
    return form.dtype_code


__all__ = ["HALVES", "MOST", "Form", "canonical", "has_kernels"]

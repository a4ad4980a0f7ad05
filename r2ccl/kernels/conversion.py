"""Reductions of converted inputs: each scaled by its rank's factor, or widened to float32.

Before a collective, a rank converts its input. If the input was widened, the rank also converts the
result afterwards. The collective itself reduces the converted data, so its result has the same bits
after a failure.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from r2ccl.dtypes import dtype_name, dtype_of
from r2ccl.errors import InvalidArgument
from r2ccl.kernels.arrays import data_of
from r2ccl.kernels.host import HALVES, SMALL, Array, require_compiled
from r2ccl.kernels.native import callable_of
from r2ccl.kernels.table import check_op
from r2ccl.types import ReduceOp

#: ``convert(source, out)`` on arrays of equal size in separate memory.
Converter = Callable[[Array, Array], object]


class ConvertedOp(msgspec.Struct, frozen=True):
    """Reduction of converted inputs; made by `premul_sum` and `accumulate_float32`.

    Parameters
    ----------
    op : ReduceOp
        Reduction of the converted inputs; default: SUM.
    factor : int, float or complex, optional
        Factor of this rank's input; None: the input is not multiplied.
    is_wide : bool
        True: reduce in float32; the result is rounded to the dtype of the output. False: reduce in
        the dtype of the input.
    """

    op: ReduceOp = ReduceOp.SUM
    factor: complex | None = None
    is_wide: bool = False

    def check(self, dtype_code: int) -> None:
        """Check that inputs of the dtype number `dtype_code` can be converted and reduced.

        Raises
        ------
        InvalidArgument
            If the dtype is unknown or does not support the reduction. If the factor is not a number
            of the dtype, or of float32 for a 16-bit or 8-bit float. If `is_wide` is True, and the
            dtype is not a 16-bit or 8-bit float. If `require_compiled` raises it.
        """
        check_op(dtype_code, self.op)
        dtype = dtype_of(dtype_code)
        require_compiled(dtype.name)
        if self.is_wide and dtype.name not in SMALL:
            raise InvalidArgument(
                f"accumulate_float32 for dtype {dtype_name(dtype_code)}: allowed are "
                f"{', '.join(sorted(SMALL))}; pass the op without accumulate_float32"
            )
        if self.factor is not None:
            _factor_of(dtype, self.factor)

    def converter(self, dtype_code: int) -> Converter:
        """Return the function that converts this rank's input.

        The dtype must have passed `check`. The output of the function is a float32 array if
        `is_wide` is True, otherwise an array of the input's dtype.

        Raises
        ------
        ImportError, TransportError
            For 16-bit floats, if `r2ccl.kernels.native.callable_of` raises it.

        Notes
        -----
        *Cost*: one pass over the input; for 8-bit floats up to five passes, with temporaries in
        float32 that have as many elements as the input. The first call for a 16-bit float loads a
        compiled loop, as for `r2ccl.kernels.reducer`.
        """
        dtype = dtype_of(dtype_code)
        factor = _factor_of(dtype, 1 if self.factor is None else self.factor)
        if dtype.name in HALVES:
            maker = "make_widener" if self.is_wide else "make_scaler"
            scale = callable_of(f"r2ccl.kernels.half:{maker}", dtype.name)
            bits = int(np.float32(factor).view(np.uint32))
            return lambda source, out: scale(data_of(source), data_of(out), source.size, bits)
        if dtype.name in SMALL:

            def convert(source: Array, out: Array) -> None:
                wide = out if self.is_wide else np.empty(source.size, np.float32)
                np.multiply(source.astype(np.float32), factor, out=wide)
                if not self.is_wide:
                    _narrow_float8(wide, out)

            return convert
        return lambda source, out: np.multiply(source, factor, out=out)


def narrower(dtype_code: int) -> Converter:
    """Return the function that rounds a float32 array to the 16-bit or 8-bit float `dtype_code`.

    Raises
    ------
    InvalidArgument
        If the dtype is unknown.
    ImportError, TransportError
        For 16-bit floats, if `r2ccl.kernels.native.callable_of` raises it.
    """
    dtype = dtype_of(dtype_code)
    if dtype.name in HALVES:
        narrow = callable_of("r2ccl.kernels.half:make_narrower", dtype.name)
        return lambda source, out: narrow(data_of(source), data_of(out), source.size)
    return _narrow_float8


def _narrow_float8(source: Array, out: Array) -> None:
    np.copyto(out, source, casting="unsafe")
    out[np.isnan(out)] = np.nan  # the conversion keeps the sign, which depends on the operands


def premul_sum(factor: complex) -> ConvertedOp:
    """Return the reduction that sums the inputs, each multiplied by its rank's `factor`.

    Parameters
    ----------
    factor : int, float or complex
        May differ between ranks; a rank that passes SUM has factor 1. Integer dtypes need an
        integer, and only complex dtypes accept a complex factor. Otherwise, or if the factor is out
        of range, the collective raises InvalidArgument. For 16-bit and 8-bit floats, the factor and
        the product are rounded to float32. Without `accumulate_float32`, the product is then
        rounded to the dtype.

    Returns
    -------
    ConvertedOp
        Value for the ``op`` of any reduction of `Communicator` on host memory.

    Raises
    ------
    InvalidArgument
        If `factor` is not a number.

    Notes
    -----
    Equivalent to ``ncclRedOpCreatePreMulSum`` of NCCL. *Cost*: the cost of SUM, plus one more pass
    over the input (for 8-bit floats up to five) and memory of the size of the input, which is
    reused across calls. The input is not modified, unless it is also the output.
    """
    is_number = any(hasattr(factor, name) for name in ("__index__", "__float__", "__complex__"))
    if not is_number or getattr(factor, "ndim", False):  # arrays have these methods, too
        raise InvalidArgument(f"premul_sum({factor!r}): pass a number")
    return ConvertedOp(ReduceOp.SUM, factor)


def accumulate_float32(op: ReduceOp | ConvertedOp = ReduceOp.SUM) -> ConvertedOp:
    """Return the reduction that computes `op` in float32 and rounds the result once.

    Parameters
    ----------
    op : ReduceOp or ConvertedOp
        SUM, PROD, MIN, MAX, AVG or a `premul_sum`. The inputs are 16-bit or 8-bit floats. With
        another ReduceOp or dtype, the collective raises InvalidArgument.

    Returns
    -------
    ConvertedOp
        Value for the ``op`` of any reduction of `Communicator` on host memory.

    Raises
    ------
    InvalidArgument
        If `op` is neither a ReduceOp nor a ConvertedOp.

    Notes
    -----
    Without this reduction, each of the n - 1 steps among n ranks rounds to the dtype. *Cost*: all
    data travels as float32, so twice as many bytes for 16-bit floats and four times as many for
    8-bit floats; and memory for the input and the result in float32, which is reused across calls.
    """
    if isinstance(op, ConvertedOp):
        return msgspec.structs.replace(op, is_wide=True)
    if not isinstance(op, ReduceOp):
        raise InvalidArgument(
            f"accumulate_float32({op!r}): pass r2ccl.SUM, another ReduceOp or a premul_sum"
        )
    return ConvertedOp(op, is_wide=True)


def _factor_of(dtype: np.dtype[Any], factor: Any) -> Any:
    """Return the factor in the type in which arrays of `dtype` are multiplied.

    Raises
    ------
    InvalidArgument
        If this type cannot represent the factor.
    """
    kind = "f" if dtype.name in SMALL else dtype.kind
    try:
        if kind == "f" and isinstance(factor, complex | np.complexfloating):
            raise TypeError
        if kind in "iu":
            return dtype.type(operator.index(factor))
        given: Any = float(factor) if kind == "f" else complex(factor)
        with np.errstate(over="ignore"):
            made = (np.dtype(np.float32) if dtype.name in SMALL else dtype).type(given)
        if np.isfinite(given) and not np.isfinite(made):
            raise OverflowError
        return made
    except (TypeError, ValueError, OverflowError):
        allowed = {"i": "an integer", "u": "an integer", "f": "a real number"}.get(kind, "a number")
        holder = "float32" if dtype.name in SMALL else "the dtype"
        raise InvalidArgument(
            f"premul_sum({factor!r}) for dtype {dtype.name}: pass {allowed} that {holder} can hold"
        ) from None


__all__ = ["ConvertedOp", "Converter", "accumulate_float32", "narrower", "premul_sum"]

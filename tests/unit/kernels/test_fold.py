"""Compiled kernels that reduce several arrays at once give what the kernels of slices give."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from support.slow import slow_but

from r2ccl import kernels
from r2ccl.dtypes import CODES, DTYPES, dtype_name
from r2ccl.errors import InvalidArgument
from r2ccl.kernels.fold import fold_kernel
from r2ccl.types import ReduceOp

_CALL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
#: More than a block of the kernels, and no multiple of a vector.
_SIZE = 5003
_F32 = CODES[np.dtype(np.float32)]


def _values(code, rank, size=_SIZE):
    dtype = DTYPES[code]
    rng = np.random.default_rng([code, rank])
    if dtype.kind == "b":
        return rng.integers(0, 2, size).astype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, size, dtype=dtype, endpoint=True)
    if dtype.kind == "c":
        found = (rng.normal(size=size) + 1j * rng.normal(size=size)).astype(dtype)
        found.view(found.real.dtype)[::7] = np.nan if rank else -np.nan
        return found
    found = (rng.normal(size=size) * 10 ** rng.uniform(-3, 3, size)).astype(dtype)
    found[::7] = np.nan if rank else -np.nan
    found[1::3] = np.where(rng.integers(0, 2, found[1::3].size), 0.0, -0.0)
    return found


def _fold(code, op, arrays, out):
    addresses = np.array([each.ctypes.data for each in arrays])
    _CALL(fold_kernel(code, op))(
        addresses.ctypes.data, len(arrays), out.ctypes.data, arrays[0].nbytes
    )


def _expected(code, op, arrays):
    total = arrays[0].copy()

    def reduce():
        for each in arrays[1:]:
            kernels.reducer(code, op)(total, each, total)
        if op is ReduceOp.AVG:
            kernels.divider(code, len(arrays))(total)

    kernels.quiet_context().run(reduce)
    return total


@pytest.mark.parametrize(
    "code",
    slow_but(
        [CODES[np.dtype(name)] for name in ("int32", "float16", "float32", "complex64", "bool")],
        [code for code in kernels.OPS if code != 16],
    ),
    ids=dtype_name,
)
def test_kernels_give_the_bits_of_a_fold_in_order(code):
    for op in sorted(kernels.OPS[code]):
        if not fold_kernel(code, op):
            continue
        for count in (1, 2, 3):
            arrays = [_values(code, rank) for rank in range(count)]
            out = np.zeros_like(arrays[0])
            _fold(code, op, arrays, out)
            wanted = _expected(code, op, arrays)
            assert out.tobytes() == wanted.tobytes(), (op.name, count)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_target_may_be_a_source(place):
    arrays = [_values(_F32, rank) for rank in range(3)]
    wanted = _expected(_F32, ReduceOp.SUM, arrays)
    _fold(_F32, ReduceOp.SUM, arrays, arrays[place])
    assert arrays[place].tobytes() == wanted.tobytes()


def test_bytes_beyond_the_end_stay():
    arrays = [_values(_F32, rank, 13) for rank in range(2)]
    out = np.full(20, 7, np.float32)
    _fold(_F32, ReduceOp.SUM, arrays, out)
    assert (out[13:] == 7).all()


def test_pairs_and_8_bit_floats_have_no_kernel():
    without = {code for code, ops in kernels.OPS.items() if not fold_kernel(code, min(ops))}
    assert without == {10, 11, 21, 22, 23, 24}


def test_op_that_a_dtype_lacks_is_refused():
    with pytest.raises(InvalidArgument, match="op=BAND for dtype float32"):
        fold_kernel(_F32, ReduceOp.BAND)

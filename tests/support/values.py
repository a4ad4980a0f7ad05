"""Values that ranks exchange in tests, and the results that NumPy computes from them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import r2ccl
from r2ccl import dtypes
from r2ccl.kernels import OPS

_CODES = {dtypes.dtype_name(code): code for code in dtypes.DTYPES}
DTYPES = tuple(_CODES)
#: The element types, one or two of each kind, for which `make test` compiles the kernels of all
#: operations. Each kernel takes 0.4 s of CPU time.
COMPILED = ("uint8", "int32", "bfloat16", "float16", "float32", "complex64", "bool")
FUNCTIONS = {
    r2ccl.PROD: np.multiply,
    r2ccl.MIN: np.minimum,
    r2ccl.MAX: np.maximum,
    r2ccl.LAND: np.logical_and,
    r2ccl.LOR: np.logical_or,
    r2ccl.LXOR: np.logical_xor,
    r2ccl.BAND: np.bitwise_and,
    r2ccl.BOR: np.bitwise_or,
    r2ccl.BXOR: np.bitwise_xor,
    # The data of a higher rank has higher indices, so the earlier of equal values has the lower.
    r2ccl.MINLOC: lambda a, b: np.where(b["value"] < a["value"], b, a),
    r2ccl.MAXLOC: lambda a, b: np.where(b["value"] > a["value"], b, a),
}


def dtype_of(name: str) -> np.dtype[Any]:
    return dtypes.DTYPES[_CODES[name]]


def ops_of(name: str) -> list[r2ccl.ReduceOp]:
    return sorted(OPS[_CODES[name]])


def some_ops(name: str) -> list[r2ccl.ReduceOp]:
    """Return a few operations of a dtype, at least one, that are exact over eight ranks."""
    ops = [r2ccl.SUM, r2ccl.MAX, r2ccl.LOR, r2ccl.MINLOC]
    if name.startswith("float8"):
        ops.remove(r2ccl.SUM)
    return [op for op in ops if op in ops_of(name)]


@functools.lru_cache(maxsize=128)
def _small_integers(rank: int, count: int) -> np.ndarray:
    values = np.random.default_rng((rank, count)).integers(1, 3, count).astype(np.int8)
    values.flags.writeable = False
    return values


def data_of(rank: int, count: int, name: str) -> np.ndarray:
    """Return small integers, whose sums and products over a few ranks are exact in every dtype."""
    values = _small_integers(rank, count)
    dtype = dtype_of(name)
    if dtype.names is None:
        return (values - 1 if name == "bool" else values).astype(dtype)
    pairs = np.frombuffer(bytearray(count * dtype.itemsize), dtype)  # 0 between the fields
    pairs["value"], pairs["index"] = values, rank
    return pairs


def expected(nranks: int, count: int, name: str, op: r2ccl.ReduceOp) -> np.ndarray:
    return reduced([data_of(rank, count, name) for rank in range(nranks)], op)


def reduced(every: list[np.ndarray], op: r2ccl.ReduceOp) -> np.ndarray:
    """Reduce the inputs of all ranks with NumPy."""
    nranks = len(every)
    total = functools.reduce(FUNCTIONS.get(op, np.add), every).astype(every[0].dtype)
    if op != r2ccl.AVG:
        return total
    if total.dtype.kind in "iu":
        return (total // nranks).astype(total.dtype)
    # Divide a complex sum part by part: NumPy's complex division may round differently.
    parts = total.view(total.real.dtype)
    return (parts / nranks).astype(parts.dtype).view(total.dtype)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype.names is not None:  # NumPy copies only the fields, not the bytes between them
        return bool((a.reshape(-1) == b.reshape(-1)).all())
    return a.tobytes() == b.tobytes()

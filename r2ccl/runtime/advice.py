"""Advice in error messages about invalid arguments, in terms of the library of the caller's object.

If all arguments of a call are valid, no function here is called, except `misplaced` on a rank that
does not use `out`.
"""

from __future__ import annotations

import enum
import sys
from numbers import Integral
from typing import Any

import numpy as np

from r2ccl.errors import InvalidArgument
from r2ccl.types import ReduceOp

#: Name of the `ReduceOp`, by the name of a function or of another library's constant.
_OP_NAMES = {
    "ADD": "SUM", "MUL": "PROD", "MULTIPLY": "PROD", "PRODUCT": "PROD", "MINIMUM": "MIN",
    "MAXIMUM": "MAX", "MEAN": "AVG", "AVERAGE": "AVG", "LOGICAL_AND": "LAND", "LOGICAL_OR": "LOR",
    "LOGICAL_XOR": "LXOR", "BITWISE_AND": "BAND", "BITWISE_OR": "BOR", "BITWISE_XOR": "BXOR",
    "AND_": "BAND", "OR_": "BOR", "XOR": "BXOR",
}  # fmt: skip

#: Replacements for an argument ``x`` that messages advise to pass, by the library of ``x``.
_CONTIGUOUS = {"torch": "x.contiguous()", "cupy": "cupy.ascontiguousarray(x)"}
_COPY = {
    "torch": "x.clone()", "jax": "np.array(x)", "jaxlib": "np.array(x)", "builtins": "bytearray(x)",
}  # fmt: skip
_ON_HOST = {"torch": "x.cpu()", "cupy": "x.get()", "numba": "x.copy_to_host()"}
_ARRAY = {
    "pandas": "x.to_numpy()", "polars": "x.to_numpy()", "tensorflow": "x.numpy()",
    "builtins": "a NumPy array, such as np.array(x)",
}  # fmt: skip
#: Attributes by which arrays give access to their memory.
_ARRAY_PROTOCOLS = ("__array_interface__", "__cuda_array_interface__", "__dlpack__")


def type_name(x: Any) -> str:
    """Return the qualified name of the type of `x`, for a message."""
    return f"{type(x).__module__}.{type(x).__qualname__}"


def cannot_view(x: Any, why: object) -> InvalidArgument:
    """Return the error for an array `x` that cannot be viewed, for the reason `why`.

    If `x` is a JAX array and `_jax_reason` finds a reason, the error names this reason, not `why`.
    """
    fix = "; pass x.detach()" if getattr(x, "requires_grad", False) else ""
    reason = _jax_reason(x) or f"{why}{fix}"
    return InvalidArgument(f"{type_name(x)} was given and cannot be viewed: {reason}")


def contiguous(x: Any) -> str:
    """Return an expression for a C-contiguous copy of the array `x`."""
    return _CONTIGUOUS.get(_library(x), "np.ascontiguousarray(x)")


def copy(x: Any) -> str:
    """Return an expression for a copy of the array `x` that can be written to."""
    if isinstance(x, np.generic):  # its copy() returns a scalar, which is read-only, too
        return "np.array(x)"
    return _COPY.get(_library(x), "x.copy()")


def on_host(x: Any) -> str:
    """Return an expression for a copy of the device array `x` in host memory."""
    return _ON_HOST.get(_library(x), "np.asarray(x)")


def as_array(x: Any) -> str:
    """Return the advice about `x`, which is not an array, as a clause of a message; "" for none."""
    is_jax_key = type(x).__name__ == "PRNGKeyArray"
    found = "jax.random.key_data(x)" if is_jax_key else _ARRAY.get(_library(x), "")
    return f"pass {found}; " if found else ""


def refused_op(op: object) -> InvalidArgument:
    """Return the error to raise for `op`, whose type is not one of r2ccl's own.

    Examples are ``"sum"``, ``MPI.SUM`` and 2, which is MIN here and MAX in NCCL. The error says
    what to pass.
    """
    name = _op_name(op)
    advice = f"pass r2ccl.{name}"
    if not name:
        advice = f"pass r2ccl.SUM, or one of {', '.join(ReduceOp.__members__)}"
        if isinstance(op, Integral):
            advice = f"libraries number the operations differently; {advice}"
    if type(op).__module__.startswith("mpi4py"):
        advice += ", or use r2ccl.interop.mpi, which takes the operations of mpi4py"
    elif callable(op):
        advice += ", or r2ccl.user_op(...) of a function"
    return InvalidArgument(f"op={op!r}: {advice}")


def refused_output(out: object, why: InvalidArgument) -> InvalidArgument:
    """Return the error to raise for `out`, after an attempt to view `out` has raised `why`.

    If `misplaced` recognizes `out`, the error says to which parameter `out` belongs. Otherwise the
    error is `why`.
    """
    return misplaced(out) or why


def misplaced(out: object) -> InvalidArgument | None:
    """Return the error to raise for `out` if it is an operation or a root; else None.

    Text, functions and constants for operations count as operations, integers as roots.
    """
    if isinstance(out, str) or _is_operation(out):
        return InvalidArgument(
            f"out={out!r}: the second argument is out; give the operation as op=..., such as "
            "op=r2ccl.SUM"
        )
    if isinstance(out, Integral):
        return InvalidArgument(
            f"out={out!r}: the second argument is out; give the root as root={out}"
        )
    return None


def _is_operation(x: Any) -> bool:
    """Return whether `x`, which is not text, is a function or a library's constant for an op."""
    # The class of an array may have any name, such as OpticalField, and a method __call__.
    is_array = any(hasattr(type(x), name) for name in _ARRAY_PROTOCOLS)
    return not is_array and (callable(x) or "Op" in type(x).__name__)


def _jax_reason(x: Any) -> str:
    """Return a text that says why the JAX array `x` cannot be viewed, and what to do.

    The text is "" if `x` is not a JAX array, or no reason is known.
    """
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(x, jax.Array):
        return ""
    if isinstance(x, jax.core.Tracer):
        return (
            "arrays in a function that JAX traces (jit, grad, vmap) have no values; make the call "
            "outside of the function, or within jax.experimental.io_callback(..., ordered=True)"
        )
    if x.is_deleted():
        return (
            "the array was deleted, or donated to a jitted function; make the call before that, "
            "or pass a copy that was made before, by x.copy()"
        )
    if len(x.sharding.device_set) > 1 or not x.is_fully_addressable:
        whole = ", or np.asarray(x), which copies all shards" if x.is_fully_addressable else ""
        return (
            f"the array is sharded over {len(x.sharding.device_set)} devices; pass one shard of "
            f"this process, x.addressable_shards[i].data{whole}"
        )
    return ""


def _op_name(op: object) -> str:
    """Return the name of the `ReduceOp` that corresponds to `op`; "" if there is none."""
    module = sys.modules.get(type(op).__module__)
    if module is not None and module.__name__ == "mpi4py.MPI":
        names = (name for name in ReduceOp.__members__ if getattr(module, name, None) == op)
        return next(names, "")
    given = op.name if isinstance(op, enum.Enum) else getattr(op, "__name__", None)
    # Constants of torch and of other libraries print as ReduceOp.SUM.
    name = str(given or op).rpartition(".")[2].upper()
    name = _OP_NAMES.get(name, name)
    return name if name in ReduceOp.__members__ else ""


def _library(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


__all__ = [
    "as_array",
    "cannot_view",
    "contiguous",
    "copy",
    "misplaced",
    "on_host",
    "refused_op",
    "refused_output",
    "type_name",
]

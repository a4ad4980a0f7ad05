"""Arguments of kernels: the addresses they accept, and C types.

Values only. Must not import Numba. Invariant: the arguments are in the order of
`r2ccl.kernels.cuda.template.parameters`, then the two numbers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from r2ccl.device.base import Argument
from r2ccl.dtypes import dtype_of
from r2ccl.errors import InvalidArgument
from r2ccl.kernels.cuda.arithmetic import numbers_of
from r2ccl.kernels.cuda.form import Form, canonical

_C_TYPES: dict[str, type[ctypes._SimpleCData[Any]]] = {
    "s32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "s64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}


def check_addresses(form: Form, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Refuse addresses that a kernel would fail on.

    Raises
    ------
    InvalidArgument
        See `Launcher.launch`.
    """
    if form.has_table:
        raise InvalidArgument(f"{form.name} finds addresses in a table: use launch_from_table")
    if len(sources) != form.ninputs or len(targets) != form.noutputs:
        raise InvalidArgument(
            f"{len(sources)} inputs and {len(targets)} outputs for {form.name}: give "
            f"{form.ninputs} and {form.noutputs}"
        )
    alignment = _layout(form).alignment
    for address in (*sources, *targets):
        if address % alignment:
            raise InvalidArgument(
                f"address {address:#x} is not aligned to {alignment} bytes: pass a view that "
                "starts at an element"
            )


def arguments(
    form: Form, addresses: Sequence[int], count: int, *, factor: float = 1.0, nranks: int = 1
) -> tuple[Argument, ...]:
    """List a kernel's arguments.

    Parameters
    ----------
    form : Form
    addresses : sequence of int
        Of the inputs, then of the outputs; or of the table alone.
    count : int
        Elements of an operand.
    factor, nranks : float, int
        See `Launcher.launch`.

    Raises
    ------
    InvalidArgument
        `nranks` is out of range.
    """
    if not 1 <= nranks < 1 << 31:
        raise InvalidArgument(f"nranks={nranks}: allowed is 1 to {(1 << 31) - 1}")
    layout = _layout(form)
    return (
        *[(address, ctypes.c_int64) for address in addresses],
        (count * layout.itemsize, ctypes.c_int64),
        (factor, layout.factor),
        (nranks, layout.divisor),
    )


class _Layout(NamedTuple):
    """Bytes of an element, what its address is a multiple of, and the types of the two numbers."""

    itemsize: int
    alignment: int
    factor: type[ctypes._SimpleCData[Any]]
    divisor: type[ctypes._SimpleCData[Any]]


@functools.cache
def _layout(form: Form) -> _Layout:
    # A complex number is aligned as its parts are.
    nparts = 2 if dtype_of(form.dtype_code).kind == "c" else 1
    factor, divisor = (_C_TYPES[kind] for kind in numbers_of(canonical(form)))
    return _Layout(form.itemsize, form.itemsize // nparts, factor, divisor)


__all__ = ["arguments", "check_addresses"]

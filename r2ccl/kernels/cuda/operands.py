"""Arguments of kernels: checks of addresses, and values with their C types.

Invariant: the arguments are in the order of `r2ccl.kernels.cuda.template.parameters`, followed by
the factor and the divisor. This module must not import Numba.
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
    """Check the addresses of the inputs and outputs of a kernel.

    Raises
    ------
    InvalidArgument
        If the form has a table, the number of inputs or outputs is wrong, or an address is not
        aligned.
    """
    if form.has_table:
        raise InvalidArgument(f"{form.name} reads addresses from a table; use launch_from_table")
    if len(sources) != form.ninputs or len(targets) != form.noutputs:
        raise InvalidArgument(
            f"{len(sources)} inputs and {len(targets)} outputs were given for {form.name}; pass "
            f"{form.ninputs} and {form.noutputs}"
        )
    alignment = _layout(form).alignment
    for address in (*sources, *targets):
        if address % alignment:
            raise InvalidArgument(
                f"address {address:#x} is not aligned to {alignment} bytes: pass an address that "
                f"is a multiple of {alignment}, for example that of a copy of the array"
            )


def arguments(
    form: Form, addresses: Sequence[int], count: int, *, factor: float = 1.0, nranks: int = 1
) -> tuple[Argument, ...]:
    """Return a kernel's arguments with their C types.

    Parameters
    ----------
    form : Form
    addresses : sequence of int
        Addresses of the inputs, then of the outputs; or only the address of the table, if the form
        has a table.
    count : int
        Number of elements of each operand.
    factor, nranks : float, int
        Factor of a scaled form, and divisor of a divided form; other forms ignore them.

    Raises
    ------
    InvalidArgument
        If `nranks` is not in 1 to 2**31 - 1.
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
    """Size and alignment of an element in bytes, and the C types of the factor and the divisor."""

    itemsize: int
    alignment: int
    factor: type[ctypes._SimpleCData[Any]]
    divisor: type[ctypes._SimpleCData[Any]]


@functools.cache
def _layout(form: Form) -> _Layout:
    # A complex number has the alignment of its parts.
    nparts = 2 if dtype_of(form.dtype_code).kind == "c" else 1
    factor, divisor = (_C_TYPES[kind] for kind in numbers_of(canonical(form)))
    return _Layout(form.itemsize, form.itemsize // nparts, factor, divisor)


__all__ = ["arguments", "check_addresses"]

"""Fakes of the library's GPU kernels; the kernels for the host (`r2ccl.kernels`) do the arithmetic.

A kernel whose arguments are the addresses of its operands declares the memory that it touches. A
kernel that reads these addresses from a table cannot declare its memory, because the host may fill
the table after the launch. The fakes give the same bits as the kernels of `r2ccl.kernels.cuda`,
except in the cases listed there (NaN and complex products).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from r2ccl.device.base import Kernel
from r2ccl.dtypes import CODES, dtype_of
from r2ccl.kernels import divider, quiet_context, reducer
from r2ccl.kernels.cuda import Form, Launcher, canonical
from r2ccl.testing.fakedevice.device import FakeDevice
from r2ccl.testing.fakedevice.kernels import FakeKernel, Grid, Touches
from r2ccl.testing.fakedevice.order import Misuse

Array = np.ndarray[Any, np.dtype[Any]]

_FLOAT32 = CODES[np.dtype(np.float32)]
_ADDRESS_NBYTES = 8


class FakeLauncher(Launcher):
    """`Launcher` for a `FakeDevice`, with the same arguments and grids, but kernels in Python.

    Parameters
    ----------
    device : FakeDevice
    is_wide : bool
        True if launches from a table combine float16 and bfloat16 in float32, and round once.
    """

    def __init__(self, device: FakeDevice, *, is_wide: bool = False) -> None:
        super().__init__(device, is_wide=is_wide, directory=Path())
        self._fake = device
        self._prepared: dict[str, Kernel] = {}

    def prepare(self, form: Form) -> Kernel:
        """Return the handle of a form's fake kernel; load it on the device at the first call."""
        shared = canonical(form)
        if shared.name not in self._prepared:
            self._fake.kernels.setdefault(shared.name, kernel_of(shared))
            self._prepared[shared.name] = self._fake.load(shared.name.encode(), shared.name)
        return self._prepared[shared.name]


def kernel_of(form: Form) -> FakeKernel:
    """Return the fake kernel of a form (`r2ccl.kernels.cuda.Form`), which must be canonical."""
    noperands = form.ninputs + form.noutputs

    def run(grid: Grid, *given: Any) -> None:
        *addresses, nbytes, factor, divisor = given
        if form.has_table:
            table = grid.read(addresses[0], _ADDRESS_NBYTES * noperands)
            addresses = [int(each) for each in table.view(np.int64)]
            if not addresses[0]:
                return
        dtype = dtype_of(form.dtype_code)
        _require_aligned(form, dtype.itemsize // (2 if dtype.kind == "c" else 1), addresses)
        sources = [grid.read(each, nbytes).view(dtype).copy() for each in addresses[: form.ninputs]]
        result = quiet_context().run(combine, form, sources, factor, int(divisor))
        for each in addresses[form.ninputs :]:
            grid.write(each, nbytes)[:] = result.view(np.uint8)

    return FakeKernel(run, None if form.has_table else _touches_of(form))


def _require_aligned(form: Form, alignment: int, addresses: Sequence[int]) -> None:
    """Refuse operands that are not aligned to `alignment` bytes, on which a GPU would fail."""
    for each in addresses:
        if each % alignment:
            raise Misuse.of(
                f"{form.name} uses address {each:#x}, which is not aligned to {alignment} bytes"
            )


def _touches_of(form: Form) -> Touches:
    def touches(grid: Grid, *given: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        *addresses, nbytes, _, _ = given
        ranges = [(each, nbytes) for each in addresses]
        return ranges[: form.ninputs], ranges[form.ninputs :]

    return touches


def combine(form: Form, sources: Sequence[Array], factor: float, nranks: int) -> Array:
    """Combine operands as a form describes, and return the result.

    Parameters
    ----------
    form : Form
        The form, which must be canonical.
    sources : sequence of ndarray
        Operands of the form's element type; they are not modified.
    factor : float
        Factor of a scaled form.
    nranks : int
        Divisor of a divided form.
    """
    dtype = dtype_of(form.dtype_code)
    code = _FLOAT32 if form.is_wide else form.dtype_code
    operands = [each.astype(dtype_of(code)) for each in sources]
    if form.is_scaled:
        operands[form.is_resumed :] = [
            _scaled(each, factor) for each in operands[form.is_resumed :]
        ]
    total = operands[0]
    for each in operands[1:]:
        reducer(code, form.op)(total, each, total)
    if form.is_divided:
        divider(code, nranks)(total)
    return total.astype(dtype)


def _scaled(operand: Array, factor: float) -> Array:
    """Return `operand` times `factor` in the operand's dtype, computed at least in float32."""
    real = np.float64 if operand.real.dtype == np.float64 else np.float32
    is_complex = operand.dtype.kind == "c"
    parts = operand.view(real) if is_complex else operand.astype(real)
    product: Array = np.multiply(parts, np.array(factor, real))
    return product.view(operand.dtype) if is_complex else product.astype(operand.dtype)


__all__ = ["FakeLauncher", "combine", "kernel_of"]

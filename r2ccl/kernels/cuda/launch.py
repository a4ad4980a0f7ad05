"""How kernels are launched: loaded into a device once, with what grid, with what arguments.

Sees a `Device`, addresses and counts. Must not import Numba. Invariant: what a kernel computes does
not depend on its grid, nor on where a buffer starts.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from r2ccl.device.base import Argument, Device, Kernel, Stream
from r2ccl.dtypes import dtype_of
from r2ccl.errors import InvalidArgument
from r2ccl.kernels.cuda.arithmetic import numbers_of
from r2ccl.kernels.cuda.form import HALVES, Form, canonical
from r2ccl.kernels.cuda.machine import VECTOR
from r2ccl.kernels.cuda.ptx import NBLOCKS_AT_ONCE, NTHREADS, cache_directory, ptx_of
from r2ccl.types import CallSignature, ReduceOp

#: Most blocks of a multiprocessor, those that wait for one included: several times as many as run
#: at once, so that the last of them to end does not keep the others waiting for long.
BLOCKS_PER_SM = 16

_C_TYPES: dict[str, type[ctypes._SimpleCData[Any]]] = {
    "s32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "s64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}


class Launcher:
    """The kernels of one device.

    Parameters
    ----------
    device : Device
    is_wide : bool
        Whether `launch_from_table` combines float16 and bfloat16 in float32, rounded once; else it
        rounds at every step, as the host does.
    directory : Path or None, optional
        Where compiled kernels are kept; by default `cache_directory` of the environment.

    Notes
    -----
    Not for two threads at once. Kernels stay loaded until the device is closed.
    """

    def __init__(
        self, device: Device, *, is_wide: bool = False, directory: Path | None = None
    ) -> None:
        self._device = device
        self._is_wide = is_wide
        self._directory = directory or cache_directory(os.environ)
        self._loaded: dict[Form, Kernel] = {}

    def prepare(self, form: Form) -> Kernel:
        """Load the kernel of a form, unless it is.

        Raises
        ------
        InvalidArgument, TransportError
            As `r2ccl.kernels.cuda.ptx_of` and `Device.load`.

        Notes
        -----
        *Cost*: 0.2 µs if it is loaded, else ms, and as `ptx_of` if it must be compiled. Loading may
        wait for work of the device: prepare before a stream is given anything that waits for what
        the host does later.
        """
        kernel = self._loaded.get(form)
        if kernel is None:
            shared = canonical(form)
            kernel = self._loaded.get(shared)
            if kernel is None:
                ptx = ptx_of(shared, self._device.capability, self._directory)
                kernel = self._loaded[shared] = self._device.load(ptx.text, ptx.entry)
            self._loaded[form] = kernel
        return kernel

    def launch(
        self,
        form: Form,
        sources: Sequence[int],
        targets: Sequence[int],
        count: int,
        stream: Stream,
        *,
        factor: float = 1.0,
        nranks: int = 1,
    ) -> None:
        """Run the kernel of a form.

        Parameters
        ----------
        form : Form
        sources, targets : sequence of int
            Addresses of the inputs and outputs, aligned as their type is. An output is exactly an
            input, or shares no memory with any.
        count : int
            Elements of each; none are no work.
        stream : Stream
        factor : float
            What a scaled form multiplies by.
        nranks : int
            What a divided form divides by.

        Raises
        ------
        InvalidArgument
            Other numbers of inputs or outputs than the form's, an address that is not aligned,
            `nranks` out of range, or a form with a table or a mailbox.
        InvalidArgument, TransportError
            As `prepare` and `Device.launch`.
        """
        check_addresses(form, sources, targets)
        self._launch(form, (*sources, *targets), count, stream, factor, nranks)

    def prepare_from_table(self, call: CallSignature, ninputs: int, noutputs: int) -> None:
        """Load the kernel that `launch_from_table` runs; see `prepare`."""
        self.prepare(self._form_of(call, ninputs, noutputs))

    def launch_from_table(
        self, call: CallSignature, ninputs: int, noutputs: int, table: int, count: int,
        nranks: int, stream: Stream,
    ) -> None:  # fmt: skip
        """Run the kernel of a collective, whose operands' addresses are at `table` by then.

        Parameters
        ----------
        call : CallSignature
            What is called: its dtype and op.
        ninputs, noutputs : int
            1 to `MOST`. One input is copied.
        table : int
            Address, for the device, of the inputs' and then the outputs' addresses, 8 bytes each.
        count : int
            Elements of each.
        nranks : int
            What AVG divides by.
        stream : Stream

        Raises
        ------
        InvalidArgument
            The table is not aligned.
        InvalidArgument, TransportError
            As `launch`.
        """
        if table % 8:
            raise InvalidArgument(f"table at {table:#x}: its addresses are aligned to 8 bytes")
        form = self._form_of(call, ninputs, noutputs)
        self._launch(form, (table,), count, stream, 1.0, nranks)

    def _form_of(self, call: CallSignature, ninputs: int, noutputs: int) -> Form:
        return _form_of_call(call.dtype, call.op, ninputs, noutputs, self._is_wide)

    def _launch(
        self, form: Form, addresses: tuple[int, ...], count: int, stream: Stream,
        factor: float, nranks: int,
    ) -> None:  # fmt: skip
        if form.is_resident:
            raise InvalidArgument(f"{form.name} stays on the GPU: start it with a Resident")
        given = arguments(form, addresses, count, factor=factor, nranks=nranks)
        if count:
            kernel = self.prepare(form)
            self._device.launch(
                kernel, nblocks_of(form, count, self._device.nsms), NTHREADS, stream, given
            )


@functools.cache
def _form_of_call(dtype: int, op: int, ninputs: int, noutputs: int, is_wide: bool) -> Form:
    return Form(
        dtype_code=dtype,
        op=ReduceOp(op),
        ninputs=ninputs,
        noutputs=noutputs,
        is_divided=op == ReduceOp.AVG,
        is_wide=is_wide and dtype in HALVES,
        has_table=True,
    )


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


def nblocks_of(form: Form, count: int, nsms: int) -> int:
    """Say how many blocks of `NTHREADS` run a kernel.

    Parameters
    ----------
    form : Form
    count : int
        Elements of an operand.
    nsms : int
        Multiprocessors to run it on.
    """
    # A table may lie in host memory, which takes each block 1 to 2 us to read: once for each place.
    most = nsms * (NBLOCKS_AT_ONCE if form.has_table else BLOCKS_PER_SM)
    vectors = -(-count * _layout(form).itemsize // VECTOR)
    return max(1, min(-(-vectors // NTHREADS), most))


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
    return (
        *[(address, ctypes.c_int64) for address in addresses],
        (count * _layout(form).itemsize, ctypes.c_int64),
        *numbers(form, factor, nranks),
    )


def numbers(form: Form, factor: float, nranks: int) -> tuple[Argument, Argument]:
    """List the last arguments of every kernel; see `arguments`."""
    if not 1 <= nranks < 1 << 31:
        raise InvalidArgument(f"nranks={nranks}: allowed is 1 to {(1 << 31) - 1}")
    layout = _layout(form)
    return (factor, layout.factor), (nranks, layout.divisor)


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


__all__ = [
    "BLOCKS_PER_SM",
    "Launcher",
    "arguments",
    "check_addresses",
    "nblocks_of",
    "numbers",
]

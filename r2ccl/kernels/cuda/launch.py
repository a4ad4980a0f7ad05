"""Loads kernels into a device, each once, and launches them with a suitable grid.

Sees a `Device`, addresses and counts. Must not import Numba. Invariant: what a kernel computes does
not depend on its grid, nor on where a buffer starts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path

from r2ccl.device.base import Device, Kernel, Stream
from r2ccl.errors import InvalidArgument
from r2ccl.kernels.cuda.form import HALVES, Form, canonical
from r2ccl.kernels.cuda.machine import VECTOR
from r2ccl.kernels.cuda.operands import arguments, check_addresses
from r2ccl.kernels.cuda.ptx import NBLOCKS_AT_ONCE, NTHREADS, cache_directory, ptx_of
from r2ccl.types import CallSignature, ReduceOp

#: Most blocks of a multiprocessor, those that wait for one included: several times as many as run
#: at once, so that the last of them to end does not keep the others waiting for long.
BLOCKS_PER_SM = 16


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
    For any thread; a form that two prepare at once is loaded twice. Kernels stay loaded until the
    device is closed.
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
            `nranks` out of range, or a form with a table.
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
    vectors = -(-count * form.itemsize // VECTOR)
    return max(1, min(-(-vectors // NTHREADS), most))


__all__ = ["BLOCKS_PER_SM", "Launcher", "nblocks_of"]

"""Loads kernels into a device, and launches them with a suitable number of blocks.

Invariant: the result of a kernel depends neither on its grid nor on the addresses of buffers. This
module must not import Numba.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path

from r2ccl.device.base import Device, Kernel, Stream
from r2ccl.errors import InvalidArgument
from r2ccl.kernels.cuda.form import HALVES, Form, canonical
from r2ccl.kernels.cuda.machine import VECTORS
from r2ccl.kernels.cuda.operands import arguments, check_addresses
from r2ccl.kernels.cuda.ptx import cache_directory, ptx_of
from r2ccl.kernels.cuda.template import NBLOCKS_AT_ONCE, NTHREADS
from r2ccl.types import CallSignature, ReduceOp

#: Largest number of blocks per multiprocessor in the grid of a kernel without a table. This is
#: several times the number that runs at once, so that multiprocessors are idle only briefly while
#: the last blocks run.
BLOCKS_PER_SM = 16


class Launcher:
    """Loader and launcher of the kernels of one device.

    Parameters
    ----------
    device : Device
    is_wide : bool
        True: `launch_from_table` combines float16 and bfloat16 in float32 and rounds once. False
        (default): it rounds at every step, as on the host.
    directory : Path or None, optional
        Disk cache of compiled kernels. Default: `cache_directory` of the environment.

    Notes
    -----
    Thread-safe; a form that two threads prepare at the same time may be loaded twice. Kernels stay
    loaded until the device is closed.
    """

    def __init__(
        self, device: Device, *, is_wide: bool = False, directory: Path | None = None
    ) -> None:
        self._device = device
        self._is_wide = is_wide
        self._directory = directory or cache_directory(os.environ)
        self._loaded: dict[Form, Kernel] = {}

    def prepare(self, form: Form) -> Kernel:
        """Return the kernel of a form; compile and load it first if necessary.

        Raises
        ------
        InvalidArgument, TransportError
            If `r2ccl.kernels.cuda.ptx_of` or `Device.load` raises it.

        Notes
        -----
        *Cost*: 0.2 µs if the kernel is loaded; otherwise some ms to load it, plus the time of
        `ptx_of`. Loading may wait for work queued on the device. To avoid a deadlock, prepare
        kernels before queueing work that waits for a later action of the host.
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
        """Enqueue the kernel of a form on `stream`; load the kernel first if necessary.

        Parameters
        ----------
        form : Form
        sources, targets : sequence of int
            Addresses of the inputs and outputs, aligned to their element type. An output either
            is exactly an input or shares no memory with any input.
        count : int
            Number of elements of each input and output; with 0, nothing is launched.
        stream : Stream
        factor : float
            Factor of a scaled form.
        nranks : int
            Divisor of a divided form.

        Raises
        ------
        InvalidArgument
            If the number of inputs or outputs differs from the form's, an address is not aligned,
            `nranks` is out of range, or the form has a table.
        InvalidArgument, TransportError
            If `prepare` or `Device.launch` raises it.
        """
        check_addresses(form, sources, targets)
        self._launch(form, (*sources, *targets), count, stream, factor, nranks)

    def prepare_from_table(self, call: CallSignature, ninputs: int, noutputs: int) -> None:
        """Load the kernel that `launch_from_table` launches for these arguments; see `prepare`.

        Raises
        ------
        InvalidArgument
            If there is no kernel for the dtype and the op, or there are too many inputs or outputs.
        InvalidArgument, TransportError
            If `prepare` raises it.
        """
        self.prepare(self._form_of(call, ninputs, noutputs))

    def launch_from_table(
        self, call: CallSignature, ninputs: int, noutputs: int, table: int, count: int,
        nranks: int, stream: Stream,
    ) -> None:  # fmt: skip
        """Enqueue the kernel of a collective, which reads its operands' addresses from `table`.

        Parameters
        ----------
        call : CallSignature
            Call signature with the dtype and the op.
        ninputs, noutputs : int
            Number of inputs and outputs, 1 to `MOST`. A single input is copied, and with AVG
            divided.
        table : int
            Device address of a table with the addresses of the inputs, then of the outputs, 8 bytes
            each. The table must be filled before the kernel runs, and is borrowed until it has run.
            If the first address is 0 when the kernel runs, the kernel does nothing.
        count : int
            Number of elements of each operand; with 0, nothing is launched.
        nranks : int
            Divisor of AVG.
        stream : Stream

        Raises
        ------
        InvalidArgument
            If `table` is not aligned to 8 bytes, `nranks` is out of range, there is no kernel for
            the dtype and the op, or there are too many inputs or outputs.
        InvalidArgument, TransportError
            If `prepare` or `Device.launch` raises it.
        """
        if table % 8:
            raise InvalidArgument(f"table at {table:#x} is not aligned to 8 bytes; align it")
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
    """Return the number of blocks of `NTHREADS` threads that run a kernel.

    Parameters
    ----------
    form : Form
    count : int
        Number of elements of each operand.
    nsms : int
        Number of multiprocessors that run the kernel.
    """
    # A table may be in host memory, where each block takes 1 to 2 us to read it; with at most the
    # resident number of blocks, that time is spent once.
    most = nsms * (NBLOCKS_AT_ONCE if form.has_table else BLOCKS_PER_SM)
    vectors = -(-count * form.itemsize // max(VECTORS))
    return max(1, min(-(-vectors // NTHREADS), most))


__all__ = ["BLOCKS_PER_SM", "Launcher", "nblocks_of"]

"""Collectives on GPU memory that run in host memory, on copies of the whole arrays.

These are the scans, and the calls whose request lists the parts of the ranks (`Request.parts`),
such as gather, alltoallv and every allgatherv. The communicator's worker copies the arrays to
pinned memory, runs the collective there, and enqueues the copy of the output back to the GPU.
Unlike `r2ccl.gpu.staged`, this module does not divide calls into windows: in an alltoallv no rank
knows how many windows the other ranks would need.

The output array, too, is copied to the host before the collective runs. Elements that the
collective does not write therefore keep their values when the output is copied back: elements
outside of all parts, and the output of rank 0 in an exscan.

Invariant: all copies run on one stream. In each call the host uses the pinned memory only after the
copies into it are done, and before the copy back is enqueued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from r2ccl.clock import Clock
from r2ccl.device.base import Device, Stream
from r2ccl.dtypes import dtype_of
from r2ccl.gpu.host_signal import LINE_NBYTES, DeviceCall, DeviceJob, HostMemoryBackend
from r2ccl.runtime.arguments import Request
from r2ccl.runtime.arrays.buffers import Buffer
from r2ccl.types import PREFIXES


def is_copied(request: Request) -> bool:
    """Return whether `CopiedBackend` executes a request on GPU memory; the same on all ranks.

    The answer is the same on all ranks because, in a collective on GPU memory, either all ranks'
    requests list parts or none does.
    """
    return request.parts is not None or request.signature.collective in PREFIXES


class CopiedBackend(HostMemoryBackend[DeviceJob]):
    """Collectives of one rank in host memory, on copies of GPU arrays.

    Parameters
    ----------
    device : Device
    rank : int
    run : callable
        Runs a request on host memory.
    check, clock, timeout_s
        See `HostMemoryBackend`.
    """

    def __init__(
        self,
        device: Device,
        rank: int,
        *,
        run: Callable[[Request], None],
        check: Callable[[], None],
        clock: Clock,
        timeout_s: float,
    ) -> None:
        super().__init__(device, rank, check=check, clock=clock, timeout_s=timeout_s)
        self._run = run
        #: Pinned memory for the arrays of the largest call so far: the input, then the output.
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def supports(self, call: DeviceCall) -> bool:
        """Return whether ``call.request`` is set; it is set only for the calls of this backend."""
        return call.request is not None

    def is_prepared(self, call: DeviceCall) -> bool:
        """Return whether the pinned memory is large enough for the arrays of `call`."""
        return _nbytes_of(_request_of(call)) <= self._memory.nbytes

    def prepare(self, call: DeviceCall) -> None:
        """Wait for the device, then allocate pinned memory for the arrays of `call`.

        The new memory replaces the present pinned memory, which is too small.

        Raises
        ------
        TransportTimeout
            If the device is still busy with earlier calls after the timeout.
        TransportError
            If the device failed, or the memory cannot be pinned.
        """
        if not self._is_idle_in(self._timeout_s):
            raise self._still_busy("copies", self._timeout_s)
        self._free_memory()
        self._memory = self._device.allocate_pinned(_nbytes_of(_request_of(call)))

    def begin(self, call: DeviceCall, stream: Stream) -> DeviceJob:
        """Begin a call that follows all work on `stream` so far; see `StagedBackend.begin`."""
        return DeviceJob(
            call=call, before=self._recorded(stream), done=self.take_event(),
            number=self._next_number(),
        )  # fmt: skip

    def _free(self) -> None:
        super()._free()
        self._free_memory()

    def _free_memory(self) -> None:
        memory, self._memory = self._memory, np.empty(0, np.uint8)
        if memory.nbytes:
            self._device.free_pinned(memory)

    def _carry_out(self, job: DeviceJob) -> None:
        request = _request_of(job.call)
        self._device.wait(self._stream, job.before)
        source = self._fetch(request.source, 0)
        output = None
        if request.output is not None:
            output = self._fetch(request.output, _padded(request.source.nbytes))
        fetched = self._recorded(self._stream)
        self._await_copies(fetched)
        # The copies do not overlap, even if source and output are the same array.
        self._run(
            msgspec.structs.replace(
                request, source=source, output=output, is_in_place=False, is_staged=True
            )
        )
        if request.output is not None and output is not None and output.nbytes:
            target = request.output.address
            self._device.copy(target, output.address, output.nbytes, self._stream)

    def _fetch(self, array: Any, at: int) -> Buffer:
        """Enqueue the copy of a `DeviceBuffer` to the pinned memory; return the copy as a `Buffer`.

        `at` is the offset of the copy in the pinned memory, in bytes.
        """
        memory = self._memory[at : at + array.nbytes]
        copy = Buffer(
            memory.view(dtype_of(array.dtype_code)),
            array.dtype_code,
            array.count,
            array.itemsize,
            array.nbytes,
            memory,
        )
        if array.nbytes:
            self._device.copy(copy.address, array.address, array.nbytes, self._stream)
        return copy


def _request_of(call: DeviceCall) -> Request:
    assert call.request is not None, "see `supports`"
    return call.request


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE_NBYTES) * LINE_NBYTES


def _nbytes_of(request: Request) -> int:
    output = 0 if request.output is None else request.output.nbytes
    return _padded(request.source.nbytes) + output


__all__ = ["CopiedBackend", "is_copied"]

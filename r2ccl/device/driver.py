"""`CudaDevice` implements the `Device` interface with the CUDA driver.

Invariants: every driver call that needs a context runs with the device's primary context current,
on any thread. Every wait of this library's code has a deadline; only a call inside the driver may
wait without one.

References
----------
CUDA driver API 13, https://docs.nvidia.com/cuda/cuda-driver-api/. The numbers below are from
cuda.h.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from r2ccl.clock import Clock, monotonic
from r2ccl.device.base import Argument, Device, Event, Kernel, Stream
from r2ccl.device.bindings import Cuda
from r2ccl.device.context import PrimaryContext
from r2ccl.device.numbering import bus_id_of
from r2ccl.device.remote import RemoteWrites
from r2ccl.errors import InternalError, InvalidArgument, TransportError

#: CU_STREAM_NON_BLOCKING, CU_EVENT_DISABLE_TIMING.
_NON_BLOCKING, _NO_TIMING = 1, 2
#: CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP; CU_MEMHOSTREGISTER_ has the same values.
_PORTABLE_AND_MAPPED = 1 | 2
#: CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.
_PEER_ACCESS = 1
#: CU_STREAM_WRITE_VALUE_DEFAULT: a fence like __threadfence_system() precedes the write.
_AFTER_A_FENCE = 0
#: CU_STREAM_WAIT_VALUE_GEQ: wait until (int32_t)(word - value) >= 0.
_GREATER_OR_EQUAL = 0

_IPC_HANDLE_NBYTES = 64
_WORD_MASK = 0xFFFFFFFF
#: Size of the buffer for the error log of the driver's PTX compiler.
_LOG_NBYTES = 8192


#: Maximum number of `_Batch` objects that a device keeps for reuse.
_MOST_BATCHES = 64


class _Batch(NamedTuple):
    """Writes of words and waits for words that one driver call executes, prepared for reuse.

    ``words`` are the structs in ``operations`` that hold the values. Hold ``lock`` while setting
    these values and during the driver call.
    """

    operations: list[Any]
    words: list[Any]
    lock: threading.Lock


class CudaDevice:
    """One GPU, accessed through ``cuda.bindings.driver``.

    Parameters
    ----------
    ordinal : int
        Number of the GPU in this process, as CUDA_VISIBLE_DEVICES defines it.
    close_timeout_s : float
        Longest time that `close` waits for work in progress, in seconds.
    clock : Clock, optional
    pause : callable, optional
        ``pause(seconds)`` sleeps between polls; tests replace it.

    Raises
    ------
    TransportError
        If the bindings, the driver or a GPU are missing (status ``NO_CUDA``), or if the driver
        refuses (status: the driver's name of the error, ``CUDA_ERROR_INVALID_DEVICE`` if no GPU has
        this ordinal).

    Notes
    -----
    The caller's streams must belong to the GPU's primary context. CUDA does not work in a child
    process that was forked after a `CudaDevice` was created.
    """

    def __init__(
        self,
        ordinal: int,
        *,
        close_timeout_s: float = 30.0,
        clock: Clock = monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._close_timeout_s = close_timeout_s
        self._cuda = Cuda()
        self._ordinal = ordinal
        self._device = self._cuda.call("cuDeviceGet", ordinal)
        self._uuid = self._cuda.uuid(self._device)
        self._bus_id = bus_id_of(self._cuda, self._device)
        self._capability = (
            self._attribute("COMPUTE_CAPABILITY_MAJOR"),
            self._attribute("COMPUTE_CAPABILITY_MINOR"),
        )
        self._nsms = self._attribute("MULTIPROCESSOR_COUNT")
        self._max_pitch = self._attribute("MAX_PITCH")
        # Version 2 of the stream memory operations, the only one since CUDA 12, needs no parameter
        # of the kernel module. It has no attribute for 32-bit operations, so the attribute for
        # 64-bit operations must do.
        self._waits_on_memory = bool(self._attribute("CAN_USE_64_BIT_STREAM_MEM_OPS"))
        self._name = f"GPU {ordinal}"
        self._remote_writes = RemoteWrites(self._cuda, self._device, self._name)
        self._context = PrimaryContext(
            self._cuda, self._device, self._name, clock=clock, pause=pause
        )
        self._call = self._context.call
        #: Prepared operations of `exchange_words`, by the addresses of their words.
        self._batches: dict[tuple[tuple[int, ...], tuple[int, ...]], _Batch] = {}

    def _attribute(self, name: str) -> int:
        return self._cuda.device_attribute(name, self._device)

    @property
    def ordinal(self) -> int:
        """Number of the GPU in this process."""
        return self._ordinal

    @property
    def uuid(self) -> bytes:
        """UUID of the GPU or, in MIG mode, of its MIG instance: 16 bytes."""
        return self._uuid

    @property
    def bus_id(self) -> str:
        """PCI bus ID of the GPU; in MIG mode, of the GPU that contains the instance."""
        return self._bus_id

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability: major and minor version."""
        return self._capability

    @property
    def nsms(self) -> int:
        """Number of streaming multiprocessors."""
        return self._nsms

    @property
    def waits_on_memory(self) -> bool:
        """True if `write_word`, `wait_word` and `exchange_words` can be used."""
        return self._waits_on_memory

    @property
    def reorders_remote_writes(self) -> bool:
        """True if GPU work may miss NIC writes; see `Device.reorders_remote_writes`."""
        return self._remote_writes.are_reordered

    def current(self) -> AbstractContextManager[None]:
        """Make the GPU's primary context current on this thread inside the ``with`` block.

        Driver calls inside the block use the current context, so no other library may change the
        current context inside the block.
        """
        return self._context.current()

    # Memory

    def allocate(self, nbytes: int) -> int:
        """Implement `Device.allocate`."""
        return self._context.keep("device memory", self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        """Implement `Device.free`; the driver may wait for all work of the device."""
        self._context.end("device memory", address)

    def allocate_pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Implement `Device.allocate_pinned`.

        Every GPU accesses the array at its host address (CUDA unified virtual addressing).
        """
        address = self._call("cuMemHostAlloc", nbytes, _PORTABLE_AND_MAPPED)
        self._context.keep("pinned memory", address)
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(int(address)))
        memory.fill(0)
        return memory

    def free_pinned(self, memory: npt.NDArray[np.uint8]) -> None:
        """Implement `Device.free_pinned`."""
        self._context.end("pinned memory", memory.ctypes.data)

    def pin(self, memory: npt.NDArray[np.uint8]) -> int:
        """Implement `Device.pin`.

        Raises
        ------
        InvalidArgument
            If the memory is not contiguous, or does not consist of whole pages.
        TransportError
            If the driver refuses (status: the driver's name of the error,
            ``CUDA_ERROR_OUT_OF_MEMORY`` if the limit of locked memory is reached).
        """
        address, page = memory.ctypes.data, os.sysconf("SC_PAGE_SIZE")
        if address % page or memory.nbytes % page or not memory.flags.c_contiguous:
            raise InvalidArgument(
                f"{memory.nbytes} bytes at {address:#x} cannot be pinned: pass whole pages of "
                f"{page} bytes, contiguous in memory"
            )
        self._call("cuMemHostRegister", address, memory.nbytes, _PORTABLE_AND_MAPPED)
        self._context.keep("pinning", address)
        try:
            return int(self._call("cuMemHostGetDevicePointer", address, 0))
        except TransportError:
            self._context.end("pinning", address)
            raise

    def unpin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Implement `Device.unpin`."""
        self._context.end("pinning", memory.ctypes.data)

    # Between GPUs and processes

    def reach(self, peer: Device) -> None:
        """Implement `Device.reach`.

        Raises
        ------
        InternalError
            If `peer` is not a `CudaDevice`.
        TransportError
            If the machine has no path between the two GPUs (status ``NO_PEER_ACCESS``), if this GPU
            may miss NIC writes to the memory of `peer` and the driver supports no flush
            (``NO_FLUSH``), or if the driver refuses (the driver's name of the error, for example
            ``CUDA_ERROR_TOO_MANY_PEERS``).
        """
        if peer.uuid == self._uuid:
            return
        if not isinstance(peer, CudaDevice):
            raise InternalError(f"{self._name} cannot reach {peer!r}, which is not a CudaDevice")
        if not self._cuda.call("cuDeviceCanAccessPeer", self._device, peer._device):
            raise TransportError(
                f"{self._name} cannot reach the memory of {peer._name}: check "
                "`nvidia-smi topo -p2p r`, which shows why",
                status="NO_PEER_ACCESS",
            )
        self._context.reach(peer._context)
        peer._remote_writes.share()

    def export(self, address: int) -> tuple[bytes, int]:
        """Implement `Device.export`.

        Raises
        ------
        TransportError
            If the memory at `address` is of a kind that has no handle (status ``NO_IPC``); the
            message names the kind. Also if the driver refuses (status: the driver's name of the
            error), for example because `address` is not in device memory.
        """
        with self.current():
            self._check_exportable(address)
            base = int(self._cuda.call("cuMemGetAddressRange", address)[0])
            handle = self._cuda.call("cuIpcGetMemHandle", base)
        return ctypes.string_at(handle.getPtr(), _IPC_HANDLE_NBYTES), address - base

    def _check_exportable(self, address: int) -> None:
        attribute = self._cuda.pointer_attribute
        if attribute("IS_MANAGED", address):
            raise TransportError(
                f"{self._name}: managed memory has no IPC handle, because it migrates; allocate it "
                "with cudaMalloc",
                status="NO_IPC",
            )
        if int(attribute("MEMPOOL_HANDLE", address)):
            raise TransportError(
                f"{self._name}: memory of the stream-ordered pool has no IPC handle; allocate it "
                "with cudaMalloc",
                status="NO_IPC",
            )
        if not attribute("IS_LEGACY_CUDA_IPC_CAPABLE", address):
            raise TransportError(
                f"{self._name}: the allocation has no IPC handle: it was mapped from pieces "
                "(expandable segments), or belongs to another process; allocate it with cudaMalloc "
                "in this process",
                status="NO_IPC",
            )

    def map(self, handle: bytes) -> int:
        """Implement `Device.map`; the process that exported the handle cannot map it.

        The GPU that has the memory must also be visible to this process. If it is not this
        object's GPU, the call also lets this object's GPU access the memory.

        Raises
        ------
        InvalidArgument
            If `handle` does not have 64 bytes.
        TransportError
            If the driver refuses (status: the driver's name of the error).
        """
        if len(handle) != _IPC_HANDLE_NBYTES:
            raise InvalidArgument(
                f"an IPC handle of {len(handle)} bytes was given: it must have {_IPC_HANDLE_NBYTES}"
            )
        given = self._cuda.api.CUipcMemHandle()
        ctypes.memmove(given.getPtr(), handle, _IPC_HANDLE_NBYTES)
        return self._context.keep(
            "mapped allocation", self._call("cuIpcOpenMemHandle", given, _PEER_ACCESS)
        )

    def unmap(self, address: int) -> None:
        """Implement `Device.unmap`."""
        self._context.end("mapped allocation", address)

    def buffer_id(self, address: int) -> int:
        """Implement `Device.buffer_id`.

        For an address in freed memory, the driver reports CUDA_ERROR_INVALID_VALUE; the result is
        then 0.
        """
        try:
            return int(self._cuda.pointer_attribute("BUFFER_ID", address))
        except TransportError as exc:
            if exc.status == "CUDA_ERROR_INVALID_VALUE":
                return 0
            raise

    # NIC writes

    def flush_remote_writes(self) -> None:
        """Implement `Device.flush_remote_writes`.

        Raises
        ------
        TransportError
            If the GPU reorders writes, and the driver does not support a flush (status
            ``NO_FLUSH``) or fails.
        """
        self._remote_writes.flush(self._context)

    # Streams and events

    def make_stream(self, *, waits: bool = False) -> Stream:
        """Implement `Device.make_stream`.

        Without `waits`, the stream has the highest priority, so the GPU prefers its kernels to the
        caller's. With `waits`, the stream has the next lower priority, if there is one. All streams
        in a hardware queue (CUDA_DEVICE_MAX_CONNECTIONS) have the same priority, so a stream with
        `waits` then shares no queue with the streams without `waits`.
        """
        lowest, highest = self._call("cuCtxGetStreamPriorityRange")
        priority = min(highest + waits, lowest)  # the highest is the least number
        stream = self._call("cuStreamCreateWithPriority", _NON_BLOCKING, priority)
        return Stream(self._context.keep("stream", stream))

    def destroy_stream(self, stream: Stream) -> None:
        """Implement `Device.destroy_stream`; the call does not wait."""
        self._context.end("stream", stream)

    def is_capturing(self, stream: Stream) -> bool:
        """Implement `Device.is_capturing`.

        While another stream of the process captures in the global mode, the driver refuses this
        query for the legacy default stream. The result is then True, because work on the legacy
        default stream would invalidate the capture.
        """
        api = self._cuda.api.CUstreamCaptureStatus
        try:
            status = self._call("cuStreamIsCapturing", stream)
        except TransportError as exc:
            if exc.status == "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT":
                return True
            raise
        return bool(status != api.CU_STREAM_CAPTURE_STATUS_NONE)

    def make_event(self) -> Event:
        """Implement `Device.make_event`; the event does not record the time."""
        return Event(self._context.keep("event", self._call("cuEventCreate", _NO_TIMING)))

    def destroy_event(self, event: Event) -> None:
        """Implement `Device.destroy_event`; the call does not wait."""
        self._context.end("event", event)

    def record(self, event: Event, stream: Stream) -> None:
        """Implement `Device.record`."""
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """Implement `Device.wait`."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def is_done(self, event: Event) -> bool:
        """Implement `Device.is_done`.

        Raises
        ------
        TransportError
            If any earlier work of the context failed, even if `event` does not cover that work.
        """
        return self._context.is_done("cuEventQuery", event)

    def synchronize(self, event: Event, timeout_s: float) -> bool:
        """Implement `Device.synchronize` by polling at growing intervals.

        The driver's own wait has no deadline.
        """
        return self._context.wait_until(lambda: self.is_done(event), timeout_s)

    def write_word(self, stream: Stream, address: int, value: int) -> None:
        """Implement `Device.write_word`."""
        word = value & _WORD_MASK
        self._call("cuStreamWriteValue32", stream, address, word, _AFTER_A_FENCE)

    def wait_word(self, stream: Stream, address: int, value: int) -> None:
        """Implement `Device.wait_word`.

        The driver does not know which work writes the word. If there are more streams than hardware
        queues (CUDA_DEVICE_MAX_CONNECTIONS, by default 8), streams share a queue, and the wait
        blocks all work that is enqueued later in that queue, on any stream. The write of the word
        must not depend on such work.
        """
        word = value & _WORD_MASK
        self._call("cuStreamWaitValue32", stream, address, word, _GREATER_OR_EQUAL)

    def exchange_words(
        self, stream: Stream, value: int, written: tuple[int, ...], awaited: tuple[int, ...]
    ) -> None:
        """Implement `Device.exchange_words` with one driver call."""
        batch = self._batches.get((written, awaited))
        if batch is None:
            if len(self._batches) >= _MOST_BATCHES:
                self._batches.clear()
            batch = self._batches[written, awaited] = self._make_batch(written, awaited)
        with batch.lock:
            for each in batch.words:
                each.value = value & _WORD_MASK
            self._call("cuStreamBatchMemOp", stream, len(batch.operations), batch.operations, 0)

    def _make_batch(self, written: tuple[int, ...], awaited: tuple[int, ...]) -> _Batch:
        kinds, made = self._cuda.api.CUstreamBatchMemOpType, _Batch([], [], threading.Lock())
        write, wait = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32, kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
        for kind, address in [*((write, at) for at in written), *((wait, at) for at in awaited)]:
            operation = self._cuda.api.CUstreamBatchMemOpParams()
            operation.operation = kind
            word = operation.writeValue if kind == write else operation.waitValue
            word.operation = kind
            word.address = address
            word.flags = _AFTER_A_FENCE if kind == write else _GREATER_OR_EQUAL
            made.operations.append(operation)
            made.words.append(word)
        return made

    # Work

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Implement `Device.copy`."""
        self._call("cuMemcpyAsync", target, source, nbytes, stream)

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        nbytes: int,
        nrows: int,
        stream: Stream,
    ) -> None:
        """Implement `Device.copy_rows`.

        If a pitch exceeds the hardware's limit, the rows are copied one by one.
        """
        if max(target_pitch, source_pitch) > self._max_pitch:
            for row in range(nrows):
                at, from_ = target + row * target_pitch, source + row * source_pitch
                self.copy(at, from_, nbytes, stream)
            return
        rows = self._cuda.api.CUDA_MEMCPY2D()
        rows.srcMemoryType = rows.dstMemoryType = self._cuda.api.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        rows.srcDevice, rows.srcPitch = source, source_pitch
        rows.dstDevice, rows.dstPitch = target, target_pitch
        rows.WidthInBytes, rows.Height = nbytes, nrows
        self._call("cuMemcpy2DAsync", rows, stream)

    def load(self, ptx: bytes, entry: str) -> Kernel:
        """Implement `Device.load`.

        Raises
        ------
        TransportError
            If the driver refuses. The status is the driver's name of the error, for example
            ``CUDA_ERROR_UNSUPPORTED_PTX_VERSION`` if the driver is too old for the PTX, or
            ``CUDA_ERROR_NOT_FOUND`` if the PTX has no such entry. If the driver's compiler rejects
            the PTX, the message contains the compiler's log.
        """
        log = bytearray(_LOG_NBYTES)
        options = self._cuda.api.CUjit_option
        names = [options.CU_JIT_ERROR_LOG_BUFFER, options.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        try:
            module = self._call(
                "cuModuleLoadDataEx", ptx + b"\0", len(names), names, [log, len(log)]
            )
        except TransportError as exc:
            said = log.partition(b"\0")[0].decode(errors="replace").strip()
            raise TransportError(
                f"the driver cannot load kernel {entry} ({exc}): {said or 'it gives no reason'}",
                status=exc.status,
            ) from exc
        number = self._context.keep("module", module)
        try:
            kernel = int(self._call("cuModuleGetFunction", number, entry.encode()))
            # Without this call the driver would load the kernel at its first launch, which might
            # then wait for the device.
            self._call("cuFuncLoad", kernel)
            return Kernel(kernel)
        except TransportError:
            self._context.end("module", number)
            raise

    def launch(
        self, kernel: Kernel, nblocks: int, nthreads: int, stream: Stream,
        arguments: Sequence[Argument],
    ) -> None:  # fmt: skip
        """Implement `Device.launch`."""
        values = tuple(value for value, _ in arguments)
        types = tuple(kind for _, kind in arguments)
        self._call(
            "cuLaunchKernel", kernel, nblocks, 1, 1, nthreads, 1, 1, 0, stream, (values, types), 0
        )

    def close(self) -> None:
        """Implement `Device.close`; no other call may be in progress.

        After a timeout, `close` can be called again; otherwise a further call does nothing.

        Raises
        ------
        TransportTimeout
            If work did not end within `close_timeout_s`. Nothing was freed, because the driver
            would wait for the work without a deadline.
        TransportError
            If the driver refused to free a resource. All other resources were freed.
        """
        self._context.close(self._close_timeout_s)


__all__ = ["CudaDevice"]

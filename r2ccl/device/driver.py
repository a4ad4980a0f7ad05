"""`CudaDevice`: the interface `Device` over the CUDA driver.

Sees addresses and handles as integers, nothing of what they hold. Must not import a transport or a
kernel; the driver is called through `r2ccl.device.context` and `r2ccl.device.bindings`.

Invariant: calls are made with the device's primary context current, whatever the thread; nothing
here waits without a deadline but the driver itself, where a method says so.

References
----------
CUDA driver API 13, https://docs.nvidia.com/cuda/cuda-driver-api/. The numbers below are cuda.h's.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

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
#: CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP; CU_MEMHOSTREGISTER_ has the same two.
_PORTABLE_AND_MAPPED = 1 | 2
#: CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.
_PEER_ACCESS = 1
#: CU_STREAM_WRITE_VALUE_DEFAULT: with a fence before the write, as __threadfence_system().
_AFTER_A_FENCE = 0
#: CU_STREAM_WAIT_VALUE_GEQ: until (int32_t)(word - value) >= 0.
_GREATER_OR_EQUAL = 0

_IPC_HANDLE_NBYTES = 64
_WORD_MASK = 0xFFFFFFFF
#: Room for what the compiler of the driver says of PTX that it refuses.
_LOG_NBYTES = 8192


class CudaDevice:
    """`Device` over ``cuda.bindings.driver``.

    Parameters
    ----------
    ordinal : int
        Number of the GPU in this process, after CUDA_VISIBLE_DEVICES.
    close_timeout_s : float
        How long `close` waits for work under way.
    clock : Clock, optional
    pause : callable, optional
        ``pause(seconds)``; for tests.

    Raises
    ------
    TransportError
        Status ``NO_CUDA``: the bindings, the driver or a GPU are missing. Else the driver's:
        ``CUDA_ERROR_INVALID_DEVICE`` where there is no such GPU.

    Notes
    -----
    Of the caller's streams those of the primary context are understood. A process that forks must
    do so before it makes one: CUDA does not survive it.
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
        self._uuid = bytes(self._cuda.call("cuDeviceGetUuid", self._device).bytes)
        self._bus_id = bus_id_of(self._cuda, self._device)
        self._capability = (
            self._attribute("COMPUTE_CAPABILITY_MAJOR"),
            self._attribute("COMPUTE_CAPABILITY_MINOR"),
        )
        self._nsms = self._attribute("MULTIPROCESSOR_COUNT")
        self._max_pitch = self._attribute("MAX_PITCH")
        # Version 2 of these calls, the only one since CUDA 12, needs no switch of the kernel module
        # and has no attribute for 32 bits; devices without the calls of 64 bits are not trusted.
        self._waits_on_memory = bool(self._attribute("CAN_USE_64_BIT_STREAM_MEM_OPS"))
        self._name = f"GPU {ordinal}"
        self._remote_writes = RemoteWrites(self._cuda, self._device, self._name)
        self._context = PrimaryContext(
            self._cuda, self._device, self._name, clock=clock, pause=pause
        )
        self._call = self._context.call

    def _attribute(self, name: str) -> int:
        return self._cuda.device_attribute(name, self._device)

    @property
    def ordinal(self) -> int:
        """See `Device`."""
        return self._ordinal

    @property
    def uuid(self) -> bytes:
        """See `Device`; in MIG mode that of the instance."""
        return self._uuid

    @property
    def bus_id(self) -> str:
        """See `Device`; in MIG mode that of the GPU the instance is of."""
        return self._bus_id

    @property
    def capability(self) -> tuple[int, int]:
        """See `Device`."""
        return self._capability

    @property
    def nsms(self) -> int:
        """See `Device`."""
        return self._nsms

    @property
    def waits_on_memory(self) -> bool:
        """See `Device`."""
        return self._waits_on_memory

    @property
    def reorders_remote_writes(self) -> bool:
        """See `Device`."""
        return self._remote_writes.are_reordered

    def current(self) -> AbstractContextManager[None]:
        """Have the device's context current on this thread, for a while: calls cost less then."""
        return self._context.current()

    # Memory

    def allocate(self, nbytes: int) -> int:
        """See `Device`."""
        return self._context.keep("device memory", self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        """See `Device`; the driver may wait for all work of the device."""
        self._context.end("device memory", address)

    def allocate_pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """See `Device`; with unified addressing its address is the same on every GPU."""
        address = self._call("cuMemHostAlloc", nbytes, _PORTABLE_AND_MAPPED)
        self._context.keep("pinned memory", address)
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(int(address)))
        memory.fill(0)
        return memory

    def free_pinned(self, memory: npt.NDArray[np.uint8]) -> None:
        """See `Device`."""
        self._context.end("pinned memory", memory.ctypes.data)

    def pin(self, memory: npt.NDArray[np.uint8]) -> int:
        """See `Device`.

        Raises
        ------
        InvalidArgument
            The memory does not begin or end with a page.
        TransportError
            Status ``CUDA_ERROR_OUT_OF_MEMORY``: no more may be locked.
        """
        address, page = memory.ctypes.data, os.sysconf("SC_PAGE_SIZE")
        if address % page or memory.nbytes % page or not memory.flags.c_contiguous:
            raise InvalidArgument(
                f"{memory.nbytes} bytes at {address:#x} cannot be pinned: allowed are whole pages "
                f"of {page} bytes"
            )
        self._call("cuMemHostRegister", address, memory.nbytes, _PORTABLE_AND_MAPPED)
        self._context.keep("pinning", address)
        try:
            return int(self._call("cuMemHostGetDevicePointer", address, 0))
        except TransportError:
            self._context.end("pinning", address)
            raise

    def unpin(self, memory: npt.NDArray[np.uint8]) -> None:
        """See `Device`."""
        self._context.end("pinning", memory.ctypes.data)

    # Between GPUs and processes

    def reach(self, peer: Device) -> None:
        """See `Device`.

        Raises
        ------
        InternalError
            `peer` is no GPU of CUDA's.
        TransportError
            Status ``NO_PEER_ACCESS``: the machine has no way from one to the other. ``NO_FLUSH``:
            this GPU would miss what NICs write there. Else the driver's:
            ``CUDA_ERROR_TOO_MANY_PEERS``.
        """
        if peer.uuid == self._uuid:
            return
        if not isinstance(peer, CudaDevice):
            raise InternalError(f"{self._name} was to reach {peer!r}, which is no GPU of CUDA's")
        if not self._cuda.call("cuDeviceCanAccessPeer", self._device, peer._device):
            raise TransportError(
                f"{self._name} cannot reach the memory of {peer._name}: have data pass through "
                "host memory",
                status="NO_PEER_ACCESS",
            )
        self._context.reach(peer._context)
        peer._remote_writes.share()

    def export(self, address: int) -> tuple[bytes, int]:
        """See `Device`.

        Raises
        ------
        TransportError
            Status ``NO_IPC``: memory of this kind has no handle; says of which kind it is.
        """
        with self.current():
            self._check_exportable(address)
            base = int(self._cuda.call("cuMemGetAddressRange", address)[0])
            handle = self._cuda.call("cuIpcGetMemHandle", base)
        return ctypes.string_at(handle.getPtr(), _IPC_HANDLE_NBYTES), address - base

    def _check_exportable(self, address: int) -> None:
        attribute = self._cuda.pointer_attribute
        if attribute("IS_MANAGED", address):
            raise TransportError("managed memory has no IPC handle: it migrates", status="NO_IPC")
        if int(attribute("MEMPOOL_HANDLE", address)):
            raise TransportError(
                "memory of the stream-ordered pool has no IPC handle", status="NO_IPC"
            )
        if not attribute("IS_LEGACY_CUDA_IPC_CAPABLE", address):
            raise TransportError(
                "the allocation has no IPC handle: it was mapped from pieces (expandable "
                "segments), or is another process's",
                status="NO_IPC",
            )

    def map(self, handle: bytes) -> int:
        """See `Device`; not in the process that exported it.

        A GPU the memory is on must be visible to this process too; where it is another than this
        one, access from one to the other is enabled.
        """
        if len(handle) != _IPC_HANDLE_NBYTES:
            raise InvalidArgument(
                f"an IPC handle of {len(handle)} bytes: allowed are {_IPC_HANDLE_NBYTES}"
            )
        given = self._cuda.api.CUipcMemHandle()
        ctypes.memmove(given.getPtr(), handle, _IPC_HANDLE_NBYTES)
        return self._context.keep(
            "mapped allocation", self._call("cuIpcOpenMemHandle", given, _PEER_ACCESS)
        )

    def unmap(self, address: int) -> None:
        """See `Device`."""
        self._context.end("mapped allocation", address)

    def buffer_id(self, address: int) -> int:
        """See `Device`."""
        return int(self._cuda.pointer_attribute("BUFFER_ID", address))

    # Written by others

    def flush_remote_writes(self) -> None:
        """See `Device`.

        Raises
        ------
        TransportError
            Status ``NO_FLUSH``: the GPU reorders writes, and the host cannot flush them.
        """
        self._remote_writes.flush(self._context)

    # Streams and events

    def make_stream(self, *, waits: bool = False) -> Stream:
        """See `Device`; of the highest priority, so that a caller's kernels do not hold it up.

        Streams that wait have the next one, for a queue of the hardware
        (CUDA_DEVICE_MAX_CONNECTIONS) has one priority.
        """
        lowest, highest = self._call("cuCtxGetStreamPriorityRange")
        priority = min(highest + waits, lowest)  # the highest is the least number
        stream = self._call("cuStreamCreateWithPriority", _NON_BLOCKING, priority)
        return Stream(self._context.keep("stream", stream))

    def destroy_stream(self, stream: Stream) -> None:
        """See `Device`; does not wait."""
        self._context.end("stream", stream)

    def make_event(self) -> Event:
        """See `Device`; it takes no time."""
        return Event(self._context.keep("event", self._call("cuEventCreate", _NO_TIMING)))

    def destroy_event(self, event: Event) -> None:
        """See `Device`; does not wait."""
        self._context.end("event", event)

    def record(self, event: Event, stream: Stream) -> None:
        """See `Device`."""
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """See `Device`."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def is_done(self, event: Event) -> bool:
        """See `Device`; raises what earlier work failed of, whichever event it is asked of."""
        return self._cuda.is_done("cuEventQuery", event)

    def synchronize(self, event: Event, timeout_s: float) -> bool:
        """See `Device`; polls, ever less often: the driver's own wait has no deadline."""
        return self._context.wait_until(lambda: self.is_done(event), timeout_s)

    def write_word(self, stream: Stream, address: int, value: int) -> None:
        """See `Device`."""
        word = value & _WORD_MASK
        self._call("cuStreamWriteValue32", stream, address, word, _AFTER_A_FENCE)

    def wait_word(self, stream: Stream, address: int, value: int) -> None:
        """See `Device`.

        The driver does not know who will write the word. Where there are more streams than
        CUDA_DEVICE_MAX_CONNECTIONS (8 by default), some share a queue of the hardware, and what is
        enqueued after the wait stands still there, of whichever stream: the word must not depend on
        it.
        """
        word = value & _WORD_MASK
        self._call("cuStreamWaitValue32", stream, address, word, _GREATER_OR_EQUAL)

    # Work

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """See `Device`."""
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
        """See `Device`; rows further apart than the hardware can say are copied one by one."""
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
        """See `Device`.

        Raises
        ------
        TransportError
            The driver's compiler refuses the PTX, with what it says of it; status
            ``CUDA_ERROR_UNSUPPORTED_PTX_VERSION``: the driver is too old for it.
            ``CUDA_ERROR_NOT_FOUND``: it has no such entry.
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
                f"the driver does not load kernel {entry} ({exc}): {said or 'it does not say why'}",
                status=exc.status,
            ) from exc
        number = self._context.keep("module", module)
        try:
            kernel = int(self._call("cuModuleGetFunction", number, entry.encode()))
            # Loaded lazily it would be at its first launch, which may then wait for the device.
            self._call("cuFuncLoad", kernel)
            return Kernel(kernel)
        except TransportError:
            self._context.end("module", number)
            raise

    def launch(
        self, kernel: Kernel, nblocks: int, nthreads: int, stream: Stream,
        arguments: Sequence[Argument],
    ) -> None:  # fmt: skip
        """See `Device`."""
        values = tuple(value for value, _ in arguments)
        types = tuple(kind for _, kind in arguments)
        self._call(
            "cuLaunchKernel", kernel, nblocks, 1, 1, nthreads, 1, 1, 0, stream, (values, types), 0
        )

    def close(self) -> None:
        """See `Device`; no other call may be under way. Again: does nothing, or tries again.

        Raises
        ------
        TransportTimeout
            Work did not end; nothing was freed, since the driver would wait for it for ever.
        TransportError
            The driver refused to free something; all else was freed.
        """
        self._context.close(self._close_timeout_s)


__all__ = ["CudaDevice"]

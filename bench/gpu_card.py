"""The GPU interface of the GPU bench: memory, one stream, and the time between two events.

A `Card` uses the library's own `Device`, and a `Driver` for the CUDA functions that `Device` does
not offer: `CudaDriver` on a GPU, a fake one in tests. Arrays on a card are addresses; `Memory`
passes them to array libraries.

Invariants: all work goes to one stream; every wait has a deadline; the use of host memory is
bounded, independently of the size of an array.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from r2ccl.device import Device, Event, Stream
from r2ccl.device.bindings import Cuda
from r2ccl.device.driver import CudaDevice
from r2ccl.errors import TransportError, TransportTimeout

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

#: Size in bytes of a block that is copied through pinned memory, and number of blocks in flight.
BLOCK_NBYTES, NBLOCKS = 4 << 20, 8
#: Byte that fills outputs before kernels write them.
POISON = 0xA5
_TIMEOUT_S = 60.0
#: Size of the buffer for the name of a GPU.
_NAME_NBYTES = 100
_PACKAGES = ("cuda-bindings", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x")


class Driver(Protocol):
    """CUDA functions that the bench needs besides `Device`; the card's context must be current."""

    def about(self) -> dict[str, Any]:
        """Return the properties of the GPU, and the versions of its driver and libraries."""
        ...

    def free_nbytes(self) -> int:
        """Return the amount of free GPU memory in bytes."""
        ...

    def fill(self, address: int, byte: int, nbytes: int, stream: Stream) -> None:
        """Enqueue a fill of device memory with `byte`."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Enqueue a copy from device memory to device memory."""
        ...

    def time(self, stream: Stream, work: Callable[[], None]) -> float:
        """Call `work`, which enqueues on `stream`; return the GPU time of its work in seconds."""
        ...


class CudaDriver:
    """`Driver` that uses ``cuda.bindings.driver``.

    Parameters
    ----------
    device : CudaDevice
        GPU whose context must be current during all calls.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._cuda = Cuda()
        # Events of `Device.make_event` do not record the time.
        self._events = [Event(int(self._cuda.call("cuEventCreate", 0))) for _ in range(2)]

    def about(self) -> dict[str, Any]:
        """Implement `Driver.about`."""
        call = self._cuda.call
        device = call("cuDeviceGet", self._device.ordinal)
        name = bytes(call("cuDeviceGetName", _NAME_NBYTES, device))
        free_nbytes, total_nbytes = call("cuMemGetInfo")
        return {
            "gpu": name.partition(b"\0")[0].decode(),
            "capability": ".".join(map(str, self._device.capability)),
            "multiprocessors": self._device.nsms,
            "l2_mib": self._cuda.device_attribute("L2_CACHE_SIZE", device) >> 20,
            "memory_mib": total_nbytes >> 20,
            "free_mib": free_nbytes >> 20,
            "cuda": int(call("cuDriverGetVersion")),
            **{each: version for each in _PACKAGES if (version := _version(each)) is not None},
        }

    def free_nbytes(self) -> int:
        """Implement `Driver.free_nbytes`."""
        return int(self._cuda.call("cuMemGetInfo")[0])

    def fill(self, address: int, byte: int, nbytes: int, stream: Stream) -> None:
        """Implement `Driver.fill`."""
        self._cuda.call("cuMemsetD8Async", address, byte, nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Implement `Driver.copy`."""
        self._cuda.call("cuMemcpyDtoDAsync", target, source, nbytes, stream)

    def time(self, stream: Stream, work: Callable[[], None]) -> float:
        """Implement `Driver.time` with two events; the resolution is half a microsecond."""
        begin, end = self._events
        self._device.record(begin, stream)
        work()
        self._device.record(end, stream)
        wait_for(self._device, end)
        return float(self._cuda.call("cuEventElapsedTime", begin, end)) / 1e3

    def close(self) -> None:
        """Free the events."""
        for event in self._events:
            self._cuda.call("cuEventDestroy", event)


class Card:
    """A GPU with a stream, and pinned memory for copies from and to the host.

    Parameters
    ----------
    device : Device
    driver : Driver
    block_nbytes : int, optional
        Size in bytes of the blocks in which `place` and `examine` copy arrays; a multiple of 16.
    """

    def __init__(self, device: Device, driver: Driver, block_nbytes: int = BLOCK_NBYTES) -> None:
        self.device = device
        self.driver = driver
        self.block_nbytes = block_nbytes
        self.stream = device.make_stream()
        self._done = device.make_event()
        self._slots = [device.allocate_pinned(block_nbytes) for _ in range(NBLOCKS)]
        self._threads = ThreadPoolExecutor(min(NBLOCKS, len(os.sched_getaffinity(0))))

    def finish(self) -> None:
        """Wait until all work on the stream is done.

        Raises
        ------
        TransportTimeout
            If the work is not done after a minute.
        """
        self.device.record(self._done, self.stream)
        wait_for(self.device, self._done)

    def place(self, address: int, nbytes: int, block_of: Callable[[int], Array]) -> None:
        """Write an array to device memory.

        ``block_of(number)`` returns a block of the array; it is called in several threads.
        """

        def write(block: _Block) -> None:
            block.memory[:] = block_of(block.number).view(np.uint8)

        for wave in self._waves(nbytes):
            list(self._threads.map(write, wave))
            for block in wave:
                self.device.copy(
                    address + block.start, int(block.memory.ctypes.data), block.memory.size,
                    self.stream,
                )  # fmt: skip
            self.finish()

    def examine(self, address: int, nbytes: int, look: Callable[[int, Bytes], int]) -> int:
        """Read an array from device memory; return the sum of ``look(number, block)`` over blocks.

        `look` is called in several threads.
        """
        total = 0
        for wave in self._waves(nbytes):
            for block in wave:
                self.device.copy(
                    int(block.memory.ctypes.data), address + block.start, block.memory.size,
                    self.stream,
                )  # fmt: skip
            self.finish()
            total += sum(self._threads.map(lambda each: look(each.number, each.memory), wave))
        return total

    def close(self) -> None:
        """End the threads. The device frees the stream and the memory when it is closed."""
        self._threads.shutdown()

    def _waves(self, nbytes: int) -> Iterator[list[_Block]]:
        starts = range(0, nbytes, self.block_nbytes)
        for first in range(0, len(starts), NBLOCKS):
            yield [
                _Block(first + at, start, slot[: min(self.block_nbytes, nbytes - start)])
                for at, (start, slot) in enumerate(zip(starts[first:], self._slots, strict=False))
            ]


class _Block(NamedTuple):
    """Part of an array: its number, its offset in bytes, and the pinned memory that holds it."""

    number: int
    start: int
    memory: Bytes


class Memory:
    """Array on a card, which offers the CUDA Array Interface, version 3, to other libraries.

    Parameters
    ----------
    address, count : int
        Address of the array, and number of its elements.
    dtype : dtype
    """

    def __init__(self, address: int, count: int, dtype: np.dtype[Any]) -> None:
        self.address = address
        self.count = count
        self.dtype = dtype
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (count,),
            "typestr": dtype.str,
            "data": (address, False),
        }


def wait_for(device: Device, event: Event) -> None:
    """Wait for an event.

    Raises
    ------
    TransportTimeout
        If the event is not done after a minute.
    """
    if not device.synchronize(event, _TIMEOUT_S):
        raise TransportTimeout(
            f"the GPU did not finish the bench's work in {_TIMEOUT_S:g} s; look for a kernel that "
            "hangs",
            status="TIMEOUT",
        )


@contextmanager
def open_card(ordinal: int) -> Iterator[Card]:
    """Open a GPU and make its context current on this thread, inside the ``with`` block.

    Raises
    ------
    TransportError
        If the bindings, the driver or a GPU are missing (status ``NO_CUDA``), or if the driver
        fails (status: the driver's).
    """
    device = CudaDevice(ordinal)
    try:
        with _current(device) as driver:
            card = Card(device, driver)
            try:
                yield card
            finally:
                card.close()
            driver.close()
    except BaseException:
        with suppress(TransportError):  # the first error is the one to report
            device.close()
        raise
    device.close()


@contextmanager
def _current(device: CudaDevice) -> Iterator[CudaDriver]:
    current: AbstractContextManager[None] = device.current()
    with current:
        yield CudaDriver(device)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


__all__ = [
    "BLOCK_NBYTES",
    "NBLOCKS",
    "POISON",
    "Array",
    "Bytes",
    "Card",
    "CudaDriver",
    "Driver",
    "Memory",
    "open_card",
    "wait_for",
]

"""A GPU as the benches use it: memory, one stream, and the time between two events.

A `Card` works through the library's own `Device` and a `Driver`, which is what a bench asks of CUDA
beside: `CudaDriver` on a GPU, another one in tests. Arrays on it are addresses; `Memory` shows one
to array libraries. Must not import an array library but NumPy.

Invariants: everything is given to one stream; every wait has a deadline; host memory is bounded,
whatever the size of an array.
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

#: Bytes that pass through pinned memory as one, and how many such blocks are under way at once.
BLOCK_NBYTES, NBLOCKS = 4 << 20, 8
#: What outputs hold before they are written.
POISON = 0xA5
_TIMEOUT_S = 60.0
#: Room for the name of a GPU.
_NAME_NBYTES = 100
_PACKAGES = ("cuda-bindings", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x")


class Driver(Protocol):
    """What a bench asks of CUDA beside `Device`; the card's context is current."""

    def about(self) -> dict[str, Any]:
        """Describe the GPU and its driver."""
        ...

    def free_nbytes(self) -> int:
        """Return how much of the GPU's memory nobody uses."""
        ...

    def fill(self, address: int, byte: int, nbytes: int, stream: Stream) -> None:
        """Set every byte."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy from device memory to device memory."""
        ...

    def time(self, stream: Stream, work: Callable[[], None]) -> float:
        """Return the seconds that what `work` gives to `stream` takes there."""
        ...


class CudaDriver:
    """`Driver` over ``cuda.bindings.driver``.

    Parameters
    ----------
    device : CudaDevice
        Its context is current for as long as this is used.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._cuda = Cuda()
        # Those of `Device.make_event` take no time.
        self._events = [Event(int(self._cuda.call("cuEventCreate", 0))) for _ in range(2)]

    def about(self) -> dict[str, Any]:
        """See `Driver`."""
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
        """See `Driver`."""
        return int(self._cuda.call("cuMemGetInfo")[0])

    def fill(self, address: int, byte: int, nbytes: int, stream: Stream) -> None:
        """See `Driver`."""
        self._cuda.call("cuMemsetD8Async", address, byte, nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """See `Driver`."""
        self._cuda.call("cuMemcpyDtoDAsync", target, source, nbytes, stream)

    def time(self, stream: Stream, work: Callable[[], None]) -> float:
        """See `Driver`; by two events, so to half a microsecond."""
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
    """A GPU with a stream, and pinned memory that arrays pass through.

    Parameters
    ----------
    device : Device
    driver : Driver
    block_nbytes : int, optional
        A multiple of 16; the arrays of `place` and `examine` are cut in blocks of so many bytes.
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
        """Wait until the stream has done what it was given.

        Raises
        ------
        TransportTimeout
            It has not in a minute.
        """
        self.device.record(self._done, self.stream)
        wait_for(self.device, self._done)

    def place(self, address: int, nbytes: int, block_of: Callable[[int], Array]) -> None:
        """Write an array: `block_of` gives its blocks by their numbers, in threads."""

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
        """Read an array and return the sum of ``look(number, block)``, called in threads."""
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
        """End the threads; what was allocated is the device's to free."""
        self._threads.shutdown()

    def _waves(self, nbytes: int) -> Iterator[list[_Block]]:
        starts = range(0, nbytes, self.block_nbytes)
        for first in range(0, len(starts), NBLOCKS):
            yield [
                _Block(first + at, start, slot[: min(self.block_nbytes, nbytes - start)])
                for at, (start, slot) in enumerate(zip(starts[first:], self._slots, strict=False))
            ]


class _Block(NamedTuple):
    """Part of an array: its number, where it starts in bytes, and the pinned memory it is in."""

    number: int
    start: int
    memory: Bytes


class Memory:
    """Memory of a card as array libraries see it, by the CUDA Array Interface, version 3.

    Parameters
    ----------
    address, count : int
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
        It is not done in a minute.
    """
    if not device.synchronize(event, _TIMEOUT_S):
        raise TransportTimeout(
            f"the GPU has not done in {_TIMEOUT_S:g} s what the bench gave it; look for a kernel "
            "that hangs",
            status="TIMEOUT",
        )


@contextmanager
def open_card(ordinal: int) -> Iterator[Card]:
    """Open a GPU for a while; its context is current on this thread meanwhile.

    Raises
    ------
    TransportError
        Status ``NO_CUDA``: the bindings, the driver or a GPU are missing; says which. Else what the
        driver says.
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
        with suppress(TransportError):  # what went wrong first is what is told
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

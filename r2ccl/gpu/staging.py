"""Provides the registered device memory that NICs read and write during a call.

NICs normally use the caller's arrays, which are registered with every NIC during the call. An array
is copied to and from an area of `r2ccl.gpu.registered_memory` if NICs cannot access it (managed
memory or memory of the stream-ordered pool, for example), if it spans several allocations, or if
its address is not a multiple of its element size. The call cannot use another backend instead,
because all ranks must use the same backend, and only this rank knows that its array needs a copy.
Partial sums for which the output is missing or too small are kept in such an area too.

Invariant: the first attempt to register an allocation is made while no stream waits for the host,
because the attempt may wait for the device.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import NamedTuple

from r2ccl.device.base import Device
from r2ccl.dtypes import dtype_of
from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.gpu.device_reduction import ReductionStream
from r2ccl.gpu.host_signal import DeviceCall
from r2ccl.gpu.registered_memory import AreaPurpose, RegisteredDeviceMemory
from r2ccl.transport.base import Registered
from r2ccl.types import CallSignature, Collective

_log = logging.getLogger(__name__)


class CallAddresses(NamedTuple):
    """Addresses of the buffers that NICs and kernels use in a call: the input and the output."""

    source: int
    output: int


class _CallerArray(NamedTuple):
    """An array of the caller, and the area that replaces it if NICs cannot access the array.

    ``is_read`` is True if the collective reads the array, ``is_written`` if it writes the array.
    """

    address: int
    purpose: AreaPurpose
    is_read: bool
    is_written: bool


class StagingBuffers:
    """Provider of the buffers of one rank's calls: the caller's arrays, or staging copies of them.

    Parameters
    ----------
    device : Device
    memory : RegisteredDeviceMemory
        Registered memory for staging copies; borrowed.
    rank, nranks : int
        This rank and the number of ranks; they define this rank's part of a buffer.
    """

    def __init__(
        self, device: Device, memory: RegisteredDeviceMemory, rank: int, nranks: int
    ) -> None:
        self._device = device
        self._memory = memory
        self._rank = rank
        self._nranks = nranks
        #: True if NICs can access an array, by the `Device.buffer_id` of the allocations with the
        #: first and the last byte of the array.
        self._reached: dict[tuple[int, int], bool] = {}

    def are_ready(self, call: DeviceCall) -> bool:
        """Return whether `hold` can be called for `call` without calling `make_ready` first."""
        nbytes = nbytes_of(call.signature)
        return not any(self._is_unknown(each, nbytes) for each in _arrays(call)) and all(
            self._memory.has(purpose, nbytes) for purpose in self._areas(call)
        )

    def make_ready(self, call: DeviceCall) -> None:
        """Find out which arrays NICs can access, and allocate the areas that the call needs.

        Raises
        ------
        TransportError
            If the device's memory is full, or an area cannot be registered with a NIC.
        """
        nbytes, arrays = nbytes_of(call.signature), _arrays(call)
        if len(self._reached) + len(arrays) > _MOST_ALLOCATIONS:
            self._reached.clear()
        for each in arrays:
            if self._is_unknown(each, nbytes):
                self._try(each.address, nbytes)
        for purpose in self._areas(call):
            self._memory.area(purpose, nbytes)

    @contextlib.contextmanager
    def hold(self, call: DeviceCall, reductions: ReductionStream) -> Iterator[CallAddresses]:
        """Register a call's arrays or copy them to areas; on exit, copy results back.

        The context gives the addresses that NICs and kernels use during the call. On exit, the
        registrations end, so no slice may be in flight then. Copies are enqueued on `reductions`;
        the caller must wait for them after it has entered the context, and again after it has left
        the context. If the context is left by an error, results are not copied back.

        Raises
        ------
        TransportError
            If the device or a NIC failed, or memory is full.
        """
        signature = call.signature
        nbytes = nbytes_of(signature)
        held: list[Registered] = []
        try:
            found = {
                each.purpose: self._address_of(each, signature, held, reductions)
                for each in _arrays(call)
            }
            if nbytes and signature.collective == Collective.ALLGATHER:
                own = found[AreaPurpose.OUTPUT] + self._rank * (nbytes // self._nranks)
                if own != call.source:
                    reductions.copy(own, call.source, nbytes // self._nranks)
            source = found.get(AreaPurpose.INPUT, found.get(AreaPurpose.OUTPUT, 0))
            output = found.get(AreaPurpose.OUTPUT, source)
            if _sums_apart(call):
                output = self._memory.area(AreaPurpose.OUTPUT, nbytes)
            yield CallAddresses(source, output)
            self._store(call, found, output, reductions)
        finally:
            for registered in held:
                self._memory.release(registered)

    def _store(
        self,
        call: DeviceCall,
        found: dict[AreaPurpose, int],
        output: int,
        reductions: ReductionStream,
    ) -> None:
        """Copy results from areas to the caller's arrays."""
        nbytes = nbytes_of(call.signature)
        if nbytes and call.signature.collective == Collective.REDUCE_SCATTER:
            width = nbytes // self._nranks
            reductions.copy(call.output, output + self._rank * width, width)
        for each in _arrays(call):
            if each.is_written and found[each.purpose] != each.address:
                reductions.copy(each.address, found[each.purpose], nbytes)

    def _address_of(
        self,
        array: _CallerArray,
        call: CallSignature,
        held: list[Registered],
        reductions: ReductionStream,
    ) -> int:
        """Register `array` and return its address, or return the address of its staging copy."""
        nbytes = nbytes_of(call)
        if self._is_registrable(array, call):
            try:
                held.append(self._memory.register(array.address, nbytes))
            except (InvalidArgument, TransportError) as exc:  # out of NIC resources, for example
                self._copy_from_now_on(array.address, nbytes, exc)
            else:
                return array.address
        place = self._memory.area(array.purpose, nbytes)
        if array.is_read:
            reductions.copy(place, array.address, nbytes)
        return place

    def _is_registrable(self, array: _CallerArray, call: CallSignature) -> bool:
        is_aligned = array.address % dtype_of(call.dtype).itemsize == 0
        return is_aligned and self._reached.get(self._key(array.address, nbytes_of(call)), False)

    def _areas(self, call: DeviceCall) -> list[AreaPurpose]:
        """Return the areas that a call is known to need.

        An array whose registration was not attempted yet is assumed to need no area.
        """
        nbytes = nbytes_of(call.signature)
        found = [
            each.purpose
            for each in _arrays(call)
            if not self._is_unknown(each, nbytes) and not self._is_registrable(each, call.signature)
        ]
        if _sums_apart(call):
            found.append(AreaPurpose.OUTPUT)
        return found

    def _is_unknown(self, array: _CallerArray, nbytes: int) -> bool:
        return self._key(array.address, nbytes) not in self._reached

    def _key(self, address: int, nbytes: int) -> tuple[int, int]:
        """Return the key of an array in `_reached`: the allocations of its first and last byte."""
        return self._device.buffer_id(address), self._device.buffer_id(address + nbytes - 1)

    def _try(self, address: int, nbytes: int) -> None:
        try:
            self._memory.release(self._memory.register(address, nbytes))
        except (InvalidArgument, TransportError) as exc:  # InvalidArgument: several allocations
            self._copy_from_now_on(address, nbytes, exc)
        else:
            self._reached[self._key(address, nbytes)] = True

    def _copy_from_now_on(self, address: int, nbytes: int, why: Exception) -> None:
        """Record that NICs cannot access an array, nor any other array with the same `_key`."""
        _log.info(
            "rank %d: NICs cannot access an array on the GPU, so each collective copies it: %s",
            self._rank, why,
        )  # fmt: skip
        self._reached[self._key(address, nbytes)] = False


def nbytes_of(call: CallSignature) -> int:
    """Return the size in bytes of a call's input or output, whichever is larger."""
    return call.count * dtype_of(call.dtype).itemsize


def _arrays(call: DeviceCall) -> list[_CallerArray]:
    """List the caller's arrays that NICs access, or that areas replace; empty for an empty call."""
    kind = call.signature.collective
    if not call.signature.count:
        return []
    if kind == Collective.ALLGATHER:
        return [_CallerArray(call.output, AreaPurpose.OUTPUT, False, True)]
    if _sums_apart(call):
        return [_CallerArray(call.source, AreaPurpose.INPUT, True, False)]
    if call.source == call.output:
        return [_CallerArray(call.source, AreaPurpose.INPUT, True, True)]
    return [
        _CallerArray(call.source, AreaPurpose.INPUT, True, False),
        _CallerArray(call.output, AreaPurpose.OUTPUT, False, True),
    ]


def _sums_apart(call: DeviceCall) -> bool:
    """Return whether partial sums need an area: the output is missing or too small for them."""
    return call.signature.collective == Collective.REDUCE_SCATTER or not call.output


_MOST_ALLOCATIONS = 4096

__all__ = ["CallAddresses", "StagingBuffers", "nbytes_of"]

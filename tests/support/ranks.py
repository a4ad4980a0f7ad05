"""Ranks as threads, each with its own process on a fake GPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from r2ccl.device.base import Stream
from r2ccl.errors import TransportError
from r2ccl.testing.fakedevice import FakeDevice, FakeKernel, Grid
from r2ccl.topology.machine import Machine
from r2ccl.types import CallSignature, Collective, ReduceOp

TIMEOUT_S = 20.0
KINDS = [
    Collective.ALLREDUCE,
    Collective.ALLGATHER,
    Collective.REDUCE_SCATTER,
    Collective.BROADCAST,
    Collective.REDUCE,
]


class OneCard:
    """`Hardware` of one fake GPU, in a machine that may be known."""

    def __init__(self, device: FakeDevice, kernels: Any, machine: Machine | None = None) -> None:
        self.machine = machine
        self.device = device
        self.kernels = kernels

    def open(self, ordinal: int) -> tuple[FakeDevice, Any]:
        return self.device, self.kernels

    def read_machine(self) -> Machine:
        if self.machine is None:
            raise TransportError("there is no machine, in a test", status="NO_MACHINE")
        return self.machine


class PlainKernels:
    """Kernels for int64, in Python."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._loaded: dict[str, Any] = {}

    def prepare_from_table(self, call: CallSignature, ninputs: int, noutputs: int) -> None:
        entry = f"{ReduceOp(call.op).name}_{ninputs}_{noutputs}"
        if entry not in self._loaded:
            function = np.maximum if call.op == ReduceOp.MAX else np.add
            self._device.kernels[entry] = make_kernel(function, ninputs, noutputs)
            self._loaded[entry] = self._device.load(f".visible .entry {entry}(".encode(), entry)

    def launch_from_table(
        self, call: CallSignature, ninputs: int, noutputs: int, table: int, count: int,
        nranks: int, stream: Stream,
    ) -> None:  # fmt: skip
        entry = f"{ReduceOp(call.op).name}_{ninputs}_{noutputs}"
        given = [(table, ctypes.c_int64), (count, ctypes.c_int64)]
        self._device.launch(self._loaded[entry], 1, 32, stream, given)


def make_kernel(function: Any, ninputs: int, noutputs: int) -> FakeKernel:
    def run(grid: Grid, table: int, count: int) -> None:
        addresses = grid.read(table, 8 * (ninputs + noutputs)).view(np.uint64).tolist()
        if not addresses[0]:
            return
        inputs = [grid.read(at, 8 * count).view(np.int64) for at in addresses[:ninputs]]
        total = inputs[0].copy()
        for each in inputs[1:]:
            total = function(total, each)
        for at in addresses[ninputs:]:
            grid.write(at, 8 * count).view(np.int64)[:] = total

    return FakeKernel(run)


class Gathering:
    """Allgather among threads, in place of the bootstrap's."""

    def __init__(self, nranks: int) -> None:
        self._said: list[bytes] = [b""] * nranks
        self._meeting = threading.Barrier(nranks)

    def __call__(self, rank: int, mine: bytes) -> Sequence[bytes]:
        self._said[rank] = mine
        self._meeting.wait(TIMEOUT_S)
        heard = list(self._said)
        self._meeting.wait(TIMEOUT_S)
        return heard


def together(nranks: int, body: Callable[[int], Any]) -> list[Any]:
    """Run `body` in one thread per rank; return all results, or raise the lowest rank's error."""
    results: list[Any] = [None] * nranks

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as exc:
            results[rank] = exc

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(nranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * TIMEOUT_S)
        assert not thread.is_alive()
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return results


def put(device: FakeDevice, stream: Stream, array: Any) -> int:
    """Allocate device memory, and fill it in the order of a stream."""
    data = np.ascontiguousarray(array)
    address = device.allocate(max(1, data.nbytes))
    if data.nbytes:
        pinned = device.allocate_pinned(data.nbytes)
        pinned[:] = data.view(np.uint8).reshape(-1)
        device.copy(address, int(pinned.ctypes.data), data.nbytes, stream)
    return address


def get(device: FakeDevice, stream: Stream, address: int, count: int) -> Any:
    """Read int64 values from device memory in the order of a stream."""
    done = device.make_event()
    pinned = device.allocate_pinned(max(1, 8 * count))
    if count:
        device.copy(int(pinned.ctypes.data), address, 8 * count, stream)
    device.record(done, stream)
    assert device.synchronize(done, TIMEOUT_S)
    return pinned[: 8 * count].view(np.int64).copy()


def data_of(rank: int, count: int) -> Any:
    """Return a rank's input."""
    return np.random.default_rng(rank).integers(-1000, 1000, count)


def meant(kind: Collective, xs: list[Any], op: ReduceOp, root: int, rank: int) -> Any:
    """Return the expected result of a collective on a rank; None if it has none."""
    total = np.sum(xs, axis=0) if op is ReduceOp.SUM else np.max(xs, axis=0)
    width = xs[0].size // len(xs)
    return {
        Collective.ALLREDUCE: total,
        Collective.ALLGATHER: np.concatenate(xs),
        Collective.REDUCE_SCATTER: total[rank * width : (rank + 1) * width],
        Collective.BROADCAST: xs[root],
        Collective.REDUCE: total if rank == root else None,
    }[kind]


def sizes_of(kind: Collective, count: int, nranks: int) -> tuple[int, int]:
    """Return the elements of a rank's output, and the count of the call."""
    if kind == Collective.ALLGATHER:
        return count * nranks, count * nranks
    return (count // nranks, count) if kind == Collective.REDUCE_SCATTER else (count, count)

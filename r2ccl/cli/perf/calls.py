"""Calls of r2ccl that are measured for a case, their memory, and their repetition."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from r2ccl.cli.perf.cases import Array, Buffers, Case
from r2ccl.cli.perf.options import PerfOptions
from r2ccl.communicator import Communicator
from r2ccl.runtime.async_work import Work
from r2ccl.runtime.messages.messenger import MessageRequest
from r2ccl.types import ReduceOp


def call_of(comm: Communicator, case: Case, buffers: Buffers) -> Callable[[], Any]:
    """Return the function that makes one blocking call."""
    if case.form.name == "barrier":
        return comm.barrier
    if case.form.name == "sendrecv":
        right, left = _neighbours(comm)
        return partial(comm.sendrecv, buffers.x, right, buffers.out, left)
    return _collective(comm, case, buffers)


def start_of(
    comm: Communicator, case: Case, buffers: Buffers
) -> Callable[[], list[Work[Any] | MessageRequest]]:
    """Return the function that starts one asynchronous call and returns its handles.

    `case` must not be that of a barrier, which has no asynchronous call.
    """
    if case.form.name == "sendrecv":
        right, left = _neighbours(comm)
        receive = partial(comm.recv, buffers.out, left, 0, async_op=True)
        send = partial(comm.send, buffers.x, right, async_op=True)
        return lambda: [receive(), send()]
    start = _collective(comm, case, buffers, async_op=True)
    return lambda: [start()]


def _collective(
    comm: Communicator, case: Case, buffers: Buffers, **options: Any
) -> Callable[[], Any]:
    if case.form.reduces:
        options["op"] = ReduceOp[case.op.upper()]
    if case.form.is_rooted:
        options["root"] = case.root
    if case.form.name == "alltoallv":
        counts = case.exchanged(comm.rank)
        options |= {"sendcounts": counts, "recvcounts": counts}
    elif case.form.is_unequal:
        options["counts"] = case.parts
    return partial(getattr(comm, case.form.name), *buffers, **options)


def _neighbours(comm: Communicator) -> tuple[int, int]:
    """Return the next and the previous rank of the ring."""
    return (comm.rank + 1) % comm.nranks, (comm.rank - 1) % comm.nranks


class PerfMemory:
    """Memory of the measured arrays: of the host, or of a GPU if `ngpus` is not 0."""

    def __init__(self, ngpus: int) -> None:
        self._cuda = None
        if ngpus:
            from numba import cuda

            self._cuda = cuda

    def use(self) -> None:
        """Choose the GPU of this rank for the calling thread; for host memory, do nothing."""
        if self._cuda is not None:
            number = int(os.environ.get("LOCAL_RANK", 0)) % len(self._cuda.gpus)
            self._cuda.select_device(number)

    def move(self, block: Array) -> Any:
        """Return `block` itself or, if the arrays are on a GPU, a copy of it on the GPU."""
        return block if self._cuda is None else self._cuda.to_device(block)

    def fetch(self, block: Any) -> Array:
        """Return the data of `block` as an array in host memory; None if `block` is None."""
        host: Array = block if self._cuda is None or block is None else block.copy_to_host()
        return host

    def finish(self) -> None:
        """Wait until the GPU has finished the work of the calls; for host memory, do nothing."""
        if self._cuda is not None:
            self._cuda.synchronize()


class Runner:
    """Runner of the calls of one case; the options choose grouped and asynchronous calls.

    Parameters
    ----------
    buffers : sequence of Buffers
        Arrays of each call of a group.
    """

    def __init__(
        self,
        comm: Communicator,
        case: Case,
        options: PerfOptions,
        memory: PerfMemory,
        buffers: Sequence[Buffers],
    ) -> None:
        self._comm = comm
        self._memory = memory
        self._calls = [call_of(comm, case, each) for each in buffers]
        self._start = None if options.is_blocking else start_of(comm, case, buffers[0])

    def run(self, iterations: int) -> None:
        """Make `iterations` calls, or groups of calls, and wait for their end."""
        if self._start is not None:
            begun = [each for _ in range(iterations) for each in self._start()]
            for work in begun:
                work.wait()
        elif len(self._calls) == 1:
            [call] = self._calls
            self._repeat(call, iterations)
        else:
            self._repeat(self._grouped, iterations)
        self._memory.finish()

    def _repeat(self, call: Callable[[], Any], iterations: int) -> None:
        for _ in range(iterations):
            call()
            self._memory.finish()

    def _grouped(self) -> None:
        with self._comm.group():
            for call in self._calls:
                call()


__all__ = ["PerfMemory", "Runner", "call_of", "start_of"]

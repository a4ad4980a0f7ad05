"""Make the calls of r2ccl that a case of `collectives` measures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from collectives import Buffers, Case

import r2ccl


def call_of(comm: r2ccl.Communicator, case: Case, buffers: Buffers) -> Callable[[], Any]:
    """Return the function that makes one blocking call."""
    if case.form.name == "barrier":
        return comm.barrier
    if case.form.name == "sendrecv":
        right, left = _neighbours(comm)
        return partial(comm.sendrecv, buffers.x, right, buffers.out, left)
    return _collective(comm, case, buffers)


def start_of(
    comm: r2ccl.Communicator, case: Case, buffers: Buffers
) -> Callable[[], list[r2ccl.Work[Any] | r2ccl.MessageRequest]]:
    """Return the function that starts one asynchronous call, and returns what to wait for."""
    if case.form.name == "sendrecv":
        right, left = _neighbours(comm)
        receive = partial(comm.recv, buffers.out, left, 0, async_op=True)
        send = partial(comm.send, buffers.x, right, async_op=True)
        return lambda: [receive(), send()]
    start = _collective(comm, case, buffers, async_op=True)
    return lambda: [start()]


def _collective(
    comm: r2ccl.Communicator, case: Case, buffers: Buffers, **options: Any
) -> Callable[[], Any]:
    if case.form.reduces:
        options["op"] = r2ccl.ReduceOp[case.op.upper()]
    if case.form.is_rooted:
        options["root"] = case.root
    if case.form.name == "alltoallv":
        counts = case.exchanged(comm.rank)
        options |= {"sendcounts": counts, "recvcounts": counts}
    elif case.form.is_unequal:
        options["counts"] = case.parts
    return partial(getattr(comm, case.form.name), *buffers, **options)


def _neighbours(comm: r2ccl.Communicator) -> tuple[int, int]:
    """Return the next and the previous rank of the ring."""
    return (comm.rank + 1) % comm.nranks, (comm.rank - 1) % comm.nranks


__all__ = ["call_of", "start_of"]

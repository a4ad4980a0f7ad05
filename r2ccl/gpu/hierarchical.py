"""Allreduces on several nodes with several GPUs each: within the nodes, then between them.

Within a node the GPUs access each other's memory (`r2ccl.gpu.peer`). Between nodes NICs access GPU
memory (`r2ccl.gpu.gpudirect`), or windows of the data pass through pinned memory
(`r2ccl.gpu.staged`). Member i of every node owns part i of the data: it reduces this part of its
node's inputs, runs an allreduce with the members i of the other nodes, and distributes the result
in its node. The rails carry each byte once per node, over the home rails of all members at once.
Work on the stream, between ``ready`` and ``done`` of `PeerBackend`, in this order:

::

    kernel: reduce part i of the node's inputs into this rank's output
    allreduce part i among the members i of all nodes, over the rails
    kernel: copy part i to the outputs of the node's other ranks

The lengths of the parts differ by some elements, and a part may be empty. All ranks must use the
same backend and the same number of collectives between nodes, so they derive both from the widest
part.

Invariant: member i of a node writes only part i of an array that other ranks of the node access.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from r2ccl.device.base import Event, Stream
from r2ccl.dtypes import dtype_of
from r2ccl.gpu.peer import MOST_RANKS, CallInfo, InterNodeJob, PeerBackend, PeerJob
from r2ccl.gpu.plan_selector import EnterCall
from r2ccl.gpu.staged import DeviceCall
from r2ccl.types import CallSignature, Collective, ReduceOp


class InterNodeBackend(Protocol):
    """Executes the part of a call between nodes: `GpuDirectBackend` or `StagedBackend`."""

    def supports(self, call: DeviceCall, nranks: int) -> bool:
        """Return whether the backend can execute a call of `nranks` ranks.

        The answer is the same on all these ranks.
        """
        ...

    def is_prepared(self, call: DeviceCall) -> bool:
        """Return whether `begin` can be called without `prepare`."""
        ...

    def prepare(self, call: DeviceCall) -> None:
        """Load the kernels and allocate the memory that `call` needs; may wait for the device."""
        ...

    def begin(
        self, call: DeviceCall, stream: Stream, enter: EnterCall, widest: int
    ) -> tuple[Any, Event]:
        """Enqueue the device's part of `call`; see `StagedBackend.begin` for results and errors.

        The backend divides the call into as many collectives as a call of `widest` elements.
        """
        ...

    def recycle(self, event: Event) -> None:
        """Return `event` to the pool of unused events."""
        ...

    def finish(self, job: Any) -> None:
        """Execute the host's part of a call; runs in the communicator's worker thread.

        Do not call it after `abandon`.
        """
        ...

    def abandon(self, job: Any, error: BaseException) -> None:
        """Let the stream continue, because another part of the call failed.

        The caller calls it instead of `finish`, or after `finish` if the other part failed later. A
        repeated call does nothing. The job's ``error`` becomes `error`, unless the job has one.
        """
        ...


#: Index of the second kernel's addresses in a table of addresses.
_SECOND = MOST_RANKS + 1


class HierarchicalBackend(PeerBackend):
    """Allreduces of one rank, within its node by CUDA IPC and between nodes by another backend.

    Parameters
    ----------
    backends : sequence of InterNodeBackend
        Backends between nodes, in order of preference; the last supports all calls. Borrowed: the
        caller closes them.
    enter : callable
        Begins an allreduce among the ranks that have this rank's index in their nodes, and returns
        its plan. AVG divides by the number of all ranks.
    nnodes : int
    *others, **named
        See `PeerBackend`.
    """

    _heads = (0, _SECOND)

    def __init__(
        self,
        *others: Any,
        backends: Sequence[InterNodeBackend],
        enter: EnterCall,
        nnodes: int,
        **named: Any,
    ) -> None:
        super().__init__(*others, **named)
        self._backends = backends
        self._enter = enter
        self._nnodes = nnodes

    def supports(self, call: DeviceCall) -> bool:
        """Return whether `call` is an allreduce that `PeerBackend` supports."""
        return super().supports(call) and call.signature.collective == Collective.ALLREDUCE

    def is_prepared(self, call: DeviceCall) -> bool:
        """Return whether `begin` can be called without `prepare`."""
        part, backend = self._between(call)
        return super().is_prepared(call) and backend.is_prepared(part)

    def prepare(self, call: DeviceCall) -> None:
        """Load the kernels, and prepare the part of `call` between the nodes."""
        super().prepare(call)
        part, backend = self._between(call)
        backend.prepare(part)

    def _load(self, call: CallSignature) -> None:
        self._kernels.prepare_from_table(_summed(call), self._nlocal, 1)
        self._kernels.prepare_from_table(_summed(call), 1, self._nlocal - 1)

    def _work(self, job: PeerJob) -> None:
        call, table = job.call.signature, self._table_of(job.number)
        self._launch(_summed(call), self._nlocal, 1, table)
        part, backend = self._between(job.call)
        widest = self._share_of(call, at=0).length
        given, done = backend.begin(part, self._stream, self._enter, widest)
        job.between = InterNodeJob(backend, given)
        self._device.wait(self._stream, done)
        backend.recycle(done)
        if given.error is not None:
            raise given.error
        self._launch(_summed(call), 1, self._nlocal - 1, table[_SECOND:])

    def _between(self, call: DeviceCall) -> tuple[DeviceCall, InterNodeBackend]:
        """Return this rank's call between the nodes, and the backend that executes it."""
        mine, widest = (self._part_of(call, at) for at in (self._at, 0))
        return mine, next(each for each in self._backends if each.supports(widest, self._nnodes))

    def _part_of(self, call: DeviceCall, at: int) -> DeviceCall:
        signature = call.signature
        share = self._share_of(signature, at)
        place = call.output + share.start * dtype_of(signature.dtype).itemsize
        return DeviceCall(msgspec.structs.replace(signature, count=share.length), place, place)

    def _meanwhile(self, job: PeerJob) -> None:
        assert job.between is not None
        job.between.backend.finish(job.between.job)

    def _fill(self, job: PeerJob, infos: Sequence[CallInfo]) -> None:
        call = job.call.signature
        at = self._share_of(call).start * dtype_of(call.dtype).itemsize
        sources, outputs = self._addresses(job, infos)
        mine = outputs[self._at] + at
        others = [address + at for i, address in enumerate(outputs) if i != self._at]
        table = self._table_of(job.number)
        table[: self._nlocal + 1] = [*(address + at for address in sources), mine]
        table[_SECOND : _SECOND + self._nlocal] = [mine, *others]

    def _release_streams(self, error: BaseException) -> None:
        for job in tuple(self._jobs):
            if job.between is not None:
                job.between.backend.abandon(job.between.job, error)
        super()._release_streams(error)


def _summed(call: CallSignature) -> CallSignature:
    """Return the call with SUM instead of AVG: the collective between nodes divides."""
    op = ReduceOp.SUM if call.op == ReduceOp.AVG else call.op
    return msgspec.structs.replace(call, op=op)


__all__ = ["HierarchicalBackend", "InterNodeBackend"]

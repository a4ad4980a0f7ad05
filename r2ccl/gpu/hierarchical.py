"""Tiers: allreduces among several nodes with several GPUs each.

Within a node the GPUs work on each other's memory (`r2ccl.gpu.peer`); between nodes, slices
travel from and to it (`r2ccl.gpu.gpudirect`), or windows pass through pinned memory
(`r2ccl.gpu.staged`). Member i of every node has part i of the data: it adds up its node's, the
members i of all nodes add up their sums, and each gives its node the result. So the backends carry
every byte once a node, all of a node's ranks at once. In the stream's order, between ``ready`` and
``done`` of `PeerBackend`:

::

    kernel: the node's sum of part i, into this rank's output
    part i over the backends, among the members i of all nodes
    kernel: part i to the outputs of the other ranks of the node

Parts differ by some elements, or are empty. What all ranks must do alike, as the way over the backends
and the number of collectives there, follows from the widest part.

Must not import links. Invariant: of an array that others of the node read and write, nothing but
part i is touched by rank i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from r2ccl.device.base import Event, Stream
from r2ccl.dtypes import dtype_of
from r2ccl.gpu.peer import MOST_RANKS, InterNodeJob, CallInfo, PeerBackend, PeerJob
from r2ccl.gpu.staged import DeviceCall, Enter
from r2ccl.types import CallSignature, Collective, ReduceOp


class InterNodeBackend(Protocol):
    """A way between nodes: `r2ccl.gpu.gpudirect.GpuDirectBackend`, `r2ccl.gpu.staged.StagedBackend`."""

    def supports(self, call: DeviceCall, nranks: int) -> bool:
        """Whether a call of so many ranks is carried out; alike on all of them."""
        ...

    def is_prepared(self, call: DeviceCall) -> bool:
        """See `GpuBackend`."""
        ...

    def prepare(self, call: DeviceCall) -> None:
        """See `GpuBackend`."""
        ...

    def begin(
        self, call: DeviceCall, stream: Stream, enter: Enter, widest: int
    ) -> tuple[Any, Event]:
        """Give the device its part, as one of as many collectives as `widest` elements take."""
        ...

    def recycle(self, event: Event) -> None:
        """Take an event back."""
        ...

    def finish(self, job: Any) -> None:
        """Do the host's part, in the worker."""
        ...

    def abandon(self, job: Any, error: BaseException) -> None:
        """Let the device go on, also of a call that is finished: something else has failed."""
        ...


#: Where the second kernel's addresses begin in a table.
_SECOND = MOST_RANKS + 1


class HierarchicalBackend(PeerBackend):
    """The allreduces of one rank, its node's GPUs first.

    Parameters
    ----------
    backends : sequence of InterNodeBackend
        The first that supports a call has it; the last supports all. Borrowed.
    enter : callable
        Enters an allreduce among the ranks that have this rank's place in their nodes, in which
        AVG divides by the number of all ranks.
    nnodes : int
    **others
        Of `PeerBackend`.
    """

    _heads = (0, _SECOND)

    def __init__(
        self,
        *others: Any,
        backends: Sequence[InterNodeBackend],
        enter: Enter,
        nnodes: int,
        **named: Any,
    ) -> None:
        super().__init__(*others, **named)
        self._backends = backends
        self._enter = enter
        self._nnodes = nnodes

    def supports(self, call: DeviceCall) -> bool:
        """Whether a call can be carried out: an allreduce, not by a schedule of the caller's."""
        return super().supports(call) and call.signature.collective == Collective.ALLREDUCE

    def is_prepared(self, call: DeviceCall) -> bool:
        """See `GpuBackend`."""
        part, backends = self._between(call)
        return super().is_prepared(call) and backends.is_prepared(part)

    def prepare(self, call: DeviceCall) -> None:
        """See `GpuBackend`; loads the kernels, and prepares what lies between the nodes."""
        super().prepare(call)
        part, backends = self._between(call)
        backends.prepare(part)

    def _load(self, call: CallSignature) -> None:
        self._kernels.prepare_from_table(_summed(call), self._nlocal, 1)
        self._kernels.prepare_from_table(_summed(call), 1, self._nlocal - 1)

    def _work(self, job: PeerJob) -> None:
        call, table = job.call.signature, self._table_of(job.number)
        self._launch(_summed(call), self._nlocal, 1, table)
        part, backends = self._between(job.call)
        widest = self._share_of(call, at=0).length
        given, done = backends.begin(part, self._stream, self._enter, widest)
        job.between = InterNodeJob(backends, given)
        self._device.wait(self._stream, done)
        backends.recycle(done)
        if given.error is not None:
            raise given.error
        self._launch(_summed(call), 1, self._nlocal - 1, table[_SECOND:])

    def _between(self, call: DeviceCall) -> tuple[DeviceCall, InterNodeBackend]:
        """Return what this rank does between the nodes, and which backends carry it."""
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

    def _let_go(self, error: BaseException) -> None:
        for job in tuple(self._jobs):
            if job.between is not None:
                job.between.backend.abandon(job.between.job, error)
        super()._let_go(error)


def _summed(call: CallSignature) -> CallSignature:
    """Return the call without the division of AVG, which comes after the backends."""
    op = ReduceOp.SUM if call.op == ReduceOp.AVG else call.op
    return msgspec.structs.replace(call, op=op)


__all__ = ["HierarchicalBackend", "InterNodeBackend"]

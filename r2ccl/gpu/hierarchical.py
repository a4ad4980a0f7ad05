"""Tiers: allreduces among several nodes with several GPUs each.

Within a node the GPUs work on each other's memory (`r2ccl.gpu.peer`); between nodes, slices
travel from and to it (`r2ccl.gpu.gpudirect`), or windows pass through pinned memory
(`r2ccl.gpu.staged`). Member i of every node has part i of the data: it adds up its node's, the
members i of all nodes add up their sums, and each gives its node the result. So the rails carry
every byte once a node, all of a node's ranks at once. In the stream's order, between ``ready`` and
``done`` of `NodeCalls`:

::

    kernel: the node's sum of part i, into this rank's output
    part i over the rails, among the members i of all nodes
    kernel: part i to the outputs of the other ranks of the node

Parts differ by some elements, or are empty. What all ranks must do alike, as the way over the rails
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
from r2ccl.gpu.peer import MOST_RANKS, Between, NodeCalls, NodeJob, Notice
from r2ccl.gpu.staged import DeviceCall, Enter
from r2ccl.types import CallSignature, Collective, ReduceOp


class Rails(Protocol):
    """A way between nodes: `r2ccl.gpu.gpudirect.Direct`, `r2ccl.gpu.staged.Bounce`."""

    def takes(self, call: DeviceCall, nranks: int) -> bool:
        """Whether a call of so many ranks is carried out; alike on all of them."""
        ...

    def is_prepared(self, call: DeviceCall) -> bool:
        """See `Way`."""
        ...

    def prepare(self, call: DeviceCall) -> None:
        """See `Way`."""
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


class TieredCalls(NodeCalls):
    """The allreduces of one rank, its node's GPUs first.

    Parameters
    ----------
    rails : sequence of Rails
        The first that takes a call has it; the last takes all. Borrowed.
    enter : callable
        Enters an allreduce among the ranks that have this rank's place in their nodes, in which
        AVG divides by the number of all ranks.
    nnodes : int
    **others
        Of `NodeCalls`.
    """

    _heads = (0, _SECOND)

    def __init__(
        self, *others: Any, rails: Sequence[Rails], enter: Enter, nnodes: int, **named: Any
    ) -> None:
        super().__init__(*others, **named)
        self._rails = rails
        self._enter = enter
        self._nnodes = nnodes

    def takes(self, call: DeviceCall) -> bool:
        """Whether a call can be carried out: an allreduce, not by a schedule of the caller's."""
        return super().takes(call) and call.signature.collective == Collective.ALLREDUCE

    def is_prepared(self, call: DeviceCall) -> bool:
        """See `Way`."""
        part, rails = self._between(call)
        return super().is_prepared(call) and rails.is_prepared(part)

    def prepare(self, call: DeviceCall) -> None:
        """See `Way`; loads the kernels, and prepares what lies between the nodes."""
        super().prepare(call)
        part, rails = self._between(call)
        rails.prepare(part)

    def _load(self, call: CallSignature) -> None:
        self._kernels.prepare_from_table(_summed(call), self._nlocal, 1)
        self._kernels.prepare_from_table(_summed(call), 1, self._nlocal - 1)

    def _work(self, job: NodeJob) -> None:
        call, table = job.call.signature, self._table_of(job.number)
        self._launch(_summed(call), self._nlocal, 1, table)
        part, rails = self._between(job.call)
        widest = self._share_of(call, at=0).length
        given, done = rails.begin(part, self._stream, self._enter, widest)
        job.between = Between(rails, given)
        self._device.wait(self._stream, done)
        rails.recycle(done)
        if given.error is not None:
            raise given.error
        self._launch(_summed(call), 1, self._nlocal - 1, table[_SECOND:])

    def _between(self, call: DeviceCall) -> tuple[DeviceCall, Rails]:
        """Return what this rank does between the nodes, and which rails carry it."""
        mine, widest = (self._part_of(call, at) for at in (self._at, 0))
        return mine, next(each for each in self._rails if each.takes(widest, self._nnodes))

    def _part_of(self, call: DeviceCall, at: int) -> DeviceCall:
        signature = call.signature
        share = self._share_of(signature, at)
        place = call.output + share.start * dtype_of(signature.dtype).itemsize
        return DeviceCall(msgspec.structs.replace(signature, count=share.length), place, place)

    def _meanwhile(self, job: NodeJob) -> None:
        assert job.between is not None
        job.between.way.finish(job.between.job)

    def _fill(self, job: NodeJob, notices: Sequence[Notice]) -> None:
        call = job.call.signature
        at = self._share_of(call).start * dtype_of(call.dtype).itemsize
        sources, outputs = self._addresses(job, notices)
        mine = outputs[self._at] + at
        others = [address + at for i, address in enumerate(outputs) if i != self._at]
        table = self._table_of(job.number)
        table[: self._nlocal + 1] = [*(address + at for address in sources), mine]
        table[_SECOND : _SECOND + self._nlocal] = [mine, *others]

    def _let_go(self, error: BaseException) -> None:
        for job in tuple(self._jobs):
            if job.between is not None:
                job.between.way.abandon(job.between.job, error)
        super()._let_go(error)


def _summed(call: CallSignature) -> CallSignature:
    """Return the call without the division of AVG, which comes after the rails."""
    op = ReduceOp.SUM if call.op == ReduceOp.AVG else call.op
    return msgspec.structs.replace(call, op=op)


__all__ = ["Rails", "TieredCalls"]

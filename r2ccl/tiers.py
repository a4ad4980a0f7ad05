"""Tiers: allreduces among several nodes with several GPUs each.

Within a node the GPUs work on each other's memory (`r2ccl.nodecalls`); between nodes, windows pass
through pinned memory and the rails (`r2ccl.bounce`). Member i of every node has part i of the data:
it adds up its node's, the members i of all nodes add up their sums, and each gives its node the
result. So the rails carry every byte once a node, all of a node's ranks at once. In the stream's
order, between ``ready`` and ``done`` of `NodeCalls`:

::

    kernel: the node's sum of part i, into this rank's output
    windows of part i: out, over the rails, in
    kernel: part i to the outputs of the other ranks of the node

Must not import links. Invariant: of an array that others of the node read and write, nothing but
part i is touched by rank i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from r2ccl.bounce import Bounce, DeviceCall
from r2ccl.dtypes import dtype_of
from r2ccl.nodecalls import MOST_RANKS, NodeCalls, NodeJob, Notice
from r2ccl.types import CallSignature, Collective, ReduceOp


class TieredCalls(NodeCalls):
    """The allreduces of one rank, its node's GPUs first.

    Parameters
    ----------
    rails : Bounce
        Runs allreduces among the ranks that have this rank's place in their nodes; this one's
        alone. AVG divides by the number of all ranks there.
    **others
        Of `NodeCalls`.
    """

    def __init__(self, *others: Any, rails: Bounce, **named: Any) -> None:
        super().__init__(*others, **named)
        self._rails = rails

    def takes(self, call: DeviceCall) -> bool:
        """Whether a call can be carried out: an allreduce, not by a schedule of the caller's."""
        return super().takes(call) and call.signature.collective == Collective.ALLREDUCE

    def close(self, timeout_s: float) -> None:
        """See `NodeCalls.close`."""
        super().close(timeout_s)
        self._rails.close(timeout_s)

    def _prepare(self, call: CallSignature) -> None:
        self._kernels.prepare_from_table(_summed(call), self._nlocal, 1)
        self._kernels.prepare_from_table(_summed(call), 1, self._nlocal - 1)

    def _work(self, job: NodeJob) -> None:
        call, table = job.call.signature, self._table_of(job.number)
        share = self._share_of(call)
        self._launch(_summed(call), self._nlocal, 1, table)
        part = job.call.output + share.start * dtype_of(call.dtype).itemsize
        signature = msgspec.structs.replace(call, count=share.length)
        job.between = self._rails.give(DeviceCall(signature, part, part), self._stream)
        if job.between.error is not None:
            raise job.between.error
        self._launch(_summed(call), 1, self._nlocal - 1, table[_SECOND:])

    def _meanwhile(self, job: NodeJob) -> None:
        assert job.between is not None
        self._rails.finish(job.between)

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
                self._rails.abandon(job.between, error)
        super()._let_go(error)


def _summed(call: CallSignature) -> CallSignature:
    """Return the call without the division of AVG, which comes after the rails."""
    op = ReduceOp.SUM if call.op == ReduceOp.AVG else call.op
    return msgspec.structs.replace(call, op=op)


#: Where the second kernel's addresses begin in a table.
_SECOND = MOST_RANKS + 1

__all__ = ["TieredCalls"]

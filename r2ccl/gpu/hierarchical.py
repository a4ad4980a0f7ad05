"""Allreduces on several nodes with several GPUs each, in steps within nodes and between them.

Within a node the GPUs access each other's memory (`r2ccl.gpu.peer`). Between nodes NICs access GPU
memory (`r2ccl.gpu.gpudirect`), or windows of the data pass through pinned memory
(`r2ccl.gpu.staged`). Member i of every node owns part i of the data: it reduces this part of its
node's inputs, runs an allreduce with the members i of the other nodes, and distributes the result
in its node. The rails thus carry as much data as with one rank per node, spread over the home
rails of all members. This work lies between ``ready`` and ``done`` of a round of `PeerBackend`:

::

    kernel: reduce part i of the node's inputs into this rank's output
    allreduce part i among the members i of all nodes, over the rails
    kernel: copy part i to the outputs of the node's other ranks

A call is always divided into windows that fit the ranks' areas (`r2ccl.gpu.peer_memory`), because
the number of collectives between the nodes must not depend on the arrays that the ranks of one node
have mapped. The lengths of the parts differ by some elements, and a part may be empty. All ranks
must use the same backend and the same number of collectives between nodes, so they derive both from
the widest part.

Invariant: between ``ready`` and ``done``, member i of a node writes only part i of an array or area
that other ranks of the node access.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec
import numpy.typing as npt

from r2ccl.device.base import Event, Stream
from r2ccl.dtypes import dtype_of
from r2ccl.gpu.host_signal import DeviceCall
from r2ccl.gpu.ipc_board import MOST_RANKS
from r2ccl.gpu.peer import PeerBackend, Rows
from r2ccl.gpu.plan_selector import EnterCall
from r2ccl.gpu.staged_windows import windows
from r2ccl.types import CallSignature, Collective, ReduceOp


class InterNodeBackend(Protocol):
    """Executor of a call's step between the nodes: `GpuDirectBackend` or `StagedBackend`."""

    def supports(self, call: DeviceCall, nranks: int) -> bool:
        """Return whether the backend can execute `call` if `nranks` ranks make it.

        The answer is the same on all these ranks.
        """
        ...

    def is_prepared(self, call: DeviceCall) -> bool:
        """Return whether `begin_part` can be called for `call` without calling `prepare` first."""
        ...

    def prepare(self, call: DeviceCall) -> None:
        """Load the kernels and allocate the memory that `call` needs; may wait for the device.

        See `r2ccl.gpu.backends.GpuBackend.prepare` for the errors.
        """
        ...

    def begin_part(self, call: DeviceCall, stream: Stream, enter: EnterCall, widest: int) -> Any:
        """Begin `call` as a part of another call, and return its job for `finish`.

        The call is divided into as many collectives as a call of `widest` elements would be. See
        `StagedBackend.begin_part` for the other parameters and the errors.
        """
        ...

    def recycle(self, event: Event) -> None:
        """Return `event` to the pool of unused events."""
        ...

    def finish(self, job: Any) -> None:
        """Execute the call of `job`; runs in the communicator's worker thread.

        The device may still work on the call afterwards, until the event ``job.done`` is done. If
        the call fails before this method returns, raise its error.
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
        Enters an allreduce among the ranks with the same index in their nodes as this rank, and
        returns its plan. AVG divides by the number of all ranks.
    nnodes : int
        Number of nodes.
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
        """Return whether `begin` can be called for `call` without calling `prepare` first."""
        return super().is_prepared(call) and all(
            backend.is_prepared(part) for part, backend in self._parts(call)
        )

    def prepare(self, call: DeviceCall) -> None:
        """Prepare `call` within the node, like `PeerBackend`, and its parts between the nodes.

        Raises the errors of `PeerBackend.prepare` and of `GpuDirectBackend.prepare`.
        """
        super().prepare(call)
        for part, backend in self._parts(call):
            if not backend.is_prepared(part):
                backend.prepare(part)

    def _load(self, call: CallSignature) -> None:
        self._kernels.prepare_from_table(_summed(call), self._nlocal, 1)
        self._kernels.prepare_from_table(_summed(call), 1, self._nlocal - 1)

    def _limit(self, is_copied: bool) -> int:
        """Return the size limit of windows in bytes, which does not depend on `is_copied`.

        A node does not know whether other nodes copy arrays.
        """
        return self._memory.area_nbytes

    def _work(
        self,
        call: CallSignature,
        sources: Sequence[Rows],
        outputs: Sequence[Rows],
        table: npt.NDArray[Any],
    ) -> None:
        at = self._share_of(call).start * dtype_of(call.dtype).itemsize
        mine = outputs[self._at].address + at
        others = [row.address + at for i, row in enumerate(outputs) if i != self._at]
        whole = _summed(call)
        addresses = [*(row.address + at for row in sources), mine]
        self._launch(whole, self._nlocal, 1, table, addresses)
        part, backend = self._between(call, outputs[self._at].address)
        widest = self._share_of(call, at=0).length
        job = backend.begin_part(part, self._stream, self._enter, widest)
        backend.finish(job)
        self._device.wait(self._stream, job.done)
        backend.recycle(job.done)
        self._launch(whole, 1, self._nlocal - 1, table[_SECOND:], [mine, *others])

    def _parts(self, call: DeviceCall) -> Iterator[tuple[DeviceCall, InterNodeBackend]]:
        """Yield the calls between the nodes that `call` may need, each with its backend.

        The windows of `call` have at most two different sizes. The result of a window is in the
        output or in this rank's area. Yield one call for each combination of size and location.
        """
        grid = self._grid(call.signature, self._memory.area_nbytes)
        calls = dict.fromkeys(window.call for window in windows(call.signature, grid))
        for signature in calls:
            for place in (call.output, self._memory.areas[self._at] + self._memory.area_nbytes):
                yield self._between(signature, place)

    def _between(self, call: CallSignature, output: int) -> tuple[DeviceCall, InterNodeBackend]:
        """Return this rank's call between the nodes for a window, and its backend.

        `call` is the call of the window, and `output` the address of the window's result.
        """
        mine, widest = (self._part_of(call, output, at) for at in (self._at, 0))
        return mine, next(each for each in self._backends if each.supports(widest, self._nnodes))

    def _part_of(self, call: CallSignature, output: int, at: int) -> DeviceCall:
        share = self._share_of(call, at)
        place = output + share.start * dtype_of(call.dtype).itemsize
        return DeviceCall(msgspec.structs.replace(call, count=share.length), place, place)


def _summed(call: CallSignature) -> CallSignature:
    """Return `call` with SUM instead of AVG, because the allreduce between the nodes divides."""
    op = ReduceOp.SUM if call.op == ReduceOp.AVG else call.op
    return msgspec.structs.replace(call, op=op)


__all__ = ["HierarchicalBackend", "InterNodeBackend"]

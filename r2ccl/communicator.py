"""Communicator: collectives among a group of ranks, status of the group, and orderly shutdown."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

import msgspec
import numpy as np

from r2ccl.bootstrap.control import ControlPlane
from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.clock import monotonic
from r2ccl.device.base import Device
from r2ccl.errors import InvalidArgument, R2cclError, TransportTimeout
from r2ccl.failover.diagnosis.verdict import Verdict
from r2ccl.failover.exclusion import ports_of
from r2ccl.failover.health.driver import Known
from r2ccl.failover.migration.calls import first_channel
from r2ccl.failover.migration.repairs import Repair
from r2ccl.failover.shrink.driver import regroup
from r2ccl.failover.shrink.protocol import Shrinking
from r2ccl.gpu.collectives import DeviceCollectives
from r2ccl.gpu.hardware import Hardware
from r2ccl.gpu.plan_selector import PlanSelector
from r2ccl.planning.cost_model import Fabric
from r2ccl.planning.plan_cache import PlanCache, in_job
from r2ccl.planning.planner import Explanation
from r2ccl.runtime import arguments, status
from r2ccl.runtime.arguments import as_buffer
from r2ccl.runtime.async_work import Worker
from r2ccl.runtime.collectives import Collectives
from r2ccl.runtime.engine import Engine, RegisteredMemory
from r2ccl.runtime.grouping import Group
from r2ccl.runtime.job import ABORT_S, LEAVE_S, Job, nodes_of
from r2ccl.runtime.messages.matching import ANY, Message
from r2ccl.runtime.messages.messenger import MessageRequest
from r2ccl.runtime.signal_dump import require_main_thread
from r2ccl.runtime.splitting import Part, agree
from r2ccl.schedule.ir import Schedule
from r2ccl.types import AllgatherBytes, ReduceOp

if TYPE_CHECKING:
    from r2ccl.gpu.backends import GpuBackend
    from r2ccl.gpu.pxn.transport import PxnTransport

_log = logging.getLogger(__name__)

#: Source, or tag, of a receive that takes any.
ANY_SOURCE = ANY_TAG = ANY


class Communicator:
    """Group of ranks that run collectives together; created by `r2ccl.init`.

    Every method marked *collective* must be called by all ranks in the same order.

    Attributes
    ----------
    rank, nranks : int
        Number of this process, from 0, and number of ranks.
    members : tuple of int
        For each rank, its rank in the communicator from which `shrink` made this one. In a
        communicator made by `r2ccl.init`, each rank's own number.
    config : Config
        Settings of this communicator.
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        *,
        members: tuple[int, ...],
        assemble: Assemble | None,
        hardware: Hardware,
        relayed: PxnTransport | None = None,
    ) -> None:
        self.rank = engine.rank
        self.nranks = engine.nranks
        self.members = members
        self.config = engine.config
        self._job = job
        self._engine = engine
        #: Makes the communicator of the survivors; None in a communicator made by `split`.
        self._assemble = assemble
        self._hardware = hardware
        #: Part of the transport that can use PXN routes.
        self._relayed = relayed
        self._peers = [job.control.peers[rank] for rank in engine.context.members]
        fabric = Fabric(job.homes, job.control.nwires, nodes_of(self._peers))
        context_id, _, in_job_of = engine.context
        self._plans = PlanCache(
            self.rank,
            self.nranks,
            fabric,
            self.config,
            place=in_job(in_job_of, first_channel(context_id)) if context_id else None,
        )
        turn = threading.Lock()
        self._worker = Worker(f"r2ccl-worker-{self.rank}", turn, engine.fail_call)
        self._on_device = DeviceCollectives(
            self.rank,
            timeout_s=self.config.timeout_s,
            worker=self._worker,
            check=engine.check,
            open_device=hardware.open,
            select_backends=self._select_backends,
        )
        self._collectives = Collectives(
            engine,
            self._plans,
            job.pool,
            worker=self._worker,
            turn=turn,
            start_on_device=self._on_device.start,
        )
        job.add(self)

    def connect(self) -> None:
        """Start the control plane, connect the rails and, if needed, measure them.

        `r2ccl.init` and `shrink` call it once. If it raises, the communicator has been aborted.

        Raises
        ------
        TransportTimeout
            If a peer has no path, or a rank does not call it, within ``R2CC_INIT_TIMEOUT_S``.
        R2cclError
            If the communicator fails meanwhile.

        Notes
        -----
        *Collective*: all ranks.
        """
        try:
            self._job.start()
            if self._is_measured():
                rates = self._collectives.calibrate()
                self._plans.measured(rates)
                if len({info.host for info in self._peers}) == self.nranks:
                    self._engine.set_nominal_rate(rates.beta)
        except BaseException as exc:
            self._job.abort_surely(f"init() failed: {exc!r}")
            raise

    def allreduce(
        self,
        x: Any,
        out: Any = None,
        op: arguments.Operation = ReduceOp.SUM,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce `x` over all ranks; every rank receives the result.

        Parameters
        ----------
        x : array_like, any shape
            In host memory on all ranks, or in device memory on all ranks; dtype and number of
            elements must be equal on all ranks. Must be C-contiguous in device memory, or if it
            receives the result; other inputs are copied first if they are not. Borrowed until the
            collective has finished.
        out : array_like, optional
            Receives the result: the same memory as `x` or disjoint from it. Default: `x` itself.
        op : ReduceOp, ConvertedOp or UserOp
            An operation that the dtype supports; docs/reductions.md has the table. `premul_sum`,
            `accumulate_float32` and `user_op` make others.
        stream : optional
            For device memory only. The collective runs after the work enqueued on this stream
            before the call, and work enqueued on it later sees the result. A handle, a stream of
            CuPy, Numba or torch, or an object with ``__cuda_stream__``. Default: the current
            stream of the array's library.
        async_op : bool
            Return a `Work` at once.

        Returns
        -------
        array_like or Work
            `out`, or `x` without `out`; with ``async_op``, a `Work` whose `wait` returns the array.
            A call on device memory always returns at once, and work enqueued on `stream` afterwards
            sees the result. With ``async_op``, such work sees the result only after `Work.order`.

        Raises
        ------
        InvalidArgument
            If memory, dtype or op are invalid (before any data moves), or if the ranks disagree on
            the call; a disagreement revokes the communicator on every rank.
        NoHealthyRail, PeerLost, TransportTimeout
            If the collective failed (see `r2ccl.errors`); the communicator is revoked. With
            ``async_op``, `Work.wait` raises the error. For a call on device memory without
            ``async_op``, the next call raises `CommunicatorRevoked`, whose ``reason`` is the error.
        TransportError
            If a GPU or its driver failed or, with ``R2CC_MODE=failstop``, a path failed.
        CommunicatorRevoked
            If the communicator was revoked before, or another rank revokes it during the call.
        ConcurrentCalls
            If this call is blocking, and another blocking call runs in another thread or was
            interrupted by this signal handler.

        Notes
        -----
        *Collective*: all ranks. *Cost*: log2(n) exchanges of the data if it fits one eager slice;
        otherwise, for a ring, each rank sends 2(n - 1)/n of the data. *After failure*: the failure
        of a path does not change a bit of the result. Later calls are planned for the remaining
        rails and may round differently (docs/fault-model.md). If the call raises, `out` is
        undefined. The calls of one communicator, blocking or asynchronous, run in the order in
        which they were made.
        """
        return self._collectives.start(stream, async_op, arguments.allreduce, x, out, op)

    def allgather(
        self, x: Any, out: Any = None, *, stream: Any = None, async_op: bool = False
    ) -> Any:
        """Gather the `x` of every rank on every rank.

        Parameters
        ----------
        x : array_like, any shape
            As for `allreduce`. May be this rank's part of `out`, which saves a copy.
        out : array_like, optional
            Receives the data of all ranks in rank order: ``nranks`` times as many elements as `x`,
            of the same dtype. Default: a new array of shape ``(nranks, *x.shape)``.
        stream, async_op
            As for `allreduce`.

        Returns
        -------
        array_like or Work
            `out`, or the new array without `out`; with ``async_op`` a `Work`.

        Raises
        ------
        InvalidArgument
            As for `allreduce`, or if `out` has a wrong size, or overlaps `x` but `x` is not this
            rank's part of `out`.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: each rank sends (n - 1)/n of `out`, in a ring.
        """
        make = arguments.allgather
        return self._collectives.start(stream, async_op, make, x, out, self.rank, self.nranks)

    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        op: arguments.Operation = ReduceOp.SUM,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce `x` over all ranks; each rank receives one part of the result.

        Parameters
        ----------
        x : array_like
            As for `allreduce`; the number of elements must be a multiple of ``nranks``. Not
            modified, unless `out` is a part of `x`.
        out : array_like, optional
            Receives part number `rank` of ``nranks`` equal parts of the result. May be the same
            part of `x`. Default: a new array, of shape ``(x.shape[0] / nranks, *x.shape[1:])`` if
            ``nranks`` divides ``x.shape[0]``, otherwise flat.
        op
            As for `allreduce`.
        stream, async_op
            As for `allreduce`.

        Returns
        -------
        array_like or Work
            `out`, or the new array without `out`; with ``async_op`` a `Work`.

        Raises
        ------
        InvalidArgument
            As for `allreduce`, or if the number of elements of `x` is not a multiple of ``nranks``,
            or `out` has a wrong size, or `out` overlaps `x` but is not this rank's part of `x`.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: each rank sends (n - 1)/n of `x`, in a ring, and needs
        memory of the size of `x` for partial sums, which is reused across calls.
        """
        make = arguments.reduce_scatter
        return self._collectives.start(stream, async_op, make, x, out, op, self.rank, self.nranks)

    def broadcast(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Send the data of rank `root` to every rank.

        Parameters
        ----------
        x : array_like, any shape
            On `root`, the data. On other ranks, the array that receives the data if `out` is not
            given. Dtype and number of elements must be equal on all ranks.
        out : array_like, optional
            Receives the data: the same memory as `x` or disjoint from it. Default: `x` itself.
        root : int
        stream, async_op
            As for `allreduce`.

        Returns
        -------
        array_like or Work
            `out`, or `x` without `out`; with ``async_op`` a `Work`.

        Raises
        ------
        InvalidArgument
            As for `allreduce`, or if `root` is not a rank.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: log2(n) messages one after another if the data fits one
        eager slice; otherwise a pipeline through all ranks, in which each rank except `root`
        receives the data once and, while all NICs work, sends the data at most once.
        """
        root = self._rank_of(root)
        return self._collectives.start(stream, async_op, arguments.broadcast, x, out, root)

    def reduce(
        self,
        x: Any,
        out: Any = None,
        op: arguments.Operation = ReduceOp.SUM,
        root: int = 0,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce `x` over all ranks; rank `root` receives the result.

        Parameters
        ----------
        x : array_like, any shape
            As for `allreduce`. Not modified, except on `root` without `out`.
        out : array_like, optional
            On `root`, receives the result, as for `allreduce`. Ignored on other ranks.
        op
            As for `allreduce`.
        root : int
        stream, async_op
            As for `allreduce`.

        Returns
        -------
        array_like or None or Work
            On `root`, `out`, or `x` without `out`; None on other ranks. With ``async_op`` a `Work`.

        Raises
        ------
        InvalidArgument
            As for `allreduce`, or if `root` is not a rank.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: as for `broadcast`, in the opposite direction. Ranks other
        than `root` need memory of the size of `x` for partial sums, which is reused across calls.
        """
        root = self._rank_of(root)
        return self._collectives.start(
            stream, async_op, arguments.reduce, x, out, op, root, self.rank
        )

    def gather(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Gather the `x` of every rank on rank `root`.

        Parameters
        ----------
        x : array_like, any shape
            In host memory, otherwise as for `allreduce`. On `root` it may be the root's part of
            `out`, which saves a copy.
        out : array_like, optional
            On `root`, receives the data of all ranks in rank order, as for `allgather`. Ignored on
            other ranks.
        root : int
        stream, async_op
            As for `allreduce`; a stream is refused, because device memory is not supported.

        Returns
        -------
        array_like or None or Work
            On `root`, `out`, or the new array without `out`; None on other ranks. With
            ``async_op`` a `Work`.

        Raises
        ------
        InvalidArgument
            As for `allgather`, if `root` is not a rank, or if an array is in device memory.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: one message from every rank to the root; log2(n) messages
        one after another over a binomial tree if all data fits one eager slice.
        """
        root, make = self._rank_of(root), arguments.gather
        return self._collectives.start(stream, async_op, make, x, out, root, self.rank, self.nranks)

    def gatherv(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Gather the `x` of every rank, whose sizes may differ, on rank `root`.

        Parameters
        ----------
        x : array_like
            As for `gather`, of any number of elements, 0 allowed.
        out : array_like, optional
            On `root`, receives the data. Elements outside all parts are not modified. Default: a
            new flat array that ends with the last part. Ignored on other ranks.
        root : int
        counts : sequence of int
            On `root`, the number of elements of each rank's `x`. Ignored on other ranks.
        displs : sequence of int, optional
            On `root`, the first element of each rank's part of `out`; parts must not overlap.
            Default: the parts follow one another in rank order. Ignored on other ranks.
        stream, async_op
            As for `gather`.

        Returns
        -------
        array_like or None or Work
            As for `gather`.

        Raises
        ------
        InvalidArgument
            As for `gather`, if counts or displacements are wrong or, on all ranks, if a rank passes
            another number of elements than `root` expects, which revokes the communicator.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: one message from every rank to the root.
        """
        root, make = self._rank_of(root), arguments.gatherv
        given = (x, out, root, counts, displs, self.rank, self.nranks)
        return self._collectives.start(stream, async_op, make, *given)

    def scatter(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Send one equal part of the `x` of rank `root` to every rank.

        Parameters
        ----------
        x : array_like
            On `root`, the parts of all ranks in rank order; the number of elements must be a
            multiple of ``nranks``. In host memory. Ignored on other ranks, which may pass None.
        out : array_like, optional
            Receives this rank's part. On `root` it may be the same part of `x`, which saves a copy,
            and the default is a new array, as for `reduce_scatter`. Required on other ranks.
        root : int
        stream, async_op
            As for `gather`.

        Returns
        -------
        array_like or Work
            `out`, or on `root` the new array without `out`; with ``async_op`` a `Work`.

        Raises
        ------
        InvalidArgument
            As for `gather`, or if `out` is missing or has a wrong size.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: as for `gather`, in the opposite direction.
        """
        root, make = self._rank_of(root), arguments.scatter
        return self._collectives.start(stream, async_op, make, x, out, root, self.rank, self.nranks)

    def scatterv(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Send one part of the `x` of rank `root`, of any size, to every rank.

        Parameters
        ----------
        x : array_like
            On `root`, contains the parts of all ranks. In host memory. Ignored on other ranks,
            which may pass None.
        out : array_like, optional
            Receives this rank's part and has its size. On `root` it may be the same part of `x`,
            and the default is a new flat array. Required on other ranks.
        root : int
        counts : sequence of int
            On `root`, the number of elements of each rank's part. Ignored on other ranks.
        displs : sequence of int, optional
            On `root`, the first element of each rank's part of `x`; parts may overlap. Default: the
            parts follow one another in rank order. Ignored on other ranks.
        stream, async_op
            As for `gather`.

        Returns
        -------
        array_like or Work
            As for `scatter`.

        Raises
        ------
        InvalidArgument
            As for `scatter`, if counts or displacements are wrong or, on all ranks, if `out` of a
            rank has another size than `root` sends, which revokes the communicator.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: one message from the root to every rank.
        """
        root, make = self._rank_of(root), arguments.scatterv
        given = (x, out, root, counts, displs, self.rank, self.nranks)
        return self._collectives.start(stream, async_op, make, *given)

    def alltoall(
        self, x: Any, out: Any = None, *, stream: Any = None, async_op: bool = False
    ) -> Any:
        """Send one equal part of `x` to every rank; receive one from every rank.

        Parameters
        ----------
        x : array_like
            The parts for all ranks in rank order; the number of elements must be a multiple of
            ``nranks``. In host memory, otherwise as for `allreduce`.
        out : array_like, optional
            Receives the parts from all ranks in rank order; has the size of `x`. May be `x` itself.
            Default: a new array like `x`.
        stream, async_op
            As for `gather`.

        Returns
        -------
        array_like or Work
            `out`, or the new array without `out`; with ``async_op`` a `Work`.

        Raises
        ------
        InvalidArgument
            As for `allreduce`, if the number of elements is not a multiple of ``nranks``, or if an
            array is in device memory.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: one message to every rank; each rank sends (n - 1)/n of
        `x`. If `out` is `x`, the data is copied once, to memory that is reused across calls.
        """
        make = arguments.alltoall
        return self._collectives.start(stream, async_op, make, x, out, self.rank, self.nranks)

    def alltoallv(
        self,
        x: Any,
        out: Any = None,
        *,
        sendcounts: Sequence[int],
        recvcounts: Sequence[int],
        senddispls: Sequence[int] | None = None,
        recvdispls: Sequence[int] | None = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Send a part of `x`, of any size, to every rank; receive one from every rank.

        Parameters
        ----------
        x : array_like
            Contains the parts for all ranks. In host memory, otherwise as for `allreduce`.
        out : array_like, optional
            Receives the parts from all ranks. May be `x` itself. Elements outside all parts are not
            modified. Default: a new flat array that ends with the last part.
        sendcounts, recvcounts : sequence of int
            Number of elements sent to, and received from, each rank; 0 allowed.
        senddispls, recvdispls : sequence of int, optional
            First element of each rank's part of `x`, and of `out`; parts of `out` must not overlap.
            Default: the parts follow one another in rank order.
        stream, async_op
            As for `gather`.

        Returns
        -------
        array_like or Work
            As for `alltoall`.

        Raises
        ------
        InvalidArgument
            As for `alltoall`, if counts or displacements are wrong or, on all ranks, if a rank
            sends another number of elements than the receiver expects, which revokes the
            communicator.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: one message to every rank, also for empty parts. No rank
        learns the counts of other pairs.
        """
        counts, displs = (sendcounts, recvcounts), (senddispls, recvdispls)
        given = (x, out, counts, displs, self.rank, self.nranks)
        return self._collectives.start(stream, async_op, arguments.alltoallv, *given)

    def allgatherv(
        self,
        x: Any,
        out: Any = None,
        *,
        counts: Sequence[int],
        displs: Sequence[int] | None = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Gather the `x` of every rank, whose sizes may differ, on every rank.

        Parameters
        ----------
        x : array_like
            As for `allgather`, with ``counts[rank]`` elements. Unless all counts are equal and
            `displs` is left out, in host memory.
        out : array_like, optional
            Receives the data of all ranks. Elements outside all parts are not modified. Default: a
            new flat array that ends with the last part.
        counts : sequence of int
            Number of elements of each rank's `x`, equal on all ranks; 0 allowed.
        displs : sequence of int, optional
            First element of each rank's part of `out`; parts must not overlap. May differ between
            ranks. Default: the parts follow one another in rank order.
        stream, async_op
            As for `allreduce`.

        Returns
        -------
        array_like or Work
            As for `allgather`.

        Raises
        ------
        InvalidArgument
            As for `allgather`, if counts or displacements are wrong, if an array is in device
            memory or, on all ranks, if the ranks pass different counts, which revokes the
            communicator.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: as for `allgather`; each rank receives all parts but its
        own.
        """
        make = arguments.allgatherv
        given = (x, out, counts, displs, self.rank, self.nranks)
        return self._collectives.start(stream, async_op, make, *given)

    def reduce_scatterv(
        self,
        x: Any,
        out: Any = None,
        op: arguments.Operation = ReduceOp.SUM,
        *,
        counts: Sequence[int],
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce `x` over all ranks; each rank receives one part of the result, of any size.

        Parameters
        ----------
        x : array_like
            As for `reduce_scatter`, with as many elements as all counts together. Unless all counts
            are equal, in host memory.
        out : array_like, optional
            Receives part number `rank` of the result, of ``counts[rank]`` elements. May be the same
            part of `x`. Default: a new flat array.
        op : ReduceOp
            As for `allreduce`.
        counts : sequence of int
            Number of elements of each rank's part, equal on all ranks; 0 allowed. The parts follow
            one another in rank order.
        stream, async_op
            As for `allreduce`.

        Returns
        -------
        array_like or Work
            As for `reduce_scatter`.

        Raises
        ------
        InvalidArgument
            As for `reduce_scatter`, if the counts are wrong, if an array is in device memory or, on
            all ranks, if the ranks pass different counts, which revokes the communicator.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: as for `reduce_scatter`; each rank sends all parts but its
        own.
        """
        make = arguments.reduce_scatterv
        given = (x, out, op, counts, self.rank, self.nranks)
        return self._collectives.start(stream, async_op, make, *given)

    def scan(
        self,
        x: Any,
        out: Any = None,
        op: arguments.Operation = ReduceOp.SUM,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce `x` over the ranks up to and including each rank, in rank order.

        Parameters
        ----------
        x : array_like, any shape
            In host memory, otherwise as for `allreduce`.
        out : array_like, optional
            As for `allreduce`.
        op : ReduceOp
            As for `allreduce`, except AVG.
        stream, async_op
            As for `gather`.

        Returns
        -------
        array_like or Work
            As for `allreduce`.

        Raises
        ------
        InvalidArgument
            As for `allreduce`, if `op` is AVG, or if an array is in device memory.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: log2(n) exchanges of the data if it fits one eager slice;
        otherwise a pipeline through all ranks, if that is predicted to be faster. Ranks get the
        same bits on every run with the same plan, but the sum of the highest rank may round
        differently from an allreduce.
        """
        return self._collectives.start(stream, async_op, arguments.scan, x, out, op, False)

    def exscan(
        self,
        x: Any,
        out: Any = None,
        op: arguments.Operation = ReduceOp.SUM,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce `x` over the ranks below each rank, in rank order.

        Parameters
        ----------
        x, out, op, stream, async_op
            As for `scan`. On rank 0, `out` is not modified.

        Returns
        -------
        array_like or Work
            As for `allreduce`.

        Raises
        ------
        InvalidArgument
            As for `scan`.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: as for `scan`, and one exchange more. Without `out`, the
        data is copied once, to memory that is reused across calls.
        """
        return self._collectives.start(stream, async_op, arguments.scan, x, out, op, True)

    def run_schedule(
        self,
        schedule: Schedule,
        x: Any,
        out: Any = None,
        op: arguments.Operation = ReduceOp.SUM,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Run an allreduce by a user-defined schedule; the call survives rail failures.

        Parameters
        ----------
        schedule : Schedule
            Allreduce of `nranks` ranks, equal on all ranks; from `r2ccl.algos` or made with
            `r2ccl.schedule.build`. Its edges are placed on the rails, and its chunks cut into
            slices.
        x, out, op, stream, async_op
            As for `allreduce`.

        Returns
        -------
        array_like or Work
            `out`, or `x` without `out`; with ``async_op`` a `Work`.

        Raises
        ------
        ScheduleError
            If the checker refuses the schedule, for example because a contribution would be missing
            or doubled on some rank. No data has moved, and the communicator stays usable.
        InvalidArgument
            As for `allreduce`, or if the schedule is for another collective or number of ranks.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: as the schedule says. The checker runs once for each
        schedule.
        """
        if (schedule.collective, schedule.nranks) != ("allreduce", self.nranks):
            raise InvalidArgument(
                f"the schedule is a {schedule.collective} over {schedule.nranks} ranks: pass an "
                f"allreduce over {self.nranks} ranks"
            )
        return self._collectives.start(stream, async_op, arguments.allreduce, x, out, op, schedule)

    def explain(self, nbytes: int) -> Explanation:
        """Compare the schedules that an allreduce of `nbytes` could run; ``str()`` is a table.

        Raises
        ------
        InvalidArgument
            If `nbytes` is negative.

        Notes
        -----
        *Local*: uses the health that this rank knows. The next allreduce may be planned with a
        health that is one version newer or older; all ranks use the same version for a call.
        """
        if nbytes < 0:
            raise InvalidArgument(f"nbytes={nbytes}; allowed is 0 or more")
        return self._plans.explain(nbytes, self.known_health().health)

    @property
    def ncalls(self) -> int:
        """Number of collectives begun so far, including the measurements of `r2ccl.init`."""
        return self._engine.op

    def register(self, x: Any) -> RegisteredMemory:
        """Register the memory of `x` with the NICs, so that slices are transferred without a copy.

        Over RDMA, data in unregistered memory is copied through registered buffers. Registering an
        array that is used repeatedly saves that copy. Over TCP the call has no effect.

        Parameters
        ----------
        x : array_like in host memory
            C-contiguous, writable and not empty. Kept alive until the registration ends; a
            ``bytearray`` or ``array.array`` cannot be resized until then.

        Returns
        -------
        RegisteredMemory
            A context manager; leaving it, or calling ``close()``, ends the registration. So does
            dropping it, unless a NumPy array that owns the memory is still in use.

        Raises
        ------
        InvalidArgument
            If `x` is not such an array.
        TransportError
            If a NIC refuses the memory, or ``R2CC_REGISTRATION_LIMIT_NBYTES`` would be exceeded.

        Notes
        -----
        *Local*: the other ranks need not call it. Waits while a call runs in another thread.
        """
        memory = as_buffer(x, writable=True).array.view(np.uint8)
        return self._engine.register(memory)

    def barrier(self) -> None:
        """Wait until all ranks have called `barrier`, and until earlier asynchronous calls ended.

        Raises
        ------
        InvalidArgument
            If another rank makes a different call; the communicator is revoked on every rank.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: log2(n) empty messages per rank.
        """
        self._collectives.barrier()

    def send(
        self,
        x: Any,
        to: int,
        tag: int = 0,
        *,
        is_synchronous: bool = False,
        async_op: bool = False,
    ) -> MessageRequest | None:
        """Send `x` to rank `to`.

        Parameters
        ----------
        x : array_like in host memory
            Borrowed until the call, or the `MessageRequest`, has finished; copied first if it is
            not C-contiguous.
        to : int
            Receiving rank; may be this rank.
        tag : int
            0 or more.
        is_synchronous : bool
            Finish only after a `recv` has taken the message, however short it is.
        async_op : bool
            Return a `MessageRequest` at once.

        Raises
        ------
        InvalidArgument
            If an argument is invalid, or the receive that took the message cannot hold it.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, TransportTimeout
            As for `allreduce`.

        Notes
        -----
        A message of at most ``R2CC_EAGER_NBYTES``, less a header of 32 bytes, is copied, and the
        call returns; a longer one waits for its `recv`. *After failure*: no message is lost or
        doubled. Messages and collectives do not wait for each other.
        """
        to = self._rank_of(to, "to")
        buffer = as_buffer(x, writable=False)
        post = partial(
            self._engine.messenger.send,
            buffer,
            to,
            arguments.tag(tag),
            is_synchronous=is_synchronous,
        )
        begun: MessageRequest | None = self._collectives.start_message(post, async_op)
        return begun

    def recv(
        self,
        out: Any,
        source: int = ANY_SOURCE,
        tag: int = ANY_TAG,
        *,
        async_op: bool = False,
    ) -> Any:
        """Receive a message into the first elements of `out`.

        Parameters
        ----------
        out : array_like in host memory
            C-contiguous and writable, of the dtype that is sent, and at least as large.
        source, tag : int
            Accepted ones; by default any.
        async_op : bool
            Return a `MessageRequest` at once; its ``wait()`` returns the `Message`.

        Returns
        -------
        Message or MessageRequest
            Source, tag and number of elements of the message. Within a `group`, None: see
            `Group.messages`.

        Raises
        ------
        InvalidArgument
            If an argument is invalid, or the message has another dtype or more elements than `out`.
            A short message then goes to the next receive; a long or synchronous one raises at its
            sender, too.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, TransportTimeout
            As for `allreduce`.

        Notes
        -----
        Messages of one source with one tag arrive in the order in which they were sent. *Cost*:
        linear in the number of messages, or receives, that wait for their counterpart.
        """
        source, tag = self._source_of(source), arguments.tag(tag, is_any=True)
        buffer = as_buffer(out, writable=True)
        post = partial(self._engine.messenger.receive, buffer, source, tag)
        return self._collectives.start_message(post, async_op)

    def sendrecv(
        self,
        x: Any,
        to: int,
        out: Any,
        source: int = ANY_SOURCE,
        *,
        tag: int = 0,
        recv_tag: int = ANY_TAG,
    ) -> Message | None:
        """Send `x` to rank `to`, and receive a message into `out`, at the same time.

        See `send` and `recv` for arguments and errors. A ring of ranks that call it does not block,
        whatever the sizes. `x` and `out` must not overlap.
        """
        if self._collectives.group_here() is not None:
            self.recv(out, source, recv_tag)
            self.send(x, to, tag)
            return None
        received: MessageRequest = self.recv(out, source, recv_tag, async_op=True)
        try:
            self.send(x, to, tag)
        except BaseException:
            # `out` must not change any more.
            with suppress(R2cclError):
                if not received.cancel():
                    received.wait()
            raise
        return received.wait()

    def probe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, *, is_blocking: bool = True
    ) -> Message | None:
        """Return the message that `recv` with these arguments would take, without taking it.

        Parameters
        ----------
        source, tag : int
            As for `recv`.
        is_blocking : bool
            False: return None if there is no such message yet.

        Raises
        ------
        InvalidArgument
            If an argument is invalid.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, TransportTimeout
            As for `allreduce`.
        """
        source, tag = self._source_of(source), arguments.tag(tag, is_any=True)
        return self._engine.messenger.probe(source, tag, is_blocking=is_blocking)

    def group(self) -> AbstractContextManager[Group]:
        """Collect the calls of a ``with`` block, and run them together at its end.

        All ranks must open groups with the same collectives, in the same order. Small allreduces of
        one dtype and operation run as one, so that 100 of them need the exchanges of one. Messages
        begin before the collectives, so that any pattern of `send` and `recv` can be written down
        without a deadlock. Arrays may be read after the block, and must not change within it; no
        call may use the result of another.

        Returns
        -------
        context manager
            Gives a `Group`, whose ``messages`` are those that its `recv` calls took.

        Raises
        ------
        InvalidArgument
            If this thread has opened a group already, or a call in it has ``async_op``.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`, at the end of the block. If the block raises, nothing runs.
        """
        return self._collectives.group()

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return a new communicator of the ranks that pass the same `color`.

        The new communicator shares this one's connections, control plane and knowledge of failed
        NICs, and may be used from another thread at the same time. An error in one communicator of
        a job ends all of them.

        Parameters
        ----------
        color : int or None
            None: this rank takes part in no new communicator.
        key : int
            The new ranks are ordered by key, then by the ranks in this communicator.

        Returns
        -------
        Communicator or None
            None if `color` is None. ``members`` of the new communicator are its ranks' numbers in
            this one. Close it with ``close()``, or with the communicator of the whole job.

        Raises
        ------
        InvalidArgument
            If `color` or `key` is no integer of 64 bits, or a rank has too many communicators open.
        NoHealthyRail, PeerLost, TransportError, CommunicatorRevoked, ConcurrentCalls
            As for `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: two allgathers of 300 bytes per rank. Errors and status
        of the new communicator name ranks by their numbers in the job.
        """
        if self._collectives.is_closed:
            raise self._job.closed()
        allgather = self._collectives.allgather_bytes
        part = agree(self._engine, allgather, color, key, self.config.timeout_s)
        return None if part is None else self._derived(part)

    def dup(self) -> Communicator:
        """Return a new communicator of the same ranks, in the same order; see `split`.

        Notes
        -----
        *Collective*: all ranks.
        """
        made = self.split(0, self.rank)
        assert made is not None
        return made

    def create(self, ranks: Sequence[int]) -> Communicator | None:
        """Return a new communicator of `ranks`, in this order; None on other ranks; see `split`.

        Parameters
        ----------
        ranks : sequence of int
            Different ranks of this communicator, the same on all ranks.

        Raises
        ------
        InvalidArgument
            If a number in `ranks` is no rank, or is given twice.

        Notes
        -----
        *Collective*: all ranks of this communicator.
        """
        chosen = self._different(ranks)
        is_in = self.rank in chosen
        return self.split(0 if is_in else None, chosen.index(self.rank) if is_in else 0)

    def create_among(self, ranks: Sequence[int], allgather: AllgatherBytes) -> Communicator:
        """Return a new communicator of `ranks`, in this order; only these call it; see `split`.

        Parameters
        ----------
        ranks : sequence of int
            Different ranks of this communicator, among them this one; the same on all of them.
        allgather : callable
            ``allgather(data)`` returns the bytes that each of `ranks` passed, in their order. Used
            a few times during the call, because the other ranks of this communicator do not call.

        Raises
        ------
        InvalidArgument
            If a number in `ranks` is no rank, or is given twice, or this rank is not among them, or
            a rank has too many communicators open.
        TransportTimeout, CommunicatorRevoked
            As for `split`.

        Notes
        -----
        *Collective*: `ranks`.
        """
        if self._collectives.is_closed:
            raise self._job.closed()
        chosen = self._different(ranks)
        if self.rank not in chosen:
            raise InvalidArgument(
                f"ranks={list(ranks)!r}; rank {self.rank}, which calls create_among(), must be "
                "among them"
            )
        key = chosen.index(self.rank)
        part = agree(self._engine, allgather, 0, key, self.config.timeout_s, chosen)
        assert part is not None
        return self._derived(part)

    def exclude(self, rank: int, nic: str | int) -> None:
        """Take a NIC out of use, as before its cable is pulled; results do not change.

        Slices under way on its paths move to other rails, as after a failure. Later calls are
        planned without the NIC, and its paths are not connected again before `include`.

        Parameters
        ----------
        rank : int
            A rank on the node of the NIC.
        nic : str or int
            Name of the NIC, as `health` shows it: an interface (``eth2``) or an RDMA port
            (``mlx5_0:1``, or ``mlx5_0`` for all its ports). All ranks of the node that use it are
            concerned. Or the number of a rail, of `rank` only.

        Raises
        ------
        InvalidArgument
            If there is no such rank or NIC, if a rank would have no other rail or two ranks no
            other common one, or with ``R2CC_MODE=failstop``. Nothing has changed.
        TransportTimeout
            If not all ranks have agreed within ``R2CC_TIMEOUT_S``.
        CommunicatorRevoked
            If the communicator has ended.
        ConcurrentCalls
            If this is a signal handler that interrupted a blocking call.

        Notes
        -----
        *Local*: any rank may call it, in any thread, also while a call runs in another thread. When
        it returns, every rank has stopped using the NIC for data. The control plane may still use
        the NIC, and does without it once it fails. *Cost*: one round of the health agreement.
        """
        self._set_excluded(rank, nic, is_excluded=True)

    def include(self, rank: int, nic: str | int) -> None:
        """End the exclusion of a NIC by `exclude` or ``R2CC_FAILED_NICS``.

        Its paths are probed, and carry data again once the probes have succeeded. If the NIC is not
        excluded, nothing changes.

        Parameters
        ----------
        rank, nic
            As for `exclude`.

        Raises
        ------
        InvalidArgument
            If there is no such rank or NIC, or with ``R2CC_MODE=failstop``.
        TransportTimeout, CommunicatorRevoked, ConcurrentCalls
            As for `exclude`.

        Notes
        -----
        *Local*: as for `exclude`.
        """
        self._set_excluded(rank, nic, is_excluded=False)

    def repairs(self) -> tuple[Repair, ...]:
        """Return the latest repairs of this rank's paths, oldest first.

        A repair records the evidence of the failure, the new rail of each channel that moved, the
        number of bytes sent again, and the times of these events.
        """
        return self._engine.repairs()

    def health(self) -> status.HealthReport:
        """Return the state of this rank's rails and of their paths to other ranks.

        Ranks that this rank has exchanged no data with may be missing.

        Notes
        -----
        *Local*; callable in any thread, does not wait. ``str()`` of the report is for people.
        """
        rails = self._engine.rails(self._job.rails)
        memory = self._engine.memory(self._job.pool.nbytes)
        return status.HealthReport(self.rank, monotonic(), rails, memory)

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the last verdict of this rank on each path; ``str()`` of a verdict is for people.

        Empty with ``R2CC_MODE=failstop``, which does not diagnose failures.

        Notes
        -----
        *Local*; callable in any thread, does not wait.
        """
        return self._engine.verdicts()

    def known_health(self) -> Known:
        """Return the newest health that this rank has received, and the time of its arrival.

        The health covers the rails of all ranks. All ranks plan with it from the same collective
        on, which they may not have agreed on yet. The time is a reading of CLOCK_MONOTONIC in
        seconds. In version 0, all rails have their full bandwidth; with ``R2CC_MODE=failstop``
        there is no other version, and the time is 0.

        Notes
        -----
        *Local*; callable in any thread, does not wait.
        """
        return self._engine.known_health() or Known(self._engine.whole_health, 0.0)

    def pending(self) -> status.Pending:
        """Return the ranks, slices and other objects that the blocked call of this rank waits for.

        Notes
        -----
        *Local*; callable in any thread while a call blocks, does not wait. ``str()`` of the result
        is for people. This rank learns that a peer has called the collective from the peer's
        slices or from its answer to the desync check. A call starts the desync check after
        ``R2CC_SUSPICION_TIMEOUT_S`` without progress, or after half of ``R2CC_TIMEOUT_S``.
        """
        return self._engine.pending()

    def dump(self) -> str:
        """Return the full status of this rank as one line of JSON.

        The fields are those of `r2ccl.runtime.status.RankStatus`: the running collective, the
        objects that it waits for, and every path, link, peer and repair.

        Notes
        -----
        *Local*; callable in any thread, does not wait.
        """
        control = self._job.control
        peers = [info for info in control.peers if info.rank != self._job.rank]
        memory = self._engine.memory(self._job.pool.nbytes)
        read = self._engine.status(peers, control.last_heard, self._plans.planning, memory)
        return msgspec.json.encode(read).decode()

    def dump_on_signal(self, signum: int = signal.SIGUSR1) -> None:
        """Write `dump` to ``R2CC_DUMP_FILE``, or to stderr, on every signal `signum`.

        The handler also runs while the main thread is in a blocking call of r2ccl. The previous
        handler of the signal is called after it, and is restored by ``close()`` or ``abort()``.
        ``R2CC_DUMP_SIGNAL=SIGUSR1`` installs the handler in `r2ccl.init`.

        Raises
        ------
        InvalidArgument
            If this is not the main thread, or `signum` is not a signal that can be handled.

        Notes
        -----
        *Local*. A second call replaces the handler of the first.
        """
        self._job.dump_on_signal(signum)

    def rejections(self) -> dict[str, int]:
        """Return the number of connections and frames that this rank rejected, by reason."""
        return dict(self._job.control.rejections())

    def close(self) -> None:
        """Wait until every rank has received all its data, then leave. Idempotent.

        Waits for asynchronous calls. Acts as `abort` if a blocking collective runs in another
        thread, or any blocking call was interrupted by the signal handler that calls `close`.

        Notes
        -----
        *Collective*: all ranks. Does not wait for the other ranks if the communicator is revoked.

        Raises
        ------
        TransportTimeout
            If asynchronous calls did not end, or some rank did not confirm its data or call
            `close`, each within ``R2CC_INIT_TIMEOUT_S``; the message names the ranks.
        NoHealthyRail, PeerLost, CommunicatorRevoked
            If the communicator failed meanwhile.
        CommunicatorRevoked
            If an asynchronous call failed and no call has raised its error yet.
        """
        job = self._job
        alone = self._assemble is None
        is_blocking = self._collectives.is_blocking if alone else job.is_blocking
        if (is_blocking or job.is_below) and not job.is_forked:
            self.abort("close() was called while a collective was in progress")
            return
        if alone:
            self._close_alone()
            return
        if self._collectives.is_closed:
            job.event_queue.end("close() was called")
            job.free(LEAVE_S)
            return
        job.refuse(job.closed)
        try:
            job.drain()
            if self._engine.error is None:
                self._collectives.in_turn(self._engine.leave)
                job.is_left = True
        finally:
            job.free(LEAVE_S)
        self._collectives.require_seen()

    def abort(self, why: str = "abort() was called") -> None:
        """Revoke the communicator on every rank and leave it; return within a second.

        Parameters
        ----------
        why : str
            Reason, which the errors on all ranks contain.

        Notes
        -----
        *Local*; callable in any thread and in a signal handler. Running calls on all ranks end with
        `CommunicatorRevoked`. Idempotent. Does nothing in a forked child.
        """
        self._job.abort(why)

    def revoke(self, why: str = "revoke() was called") -> None:
        """End the communicator on every rank without leaving it, so that `shrink` can follow.

        Parameters
        ----------
        why : str
            Reason, which the errors on all ranks contain.

        Notes
        -----
        *Local*; callable in any thread and in a signal handler, does not wait. Every running and
        every later call on all ranks ends with `CommunicatorRevoked`. If the communicator has ended
        already, its first reason stays.
        """
        if not self._collectives.is_closed:
            self._engine.revoke(why)

    def shrink(self, *, quorum: str = "majority") -> Communicator:
        """Return a new communicator of the surviving ranks.

        Call it after `PeerLost`, or after a `CommunicatorRevoked` that a `PeerLost` on another rank
        caused. A communicator that still works is revoked first. This communicator is closed, even
        if `shrink` raises an error other than `InvalidArgument`.

        Parameters
        ----------
        quorum : {"majority", "any"}
            Set of ranks that may continue. "majority": more than half of the ranks, or half of them
            including rank 0; if the network is partitioned, at most one side continues. "any": any
            set; use it only if no other surviving ranks exist.

        Returns
        -------
        Communicator
            Communicator of the ranks that called `shrink`, in the order of their old ranks, which
            are its ``members``. If a rank died too late to be excluded, a call on the new
            communicator raises `PeerLost`: call `shrink` again.

        Raises
        ------
        InvalidArgument
            If `quorum` is unknown, or ``R2CC_DUMP_SIGNAL`` is set and this is not the main thread.
            The communicator stays as it is.
        NoQuorum
            If too few ranks survive.
        TransportTimeout
            If a surviving rank did not call `shrink`, or could not be connected, within
            ``R2CC_INIT_TIMEOUT_S``; the message names the rank.
        TransportError
            If no rail can be opened again on all surviving ranks.
        CommunicatorRevoked
            If this communicator was closed before, or is closed meanwhile in another thread or in
            a signal handler.

        Notes
        -----
        *Collective*: all surviving ranks. *Cost*: each rank sends one message to all survivors per
        death; then the survivors connect. The ranks may have failed in different calls. To find the
        last step that all of them have completed, reduce their step numbers with MIN over the new
        communicator. Faults planned with `r2ccl.testing` are not injected into the new
        communicator.
        """
        if self._collectives.is_closed:
            raise self._job.closed()
        if self._assemble is None:
            raise InvalidArgument(
                "shrink() was called on a communicator made by split() or dup(): call it on the "
                "one that r2ccl.init() returned, and split the new one"
            )
        if self.config.dump_signal:
            require_main_thread()
        job = self._job
        table = Shrinking(self.rank, self.nranks, quorum)
        if self._engine.error is None:
            self._engine.revoke("shrink() was called")
        job.refuse(job.closed)
        leave_s = ABORT_S
        try:
            excluded = self._engine.excluded_rails()
            successor = regroup(table, job.event_queue, job.control, self._assemble, excluded)
            leave_s = LEAVE_S
        finally:
            job.free(leave_s)
        return successor

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if exc is None:
            self.close()
            return
        self._job.abort_surely(f"the with block ended with {exc!r}")

    def __repr__(self) -> str:
        return f"<r2ccl.Communicator rank {self.rank} of {self.nranks}, {self._job.nrails} rails>"

    # Called by the job

    @property
    def is_below(self) -> bool:
        """True if the caller is a signal handler that interrupted a blocking call of its thread."""
        return self._collectives.is_below or self._engine.messenger.is_below

    def refuse(self, refusal: Callable[[], R2cclError]) -> None:
        """Refuse all calls from now on, each with a new error from `refusal`."""
        self._collectives.close(refusal)
        self._engine.messenger.refuse(refusal)

    @property
    def is_blocking(self) -> bool:
        """True if a blocking collective runs, in any thread."""
        return self._collectives.is_blocking

    def drain(self) -> None:
        """Wait until the asynchronous calls have ended.

        Raises
        ------
        TransportTimeout
            If they do not end within ``R2CC_INIT_TIMEOUT_S``.
        """
        if not self._worker.drain(self.config.init_timeout_s):
            raise TransportTimeout(
                f"rank {self.rank}: close() waited {self.config.init_timeout_s:g} s for "
                f"asynchronous calls: {self.pending()}; wait for them before close(), or raise "
                "R2CC_INIT_TIMEOUT_S",
                rank=self.rank,
                status="TIMEOUT",
            )

    def end_calls(self, deadline_s: float) -> None:
        """End the asynchronous calls and free the devices.

        Raises
        ------
        TransportError
            If a device could not be freed.
        """
        if not self._worker.is_idle and self._engine.error is None:
            self._engine.revoke("the communicator was closed while asynchronous calls were running")
        if not self._worker.close(deadline_s):
            _log.error(
                "rank %d: an asynchronous call did not end, so its memory was not freed; end the "
                "process",
                self.rank,
            )
            return
        self._on_device.close(deadline_s)

    def _close_alone(self) -> None:
        """Close a communicator made by `split`; the others of the job stay open."""
        if self._collectives.is_closed:
            return
        self.refuse(self._job.closed)
        try:
            self.drain()
            self.end_calls(LEAVE_S)
        finally:
            self._job.remove(self)
            self._engine.remove()
        self._collectives.require_seen()

    def _is_measured(self) -> bool:
        """Return whether measured rates select the schedules."""
        fabric = self._plans.fabric
        nnodes = len(set(fabric.nodes)) if fabric.nodes else self.nranks
        return fabric.nwires > 1 and nnodes > 1 and self.config.is_planned

    def _select_backends(self, device: Device, kernels: Any) -> tuple[GpuBackend, ...]:
        from r2ccl.gpu.backends import (
            BackendSelector,  # imported here, because the import takes 18 ms with its kernels
        )

        selector = BackendSelector(
            self._engine,
            PlanSelector(self._engine, self._plans),
            self._collectives.run_plan,
            config=self.config,
            nodes=_hosts(self._peers),
            allgather=self._collectives.allgather_bytes,
            labels=[self._job.rails[at].name for at in self._engine.joined],
            hardware=self._hardware,
            pxn=self._relayed,
        )
        return selector.select(device, kernels)

    def _derived(self, part: Part) -> Communicator:
        """Return the communicator that the ranks have agreed on."""
        engine = self._engine.derived(part.context)
        made = Communicator(
            self._job, engine, members=part.members, assemble=None, hardware=self._hardware
        )
        made._plans.measured(self._plans.fabric.rates)
        return made

    def _different(self, ranks: Sequence[int]) -> list[int]:
        """Return `ranks`; raise `InvalidArgument` unless they are ranks that all differ."""
        chosen = [self._rank_of(rank) for rank in ranks]
        if len(set(chosen)) < len(chosen):
            raise InvalidArgument(f"ranks={list(ranks)!r}; allowed are ranks that all differ")
        return chosen

    def _source_of(self, source: SupportsIndex) -> int:
        """Return `source` as an int; raise `InvalidArgument` if it is neither a rank nor any."""
        return ANY_SOURCE if source == ANY_SOURCE else self._rank_of(source, "source")

    def _set_excluded(self, rank: int, nic: str | int, *, is_excluded: bool) -> None:
        self._collectives.require_free()
        of_job = self._engine.context.members[self._rank_of(rank, "rank")]
        ports = ports_of(self._job.control.peers, of_job, nic)
        self._engine.exclude(ports, is_excluded=is_excluded)

    def _rank_of(self, root: SupportsIndex, name: str = "root") -> int:
        """Return `root` as an int; raise `InvalidArgument` if it is not a rank."""
        try:
            rank = index(root)
        except TypeError:  # 1.5, or a string
            rank = -1
        if not 0 <= rank < self.nranks:
            raise InvalidArgument(f"{name}={root!r}; allowed is 0 to {self.nranks - 1}")
        return rank


def _hosts(peers: Sequence[PeerInfo]) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the peers on each host, in ascending order."""
    hosts: dict[str, list[int]] = {}
    for rank, info in enumerate(peers):
        hosts.setdefault(info.host, []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())


#: Function that creates a communicator, not yet connected, from a control plane and its `members`.
#: The communicator owns the control plane, even if the function raises.
Assemble: TypeAlias = Callable[[ControlPlane, tuple[int, ...]], Communicator]

__all__ = ["ANY_SOURCE", "ANY_TAG", "Communicator"]

"""Communicator: collectives and messages of a group of ranks, its status, and orderly shutdown.

The methods contain little logic: each passes its call to a module of `r2ccl.runtime`. The overloads
of a collective, which `r2ccl.runtime.call_types` explains, stand directly before it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, TypeAlias, Unpack, overload

import numpy as np
import numpy.typing as npt

from r2ccl.bootstrap.control import ControlPlane
from r2ccl.config import Config
from r2ccl.failover.diagnosis.verdict import Verdict
from r2ccl.failover.health.driver import Known
from r2ccl.failover.migration.repairs import Repair
from r2ccl.planning.planner import Explanation
from r2ccl.runtime import arguments, splitting, status
from r2ccl.runtime.arguments import Operation as Op
from r2ccl.runtime.async_work import Work
from r2ccl.runtime.call_types import A, Array, Either, Later, N, Now
from r2ccl.runtime.engine import Engine, RegisteredMemory
from r2ccl.runtime.grouping import Group
from r2ccl.runtime.job import Job
from r2ccl.runtime.messages.matching import ANY, Message
from r2ccl.runtime.messages.messenger import MessageRequest
from r2ccl.runtime.messaging import MessageCalls
from r2ccl.runtime.participant import MakeDeviceCalls
from r2ccl.schedule.ir import Schedule
from r2ccl.types import AllgatherBytes, ReduceOp

#: Source, or tag, of a receive that accepts messages from any rank, or with any tag.
ANY_SOURCE = ANY_TAG = ANY
#: Numbers of elements, or indices of first elements, one for each rank.
Counts: TypeAlias = Sequence[int]


class Communicator:
    """Group of ranks that run collectives together; created by `r2ccl.init`.

    Every method marked *collective* must be called by all ranks that its docstring names, in the
    same order. The sections below apply to all collectives, that is, to `allreduce`, `allgather`,
    `reduce_scatter`, `broadcast`, `reduce`, `gather`, `scatter`, `alltoall`, `scan`, `exscan`,
    their forms with ``v`` for parts of unequal size, and `run_schedule`. The docstring of a method
    has only additions and differences.

    Attributes
    ----------
    rank, nranks : int
        Number of this process, from 0, and number of ranks.
    members : tuple of int
        For each rank, its rank in the communicator from which this communicator was made, for
        example by `split`. In a communicator made by `r2ccl.init`, each rank's own number.
    config : Config
        Settings of this communicator.

    Arguments of all collectives
    ----------------------------
    x : array_like
        The input, of any shape, in host memory on all ranks or in device memory on all ranks.
        A rank must pass arrays of only one GPU to a communicator.
        The dtype must be equal on all ranks, and so must the number of elements, unless parts may
        have unequal sizes. Must be C-contiguous in device memory, or if it receives the result; in
        all other cases, an array that is not C-contiguous is copied first. Borrowed until the
        collective has finished.
    out : array_like, optional
        Receives the result: a C-contiguous array of the dtype of `x`, in host memory if `x` is
        there, otherwise on the same GPU as `x`. Must not overlap `x`, except as the method allows.
        Must not be a JAX array, which is immutable.
    op : ReduceOp, ConvertedOp or UserOp
        An operation that the dtype supports; docs/reductions.md has the table. `premul_sum`,
        `accumulate_float32` and `user_op` return further operations.
    root : int
        Rank that sends data to all ranks, or receives data from all ranks.
    counts, displs : sequence of int
        For each rank, the number of elements of its part, and the index of the part's first
        element; equal on all ranks, except where the method says otherwise. A count may be 0. Parts
        of `out` must not overlap, and elements of `out` outside all parts are not modified. Without
        `displs`, the parts follow one another in rank order.
    stream : optional
        For device memory only: a handle, a stream of CuPy, Numba or torch, or an object with
        ``__cuda_stream__``. The collective runs after the work enqueued on this stream before the
        call, and work enqueued on this stream after the call sees the result. Default: the current
        stream of the array's library.
    async_op : bool
        Return a `Work` at once.

    Results of all collectives
    --------------------------
    `out`, or the array that replaces it by default; None for a `reduce`, `gather` or `gatherv` on
    ranks other than `root`. If `x` is a JAX array in host memory, the default is always a new JAX
    array, on the device of `x`. In device memory, a new array can be made only if `x` is a torch,
    CuPy or Numba array; for other arrays, pass `out`. With ``async_op``, the result is a `Work`
    whose `wait` returns the array or None. A call on device memory returns before the result is
    ready. Work enqueued on `stream` after the call or, with ``async_op``, after `Work.order`, sees
    the result.

    Errors of all collectives and messages
    --------------------------------------
    InvalidArgument
        If an argument is not as described; then no data has moved, and the communicator stays
        usable. Also if the ranks disagree on the call, which revokes the communicator on every
        rank.
    NoHealthyRail, PeerLost, TransportTimeout
        If the call failed (see `r2ccl.errors`); the communicator is revoked. With ``async_op``,
        `Work.wait` raises the error. For a call on device memory without ``async_op``, the next
        call raises `CommunicatorRevoked`, whose ``reason`` is the error.
    TransportError
        If a GPU or its driver failed or cannot run the call, if memory or threads are exhausted, or
        if a path failed with ``R2CC_MODE=failstop``.
    CommunicatorRevoked
        If the communicator was revoked or closed before, or is revoked during the call.
    ConcurrentCalls
        If this call is a blocking collective, and another thread runs a blocking collective of this
        communicator. Also if this call is blocking and is made by a signal handler that interrupted
        another blocking call, or by a function of `user_op`. Also if this call is a collective on
        device memory, and another thread is starting a collective of this communicator on device
        memory. Threads may use different communicators at the same time.

    After a failure
    ---------------
    The failure of a path does not change a bit of the result of the call in progress. Later calls
    are planned for the remaining rails and may round differently (docs/fault-model.md). If a call
    raises, `out` is undefined.

    Order and threads
    -----------------
    The collectives of one communicator, blocking or asynchronous, run in the order in which they
    were called. A call marked *local* is made by one rank; no other rank has to call the method.
    `repairs`, `health`, `verdicts`, `known_health`, `pending` and `dump` are callable in any
    thread, also while a call blocks, and do not wait.
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        members: tuple[int, ...],
        *,
        assemble: Assemble,
        make_device_calls: MakeDeviceCalls,
    ) -> None:
        self.rank = engine.rank
        self.nranks = engine.nranks
        self.members = members
        self.config = engine.config
        self._job = job
        self._engine = engine
        self._assemble = assemble
        self._make_device_calls = make_device_calls
        self._participant = job.add(engine, make_device_calls)
        self._collectives = self._participant.collectives
        self._messages = MessageCalls(self._collectives, engine.messenger, self.nranks)

    def connect(self) -> None:
        """Start the control plane, connect the rails, measure the network, and share memory.

        The network is measured only if the choice of schedules depends on its speed. `r2ccl.init`
        and `shrink` call this method once. If it raises, the communicator has been aborted.

        Raises
        ------
        TransportTimeout
            If a peer has no path, or a rank does not call `connect`, within
            ``R2CC_INIT_TIMEOUT_S``.
        InvalidArgument
            As from `dump_on_signal`, if ``R2CC_DUMP_SIGNAL`` is set.
        TransportError
            If ranks of a host cannot share memory although ``R2CC_SHM=1``.
        R2cclError
            If the communicator fails in the meantime.

        Notes
        -----
        *Collective*: all ranks.
        """
        self._job.connect()

    @overload
    def allreduce(self, x: A, out: A | None = ..., op: Op = ..., **kw: Unpack[Now]) -> A: ...
    @overload
    def allreduce(
        self, x: A, out: A | None = ..., op: Op = ..., **kw: Unpack[Later]
    ) -> Work[A]: ...
    @overload
    def allreduce(
        self, x: Array, out: Array | None = ..., op: Op = ..., **kw: Unpack[Either]
    ) -> Any: ...
    def allreduce(
        self,
        x: Any,
        out: Any = None,
        op: Op = ReduceOp.SUM,
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
            receives the result; in all other cases, an array that is not C-contiguous is copied
            first. Borrowed until the collective has finished.
        out : array_like, optional
            Receives the result: the same memory as `x` or disjoint from it. Default: `x` itself, or
            a new JAX array if `x` is a JAX array in host memory.
        op : ReduceOp, ConvertedOp or UserOp
            An operation that the dtype supports; docs/reductions.md has the table. `premul_sum`,
            `accumulate_float32` and `user_op` return further operations.
        stream : optional
            For device memory only: a handle, a stream of CuPy, Numba or torch, or an object with
            ``__cuda_stream__``. The collective runs after the work enqueued on this stream before
            the call, and work enqueued on this stream after the call sees the result. Default: the
            current stream of the array's library.
        async_op : bool
            Return a `Work` at once.

        Returns
        -------
        array_like or Work
            `out`, or the array that replaces it by default; with ``async_op``, a `Work` whose
            `wait` returns the array. A call on device memory returns before the result is ready.
            Work enqueued on `stream` after the call or, with ``async_op``, after `Work.order`, sees
            the result.

        Raises
        ------
        InvalidArgument
            If the memory, dtype or op is invalid (raised before any data moves), or if the ranks
            disagree on the call; a disagreement revokes the communicator on every rank.
        NoHealthyRail, PeerLost, TransportTimeout
            If the collective failed (see `r2ccl.errors`); the communicator is revoked. With
            ``async_op``, `Work.wait` raises the error. For a call on device memory without
            ``async_op``, the next call raises `CommunicatorRevoked`, whose ``reason`` is the error.
        TransportError
            If a GPU or its driver failed or cannot run the call, if memory or threads are
            exhausted, or if a path failed with ``R2CC_MODE=failstop``.
        CommunicatorRevoked
            If the communicator was revoked or closed before, or is revoked during the call.
        ConcurrentCalls
            If this call is blocking, and another thread runs a blocking collective of this
            communicator. Also if this call is blocking and is made by a signal handler that
            interrupted another blocking call, or by a function of `user_op`. Also if this call is
            on device memory, and another thread is starting a collective of this communicator on
            device memory.

        Notes
        -----
        *Collective*: all ranks. *Cost*: about log2(n) exchanges of the data if it fits into one
        eager slice; otherwise, in a ring, each rank sends 2(n - 1)/n of the data. *After failure*:
        the failure of a path does not change a bit of the result. Later calls are planned for the
        remaining rails and may round differently (docs/fault-model.md). If the call raises, `out`
        is undefined. The collectives of one communicator, blocking or asynchronous, run in the
        order in which they were called.
        """
        return self._collectives.start(stream, async_op, arguments.allreduce, x, out, op)

    @overload
    def allgather(self, x: N, out: N | None = ..., **kw: Unpack[Now]) -> N: ...
    @overload
    def allgather(self, x: N, out: N | None = ..., **kw: Unpack[Later]) -> Work[N]: ...
    @overload
    def allgather(self, x: Array, out: Array | None = ..., **kw: Unpack[Either]) -> Any: ...
    def allgather(
        self, x: Any, out: Any = None, *, stream: Any = None, async_op: bool = False
    ) -> Any:
        """Gather `x` of every rank on every rank.

        Parameters
        ----------
        x : array_like
            May be this rank's part of `out`, which saves a copy.
        out : array_like, optional
            Receives the data of all ranks in rank order: ``nranks`` times as many elements as `x`.
            Default: a new array of shape ``(nranks, *x.shape)``.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the other arguments and errors. *Cost*:
        each rank sends (n - 1)/n of `out`, in n - 1 steps of a ring, or in about log2(n) steps if
        `out` fits into one eager slice or fewer steps are predicted to be faster.
        """
        make = arguments.allgather
        return self._collectives.start(stream, async_op, make, x, out, self.rank, self.nranks)

    @overload
    def allgatherv(
        self, x: N, out: N | None = ..., *, counts: Counts, displs: Counts | None = ...,
        **kw: Unpack[Now],
    ) -> N: ...  # fmt: skip
    @overload
    def allgatherv(
        self, x: N, out: N | None = ..., *, counts: Counts, displs: Counts | None = ...,
        **kw: Unpack[Later],
    ) -> Work[N]: ...  # fmt: skip
    @overload
    def allgatherv(
        self, x: Array, out: Array | None = ..., *, counts: Counts,
        displs: Counts | None = ..., **kw: Unpack[Either],
    ) -> Any: ...  # fmt: skip
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
        """Gather `x` of every rank on every rank; the ranks' sizes of `x` may differ.

        Parameters
        ----------
        x : array_like
            As for `allgather`, with ``counts[rank]`` elements.
        out : array_like, optional
            Receives the data of all ranks. Default: a new flat array that ends with the last part.
        counts, displs : sequence of int
            Parts of `out`; `displs` may differ between ranks.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the other arguments and errors. *Cost*:
        as for `allgather`; each rank receives all parts but its own.
        """
        rank, n, make = self.rank, self.nranks, arguments.allgatherv
        return self._collectives.start(stream, async_op, make, x, out, counts, displs, rank, n)

    @overload
    def reduce_scatter(self, x: N, out: N | None = ..., op: Op = ..., **kw: Unpack[Now]) -> N: ...
    @overload
    def reduce_scatter(
        self, x: N, out: N | None = ..., op: Op = ..., **kw: Unpack[Later]
    ) -> Work[N]: ...
    @overload
    def reduce_scatter(
        self, x: Array, out: Array | None = ..., op: Op = ..., **kw: Unpack[Either]
    ) -> Any: ...
    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        op: Op = ReduceOp.SUM,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce `x` over all ranks; each rank receives one part of the result.

        Parameters
        ----------
        x : array_like
            The number of elements must be a multiple of ``nranks``. Not modified, unless `out` is a
            part of `x`.
        out : array_like, optional
            Receives part number `rank` of ``nranks`` equal parts of the result. May be the same
            part of `x`. Default: a new array, of shape ``(x.shape[0] / nranks, *x.shape[1:])`` if
            ``nranks`` divides ``x.shape[0]``, otherwise flat.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the other arguments and errors. *Cost*:
        each rank sends (n - 1)/n of `x`, in n - 1 steps of a ring, or in about log2(n) steps if `x`
        fits into one eager slice or fewer steps are predicted to be faster. Over the network, the
        call needs memory of the size of `x` for partial sums, which is reused across calls.
        """
        make = arguments.reduce_scatter
        return self._collectives.start(stream, async_op, make, x, out, op, self.rank, self.nranks)

    @overload
    def reduce_scatterv(
        self, x: N, out: N | None = ..., op: Op = ..., *, counts: Counts, **kw: Unpack[Now]
    ) -> N: ...
    @overload
    def reduce_scatterv(
        self, x: N, out: N | None = ..., op: Op = ..., *, counts: Counts, **kw: Unpack[Later]
    ) -> Work[N]: ...
    @overload
    def reduce_scatterv(
        self, x: Array, out: Array | None = ..., op: Op = ..., *, counts: Counts,
        **kw: Unpack[Either],
    ) -> Any: ...  # fmt: skip
    def reduce_scatterv(
        self,
        x: Any,
        out: Any = None,
        op: Op = ReduceOp.SUM,
        *,
        counts: Sequence[int],
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce `x` over all ranks; each rank receives one part of the result, of any size.

        Parameters
        ----------
        x : array_like
            The number of elements must be the sum of `counts`.
        out : array_like, optional
            Receives part number `rank` of the result, of ``counts[rank]`` elements. May be the same
            part of `x`. Default: a new flat array.
        counts : sequence of int
            The parts follow one another in rank order.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the other arguments and errors. *Cost*:
        as for `reduce_scatter`; each rank sends all parts but its own.
        """
        rank, n, make = self.rank, self.nranks, arguments.reduce_scatterv
        return self._collectives.start(stream, async_op, make, x, out, op, counts, rank, n)

    @overload
    def broadcast(self, x: A, out: A | None = ..., root: int = ..., **kw: Unpack[Now]) -> A: ...
    @overload
    def broadcast(
        self, x: A, out: A | None = ..., root: int = ..., **kw: Unpack[Later]
    ) -> Work[A]: ...
    @overload
    def broadcast(
        self, x: Array, out: Array | None = ..., root: int = ..., **kw: Unpack[Either]
    ) -> Any: ...
    def broadcast(
        self, x: Any, out: Any = None, root: int = 0, *, stream: Any = None, async_op: bool = False
    ) -> Any:
        """Send the data of rank `root` to every rank.

        Parameters
        ----------
        x : array_like
            On `root`, the data, in memory that may be read-only. On other ranks, the array that
            receives the data; if `out` is given, only the dtype and the number of elements of `x`
            are used.
        out : array_like, optional
            Receives the data: the same memory as `x` or disjoint from it. Default: `x` itself.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the other arguments and errors. *Cost*:
        about log2(n) dependent messages if the data fits into one eager slice; otherwise a pipeline
        through all ranks: each rank except `root` receives the data once and, while all NICs work,
        sends the data at most once.
        """
        root = arguments.rank_of(root, self.nranks)
        make = arguments.broadcast
        return self._collectives.start(stream, async_op, make, x, out, root, self.rank)

    @overload
    def reduce(
        self, x: A, out: A | None = ..., op: Op = ..., root: int = ..., **kw: Unpack[Now]
    ) -> A | None: ...
    @overload
    def reduce(
        self, x: A, out: A | None = ..., op: Op = ..., root: int = ..., **kw: Unpack[Later]
    ) -> Work[A | None]: ...
    @overload
    def reduce(
        self, x: Array, out: Array | None = ..., op: Op = ..., root: int = ..., **kw: Unpack[Either]
    ) -> Any: ...
    def reduce(
        self,
        x: Any,
        out: Any = None,
        op: Op = ReduceOp.SUM,
        root: int = 0,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce `x` over all ranks; rank `root` receives the result.

        Parameters
        ----------
        x : array_like
            Not modified, except on `root` if it receives the result.
        out : array_like, optional
            On `root`, receives the result, as for `allreduce`. Ignored on other ranks.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the other arguments and errors. *Cost*:
        as for `broadcast`, in the opposite direction. Over the network, ranks other than `root`
        need memory of the size of `x` for partial sums, which is reused across calls.
        """
        root, make = arguments.rank_of(root, self.nranks), arguments.reduce
        return self._collectives.start(stream, async_op, make, x, out, op, root, self.rank)

    @overload
    def gather(self, x: N, out: N | None = ..., root: int = ..., **kw: Unpack[Now]) -> N | None: ...
    @overload
    def gather(
        self, x: N, out: N | None = ..., root: int = ..., **kw: Unpack[Later]
    ) -> Work[N | None]: ...
    @overload
    def gather(
        self, x: Array, out: Array | None = ..., root: int = ..., **kw: Unpack[Either]
    ) -> Any: ...
    def gather(
        self, x: Any, out: Any = None, root: int = 0, *, stream: Any = None, async_op: bool = False
    ) -> Any:
        """Gather the `x` of every rank on rank `root`.

        Parameters
        ----------
        x : array_like
            On `root` it may be the root's part of `out`, which saves a copy.
        out : array_like, optional
            On `root`, receives the data of all ranks in rank order, as for `allgather`. Ignored on
            other ranks.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the other arguments and errors. *Cost*: one
        message from every other rank to the root; if all data fits into one eager slice, a binomial
        tree with about log2(n) dependent messages.
        """
        root, n, make = arguments.rank_of(root, self.nranks), self.nranks, arguments.gather
        return self._collectives.start(stream, async_op, make, x, out, root, self.rank, n)

    @overload
    def gatherv(
        self, x: N, out: N | None = ..., root: int = ..., *,
        counts: Counts | None = ..., displs: Counts | None = ..., **kw: Unpack[Now],
    ) -> N | None: ...  # fmt: skip
    @overload
    def gatherv(
        self, x: N, out: N | None = ..., root: int = ..., *,
        counts: Counts | None = ..., displs: Counts | None = ..., **kw: Unpack[Later],
    ) -> Work[N | None]: ...  # fmt: skip
    @overload
    def gatherv(
        self, x: Array, out: Array | None = ..., root: int = ..., *,
        counts: Counts | None = ..., displs: Counts | None = ..., **kw: Unpack[Either],
    ) -> Any: ...  # fmt: skip
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
        """Gather `x` of every rank on rank `root`; the ranks' sizes of `x` may differ.

        Parameters
        ----------
        x : array_like
            As for `gather`, of any number of elements, 0 allowed.
        out : array_like, optional
            On `root`, receives the data. Default: a new flat array that ends with the last part.
            Ignored on other ranks.
        counts, displs : sequence of int
            On `root`, the number of elements of each rank's `x`, and the parts of `out`. Ignored on
            other ranks.

        Raises
        ------
        InvalidArgument
            Also if the number of elements that a rank passes differs from the number that `root`
            expects from this rank; this revokes the communicator on every rank.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the other arguments and errors. *Cost*: one
        message from every other rank to the root.
        """
        root, rank, n = arguments.rank_of(root, self.nranks), self.rank, self.nranks
        sizes, make = (counts, displs) if rank == root else (None, None), arguments.gatherv
        return self._collectives.start(stream, async_op, make, x, out, root, *sizes, rank, n)

    @overload
    def scatter(
        self, x: N | None, out: N | None = ..., root: int = ..., **kw: Unpack[Now]
    ) -> N: ...
    @overload
    def scatter(
        self, x: N | None, out: N | None = ..., root: int = ..., **kw: Unpack[Later]
    ) -> Work[N]: ...
    @overload
    def scatter(
        self, x: Array | None, out: Array | None = ..., root: int = ..., **kw: Unpack[Either]
    ) -> Any: ...
    def scatter(
        self, x: Any, out: Any = None, root: int = 0, *, stream: Any = None, async_op: bool = False
    ) -> Any:
        """Send one equal part of the `x` of rank `root` to every rank.

        Parameters
        ----------
        x : array_like
            On `root`, the parts of all ranks in rank order; the number of elements must be a
            multiple of ``nranks``. Ignored on other ranks, which may pass None.
        out : array_like, optional
            Receives this rank's part. On `root` it may be the same part of `x`, which saves a copy,
            and the default is a new array, as for `reduce_scatter`. Required on other ranks.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the other arguments and errors. *Cost*:
        as for `gather`, in the opposite direction.
        """
        root, n, make = arguments.rank_of(root, self.nranks), self.nranks, arguments.scatter
        return self._collectives.start(stream, async_op, make, x, out, root, self.rank, n)

    @overload
    def scatterv(
        self, x: N | None, out: N | None = ..., root: int = ..., *,
        counts: Counts | None = ..., displs: Counts | None = ..., **kw: Unpack[Now],
    ) -> N: ...  # fmt: skip
    @overload
    def scatterv(
        self, x: N | None, out: N | None = ..., root: int = ..., *,
        counts: Counts | None = ..., displs: Counts | None = ..., **kw: Unpack[Later],
    ) -> Work[N]: ...  # fmt: skip
    @overload
    def scatterv(
        self, x: Array | None, out: Array | None = ..., root: int = ..., *,
        counts: Counts | None = ..., displs: Counts | None = ..., **kw: Unpack[Either],
    ) -> Any: ...  # fmt: skip
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
            On `root`, contains the parts of all ranks. Ignored on other ranks, which may pass None.
        out : array_like, optional
            Receives this rank's part and has its size. On `root` it may be the same part of `x`,
            and the default is a new flat array. Required on other ranks.
        counts, displs : sequence of int
            On `root`, the parts of `x`, which may overlap. Ignored on other ranks.

        Raises
        ------
        InvalidArgument
            Also if the size of `out` on a rank differs from the size of the part that `root` sends
            to this rank; this revokes the communicator on every rank.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the other arguments and errors. *Cost*: one
        message from the root to every other rank.
        """
        root, rank, n = arguments.rank_of(root, self.nranks), self.rank, self.nranks
        sizes, make = (counts, displs) if rank == root else (None, None), arguments.scatterv
        return self._collectives.start(stream, async_op, make, x, out, root, *sizes, rank, n)

    @overload
    def alltoall(self, x: N, out: N | None = ..., **kw: Unpack[Now]) -> N: ...
    @overload
    def alltoall(self, x: N, out: N | None = ..., **kw: Unpack[Later]) -> Work[N]: ...
    @overload
    def alltoall(self, x: Array, out: Array | None = ..., **kw: Unpack[Either]) -> Any: ...
    def alltoall(
        self, x: Any, out: Any = None, *, stream: Any = None, async_op: bool = False
    ) -> Any:
        """Send one equal part of `x` to every rank; receive an equal part from every rank.

        Parameters
        ----------
        x : array_like
            The parts for all ranks in rank order; the number of elements must be a multiple of
            ``nranks``.
        out : array_like, optional
            Receives the parts from all ranks in rank order; has the size of `x`. May be `x` itself.
            Default: a new array like `x`.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the other arguments and errors. *Cost*:
        one message to every other rank; each rank sends (n - 1)/n of `x`. Over the network, if
        `out` is `x`, the data is copied once, to memory that is reused across calls.
        """
        make = arguments.alltoall
        return self._collectives.start(stream, async_op, make, x, out, self.rank, self.nranks)

    @overload
    def alltoallv(
        self, x: N, out: N | None = ..., *, sendcounts: Counts, recvcounts: Counts,
        senddispls: Counts | None = ..., recvdispls: Counts | None = ...,
        **kw: Unpack[Now],
    ) -> N: ...  # fmt: skip
    @overload
    def alltoallv(
        self, x: N, out: N | None = ..., *, sendcounts: Counts, recvcounts: Counts,
        senddispls: Counts | None = ..., recvdispls: Counts | None = ...,
        **kw: Unpack[Later],
    ) -> Work[N]: ...  # fmt: skip
    @overload
    def alltoallv(
        self, x: Array, out: Array | None = ..., *, sendcounts: Counts,
        recvcounts: Counts, senddispls: Counts | None = ...,
        recvdispls: Counts | None = ..., **kw: Unpack[Either],
    ) -> Any: ...  # fmt: skip
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
        """Send a part of `x`, of any size, to every rank; receive a part from every rank.

        Parameters
        ----------
        x : array_like
            Contains the parts for all ranks, which may overlap.
        out : array_like, optional
            Receives the parts from all ranks. May be `x` itself. Default: a new flat array that
            ends with the last part.
        sendcounts, senddispls : sequence of int
            Parts of `x`: one for each rank. They may differ between ranks.
        recvcounts, recvdispls : sequence of int
            Parts of `out`: one from each rank. They may differ between ranks.

        Raises
        ------
        InvalidArgument
            Also if the number of elements that a rank sends to another rank differs from the number
            that the receiver expects; this revokes the communicator on every rank.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the other arguments and errors. *Cost*: one
        message to every other rank, also for empty parts. No rank learns the counts of other pairs.
        """
        sizes = (sendcounts, senddispls, recvcounts, recvdispls)
        given = (x, out, *sizes, self.rank, self.nranks)
        return self._collectives.start(stream, async_op, arguments.alltoallv, *given)

    @overload
    def scan(self, x: A, out: A | None = ..., op: Op = ..., **kw: Unpack[Now]) -> A: ...
    @overload
    def scan(self, x: A, out: A | None = ..., op: Op = ..., **kw: Unpack[Later]) -> Work[A]: ...
    @overload
    def scan(
        self, x: Array, out: Array | None = ..., op: Op = ..., **kw: Unpack[Either]
    ) -> Any: ...
    def scan(
        self,
        x: Any,
        out: Any = None,
        op: Op = ReduceOp.SUM,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce `x` over the ranks from 0 to this rank, inclusive, in rank order.

        Parameters
        ----------
        x, out : array_like
            As for `allreduce`.
        op : ReduceOp, ConvertedOp or UserOp
            As for `allreduce`, except AVG.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the other arguments and errors. *Cost*:
        about log2(n) exchanges of the data or, if the data does not fit into one eager slice and
        this is predicted to be faster, a pipeline through all ranks. Each rank gets the same bits
        in every run with the same plan, but the highest rank's result may be rounded differently
        from the result of an allreduce.
        """
        return self._collectives.start(stream, async_op, arguments.scan, x, out, op, False)

    @overload
    def exscan(self, x: A, out: A | None = ..., op: Op = ..., **kw: Unpack[Now]) -> A: ...
    @overload
    def exscan(self, x: A, out: A | None = ..., op: Op = ..., **kw: Unpack[Later]) -> Work[A]: ...
    @overload
    def exscan(
        self, x: Array, out: Array | None = ..., op: Op = ..., **kw: Unpack[Either]
    ) -> Any: ...
    def exscan(
        self,
        x: Any,
        out: Any = None,
        op: Op = ReduceOp.SUM,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce `x` over all ranks below this rank, in rank order.

        Parameters
        ----------
        x, out, op
            As for `scan`. No ranks are below rank 0, so its `out` (without `out`, its `x`) is not
            modified; if the result on rank 0 is a new JAX array, it has the values of `x`.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the other arguments and errors. *Cost*:
        as for `scan`, with one more exchange unless the ranks form a pipeline. Over the network, if
        `x` receives the result, the data is copied once, to memory that is reused across calls.
        """
        return self._collectives.start(stream, async_op, arguments.scan, x, out, op, True)

    @overload
    def run_schedule(
        self, schedule: Schedule, x: A, out: A | None = ..., op: Op = ..., **kw: Unpack[Now]
    ) -> A: ...
    @overload
    def run_schedule(
        self, schedule: Schedule, x: A, out: A | None = ..., op: Op = ..., **kw: Unpack[Later]
    ) -> Work[A]: ...
    @overload
    def run_schedule(
        self, schedule: Schedule, x: Array, out: Array | None = ..., op: Op = ...,
        **kw: Unpack[Either],
    ) -> Any: ...  # fmt: skip
    def run_schedule(
        self,
        schedule: Schedule,
        x: Any,
        out: Any = None,
        op: Op = ReduceOp.SUM,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Run an allreduce by a user-defined schedule; a failed rail is handled as in `allreduce`.

        Parameters
        ----------
        schedule : Schedule
            Allreduce of `nranks` ranks, equal on all ranks; from `r2ccl.algos` or made with
            `r2ccl.schedule.build`. Its edges are placed on the rails, and its chunks cut into
            slices.
        x, out, op
            As for `allreduce`.

        Raises
        ------
        ScheduleError
            If the checker refuses the schedule, for example because a contribution would be missing
            or doubled on some rank. No data has moved, and the communicator stays usable.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the other arguments and errors. *Cost*:
        given by the schedule. The checker runs at the first use of a schedule.
        """
        given = (x, out, op, schedule, self.nranks)
        return self._collectives.start(stream, async_op, arguments.run_schedule, *given)

    def barrier(self) -> None:
        """Wait until all ranks have called `barrier`.

        When `barrier` returns, earlier asynchronous collectives on host memory have ended on all
        ranks. Within a `group`, the call does not wait: the barrier runs at the end of the block,
        in the order of the calls.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the errors. *Cost*: about log2(n) empty
        messages per rank.
        """
        self._collectives.start(None, False, arguments.barrier, None, None, self.rank)

    def group(self) -> AbstractContextManager[Group]:
        """Collect the collectives and messages of a ``with`` block; run them together at its end.

        All ranks must open groups with the same collectives, in the same order. Allreduces of at
        most 256 KiB each in host memory, with the same dtype and operation, are joined into
        allreduces of at most 4 MiB, except those with a `ConvertedOp`. Messages begin before the
        collectives, so that no order of `send` and `recv` in the block can deadlock. The arrays of
        the calls must not be modified within the block, and no call may use the result of another.
        After the block, results in host memory are complete; work that is then enqueued on the
        ``stream`` of a call on device memory sees the result of the call.

        Returns
        -------
        context manager
            Its value is a `Group`, whose ``messages`` contains the messages that the `recv` and
            `sendrecv` calls received. If a call fails, the end of the block raises its error. If
            the block itself raises, no call runs.

        Raises
        ------
        InvalidArgument
            If this thread has opened a group already, if a call in the group has ``async_op``, or
            if it would return a new JAX array that cannot share memory with r2ccl.
        """
        return self._collectives.group()

    @overload
    def send(
        self, x: Array, to: int, tag: int = ..., *, is_synchronous: bool = ...,
        async_op: Literal[True],
    ) -> MessageRequest: ...  # fmt: skip
    @overload
    def send(
        self, x: Array, to: int, tag: int = ..., *, is_synchronous: bool = ...,
        async_op: Literal[False] = ...,
    ) -> None: ...  # fmt: skip
    @overload
    def send(
        self, x: Array, to: int, tag: int = ..., *, is_synchronous: bool = ..., async_op: bool = ...
    ) -> MessageRequest | None: ...
    def send(
        self, x: Any, to: int, tag: int = 0, *, is_synchronous: bool = False, async_op: bool = False
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
            Finish only after a `recv` has taken the message, even if the message is short.
        async_op : bool
            Return a `MessageRequest` at once.

        Returns
        -------
        MessageRequest or None
            None if the call is blocking, or within a `group`.

        Raises
        ------
        InvalidArgument
            If an argument is invalid. Also if the call waits for the `recv` of the message, and
            this `recv` refuses the message because its ``out`` has another dtype or too few
            elements.

        Notes
        -----
        See `Communicator` for the other errors. A message of at most ``R2CC_EAGER_NBYTES`` is
        short: the call copies it and does not wait for its `recv`. In shared memory, a short
        message must also fit into half of the ring buffer from this rank to `to`; the buffer has
        1 MiB with up to 32 ranks, and less with more ranks. A longer message to another rank waits
        for its `recv`. A short message also waits if, together with it, the short messages from
        this rank to `to` that no `recv` has taken would exceed 4 MiB, or 1 MiB in shared memory.
        *After failure*: the failure of a path neither loses nor doubles a message. Messages and
        collectives do not wait for each other.
        """
        begun: MessageRequest | None = self._messages.send(x, to, tag, is_synchronous, async_op)
        return begun

    @overload
    def recv(
        self, out: Array, source: int = ..., tag: int = ..., *, async_op: Literal[True]
    ) -> MessageRequest: ...
    @overload
    def recv(
        self, out: Array, source: int = ..., tag: int = ..., *, async_op: Literal[False] = ...
    ) -> Message | Any: ...
    @overload
    def recv(
        self, out: Array, source: int = ..., tag: int = ..., *, async_op: bool = ...
    ) -> MessageRequest | Message | Any: ...
    def recv(
        self, out: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, *, async_op: bool = False
    ) -> Any:
        """Receive a message into the first elements of `out`.

        Parameters
        ----------
        out : array_like in host memory
            C-contiguous and writable, with the dtype of the message and at least as many elements.
        source, tag : int
            Sending rank and tag that the message must have; by default any.
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
            If the `send` on another rank still waits for this `recv`, the `send` raises, too;
            otherwise the message stays for another `recv`.

        Notes
        -----
        See `Communicator` for the other errors. Messages of one source with one tag arrive in the
        order in which they were sent. *Cost*: linear in the number of messages, or receives, that
        wait for their counterpart.
        """
        return self._messages.recv(out, source, tag, async_op)

    def sendrecv(
        self,
        x: Array,
        to: int,
        out: Array,
        source: int = ANY_SOURCE,
        *,
        tag: int = 0,
        recv_tag: int = ANY_TAG,
    ) -> Message | Any:
        """Send `x` to rank `to`, and receive a message into `out`, at the same time.

        See `send` and `recv` for arguments, result and errors. A ring of ranks in which each calls
        `sendrecv` does not deadlock, whatever the sizes. `x` and `out` must not overlap.
        """
        return self._messages.sendrecv(x, to, tag, out, source, recv_tag)

    @overload
    def probe(
        self, source: int = ..., tag: int = ..., *, is_blocking: Literal[True] = ...
    ) -> Message: ...
    @overload
    def probe(self, source: int = ..., tag: int = ..., *, is_blocking: bool) -> Message | None: ...
    def probe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, *, is_blocking: bool = True
    ) -> Message | None:
        """Return the message that `recv` with these arguments would take, without taking it.

        See `recv` for arguments and errors. If there is no such message yet, wait for one if
        `is_blocking`, otherwise return None.
        """
        return self._messages.probe(source, tag, is_blocking=is_blocking)

    def empty(
        self,
        shape: int | Sequence[int] | None = None,
        dtype: npt.DTypeLike | None = None,
        *,
        like: Any = None,
    ) -> npt.NDArray[Any]:
        """Allocate an array in memory that all ranks share, if they can share memory.

        Most collectives on more than some KiB copy less data if their input on every rank is such
        an array or a part of such an array; for `allreduce`, this also holds for the output. The
        array is an ordinary NumPy array; ``torch.from_numpy`` and DLPack can share its memory.
        Collectives of other communicators treat it like any other array.

        Parameters
        ----------
        shape : int or sequence of int, optional
            Equal on all ranks, as is the size of `dtype`. Required without `like`.
        dtype : dtype, optional
            A dtype that collectives support. Default: that of `like`, else float64.
        like : array_like in host memory, optional
            Array whose shape, and by default dtype, is used. Not allowed with `shape`.

        Returns
        -------
        ndarray
            C-contiguous and uninitialized. The memory stays valid while the array or a view of the
            array exists, also after the communicator has ended.

        Raises
        ------
        InvalidArgument
            If an argument is not as described. Also, on all ranks, if the ranks share memory and
            request different numbers of pages. The communicator stays usable.
        TransportError
            If memory or descriptors are exhausted on any rank, if two ranks cannot map each other's
            memory, or if 1024 of these arrays are in use. All ranks raise it, and the communicator
            stays usable. Without shared memory, raised as by `register`.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the other errors. *Cost*: about 1 ms, and
        whole pages of memory on every rank, so allocate few large arrays and use parts of them.
        After all ranks have dropped their arrays of one `empty` call, the next `empty` frees the
        memory; after the end of the communicator, a rank's memory is freed when the rank drops its
        array. A forked child shares the contents of this memory. If the ranks do not all share
        memory, for example on several hosts, the array has ordinary memory instead, registered as
        by `register`. *After failure*: an output in this memory may contain zeros after a failed
        `allreduce`.
        """
        return self._collectives.empty(*arguments.form_of(shape, dtype, like))

    def register(self, x: Any) -> RegisteredMemory:
        """Register the memory of `x` with the NICs, so that slices are transferred without a copy.

        Over RDMA, data in unregistered memory is copied through registered buffers. Registering an
        array that is used repeatedly saves that copy. The call has no effect over TCP, and for an
        empty array.

        Parameters
        ----------
        x : array_like in host memory
            C-contiguous and writable. Kept alive until the registration ends; a ``bytearray`` or
            ``array.array`` cannot be resized until then.

        Returns
        -------
        RegisteredMemory
            A context manager; leaving it, or calling ``close()``, ends the registration. Dropping
            the object ends it too, unless a NumPy array that owns the memory is still in use.

        Raises
        ------
        InvalidArgument
            If `x` is not as described.
        TransportError
            If a NIC refuses the memory, or ``R2CC_REGISTRATION_LIMIT_NBYTES`` would be exceeded.
        ConcurrentCalls
            If this is called in a signal handler that interrupted a blocking call, or in a function
            of `user_op`.

        Notes
        -----
        *Local*; callable also while a call runs in another thread.
        """
        return self._engine.register(arguments.as_buffer(x, writable=True).array.view(np.uint8))

    def split(
        self, color: int | None, key: int = 0, *, timeout_s: float | None = None
    ) -> Communicator | None:
        """Return a new communicator of the ranks that pass the same `color`.

        The new communicator shares the connections, control plane and knowledge of failed NICs of
        this communicator. Two threads may use the two communicators at the same time. An error that
        revokes one communicator of a job revokes all communicators of the job.

        Parameters
        ----------
        color : int or None
            Any integer of 64 bits. None: this rank takes part in no new communicator.
        key : int
            The ranks of the new communicator are ordered by `key`, and for equal keys by their
            ranks in this communicator.
        timeout_s : float, optional
            Time limit of each call of the new communicator, in seconds, in place of
            ``R2CC_TIMEOUT_S``. Default: that of this communicator.

        Returns
        -------
        Communicator or None
            None if `color` is None. ``members`` of the new communicator contains, for each of its
            ranks, the corresponding rank of this communicator. The new communicator is closed by
            its ``close()``, or together with the communicator that `init` or `shrink` returned.

        Raises
        ------
        InvalidArgument
            If `color` or `key` is not an integer of 64 bits, `timeout_s` is not a number above 0
            and below 1e9, or a rank has too many communicators open.
        TransportTimeout
            Also if no communicator could be made within the timeout of this communicator. Possible
            causes: a rank called late; other threads were making communicators; or a rank had too
            many communicators, including those that it had closed but other ranks had not yet
            closed. This communicator stays usable.

        Notes
        -----
        *Collective*: all ranks; see `Communicator` for the other errors. *Cost*: at least two
        allgathers of about 300 bytes per rank. Errors and status of the new communicator, except
        its health, name ranks by their numbers in the job.
        """
        config = self.config.with_timeout(timeout_s)
        return self._collectives.joint(
            lambda: self._made_if_member(splitting.split(self._participant, color, key), config)
        )

    def dup(self, *, timeout_s: float | None = None) -> Communicator:
        """Return a new communicator of the same ranks, in the same order; see `split`.

        *Collective*: all ranks.
        """
        config = self.config.with_timeout(timeout_s)
        return self._collectives.joint(
            lambda: self._made_of(splitting.dup(self._participant), config)
        )

    def create(
        self, ranks: Sequence[int], *, timeout_s: float | None = None
    ) -> Communicator | None:
        """Return a new communicator of `ranks`, in this order; None on other ranks; see `split`.

        *Collective*: all ranks of this communicator. All pass the same `ranks`, without duplicates.
        """
        config = self.config.with_timeout(timeout_s)
        return self._collectives.joint(
            lambda: self._made_if_member(splitting.create(self._participant, ranks), config)
        )

    def create_among(
        self, ranks: Sequence[int], allgather: AllgatherBytes, *, timeout_s: float | None = None
    ) -> Communicator:
        """Return a new communicator of `ranks`, in this order; only these ranks must call.

        See `split` for the properties of the new communicator and for other errors.

        Parameters
        ----------
        ranks : sequence of int
            Ranks of this communicator, without duplicates and including this rank; all of `ranks`
            pass the same sequence.
        allgather : callable
            ``allgather(data)`` returns the bytes that each of `ranks` passed, in the order of
            `ranks`. Needed because this communicator cannot exchange data among `ranks` alone;
            called a few times.
        timeout_s : float, optional
            As in `split`.

        Raises
        ------
        InvalidArgument
            If a number in `ranks` occurs twice or is not a rank, if this rank is not among `ranks`,
            if `allgather` is not callable or does not return the bytes of each of `ranks`, if
            `timeout_s` is not a number above 0 and below 1e9, or if one of `ranks` has too many
            communicators open.

        Notes
        -----
        *Collective*: `ranks`.
        """
        config = self.config.with_timeout(timeout_s)
        return self._collectives.joint(
            lambda: self._made_of(
                splitting.create_among(self._participant, ranks, allgather), config
            )
        )

    def _made_of(self, part: splitting.Part, config: Config) -> Communicator:
        """Make the communicator for `part`, on which its ranks have agreed, and share memory.

        *Collective*: all ranks of the new communicator.
        """
        made = Communicator(
            self._job,
            self._engine.derived(part.context, config),
            part.members,
            assemble=self._assemble,
            make_device_calls=self._make_device_calls,
        )
        self._job.share_memory(made._participant)
        return made

    def _made_if_member(self, part: splitting.Part | None, config: Config) -> Communicator | None:
        return None if part is None else self._made_of(part, config)

    def exclude(self, rank: int, nic: str | int) -> None:
        """Take a NIC out of use, for example before its cable is pulled.

        Slices in flight on its paths move to other rails, and the result of the running call does
        not change, as after a failure. Later calls are planned without the NIC or, with
        ``R2CC_MODE=migrate``, also move slices to other rails. The paths of the NIC are not
        connected again before `include`.

        Parameters
        ----------
        rank : int
            A rank on the node of the NIC.
        nic : str or int
            A name or a rail number. A name, as `health` shows it, is that of an interface
            (``eth2``) or an RDMA port (``mlx5_0:1``, or ``mlx5_0`` for all its ports); all ranks of
            the node stop using this NIC. With a rail number, only `rank` stops using its NIC of
            this rail.

        Raises
        ------
        InvalidArgument
            If there is no such rank or NIC, if a rank would be left without a rail or two ranks
            without a common rail, or if ``R2CC_MODE`` is ``failstop``. Nothing has changed.
        TransportTimeout
            If not all ranks have agreed within ``R2CC_TIMEOUT_S``.
        CommunicatorRevoked
            If the communicator has ended, or another thread closes it during the call.
        ConcurrentCalls
            If this is called in a signal handler that interrupted a blocking call, or in a function
            of `user_op`.

        Notes
        -----
        *Local*; callable also while a call runs in another thread. When `exclude` returns, no rank
        uses the paths of the NIC for data. The control plane, and bypasses through a third rank,
        may use the NIC as long as it works. *Cost*: waits for one round of the health agreement.
        """
        self._participant.exclude(rank, nic, is_excluded=True)

    def include(self, rank: int, nic: str | int) -> None:
        """End the exclusion of a NIC by `exclude` or ``R2CC_FAILED_NICS``.

        The paths of the NIC are probed, and carry data again once the probes have succeeded. If the
        NIC is not excluded, nothing changes. See `exclude` for arguments and errors. *Local*.
        """
        self._participant.exclude(rank, nic, is_excluded=False)

    def explain(self, nbytes: int) -> Explanation:
        """Compare the schedules that an allreduce of `nbytes` could run; ``str()`` is a table.

        Raises
        ------
        InvalidArgument
            If `nbytes` is no integer, or negative.

        Notes
        -----
        *Local*: uses the newest health that this rank knows. The next allreduce may be planned with
        another health, the same on all ranks: with an older one if the newest applies only from a
        later collective on, or with a newer one that arrives before the call. The result covers
        schedules for the network; an allreduce in shared memory runs none of them.
        """
        return self._participant.explain(nbytes)

    @property
    def ncalls(self) -> int:
        """Number of the last collective started, including collectives that r2ccl runs internally.

        r2ccl runs collectives in `r2ccl.init` and `split`, to measure the network and to share
        memory. The numbers begin at 1; in a communicator made from another one, they may begin
        higher.
        """
        return self._engine.op

    def repairs(self) -> tuple[Repair, ...]:
        """Return the latest repairs of this rank's paths, at most 1024, oldest first.

        A repair records the evidence of the failure, the new rail of each channel that moved, the
        number of bytes sent again, and the times of these events.
        """
        return self._engine.reports.repairs()

    def health(self) -> status.HealthReport:
        """Return the state of this rank's rails and their paths to other ranks, and its memory use.

        Ranks with which this rank has exchanged no data may be missing. ``str()`` of the report is
        human-readable text.
        """
        return self._participant.health()

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the last verdict on each path that this rank has diagnosed.

        ``str()`` of a verdict is human-readable text. The result is empty with
        ``R2CC_MODE=failstop``, which does not diagnose failures.
        """
        return self._engine.reports.verdicts()

    def known_health(self) -> Known:
        """Return the newest health that this rank has received, and the time of its arrival.

        The health covers the rails of all ranks. All ranks start to plan with it at the same
        collective; the ranks may not have agreed on the number of this collective yet. The time is
        a reading of CLOCK_MONOTONIC in seconds. In version 0 of the health, all rails have their
        full bandwidth, except rails that are excluded from the start. With ``R2CC_MODE=failstop``,
        version 0 is the only version, and the time is 0.
        """
        return self._participant.known_health()

    def pending(self) -> status.Pending:
        """Return the ranks, slices and other objects that the blocked call of this rank waits for.

        ``str()`` of the result is human-readable text. It names the ranks that, as far as this rank
        knows, have not called the collective. In shared memory, a rank sees which ranks have
        called. Over the network, a rank learns this from the slices of its peers, or from the
        desync check, which asks all ranks for their last call and also finds ranks that made a
        different call. A collective starts the check after ``R2CC_SUSPICION_TIMEOUT_S`` without
        progress and, in any case, after half of ``R2CC_TIMEOUT_S``.
        """
        return self._engine.pending()

    def dump(self) -> str:
        """Return the full status of this rank as one line of JSON.

        The fields are those of `r2ccl.runtime.status.RankStatus`: among others, the running
        collective, the objects that it waits for, and the paths, links, peers and repairs.
        """
        return self._participant.dump()

    def dump_on_signal(self, signum: int = signal.SIGUSR1) -> None:
        """Write `dump` to ``R2CC_DUMP_FILE``, or to stderr, on every signal `signum`.

        The handler also runs while the main thread is in a blocking call of r2ccl. At its end, the
        handler calls the previous handler of the signal if that is a Python function. ``close()``
        or ``abort()`` in the main thread restores the previous handler.
        ``R2CC_DUMP_SIGNAL=SIGUSR1`` installs the handler in `r2ccl.init`.

        Raises
        ------
        InvalidArgument
            If this is not the main thread, or `signum` is not a signal that can be handled.

        Notes
        -----
        *Local*. A second call replaces the handler of the first. If this communicator was made by
        `split`, `dup`, `create` or `create_among`, the handler writes the status of the
        communicator that `init` or `shrink` returned.
        """
        self._job.dump_on_signal(signum)

    def rejections(self) -> dict[str, int]:
        """Return how many connections, frames and messages this rank rejected, by reason."""
        return self._job.rejections()

    def close(self) -> None:
        """Wait until all ranks have the data of all their calls, then release all resources.

        Idempotent. `close` waits for asynchronous calls, and for blocking calls queued behind them.
        It acts as `abort` if another thread runs any other blocking collective, or if `close` is
        called by a signal handler that interrupted a blocking call, or by a function of `user_op`.

        After `close`, even if it raises, no call writes to an array, except a call that cannot be
        ended; an error is logged for such a call. While the Python interpreter exits, for example
        in a ``__del__`` method, `close` does not wait; it logs a warning if other ranks may
        therefore report this rank as lost.

        A derived communicator, that is, one made by `split`, `dup`, `create` or `create_among`, is
        closed alone: `close` waits only for the calls and messages of this rank, and the shared
        connections stay open. If the asynchronous calls do not end in time, all communicators are
        revoked. `close` does not wait until other ranks receive the messages of this rank. A later
        receive of an announced message gets a copy over the network, but raises CommunicatorRevoked
        in shared memory.

        Raises
        ------
        TransportTimeout
            If asynchronous calls did not end, a rank did not confirm its data, or a rank did not
            call `close`, each within ``R2CC_INIT_TIMEOUT_S``; the message names the ranks. For a
            derived communicator, also if its messages did not end within ``R2CC_TIMEOUT_S``.
        InvalidArgument
            If another rank has called a collective that this rank has not called; raised on every
            rank.
        NoHealthyRail, PeerLost, CommunicatorRevoked
            If the communicator failed during `close`. For the communicator of the whole job, also
            if it failed before `close` and no call of this rank has raised the error.
        TransportError
            If GPU resources of a derived communicator could not be freed.
        CommunicatorRevoked
            If an asynchronous call failed and no call has raised its error yet.

        Notes
        -----
        *Collective*: all ranks. Does not wait for the other ranks if the communicator is revoked.
        """
        self._job.close(self._participant)

    def abort(self, why: str = "abort() was called") -> None:
        """Revoke the communicator on every rank and leave it; return within a second.

        Parameters
        ----------
        why : str
            Reason, which the errors on all ranks contain.

        Raises
        ------
        InvalidArgument
            If `why` is not of type str; the communicator stays usable.

        Notes
        -----
        *Local*; callable in any thread and in a signal handler. Idempotent. Running calls on all
        ranks end with `CommunicatorRevoked`; all other communicators of the job end, too. In a
        forked child, `abort` does nothing.
        """
        self._job.abort(arguments.reason_of(why))

    def revoke(self, why: str = "revoke() was called") -> None:
        """End the communicator on every rank without leaving it, so that `shrink` can follow.

        Parameters
        ----------
        why : str
            Reason, which the errors on all ranks contain.

        Raises
        ------
        InvalidArgument
            If `why` is not of type str; the communicator stays usable.

        Notes
        -----
        *Local*; callable in any thread and in a signal handler. The call does not wait. Every
        running or later call on every rank ends with `CommunicatorRevoked`, also on all other
        communicators of the job. If the communicator has ended already, its first reason stays.
        """
        self._participant.revoke(arguments.reason_of(why))

    def shrink(self, *, quorum: str = "majority") -> Communicator:
        """Return a new communicator of the surviving ranks.

        Call it after `PeerLost`, or after a `CommunicatorRevoked` that a `PeerLost` on another rank
        caused. A communicator that still works is revoked first. `shrink` closes this communicator,
        even if it raises an error, except in the cases stated under InvalidArgument.

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
            If `quorum` is unknown, if this communicator was made by `split`, `dup`, `create` or
            `create_among`, or if ``R2CC_DUMP_SIGNAL`` is set and this is not the main thread; in
            these cases, this communicator stays as it is. Also if the excluded NICs leave a
            surviving rank without a rail, or two surviving ranks without a common rail.
        NoQuorum
            If too few ranks survive.
        TransportTimeout
            If a surviving rank did not call `shrink`, or could not be connected, within
            ``R2CC_INIT_TIMEOUT_S``; the message names the rank.
        TransportError
            If no rail can be opened again on all surviving ranks.
        CommunicatorRevoked
            If this communicator was closed before, or is closed during `shrink` in another thread
            or in a signal handler.

        Notes
        -----
        *Collective*: all surviving ranks. *Cost*: each rank broadcasts three messages, or more if
        ranks are lost during `shrink`, and the survivors connect. The survivors may have failed in
        different calls. To find the last step that all survivors have completed, reduce their step
        numbers with MIN over the new communicator. Faults planned with `r2ccl.testing` are not
        injected into the new communicator.
        """
        return self._job.shrink(self._participant, quorum, self._assemble)

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
        else:
            self._job.abort_surely(f"the with block ended with {exc!r}")

    def __repr__(self) -> str:
        return f"<r2ccl.Communicator rank {self.rank} of {self.nranks}, {self._job.nrails} rails>"


#: Function that creates a communicator, not yet connected, from a control plane and its `members`.
#: The communicator owns the control plane; if the function raises, it has closed the control plane.
Assemble: TypeAlias = Callable[[ControlPlane, tuple[int, ...]], Communicator]

__all__ = ["ANY_SOURCE", "ANY_TAG", "Communicator"]

"""`R2cclProcessGroup`: the methods that torch.distributed calls.

torch calls a collective in two forms: with an object of options as the last argument, or with the
fields of that object as arguments.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from r2ccl import ANY_SOURCE, Communicator, InvalidArgument, R2cclError, TransportTimeout
from r2ccl.interop.torch import collectives
from r2ccl.interop.torch.call_queue import CallQueue, QueuedCall
from r2ccl.interop.torch.rendezvous import TorchConnections, timeout_of
from r2ccl.interop.torch.tensors import Tensor, array_of, copy_back, in_order, one
from r2ccl.interop.torch.works import CollectiveWork, MessageWork, seconds, translated

_log = logging.getLogger("r2ccl.torch")
#: Tags of `monitored_barrier`; torch's own tags have 32 bits.
_BARRIER_TAG = 1 << 40

#: Field of torch's options for each argument that has another name.
_FIELDS = {"root": "rootRank", "op": "reduceOp"}

_connections = TorchConnections()


def _method(function: Callable[..., None], options: Any, nargs: int, *fields: str) -> Any:
    """Return the method that runs a function of `collectives`.

    Parameters
    ----------
    function : callable
    options : type
        Class of the method's options in torch.
    nargs : int
        Number of arguments before the options.
    *fields : str
        Fields of the options that the form without options has as arguments, before the timeout.
    """

    def method(self: R2cclProcessGroup, *args: Any, **named: Any) -> CollectiveWork:
        given = args[:nargs]
        if len(args) == nargs + 1 and not named and type(args[nargs]) is options:
            opts = args[nargs]
        else:
            opts = _options(options, args[nargs:], named, (*fields, "timeout"))
        return self._start(partial(function, self.communicator, *given, opts), given[:1], opts)

    method.__doc__ = function.__doc__
    method.__name__ = function.__name__
    return method


def _run(fn: Callable[[], None]) -> None:
    with translated():
        fn()


def _options(
    options: Any, rest: tuple[Any, ...], named: dict[str, Any], fields: tuple[str, ...]
) -> Any:
    """Return the options of a call; `rest` and `named` are its arguments in either form."""
    opts = named.pop("opts", None)
    if rest and hasattr(rest[0], "asyncOp"):
        opts, rest = rest[0], rest[1:]
    if opts is not None:
        return opts
    opts = options()
    for name, value in (*zip(fields, rest, strict=False), *named.items()):
        if name not in fields:
            raise TypeError(f"unexpected argument {name!r}: allowed are opts, {', '.join(fields)}")
        if value is not None:
            setattr(opts, _FIELDS.get(name, name), value)
    return opts


class R2cclProcessGroup(dist.ProcessGroup):  # type: ignore[misc]
    """Process group of torch.distributed whose calls run on a `Communicator`.

    Parameters
    ----------
    communicator : Communicator
        Its ranks are the ranks of the group.
    store : torch.distributed.Store
        Store of the group.
    timeout : timedelta
        Timeout of the calls of the group.

    Attributes
    ----------
    communicator : Communicator
        For `repairs`, `health` and all else that torch lacks.

    Notes
    -----
    Collectives run in the order of the calls. A collective runs in another thread if it has
    ``async_op=True`` or a shorter timeout than the communicator's, or if an earlier one has not
    finished. Methods raise the errors of r2ccl as `torch.distributed.DistBackendError`.
    """

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, communicator: Communicator, store: Any, timeout: timedelta) -> None:
        super().__init__(communicator.rank, communicator.nranks)
        self.communicator = communicator
        self._store = store
        self._timeout_s = timeout.total_seconds()
        self._queue = CallQueue(f"r2ccl-torch-{communicator.rank}")
        self._name = self._desc = ""
        self._ncalls = 0
        self._nbarriers = itertools.count()
        self._is_over = False
        self._options = c10d.Backend.Options("r2ccl", timeout)
        atexit.register(self._leave)

    @classmethod
    def connect(cls, opts: Any) -> R2cclProcessGroup:
        """Connect the ranks of a new group, and return the group.

        `opts` are torch's ``_DistributedBackendOptions``. *Collective*: all ranks of the group.

        Raises
        ------
        DistBackendError
            If the ranks do not meet in time, or cannot be connected.
        """
        with translated():
            made = _connections.communicator(opts)
        return cls(made, opts.store, timeout_of(made, opts))

    # Collectives

    allreduce = _method(collectives.allreduce, c10d.AllreduceOptions, 1, "op")
    allreduce_coalesced = _method(collectives.allreduce, c10d.AllreduceCoalescedOptions, 1)
    broadcast = _method(collectives.broadcast, c10d.BroadcastOptions, 1, "root")
    reduce = _method(collectives.reduce, c10d.ReduceOptions, 1, "root", "op")
    allgather = _method(collectives.allgather, c10d.AllgatherOptions, 2)
    allgather_coalesced = _method(collectives.allgather_coalesced, c10d.AllgatherOptions, 2)
    all_gather_single = _method(collectives.all_gather_single, c10d.AllgatherOptions, 2)
    all_gather_single_coalesced = _method(
        collectives.all_gather_single_coalesced, c10d.AllgatherOptions, 2
    )
    gather = _method(collectives.gather, c10d.GatherOptions, 2, "root")
    scatter = _method(collectives.scatter, c10d.ScatterOptions, 2, "root")
    reduce_scatter = _method(collectives.reduce_scatter, c10d.ReduceScatterOptions, 2, "op")
    reduce_scatter_single = _method(collectives.reduce_scatter_single, c10d.ReduceScatterOptions, 2)
    reduce_scatter_single_coalesced = _method(
        collectives.reduce_scatter_single_coalesced, c10d.ReduceScatterOptions, 2
    )
    alltoall = _method(collectives.alltoall, c10d.AllToAllOptions, 2)
    all_to_all_single = _method(collectives.all_to_all_single, c10d.AllToAllOptions, 4)
    barrier = _method(collectives.barrier, c10d.BarrierOptions, 0)

    # Names of the same methods before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start(self, fn: Callable[[], None], results: Any, opts: Any) -> CollectiveWork:
        """Run `fn` after the earlier calls and return its handle; if it is blocking, wait for it.

        A blocking call runs in this thread if no other call is queued or running, and if its
        timeout is not shorter than the communicator's.
        """
        self._ncalls += 1
        timeout_s = seconds(opts.timeout, self._timeout_s)
        result = [] if not results else results[0]
        call = QueuedCall(
            partial(_run, fn), [result] if isinstance(result, torch.Tensor) else result
        )
        work = CollectiveWork(call, timeout_s, self._revoke)
        if opts.asyncOp or timeout_s < self.communicator.config.timeout_s:
            self._queue.add(call)
        else:
            self._queue.run(call)
        if not opts.asyncOp:
            work.wait()
        return work

    # Messages

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> MessageWork:
        """Begin to send the only tensor in `tensors` to rank `to`; borrow it until it is sent."""
        with translated():
            copy = in_order(one(tensors))
            request: Any = self.communicator.send(array_of(copy), to, tag, async_op=True)
        return MessageWork(request, tensors, self._timeout_s, self._revoke)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> MessageWork:
        """Begin to receive from rank `source` into the only tensor in `tensors`."""
        with translated():
            if tag < 0:
                raise InvalidArgument(f"tag={tag}: allowed are 0 and more")
            tensor = one(tensors)
            copy = in_order(tensor)
            request = self.communicator.recv(array_of(copy), source, tag, async_op=True)
        finish = partial(copy_back, tensor, copy)
        return MessageWork(request, tensors, self._timeout_s, self._revoke, finish)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MessageWork:
        """Begin to receive from any rank into the only tensor in `tensors`."""
        return self.recv(tensors, ANY_SOURCE, tag)

    @translated()
    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until all ranks have called `monitored_barrier`.

        Parameters
        ----------
        timeout : timedelta, optional
            Longest wait. Default: the timeout of the group.
        wait_all_ranks : bool
            True: the error on rank 0 names all missing ranks. False: it names the first one.

        Raises
        ------
        DistBackendError
            On every rank that called `monitored_barrier`, if a rank did not call it in time. On
            rank 0 the error names the missing ranks; on the other ranks it names rank 0.
        """
        limit_s = seconds(timeout, self._timeout_s)
        tag = _BARRIER_TAG + next(self._nbarriers)
        comm, nothing = self.communicator, np.empty(0, np.uint8)
        if comm.rank:
            comm.send(nothing, 0, tag)
            self._hear(comm.recv(nothing, 0, tag, async_op=True), 0, limit_s)
            return
        begun = [
            (rank, comm.recv(nothing, rank, tag, async_op=True)) for rank in range(1, comm.nranks)
        ]
        errors = []
        for rank, request in begun:
            try:
                self._hear(request, rank, limit_s)
            except dist.DistBackendError as exc:
                errors.append(exc)
                limit_s = 0.001  # the other ranks have had the same time
                if not wait_all_ranks:
                    break
        if errors:
            raise dist.DistBackendError("; ".join(map(str, errors))) from errors[0]
        for rank, _ in begun:
            comm.send(nothing, rank, tag)

    def _hear(self, request: Any, rank: int, limit_s: float) -> None:
        try:
            request.wait(limit_s)
        except TransportTimeout as exc:
            request.cancel()
            raise dist.DistBackendError(
                f"rank {self.communicator.rank}: rank {rank} did not pass monitored_barrier in "
                "time: look at that rank's own log"
            ) from exc

    # Groups

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> R2cclProcessGroup | None:
        """Return a new group of `ranks`, ranks of this group; None on other ranks.

        *Collective*: all ranks of this group, which may make several new groups at once: the ranks
        of one new group pass the same `ranks`. `timeout` is by default that of this group.
        """
        rank = self.communicator.rank
        is_in = rank in ranks
        with translated():
            made = self.communicator.split(
                min(ranks) if is_in else None, ranks.index(rank) if is_in else 0
            )
        if made is None:
            return None
        limit = timedelta(seconds=self._timeout_s) if timeout is None else timeout
        group = R2cclProcessGroup(made, dist.PrefixStore(f"{group_name}/", self._store), limit)
        group._set_group_name(group_name or "")
        group._set_group_desc(group_desc or "")
        return group

    @translated()
    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later calls: above 0, and at most that of the communicator.

        Raises
        ------
        DistBackendError
            If `timeout` is out of this range.
        """
        limit_s = self.communicator.config.timeout_s
        if not 0 < timeout.total_seconds() <= limit_s:
            raise InvalidArgument(
                f"timeout={timeout}; allowed are more than 0 s and up to {limit_s:g} s, with which "
                "the ranks were connected: to raise this limit, pass a longer timeout to "
                "init_process_group or, if R2CC_TIMEOUT_S is set, raise that"
            )
        self._timeout_s = timeout.total_seconds()
        self._options = c10d.Backend.Options("r2ccl", timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """End all calls on all ranks with an error, and leave the group. *Local*.

        The calls of all groups that share the connections end, too.
        """
        self.communicator.abort("abort() of the process group was called")
        self._end()

    def shutdown(self) -> None:
        """Wait for all calls, then leave the group. *Collective*: all ranks.

        An error, such as the failure of another rank, is logged as a warning and not raised: an
        exception would keep torch from removing the group, and the program could not make a new
        one. A second call does nothing.
        """
        if self._is_over:
            return
        if not self._queue.drain(self._timeout_s):
            _log.warning(
                "rank %d: calls of process group %s did not end within %g s and are aborted: look "
                "at the logs of the other ranks",
                self.communicator.rank,
                self._name,
                self._timeout_s,
            )
        self._end()
        try:
            self.communicator.close()
        except R2cclError as exc:
            _log.warning(
                "rank %d: process group %s did not close cleanly: %s",
                self.communicator.rank,
                self._name,
                exc,
            )

    def _end(self) -> None:
        self._is_over = True
        atexit.unregister(self._leave)
        self._queue.close()
        _connections.forget(self.communicator)

    def _leave(self) -> None:
        """Leave the group when the process ends without ``destroy_process_group``."""
        if getattr(sys, "last_value", None) is not None:
            self.communicator.abort(f"the program ended with {sys.last_value!r}")
            return
        self.shutdown()

    def _revoke(self, why: str) -> None:
        self.communicator.revoke(why)

    # Attributes of a group that torch reads and sets

    def name(self) -> str:
        """Return the name of the backend."""
        return "r2ccl"

    getBackendName = _get_backend_name = name

    def getGroupName(self) -> str:
        """Return the name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the name of the group."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the description of the group."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Set the description of the group."""
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def get_group_store(self) -> Any:
        """Return the store of the group."""
        return self._store

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device(each) for each in dist.Backend.backend_capability["r2ccl"]]

    @translated()
    def _get_backend(self, device: Any) -> R2cclProcessGroup:
        kinds = dist.Backend.backend_capability["r2ccl"]
        if torch.device(device).type not in kinds:
            raise InvalidArgument(
                f"r2ccl does not support tensors on {device}: allowed are {', '.join(kinds)}"
            )
        return self

    @property
    def options(self) -> Any:
        """Options of the backend in torch's form, which contain the timeout."""
        return self._options

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._ncalls

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        self._queue.drain(self._timeout_s)

    def __repr__(self) -> str:
        return f"<R2cclProcessGroup {self._name} of {self.communicator!r}>"


__all__ = ["R2cclProcessGroup"]

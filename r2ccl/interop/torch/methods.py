"""`GroupMethods`: the methods of a process group that torch.distributed calls.

torch calls a collective in two forms: with an object of options as the last argument, or with the
fields of that object as arguments.
"""

from __future__ import annotations

import atexit
import inspect
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from r2ccl import ANY_SOURCE, Communicator, InvalidArgument, R2cclError, TransportTimeout
from r2ccl.clock import monotonic
from r2ccl.interop.rank_exchange import named_ranks
from r2ccl.interop.torch import collectives
from r2ccl.interop.torch.call_queue import CallQueue, QueuedCall
from r2ccl.interop.torch.tensors import Tensor, array_of, copy_back, current_stream, in_order, one
from r2ccl.interop.torch.works import (
    CollectiveWork,
    MessageWork,
    late_collective,
    seconds,
    translated,
)

_log = logging.getLogger("r2ccl.torch")
#: First tag of `monitored_barrier`, above torch's own tags, which have 32 bits.
_BARRIER_TAG = 1 << 40

#: Field of torch's options for each argument that has another name.
_FIELDS = {"root": "rootRank", "op": "reduceOp"}


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
        Names of the arguments, in order, that a call can have instead of options. ``timeout`` is
        added at the end.
    """

    def method(self: GroupMethods, *args: Any, **named: Any) -> CollectiveWork:
        given = args[:nargs]
        if len(args) == nargs + 1 and not named and type(args[nargs]) is options:
            opts = args[nargs]
        else:
            opts = _options(options, args[nargs:], named, (*fields, "timeout"))
        return self._start(partial(function, self.communicator, *given, opts), given, opts)

    method.__doc__ = function.__doc__
    method.__name__ = function.__name__
    return method


def _run(fn: Callable[[], None]) -> None:
    with translated:
        fn()


def _run_within(
    timeout_s: float, on_timeout: Callable[[str], None], fn: Callable[[], None]
) -> None:
    """Call ``_run(fn)``; if `fn` has not ended after `timeout_s`, call ``on_timeout(reason)``.

    The timeout does not interrupt `fn`. This function returns when `fn` and the timer's thread have
    ended.
    """
    timer = threading.Timer(timeout_s, on_timeout, (late_collective(timeout_s),))
    timer.daemon = True  # the interpreter would wait for it before `GroupState` leaves the group
    timer.start()
    try:
        _run(fn)
    finally:
        timer.cancel()
        timer.join()


def _options(
    options: Any, rest: tuple[Any, ...], named: dict[str, Any], fields: tuple[str, ...]
) -> Any:
    """Return the options of a call that passes an object of options, or its fields as arguments.

    `rest` has the positional arguments, starting at the position of the options; `named` has the
    keyword arguments. As in torch, an argument that this form of the call lacks raises TypeError.
    """
    has_options = "opts" in named or (len(rest) > 0 and hasattr(rest[0], "asyncOp"))
    form = ("opts",) if has_options else fields
    try:
        given = _signature(form).bind(*rest, **named).arguments
    except TypeError as exc:
        raise TypeError(f"{exc}: allowed are opts, or {', '.join(fields)}") from None
    opts = given.pop("opts", None)
    if opts is None:
        opts = options()
    for name, value in given.items():
        if value is not None:
            setattr(opts, _FIELDS.get(name, name), value)
    return opts


@cache
def _signature(names: tuple[str, ...]) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind, default=None) for name in names])


@dataclass(eq=False)
class GroupState:
    """State of a process group, which its `GroupMethods` objects share.

    Parameters
    ----------
    communicator : Communicator
        Its ranks are the ranks of the group.
    store : torch.distributed.Store
        Store of the group.
    timeout : timedelta
        Timeout of the calls of the group until `set_timeout` changes it.
    on_end : callable
        Called without arguments when this rank leaves the group.

    Attributes
    ----------
    name, desc : str
        Name and description of the group, which torch sets.
    ncalls : int
        Number of collectives that were called.
    nbarriers : iterator of int
        Yields the number of the next `GroupMethods.monitored_barrier`, from 0.
    is_over : bool
        True once this rank has left the group.
    queue : CallQueue
        Runs the collectives of the group.
    timeout_s : float
        Timeout of later calls, in seconds.
    options : torch._C._distributed_c10d.Backend.Options
        Options of the backend in torch's form, which contain the timeout.
    """

    communicator: Communicator
    store: Any
    timeout: timedelta
    on_end: Callable[[], None]
    name: str = ""
    desc: str = ""
    ncalls: int = 0
    nbarriers: Iterator[int] = field(default_factory=itertools.count)
    is_over: bool = False

    def __post_init__(self) -> None:
        self.queue = CallQueue(f"r2ccl-torch-{self.communicator.rank}")
        self._owner = os.getpid()
        self.set_timeout(self.timeout)
        atexit.register(self._leave)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later calls."""
        self.timeout_s = timeout.total_seconds()
        #: Options of the backend in torch's form.
        self.options = c10d.Backend.Options("r2ccl", timeout)

    def abort(self) -> None:
        """End all calls on all ranks with an error, and leave the group.

        In a forked child, only end the child's use of the communicator.
        """
        self.communicator.abort("abort() of the process group was called")
        if not self._is_forked:
            self._end()

    def shutdown(self) -> None:
        """Wait for all calls, then leave the group; log errors as warnings.

        Calls that do not end within the timeout of the group are aborted. Do nothing if this rank
        has left the group before, or in a forked child, which has none of the threads that run the
        calls.
        """
        if self.is_over or self._is_forked:
            return
        if not self.queue.drain(self.timeout_s):
            _log.warning(
                "rank %d: calls of process group %s did not end within %g s and are aborted: look "
                "at the logs of the other ranks",
                self.communicator.rank,
                self.name,
                self.timeout_s,
            )
        self._end()
        try:
            self.communicator.close()
        except R2cclError as exc:
            _log.warning(
                "rank %d: process group %s did not close cleanly: %s",
                self.communicator.rank,
                self.name,
                exc,
            )

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._owner

    def _end(self) -> None:
        self.is_over = True
        atexit.unregister(self._leave)
        self.queue.close()
        self.on_end()

    def _leave(self) -> None:
        """Leave the group when the process ends without ``destroy_process_group``.

        If the program ended with an exception, abort the communicator instead.
        """
        if getattr(sys, "last_value", None) is not None:
            self.communicator.abort(f"the program ended with {sys.last_value!r}")
            return
        self.shutdown()


class GroupMethods:
    """Methods of a process group, mixed into the base classes that torch has for backends.

    Parameters
    ----------
    state : GroupState
        State of the group.

    Attributes
    ----------
    communicator : Communicator
        Communicator that runs the calls; offers `repairs`, `health` and other methods that torch
        lacks.

    Notes
    -----
    Collectives run in the order of the calls. A collective runs in another thread if it has
    ``async_op=True``, if its timeout is shorter than the communicator's, or if an earlier
    collective has not finished. Methods raise the errors of r2ccl as
    `torch.distributed.DistBackendError`.
    """

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self.communicator = state.communicator

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

    # Older names of the same methods.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start(self, fn: Callable[[], None], given: Any, opts: Any) -> CollectiveWork:
        """Run `fn` after all earlier calls; return its handle.

        If the call is blocking, return when `fn` has ended; otherwise, return at once. A blocking
        call runs in this thread if no other call is queued or running, and if its timeout is not
        shorter than the communicator's. `given` has the arguments before the options; the first of
        these arguments receives the result.
        """
        self._state.ncalls += 1
        timeout_s = seconds(opts.timeout, self._state.timeout_s)
        is_short = timeout_s < self.communicator.config.timeout_s
        result = [] if not given else given[0]
        call = QueuedCall(
            # `wait` enforces a short timeout too, but a program may use the future instead.
            partial(_run_within, timeout_s, self._revoke, fn) if is_short else partial(_run, fn),
            [result] if isinstance(result, torch.Tensor) else result,
            current_stream(given),
        )
        work = CollectiveWork(call, timeout_s, self._revoke)
        if opts.asyncOp or is_short:
            self._state.queue.add(call)
        else:
            self._state.queue.run(call)
        if not opts.asyncOp:
            work.wait()
        return work

    # Messages

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> MessageWork:
        """Begin to send the only tensor in `tensors` to rank `to`; borrow it until it is sent."""
        with translated:
            copy = in_order(one(tensors))
            request: Any = self.communicator.send(array_of(copy), to, tag, async_op=True)
        return MessageWork(request, tensors, self._state.timeout_s, self._revoke)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> MessageWork:
        """Begin to receive from rank `source` into the only tensor in `tensors`."""
        with translated:
            if tag < 0:
                raise InvalidArgument(f"tag={tag}: allowed is 0 or more")
            tensor = one(tensors)
            copy = in_order(tensor)
            request = self.communicator.recv(array_of(copy), source, tag, async_op=True)
        finish = partial(copy_back, tensor, copy)
        return MessageWork(request, tensors, self._state.timeout_s, self._revoke, finish)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MessageWork:
        """Begin to receive from any rank into the only tensor in `tensors`."""
        return self.recv(tensors, ANY_SOURCE, tag)

    @translated
    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until all ranks have called `monitored_barrier`.

        Parameters
        ----------
        timeout : timedelta, optional
            Longest time that the call takes. Default: the timeout of the group.
        wait_all_ranks : bool
            True: the error on rank 0 names all missing ranks. False: it names only the first
            missing rank. Unlike in gloo, the call takes no longer than `timeout` in both cases.

        Raises
        ------
        DistBackendError
            On every rank that called `monitored_barrier`, if a rank did not call it in time. On
            rank 0 the error names missing ranks, see `wait_all_ranks`; on the other ranks it names
            rank 0.
        """
        give_up_s = monotonic() + seconds(timeout, self._state.timeout_s)
        tag = _BARRIER_TAG + next(self._state.nbarriers)
        comm, nothing = self.communicator, np.empty(0, np.uint8)

        def pass_by(start: Callable[..., Any], ranks: Iterable[int]) -> None:
            requests = {rank: start(nothing, rank, tag, async_op=True) for rank in ranks}
            self._hear(requests, give_up_s, is_patient=wait_all_ranks)

        if comm.rank:
            pass_by(comm.send, [0])
            pass_by(comm.recv, [0])
        else:
            pass_by(comm.recv, range(1, comm.nranks))
            pass_by(comm.send, range(1, comm.nranks))

    def _hear(self, requests: dict[int, Any], give_up_s: float, *, is_patient: bool) -> None:
        """Wait for the messages of `monitored_barrier`; `requests` has one for each peer.

        Raise DistBackendError if a message has not finished at the time `give_up_s` of the clock
        `monotonic`. The error names the first peer with such a message; with `is_patient`, it names
        all such peers.
        """
        missing: dict[int, TransportTimeout] = {}
        try:
            for rank, request in requests.items():
                try:
                    request.wait(max(0, give_up_s - monotonic()))
                except TransportTimeout as exc:
                    missing[rank] = exc
                    if not is_patient:
                        break
        finally:
            for request in requests.values():
                if not request.is_done():
                    request.cancel()
        if missing:
            raise dist.DistBackendError(
                f"rank {self.communicator.rank}: {named_ranks(missing)} did not pass "
                "monitored_barrier in time: look at their own logs"
            ) from next(iter(missing.values()))

    # Life cycle

    @translated
    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later calls.

        Raises
        ------
        DistBackendError
            If `timeout` is not above 0, or exceeds the timeout of the communicator.
        """
        limit_s = self.communicator.config.timeout_s
        if not 0 < timeout.total_seconds() <= limit_s:
            raise InvalidArgument(
                f"timeout={timeout}; allowed are more than 0 s and up to {limit_s:g} s, the "
                "timeout with which the group was made: to raise this limit, raise R2CC_TIMEOUT_S "
                "if it is set; otherwise pass a longer timeout to init_process_group or new_group"
            )
        self._state.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """End all calls on all ranks with an error, and leave the group. *Local*.

        The calls of all groups that share the connections end, too.
        """
        self._state.abort()

    def shutdown(self) -> None:
        """Wait for all calls, then leave the group. *Collective*: all ranks.

        An error, such as the failure of another rank, is logged as a warning and not raised: an
        exception would keep torch from removing the group, and the program could not make a new
        one. A second call does nothing.
        """
        self._state.shutdown()

    def _revoke(self, why: str) -> None:
        self.communicator.revoke(why)

    # Attributes that torch reads

    def name(self) -> str:
        """Return the name of the backend."""
        return "r2ccl"

    getBackendName = _get_backend_name = name

    @property
    def options(self) -> Any:
        """Options of the backend in torch's form, which contain the timeout."""
        return self._state.options

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._state.ncalls

    def _wait_for_pending_works(self) -> None:
        self._state.queue.drain(self._state.timeout_s)


__all__ = ["GroupMethods", "GroupState"]

"""Entry point of the collectives of one communicator: single calls and groups of calls.

Collectives run one at a time, in the order of the calls. On host memory, a blocking collective runs
in the caller's thread, unless an asynchronous one is queued or running. All other collectives on
host memory run in the communicator's worker thread. A call that fails outside the data loop ends
the communicator, so that no peer waits for that call. A call that is rejected because its arguments
are invalid or another call is in progress does not end the communicator.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from r2ccl.bootstrap.control import ControlPlane
from r2ccl.dtypes import CODES
from r2ccl.errors import (
    CommunicatorRevoked,
    ConcurrentCalls,
    InvalidArgument,
    R2cclError,
    ScheduleError,
    TransportError,
)
from r2ccl.planning.plan_cache import PlanCache
from r2ccl.runtime import arguments
from r2ccl.runtime.arguments import Request
from r2ccl.runtime.arrays.buffers import Buffer, JaxBuffer
from r2ccl.runtime.arrays.cuda import DeviceBuffer
from r2ccl.runtime.arrays.libraries import jax_converter, shares_memory
from r2ccl.runtime.async_work import Task, Work, Worker
from r2ccl.runtime.engine import Engine
from r2ccl.runtime.executor import HostLanes
from r2ccl.runtime.grouping import Group
from r2ccl.runtime.host_collectives import HostCollectives
from r2ccl.runtime.messages.matching import Message
from r2ccl.runtime.messages.messenger import MessageRequest
from r2ccl.runtime.repeats import Make, plain_of
from r2ccl.runtime.turn import HAS_GIL, Turn
from r2ccl.shm.repeat import start_of
from r2ccl.types import ORDERED_OP, CallSignature, Collective, ReduceOp

Array = npt.NDArray[Any]
#: Function that starts a collective on device memory. It takes the request, the caller's stream,
#: and whether the call is asynchronous, and returns the result or a `Work`.
StartOnDevice = Callable[[Request, Any, bool], Any]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_UINT8 = CODES[np.dtype(np.uint8)]


class Collectives:
    """Entry point for the collectives of one communicator.

    Parameters
    ----------
    engine : Engine
    plans : PlanCache
    host : HostCollectives
        Runs calls on host memory.
    worker : Worker
        Runs asynchronous calls.
    turn : Turn
        Right to run collectives; the worker uses the same `Turn`.
    start_on_device : callable
        Starts a collective on device memory; see `StartOnDevice`.
    """

    def __init__(
        self,
        engine: Engine,
        plans: PlanCache,
        host: HostCollectives,
        *,
        worker: Worker,
        turn: Turn,
        start_on_device: StartOnDevice,
    ) -> None:
        self._engine = engine
        self._plans = plans
        self._host = host
        self._worker = worker
        self._turn = turn
        self._start_on_device = start_on_device
        #: Held while a call on device memory is started.
        self._starting = Lock()
        #: Creates the error that refused calls raise; None while calls are accepted.
        self._refusal: Callable[[], R2cclError] | None = None
        #: Open groups of calls, each of one thread.
        self._groups: list[Group] = []
        #: Starts a call, see `_start`; replaced by compiled code once that can repeat a call in
        #: shared memory.
        self.start: Callable[..., Any] = self._start

    # State, for the communicator

    @property
    def is_closed(self) -> bool:
        """True if calls are refused."""
        return self._refusal is not None

    def close(self, refusal: Callable[[], R2cclError]) -> None:
        """Refuse all calls from now on, each with a new error from `refusal`."""
        self._refusal = refusal

    @property
    def is_plain(self) -> bool:
        """True if calls are accepted and no thread has opened a group."""
        return self._refusal is None and not self._groups

    def conditions_of_plain(self) -> tuple[list[Group], list[tuple[object, str, object]]]:
        """Return the groups and conditions that compiled code checks in place of `is_plain`.

        They are the arguments ``groups`` and ``conditions`` of `r2ccl.shm.repeat.start_of`.
        """
        return self._groups, [(self, "_refusal", None)]

    @property
    def is_blocking(self) -> bool:
        """True if a blocking collective runs in any thread, and no asynchronous one is pending."""
        return self._worker.is_idle and self._turn.is_taken

    @property
    def is_below(self) -> bool:
        """True if the caller is a signal handler that interrupted a collective of its thread.

        Also true if the caller is a function of `user_op` that a collective calls. False if the
        worker runs the interrupted collective, and this thread only waits for the worker.
        """
        return self._turn.is_mine

    def require_free(self) -> None:
        """Check that the caller may wait for other ranks.

        Raises
        ------
        ConcurrentCalls
            If `is_below`.
        R2cclError
            If calls are refused.
        """
        if self._refusal is not None:
            raise self._refusal()
        if self.is_below:
            raise self._concurrent()

    def require_seen(self) -> None:
        """Raise `CommunicatorRevoked` if an asynchronous call failed and no caller saw its error.

        The error counts as seen afterwards.
        """
        error = self._worker.unseen()
        if error is not None:
            raise CommunicatorRevoked(
                f"rank {self._engine.rank_in_job}: the communicator was revoked: {error}",
                reason=error if isinstance(error, R2cclError) else None,
            ) from error

    # Calls

    def _start(self, stream: Any, is_async: bool, make: Make, x: Any, out: Any, *rest: Any) -> Any:
        """Validate a call; then run it, queue it for the worker, or add it to the open group.

        Parameters
        ----------
        stream : object or None
            The caller's ``stream`` argument; allowed for device memory only.
        is_async : bool
            Return a `Work` at once.
        make : callable
            Function of `r2ccl.runtime.arguments` that makes the request.
        x, out, *rest : object
            Arguments of `make`.

        Returns
        -------
        object
            The result, or a `Work` if `is_async`. Within a group, the result is valid after the
            end of the group.

        Raises
        ------
        InvalidArgument, ScheduleError
            If the arguments are wrong; no collective was started. InvalidArgument is also raised
            if another rank makes a different call; the communicator has then ended.
        ConcurrentCalls
            If this call is blocking and a blocking collective runs in another thread while no
            asynchronous one is pending; if this call is blocking and is made by a function of
            `user_op`, or by a signal handler that interrupted a blocking call of its thread; or if
            this call is on device memory while another thread starts such a call.
        R2cclError
            If calls are refused, or the collective failed; the communicator has ended.
        """
        if self._refusal is not None:
            raise self._refusal()
        worker = self._worker
        if worker.failed is not None:
            self.require_seen()
        if self._groups and (group := self.group_here()) is not None:
            return self._add_to(group, make(x, out, *rest), stream, is_async, out is None)
        if make in arguments.WITH_COUNTS:
            rest = plain_of(rest)
        try:
            host = self._host
            repeats = host.repeats
            is_plain = stream is None and not is_async
            if is_plain and make in repeats.last and worker.is_idle:
                is_mine, turn = False, self._turn
                if turn.is_running or turn.is_repeating:
                    raise self._concurrent()
                try:
                    if not turn.lock.acquire(False):
                        raise self._concurrent()
                    turn.is_running = is_mine = True
                    if turn.is_repeating:
                        raise self._concurrent()
                    if self._refusal is not None:  # a close came before the turn
                        raise self._refusal()
                    try:
                        # Only with the turn held: otherwise the memory in use could be freed.
                        result = repeats.last.get(make, _miss)(x, out, rest)
                        if result is NotImplemented:
                            result = repeats.run_other(make, x, out, rest)
                    except BaseException:
                        if host.local is not None:
                            host.local.leave(make, x, out)
                        raise
                finally:
                    if is_mine:
                        turn.is_running = False
                    try:  # noqa: SIM105 - as in `_run`
                        turn.lock.release()
                    except RuntimeError:  # not acquired
                        pass
                if result is not NotImplemented:
                    return result
            request = make(x, out, *rest)
            if self._refusal is not None:  # another thread may have closed the communicator
                raise self._refusal()
            if is_plain and type(request.source) is Buffer:
                if not worker.is_idle:
                    self._check(request)
                    self.in_turn(partial(host.run, request))
                    return request.result
                is_mine, turn = False, self._turn
                if turn.is_running or turn.is_repeating:
                    raise self._concurrent()
                try:
                    if not turn.lock.acquire(False):
                        raise self._concurrent()
                    turn.is_running = is_mine = True
                    if turn.is_repeating:
                        raise self._concurrent()
                    if self._refusal is not None:  # a close came before the turn
                        raise self._refusal()
                    output, local = request.output, host.local
                    if local is not None:
                        call = None if request.conversion else local.run(request)
                        if call is None:
                            host.run(request)
                        else:
                            local.remember(make, x, out, rest, request, call)
                            self._compile_start()
                    elif request.is_staged or host.two_level or type(output) is not Buffer:
                        host.run(request)
                        host.remember(make, x, out, rest, request)
                    else:  # as `HostCollectives.run`, inlined: most calls are small
                        host.run_engine(
                            partial(self._plans, request.signature, own=request.schedule),
                            HostLanes(host.pool, request.source.array, output.array),
                        )
                        host.network_repeats.remember_last(make, x, out, rest, request)
                    return request.result
                finally:
                    if is_mine:
                        turn.is_running = False
                    try:  # noqa: SIM105 - as in `_run`
                        turn.lock.release()
                    except RuntimeError:  # not acquired
                        pass
            self._check(request)
            if isinstance(request.source, DeviceBuffer):
                return self._start_on_gpu(request, stream, is_async)
            self._refuse_stream(stream)
            convert = _converter(request) if out is None else None
            if is_async:
                return self._submit(request, convert)
            self.in_turn(partial(host.run, request))
        except BaseException as exc:
            self._note_failure(exc)
            raise
        return request.result if convert is None else convert(request.result)

    def _compile_start(self) -> None:
        """Let compiled code start calls from now on, if there is a call that it can repeat."""
        last = self._host.repeats.last
        if self.start != self._start or not last or not HAS_GIL:
            return
        worker, turn = self._worker, self._turn
        groups, conditions = self.conditions_of_plain()
        self.start = start_of(
            self._start,
            self._note_failed_repetition,
            last,
            turn,
            groups,
            [
                *conditions,
                (turn, "is_running", False),
                (worker, "failed", None),
                (worker, "is_idle", True),
            ],
        )

    def _note_failed_repetition(self, make: Make, x: Any, out: Any, error: BaseException) -> None:
        """Handle the error of a call that compiled code repeated, as `_start` does for its calls.

        Compiled code still has the turn (see `Turn`).
        """
        try:
            if self._host.local is not None:
                self._host.local.leave(make, x, out)
        finally:
            self._note_failure(error)

    def _note_failure(self, error: BaseException) -> None:
        """End the communicator after a call raised `error`, unless the call had not begun."""
        if isinstance(error, (InvalidArgument, ScheduleError, ConcurrentCalls)):
            return
        # A refused call has not begun, so no rank waits for it.
        if not (self.is_closed and isinstance(error, CommunicatorRevoked)):
            self._engine.fail_call(error)

    def joint(self, fn: Callable[[], _T]) -> _T:
        """Return ``fn()``; if Ctrl-C interrupts it, end the job's communicators.

        Otherwise the other ranks, which run the same function, would wait for this rank.
        """
        try:
            return fn()
        except BaseException as exc:
            if not isinstance(exc, Exception):
                self._engine.fail_call(exc)
            raise

    def fail_call(self, error: BaseException) -> None:
        """End the communicator after a call failed outside the data loop."""
        self._engine.fail_call(error)

    def start_message(self, post: Callable[[], MessageRequest], is_async: bool) -> Any:
        """Call ``post()``, which begins a send or receive; wait for its end unless `is_async`.

        Within a group, only add ``post`` to the group.

        Returns
        -------
        MessageRequest, Message or None
            Return value of `Communicator.send` or `recv`; None within a group.

        Raises
        ------
        InvalidArgument
            If `is_async` within a group, or if `MessageRequest.wait` raises it.
        R2cclError
            If calls are refused, or if ``post`` or `MessageRequest.wait` raises it.
        """
        if self._refusal is not None:
            raise self._refusal()
        group = self.group_here()
        if group is not None:
            if is_async:
                raise self._is_async_in_group()
            group.post(post)
            return None
        return self._run_message(post if is_async else lambda: post().wait())

    def await_message(self, request: MessageRequest) -> Message | None:
        """Wait for a message that has begun, even if calls are refused.

        Until the wait ends, the message may use its array. The errors are those of `start_message`.
        """
        return self._run_message(request.wait)

    def _run_message(self, fn: Callable[[], _T]) -> _T:
        """Return ``fn()``; if it raises an error, end the communicator.

        Three errors do not end it: `InvalidArgument`, `ConcurrentCalls`, `CommunicatorRevoked`.
        """
        try:
            return fn()
        except (InvalidArgument, ConcurrentCalls, CommunicatorRevoked):
            raise
        except BaseException as exc:
            self._engine.fail_call(exc)
            raise

    # Groups of calls

    def group_here(self) -> Group | None:
        """Return the group that this thread has opened; None if there is none."""
        return next((group for group in self._groups if group.is_here), None)

    @contextmanager
    def group(self) -> Iterator[Group]:
        """Collect the calls of a ``with`` block and run them at its end; see `Communicator.group`.

        Raises
        ------
        InvalidArgument
            If this thread has opened a group already.
        R2cclError
            As for `start`. If the block itself raises an exception, no call is started.
        """
        if self._refusal is not None:
            raise self._refusal()
        if self.group_here() is not None:
            raise InvalidArgument("group() was called within a group: end the open group first")
        group = Group()
        self._groups.append(group)
        try:
            yield group
        finally:
            self._groups.remove(group)
        if self._refusal is not None:  # the communicator was closed within the block
            raise self._refusal()
        try:
            group.run(
                lambda requests: self.in_turn(partial(self._host.run_group, requests)),
                lambda request, stream: self._start_on_gpu(request, stream, False),
            )
        except (InvalidArgument, ConcurrentCalls, CommunicatorRevoked):
            raise
        except BaseException as exc:
            self._engine.fail_call(exc)
            raise

    def _add_to(
        self, group: Group, request: Request, stream: Any, is_async: bool, is_without_out: bool
    ) -> Any:
        """Add `request` to `group`; return the result, which is valid once the group has ended."""
        if is_async:
            raise self._is_async_in_group()
        self._check(request)
        result = request.result
        if not isinstance(request.source, DeviceBuffer):
            self._refuse_stream(stream)
            if is_without_out and (convert := _converter(request)) is not None:
                result = convert(request.result)
                # The group writes to the memory of this array after it was made.
                if not shares_memory(result, request.result):
                    raise InvalidArgument(
                        f"a group cannot write to a new array of JAX on {result.device}, because "
                        "JAX does not share the array's memory with r2ccl: pass a NumPy array as "
                        "out, or make the call outside of the group"
                    )
        group.add(request, stream)
        return result

    def _refuse_stream(self, stream: Any) -> None:
        """Raise `InvalidArgument` if a stream was given for a request on host memory."""
        if stream is not None:
            raise InvalidArgument(
                f"stream={stream!r} was given for arrays in host memory, which streams do not "
                "apply to: leave it out"
            )

    def in_turn(self, fn: Callable[[], None], *, is_last: bool = False) -> None:
        """Run `fn` after all asynchronous calls issued so far; return when it has run.

        Raise the exceptions of `fn`. If `fn` runs in the worker, its exceptions end the
        communicator, and so does Ctrl-C while this method waits for the worker. With `is_last`,
        run `fn` even if calls are refused, because the communicator is being closed.

        Raises
        ------
        ConcurrentCalls
            If no asynchronous call is queued or running, and a blocking call runs in another
            thread; or if the caller is a signal handler that interrupted a call of its thread, or
            a function of `user_op`.
        CommunicatorRevoked, TransportError
            If calls are refused; or for the reasons of `Worker.enqueue`, after which the
            communicator has ended.
        """
        if self.is_below:
            raise self._concurrent()
        if self._worker.is_idle:

            def run() -> None:
                if self._refusal is not None and not is_last:  # a close came before the turn
                    raise self._refusal()
                fn()

            if not self._run(run, 0.0):
                raise self._concurrent()
            return
        task = Task(fn)
        try:
            self._worker.enqueue(task)
            task.wait()
        except BaseException as exc:
            # Ctrl-C: the collective must not continue after its call has raised.
            self._engine.revoke(f"interrupted by {exc!r}")
            self._worker.settle(task)
            raise
        if task.error is not None:
            self._worker.unseen()  # an earlier task failed for the reason that is raised here
        task.succeed()

    def _run(self, fn: Callable[[], None], timeout_s: float) -> bool:
        """Take the turn, run `fn`, and return True; this thread must not have the turn yet.

        Return False, without running `fn`, if the turn does not become free within `timeout_s`
        seconds, because another thread holds its lock or compiled code has the turn.
        """
        is_mine, turn = False, self._turn
        try:
            if turn.lock.acquire(timeout=timeout_s):
                turn.is_running = is_mine = True
                if turn.await_return(timeout_s):
                    fn()
                    return True
            return False
        finally:
            if is_mine:
                turn.is_running = False
            # Ctrl-C raises when a call returns, so no other call may come before the release.
            try:  # noqa: SIM105
                turn.lock.release()
            except RuntimeError:  # not acquired
                pass

    def allgather_bytes(self, mine: bytes) -> list[bytes]:
        """Return the bytes of all ranks, by rank; all ranks must pass the same number of bytes.

        Raises
        ------
        R2cclError
            If calls are refused, or if `in_turn` or `HostCollectives.collect` raises it.

        Notes
        -----
        *Collective*: all ranks. Runs after the asynchronous calls issued so far.
        """
        if self._refusal is not None:  # another thread has closed the communicator meanwhile
            raise self._refusal()
        rows = np.zeros((self._engine.nranks, len(mine)), np.uint8)
        rows[self._engine.rank] = np.frombuffer(mine, np.uint8)
        flat = rows.reshape(-1)
        call = CallSignature(Collective.ALLGATHER, _UINT8, ReduceOp.SUM, flat.size)
        self.in_turn(partial(self._host.collect, call, flat, flat))
        return [row.tobytes() for row in rows]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array for collectives; see `Communicator.empty`.

        If all ranks share memory, the array is in memory that all ranks can access directly.
        Otherwise, unless it is empty, the array is registered with the transport.

        Raises
        ------
        InvalidArgument, TransportError
            As `Communicator.empty`; the communicator stays usable.
        ConcurrentCalls
            As `require_free`, or if `is_blocking`.
        R2cclError
            If the communicator has ended, or ends meanwhile.
        """
        self.require_free()
        self.require_seen()
        if self.is_blocking:
            raise self._concurrent()
        local = self._host.local
        if local is None:
            array = np.empty(shape, dtype)
            if array.nbytes:
                self._engine.register(array.reshape(-1).view(np.uint8))
            return array
        nbytes = math.prod(shape) * dtype.itemsize
        try:
            memory = local.allocate(nbytes, self.allgather_bytes, self.in_turn)
        except BaseException as exc:
            # Errors of these two types are raised on all ranks. After any other error, the ranks
            # may disagree on which memory was allocated.
            if type(exc) not in (InvalidArgument, TransportError):
                self._engine.fail_call(exc)
            raise
        return memory[:nbytes].view(dtype).reshape(shape)

    def share_memory(self, control: ControlPlane, obstacle: str) -> None:
        """Use memory that all ranks share, from now on; see `HostCollectives.share_memory`."""
        self._host.share_memory(control, self.allgather_bytes, obstacle)

    def share_memory_in_nodes(
        self, control: ControlPlane, obstacle: str, teams: Sequence[Sequence[int]]
    ) -> None:
        """Use memory that the ranks of each node share, from now on.

        See `HostCollectives.share_memory_in_nodes`.
        """
        self._host.share_memory_in_nodes(control, self.allgather_bytes, obstacle, teams)

    def free_memory(self, timeout_s: float) -> bool:
        """Free shared memory; return False if a call, message or thread still uses it.

        Wait up to `timeout_s` seconds for each of these.
        """
        if not self._host.shares_memory:
            return True
        freed: list[bool] = []
        if not self.is_below:
            self._run(lambda: freed.append(self._host.free_memory(timeout_s)), timeout_s)
        return any(freed)

    def _check(self, request: Request) -> None:
        """Check the op and the schedule of a call now; later, an error would end the communicator.

        Raises
        ------
        InvalidArgument, ScheduleError
            If the op or the schedule is wrong.
        """
        arguments.check_op(request)
        if request.schedule is not None:
            is_ordered = request.signature.op == ORDERED_OP
            self._plans.check_own(request.schedule, is_ordered=is_ordered)

    def _start_on_gpu(self, request: Request, stream: Any, is_async: bool) -> Any:
        """Start a call on device memory; see `start` for the errors.

        The worker runs the call. Like a blocking call on host memory, a blocking call on device
        memory is refused while another thread runs a blocking collective, because other ranks may
        make these two calls in the opposite order.
        """
        if not is_async and (self.is_below or self.is_blocking):
            raise self._concurrent()
        # The calls must reach the worker in the order in which they were begun.
        if self._starting.locked():
            raise self._concurrent()
        # Unlike after acquire(), Ctrl-C cannot leave the lock held. If two threads come here at the
        # same moment, one waits for the other.
        with self._starting:
            return self._start_on_device(request, stream, is_async)

    def _submit(self, request: Request, convert: Callable[[Array], Any] | None) -> Work[Any]:
        task = Task(partial(self._host.run, request))
        try:
            self._worker.enqueue(task)
            timeout_s = self._engine.config.timeout_s
            return Work(task, request.result, timeout_s, convert=convert)
        except BaseException as exc:
            self._note_failure(exc)
            self._worker.settle(task)
            raise

    def _is_async_in_group(self) -> InvalidArgument:
        return InvalidArgument(
            "async_op=True was given within a group, whose calls run at its end: leave it out"
        )

    def _concurrent(self) -> ConcurrentCalls:
        return ConcurrentCalls(
            f"rank {self._engine.rank_in_job}: a call was made while another call is in progress, "
            "which runs in another thread, was interrupted by this signal handler, or runs this "
            "function of user_op: calls are allowed from one thread at a time, and neither from a "
            "signal handler nor from a function of user_op; if several threads make calls, make a "
            "communicator for each with dup()"
        )


class LoggedCollectives(Collectives):
    """`Collectives` that log each call at level DEBUG.

    `collectives_class` chooses this subclass only if DEBUG is on when the communicator is made, so
    the calls need not check the level.
    """

    def _start(self, stream: Any, is_async: bool, make: Make, x: Any, out: Any, *rest: Any) -> Any:
        """Log the call; see `Collectives._start`."""
        given = out if x is None else x
        form = [str(getattr(given, name)) for name in ("dtype", "shape") if hasattr(given, name)]
        what = "" if given is None else f" of {' '.join([type(given).__name__, *form])}"
        _log.debug(
            "rank %d: %s%s%s", self._engine.rank_in_job, make.__name__, what,
            ", asynchronous" * is_async,
        )  # fmt: skip
        return super()._start(stream, is_async, make, x, out, *rest)

    def _compile_start(self) -> None:
        """Do nothing, because compiled code does not log calls."""


def collectives_class() -> type[Collectives]:
    """Return `LoggedCollectives` if the logger is enabled for DEBUG, otherwise `Collectives`."""
    return LoggedCollectives if _log.isEnabledFor(logging.DEBUG) else Collectives


def _miss(x: Any, out: Any, rest: tuple[Any, ...]) -> Any:
    """Return NotImplemented, because there is no earlier call to repeat."""
    return NotImplemented


def _converter(request: Request) -> Callable[[Array], Any] | None:
    """Return the function that converts ``request.result`` to JAX, or None if none is needed.

    `request` must come from a call without an output argument.
    """
    if isinstance(request.source, JaxBuffer) and request.result is not None:
        return jax_converter(request.source.owner)
    return None


__all__ = ["Collectives", "LoggedCollectives", "StartOnDevice", "collectives_class"]

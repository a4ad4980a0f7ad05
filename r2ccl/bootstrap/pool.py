"""Pool of ranks that stay alive between calls, as between the cells of a notebook.

Each rank makes its communicator once, then answers calls, one at a time. A call is pickled once,
into an anonymous file in memory whose descriptor every rank gets, so that a large argument is
not copied for each rank and does not block a pipe.

Invariant: a pool whose communicator may be unusable has ended all its ranks, and says why.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pickle
import pkgutil
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from r2ccl.bootstrap import pickling
from r2ccl.bootstrap.launch import LocalJob, RankProcesses, parse_timeout
from r2ccl.bootstrap.rank_server import RankOutcome, dumps_failure, dumps_result, flush_output
from r2ccl.config import Settings
from r2ccl.errors import ConcurrentCalls, R2cclError, TransportTimeout, format_ranks

_Result = TypeVar("_Result")

#: Name of the function that makes the communicator of a rank; not imported here, because its layer
#: is a higher one.
_INIT = "r2ccl.factory:init"
#: Seconds that the other ranks have to return or raise after one rank raised or died, or after
#: Ctrl-C. Ranks that wait in a collective for the one that raised would wait forever.
_GRACE_S = 2.0
#: Seconds that the ranks have to close the communicator, and then again to exit. Also the time
#: limit for checking, after a failed call, that the communicator still works.
_CLOSE_GRACE_S = 5.0


def launch_pool(
    nranks: int,
    *,
    env: Mapping[str, str] | None = None,
    faults: Any = None,
    **settings: Unpack[Settings],
) -> LaunchPool:
    """Start `nranks` processes on this machine, connect them, and return a pool of them.

    Parameters
    ----------
    nranks : int
    env : mapping, optional
        Additional environment variables for every rank.
    faults : object, optional
        For `r2ccl.init`: a plan of faults, such as `r2ccl.testing.fail_at` returns.
    **settings
        Fields of `Config`, for `r2ccl.init`, which every rank calls once.

    Returns
    -------
    LaunchPool
        Use it as a context manager, or call its `close`.

    Raises
    ------
    InvalidArgument
        If `nranks` is not an integer from 1 to 16,384, a setting or `faults` is wrong or cannot be
        pickled, `env` has a name or a value that no variable can have, the working directory was
        removed, or the main script calls this function while another process imports it.
    Exception
        If a rank cannot import the main script: the exception that the import raised.
    R2cclError
        If `r2ccl.init` raises it on a rank, or a rank or the process that forks the ranks exits
        early.
    OSError
        If this process cannot open sockets and pipes, or start another process.

    Notes
    -----
    A main script must call this function below ``if __name__ == "__main__"``, like `launch`. If the
    pool is garbage-collected without `close`, and when this process ends, its ranks are killed.

    Examples
    --------
    >>> with r2ccl.launch_pool(4) as pool:  # doctest: +SKIP
    ...     pool.run(lambda comm, scale: comm.allreduce(np.ones(3) * scale)[0], 2.0)
    [8.0, 8.0, 8.0, 8.0]
    """
    with LocalJob(nranks) as job:
        rank = _Rank({**settings, "faults": faults})
        processes = RankProcesses(job, env or {}, rank, "launch_pool", is_serving=True)
    return LaunchPool(processes)


class LaunchPool:
    """Ranks on this machine, each with one communicator, that run functions one after another.

    `launch_pool` makes a pool. Several pools may exist at once. A pool belongs to the process that
    made it: a forked child can neither use nor end it. A call from a second thread during a call is
    refused.

    Attributes
    ----------
    nranks : int
    """

    def __init__(self, processes: RankProcesses) -> None:
        self.nranks = len(processes.ranks)
        self._processes = processes
        self._owner = os.getpid()
        #: Reason why the pool cannot be used any more; empty while it can.
        self._ended = ""
        self._turn = threading.Lock()
        self._finalizer = weakref.finalize(self, _kill, processes, self._owner)
        outcomes: dict[int, RankOutcome] = {}
        try:
            self._gather(outcomes, math.inf)
            failure = self._failure(outcomes)
            if failure is not None:
                raise failure
        except BaseException:
            self._end("no communicator could be made")
            raise

    def run(
        self, fn: Callable[..., _Result], *args: Any, timeout_s: float | None = None
    ) -> list[_Result]:
        """Call ``fn(comm, *args)`` on every rank and return the results.

        Parameters
        ----------
        fn : callable
            Function whose first argument is the rank's `Communicator`, the same one in each call.
            Functions are sent as by `launch`; `functools.partial` passes keyword arguments.
        *args
            Further arguments, the same on every rank; it must be possible to pickle them.
        timeout_s : float, optional
            Longest time to wait for the results, in seconds. Default: no limit.

        Returns
        -------
        list
            Results of `fn`, by rank; it must be possible to pickle them.

        Raises
        ------
        Exception
            If ranks raise, and none exits: the first exception that arrives, with the remote
            traceback as its cause. The pool stays usable if all ranks return or raise within 2 s
            after this exception and the communicator still works. Otherwise the pool has ended, and
            a note on the exception says why.
        R2cclError
            If a rank calls ``sys.exit`` or raises an exception that cannot be pickled; if a rank
            exits during the call, which ends the pool; or if the pool has ended or belongs to
            another process.
        TransportTimeout
            If not all ranks return within `timeout_s`; the pool has ended.
        InvalidArgument
            If `fn` is not callable, `fn` or an argument cannot be pickled, or `timeout_s` is not a
            number; nothing was called. Also if a result cannot be pickled and unpickled.
        ConcurrentCalls
            If another call is running.
        KeyboardInterrupt
            On Ctrl-C, which also interrupts every rank that runs `fn`. The pool stays usable under
            the same conditions as after an exception of a rank.

        Notes
        -----
        The ranks keep imported modules: after a change to the file of a module, make a new pool.
        Lines that ranks write appear as with `launch`. If these lines pass through this process, as
        in a notebook, lines written between two calls appear during the second call.
        """
        self._require_usable()
        limit_s = parse_timeout(timeout_s, "launch_pool")
        is_by_value = self._processes.is_by_value
        call = pickling.dumps_call(fn, "launch_pool", args=args, is_by_value=is_by_value)
        if not self._turn.acquire(blocking=False):
            raise ConcurrentCalls(
                "launch_pool: run() was called while another call runs: wait for it, or make a "
                "second pool"
            )
        try:
            return self._run(call, limit_s)
        finally:
            self._processes.flush_output()
            self._turn.release()

    def close(self) -> None:
        """Close the communicators and end the ranks.

        Do nothing if the pool has ended, or in a forked child.

        Raises
        ------
        R2cclError
            If `Communicator.close` raises it on a rank, a rank has exited, or a rank does not close
            within 5 s.
        ConcurrentCalls
            If a call is running in another thread.
        """
        if self._ended or os.getpid() != self._owner:
            return
        if not self._turn.acquire(blocking=False):
            raise ConcurrentCalls("launch_pool: close() was called while a call runs: wait for it")
        outcomes: dict[int, RankOutcome] = {}
        try:
            for each in self._processes.ranks:
                with socket.socket(fileno=os.dup(each.results.fileno())) as calls:
                    calls.shutdown(socket.SHUT_WR)
            self._gather(outcomes, time.monotonic() + _CLOSE_GRACE_S)
            self._processes.join(_CLOSE_GRACE_S)
        finally:
            self._end("it was closed")
            self._turn.release()
        failure = self._failure(outcomes)
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f", ended: {self._ended}" if self._ended else ""
        return f"<r2ccl.LaunchPool of {self.nranks} ranks{state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a LaunchPool belongs to the process that made it")

    def _run(self, call: bytes, timeout_s: float) -> list[Any]:
        until_s = time.monotonic() + timeout_s
        outcomes: dict[int, RankOutcome] = {}
        failure: BaseException | None = None
        why = "run() was interrupted"  # kept if an exception leaves before the check below
        try:
            try:
                self._send(call)
                self._gather(outcomes, until_s)
            except KeyboardInterrupt as exc:
                failure = exc
                self._processes.interrupt(self._late(outcomes))
                self._gather(outcomes, time.monotonic() + _GRACE_S)
            failure = failure or self._failure(outcomes, timeout_s)
            why = self._why_unusable(outcomes) if failure else ""
        finally:
            if why:
                self._end(why)
        if failure is None:
            return [outcomes[rank].value for rank in range(self.nranks)]
        if why:
            failure.add_note(f"launch_pool: the pool has ended, because {why}; make a new one")
        raise failure

    def _send(self, call: bytes) -> None:
        descriptor = os.memfd_create("r2ccl-call", os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(call)
            for each in self._processes.ranks:
                with contextlib.suppress(ConnectionError):  # _gather finds that it has exited
                    reduction.send_handle(each.results, descriptor, each.pid)
        finally:
            os.close(descriptor)

    def _gather(self, outcomes: dict[int, RankOutcome], until_s: float) -> None:
        """Add the missing outcomes to `outcomes` as they arrive, until the time `until_s`.

        After the first failure, the remaining ranks have `_GRACE_S` seconds.
        """
        ranks = self._processes.ranks
        waiting = {ranks[rank].results: rank for rank in self._late(outcomes)}
        while waiting and (ready := self._processes.wait(waiting, until_s)):
            for results in ready:
                rank = waiting.pop(results)
                outcomes[rank] = self._processes.outcome(rank)
                if outcomes[rank].error is not None:
                    until_s = min(until_s, time.monotonic() + _GRACE_S)

    def _late(self, outcomes: Mapping[int, RankOutcome]) -> list[int]:
        return [rank for rank in range(self.nranks) if rank not in outcomes]

    def _failure(
        self, outcomes: Mapping[int, RankOutcome], timeout_s: float | None = None
    ) -> BaseException | None:
        """Return the error of a call: the exit of a rank, else the first exception, else a timeout.

        Return None if all ranks returned. `outcomes` are in the order of their arrival. If
        `timeout_s` is None, the message of a timeout is that of `close`.
        """
        late = self._late(outcomes)
        if (error := _raised(outcomes)) is not None or not late:
            return error
        if timeout_s is None:
            return TransportTimeout(
                f"launch_pool: ranks {format_ranks(late)} did not close within "
                f"{_CLOSE_GRACE_S:g} s and were terminated; look at their output"
            )
        return TransportTimeout(
            f"launch_pool: ranks {format_ranks(late)} did not return within {timeout_s:g} s "
            "and were terminated; look at their output, or raise timeout_s"
        )

    def _why_unusable(self, outcomes: Mapping[int, RankOutcome]) -> str:
        """Return why the pool is unusable after a failed call; empty if it is usable.

        If all ranks have returned or raised, make them run a barrier as a test of the communicator.
        """
        for rank, each in outcomes.items():
            if each.is_exit:
                return f"rank {rank} exited"
        if late := self._late(outcomes):
            return f"ranks {format_ranks(late)} neither returned nor raised in time"
        checks: dict[int, RankOutcome] = {}
        self._send(pickle.dumps((_check, ())))
        self._gather(checks, time.monotonic() + _CLOSE_GRACE_S)
        broken = "the communicator does not work any more"
        if (error := _raised(checks)) is not None:
            return f"{broken} ({error})"
        if late := self._late(checks):
            return (
                f"{broken} (ranks {format_ranks(late)} did not finish a barrier within "
                f"{_CLOSE_GRACE_S:g} s after the failed call; look at their output)"
            )
        return ""

    def _require_usable(self) -> None:
        if os.getpid() != self._owner:
            raise R2cclError(
                f"launch_pool: the pool belongs to process {self._owner}, from which this one was "
                "forked: call run() there, or make a pool in this process"
            )
        if self._ended:
            raise R2cclError(
                f"launch_pool: the pool has ended, because {self._ended}; make a new one"
            )

    def _end(self, why: str) -> None:
        self._ended = why
        self._finalizer.detach()
        self._processes.end(0.0)


def _raised(outcomes: Mapping[int, RankOutcome]) -> BaseException | None:
    """Return the error of a rank that exited, else the first exception of a rank, else None."""
    errors = {rank: each.error for rank, each in outcomes.items() if each.error is not None}
    for rank, error in errors.items():
        if outcomes[rank].is_exit:
            return error
    for rank, error in errors.items():
        if len(errors) > 1:
            error.add_note(
                f"ranks {format_ranks(errors)} raised errors; this is the error of rank {rank}"
            )
        return error
    return None


def _kill(processes: RankProcesses, owner: int) -> None:
    """Kill the ranks of a pool that was not closed; do nothing in a forked child."""
    if os.getpid() == owner:
        processes.kill()


def _check(comm: Any) -> None:
    """Run a barrier, to fail on some rank if the communicator has ended or calls do not match."""
    comm.barrier()


class _Rank:
    """Program of a rank of a pool: makes a communicator and answers calls until there are no more.

    SIGINT ends only a running function: it is ignored between two calls.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._is_interruptible = False

    def __repr__(self) -> str:
        shown = {**self._settings, **({"secret": "***"} if "secret" in self._settings else {})}
        return f"init(**{shown!r})"

    def __call__(self, calls: Connection) -> None:
        with pkgutil.resolve_name(_INIT)(**self._settings) as comm:
            signal.signal(signal.SIGINT, self._interrupt)
            calls.send_bytes(pickle.dumps(RankOutcome()))
            while True:
                try:
                    descriptor = reduction.recv_handle(calls)
                except EOFError:
                    return
                message = self._answer(comm, descriptor)
                flush_output()
                calls.send_bytes(message)

    def _interrupt(self, *_: object) -> None:
        if self._is_interruptible:
            self._is_interruptible = False
            raise KeyboardInterrupt

    def _answer(self, comm: Any, descriptor: int) -> bytes:
        try:
            try:
                self._is_interruptible = True
                with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as call:
                    fn, args = pickle.loads(call)
                value = fn(comm, *args)
            finally:
                self._is_interruptible = False
                os.close(descriptor)
            return dumps_result(value)
        except BaseException as exc:
            return dumps_failure(exc)


__all__ = ["LaunchPool", "launch_pool"]

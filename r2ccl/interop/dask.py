"""`run`: calls a function on Dask workers, each of which is a rank of one `Communicator`.

::

    from r2ccl.interop.dask import run

    def total(comm, n):
        return comm.allreduce(np.full(n, comm.rank + 1.0))[0]

    run(client, total, 1000)        # {address of a worker: its result, ...}

The ranks exchange the address of rank 0 through queues and variables of Dask's scheduler. They also
exchange the job's secret in this way, unless it is set on the workers. When the ranks are connected
or have failed, they remove these queues and variables.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, Unpack

from distributed import Client, Future, Queue, Variable, get_client, wait

from r2ccl import (
    CommunicatorRevoked,
    Config,
    InvalidArgument,
    PeerLost,
    R2cclError,
    Settings,
    TransportTimeout,
    init,
)
from r2ccl.clock import monotonic
from r2ccl.interop.rank_exchange import RankExchange, named_ranks

#: Period in seconds at which `run` looks for workers that have left, and the first timeout of
#: fetching a result.
_PERIOD_S = 0.5
#: Errors of a rank that usually follow from the error of another rank.
_CONSEQUENCES = (PeerLost, CommunicatorRevoked, TransportTimeout)


def run(
    client: Client,
    function: Callable[..., Any],
    *args: Any,
    workers: Sequence[str] | None = None,
    on_error: Literal["raise", "return"] = "raise",
    **settings: Unpack[Settings],
) -> dict[str, Any]:
    """Call ``function(communicator, *args)`` on several workers at once; return the results.

    Parameters
    ----------
    client : distributed.Client
        Synchronous client (not ``asynchronous=True``).
    function : callable
        The communicator is closed when the function returns, and aborted if it raises an exception.
    *args
        Further arguments, equal on all ranks. An argument that is a Future is replaced by its
        result; a Future within another argument is not.
    workers : sequence of str, optional
        Addresses of workers, in rank order. Each needs a free thread, in which `function` runs as a
        task. Default: all workers, sorted by address.
    on_error : {"raise", "return"}
        Handling of the exceptions of ranks, once all ranks have ended. "raise": raise one
        exception, preferably the cause of the others. "return": return each exception in place of
        the result of its rank.
    **settings
        Fields of `Config`; they take precedence over the ``R2CC_*`` variables of the workers.

    Returns
    -------
    dict of str to object
        Result of `function` by the address of the worker, in rank order.

    Raises
    ------
    InvalidArgument
        If a worker does not exist or is named twice, or if there are no workers.
    TransportTimeout
        If a rank does not start within ``R2CC_INIT_TIMEOUT_S`` after another rank, usually because
        its worker has no free thread.
    R2cclError
        If a worker leaves the cluster before its rank has ended.
    Exception
        Any exception that `function` or `r2ccl.init` raises on a rank.

    Notes
    -----
    If neither ``R2CC_SECRET`` nor ``R2CC_SECRET_FILE`` is set on the workers, rank 0 generates the
    secret of the job and passes it to the other ranks through the scheduler. The connections of
    Dask are not encrypted, unless the cluster uses TLS.
    """
    known = sorted(client.nthreads())
    chosen = known if workers is None else list(workers)
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(known):
        raise InvalidArgument(
            f"workers={workers!r}: name at least one worker of the cluster, and none twice; the "
            f"cluster has {', '.join(known) or 'no workers: start some'}"
        )
    group = f"r2ccl-{uuid.uuid4().hex}"
    futures = [
        client.submit(
            _run_rank, function, _masked(args), group, len(chosen), rank,
            _Masked(settings, f"settings: {', '.join(settings) or 'none'}"),
            workers=[address], allow_other_workers=False, pure=False, key=f"{group}-{rank}",
        )
        for rank, address in enumerate(chosen)
    ]  # fmt: skip
    try:
        outcomes = _outcomes(client, futures, chosen)
    finally:
        # Otherwise Dask may run a task again if its worker leaves later.
        client.cancel(futures)
    failed = [each for each in outcomes if isinstance(each, _Failure)]
    if failed and on_error == "raise":
        cause = _cause(failed)
        raise cause
    return {
        address: each.error if isinstance(each, _Failure) else each
        for address, each in zip(chosen, outcomes, strict=True)
    }


class _Failure:
    """Exception that ended a rank, in contrast to an exception that `function` returned."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Masked:
    """Argument of a task, hidden from `repr`, because Dask logs the arguments of a failed task.

    The secret of a job may be among the settings, or among the arguments of the function.
    """

    def __init__(self, value: Any, shown: str) -> None:
        self.value = value
        self._shown = shown

    def __repr__(self) -> str:
        return f"<{self._shown}>"


def _masked(args: Sequence[Any]) -> list[Any]:
    """Return the arguments, each in a `_Masked`, except futures, which Dask replaces by results."""
    return [
        each if isinstance(each, Future) else _Masked(each, f"argument: {type(each).__name__}")
        for each in args
    ]


def _outcomes(client: Client, futures: Sequence[Future], workers: Sequence[str]) -> list[Any]:
    """Wait until each rank has ended or its worker has left; return the results and failures."""
    outcomes: dict[int, Any] = {}
    fetch_s = _PERIOD_S
    while pending := [rank for rank in range(len(futures)) if rank not in outcomes]:
        with suppress(TimeoutError):
            wait([futures[rank] for rank in pending], timeout=_PERIOD_S)
        left = client.nthreads()
        for rank in pending:
            if futures[rank].done():
                try:
                    outcomes[rank] = _outcome(futures[rank], fetch_s)
                except TimeoutError:
                    # The result is large, or its worker has left and the task is pending again.
                    fetch_s *= 2
            elif workers[rank] not in left:
                # Dask keeps the task of this worker until a worker with its address joins.
                outcomes[rank] = _Failure(_lost(rank, workers[rank]))
    return [outcomes[rank] for rank in range(len(futures))]


def _outcome(future: Future, timeout_s: float) -> Any:
    if future.status == "finished":
        return future.result(timeout=timeout_s)
    return _Failure(future.exception(timeout=timeout_s))


def _lost(rank: int, worker: str) -> R2cclError:
    return R2cclError(
        f"rank {rank} (worker {worker}) left the Dask cluster without a result; look at the log of "
        "the worker"
    )


def _cause(failures: Sequence[_Failure]) -> BaseException:
    """Return the error that probably caused the other errors.

    This is the first error whose type is not in `_CONSEQUENCES`, or else the first error.
    """
    errors = [each.error for each in failures]
    return next((each for each in errors if not isinstance(each, _CONSEQUENCES)), errors[0])


def _run_rank(
    function: Callable[..., Any],
    args: Sequence[Any],
    group: str,
    nranks: int,
    rank: int,
    settings: _Masked,
) -> Any:
    """Connect to the other ranks, call `function` and return its result, as a task of a worker."""
    config = Config.from_env(os.environ, **settings.value)
    ranks = DaskRanks(group, nranks, rank, config.init_timeout_s)
    try:
        communicator = init(ranks, **settings.value)
    finally:
        ranks.forget()
    with communicator:
        return function(
            communicator, *(each.value if isinstance(each, _Masked) else each for each in args)
        )


class DaskRanks(RankExchange):
    """Exchange of values among ranks through the scheduler, for `r2ccl.init`.

    Parameters
    ----------
    group : str
        Name of this group of ranks, never used before.
    nranks, rank : int
    timeout_s : float
        Time limit of all exchanges together, in seconds, counted from the construction.
    """

    def __init__(self, group: str, nranks: int, rank: int, timeout_s: float) -> None:
        super().__init__(rank, nranks)
        self._client = get_client()
        self._group = group
        self._deadline_s = monotonic() + timeout_s
        self._used: list[tuple[Queue, Variable]] = []

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order; lists in the values become tuples.

        Raises
        ------
        TransportTimeout
            If a rank passes no value before the deadline.
        """
        name = f"{self._group}-{len(self._used)}"
        queue, result = Queue(name, client=self._client), Variable(name, client=self._client)
        self._used.append((queue, result))
        queue.put((self._rank, value))
        values: dict[int, Any] = {}
        try:
            if self._rank == 0:
                while len(values) < self._nranks:
                    values.update([queue.get(timeout=self._left_s())])
                result.set([values[rank] for rank in range(self._nranks)])
            return list(result.get(timeout=self._left_s()))
        except TimeoutError as exc:
            missing = [rank for rank in range(self._nranks) if rank not in values]
            which = named_ranks(missing) if values else "a rank (see the error of rank 0)"
            raise TransportTimeout(
                f"rank {self._rank}: {which} did not start within R2CC_INIT_TIMEOUT_S: check that "
                "each worker of Dask has a free thread",
                rank=self._rank,
                status="TIMEOUT",
            ) from exc

    def forget(self) -> None:
        """Release the queues of the exchanges and, on rank 0, remove the variables.

        The scheduler removes a queue once all ranks have released it. Call this once, after the
        last exchange, even if an exchange failed.
        """
        for queue, result in self._used:
            queue.close()
            if self._rank == 0:
                result.delete()

    def _left_s(self) -> float:
        return max(0.001, self._deadline_s - monotonic())


__all__ = ["run"]

"""Launch of n ranks on this machine: runs a function, or makes the environment for a script.

The launcher opens the listening socket of the rendezvous and rank 0 inherits it, so that no other
process can take the port. It also generates the secret, which it passes on in the environment only.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import secrets
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from r2ccl.bootstrap.auth import SECRET_NBYTES
from r2ccl.bootstrap.identity import LISTEN_FD_VARIABLE
from r2ccl.bootstrap.orphans import end_with
from r2ccl.errors import InvalidArgument, R2cclError, TransportTimeout

#: Time for the ranks to exit by themselves, and time for them to exit after a signal.
_FAILURE_GRACE_S = 5.0
_TERMINATION_GRACE_S = 2.0


class LocalJob:
    """Rendezvous socket and secret shared by n ranks on this machine; a context manager.

    Parameters
    ----------
    nranks : int

    Raises
    ------
    InvalidArgument
        If `nranks` is below 1.
    """

    def __init__(self, nranks: int) -> None:
        if nranks < 1:
            raise InvalidArgument(f"nranks={nranks}: at least 1 is needed")
        self.nranks = nranks
        self.listener = socket.create_server(("127.0.0.1", 0))
        self._secret = secrets.token_hex(SECRET_NBYTES)

    def __enter__(self) -> LocalJob:
        """Return the job itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Call `close`."""
        self.close()

    def close(self) -> None:
        """Close this process's copy of rank 0's socket, after all ranks have been started."""
        self.listener.close()

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment variables of `rank`, except `LISTEN_FD_VARIABLE`."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.nranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.nranks),
            "MASTER_ADDR": "127.0.0.1",
            "R2CC_PORT": str(self.listener.getsockname()[1]),
            "R2CC_SECRET": self._secret,
        }


def launch(
    fn: Callable[[], Any],
    nranks: int,
    *,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `fn` in `nranks` new processes on this machine and return their results.

    Parameters
    ----------
    fn : callable
        Function without arguments; `functools.partial` passes arguments. It is pickled by
        reference, so it must be importable, or defined in a main script that calls `launch` below
        ``if __name__ == "__main__"``. `r2ccl.init` finds rank and nranks in the environment.
    nranks : int
    timeout_s : float, optional
        Longest time to wait for the results, in seconds; by default unlimited.
    env : mapping, optional
        Additional environment variables for every rank, set before `fn` is imported (the main
        script is imported earlier).

    Returns
    -------
    list
        Results of `fn`, by rank.

    Raises
    ------
    Exception
        If a rank raises: its exception, with the remote traceback as the cause.
    R2cclError
        If a rank exits without a result or an exception.
    TransportTimeout
        If not all ranks return within `timeout_s`.
    InvalidArgument
        If `nranks` is below 1, or `fn` cannot be pickled.
    """
    try:
        pickled = pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as exc:
        raise InvalidArgument(f"{fn!r} cannot be sent to another process: {exc}") from exc
    with LocalJob(nranks) as job:
        ranks = [_start(job, rank, pickled, env or {}) for rank in range(nranks)]
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    try:
        return _collect(ranks, deadline, timeout_s)
    finally:
        grace_s = _FAILURE_GRACE_S if time.monotonic() < deadline else 0.0
        _end([process for process, _ in ranks], grace_s)
        for _, results in ranks:
            results.close()


_Rank = tuple[SpawnProcess, Connection]


def _start(job: LocalJob, rank: int, pickled: bytes, env: Mapping[str, str]) -> _Rank:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    listener = job.listener if rank == 0 else None
    process = context.Process(
        target=_run_rank,
        args=({**env, **job.environment(rank)}, listener, pickled, theirs, os.getpid()),
        name=f"r2ccl-rank-{rank}",
    )
    process.start()
    theirs.close()
    return process, ours


def _run_rank(
    env: dict[str, str],
    listener: socket.socket | None,
    pickled: bytes,
    results: Connection,
    parent: int,
) -> None:
    end_with(parent)
    os.environ.update(env)
    if listener is not None:
        os.environ[LISTEN_FD_VARIABLE] = str(listener.detach())
    try:
        outcome = (True, pickle.loads(pickled)(), "")
        message = pickle.dumps(outcome)
    except BaseException as exc:
        message = _pickle_failure(exc)
    results.send_bytes(message)
    results.close()


def _pickle_failure(exc: BaseException) -> bytes:
    text = "".join(traceback.format_exception(exc))
    try:
        message = pickle.dumps((False, exc, text))
        pickle.loads(message)  # an exception with required arguments may fail only here
    except Exception:
        return pickle.dumps((False, R2cclError(f"{type(exc).__name__}: {exc}"), text))
    return message


class _RemoteTraceback(Exception):
    """Text of a child's traceback, shown as the cause of its exception."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def _collect(ranks: Sequence[_Rank], deadline: float, timeout_s: float | None) -> list[Any]:
    outcomes: dict[int, Any] = {}
    waiting = {results: rank for rank, (_, results) in enumerate(ranks)}
    while waiting:
        left_s = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(list(waiting), left_s)
        if not ready:
            raise TransportTimeout(
                f"launch: ranks {sorted(waiting.values())} did not return within "
                f"{timeout_s:g} s and were terminated"
            )
        for results in ready:
            assert isinstance(results, Connection)
            rank = waiting.pop(results)
            outcomes[rank] = _outcome(rank, *ranks[rank])
    return [outcomes[rank] for rank in range(len(ranks))]


def _outcome(rank: int, process: SpawnProcess, results: Connection) -> Any:
    try:
        is_good, value, text = pickle.loads(results.recv_bytes())
    except EOFError:
        process.join(_TERMINATION_GRACE_S)
        raise R2cclError(
            f"launch: rank {rank} (pid {process.pid}) exited without a result: "
            f"{describe_exit(process.exitcode)}; look at its output"
        ) from None
    if not is_good:
        raise value from _RemoteTraceback(f"rank {rank}:\n{text}")
    return value


def describe_exit(status: int | None) -> str:
    """Describe an exit status: ``exit status 1``, or ``signal SIGKILL`` for -9."""
    if status is None:
        return "still running"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
        return f"signal {-status}"
    return f"exit status {status}"


def _end(processes: Sequence[SpawnProcess], grace_s: float) -> None:
    """Let processes exit for `grace_s`, as they see the lost peer; then terminate or kill them."""
    _join_all(processes, grace_s)
    for stop in (SpawnProcess.terminate, SpawnProcess.kill):
        alive = [process for process in processes if process.is_alive()]
        for process in alive:
            stop(process)
        _join_all(alive, _TERMINATION_GRACE_S)


def _join_all(processes: Sequence[SpawnProcess], grace_s: float) -> None:
    give_up_at = time.monotonic() + grace_s
    for process in processes:
        process.join(max(0.0, give_up_at - time.monotonic()))


__all__ = ["LocalJob", "describe_exit", "launch"]

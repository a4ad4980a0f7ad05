"""Launcher of ranks on this machine: runs a function in n ranks, or makes environments for scripts.

The launcher opens the listening socket of the rendezvous and rank 0 inherits the socket, so that no
other process can take the port. The launcher also generates the secret and passes it to the ranks
in their environment only.
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
import subprocess
import time
from collections.abc import Callable, Mapping
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from r2ccl.bootstrap.auth import SECRET_NBYTES
from r2ccl.bootstrap.rank_server import RankRequest, command
from r2ccl.errors import InvalidArgument, R2cclError, TransportTimeout

#: Seconds that the ranks have to exit by themselves after `launch` has the results or an error.
_FAILURE_GRACE_S = 5.0
#: Seconds that a process has to exit after it was signalled or its pipe was closed.
_TERMINATION_GRACE_S = 2.0


class JobShare(msgspec.Struct, frozen=True):
    """Ranks of a job that run on one host, and what they need to find the other ranks.

    The ranks are ``first`` to ``first + count - 1`` of ``nranks``. Rank 0 listens at ``address``
    and ``port``. ``secret`` is in hexadecimal digits.
    """

    nranks: int
    first: int
    count: int
    address: str
    port: int
    secret: str

    def __repr__(self) -> str:
        """Return a text without the secret."""
        return f"<ranks {self.first} to {self.first + self.count - 1} of {self.nranks}>"

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment variables of `rank`, which contain the secret.

        Rank 0 also needs `LISTEN_FD_VARIABLE`: the number of the descriptor of the rendezvous
        socket in rank 0. The process that starts rank 0 must set it.
        """
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.nranks),
            "LOCAL_RANK": str(rank - self.first),
            "LOCAL_WORLD_SIZE": str(self.count),
            "MASTER_ADDR": self.address,
            "R2CC_PORT": str(self.port),
            "R2CC_SECRET": self.secret,
        }


class LocalJob:
    """Rendezvous socket and secret shared by n ranks on this machine; a context manager.

    Parameters
    ----------
    nranks : int

    Raises
    ------
    InvalidArgument
        If `nranks` is below 1.

    Attributes
    ----------
    share : JobShare
        All ranks of the job.
    """

    def __init__(self, nranks: int) -> None:
        if nranks < 1:
            raise InvalidArgument(f"nranks={nranks}: at least 1 is needed")
        self.nranks = nranks
        self.listener = socket.create_server(("127.0.0.1", 0))
        port = self.listener.getsockname()[1]
        secret = secrets.token_hex(SECRET_NBYTES)
        self.share = JobShare(nranks, 0, nranks, "127.0.0.1", port, secret)

    def __enter__(self) -> LocalJob:
        """Return the job itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Call `close`."""
        self.close()

    def close(self) -> None:
        """Close the rendezvous socket in this process; call it when all ranks were started."""
        self.listener.close()

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment variables of `rank`; see `JobShare.environment`."""
        return self.share.environment(rank)


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
        Longest time to wait for the results, in seconds. Default: no limit.
    env : mapping, optional
        Additional environment variables for every rank, set before the rank imports the main
        script and `fn`.

    Returns
    -------
    list
        Results of `fn`, by rank; it must be possible to pickle them.

    Raises
    ------
    Exception
        If a rank raises: its exception, with the remote traceback as the cause.
    R2cclError
        If a rank exits without a result or an exception, raises an exception that cannot be
        pickled, or the process that forks the ranks exits early.
    TransportTimeout
        If not all ranks return within `timeout_s`.
    InvalidArgument
        If `nranks` is below 1, or `fn` cannot be pickled.
    """
    try:
        pickled = pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as exc:
        raise InvalidArgument(
            f"launch: {fn!r} cannot be sent to another process ({exc}): define the function at the "
            "top level of a module, and pass only arguments that can be pickled"
        ) from exc
    with LocalJob(nranks) as job:
        started = _Ranks(job, pickled, env or {})
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    try:
        return _collect(started, deadline, timeout_s)
    finally:
        started.end(_FAILURE_GRACE_S if time.monotonic() < deadline else 0.0)


class _Rank:
    """Process of one rank, a child of the rank server."""

    def __init__(self, pid: int, results: Connection) -> None:
        self.pid = pid
        self.results = results
        #: Exit status, ``-n`` after signal n; None while the process runs.
        self.exit_status: int | None = None
        self._descriptor = os.pidfd_open(pid)

    def send_signal(self, signum: int) -> None:
        """Send a signal unless the process has exited."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signum)

    def close(self) -> None:
        os.close(self._descriptor)
        self.results.close()


class _Ranks:
    """Processes of a job, forked by a rank server (`r2ccl.bootstrap.rank_server`).

    Parameters
    ----------
    job : LocalJob
    function : bytes
        Pickled function that each rank runs.
    env : mapping
        Additional environment variables of all ranks.
    """

    def __init__(self, job: LocalJob, function: bytes, env: Mapping[str, str]) -> None:
        # This raises in a rank that is importing its main script, so that a script that calls
        # launch() outside of `if __name__ == "__main__"` does not start ranks recursively.
        preparation = spawn.get_preparation_data("r2ccl-rank")
        # The key is an AuthenticationString, which can be pickled only while multiprocessing starts
        # a process; plain bytes can always be pickled.
        preparation["authkey"] = bytes(preparation["authkey"])
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(job.nranks)]
        self._server, theirs = multiprocessing.Pipe()
        passed = [theirs.fileno(), job.listener.fileno(), *(end.fileno() for _, end in pipes)]
        self._process = subprocess.Popen(
            command(theirs.fileno()),
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            pass_fds=passed,
        )
        request = RankRequest(
            environments=[{**env, **job.environment(rank)} for rank in range(job.nranks)],
            results=[end.fileno() for _, end in pipes],
            listener=job.listener.fileno(),
            preparation=preparation,
            function=function,
        )
        theirs.close()
        for _, end in pipes:
            end.close()
        self.ranks: list[_Rank] = []
        try:
            self._server.send_bytes(pickle.dumps(request))
            pids = self._server.recv()
        except (EOFError, OSError) as exc:
            self.close()
            raise R2cclError(
                "launch: the process that forks the ranks exited early "
                f"({describe_exit(self._process.returncode)}); look at its output"
            ) from exc
        self.ranks = [_Rank(pid, end) for pid, (end, _) in zip(pids, pipes, strict=True)]
        self._server.send(None)

    def join(self, timeout_s: float, rank: int | None = None) -> None:
        """Wait until `rank` has exited, or every rank if it is None; at most `timeout_s` seconds.

        Also returns if the server was killed.
        """
        until_s = time.monotonic() + timeout_s
        awaited = self.ranks if rank is None else [self.ranks[rank]]
        while any(each.exit_status is None for each in awaited):
            try:
                if not self._server.poll(max(0.0, until_s - time.monotonic())):
                    return
                ended, status = self._server.recv()
            except (EOFError, OSError):  # the server was killed; the kernel then kills its ranks
                return
            self.ranks[ended].exit_status = status

    def end(self, grace_s: float) -> None:
        """Wait at most `grace_s` seconds for the ranks to exit, then end the others by signals.

        They get SIGTERM and, after `_TERMINATION_GRACE_S`, SIGKILL. The grace period lets ranks
        report the loss of a peer after a failure.
        """
        self.join(grace_s)
        for signum in (signal.SIGTERM, signal.SIGKILL):
            alive = [each for each in self.ranks if each.exit_status is None]
            for each in alive:
                each.send_signal(signum)
            if alive:
                self.join(_TERMINATION_GRACE_S)
        self.close()

    def close(self) -> None:
        """Close all descriptors and wait for the server; kill it if it does not exit.

        The kernel kills the remaining ranks when the server exits.
        """
        self._server.close()
        for each in self.ranks:
            each.close()
        try:
            self._process.wait(_TERMINATION_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _RemoteTraceback(Exception):
    """Text of a child's traceback, shown as the cause of its exception."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def _collect(started: _Ranks, deadline: float, timeout_s: float | None) -> list[Any]:
    outcomes: dict[int, Any] = {}
    waiting = {each.results: rank for rank, each in enumerate(started.ranks)}
    while waiting:
        left_s = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(list(waiting), left_s)
        if not ready:
            raise TransportTimeout(
                f"launch: ranks {sorted(waiting.values())} did not return within {timeout_s:g} s "
                "and were terminated; look at their output, or raise timeout_s"
            )
        for results in ready:
            assert isinstance(results, Connection)
            rank = waiting.pop(results)
            outcomes[rank] = _outcome(rank, started)
    return [outcomes[rank] for rank in range(len(started.ranks))]


def _outcome(rank: int, started: _Ranks) -> Any:
    process = started.ranks[rank]
    try:
        is_good, value, text = pickle.loads(process.results.recv_bytes())
    except EOFError:
        started.join(_TERMINATION_GRACE_S, rank)
        raise R2cclError(
            f"launch: rank {rank} (pid {process.pid}) exited without a result: "
            f"{describe_exit(process.exit_status)}; look at its output"
        ) from None
    if not is_good:
        raise value from _RemoteTraceback(f"rank {rank}:\n{text}")
    return value


def describe_exit(status: int | None) -> str:
    """Return an exit status as text: ``exit status 1``, or ``signal SIGKILL`` for -9.

    None means that the process is still running.
    """
    if status is None:
        return "still running"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
        return f"signal {-status}"
    return f"exit status {status}"


__all__ = ["JobShare", "LocalJob", "describe_exit", "launch"]

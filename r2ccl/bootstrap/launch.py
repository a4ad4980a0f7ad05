"""Launcher of ranks on this machine: runs a function in n ranks, or makes environments for scripts.

The launcher opens the listening socket of the rendezvous and rank 0 inherits the socket, so that no
other process can take the port. The launcher also generates the secret, which ranks find in their
environment.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import operator
import os
import pickle
import secrets
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import msgspec

from r2ccl.bootstrap import pickling
from r2ccl.bootstrap.auth import SECRET_NBYTES
from r2ccl.bootstrap.master_port import master_port, reserve_port
from r2ccl.bootstrap.output import RankOutput, is_forwarded
from r2ccl.bootstrap.rank_server import RankOutcome, RankRequest, command
from r2ccl.errors import (
    CommunicatorRevoked,
    InvalidArgument,
    R2cclError,
    TransportTimeout,
    format_ranks,
)

_Result = TypeVar("_Result")

#: Maximum number of ranks on one machine, about ten times the cores of the largest ones.
_MAX_LOCAL_RANKS = 16_384
#: Seconds that the ranks have to exit by themselves after `launch` has the results, or an error
#: other than its timeout.
_FAILURE_GRACE_S = 5.0
#: Seconds in which another exception of a rank is preferred to a `CommunicatorRevoked`.
_CAUSE_GRACE_S = 1.0
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

        A process that passes the open rendezvous socket to rank 0 must also set
        `r2ccl.bootstrap.identity.LISTEN_FD_VARIABLE` to the number of the descriptor in rank 0.
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

    If this process has closed a standard stream, /dev/null is opened in its place until `close`.
    Without this, a socket or pipe of the job would get the stream's descriptor. Ranks would then
    write their output to this socket or pipe, or it would be replaced by /dev/null in a rank.

    Parameters
    ----------
    nranks : int

    Raises
    ------
    InvalidArgument
        If `nranks` is not an integer from 1 to 16,384.
    OSError
        If this process cannot open a socket.

    Attributes
    ----------
    listener : socket.socket
        Rendezvous socket, which rank 0 must inherit.
    share : JobShare
        All ranks of the job.
    """

    def __init__(self, nranks: int) -> None:
        try:
            self.nranks = operator.index(nranks)
        except TypeError:
            self.nranks = 0
        if not 1 <= self.nranks <= _MAX_LOCAL_RANKS:
            raise InvalidArgument(
                f"nranks={nranks!r}: an integer from 1 to {_MAX_LOCAL_RANKS:,} is needed"
            )
        with contextlib.ExitStack() as opened:
            _open_standard_streams(opened)
            self.listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            self._opened = opened.pop_all()
        port = self.listener.getsockname()[1]
        secret = secrets.token_hex(SECRET_NBYTES)
        self.share = JobShare(self.nranks, 0, self.nranks, "127.0.0.1", port, secret)

    def __enter__(self) -> LocalJob:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the rendezvous socket in this process; call it when all ranks are started.

        Also close the descriptors that were opened in place of closed standard streams.
        """
        self._opened.close()

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment variables of `rank`; see `JobShare.environment`."""
        return self.share.environment(rank)


def launch(
    fn: Callable[[], _Result],
    nranks: int,
    *,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[_Result]:
    """Run `fn` in `nranks` new processes on this machine and return their results.

    Parameters
    ----------
    fn : callable
        Function without arguments; `functools.partial` passes arguments. A function of a module or
        of the main script is sent by reference; a main script must call `launch` below
        ``if __name__ == "__main__"``. Lambdas, nested functions, and functions of a notebook, an
        interactive session or ``python -c`` are sent by value, with the global variables that they
        use. `r2ccl.init` finds rank and nranks in the environment.
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
        If ranks raise, or cannot import the main script or `fn`: the first exception that arrives,
        with the remote traceback as its cause. A `CommunicatorRevoked`, which another rank may have
        caused, gives way to any other exception that arrives within 1 s.
    R2cclError
        If a rank exits without a result or an exception, calls ``sys.exit``, raises an exception
        that cannot be pickled, or the process that forks the ranks exits early.
    TransportTimeout
        If not all ranks return within `timeout_s`.
    InvalidArgument
        If `nranks` is not an integer from 1 to 16,384, `timeout_s` is not a number, or `env` has a
        name or a value that no variable can have; if `fn` is not callable or cannot be pickled, or
        a result cannot be pickled and unpickled; if the working directory was removed; or if the
        main script calls `launch` while another process imports it.
    OSError
        If this process cannot open sockets and pipes, or start another process.
    KeyboardInterrupt
        On Ctrl-C, which also interrupts every rank.

    Notes
    -----
    Ranks write to the standard output and standard error of this process. If ``sys.stdout`` or
    ``sys.stderr`` is another stream, as in a notebook, the lines of the ranks appear in
    ``sys.stdout`` and ``sys.stderr`` while `launch` waits. If there are several ranks, each of
    these lines begins with the number of its rank, as in ``[2]``. No rank outlives this process.
    """
    limit_s = parse_timeout(timeout_s, "launch")  # raises before any rank runs
    with LocalJob(nranks) as job:
        started = RankProcesses(job, env or {}, fn, "launch")
    deadline = time.monotonic() + limit_s
    try:
        return _collect(started, deadline, limit_s)
    except KeyboardInterrupt:
        started.interrupt()
        raise
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


class RankProcesses:
    """Processes of a job, forked by a rank server (`r2ccl.bootstrap.rank_server`).

    Parameters
    ----------
    job : LocalJob
    env : mapping
        Additional environment variables of all ranks.
    function : callable
        Function that each rank runs; see `RankRequest`.
    who : str
        Name of the public function that starts the ranks, for messages.
    is_serving : bool
        See `RankRequest`.

    Raises
    ------
    InvalidArgument
        If `function` is not callable or cannot be pickled, or `env` has a name or a value that no
        variable can have, or the working directory was removed. Also in a child process that is
        importing the main script: a script without ``if __name__ == "__main__"`` would start ranks
        recursively.
    R2cclError
        If the server exits early.
    OSError
        If this process cannot open pipes, or start the server.

    Attributes
    ----------
    ranks : list
        Process of each rank; its ``results`` is the `Connection` on which its outcomes arrive.
    is_by_value : bool
        True if functions of the main module must be sent by value.
    """

    def __init__(
        self,
        job: LocalJob,
        env: Mapping[str, str],
        function: Callable[..., Any],
        who: str,
        *,
        is_serving: bool = False,
    ) -> None:
        _check_environment(env, who)
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise InvalidArgument(
                f"{who}: the main script starts ranks while another process imports it: put this "
                "call, and all other code that must run only once, in the block "
                "`if __name__ == '__main__':`"
            )
        try:
            preparation = spawn.get_preparation_data("r2ccl-rank")
        except FileNotFoundError as exc:  # of os.getcwd
            raise InvalidArgument(
                f"{who}: the working directory of this process was removed: change to another one"
            ) from exc
        # The key is an AuthenticationString, which can be pickled only while multiprocessing starts
        # a process; plain bytes can always be pickled.
        preparation["authkey"] = bytes(preparation["authkey"])
        self._who = who
        self.is_by_value = not pickling.can_import_main(preparation)
        pickled = pickling.dumps_call(function, who, is_by_value=self.is_by_value)
        self._output: RankOutput | None = None
        with contextlib.ExitStack() as opened, contextlib.ExitStack() as theirs:
            held = opened.enter_context(reserve_port())
            port = master_port(held.getsockname()[1], os.environ)
            if is_forwarded():
                self._output = RankOutput(job.nranks)
                opened.callback(self._output.close)
                theirs.callback(self._output.close_theirs)
            pipes = [_pipe(opened, theirs) for _ in range(job.nranks)]
            self._server, server = _pipe(opened, theirs)
            request = RankRequest(
                environments=[
                    {**port, **env, **job.environment(rank)} for rank in range(job.nranks)
                ],
                results=[end.fileno() for _, end in pipes],
                listener=job.listener.fileno(),
                preparation=preparation,
                function=pickled,
                is_serving=is_serving,
                outputs=self._output.theirs if self._output else [],
            )
            passed = [request.listener, *request.results, *chain(*request.outputs)]
            self._process = subprocess.Popen(
                command(server.fileno()),
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                pass_fds=[server.fileno(), *passed],
                process_group=0,  # else Ctrl-C in a terminal would reach the ranks twice
            )
            opened.callback(self._end_server)
            theirs.close()
            self.ranks: list[_Rank] = []
            try:
                self._server.send_bytes(pickle.dumps(request))
                for pid, (end, _) in zip(self._server.recv(), pipes, strict=True):
                    self.ranks.append(_Rank(pid, end))
                    opened.callback(self.ranks[-1].close)
                self._server.send_bytes(b"opened")
            except (EOFError, OSError) as exc:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_TERMINATION_GRACE_S)  # it may be printing why
                opened.close()
                raise R2cclError(
                    f"{who}: the process that forks the ranks exited early "
                    f"({describe_exit(self._process.returncode)}); look at its output"
                ) from exc
            self._opened = opened.pop_all()

    def wait(self, connections: Iterable[Connection], until_s: float) -> list[Connection]:
        """Wait until one of `connections` is readable; meanwhile forward the output of the ranks.

        Parameters
        ----------
        connections : iterable of Connection
        until_s : float
            Deadline, a time of ``time.monotonic``; infinity if there is none.

        Returns
        -------
        list of Connection
            Readable connections; empty if none is readable before the deadline, even if a rank
            writes continuously.
        """
        while True:
            piped = self._output.descriptors() if self._output else ()
            left_s = None if until_s == float("inf") else max(0.0, until_s - time.monotonic())
            ready = multiprocessing.connection.wait([*connections, *piped], left_s)
            found = [each for each in ready if isinstance(each, Connection)]
            for each in ready:
                if isinstance(each, int) and self._output:
                    self._output.forward(each)
            if found or not ready or time.monotonic() >= until_s:
                return found

    def outcome(self, rank: int) -> RankOutcome:
        """Receive and return the outcome of the function in `rank`.

        If the function raised, ``error`` has the remote traceback as its cause. If the rank exited
        without an outcome, or its function called ``sys.exit``, ``error`` is an `R2cclError`; if
        the outcome cannot be unpickled, it is an `InvalidArgument`.
        """
        process = self.ranks[rank]
        try:
            message = process.results.recv_bytes()
        except (EOFError, OSError):  # an OSError if the rank was killed while it sent
            self.join(_TERMINATION_GRACE_S, rank)
            why = describe_exit(process.exit_status)
            error = R2cclError(
                f"{self._who}: rank {rank} (pid {process.pid}) sent no result: {why}; "
                "look at its output"
            )
            return RankOutcome(error=error, is_exit=True)
        found = self._loads(message, rank)
        if isinstance(found.error, SystemExit):  # would end the launcher, perhaps with status 0
            error = R2cclError(
                f"{self._who}: rank {rank} called sys.exit({found.error.code!r}): return instead"
            )
            found = found._replace(error=error)
        if found.error is not None:
            found.error.__cause__ = _RemoteTraceback(f"rank {rank}:\n{found.text}")
        return found

    def _loads(self, message: bytes, rank: int) -> RankOutcome:
        try:
            found: RankOutcome = pickle.loads(message)
        except MemoryError:
            raise
        except Exception as exc:  # objects raise what they like when they are made again
            error = InvalidArgument(
                f"{self._who}: the result of rank {rank} was pickled but cannot be unpickled "
                f"({type(exc).__name__}: {exc}): return only values that can be pickled"
            )
            return RankOutcome(error=error, text="".join(traceback.format_exception(exc)))
        return found

    def flush_output(self) -> None:
        """Write out the forwarded output that the ranks have written so far."""
        if self._output:
            self._output.flush()

    def interrupt(self, ranks: Iterable[int] | None = None) -> None:
        """Send SIGINT to `ranks`; by default to all."""
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            self.ranks[rank].send_signal(signal.SIGINT)

    def join(self, timeout_s: float, rank: int | None = None) -> None:
        """Wait at most `timeout_s` seconds until `rank` has exited, or all ranks if `rank` is None.

        Also returns if the server was killed.
        """
        until_s = time.monotonic() + timeout_s
        awaited = self.ranks if rank is None else [self.ranks[rank]]
        while any(each.exit_status is None for each in awaited):
            if not self.wait([self._server], until_s):
                return
            try:
                ended, status = self._server.recv()
            except (EOFError, OSError):  # the server was killed; the kernel then kills its ranks
                return
            self.ranks[ended].exit_status = status

    def end(self, grace_s: float) -> None:
        """Wait at most `grace_s` seconds for the ranks to exit, then end the others by signals.

        The others get SIGTERM and, after `_TERMINATION_GRACE_S`, SIGKILL. The grace period lets
        ranks report the loss of a peer after a failure. If Ctrl-C interrupts this method, the ranks
        get SIGKILL.
        """
        try:
            self.join(grace_s)
            for signum in (signal.SIGTERM, signal.SIGKILL):
                alive = [each for each in self.ranks if each.exit_status is None]
                for each in alive:
                    each.send_signal(signum)
                if alive:
                    self.join(_TERMINATION_GRACE_S)
            self.flush_output()
            self._server.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERMINATION_GRACE_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the server and its ranks, unless they have exited; free all resources."""
        self._opened.close()

    def _end_server(self) -> None:
        self._process.kill()
        self._process.wait()


def _open_standard_streams(opened: contextlib.ExitStack) -> None:
    """Open /dev/null, which children inherit, for each closed standard stream of this process."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed, so the kernel gives out this number next
            placeholder = os.open(os.devnull, os.O_RDWR)
            opened.callback(os.close, placeholder)
            os.set_inheritable(placeholder, True)


def _pipe(
    mine: contextlib.ExitStack, theirs: contextlib.ExitStack
) -> tuple[Connection, Connection]:
    """Return the two ends of a pipe: `mine` closes the first end, `theirs` the second."""
    first, second = multiprocessing.Pipe()
    return mine.enter_context(first), theirs.enter_context(second)


class _RemoteTraceback(Exception):
    """Text of a child's traceback, shown as the cause of its exception."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def _collect(started: RankProcesses, deadline: float, timeout_s: float | None) -> list[Any]:
    values: dict[int, Any] = {}
    waiting = {each.results: rank for rank, each in enumerate(started.ranks)}
    revoked: CommunicatorRevoked | None = None
    while waiting:
        ready = started.wait(waiting, deadline)
        if not ready and revoked is not None:
            break
        if not ready:
            raise TransportTimeout(
                f"launch: ranks {format_ranks(waiting.values())} did not return within "
                f"{timeout_s:g} s and were terminated; look at their output, or raise timeout_s"
            )
        for results in ready:
            rank = waiting.pop(results)
            outcome = started.outcome(rank)
            if isinstance(outcome.error, CommunicatorRevoked):
                # The rank that ended the communicator may still raise the exception that made it.
                revoked = revoked or outcome.error
                deadline = min(deadline, time.monotonic() + _CAUSE_GRACE_S)
            elif outcome.error is not None:
                raise outcome.error
            else:
                values[rank] = outcome.value
    if revoked is not None:
        raise revoked
    return [values[rank] for rank in range(len(started.ranks))]


def parse_timeout(timeout_s: Any, who: str) -> float:
    """Return a user's timeout in seconds: infinity for None, 0 for a negative timeout.

    Raises
    ------
    InvalidArgument
        If `timeout_s` is not a number, or is NaN; the message begins with `who`.
    """
    if timeout_s is None:
        return float("inf")
    try:
        limit_s = float(timeout_s)
    except (TypeError, ValueError, OverflowError):
        limit_s = float("nan")
    if limit_s != limit_s:
        raise InvalidArgument(
            f"{who}: timeout_s={timeout_s!r}: allowed is a number of seconds, or None"
        )
    return max(0.0, limit_s)


def _check_environment(env: Mapping[str, str], who: str) -> None:
    if not isinstance(env, Mapping):
        raise InvalidArgument(f"{who}: env={env!r}: pass a mapping of names to values")
    for name, value in env.items():
        is_text = isinstance(name, str) and isinstance(value, str)
        if not is_text or not name or "=" in name or "\0" in name + value:
            raise InvalidArgument(
                f"{who}: env has a wrong variable {name!r}: names and values must be of type str; "
                "a name must not be empty or contain =, and neither may contain a null character"
            )


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


__all__ = ["JobShare", "LocalJob", "RankProcesses", "describe_exit", "launch", "parse_timeout"]

"""Server process of `launch` and `launch_pool`: imports the library once, then forks the ranks.

Importing NumPy and the library in every rank would take far longer than a fork does, since the
ranks of one machine share its cores. The server starts no threads except NumPy's and imports no
user code: each rank imports the main script and the function after the fork.

Invariant: the server and its ranks end when the launcher ends. The server watches the process of
the launcher, since `end_with` would end the server with the thread that started it.
"""

from __future__ import annotations

import gc
import importlib
import io
import multiprocessing
import os
import pickle
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import msgspec

from r2ccl.bootstrap.identity import LISTEN_FD_VARIABLE
from r2ccl.bootstrap.orphans import end_with
from r2ccl.bootstrap.pickling import dumps
from r2ccl.errors import InvalidArgument, R2cclError

#: Modules whose imports include all that every rank needs; the server imports them before it forks.
_PRELOADED = ("numpy", "psutil", "r2ccl.factory", "r2ccl.bootstrap.startup")
#: Modules whose compiled code the server loads before it forks, by the environment variable that
#: prevents this if it is 0.
_COMPILED = {"R2CC_SHM": "r2ccl.shm.group", "R2CC_COMPILED": "r2ccl.runtime.compiled.call"}


class RankRequest(msgspec.Struct):
    """Request of the launcher to the server: the ranks to fork, and the function to run in them.

    Parameters
    ----------
    environments : sequence of mapping
        Environment variables of each rank, in addition to those of the server.
    results : sequence of int
        File descriptor, per rank, to which the rank writes its result or exception.
    listener : int
        File descriptor of the listening socket of the rendezvous, which rank 0 inherits.
    preparation : mapping
        Result of `multiprocessing.spawn.get_preparation_data`: main script, ``sys.path``,
        ``sys.argv`` and working directory.
    function : bytes
        Pickled function that each rank calls without arguments, or with the `Connection` of its
        results if `is_serving`.
    is_serving : bool
        True if the function answers calls that arrive on the `Connection`.
    outputs : sequence of (int, int)
        Descriptors of each rank's standard output and standard error; if empty, the ranks use those
        of the server.
    """

    environments: Sequence[Mapping[str, str]]
    results: Sequence[int]
    listener: int
    preparation: dict[str, Any]
    function: bytes
    is_serving: bool = False
    outputs: Sequence[Sequence[int]] = ()


class RankOutcome(NamedTuple):
    """Message in which a rank sends the result or the exception of a function.

    Attributes
    ----------
    value : object
        The result; None after an exception.
    error : BaseException or None
        The exception; None if the function returned.
    text : str
        Traceback of the exception.
    is_exit : bool
        True if the rank exited without sending an outcome; the launcher then made `error`.
    """

    value: Any = None
    error: BaseException | None = None
    text: str = ""
    is_exit: bool = False


def command(descriptor: int) -> list[str]:
    """Return the command line of a server that reads its request from `descriptor`."""
    # sys.path is copied: the launcher may have added the directory of the library at run time.
    start = f"import sys; sys.path[:] = {sys.path!r}; import r2ccl.bootstrap.rank_server as it"
    return [sys.executable, "-c", f"{start}; it.serve({descriptor}, {os.getpid()})"]


def serve(descriptor: int, launcher: int) -> None:
    """Fork the ranks, and send their process ids and then their exit statuses to the launcher.

    Returns in the server when all ranks have exited, and in each rank when its function has
    returned or raised.

    Parameters
    ----------
    descriptor : int
        Connection to the launcher, which sends a `RankRequest`. Owned.
    launcher : int
        Process id of the launcher; when it ends, the server exits and the kernel kills its ranks.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher forwards Ctrl-C to the ranks
    life = _open_launcher(launcher)
    with Connection(descriptor) as connection:
        request = pickle.loads(_receive(connection, life))
        for name in _PRELOADED:
            importlib.import_module(name)
        environment = {**os.environ, **request.environments[0]}
        for variable, name in _COMPILED.items():
            if environment.get(variable, "auto") != "0":
                _preload(name)
        # Otherwise each rank's garbage collector writes to all objects, and so copies their pages.
        gc.freeze()
        # The launcher may have ended while this process loaded the code, for up to a minute.
        if wait([life], 0):
            raise SystemExit(1)
        server = os.getpid()
        ranks: dict[int, int] = {}
        for rank in range(len(request.results)):
            pid = _fork()
            if pid == 0:
                connection.close()
                os.close(life)
                _run_rank(rank, request, server)
                return
            ranks[rank] = pid
        for held in (*request.results, request.listener, *chain(*request.outputs)):
            os.close(held)
        _send(connection, list(ranks.values()))
        # Waiting for a rank frees its process id, so first let the launcher open its descriptor.
        _receive(connection, life)
        for rank, status in _exits(ranks, life):
            _send(connection, (rank, status))


def _open_launcher(pid: int) -> int:
    """Return a descriptor that is readable once the launcher has ended; exit if it has already."""
    with suppress(ProcessLookupError):
        life = os.pidfd_open(pid)
        if os.getppid() == pid:  # else another process may have got the process id
            return life
    raise SystemExit(1)


def _receive(connection: Connection, life: int) -> bytes:
    """Return the next message of the launcher; exit if the launcher ends first."""
    if life in wait([connection, life]):
        raise SystemExit(1)
    return connection.recv_bytes()


def _send(connection: Connection, message: Any) -> None:
    """Send a message to the launcher; exit if the launcher has ended."""
    try:
        connection.send(message)
    except BrokenPipeError:
        raise SystemExit(1) from None


def _exits(ranks: Mapping[int, int], life: int) -> Iterator[tuple[int, int]]:
    """Yield (rank, exit status) as ranks exit, until all of them or the launcher have ended."""
    watched = {os.pidfd_open(pid): rank for rank, pid in ranks.items()}
    poller = select.poll()
    for descriptor in (life, *watched):
        poller.register(descriptor, select.POLLIN)
    while watched:
        for descriptor, _ in poller.poll():
            if descriptor == life:
                return
            rank = watched.pop(descriptor)
            poller.unregister(descriptor)
            os.close(descriptor)
            _, status = os.waitpid(ranks[rank], 0)
            yield rank, os.waitstatus_to_exitcode(status)


def _preload(name: str) -> None:
    """Load the compiled code of a module; on failure do nothing: each rank reports the error."""
    with suppress(ImportError, OSError, R2cclError):
        module = importlib.import_module(name)
        module.announce_compilation()
        module.preload()


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns about a fork with several threads. The only other threads are NumPy's, which
        # handle forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _run_rank(rank: int, request: RankRequest, server: int) -> None:
    """Run the function as `rank`; send its result or exception to the launcher."""
    end_with(server)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for other, held in enumerate(request.results):
        if other != rank:
            os.close(held)
    if request.outputs:
        _redirect_output(rank, request.outputs)
    os.environ.update(request.environments[rank])
    if rank == 0:
        os.environ[LISTEN_FD_VARIABLE] = str(request.listener)
    else:
        os.close(request.listener)
    with Connection(request.results[rank]) as results:
        try:
            _import_main(request.preparation)
            function = pickle.loads(request.function)
            message = dumps_result(function(results) if request.is_serving else function())
        except BaseException as exc:
            message = dumps_failure(exc)
        flush_output()
        results.send_bytes(message)


def _redirect_output(rank: int, outputs: Sequence[Sequence[int]]) -> None:
    """Make ``outputs[rank]`` the standard output and error; close all descriptors of `outputs`."""
    for number, held in enumerate(outputs[rank], start=1):
        os.dup2(held, number)
    for held in chain(*outputs):
        os.close(held)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def flush_output() -> None:
    """Flush ``sys.stdout`` and ``sys.stderr``: the launcher must see the output before a result."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a broken pipe, or closed by the function
            if stream is not None:
                stream.flush()


def _import_main(preparation: dict[str, Any]) -> None:
    """Import the main script of the launcher.

    `_inheriting` makes multiprocessing raise an error if the script starts processes during the
    import.
    """
    process: Any = multiprocessing.current_process()
    process._inheriting = True
    try:
        spawn.prepare(preparation)
    finally:
        del process._inheriting


def dumps_result(value: Any) -> bytes:
    """Return the pickled `RankOutcome` of a function that returned `value`.

    Raises
    ------
    InvalidArgument
        If `value` cannot be pickled.
    """
    try:
        return dumps(RankOutcome(value))
    except MemoryError:
        raise
    except Exception as exc:  # objects raise what they like from __reduce__
        raise InvalidArgument(
            f"the result of the function, of type {type(value).__name__}, cannot be sent to the "
            f"launcher ({exc}): return only values that can be pickled"
        ) from exc


def dumps_failure(exc: BaseException) -> bytes:
    """Return the pickled `RankOutcome` of a function that raised `exc`.

    If `exc` cannot be pickled and unpickled, the outcome has an `R2cclError` with its type and text
    instead.
    """
    text = "".join(traceback.format_exception(exc))
    try:
        message = dumps(RankOutcome(error=exc, text=text))
        # An exception class with required arguments may be pickled but fail to be unpickled.
        pickle.loads(message)
    except Exception:
        return pickle.dumps(
            RankOutcome(error=R2cclError(f"{type(exc).__name__}: {exc}"), text=text)
        )
    return message


__all__ = [
    "RankOutcome",
    "RankRequest",
    "command",
    "dumps_failure",
    "dumps_result",
    "flush_output",
    "serve",
]

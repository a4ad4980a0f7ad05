"""Server process of `r2ccl.launch`: imports the library once, then forks the ranks.

Importing NumPy and the library takes far longer than a fork, and ranks of one machine share its
cores. The server runs no threads of its own and imports nothing of the user's: the main script and
the function are imported in each rank, after the fork.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from r2ccl.bootstrap.identity import LISTEN_FD_VARIABLE
from r2ccl.bootstrap.orphans import end_with
from r2ccl.errors import R2cclError

#: What every rank imports.
_PRELOADED = ("numpy", "r2ccl", "r2ccl.factory")


class RankRequest(msgspec.Struct):
    """What the launcher asks of the server.

    Parameters
    ----------
    environments : sequence of mapping
        Variables of each rank, beyond those of the server.
    results : sequence of int
        Descriptor that each rank writes its outcome to.
    listener : int
        Descriptor that rank 0 inherits as the socket of the rendezvous.
    preparation : mapping
        Of `multiprocessing.spawn`: main script, path, arguments, directory.
    function : bytes
        Pickled; called without arguments.
    """

    environments: Sequence[Mapping[str, str]]
    results: Sequence[int]
    listener: int
    preparation: dict[str, Any]
    function: bytes


def command(descriptor: int) -> list[str]:
    """Return the command line of a server that reads its request from `descriptor`."""
    # The launcher may have found the library by a path that only its process has.
    start = f"import sys; sys.path[:] = {sys.path!r}; import r2ccl.bootstrap.rank_server as it"
    return [sys.executable, "-c", f"{start}; it.serve({descriptor}, {os.getpid()})"]


def serve(descriptor: int, launcher: int) -> None:
    """Fork the ranks, and send their process ids and then their exit statuses to the launcher.

    Returns in the server when all ranks have exited, and in each rank when its function has
    returned.
    """
    end_with(launcher)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks and their launcher
    with Connection(descriptor) as connection:
        request = pickle.loads(connection.recv_bytes())
        for name in _PRELOADED:
            importlib.import_module(name)
        server = os.getpid()
        ranks: dict[int, int] = {}
        for rank in range(len(request.results)):
            pid = _fork()
            if pid == 0:
                connection.close()
                _run_rank(rank, request, server)
                return
            ranks[pid] = rank
        for held in (*request.results, request.listener):
            os.close(held)
        connection.send(list(ranks))
        connection.recv()  # the launcher holds the processes: their ids may be freed
        while ranks:
            pid, status = os.wait()
            rank = ranks.pop(pid)
            connection.send((rank, os.waitstatus_to_exitcode(status)))


def _fork() -> int:
    with warnings.catch_warnings():
        # NumPy's threads, which Python warns of, are prepared for a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _run_rank(rank: int, request: RankRequest, server: int) -> None:
    """Run the function as `rank`, and send its outcome."""
    end_with(server)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for other, held in enumerate(request.results):
        if other != rank:
            os.close(held)
    os.environ.update(request.environments[rank])
    if rank == 0:
        os.environ[LISTEN_FD_VARIABLE] = str(request.listener)
    else:
        os.close(request.listener)
    try:
        _import_main(request.preparation)
        message = pickle.dumps((True, pickle.loads(request.function)(), ""))
    except BaseException as exc:
        message = _pickle_failure(exc)
    with Connection(request.results[rank]) as results:
        results.send_bytes(message)


def _import_main(preparation: dict[str, Any]) -> None:
    """Import the main script, where it must not start processes of its own."""
    process: Any = multiprocessing.current_process()
    process._inheriting = True
    try:
        spawn.prepare(preparation)
    finally:
        del process._inheriting


def _pickle_failure(exc: BaseException) -> bytes:
    text = "".join(traceback.format_exception(exc))
    try:
        message = pickle.dumps((False, exc, text))
        pickle.loads(message)  # an exception with required arguments may fail only here
    except Exception:
        return pickle.dumps((False, R2cclError(f"{type(exc).__name__}: {exc}"), text))
    return message


__all__ = ["RankRequest", "command", "serve"]

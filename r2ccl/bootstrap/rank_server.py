"""Server process of `r2ccl.launch`: imports the library once, then forks the ranks.

Importing NumPy and the library in every rank would take far longer than forks do, since the ranks
of one machine share its cores. The server starts no threads and imports no user code: each rank
imports the main script and the function after the fork.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from r2ccl.bootstrap.identity import LISTEN_FD_VARIABLE
from r2ccl.bootstrap.orphans import end_with
from r2ccl.errors import R2cclError

#: Modules that every rank needs; the server imports them before it forks.
_PRELOADED = ("numpy", "r2ccl", "r2ccl.factory")
#: Modules whose compiled code the server loads before it forks, unless the variable is 0.
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
        Pickled function that each rank calls without arguments.
    """

    environments: Sequence[Mapping[str, str]]
    results: Sequence[int]
    listener: int
    preparation: dict[str, Any]
    function: bytes


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
        Process id of the launcher; when it ends, the kernel kills the server and its ranks.
    """
    end_with(launcher)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher and the ranks handle Ctrl-C
    with Connection(descriptor) as connection:
        request = pickle.loads(connection.recv_bytes())
        for name in _PRELOADED:
            importlib.import_module(name)
        environment = {**os.environ, **request.environments[0]}
        for variable, name in _COMPILED.items():
            if environment.get(variable, "auto") != "0":
                _preload(name)
        # Otherwise each rank's garbage collector writes to all objects, and so copies their pages.
        gc.freeze()
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
        # os.wait frees process ids, so first wait until the launcher has opened the processes.
        connection.recv()
        while ranks:
            pid, status = os.wait()
            rank = ranks.pop(pid)
            connection.send((rank, os.waitstatus_to_exitcode(status)))


def _preload(name: str) -> None:
    """Load the compiled code of a module; on failure do nothing, since each rank reports it."""
    with suppress(ImportError, OSError, R2cclError):
        importlib.import_module(name).preload()


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
    """Import the main script of the launcher.

    `_inheriting` makes multiprocessing raise an error if the script starts processes meanwhile.
    """
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
        # An exception class with required arguments may be pickled but fail to be unpickled.
        pickle.loads(message)
    except Exception:
        return pickle.dumps((False, R2cclError(f"{type(exc).__name__}: {exc}"), text))
    return message


__all__ = ["RankRequest", "command", "serve"]

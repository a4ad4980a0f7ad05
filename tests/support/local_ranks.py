"""Ranks of one host as forked processes that share memory through a `LocalGroup`.

One process forks the ranks, relays the bytes that they allgather, and returns for each rank
``["value", result]``, ``["error", class, message, seconds]`` or ``["killed"]``.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

from support.jobs import launch

from r2ccl.bootstrap.auth import Secret
from r2ccl.errors import TransportTimeout
from r2ccl.shm.group import Attend, LocalGroup

_SECRET = Secret(b"s" * 32)
_TIMEOUT_S = 60.0
#: Numbers of the ranks in the communicator: different from their places in the group.
FIRST_RANK = 10


def run_ranks(nranks: int, program: str, *arguments: object, timeout_s: float = 250.0) -> Any:
    """Run ``module:function`` as all ranks; return what the module's docstring says.

    The function gets a `Host` and the arguments.
    """
    lead = functools.partial(_lead, nranks, program, arguments)
    return launch(lead, 1, timeout_s=timeout_s)[0]


class Host:
    """A rank's view of the host: its place, and an allgather of bytes without shared memory."""

    def __init__(self, index: int, nranks: int, connection: socket.socket) -> None:
        self.index, self.nranks = index, nranks
        self._connection = connection

    def exchange(self, mine: bytes) -> list[bytes]:
        self._connection.sendall(mine)
        received = b""
        while len(received) < len(mine) * self.nranks:
            some = self._connection.recv(1 << 16)
            assert some, "a rank has ended"
            received += some
        return [received[i * len(mine) : (i + 1) * len(mine)] for i in range(self.nranks)]

    def connect(
        self,
        *,
        secret: Secret = _SECRET,
        attend: Attend | None = None,
        on_exit: Callable[[int], None] = lambda index: None,
    ) -> LocalGroup:
        ranks = range(FIRST_RANK, FIRST_RANK + self.nranks)
        return LocalGroup.connect(
            ranks, self.index, self.exchange, secret, attend=attend or _attend, on_exit=on_exit,
            has_ended=lambda: False, connect_timeout_s=20.0 if secret is _SECRET else 1.0,
        )  # fmt: skip


def _attend(resume: Callable[[], bool], call: int) -> None:
    until_s = time.monotonic() + _TIMEOUT_S
    while not resume():
        if time.monotonic() > until_s:
            raise TransportTimeout("a call takes too long", rank=0)


def _lead(nranks: int, name: str, arguments: tuple[object, ...]) -> list[Any]:
    module, _, function = name.partition(":")
    program = getattr(importlib.import_module(module), function)
    pairs = [socket.socketpair() for _ in range(nranks)]
    results, pids = [], []
    for index in range(nranks):
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            for pair in pairs:
                pair[0].close()
            _run_rank(Host(index, nranks, pairs[index][1]), program, arguments, writer)
        os.close(writer)
        results.append(os.fdopen(reader))
        pids.append(pid)
    for pair in pairs:
        pair[1].close()
    while True:  # as long as all ranks exchange bytes
        parts = [pair[0].recv(1 << 16) for pair in pairs]
        if not all(parts):
            break
        for pair in pairs:
            pair[0].sendall(b"".join(parts))
    found = []
    for pid, file in zip(pids, results, strict=True):
        text = file.read()
        os.waitpid(pid, 0)
        found.append(json.loads(text) if text else ["killed"])
    return found


def _run_rank(
    host: Host, program: Callable[..., Any], arguments: tuple[object, ...], writer: int
) -> None:
    began_s = time.monotonic()
    try:
        result = ["value", program(host, *arguments)]
    except Exception as exc:
        traceback.print_exc()
        result = ["error", type(exc).__name__, str(exc), time.monotonic() - began_s]
    os.write(writer, json.dumps(result).encode())
    os._exit(0)

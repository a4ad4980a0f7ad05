"""Run perftest's ``ib_write_bw`` and ``ib_write_lat`` between two devices of this machine.

No program outlives the call that started it.

References
----------
perftest(1); https://github.com/linux-rdma/perftest: its "MB/sec" are 2**20 bytes, its latency is
half a round trip.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

_BANDWIDTH = "ib_write_bw"
_LATENCY = "ib_write_lat"
#: Expected heading and number of columns of each program, and indices of the columns to read. One
#: of the two bandwidth columns has few digits for small messages, the other for large ones.
_BANDWIDTH_COLUMNS, _AVERAGE, _RATE = ("BW average[MB/sec]", 5), 3, 4
_LATENCY_COLUMNS, _TYPICAL = ("t_typical[usec]", 9), 4
#: Rounding steps of the two bandwidth columns.
_AVERAGE_STEP, _RATE_STEP = 0.01, 1e-6
#: Seconds to start, connect and end, in addition to the measured time.
_PATIENCE_S = 60.0


class PerftestError(Exception):
    """Raised when perftest is missing or fails; the text has the reason."""


class Port(NamedTuple):
    """Device, port number and GID table index of one end."""

    device: str
    number: int
    gid_index: int


Pair = tuple[Port, Port]


def missing() -> str | None:
    """Return a message that names missing programs, or None."""
    lacks = [name for name in (_BANDWIDTH, _LATENCY) if shutil.which(name) is None]
    return f"not found: {', '.join(lacks)}; install the package perftest" if lacks else None


def bandwidth(pairs: Sequence[Pair], nbytes: int, seconds: int) -> float:
    """Write messages of `nbytes` between all `pairs` at once; return the total bytes per second.

    Runs for `seconds`, or up to 16 times longer until a message completes on every pair: 128
    messages are in flight at once.

    Raises
    ------
    PerftestError
        If a program fails, or no message completes.
    """
    for duration_s in (seconds, 4 * seconds, 16 * seconds):
        said = _run(_BANDWIDTH, pairs, nbytes, ["-D", str(duration_s)], duration_s)
        if all(rates := [parse_bandwidth(each) for each in said]):
            return sum(rates)
    raise PerftestError(f"{_BANDWIDTH} completed no message of {nbytes} bytes in {duration_s} s")


def latency(pair: Pair, nbytes: int, count: int, seconds: float) -> float:
    """Send `nbytes` back and forth `count` times; return half a round trip in seconds.

    `seconds` is the expected duration, from which the timeout is derived.

    Raises
    ------
    PerftestError
        If a program fails or times out.
    """
    (said,) = _run(_LATENCY, [pair], nbytes, ["-n", str(count)], seconds)
    return parse_latency(said)


def parse_bandwidth(said: str) -> float:
    """Return the bytes per second from the output of ``ib_write_bw``.

    Raises
    ------
    PerftestError
        If the output has no such line.
    """
    row = _row(said, *_BANDWIDTH_COLUMNS)
    average, rate = row[_AVERAGE], row[_RATE]
    if average * _RATE_STEP > rate * _AVERAGE_STEP:
        return average * 2**20
    return rate * 1e6 * row[0]


def parse_latency(said: str) -> float:
    """Return the typical (median) latency in seconds from the output of ``ib_write_lat``.

    Raises
    ------
    PerftestError
        If the output has no such line.
    """
    return _row(said, *_LATENCY_COLUMNS)[_TYPICAL] * 1e-6


def _row(said: str, heading: str, ncolumns: int) -> list[float]:
    """Return the numbers under `heading`, of which there must be `ncolumns`."""
    lines = said.splitlines()
    for above, line in pairwise(lines):
        if heading in above:
            try:
                row = [float(word) for word in line.split()]
            except ValueError:
                break
            if len(row) == ncolumns and row[0] > 0 and min(row[1:]) >= 0:
                return row
    words = " / ".join(line.strip() for line in lines[-3:])
    raise PerftestError(f"no line of {ncolumns} numbers under {heading!r}; last output: {words}")


def _run(
    program: str, pairs: Sequence[Pair], nbytes: int, more: list[str], seconds: float
) -> list[str]:
    """Run a client and a server for each pair, all at once; return the output of the clients."""
    with ExitStack() as stack:
        clients = []
        for client, server in pairs:
            port = _free_port()
            common = ["-F", "-s", str(nbytes), "-p", str(port), *more]
            listening = _start(stack, [program, *_place(server), *common])
            _wait_listening(port, listening)
            clients.append(_start(stack, [program, *_place(client), *common, "127.0.0.1"]))
        deadline = time.monotonic() + _PATIENCE_S + 2 * seconds
        return [_output(each, deadline) for each in clients]


def _place(port: Port) -> list[str]:
    return ["-d", port.device, "-i", str(port.number), "-x", str(port.gid_index)]


def _start(stack: ExitStack, arguments: list[str]) -> subprocess.Popen[str]:
    """Start a program that ends when `stack` closes, at the latest."""
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    stack.callback(process.communicate)
    stack.callback(process.kill)  # called first; no effect on a process already waited for
    return process


def _output(process: subprocess.Popen[str], deadline: float) -> str:
    try:
        said, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise PerftestError(f"{process.args!r} timed out") from None
    if process.returncode:
        words = " / ".join(line.strip() for line in said.splitlines()[-3:])
        raise PerftestError(f"{process.args!r} exited with {process.returncode}: {words}")
    return said


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_listening(port: int, server: subprocess.Popen[str]) -> None:
    """Wait until `server` accepts connections; the client does not retry."""
    deadline = time.monotonic() + _PATIENCE_S
    while not _is_listening(port):
        if server.poll() is not None:
            raise PerftestError(_output(server, deadline) or f"{server.args!r} ended")
        if time.monotonic() > deadline:
            raise PerftestError(f"{server.args!r} does not listen on port {port}")
        time.sleep(0.02)


def _is_listening(port: int) -> bool:
    """Return whether a TCP socket of this namespace is in LISTEN (0A) at `port`: proc(5)."""
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                return True
    return False


__all__ = [
    "Pair",
    "PerftestError",
    "Port",
    "bandwidth",
    "latency",
    "missing",
    "parse_bandwidth",
    "parse_latency",
]

"""Start and control the two nodes of the verbs bench, and define the messages between them.

Only the nodes (`verbs_node.py`) open devices. A node ends when its socket closes, so it also ends
when the bench is killed.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec
from perftest import Pair as Ports
from perftest import Port

MESSAGE_NBYTES = 1 << 18
_NODE = str(Path(__file__).with_name("verbs_node.py"))
#: Seconds for Python to start and open its devices, even on an emulated processor.
_START_TIMEOUT_S = 90.0
#: Seconds added to the time limit of a run.
_PATIENCE_S = 10.0


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Command: open these ports and make one end of a path on each.

    ``fastpath`` is that of `RdmaDevice`: ``"1"`` or ``"0"``.
    """

    node: int
    ports: tuple[Port, ...]
    fastpath: str


class Join(msgspec.Struct, frozen=True, tag=True):
    """Command: join the ends that `infos` describe; node 1 first, as node 0 proves the paths."""

    infos: tuple[bytes, ...]


class Run(msgspec.Struct, frozen=True, tag=True):
    """Command: move `count` slices of `nbytes` on each path.

    ``kind`` is ``slices`` (into `window` landing places named ahead, from node 0 to node 1),
    ``messages`` (eager; up to `window` unconfirmed, from node 0 to node 1) or ``latency`` (back and
    forth, eager if `nbytes` allows it).
    """

    kind: str
    nbytes: int
    count: int
    window: int
    time_limit_s: float


class EndpointInfos(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Offer`: information for the peer's `Join`."""

    infos: tuple[bytes, ...]


class Done(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Join`; a receiving node also sends it before it answers `Run`."""


class Broken(msgspec.Struct, frozen=True, tag=True):
    """Answer of a node that failed."""

    why: str


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Run`: measurements of the whole run at this end.

    ``cpu_s`` is user and system time of the process, ``posted`` the number of send requests of this
    end, ``rss_nbytes`` the resident set size at the end. ``trips_s`` are round trips in seconds,
    for runs of latency only.
    """

    seconds: float
    cpu_s: float
    posted: int
    rss_nbytes: int
    trips_s: list[float] = []


Command = Offer | Join | Run
Answer = EndpointInfos | Done | Broken | Measured


class NodeError(Exception):
    """Raised when a node does not start or a command fails; the text has the reason."""


Expected = TypeVar("Expected", EndpointInfos, Done, Measured)


class Nodes:
    """Two nodes, joined by one path per pair of ports.

    Parameters
    ----------
    ports : sequence of pairs of Port
        Port of node 0 and port of node 1.
    fastpath : str
        See `Offer`.

    Raises
    ------
    NodeError
        If a node does not start.
    """

    def __init__(self, ports: Sequence[Ports], fastpath: str) -> None:
        self._stack = ExitStack()
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        try:
            self._sockets = [self._start(), self._start()]
            self._join(ports, fastpath)
        except BaseException:
            self.close()
            raise

    def run(self, run: Run) -> tuple[Measured, Measured]:
        """Execute `run` on both nodes; return the measurements of node 0 and node 1.

        Raises
        ------
        NodeError
            If a node fails or does not answer in time.
        """
        patience_s = run.time_limit_s + _PATIENCE_S
        self._tell(1, run)
        self._hear(1, Done, patience_s)
        self._tell(0, run)
        return self._hear(0, Measured, patience_s), self._hear(1, Measured, patience_s)

    def close(self) -> None:
        """End the nodes."""
        self._stack.close()

    def __enter__(self) -> Nodes:
        """Return this object."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the nodes."""
        self.close()

    def _start(self) -> socket.socket:
        # SOCK_SEQPACKET preserves message boundaries and reports the end of a peer.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, _NODE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._stack.callback(_end, process)
        self._stack.callback(ours.close)  # called first: it makes the node end
        return ours

    def _join(self, ports: Sequence[Ports], fastpath: str) -> None:
        for node in (0, 1):
            self._tell(node, Offer(node, tuple(pair[node] for pair in ports), fastpath))
        infos = [self._hear(node, EndpointInfos, _START_TIMEOUT_S).infos for node in (0, 1)]
        for node in (1, 0):
            self._tell(node, Join(infos[1 - node]))
            self._hear(node, Done, _START_TIMEOUT_S)

    def _tell(self, node: int, command: Command) -> None:
        try:
            self._sockets[node].send(msgspec.msgpack.encode(command))
        except OSError as exc:
            raise NodeError(f"node {node} ended: {exc}") from exc

    def _hear(self, node: int, kind: type[Expected], timeout_s: float) -> Expected:
        self._sockets[node].settimeout(timeout_s)
        try:
            said = self._sockets[node].recv(MESSAGE_NBYTES)
        except TimeoutError:
            raise NodeError(f"node {node} did not answer in {timeout_s:g} s") from None
        except ConnectionResetError:  # the node ended without reading its command
            said = b""
        if not said:
            raise NodeError(f"node {node} ended")
        answer = self._decoder.decode(said)
        if not isinstance(answer, kind):
            why = answer.why if isinstance(answer, Broken) else f"answered {answer}"
            raise NodeError(f"node {node}: {why}")
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a node whose socket is closed; kill it if it does not end."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_PATIENCE_S)
    process.kill()
    process.wait()


__all__ = [
    "MESSAGE_NBYTES",
    "Answer",
    "Broken",
    "Command",
    "Done",
    "EndpointInfos",
    "Join",
    "Measured",
    "NodeError",
    "Nodes",
    "Offer",
    "Run",
]

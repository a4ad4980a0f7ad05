"""Probes over TCP: connections that are begun and never used.

They go to a port that the peer holds without listening; its *kernel* refuses them, which is the
answer. A probe is several connects spread over the probe
timeout, because two lost packets do not make a dead rail. One between different rails is bound to
the interface of the rail it leaves from: by the address alone, the kernel would send it through
the NIC that its destination belongs to, the very one in question.

A connect for which this machine has no descriptor, port or memory left proves nothing about the
rail: a probe of which one could not be made, and none was answered, has no outcome.

Must not see paths. Invariant: a probe that was asked is reported once, and leaves no connection
behind.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import struct
from collections.abc import Mapping

from r2ccl.clock import Clock
from r2ccl.errors import decode_errno, describe_errno, is_exhaustion
from r2ccl.transport.base import Probed
from r2ccl.types import Nic, PathKey, ProbeKey

_log = logging.getLogger(__name__)

Address = tuple[str, int]

_NKNOCKS = 3
#: A reset instead of an end: neither kernel keeps the connection's state (TIME_WAIT).
_NO_LINGER = struct.pack("ii", 1, 0)


class _Probe:
    """A probe under way: its connects, and when the next step is due."""

    __slots__ = ("detail", "due_s", "key", "nsent", "socks", "unmade")

    def __init__(self, key: ProbeKey) -> None:
        self.key = key
        self.socks: dict[int, socket.socket] = {}
        self.nsent = 0
        self.due_s = 0.0
        #: What the last connect that failed said.
        self.detail = ""
        #: Why a connect could not be made; empty: all could.
        self.unmade = ""


class TcpProber:
    """The probes of one transport.

    Parameters
    ----------
    epoll : select.epoll
        Where the connects are waited for; `on_ready` takes what belongs to them.
    sources : mapping of int to Nic
        This rank's end of each rail.
    targets : mapping of PathKey to (str, int)
        Numeric address and probe port at the far end of each path; nobody listens there.
    timeout_s : float
        Of a probe.
    clock : Clock
    rank : int
        This rank, for the log.
    """

    def __init__(
        self,
        epoll: select.epoll,
        sources: Mapping[int, Nic],
        targets: Mapping[PathKey, Address],
        timeout_s: float,
        clock: Clock,
        *,
        rank: int,
    ) -> None:
        self._rank = rank
        self._epoll = epoll
        self._sources = sources
        self._targets = targets
        self._interval_s = timeout_s / _NKNOCKS
        self._clock = clock
        self._probes: dict[ProbeKey, _Probe] = {}
        self._by_fd: dict[int, _Probe] = {}
        #: Ways that answered once: there is one on this fabric.
        self._answered: set[ProbeKey] = set()
        self._done: list[Probed] = []
        #: Error numbers of connects that could not be made; each is logged once.
        self._unmade: set[int] = set()

    @property
    def is_busy(self) -> bool:
        """Whether `advance` has something to do, now or later."""
        return bool(self._probes or self._done)

    def probe(self, key: ProbeKey) -> None:
        """Begin a probe; see `Transport.probe`."""
        if key in self._probes:
            return
        if key.via not in self._sources or PathKey(key.peer, key.rail) not in self._targets:
            self._done.append(Probed(key, None, "this transport knows no such rail or rank"))
            return
        self._probes[key] = probe = _Probe(key)
        self._send_probe(probe, self._clock())

    def on_ready(self, fd: int) -> None:
        """Take the outcome of the connect `fd`; any other descriptor is ignored."""
        probe = self._by_fd.get(fd)
        if probe is not None:
            code = probe.socks[fd].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self._close(probe, fd)
            self._judge(probe, code)

    def advance(self) -> list[Probed]:
        """Do what is due; returns the probes that are over.

        To be called after `on_ready`: an answer that waited to be taken is one. A connect has the
        same time to be answered however late this is called, so a process that
        was stopped does not mistake its own silence for the peer's.
        """
        now = self._clock()
        for probe in list(self._probes.values()):
            if now >= probe.due_s:
                if probe.nsent == _NKNOCKS:
                    self._end(probe, False, probe.detail or "no answer to any connect")
                else:
                    self._send_probe(probe, now)
        done, self._done = self._done, []
        return done

    def limit_s(self, timeout_s: float) -> float:
        """Cut a sleep of `timeout_s` short if something is due before its end."""
        if self._done:
            return 0.0
        if not self._probes:
            return timeout_s
        due_s = min(probe.due_s for probe in self._probes.values())
        return max(0.0, min(timeout_s, due_s - self._clock()))

    def descriptors(self) -> list[int]:
        """Descriptors of the connects under way."""
        return list(self._by_fd)

    def close(self) -> None:
        """Drop every probe."""
        for probe in list(self._probes.values()):
            self._drop(probe)
        self._done.clear()

    def _send_probe(self, probe: _Probe, now: float) -> None:
        key = probe.key
        probe.nsent += 1
        probe.due_s = now + self._interval_s
        target = self._targets[PathKey(key.peer, key.rail)]
        try:
            sock = socket.socket(
                socket.AF_INET6 if ":" in target[0] else socket.AF_INET,
                socket.SOCK_STREAM | socket.SOCK_NONBLOCK,
            )
        except OSError as exc:
            self._not_made(probe, exc.errno or errno.EIO)
            return
        probe.socks[sock.fileno()] = sock
        self._by_fd[sock.fileno()] = probe
        code, is_made = _connect(sock, self._sources[key.via], target, is_bound=key.via != key.rail)
        if code == errno.EINPROGRESS:
            code, is_made = self._watch(sock)
        if code == errno.EINPROGRESS:
            return
        self._close(probe, sock.fileno())
        if is_made:
            self._judge(probe, code)
        else:
            self._not_made(probe, code)

    def _watch(self, sock: socket.socket) -> tuple[int, bool]:
        """Wait for the outcome of a connect; returns as `_connect`."""
        try:
            self._epoll.register(sock.fileno(), select.EPOLLOUT)
        except OSError as exc:
            return exc.errno or errno.EIO, False
        return errno.EINPROGRESS, True

    def _not_made(self, probe: _Probe, code: int) -> None:
        """Note a connect for which something is used up here; the next one is made in its time."""
        probe.unmade = describe_errno(code)
        if code in self._unmade:
            return
        self._unmade.add(code)
        _log.warning(
            "rank %d: rail %d to rank %d cannot be probed now: %s; it is probed again, and this "
            "is not logged again",
            self._rank, probe.key.rail, probe.key.peer, probe.unmade,
        )  # fmt: skip

    def _judge(self, probe: _Probe, code: int) -> None:
        """Take the outcome of one connect: an answer ends the probe, a failure only counts."""
        if code in (0, errno.ECONNREFUSED):
            self._answered.add(probe.key)
            self._end(probe, True, "connected" if code == 0 else "refused")
            return
        probe.detail = decode_errno(code)
        if probe.nsent == _NKNOCKS and not probe.socks:
            self._end(probe, False, probe.detail)

    def _end(self, probe: _Probe, is_answered: bool, detail: str) -> None:
        key = probe.key
        self._drop(probe)
        if probe.unmade and not is_answered:
            self._done.append(Probed(key, None, f"it could not be asked in full: {probe.unmade}"))
        elif is_answered or key.via == key.rail or key in self._answered:
            self._done.append(Probed(key, is_answered, detail))
        else:
            never = f"this way was never answered, there may be none here ({detail})"
            self._done.append(Probed(key, None, never))

    def _drop(self, probe: _Probe) -> None:
        del self._probes[probe.key]
        for fd in list(probe.socks):
            self._close(probe, fd)

    def _close(self, probe: _Probe, fd: int) -> None:
        sock = probe.socks.pop(fd)
        del self._by_fd[fd]
        with contextlib.suppress(OSError):  # no connection, hence nothing to linger
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        sock.close()


def _connect(
    sock: socket.socket, source: Nic, target: Address, *, is_bound: bool
) -> tuple[int, bool]:
    """Begin to connect.

    Returns
    -------
    code : int
        The errno; 0 if it is done already.
    is_made : bool
        False: something this connect needs is used up on this machine.
    """
    try:
        if is_bound:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, source.name.encode())
        if source.address:
            sock.bind((source.address, 0))
    except OSError as exc:
        code = exc.errno or errno.EIO
        # bind(2) says EADDRNOTAVAIL of an address that is gone, and of ports EADDRINUSE.
        return code, code == errno.EADDRNOTAVAIL or not is_exhaustion(code)
    try:
        code = sock.connect_ex(target)
    except OSError as exc:
        code = exc.errno or errno.EIO
    return code, not is_exhaustion(code)


__all__ = ["Address", "TcpProber"]

"""Probes over TCP: attempts to connect to a port on which nobody listens.

The peer reserves the port without listening, so its *kernel* refuses each connect; the refusal is
the answer. Until it is answered, a probe makes up to three connects, spread over the probe timeout,
because two lost packets do not prove that a rail has failed. A probe between different rails binds
its sockets to the interface of the local rail. Otherwise the kernel would send from the NIC in the
destination's subnet, and this may be the NIC that failed.

A connect that fails because this machine has no descriptor, port or memory left proves nothing
about the rail. If this happens to one of a probe's connects and no other is answered, the outcome
of the probe is None.

Invariant: a probe that was started is reported once, unless the prober is closed first, and leaves
no connection behind.
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

#: Maximum number of connects per probe.
_NKNOCKS = 3
#: Value of SO_LINGER with which close() sends RST, not FIN: neither kernel keeps TIME_WAIT state.
_NO_LINGER = struct.pack("ii", 1, 0)
#: Details of the two answers; a bare "refused" would read as a failure.
_ACCEPTED = "the host is reachable: it accepted the connect"
_REFUSED = "the host is reachable: it refused the connect, as expected"


class _Probe:
    """Probe in flight, with its pending connects."""

    __slots__ = ("detail", "due_s", "key", "nsent", "socks", "unmade")

    def __init__(self, key: ProbeKey) -> None:
        self.key = key
        self.socks: dict[int, socket.socket] = {}
        self.nsent = 0
        #: Time of the clock for the next connect or, after the last connect, for the timeout.
        self.due_s = 0.0
        #: Error text of the last connect that failed.
        self.detail = ""
        #: Why this machine could not make one of the connects; empty if it made all.
        self.unmade = ""


class TcpProber:
    """TCP probes of one transport: connects to ports of peers on which nobody listens.

    Parameters
    ----------
    epoll : select.epoll
        Set in which the sockets of probes are registered. Borrowed; the owner passes ready
        descriptors to `on_ready`.
    sources : mapping of int to Nic
        Local NIC of each rail.
    targets : mapping of PathKey to (str, int)
        Numeric address and probe port of the peer, per path; nobody listens on that port.
    timeout_s : float
        Time in which a probe must be answered, in seconds.
    clock : Clock
    rank : int
        This rank, for the log and for `Probed.detail`.
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
        #: Keys whose probe was answered at least once: the fabric connects the two ports.
        self._answered: set[ProbeKey] = set()
        self._done: list[Probed] = []
        #: errno of connects that could not be made locally; each is logged once.
        self._unmade: set[int] = set()

    @property
    def is_busy(self) -> bool:
        """True while a probe is in flight or an outcome is not yet returned by `advance`."""
        return bool(self._probes or self._done)

    def probe(self, key: ProbeKey) -> None:
        """Start a probe, as `Transport.probe` does."""
        if key in self._probes:
            return
        if key.via not in self._sources or PathKey(key.peer, key.rail) not in self._targets:
            why = (
                f"rail {key.via} of rank {self._rank} or rail {key.rail} of rank {key.peer} does "
                "not exist"
            )
            self._done.append(Probed(key, None, why))
            return
        self._probes[key] = probe = _Probe(key)
        self._send_probe(probe, self._clock())

    def on_ready(self, fd: int) -> None:
        """Handle the outcome of the connect on descriptor `fd`; ignore other descriptors."""
        probe = self._by_fd.get(fd)
        if probe is not None:
            code = probe.socks[fd].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self._close(probe, fd)
            self._judge(probe, code)

    def advance(self) -> list[Probed]:
        """Make the connects that are due and end probes that timed out; return the new outcomes.

        Call it after `on_ready`, so that answers that already arrived count. However late this
        method is called, the last connect has a third of the timeout for its answer. So a process
        that was stopped for a while does not conclude that its peers are silent.
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
        """Return the time until `advance` must be called, at most `timeout_s`, in seconds."""
        if self._done:
            return 0.0
        if not self._probes:
            return timeout_s
        due_s = min(probe.due_s for probe in self._probes.values())
        return max(0.0, min(timeout_s, due_s - self._clock()))

    def descriptors(self) -> list[int]:
        """Return the descriptors of the pending connects."""
        return list(self._by_fd)

    def close(self) -> None:
        """Close the sockets of all probes; none is reported afterwards."""
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
        """Register a pending connect with the epoll set; return the same values as `_connect`."""
        try:
            self._epoll.register(sock.fileno(), select.EPOLLOUT)
        except OSError as exc:
            return exc.errno or errno.EIO, False
        return errno.EINPROGRESS, True

    def _not_made(self, probe: _Probe, code: int) -> None:
        """Record that this machine could not make a connect; log each errno `code` once."""
        probe.unmade = describe_errno(code)
        if code in self._unmade:
            return
        self._unmade.add(code)
        _log.warning(
            "rank %d: rail %d to rank %d cannot be probed now: %s; further probes are tried, but "
            "this error is not logged again",
            self._rank, probe.key.rail, probe.key.peer, probe.unmade,
        )  # fmt: skip

    def _judge(self, probe: _Probe, code: int) -> None:
        """Handle the outcome of a connect: its errno `code`, 0 if it succeeded.

        Success and refusal are answers and end the probe. Any other outcome ends the probe if no
        other connect is pending or still to be made.
        """
        if code in (0, errno.ECONNREFUSED):
            self._answered.add(probe.key)
            self._end(probe, True, _ACCEPTED if code == 0 else _REFUSED)
            return
        probe.detail = decode_errno(code)
        if probe.nsent == _NKNOCKS and not probe.socks:
            self._end(probe, False, probe.detail)

    def _end(self, probe: _Probe, is_answered: bool, detail: str) -> None:
        key = probe.key
        self._drop(probe)
        if probe.unmade and not is_answered:
            self._done.append(
                Probed(key, None, f"not every connect of the probe could be made: {probe.unmade}")
            )
        elif is_answered or key.via == key.rail or key in self._answered:
            self._done.append(Probed(key, is_answered, detail))
        else:
            never = f"never answered, so these ports may not be connected at all ({detail})"
            self._done.append(Probed(key, None, never))

    def _drop(self, probe: _Probe) -> None:
        for fd in list(probe.socks):
            self._close(probe, fd)
        del self._probes[probe.key]

    def _close(self, probe: _Probe, fd: int) -> None:
        sock = probe.socks[fd]
        with contextlib.suppress(OSError):  # not connected: nothing to reset
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        sock.close()
        self._by_fd.pop(fd, None)
        del probe.socks[fd]


def _connect(
    sock: socket.socket, source: Nic, target: Address, *, is_bound: bool
) -> tuple[int, bool]:
    """Begin a non-blocking connect.

    Returns
    -------
    code : int
        The errno; EINPROGRESS if the connect is pending, 0 if it is established already.
    is_made : bool
        False if this machine lacked a resource for the connect, such as a free port.
    """
    try:
        if is_bound:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, source.name.encode())
        if source.address:
            sock.bind((source.address, 0))
    except OSError as exc:
        code = exc.errno or errno.EIO
        # From bind(2), EADDRNOTAVAIL means that the address is gone, which is no exhaustion; a lack
        # of ports is EADDRINUSE.
        return code, code == errno.EADDRNOTAVAIL or not is_exhaustion(code)
    try:
        code = sock.connect_ex(target)
    except OSError as exc:
        code = exc.errno or errno.EIO
    return code, not is_exhaustion(code)


__all__ = ["Address", "TcpProber"]

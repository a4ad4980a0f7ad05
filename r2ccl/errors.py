"""Every exception r2ccl raises: one tree, fields as attributes, the next step in the message.

Beside it, errors of the operating system in words: name, text, and what to do where a resource is
used up; they need no file descriptor, so they work when none is left. Imports nothing of the
library. A transport translates the operating system's and the
verbs' errors into this tree once, at its edge, with ``raise ... from exc``.

Invariant: an error that crosses the public interface names the rank that raises it and, where one
is involved, the peer and the rail; ``str(error)`` ends with what the reader can do next.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Mapping, Sequence


class R2cclError(Exception):
    """Base of everything r2ccl raises on purpose."""


class InvalidArgument(R2cclError, ValueError):
    """The caller's fault, raised before any byte moves; says what was given and what is allowed."""


class ScheduleError(R2cclError):
    """The checker refused a schedule.

    Parameters
    ----------
    message : str
        What is wrong.
    rank, channel, op : int or None
        Where; ``op`` is the index of the op in the rank's program of that channel.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        channel: int | None = None,
        op: int | None = None,
    ) -> None:
        where = ", ".join(
            f"{name} {value}"
            for name, value in (("rank", rank), ("channel", channel), ("op", op))
            if value is not None
        )
        super().__init__(f"{where}: {message}" if where else message)
        self.rank = rank
        self.channel = channel
        self.op = op


class TransportError(R2cclError):
    """A path broke. Recoverable inside a link; only ``R2CC_MODE=failstop`` lets the user see it.

    Parameters
    ----------
    message : str
    rank, peer, rail : int or None
    status : str
        Decoded status: an errno name, a work completion status, ``"CARRIER_DOWN"`` ...
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        rail: int | None = None,
        status: str = "",
    ) -> None:
        self.rank = rank
        self.peer = peer
        self.rail = rail
        self.status = status


class CompletionError(TransportError):
    """A work request of an RDMA NIC failed; ``status`` is its work completion status."""


class RailDown(TransportError):
    """The local NIC or port of a rail is down."""


class TransportTimeout(TransportError):
    """A wait reached its deadline; lists which links wait for whom."""


class NoHealthyRail(R2cclError):
    """Every path to a peer is gone.

    Parameters
    ----------
    rank, peer : int
    since_s : float
        Seconds since the last path was lost.
    causes : dict of int to str
        Rail to the evidence that took it down.
    """

    def __init__(self, *, rank: int, peer: int, since_s: float, causes: dict[int, str]) -> None:
        why = "; ".join(f"rail {rail}: {cause}" for rail, cause in sorted(causes.items()))
        super().__init__(
            f"rank {rank}: no healthy rail to rank {peer} for {since_s:.3f} s ({why}); "
            "restore one of them, or raise R2CC_NO_RAIL_TIMEOUT_S to wait longer"
        )
        self.rank = rank
        self.peer = peer
        self.since_s = since_s
        self.causes = causes


class PeerLost(R2cclError):
    """A process died or went silent.

    Parameters
    ----------
    rank : int
        Who raises.
    peer : int
        Who is gone.
    last_heard_s : float or None
        Seconds since the last sign of life; None: another rank found it.
    why : str
    host : str
        Where it ran; empty: not known.
    last_op : int or None
        The last collective it was seen in, 0: none; None: not known.
    is_met : bool
        Whether `r2ccl.init` was over: else there is nothing to go on with.
    """

    def __init__(
        self,
        *,
        rank: int,
        peer: int,
        last_heard_s: float | None,
        why: str,
        host: str = "",
        last_op: int | None = None,
        is_met: bool = True,
    ) -> None:
        where = f" on {host}" if host else ""
        signs = [why]
        if last_heard_s is not None:
            signs.append(f"last heard {last_heard_s:.3f} s ago")
        if last_op is not None:
            signs.append(f"last seen in call {last_op}")
        if is_met:
            super().__init__(
                f"rank {rank}: lost rank {peer}{where} ({'; '.join(signs)}); look at that rank's "
                "own log; go on without it with shrink(), or restart the job"
            )
        else:
            super().__init__(
                f"rank {rank}: rank {peer}{where} left during init ({why}); look at that rank's "
                "own log and restart the job"
            )
        self.rank = rank
        self.peer = peer
        self.last_heard_s = last_heard_s
        self.why = why
        self.host = host
        self.last_op = last_op


class NoQuorum(R2cclError):
    """Too few ranks are left to go on: others may be alive, and go on without this one.

    Parameters
    ----------
    rank, nranks : int
        Who raises, and of how many.
    alive : sequence of int
        The ranks it can still reach, itself among them.
    gone : mapping of int to str
        The others, and what is known of their end.
    """

    def __init__(
        self, *, rank: int, nranks: int, alive: Sequence[int], gone: Mapping[int, str]
    ) -> None:
        why = "; ".join(f"rank {peer}: {cause}" for peer, cause in sorted(gone.items()))
        super().__init__(
            f"rank {rank}: of {nranks} ranks only {list(alive)} are left here, and shrink() needs "
            f"more than half, or half with rank 0 ({why}); restart the job, or, if no other rank "
            'can have gone on, call shrink(quorum="any") instead'
        )
        self.rank = rank
        self.nranks = nranks
        self.alive = tuple(alive)
        self.gone = dict(gone)


class CommunicatorRevoked(R2cclError):
    """The communicator cannot be used any more; ``reason`` is the first error that revoked it."""

    def __init__(self, message: str, *, reason: BaseException | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class ConcurrentCalls(R2cclError):
    """A blocking call while another one is under way, in another thread or below a signal handler.

    It was refused before it began; the first one goes on. While asynchronous calls are under way,
    calls are queued instead.
    """


class InternalError(R2cclError):
    """A broken invariant of r2ccl itself: please report it with the message."""


def describe_os_error(exc: BaseException) -> str:
    """Return what happened: ``EMFILE: Too many open files; raise `ulimit -n` ...``.

    An exception that carries no error number is described by its own text, or by its type.
    """
    code = getattr(exc, "errno", None)
    if not isinstance(exc, OSError) or not isinstance(code, int) or code not in errno.errorcode:
        return str(exc) or type(exc).__name__
    return describe_errno(code)


def errno_name(exc: OSError) -> str:
    """Return the name of the error's number, such as ``EMFILE``; EIO: it has none."""
    return errno.errorcode.get(exc.errno or 0, "EIO")


def describe_errno(code: int) -> str:
    """Return name and text of an error number, and the advice if a resource is used up."""
    text, hint = decode_errno(code), exhaustion_advice(code)
    return f"{text}; {hint}" if hint else text


def decode_errno(code: int) -> str:
    """Return name and text of an error number: ``EMFILE: Too many open files``."""
    return f"{errno.errorcode.get(code, code)}: {os.strerror(code)}"


def is_exhaustion(code: int | None) -> bool:
    """Whether `code` says that this machine, or this process, has no more of something."""
    return code in _ADVICE


def exhaustion_advice(code: int) -> str:
    """Return what to do about an exhausted resource; empty: `code` is another error."""
    if code not in _ADVICE:
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ADVICE[code].format(soft=soft, hard=hard)


_PORTS = "widen the sysctl net.ipv4.ip_local_port_range"

#: What each error of socket(2), accept(2), bind(2), connect(2) and epoll_ctl(2) asks for.
_ADVICE = {
    errno.EMFILE: (
        "this process has as many descriptors as it may: raise `ulimit -n` (now {soft}, "
        "at most {hard})"
    ),
    errno.ENFILE: "all processes together have too many files open: raise the sysctl fs.file-max",
    errno.ENOBUFS: "the kernel has no memory for more sockets: raise the sysctl net.ipv4.tcp_mem",
    errno.ENOMEM: "the kernel has no memory left: free some, or use fewer ranks on this host",
    errno.ENOSPC: "too many descriptors are watched: raise the sysctl fs.epoll.max_user_watches",
    errno.EADDRNOTAVAIL: (
        "no local port is free, or this host has lost the address: " + _PORTS + ", or look at "
        "`ip address`"
    ),
    errno.EADDRINUSE: "no local port is free: " + _PORTS,
}

__all__ = [
    "CommunicatorRevoked",
    "CompletionError",
    "ConcurrentCalls",
    "InternalError",
    "InvalidArgument",
    "NoHealthyRail",
    "NoQuorum",
    "PeerLost",
    "R2cclError",
    "RailDown",
    "ScheduleError",
    "TransportError",
    "TransportTimeout",
    "decode_errno",
    "describe_errno",
    "describe_os_error",
    "errno_name",
    "exhaustion_advice",
    "is_exhaustion",
]

"""Exceptions of r2ccl, and descriptions of operating system errors.

Transports translate errors of the operating system and of verbs into these exceptions once, at
their edge, with ``raise ... from exc``. `describe_os_error` and `describe_errno` add advice if a
resource is exhausted. Both work when no file descriptor is left, because they open none.

Convention: the message of an error names the rank that raises it and, if involved, the peer and the
rail. The message of an `InvalidArgument` about one argument names the argument instead of the rank.
If the reader can correct the cause, the message ends with the action to take.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class R2cclError(Exception):
    """Base class of the exceptions of r2ccl.

    An exception can be pickled; the unpickled copy has the same message and attributes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the form for `pickle`, which restores the error without its constructor."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[R2cclError], args: tuple[Any, ...], state: dict[str, Any]) -> R2cclError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class InvalidArgument(R2cclError, ValueError):
    """Wrong argument or setting, or calls or settings that differ between ranks.

    The message says what was given and what is allowed.
    """


class ScheduleError(R2cclError):
    """Incorrect schedule.

    Parameters
    ----------
    message : str
        Description of the defect.
    rank, channel, op : int or None
        Location of the defect; ``op`` is the index of the op in the rank's program of that channel.
        None: the message names none.
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
    """Failure of a path or device, or lack of memory or another resource that the call needs.

    Links recover from broken paths, so a broken path raises this error only with
    ``R2CC_MODE=failstop``.

    Parameters
    ----------
    message : str
    rank, peer, rail : int or None
        Rank that raises the error, and peer and rail of the path; None: not known, or not involved.
    status : str
        Decoded status, for example an errno name, a work completion status or ``"CARRIER_DOWN"``;
        empty if there is none.
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
    """Failure of an RDMA work request; raised only with ``R2CC_MODE=failstop``.

    ``status`` is the work completion status of the request.
    """


class RailDown(TransportError):
    """Failure of the local NIC or port of a rail; raised only with ``R2CC_MODE=failstop``."""


class TransportTimeout(TransportError):
    """Timeout of a wait; the message names the event that did not happen.

    If a wait for a `Work` or `MessageRequest` ends by its own ``timeout_s``, the operation
    continues.
    """


class NoHealthyRail(R2cclError):
    """Loss of every path to a peer.

    Parameters
    ----------
    rank, peer : int
    since_s : float
        Time without a path to the peer, in seconds.
    causes : dict of int to str
        Evidence of the failure of each path, by rail.
    """

    def __init__(self, *, rank: int, peer: int, since_s: float, causes: dict[int, str]) -> None:
        why = "; ".join(f"rail {rail}: {cause}" for rail, cause in sorted(causes.items()))
        super().__init__(
            f"rank {rank}: no healthy rail to rank {peer} for {since_s:.3f} s ({why}); "
            "restore one of these rails, or raise R2CC_NO_RAIL_TIMEOUT_S to wait longer"
        )
        self.rank = rank
        self.peer = peer
        self.since_s = since_s
        self.causes = causes


class PeerLost(R2cclError):
    """Loss of a peer, for example because its process died.

    Parameters
    ----------
    rank : int
        Rank that raises the error.
    peer : int
        Rank that is lost.
    last_heard_s : float or None
        Seconds since the last sign of life of `peer`; None: not known.
    why : str
        Evidence of the loss.
    host : str
        Host of `peer`. Empty if not known; ``(none)``, the name of a host without a name, also
        counts as not known.
    last_op : int or None
        Number of the last collective in which a frame of `peer` arrived over the network; 0 if no
        frame arrived, None if not known. Only collectives of the job's first communicator count.
    is_met : bool
        False if `peer` was lost during `r2ccl.init`. There is no communicator then, so the message
        does not suggest `shrink`.
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
        host = "" if host == _UNNAMED else host
        where = f" on {host}" if host else ""
        signs = [why]
        if last_heard_s is not None:
            signs.append(f"last heard {last_heard_s:.3f} s ago")
        if last_op is not None:
            seen = f"last data over the network: call {last_op}"
            signs.append(seen if last_op else "no data over the network")
        if is_met:
            super().__init__(
                f"rank {rank}: lost rank {peer}{where} ({'; '.join(signs)}); look at that rank's "
                "own log; continue without it with shrink(), or restart the job"
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
    """Lack of a quorum for ``shrink()``: the unreachable ranks may still run as a group.

    Parameters
    ----------
    rank : int
        Rank that raises the error.
    nranks : int
        Number of ranks of the communicator.
    alive : sequence of int
        Ranks that `rank` can still reach, including `rank`.
    gone : mapping of int to str
        Evidence of the loss of each rank that is not in `alive`.
    """

    def __init__(
        self, *, rank: int, nranks: int, alive: Sequence[int], gone: Mapping[int, str]
    ) -> None:
        why = "; ".join(f"rank {peer}: {cause}" for peer, cause in sorted(gone.items()))
        super().__init__(
            f"rank {rank}: can reach only ranks {list(alive)} of {nranks}, but shrink() needs "
            f"more than half, or half with rank 0 ({why}); restart the job, or, if no other rank "
            'can have continued, call shrink(quorum="any") instead'
        )
        self.rank = rank
        self.nranks = nranks
        self.alive = tuple(alive)
        self.gone = dict(gone)


class CommunicatorRevoked(R2cclError):
    """Use of a communicator that was revoked or closed, or revocation during a call.

    ``reason`` is the earlier error of r2ccl that revoked the communicator. ``reason`` is None if
    there was no such error, as on a closed communicator, or if this exception is itself the first
    error. If another exception, for example one raised by a user's operation, ended an asynchronous
    call, ``reason`` is also None, and the other exception is ``__cause__``.
    """

    def __init__(self, message: str, *, reason: BaseException | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class ConcurrentCalls(R2cclError):
    """Call that is not allowed while an earlier call is in progress.

    The later call is rejected before it starts; the earlier call continues. The two calls are:

    - blocking collectives of one communicator in different threads; while asynchronous collectives
      run, such calls are queued instead;
    - calls of one `LaunchPool`;
    - collectives of one communicator on device memory, blocking or asynchronous, if a thread is
      still starting the earlier call; or
    - a call and a later call made within it, by a signal handler or by a function of `user_op`.
    """


class InternalError(R2cclError):
    """Violation of an invariant: a defect of r2ccl; please report it with the message."""

    def __str__(self) -> str:
        return f"{super().__str__()}; please report this bug of r2ccl, with the logs of all ranks"


def describe_os_error(exc: BaseException) -> str:
    """Return the name and text of an error, and advice if a resource is exhausted.

    An exception other than an OSError with a known number is described by its text or, without a
    text, by its type.
    """
    code = getattr(exc, "errno", None)
    if not isinstance(exc, OSError) or not isinstance(code, int) or code not in errno.errorcode:
        return str(exc) or type(exc).__name__
    return describe_errno(code)


def errno_name(exc: OSError) -> str:
    """Return the name of the error's number, such as ``EMFILE``; ``EIO`` for an unknown number."""
    return errno.errorcode.get(exc.errno or 0, "EIO")


def describe_errno(code: int) -> str:
    """Return the name and text of an error number, and advice if a resource is exhausted."""
    text, hint = decode_errno(code), exhaustion_advice(code)
    return f"{text}; {hint}" if hint else text


def decode_errno(code: int) -> str:
    """Return the name and text of an error number: ``EMFILE: Too many open files``."""
    return f"{errno.errorcode.get(code, code)}: {os.strerror(code)}"


def is_exhaustion(code: int | None) -> bool:
    """Return whether `code` is an errno of an exhausted resource of the process or host."""
    return code in _ADVICE


def exhaustion_advice(code: int) -> str:
    """Return advice for the error number of an exhausted resource; empty for other numbers."""
    if code not in _ADVICE:
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ADVICE[code].format(soft=soft, hard=hard)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return a text with the lowest `_MAX_NAMED` of `ranks`, and the number of the others."""
    found = sorted(ranks)
    nmore = len(found) - _MAX_NAMED
    return f"{found[:_MAX_NAMED]}" + (f" and {nmore} more" if nmore > 0 else "")


#: Host name that Linux has before one is set.
_UNNAMED = "(none)"
#: Maximum number of ranks that a message names.
_MAX_NAMED = 8

_PORTS = "widen the sysctl net.ipv4.ip_local_port_range"

#: Advice for errors of socket(2), accept(2), bind(2), connect(2) and epoll_ctl(2).
_ADVICE = {
    errno.EMFILE: (
        "the process has reached its limit of open files: raise `ulimit -n` (now {soft}, "
        "at most {hard})"
    ),
    errno.ENFILE: "the system has reached its limit of open files: raise the sysctl fs.file-max",
    errno.ENOBUFS: "the kernel has no memory for more sockets: raise the sysctl net.ipv4.tcp_mem",
    errno.ENOMEM: "the kernel has no memory left: free some, or use fewer ranks per host",
    errno.ENOSPC: "epoll watches too many descriptors: raise the sysctl fs.epoll.max_user_watches",
    errno.EADDRNOTAVAIL: (
        "no local port is free, or the host has lost the address: " + _PORTS + ", or look at "
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
    "format_ranks",
    "is_exhaustion",
]

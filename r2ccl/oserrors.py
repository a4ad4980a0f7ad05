"""Operating system errors in words: name, text, and what to do where a resource is used up.

Text only; nothing is opened here. Invariant: `describe` needs no file descriptor, so it works when
none is left.
"""

from __future__ import annotations

import errno
import os
import resource


def describe(exc: BaseException) -> str:
    """Return what happened: ``EMFILE: Too many open files; raise `ulimit -n` ...``.

    An exception that carries no error number is described by its own text, or by its type.
    """
    code = getattr(exc, "errno", None)
    if not isinstance(exc, OSError) or not isinstance(code, int) or code not in errno.errorcode:
        return str(exc) or type(exc).__name__
    return describe_code(code)


def name(exc: OSError) -> str:
    """Return the name of the error's number, such as ``EMFILE``; EIO: it has none."""
    return errno.errorcode.get(exc.errno or 0, "EIO")


def describe_code(code: int) -> str:
    """Return name and text of an error number, and the advice if a resource is used up."""
    text, hint = decode(code), advice(code)
    return f"{text}; {hint}" if hint else text


def decode(code: int) -> str:
    """Return name and text of an error number: ``EMFILE: Too many open files``."""
    return f"{errno.errorcode.get(code, code)}: {os.strerror(code)}"


def is_exhaustion(code: int | None) -> bool:
    """Whether `code` says that this machine, or this process, has no more of something."""
    return code in _ADVICE


def advice(code: int) -> str:
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

__all__ = ["advice", "decode", "describe", "describe_code", "is_exhaustion", "name"]

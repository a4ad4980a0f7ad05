"""Resolution of the name of rank 0's host to numeric addresses, and its errors.

The name may not exist yet: containers and nodes that start with the job get their names late. The
callers therefore resolve it again until the timeout of `init`; the first failure is logged at once,
in case the name is mistyped. Permanent errors end `init` at once: a malformed name, or a resolver
error that no retry can change. A name that is still unknown at the timeout raises the same error.

Invariant: an `InvalidArgument` of this module names the rank, the name and the resolver's answer.
"""

from __future__ import annotations

import logging
import socket

from r2ccl.bootstrap import wire
from r2ccl.errors import InvalidArgument, describe_os_error

logger = logging.getLogger("r2ccl.bootstrap")

#: Errors of getaddrinfo(3) that no retry can change.
_FINAL = frozenset((socket.EAI_FAIL, socket.EAI_FAMILY, socket.EAI_SERVICE, socket.EAI_SOCKTYPE))
_NAMES = {getattr(socket, name): name for name in dir(socket) if name.startswith("EAI_")}


class LeaderName:
    """Name of rank 0's host, and its resolution to numeric addresses.

    Parameters
    ----------
    rank : int
        This rank.
    name : str
        `Identity.address`: a host name or a numeric address.
    port : int
    """

    def __init__(self, rank: int, name: str, port: int) -> None:
        self._rank = rank
        self._name = name
        self._port = port
        self._is_logged = False

    async def find(self) -> tuple[str, ...]:
        """Resolve the name once; return its numeric addresses, at least one, best first.

        Raises
        ------
        InvalidArgument
            If the name is malformed, or its resolution fails permanently.
        OSError
            If the name has no address now, but may have one later. The first such error is logged.
        """
        try:
            return await wire.resolve(self._name, self._port)
        except UnicodeError as exc:
            raise unresolvable(self._rank, self._name, exc) from exc
        except OSError as exc:
            if not is_passing(exc):
                raise unresolvable(self._rank, self._name, exc) from exc
            self._log(exc)
            raise

    def _log(self, exc: OSError) -> None:
        if self._is_logged:
            return
        self._is_logged = True
        logger.warning(
            "rank %d: the host of rank 0, %r, cannot be resolved yet (%s); retrying for up to "
            "R2CC_INIT_TIMEOUT_S; if the name is wrong, set MASTER_ADDR to the address of rank 0",
            self._rank, self._name, describe(exc),
        )  # fmt: skip


def is_passing(exc: OSError) -> bool:
    """Return True if a resolution that failed with `exc` may succeed when it is tried again."""
    return not (isinstance(exc, socket.gaierror) and exc.errno in _FINAL)


def unresolvable(rank: int, name: str, exc: OSError | UnicodeError) -> InvalidArgument:
    """Return the error of `rank`, which cannot resolve `name`, the host of rank 0, due to `exc`."""
    return InvalidArgument(
        f"rank {rank}: the host of rank 0, {name!r}, cannot be resolved ({describe(exc)}): set "
        "MASTER_ADDR to the address of that host, or to a name for which `getent hosts` gives one "
        "on every host"
    )


def describe(exc: OSError | UnicodeError) -> str:
    """Return the resolver's error as text, such as ``EAI_NONAME: Name or service not known``."""
    if isinstance(exc, socket.gaierror):
        return f"{_NAMES.get(exc.errno, exc.errno)}: {exc.strerror}"
    return describe_os_error(exc)


__all__ = ["LeaderName", "describe", "is_passing", "unresolvable"]

"""The numeric address behind MASTER_ADDR: found, or not there yet.

A name that does not exist may do so a moment later: where containers and nodes come up with the
job, their names do too. So it is asked for again for as long as init waits, and the first refusal
is logged at once, for whoever mistyped it. Only what no waiting can change ends init: a name that
is none by its spelling, and a resolver that says it will never answer.

Invariant: an error that leaves this module names the rank, the name and the resolver's answer.
"""

from __future__ import annotations

import logging
import socket

from r2ccl.bootstrap import wire
from r2ccl.errors import InvalidArgument, describe_os_error

logger = logging.getLogger("r2ccl.bootstrap")

#: getaddrinfo(3): what asking again cannot change.
_FINAL = frozenset((socket.EAI_FAIL, socket.EAI_FAMILY, socket.EAI_SERVICE, socket.EAI_SOCKTYPE))
_NAMES = {getattr(socket, name): name for name in dir(socket) if name.startswith("EAI_")}


class LeaderName:
    """Rank 0's address as its users spell it.

    Parameters
    ----------
    rank : int
        This rank.
    name : str
        ``MASTER_ADDR``, a name or a numeric address.
    port : int
    """

    def __init__(self, rank: int, name: str, port: int) -> None:
        self._rank = rank
        self._name = name
        self._port = port
        self._is_logged = False

    async def find(self) -> str:
        """Return the first numeric address.

        Raises
        ------
        InvalidArgument
            There cannot be such a name.
        OSError
            It has no address now; the first such answer is logged.
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
            "rank %d: MASTER_ADDR=%r cannot be resolved yet (%s); it is tried again for "
            "R2CC_INIT_TIMEOUT_S; if the name is wrong, set MASTER_ADDR to the address of rank 0",
            self._rank, self._name, describe(exc),
        )  # fmt: skip


def is_passing(exc: OSError) -> bool:
    """Whether the resolver may answer otherwise later."""
    return not (isinstance(exc, socket.gaierror) and exc.errno in _FINAL)


def unresolvable(rank: int, name: str, exc: OSError | UnicodeError) -> InvalidArgument:
    """Return the error of a MASTER_ADDR without an address."""
    return InvalidArgument(
        f"rank {rank}: MASTER_ADDR={name!r} cannot be resolved ({describe(exc)}): set it to the "
        "address of rank 0's host, or to a name for which `getent hosts` gives one on every host"
    )


def describe(exc: OSError | UnicodeError) -> str:
    """Return the resolver's answer: ``EAI_NONAME: Name or service not known``."""
    if isinstance(exc, socket.gaierror):
        return f"{_NAMES.get(exc.errno, exc.errno)}: {exc.strerror}"
    return describe_os_error(exc)


__all__ = ["LeaderName", "describe", "is_passing", "unresolvable"]

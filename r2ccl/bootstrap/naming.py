"""The numeric address behind MASTER_ADDR: found, missing for good, or not there yet.

A resolver that says that there is no such name ends init at once: waiting would not change its
answer. Two cases are tried again for as long as init waits: a resolver that cannot answer now
(EAI_AGAIN), and, in a Kubernetes pod, a name that does not exist, because a headless service has
names only of pods that are ready.

Invariant: an error that leaves this module names the rank, the name and the resolver's answer.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

from r2ccl import oserrors
from r2ccl.bootstrap import wire
from r2ccl.errors import InvalidArgument

logger = logging.getLogger("r2ccl.bootstrap")

#: Set by the kubelet in every container of a pod.
_POD_VARIABLE = "KUBERNETES_SERVICE_HOST"

#: getaddrinfo(3): the resolver had no answer, or lacked something to ask with.
_TEMPORARY = frozenset((socket.EAI_AGAIN, socket.EAI_SYSTEM, socket.EAI_MEMORY))
_MISSING = frozenset((socket.EAI_NONAME, socket.EAI_NODATA))
_NAMES = {getattr(socket, name): name for name in dir(socket) if name.startswith("EAI_")}


def may_appear(env: Mapping[str, str]) -> bool:
    """Whether a name that does not exist may come into being while the job starts."""
    return _POD_VARIABLE in env


class LeaderName:
    """Rank 0's address as its users spell it.

    Parameters
    ----------
    rank : int
        This rank.
    name : str
        ``MASTER_ADDR``, a name or a numeric address.
    port : int
    is_awaited : bool
        See `may_appear`.
    """

    def __init__(self, rank: int, name: str, port: int, *, is_awaited: bool) -> None:
        self._rank = rank
        self._name = name
        self._port = port
        self._is_awaited = is_awaited
        self._is_logged = False

    async def find(self) -> str:
        """Return the first numeric address.

        Raises
        ------
        InvalidArgument
            There is no such name.
        OSError
            There is no answer now; the first one is logged.
        """
        try:
            return await wire.resolve(self._name, self._port)
        except UnicodeError as exc:
            raise unresolvable(self._rank, self._name, exc) from exc
        except socket.gaierror as exc:
            if not is_passing(exc, is_awaited=self._is_awaited):
                raise unresolvable(self._rank, self._name, exc) from exc
            self._log(exc)
            raise

    def _log(self, exc: socket.gaierror) -> None:
        if self._is_logged:
            return
        self._is_logged = True
        logger.warning(
            "rank %d: MASTER_ADDR=%r cannot be resolved yet (%s); it is tried again for "
            "R2CC_INIT_TIMEOUT_S; if the name is wrong, set MASTER_ADDR to the address of rank 0",
            self._rank, self._name, describe(exc),
        )  # fmt: skip


def is_passing(exc: socket.gaierror, *, is_awaited: bool) -> bool:
    """Whether the resolver may answer otherwise later."""
    return exc.errno in _TEMPORARY or (is_awaited and exc.errno in _MISSING)


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
    return oserrors.describe(exc)


__all__ = ["LeaderName", "describe", "is_passing", "may_appear", "unresolvable"]

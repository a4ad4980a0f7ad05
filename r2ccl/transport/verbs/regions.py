"""Memory regions: one allocation on every NIC, or on none, and refusals put into words.

The NICs and their library are behind two small interfaces, `Registrar` and `MemoryRegion`; a kind
of memory (the host's, a GPU's) is behind `Memory`. This module sees neither pyverbs nor CUDA.

Invariant: `register_everywhere` leaves a region on every NIC or on none.
"""

from __future__ import annotations

import errno
import logging
import resource
from collections.abc import Sequence
from typing import Any, Protocol

from r2ccl.errors import TransportError
from r2ccl.transport.verbs.lifetime import Allocation, allocation_of

_log = logging.getLogger(__name__)


class MemoryRegion(Protocol):
    """A registration on one NIC.

    ``iova_base`` is added to an address before it goes into a work request or to a peer: 0 for
    host memory, where the NIC uses the process's own addresses.
    """

    @property
    def lkey(self) -> int:
        """Key of local access."""
        ...

    @property
    def rkey(self) -> int:
        """Key of remote access."""
        ...

    @property
    def iova_base(self) -> int:
        """See the class."""
        ...

    def close(self) -> None:
        """Deregister."""
        ...


class Registrar(Protocol):
    """What registers memory with one NIC; ``name`` is the NIC's, for messages."""

    @property
    def name(self) -> str:
        """The NIC."""
        ...

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """Register `nbytes` bytes at `address`.

        Raises
        ------
        TransportError
            The NIC refused: passes unchanged, and must name it.
        Exception
            With ``errno`` or ``error_code``: is translated by `refusal`.
        """
        ...


class Memory(Protocol):
    """What a cache must know of the kind of memory it registers."""

    def locate(self, address: int, nbytes: int, owner: Any) -> Allocation:
        """Find the allocation behind an address."""
        ...

    def identity(self, address: int) -> int:
        """Return the identity of what is allocated at `address` now; asked where it is not 0."""
        ...

    def register(
        self, registrars: Sequence[Registrar], allocation: Allocation
    ) -> tuple[MemoryRegion, ...]:
        """Register on every NIC or on none."""
        ...


class HostMemory:
    """`Memory` the processor addresses; its allocations end with their owners."""

    def locate(self, address: int, nbytes: int, owner: Any) -> Allocation:
        """See `r2ccl.transport.verbs.lifetime.allocation_of`."""
        return allocation_of(address, nbytes, owner)

    def identity(self, address: int) -> int:
        """Return 0: the owner tells."""
        return 0

    def register(
        self, registrars: Sequence[Registrar], allocation: Allocation
    ) -> tuple[MemoryRegion, ...]:
        """See `register_everywhere`."""
        return register_everywhere(registrars, allocation.base, allocation.nbytes)


def register_everywhere(
    registrars: Sequence[Registrar], address: int, nbytes: int
) -> tuple[MemoryRegion, ...]:
    """Register memory on every NIC, or on none.

    Raises
    ------
    TransportError
        A NIC refused; the message names it and says what to do, ``status`` is the errno's name.

    Notes
    -----
    *After failure*: no NIC keeps a registration. An exception that bears no error number passes
    unchanged.
    """
    regions: list[MemoryRegion] = []
    try:
        for registrar in registrars:
            try:
                regions.append(registrar.register(address, nbytes))
            except Exception as exc:
                refused = refusal(registrar.name, nbytes, exc)
                if refused is None:
                    raise
                raise refused from exc
    except BaseException:
        close_all(registrars, regions)
        raise
    return tuple(regions)


def refusal(nic: str, nbytes: int, exc: Exception) -> TransportError | None:
    """Translate a NIC's refusal to register `nbytes` bytes, with a hint.

    Parameters
    ----------
    nic : str
    nbytes : int
    exc : Exception
        Its ``errno`` (OSError) or ``error_code`` (pyverbs) is read.

    Returns
    -------
    TransportError or None
        ``status`` is the errno's name; None: the exception has no error number.
    """
    number = getattr(exc, "errno", None) or getattr(exc, "error_code", None)
    if not isinstance(number, int):
        return None
    status = _NAMES.get(number) or errno.errorcode.get(number, f"errno {number}")
    hint = _HINTS.get(status, "`r2ccl doctor` says what this NIC can do")
    return TransportError(
        f"{nic} cannot register {nbytes} bytes: {status} ({exc}); "
        + hint.format(memlock=locked_memory_limit()),
        status=status,
    )


def close_all(registrars: Sequence[Registrar], regions: Sequence[MemoryRegion]) -> None:
    """Deregister `regions`, the first NICs' in order.

    A NIC that cannot deregister may be gone altogether: that is logged, and the others go on.
    """
    for registrar, region in zip(registrars, regions, strict=False):
        try:
            region.close()
        except Exception as exc:
            _log.warning("%s cannot deregister memory: %s", registrar.name, exc)


def locked_memory_limit() -> str:
    """Return how much memory this process may lock, in words."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"


#: Verbs' spelling where Python's table of error numbers has another.
_NAMES = {errno.EOPNOTSUPP: "EOPNOTSUPP"}

#: What most often lies behind an error of ibv_reg_mr (its manual page and the kernel's
#: drivers/infiniband/core/umem.c), and what to do about it.
_HINTS = {
    "ENOMEM": (
        "the limit of locked memory is {memlock} and every NIC counts for itself: raise it "
        "(`ulimit -l unlimited`, or LimitMEMLOCK= of the service), or lower "
        "R2CC_REGISTRATION_LIMIT_NBYTES"
    ),
    "EPERM": (
        "locking memory is not permitted (the limit is {memlock}): raise it (`ulimit -l "
        "unlimited`) or give the process CAP_IPC_LOCK"
    ),
    "EFAULT": "the memory is not mapped for writing: read-only arrays and files cannot be targets",
    "EINVAL": "the NIC cannot register memory of this kind",
    "EOPNOTSUPP": "the NIC's driver cannot register memory of this kind",
}

__all__ = [
    "HostMemory",
    "Memory",
    "MemoryRegion",
    "Registrar",
    "close_all",
    "locked_memory_limit",
    "refusal",
    "register_everywhere",
]

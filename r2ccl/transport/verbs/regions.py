"""Registration of an allocation with every NIC or none, and explanations of refusals.

`Registrar` and `MemoryRegion` are the interfaces of a NIC. `Memory` is the interface of a kind of
memory (host or GPU). These interfaces keep pyverbs and CUDA out of this module and of the
registration cache.
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
    """Memory registered with one NIC."""

    @property
    def lkey(self) -> int:
        """Local key: this rank's work requests use it to access the memory."""
        ...

    @property
    def rkey(self) -> int:
        """Remote key: RDMA writes of peers use it to access the memory."""
        ...

    @property
    def iova_base(self) -> int:
        """Difference between the NIC's I/O address of a byte and its address in the process.

        The difference is added to addresses in work requests and in messages to peers. It is 0 for
        host memory.
        """
        ...

    def close(self) -> None:
        """Deregister the memory.

        Raises
        ------
        Exception
            If the NIC cannot deregister the memory, for example because it is gone.
        """
        ...


class Registrar(Protocol):
    """NIC that can register memory."""

    @property
    def name(self) -> str:
        """Name of the NIC, for messages."""
        ...

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """Register `nbytes` bytes at `address`.

        Raises
        ------
        TransportError
            If the NIC refuses and the registrar explains why. Callers must pass on the error
            unchanged.
        Exception
            If the NIC refuses and the exception has only an error number, ``errno`` or
            ``error_code``. Callers must translate the exception with `refusal`.
        """
        ...


class Memory(Protocol):
    """Kind of memory that a registration cache serves: host memory or GPU memory."""

    def locate(self, address: int, nbytes: int, owner: Any) -> Allocation:
        """Return the allocation that contains `nbytes` bytes at `address`.

        Raises
        ------
        InvalidArgument
            If the bytes are not part of one allocation, or `owner` does not own the allocation.
        TransportError
            If memory of this kind cannot be registered.
        """
        ...

    def identity(self, address: int) -> int:
        """Return the identity of the allocation that is at `address` now.

        See `Allocation.identity`. The result is 0 if allocations of this kind of memory are
        identified by their owner, and -1 if there is no allocation at `address`, for example
        because it was freed.

        Raises
        ------
        TransportError
            If the driver cannot identify the allocation.
        """
        ...

    def register(
        self, registrars: Sequence[Registrar], allocation: Allocation
    ) -> tuple[MemoryRegion, ...]:
        """Register `allocation` with every NIC, or with none if one refuses.

        Raises
        ------
        TransportError
            If a NIC refuses; status ``ENOMEM`` if ending other registrations may help.
        """
        ...


class HostMemory:
    """Host memory (implements `Memory`); an allocation ends when the object that owns it dies."""

    def locate(self, address: int, nbytes: int, owner: Any) -> Allocation:
        """Return the allocation of `owner` that contains the bytes, as `allocation_of` does."""
        return allocation_of(address, nbytes, owner)

    def identity(self, address: int) -> int:
        """Return 0: host allocations are identified by their owner."""
        return 0

    def register(
        self, registrars: Sequence[Registrar], allocation: Allocation
    ) -> tuple[MemoryRegion, ...]:
        """Register `allocation` with every NIC or with none, as `register_everywhere` does."""
        return register_everywhere(registrars, allocation.base, allocation.nbytes)


def register_everywhere(
    registrars: Sequence[Registrar], address: int, nbytes: int
) -> tuple[MemoryRegion, ...]:
    """Register `nbytes` bytes at `address` with every NIC, or with none if one refuses.

    Raises
    ------
    TransportError
        If a NIC refuses; the message names the NIC and the likely cause or remedy. ``status`` is
        the name of the errno.

    Notes
    -----
    *After failure*: no NIC keeps a registration. An exception without an error number is raised
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
    """Translate the exception of a NIC that refused to register memory, and add a hint.

    Parameters
    ----------
    nic : str
        Name of the NIC.
    nbytes : int
        Size of the memory, in bytes.
    exc : Exception
        Exception of the NIC, with an error number as ``errno`` (OSError) or ``error_code``
        (pyverbs).

    Returns
    -------
    TransportError or None
        ``status`` is the name of the errno. None if the exception has no error number.
    """
    number = getattr(exc, "errno", None) or getattr(exc, "error_code", None)
    if not isinstance(number, int):
        return None
    status = _NAMES.get(number) or errno.errorcode.get(number, f"errno {number}")
    hint = _HINTS.get(status, "run `r2ccl doctor` to see what this NIC can do")
    return TransportError(
        f"{nic} cannot register {nbytes} bytes: {status} ({exc}); "
        + hint.format(memlock=locked_memory_limit()),
        status=status,
    )


def close_all(registrars: Sequence[Registrar], regions: Sequence[MemoryRegion]) -> None:
    """Deregister `regions`; region *i* was registered by registrar *i*.

    A NIC that cannot deregister may be gone, so the error is only logged.

    Parameters
    ----------
    registrars : sequence of Registrar
    regions : sequence of MemoryRegion
        May be shorter than `registrars`.
    """
    for registrar, region in zip(registrars, regions, strict=False):
        try:
            region.close()
        except Exception as exc:
            _log.warning("%s cannot deregister memory: %s", registrar.name, exc)


def locked_memory_limit() -> str:
    """Return the soft RLIMIT_MEMLOCK of this process as text: "unlimited" or "65536 bytes"."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"


#: Errno names of the verbs documentation, where `errno.errorcode` has a different name (ENOTSUP).
_NAMES = {errno.EOPNOTSUPP: "EOPNOTSUPP"}

#: Usual cause of each error of ibv_reg_mr (from its manual page and the kernel's
#: drivers/infiniband/core/umem.c), and what to do if there is a remedy.
_HINTS = {
    "ENOMEM": (
        "the limit of locked memory is {memlock}, and memory counts once per NIC: raise the limit "
        "if there is one (`ulimit -l unlimited`, or LimitMEMLOCK= of the service), or lower "
        "R2CC_REGISTRATION_LIMIT_NBYTES"
    ),
    "EPERM": (
        "locking memory is not permitted (the limit is {memlock}): raise the limit (`ulimit -l "
        "unlimited`) or give the process CAP_IPC_LOCK"
    ),
    "EFAULT": "the memory is not mapped for writing: use a writable copy of read-only data",
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

"""Log line of each rank about its job: version, rails, transport, schedules and mode."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from r2ccl.bootstrap.control import ControlPlane
from r2ccl.config import VERSION, Config
from r2ccl.kernels.native import why_not_compiled
from r2ccl.types import Nic

_log = logging.getLogger(__name__)


def announce(
    control: ControlPlane, config: Config, rails: Sequence[Nic], *, is_local: bool, is_shared: bool
) -> None:
    """Log one INFO line about the job: version, rails, transport, schedules and mode.

    If compiled code cannot be used although a setting allows it, rank 0 also logs a warning that
    names the consequences.

    If ``R2CC_DEBUG`` is VERSION or WARN, no rank logs the INFO line. As in NCCL, rank 0 then logs a
    short line with the version and the number of ranks, and the other ranks log nothing.

    Parameters
    ----------
    control : ControlPlane
    config : Config
    rails : sequence of Nic
        Local NIC of each rail: first the NICs of TCP, then the RDMA ports.
    is_local : bool
        True if all ranks share memory.
    is_shared : bool
        True if the ranks of each host share memory.
    """
    if control.rank == 0 and "auto" in (config.shm, config.compiled) and why_not_compiled():
        _log.warning(
            "shared memory and compiled calls are off, so calls are slower, and 16-bit and 8-bit "
            "floats in host memory cannot be reduced: %s; or set R2CC_SHM=0 and R2CC_COMPILED=0 to "
            "silence this warning",
            why_not_compiled(),
        )
    if control.rank == 0 and config.debug.upper() in ("VERSION", "WARN"):
        # The level of the logger, WARNING, would drop the record, so pass it to the handlers.
        text, values = "r2ccl version %s, %d ranks", (VERSION, control.nranks)
        record = _log.makeRecord(_log.name, logging.INFO, __file__, 0, text, values, None)
        _log.handle(record)
        return
    _log.info(
        "rank %d of %d: r2ccl %s; rails: %s; transport: %s; schedules: %s; mode: %s",
        control.rank,
        control.nranks,
        VERSION,
        ", ".join(_rail(rail, nic) for rail, nic in enumerate(rails)),
        describe_transport(has_rdma=control.nhcas > 0, is_local=is_local, is_shared=is_shared),
        {"auto": config.algo, "r2cc": "ring, r2cc"}.get(config.mode, "ring"),
        config.mode,
    )


def _rail(rail: int, nic: Nic) -> str:
    """Return a text that describes a rail: its number and its NIC.

    The NIC is described by its name, its address if it has one, and whether it is a last resort.
    """
    at = f" {nic.address}" * bool(nic.address)
    return f"{rail} {nic.name}{at}{' (last resort)' * nic.is_last_resort}"


def describe_transport(*, has_rdma: bool, is_local: bool, is_shared: bool) -> str:
    """Return a text that names the transports of host arrays.

    `is_local` and `is_shared` have the meaning that they have in `announce`.
    """
    network = "RDMA, TCP as the last resort" if has_rdma else "TCP"
    if is_local:
        return f"shared memory, {network} for calls that cannot use it"
    return f"{network}, shared memory within each host" if is_shared else network


__all__ = ["announce", "describe_transport"]

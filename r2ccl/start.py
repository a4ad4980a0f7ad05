"""init(): from "who are we" to a communicator; where the parts are put together."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from r2ccl import bootstrap
from r2ccl.communicator import Communicator
from r2ccl.config import DEBUG_LEVELS, Config
from r2ccl.engine import Leaving
from r2ccl.recovery import Revoke
from r2ccl.resilience.path import Announcement
from r2ccl.topology.interfaces import discover
from r2ccl.transport.base import Transport
from r2ccl.transport.tcp import TcpTransport

if TYPE_CHECKING:
    from r2ccl.testing.faults import FaultPlan


def init(comm: Any = None, *, faults: FaultPlan | None = None, **settings: Any) -> Communicator:
    """Meet the other ranks and connect every rail.

    Parameters
    ----------
    comm : mpi4py communicator, optional
        Its ranks are the communicator's. Default: the torchrun-style environment (``RANK``,
        ``WORLD_SIZE``, ``MASTER_ADDR`` ...), as `r2ccl launch` and torchrun set it, or the world
        of the MPI launcher the process was started by.
    faults : FaultPlan, optional
        Faults to inject (testing); default: the plan in ``R2CC_FAULT_PLAN``, if any.
    **settings
        Fields of `Config`, winning over their ``R2CC_*`` variables.

    Returns
    -------
    Communicator
        Use it as a context manager: leaving the block closes it, or aborts it on an exception.

    Raises
    ------
    InvalidArgument
        A setting is wrong, ranks disagree on one, or nothing says who the ranks are.
    TransportTimeout
        Not every rank came within ``R2CC_INIT_TIMEOUT_S``; names those missing.

    Notes
    -----
    *Collective*: all ranks.
    """
    config = Config.from_env(os.environ, **settings)
    _set_log_level(config)
    control = bootstrap.connect(
        config,
        message_types=Announcement | Revoke | Leaving,
        nics_for=lambda is_one_host, control_address: discover(
            config, is_one_host=is_one_host, exclude_addresses=(control_address,)
        ),
        comm=comm,
    )
    transport: Transport = TcpTransport(
        control.rank,
        len(control.nics),
        eager_nbytes=config.eager_nbytes,
        congestion=config.tcp_congestion,
    )
    if faults is not None or config.fault_plan:
        transport = _with_faults(transport, control.rank, faults)
    made = Communicator(control, transport, config)
    made.connect()
    return made


def _set_log_level(config: Config) -> None:
    """Let the library's logger through as far as ``R2CC_DEBUG`` says, to stderr if nowhere else."""
    level = DEBUG_LEVELS[config.debug.upper()]
    logger = logging.getLogger("r2ccl")
    if level:
        logger.setLevel(level)
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())


def _with_faults(inner: Transport, rank: int, plan: FaultPlan | None) -> Transport:
    """Wrap `inner` so that it reports its slices to whoever injects the faults."""
    from r2ccl.testing.reporting import ReportingTransport

    return ReportingTransport(inner, rank, plan, os.environ)


__all__ = ["init"]

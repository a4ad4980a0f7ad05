"""`init`: connects this process to the other ranks and assembles a `Communicator`."""

from __future__ import annotations

import logging
import os
import pkgutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Unpack

from r2ccl import bootstrap
from r2ccl.bootstrap import logs
from r2ccl.bootstrap.identity import RankComm
from r2ccl.bootstrap.messages import Codec
from r2ccl.communicator import Communicator
from r2ccl.config import Config, Settings
from r2ccl.errors import (
    InvalidArgument,
    PeerLost,
    TransportError,
    describe_os_error,
    errno_name,
    is_exhaustion,
)
from r2ccl.failover.connector import Answer, EndpointReady, Offer
from r2ccl.failover.diagnosis.verdict import Finding, ProbeReply, ProbeRequest
from r2ccl.failover.failover import PortUp
from r2ccl.failover.health.rounds import (
    Commit,
    ExcludeRails,
    Prepare,
    Promise,
    RailsExcluded,
    Report,
)
from r2ccl.failover.migration.path import Announcement, ClosePaths, ConnectPaths
from r2ccl.failover.revocation import Leaving, Revoke, Spared
from r2ccl.failover.shrink.protocol import Message as Shrinking
from r2ccl.gpu.collectives import device_collectives
from r2ccl.gpu.hardware import CudaHardware
from r2ccl.runtime.contexts import InContext
from r2ccl.runtime.desync_check import Calling
from r2ccl.runtime.job import Job
from r2ccl.runtime.signal_dump import SignalDump, require_main_thread, write_line
from r2ccl.topology.hcas import NO_HCA, GidFinder, Hca, list_hcas, select_hcas
from r2ccl.topology.interfaces import discover
from r2ccl.topology.names import NameFilter
from r2ccl.topology.neighbours import Neighbours
from r2ccl.transport.base import Transport, TransportWrapper, WrappedTransport
from r2ccl.transport.mixed import MixedTransport, TransportPart
from r2ccl.transport.tcp.transport import TcpTransport
from r2ccl.types import Nic, PathKey

if TYPE_CHECKING:
    from r2ccl.gpu.pxn.transport import PxnTransport

_log = logging.getLogger(__name__)

#: All message types on the control sessions, except those of bootstrap itself.
_MESSAGES: Any = (
    Announcement | ConnectPaths | ClosePaths | Revoke | PortUp | Leaving | Spared | Calling
    | Offer | Answer | EndpointReady | ProbeRequest | ProbeReply | Finding
    | Report | Prepare | Promise | Commit | ExcludeRails | RailsExcluded
    | InContext
    | Shrinking
)  # fmt: skip
#: Methods of the argument ``comm`` of `init`.
_EXCHANGE = ("Get_rank", "Get_size", "allgather", "bcast")
#: Codec of the control sessions. Making it takes 5 ms, which a rank server
#: (`r2ccl.bootstrap.rank_server`) spends before it forks, when it imports this module.
_CODEC = Codec(_MESSAGES)


def init(
    comm: RankComm | None = None,
    *,
    faults: TransportWrapper | None = None,
    **settings: Unpack[Settings],
) -> Communicator:
    """Connect this process to the other ranks of its job; return the communicator.

    Parameters
    ----------
    comm : mpi4py communicator, optional
        MPI communicator that provides the ranks. Default: the torchrun-style environment
        (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` ...), as set by `r2ccl launch` and torchrun;
        else ``MPI.COMM_WORLD``, if an MPI launcher started the process, mpi4py is installed and
        ``MASTER_ADDR`` is not set; else the variables of Slurm, Kubernetes or an MPI launcher.
    faults : r2ccl.testing.FaultPlan, optional
        Faults to inject (testing), or another object whose ``wrap`` wraps the transport. Default:
        the function that ``R2CC_TRANSPORT_WRAPPER`` names, if any.
    **settings
        Fields of `Config`; they take precedence over their ``R2CC_*`` variables.

    Returns
    -------
    Communicator
        Use the communicator as a context manager: leaving the block closes it, or aborts it on an
        exception.

    Raises
    ------
    InvalidArgument
        If `comm` is no communicator, `faults` has no method ``wrap``, a setting is wrong, ranks
        differ in a setting, nothing defines this process's rank, there is no secret or no usable
        interface, an address or port cannot be used, or ``R2CC_DUMP_SIGNAL`` is set and this is not
        the main thread.
    TransportTimeout
        If a rank does not call `init`, or there is no path to a peer, within
        ``R2CC_INIT_TIMEOUT_S``; the message names the missing ranks.
    PeerLost
        If a rank is lost during `init`.
    CommunicatorRevoked, NoHealthyRail
        If another rank fails, or every path to a peer is lost, during `init`.
    TransportError
        If this process or its host has run out of file descriptors, ports or memory, its NICs
        cannot be listed, an RDMA NIC that ``R2CC_HCA`` names cannot be opened, ranks of a host
        cannot share memory although ``R2CC_SHM=1``, or compiled code cannot be loaded although
        ``R2CC_COMPILED=1``. With ``R2CC_MODE=failstop`` also if a path fails during `init`.

    Notes
    -----
    *Collective*: all ranks.
    """
    if not (comm is None or all(hasattr(comm, name) for name in _EXCHANGE)):
        raise InvalidArgument(
            f"comm={comm!r}: pass a communicator of mpi4py, or leave it out if a launcher, such as "
            "`r2ccl launch`, started the process; pass settings by keyword, as in timeout_s=30"
        )
    if not (faults is None or hasattr(faults, "wrap")):
        raise InvalidArgument(
            f"faults={faults!r}: pass a plan of r2ccl.testing, or another object with a method wrap"
        )
    config = Config.from_env(os.environ, **settings)
    logs.set_level(config)
    if config.dump_signal:
        require_main_thread()
    hcas: list[Hca] = []

    def choose_nics(nranks: int, is_one_host: bool, control_address: str) -> tuple[Nic, ...]:
        if config.hca != NO_HCA and (config.hca or not is_one_host):
            hcas.extend(choose_hcas(list_hcas(), config.hca, nranks))
        return discover(
            config,
            is_one_host=is_one_host,
            exclude_addresses=(control_address,),
            rdma_names=[hca.netdev for hca in hcas],
        )

    with _dump_signal_answered(config):
        with _exhaustion_explained(f"process {os.getpid()}"):
            control = bootstrap.connect(
                config,
                codec=_CODEC,
                nics_for=choose_nics,
                hcas_for=lambda: tuple(hca.label for hca in hcas),
                comm=comm,
            )
        wrapped: list[WrappedTransport] = []

        def wrap(inner: Transport) -> Transport:
            if faults is not None:
                wrapped.append(faults.wrap(inner, control.rank, control.nranks))
            elif put_around := _named_wrapper(config):
                wrapped.append(put_around(inner, control.rank))
            return wrapped[0] if wrapped else inner

        with _exhaustion_explained(f"rank {control.rank}"):
            made = _assemble(config, hcas, control, tuple(range(control.nranks)), wrap)
            try:
                made.connect()
            except PeerLost as exc:
                # There is no communicator to shrink.
                raise PeerLost(
                    rank=exc.rank, peer=exc.peer, last_heard_s=exc.last_heard_s, why=exc.why,
                    host=exc.host, is_met=False,
                ) from exc.__cause__  # fmt: skip
    for transport in wrapped:
        transport.begin(made.ncalls + 1)
    return made


@contextmanager
def _exhaustion_explained(who: str) -> Iterator[None]:
    """Translate OSErrors of exhausted resources to `TransportError`, whose message names `who`."""
    try:
        yield
    except OSError as exc:
        if not is_exhaustion(exc.errno):
            raise
        raise TransportError(
            f"{who}: init() ran out of an operating system resource: {describe_os_error(exc)}",
            status=errno_name(exc),
        ) from exc


@contextmanager
def _dump_signal_answered(config: Config) -> Iterator[None]:
    """Handle the signal of ``R2CC_DUMP_SIGNAL``, if one is set, within a ``with`` block.

    `init` connects within the block. The communicator does not have its own handler yet, so without
    this handler the signal would end the process.
    """
    if not config.dump_signal:
        yield
        return
    text = (
        f"r2ccl: process {os.getpid()} is in init(), without a status yet: if ranks are missing, "
        "rank 0 logs which"
    )
    answer = SignalDump(signal.Signals[config.dump_signal], lambda: write_line(text, ""))
    try:
        yield
    finally:
        answer.close()


def _assemble(
    config: Config,
    hcas: Sequence[Hca],
    control: bootstrap.ControlPlane,
    members: tuple[int, ...],
    wrap: Callable[[Transport], Transport] | None = None,
) -> Communicator:
    """Make a communicator, not yet connected, for `init` or `Communicator.shrink`.

    The communicator owns `control`; if this function raises, it has closed `control`.
    """
    opened: Transport | None = None
    try:
        opened, relayed = _open_transport(control, config, hcas)
        transport = opened if wrap is None else wrap(opened)
        ports = (Nic(hca.label, "", hca.index, hca.speed_mbps) for hca in hcas)
        job = Job(
            control,
            transport,
            config,
            (*control.nics, *ports)[: transport.nrails],
            sharing_obstacle="" if transport is opened else "faults are injected into its network",
        )
        return Communicator(
            job,
            job.engine,
            members,
            assemble=partial(_assemble, config, hcas),
            make_device_calls=partial(device_collectives, hardware=CudaHardware(), pxn=relayed),
        )
    except BaseException:
        try:
            if opened is not None:
                opened.close()
        finally:
            control.close(0)
        raise


def _open_transport(
    control: bootstrap.ControlPlane, config: Config, hcas: Sequence[Hca]
) -> tuple[Transport, PxnTransport | None]:
    """Open the TCP transport and, if every rank has RDMA ports, also the verbs transport.

    Return the transport to use, and the part of this transport that can use PXN routes, which pass
    through the memory of other GPUs. The part is None if RDMA is not used or the CUDA bindings are
    missing.
    """
    tcp = TcpTransport(
        control.rank,
        len(control.nics),
        eager_nbytes=config.inbox_nbytes,
        congestion=config.tcp_congestion,
        sources=dict(enumerate(control.nics)),
        targets={
            PathKey(info.rank, rail): (host, port)
            for info in control.peers
            for rail, ((host, _), port) in enumerate(zip(info.rails, info.probe_ports, strict=True))
            if info.rank != control.rank
        },
        probe_timeout_s=config.probe_timeout_s,
    )
    if control.nhcas < len(hcas):
        _log.warning(
            "rank %d has %d RDMA ports, but another rank has only %d, so this rank uses only that "
            "many; give every rank the same number of ports, or select ports with R2CC_HCA",
            control.rank, len(hcas), control.nhcas,
        )  # fmt: skip
    if not control.nhcas:
        return tcp, None
    try:
        verbs = _open_verbs(control, config, hcas[: control.nhcas])
    except BaseException:
        tcp.close()
        raise
    if find_spec("cuda") is None:
        return MixedTransport((tcp, verbs)), None
    from r2ccl.gpu.pxn.transport import PxnTransport

    relayed = PxnTransport(verbs)
    return MixedTransport((tcp, relayed)), relayed


def choose_hcas(hcas: Sequence[Hca], pattern: str, nranks: int) -> tuple[Hca, ...]:
    """Return the RDMA ports in `hcas` that this rank uses.

    A port that cannot be opened, or cannot serve all `nranks` ranks, is returned only if `pattern`,
    the value of ``R2CC_HCA``, names it; otherwise it is left out with a warning. If `pattern` names
    no port (it is empty, or only excludes ports) and pyverbs is not installed, no port is returned.

    Raises
    ------
    InvalidArgument
        If `select_hcas` refuses `pattern`. Also if pyverbs is not installed, and `pattern` names
        ports.
    """
    chosen = select_hcas(hcas, pattern)
    names = NameFilter(pattern, variable="R2CC_HCA")
    if chosen and find_spec("pyverbs") is None:
        if names.is_selection:
            raise InvalidArgument(
                "R2CC_HCA selects RDMA NICs, but this Python has no pyverbs: install it as "
                "`r2ccl doctor` says (Debian: python3-pyverbs), or set R2CC_HCA=none"
            )
        _log.warning(
            "RDMA NICs were found, but this Python has no pyverbs, so data travels over TCP; to "
            "use RDMA, install pyverbs as `r2ccl doctor` says (Debian: python3-pyverbs)"
        )
        return ()
    if names.is_selection:
        return chosen
    return tuple(hca for hca in chosen if _is_usable(hca, nranks, names))


def _is_usable(hca: Hca, nranks: int, names: NameFilter) -> bool:
    """Return whether `hca` can be opened and serve `nranks` ranks; if not, log the reason."""
    from r2ccl.transport.verbs.device import room

    try:
        npeers = room(hca.name)
    except TransportError as exc:
        why = str(exc)
    else:
        if npeers >= nranks - 1:
            return True
        why = f"its completion queues can serve {npeers + 1} ranks, but the job has {nranks}"
    _log.warning(
        "RDMA port %s is not used: %s; to silence this warning, set R2CC_HCA=%s",
        hca.label, why, names.excluding(hca.label),
    )  # fmt: skip
    return False


def _open_verbs(
    control: bootstrap.ControlPlane, config: Config, hcas: Sequence[Hca]
) -> TransportPart:
    """Open the RDMA ports in `hcas`; their rails are numbered after those of TCP."""
    from r2ccl.transport.verbs.device import RdmaDevice
    from r2ccl.transport.verbs.registration import RegistrationCache
    from r2ccl.transport.verbs.transport import VerbsTransport

    devices: list[RdmaDevice] = []
    with ExitStack() as opened:
        for hca in hcas:
            find_gid = GidFinder(hca.name, hca.port, config.gid_index)
            device = RdmaDevice(
                hca.name,
                hca.port,
                find_gid,
                Neighbours(find_gid.interface) if hca.index else None,
                config.fastpath,
                npeers=control.nranks - 1,
            )
            opened.callback(device.close)
            devices.append(device)
        registrars = [each.registrar for each in devices]
        transport = VerbsTransport(
            control.rank,
            devices,
            RegistrationCache(registrars, config.registration_limit_nbytes),
            eager_nbytes=config.inbox_nbytes,
            timeout=config.ib_timeout,
            retry_cnt=config.ib_retry_cnt,
            probe_timeout_s=config.probe_timeout_s,
            first_rail=len(control.nics),
        )
        opened.pop_all()
    return transport


def _named_wrapper(config: Config) -> Callable[[Transport, int], WrappedTransport] | None:
    """Return the function that ``R2CC_TRANSPORT_WRAPPER`` names, or None if it names none.

    Raises
    ------
    InvalidArgument
        If the function cannot be imported, or only ``R2CC_FAULT_PLAN`` is set.
    """
    name = config.transport_wrapper
    if not name and config.fault_plan:
        raise InvalidArgument(
            f"R2CC_FAULT_PLAN={config.fault_plan} is set, but R2CC_TRANSPORT_WRAPPER is not, so no "
            "fault would be injected: set R2CC_TRANSPORT_WRAPPER to "
            "r2ccl.testing.fault_plan:wrap_by_env, or unset R2CC_FAULT_PLAN"
        )
    try:
        found: Callable[[Transport, int], WrappedTransport] | None = (
            pkgutil.resolve_name(name) if name else None
        )
    except (ImportError, AttributeError, ValueError) as exc:
        raise InvalidArgument(
            f"R2CC_TRANSPORT_WRAPPER={name!r} cannot be imported ({exc}): give `module:function`"
        ) from exc
    return found


__all__ = ["choose_hcas", "init"]

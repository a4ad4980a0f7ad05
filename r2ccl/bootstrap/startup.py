"""Entry point of bootstrap: `connect` makes the control plane of a job from its settings.

`connect` determines this process's rank, address of rank 0 and secret, runs the rendezvous and
opens the listeners. The caller chooses the NICs that become rails, through a callback. Rank 0 warns
of variables that look like settings but are not, since a misspelled setting has no effect.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping

from r2ccl.bootstrap import logs, wire
from r2ccl.bootstrap.auth import COMMUNICATOR_ID_NBYTES, SECRET_NBYTES, Secret
from r2ccl.bootstrap.control import ControlPlane
from r2ccl.bootstrap.greetings import Hello, Meeting
from r2ccl.bootstrap.identity import LISTEN_FD_VARIABLE, Identity, RankComm, host_id, identify
from r2ccl.bootstrap.listener import Rejections, cannot_listen
from r2ccl.bootstrap.loop import ControlLoop
from r2ccl.bootstrap.messages import Codec, PeerInfo
from r2ccl.bootstrap.rendezvous import meet
from r2ccl.config import Config, nearest
from r2ccl.errors import InvalidArgument, TransportError, describe_os_error, errno_name
from r2ccl.types import Nic

logger = logging.getLogger("r2ccl.bootstrap")

NicsFor = Callable[[int, bool, str], tuple[Nic, ...]]
HcasFor = Callable[[], tuple[str, ...]]

_STOP_S = 1.0

#: Variables of R2CCL, the system of arXiv:2512.25059, that are also read.
_PUBLISHED = ("R2CC_FAILED_HCA", "R2CC_FAILED_NODE")
#: Variables that launchers and labs set for the processes that they start, or that tests read.
_OWN = (
    LISTEN_FD_VARIABLE, logs.TERMINAL_VARIABLE, "R2CC_FAULT_SOCKET", "R2CC_NETLAB_UNSHARED",
    "R2CC_CAMPAIGN_RUNS", "R2CC_FRESH", "R2CC_LOCAL_CALLS", "R2CC_MATRIX_EVERY",
    "R2CC_SIM_EXAMPLES",
)  # fmt: skip
_OWN_PREFIXES = ("R2CC_RDMALAB", "R2CC_RDMA_")


def connect(
    config: Config,
    *,
    codec: Codec,
    nics_for: NicsFor,
    hcas_for: HcasFor = tuple,
    comm: RankComm | None = None,
    env: Mapping[str, str] | None = None,
) -> ControlPlane:
    """Run the rendezvous with the other ranks of the job; return a control plane, not yet started.

    *Collective*: all ranks must call it, with equal ``config.digest()``. The caller must then call
    `ControlPlane.start` on the result.

    Parameters
    ----------
    config : Config
    codec : Codec
        Encoder and decoder of the messages of the control sessions.
    nics_for : callable
        Takes (nranks, is_on_one_host, control_address) and returns at least one `Nic`, last resorts
        at the end. Each NIC becomes the local end of a rail, in this order. If the ranks return
        different numbers of last resorts, or of other NICs, all use as many as the rank with the
        fewest. Runs in the control thread, unless there is only one rank, and must not block for
        long.
    hcas_for : callable, optional
        Returns the names of the RDMA ports that this rank could use; called after `nics_for`. All
        ranks use as many as the rank with the fewest.
    comm : mpi4py.MPI.Comm, optional
        Provides rank and nranks; by default the environment or ``MPI.COMM_WORLD`` does.
    env : mapping, optional
        Environment to read; by default ``os.environ``.

    Raises
    ------
    InvalidArgument
        If the rank of this process is not defined, ranks or settings are inconsistent, an address
        or port cannot be used, or there is no secret or no rail. The message says what to do.
    TransportTimeout
        If rank 0 is not reached, or not all ranks and their addresses arrive, within
        ``config.init_timeout_s``. In the second case, the message names the missing ranks.
    PeerLost
        If a rank exits during the rendezvous.
    TransportError
        If the NICs of this host cannot be listed. The other ranks then raise InvalidArgument.
    OSError
        If this process cannot open a file or socket.
    """
    env = os.environ if env is None else env
    identity = identify(config, comm, env)
    logs.set_rank(identity.rank)
    if identity.rank == 0:
        warn_of_unknown(env)
    with identity.listener or contextlib.nullcontext():
        # Before the rendezvous: there, an OSError would mean the loss of a connection.
        host = host_id()
        listeners = _Listeners(identity, host, config, nics_for, hcas_for)
        rejections = Rejections(identity.rank)
        loop = ControlLoop(f"r2ccl-control-{identity.rank}")
        try:
            if identity.nranks == 1:
                meeting = _meet_nobody(listeners, config)
            else:
                hello = Hello(identity.rank, identity.nranks, host, os.getpid(), config.digest())
                work = meet(
                    identity, hello, listeners.open, rejections,
                    config.init_timeout_s, config.control_address,
                )  # fmt: skip
                meeting = loop.run(work)
            return _build(config, identity, meeting, listeners, loop, codec, rejections)
        except BaseException:
            listeners.close()
            loop.close(_STOP_S)
            raise


def warn_of_unknown(env: Mapping[str, str]) -> None:
    """Log a warning for each variable in `env` that begins like a setting but has no effect."""
    for name, advice in unknown(env):
        logger.warning("%s is not a setting of r2ccl and has no effect: %s", name, advice)


def unknown(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the variables in `env` that begin like settings but have no effect.

    Yields
    ------
    name, advice : str
        The variable, and what to do about it.
    """
    settings = [f"R2CC_{name.upper()}" for name in Config.__struct_fields__]
    known = {*settings, *_PUBLISHED, *_OWN}
    for name in sorted(env):
        found = re.fullmatch("R2CCL?_(.+)", name)
        if found is None or name in known or name.startswith(_OWN_PREFIXES):
            continue
        stems = [each.removeprefix("R2CC_") for each in (*settings, *_PUBLISHED)]
        near = nearest(found[1].upper(), stems)
        yield name, f"did you mean R2CC_{near}?" if near else "unset it or correct its name"


def _meet_nobody(listeners: _Listeners, config: Config) -> Meeting:
    info = listeners.open(True, "127.0.0.1")
    return Meeting(
        secrets.token_bytes(COMMUNICATOR_ID_NBYTES),
        Secret(secrets.token_bytes(SECRET_NBYTES)),
        (info,),
    )


def _build(
    config: Config,
    identity: Identity,
    meeting: Meeting,
    listeners: _Listeners,
    loop: ControlLoop,
    codec: Codec,
    rejections: Rejections,
) -> ControlPlane:
    nics, sockets, probes = listeners.take(meeting.peers[identity.rank])
    return ControlPlane(
        loop=loop,
        config=config,
        secret=meeting.secret,
        communicator_id=meeting.communicator_id,
        rank=identity.rank,
        peers=meeting.peers,
        nics=nics,
        listeners=sockets,
        probe_sockets=probes,
        codec=codec,
        rejections=rejections,
    )


class _Listeners:
    """Sockets of this rank: a listener and a probe port per rail, and the control listener."""

    def __init__(
        self,
        identity: Identity,
        host: str,
        config: Config,
        nics_for: NicsFor,
        hcas_for: HcasFor,
    ) -> None:
        self.nics: tuple[Nic, ...] = ()
        self._rank = identity.rank
        self._nranks = identity.nranks
        self._host = host
        self._config = config
        self._nics_for = nics_for
        self._hcas_for = hcas_for
        self._rails: list[socket.socket] = []
        self._probes: list[socket.socket] = []
        self._control: list[socket.socket] = []

    def open(self, is_on_one_host: bool, control_address: str) -> PeerInfo:
        """Listen on every NIC and on the control address; return the addresses.

        Raises
        ------
        InvalidArgument
            If there is no NIC, or this rank cannot listen at one of the addresses.
        TransportError
            If the NICs cannot be listed.
        """
        control_address = self._config.control_address or control_address
        control = self._open(wire.listen, control_address, "control")
        self._control.append(control)
        try:
            # The numeric address, because the setting may be a name.
            numeric = wire.address_of(control)[0]
            self.nics = tuple(self._nics_for(self._nranks, is_on_one_host, numeric))
            hcas = self._hcas_for()
        except OSError as exc:
            raise TransportError(
                f"rank {self._rank}: the NICs of this host cannot be listed: "
                f"{describe_os_error(exc)}",
                rank=self._rank,
                status=errno_name(exc),
            ) from exc
        if not self.nics:
            raise InvalidArgument(
                f"rank {self._rank}: no usable network interface was found for a rail: set "
                "R2CC_SOCKET_IFNAME to interfaces that are up, by prefixes of their names, such as "
                "eth,ib, or by exact names, such as =eth0"
            )
        for nic in self.nics:  # `close` closes those that were opened before an error
            self._rails.append(self._open(wire.listen, nic.address, nic.name))
            self._probes.append(self._open(wire.reserve_port, nic.address, nic.name))
        return PeerInfo(
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            control_addresses=tuple(map(wire.address_of, self._control)),
            rails=tuple(map(wire.address_of, self._rails)),
            probe_ports=tuple(wire.address_of(sock)[1] for sock in self._probes),
            hcas=hcas,
            nlast_resorts=sum(nic.is_last_resort for nic in self.nics),
            interfaces=tuple(nic.name for nic in self.nics),
            failed_nics=self._config.failed_nics,
        )

    def take(
        self, agreed: PeerInfo
    ) -> tuple[tuple[Nic, ...], list[socket.socket], list[socket.socket]]:
        """Return the NICs, listeners and probe sockets of the rails in `agreed`; close the others.

        The control listener follows the listeners of the rails. The caller owns the sockets.
        """
        parts = zip(self.nics, self._rails, self._probes, strict=True)
        by_address = {wire.address_of(sock): (nic, sock, probes) for nic, sock, probes in parts}
        used = [by_address.pop(address) for address in agreed.rails]
        for _, *unused in by_address.values():
            for sock in unused:
                sock.close()
        taken = [*(sock for _, sock, _ in used), *self._control]
        self._rails, self._control, self._probes = [], [], []
        return tuple(nic for nic, _, _ in used), taken, [probes for _, _, probes in used]

    def close(self) -> None:
        """Close the sockets that `take` did not return."""
        for sock in (*self._rails, *self._control, *self._probes):
            with contextlib.suppress(OSError):
                sock.close()

    def _open(self, make: Callable[[str], socket.socket], address: str, what: str) -> socket.socket:
        try:
            return make(address)
        except OSError as exc:
            raise cannot_listen(self._rank, address, what, exc) from exc


__all__ = ["HcasFor", "NicsFor", "connect", "unknown", "warn_of_unknown"]

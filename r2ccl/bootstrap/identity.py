"""Identity of this process: its rank, the number of ranks, rank 0's address and the secret.

Sources, in this order: an mpi4py communicator given by the caller; RANK, WORLD_SIZE and
MASTER_ADDR, set by torchrun or ``r2ccl launch``; mpi4py, if an MPI launcher started the process and
MASTER_ADDR is not set; the variables of Slurm, Kubernetes or an MPI launcher. With MPI, this module
runs MPI collectives, and rank 0 opens its rendezvous socket here, because it must send the port to
the other ranks.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import msgspec

from r2ccl.bootstrap import launchers, naming
from r2ccl.bootstrap.auth import SECRET_NBYTES, Secret
from r2ccl.bootstrap.launchers import LauncherVariables, RankPlace
from r2ccl.bootstrap.secretfile import (
    GivenSecret,
    RuntimeFileSecret,
    SecretSource,
    read_secret_file,
)
from r2ccl.config import Config
from r2ccl.errors import InvalidArgument, is_exhaustion

#: Variable with the descriptor of the listening socket that rank 0 inherits from its launcher.
LISTEN_FD_VARIABLE = "R2CC_LISTEN_FD"

_ENV_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")

_WAYS = (
    "start the process with `r2ccl launch -n 4 -- python script.py`, torchrun, mpiexec or srun, or "
    "set RANK, WORLD_SIZE, MASTER_ADDR, R2CC_PORT and R2CC_SECRET"
)


class RankComm(Protocol):
    """mpi4py communicator, or any other object that has the methods of this class."""

    def Get_rank(self) -> int:
        """Return the rank of this process."""
        ...

    def Get_size(self) -> int:
        """Return the number of ranks."""
        ...

    def allgather(self, sendobj: Any, /) -> list[Any]:
        """Return the objects of all ranks, in rank order."""
        ...

    def bcast(self, obj: Any, /, root: int) -> Any:
        """Return the object that rank `root` passed."""
        ...


class Identity(msgspec.Struct):
    """Rank, job size, rendezvous address and secret of this process.

    Rank 0 listens at ``address`` and ``port`` during the rendezvous. ``listener`` is the listening
    socket of rank 0 if it is already open, else None; the holder of the `Identity` owns it.
    """

    rank: int
    nranks: int
    address: str
    port: int
    secret: SecretSource
    listener: socket.socket | None = None


def identify(config: Config, comm: RankComm | None, env: Mapping[str, str]) -> Identity:
    """Determine the identity of this process.

    Parameters
    ----------
    config : Config
    comm : mpi4py.MPI.Comm or None
        MPI communicator that provides the ranks. With it, or if ``MPI.COMM_WORLD`` provides the
        ranks, the call is collective.
    env : mapping
        The process environment.

    Raises
    ------
    InvalidArgument
        If the rank of this process is not defined, if its rank, number of ranks, address or port is
        missing or invalid, if the inherited socket cannot be used, or if this rank has no usable
        secret. With MPI, also if mpi4py cannot be used, or sees one rank although the launcher
        started several; if rank 0 cannot listen or has no usable secret; or if a secret is set on
        only some ranks.
    OSError
        If this process cannot open a file or socket.
    """
    if comm is not None:
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and isinstance(comm, mpi.Comm) and comm != mpi.COMM_SELF:
            _require_company(mpi, env)
        return _from_mpi(config, comm)
    launcher = launchers.find_launcher(env)
    given = [name for name in _ENV_VARIABLES if name in env]
    if "RANK" in env or (given and launcher is None):
        missing = sorted(set(_ENV_VARIABLES) - set(given))
        if missing:
            raise InvalidArgument(
                f"the rank of this process is not defined completely (set: {', '.join(given)}; "
                f"missing: {', '.join(missing)}); {_WAYS}"
            )
        return _from_env(config, env)
    if launchers.is_mpi(env) and "MASTER_ADDR" not in env and _has_mpi4py():
        return _from_mpi(config, _comm_world(env))
    if launcher is not None:
        return _from_launcher(config, env, launcher)
    raise InvalidArgument(f"the rank of this process is not defined; {_WAYS}")


def host_id() -> str:
    """Return host name, boot id and network namespace, as one text.

    Ranks with equal texts share a network stack, and thus a loopback interface.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/self/ns/net").st_ino
    return f"{socket.gethostname()}/{boot_id}/{namespace}"


# -- MPI ------------------------------------------------------------------------------------


def _has_mpi4py() -> bool:
    """Return True if mpi4py is installed, even if it cannot be imported."""
    if "mpi4py" in sys.modules:
        return sys.modules["mpi4py"] is not None
    return find_spec("mpi4py") is not None


def _comm_world(env: Mapping[str, str]) -> Any:
    try:
        from mpi4py import MPI
    except ImportError as exc:
        raise InvalidArgument(
            f"an MPI launcher started this process, but mpi4py cannot be imported ({exc}): "
            "install mpi4py (r2ccl[mpi]) for the MPI of this launcher"
        ) from exc
    if not MPI.Is_initialized():
        raise InvalidArgument(
            "an MPI launcher started this process, but MPI is not initialized "
            "(mpi4py.rc.initialize is False): call MPI.Init() before init()"
        )
    _require_company(MPI, env)
    return MPI.COMM_WORLD


def _require_company(mpi: Any, env: Mapping[str, str]) -> None:
    library = str(mpi.Get_library_version()).strip("\0\n ").splitlines()[0]
    launchers.require_company(mpi.COMM_WORLD.Get_size(), " ".join(library.split()), env)


def _from_mpi(config: Config, comm: RankComm) -> Identity:
    rank, nranks = comm.Get_rank(), comm.Get_size()
    is_on_one_host = len(set(comm.allgather(host_id()))) == 1
    listener: socket.socket | None = None
    offer: tuple[str, int, str] | str = ""
    if rank == 0:
        try:
            # A secret that every rank has is not sent.
            is_given = _given_secret(config) is not None
            secret = "" if is_given else secrets.token_hex(SECRET_NBYTES)
            listener = _listen_anywhere(config, is_on_one_host)
            address, port = listener.getsockname()[:2]
            offer = (address, port, secret)
        except (OSError, InvalidArgument) as exc:
            offer = f"rank 0 cannot start the rendezvous: {exc}"  # the other ranks wait in bcast
    offer = comm.bcast(offer, root=0)
    if isinstance(offer, str):
        raise InvalidArgument(offer)
    address, port, secret = offer
    given = _given_secret(config)
    if bool(secret) == (given is not None):
        raise InvalidArgument(
            f"rank {rank}: rank 0 has {'no' if secret else 'a'} secret in R2CC_SECRET or "
            f"R2CC_SECRET_FILE, this rank has {'one' if secret else 'none'}: set the same secret "
            "on every rank, or on none"
        )
    source = given or GivenSecret(Secret.from_hex(secret))
    return Identity(rank, nranks, address, port, source, listener)


def _listen_anywhere(config: Config, is_on_one_host: bool) -> socket.socket:
    derived = "127.0.0.1" if is_on_one_host else None
    address = config.control_address or derived or _outbound_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, config.port), family=family)


def _outbound_address() -> str:
    """Return the local address of the IPv4 default route, without sending a packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737): an unassigned address
        except OSError as exc:
            raise InvalidArgument(
                "the host of rank 0 has no IPv4 default route, so the address at which other hosts "
                "reach it is unknown: set R2CC_CONTROL_ADDRESS on rank 0 to that address"
            ) from exc
        address: str = probe.getsockname()[0]
        return address


# -- environment ----------------------------------------------------------------------------


def _from_env(config: Config, env: Mapping[str, str]) -> Identity:
    rank, nranks = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if not 0 <= rank < nranks:
        raise InvalidArgument(
            f"RANK={rank} with WORLD_SIZE={nranks}; allowed is 0 to WORLD_SIZE - 1"
        )
    is_on_one_host = env.get("LOCAL_WORLD_SIZE") == str(nranks)
    port = config.port or _number(env, "MASTER_PORT", instead="R2CC_PORT") + 1
    place = RankPlace(rank, nranks, env["MASTER_ADDR"], port, is_on_one_host)
    return _at(place, config, env)


def _from_launcher(config: Config, env: Mapping[str, str], launcher: LauncherVariables) -> Identity:
    place = launchers.find_place(launcher, env)
    port = config.port or (_number(env, "MASTER_PORT") + 1 if "MASTER_PORT" in env else place.port)
    if not port:
        raise InvalidArgument(
            f"{launcher.name} sets no variable that identifies the job, so two jobs on one host "
            "could use the same port: set R2CC_PORT to a free port, the same on all ranks of a job "
            "and a different one for each job, or install mpi4py for the MPI of the launcher and "
            "unset MASTER_ADDR"
        )
    return _at(msgspec.structs.replace(place, port=port), config, env)


def _at(place: RankPlace, config: Config, env: Mapping[str, str]) -> Identity:
    if not 0 < place.port < 65536:
        raise InvalidArgument(
            f"rendezvous port {place.port} (R2CC_PORT, or MASTER_PORT + 1): allowed is 1 to 65535"
        )
    listener = _inherited_listener(env) if place.rank == 0 else None
    secret = _secret_source(config, env, place)
    return Identity(place.rank, place.nranks, place.address, place.port, secret, listener)


def _number(env: Mapping[str, str], name: str, instead: str = "") -> int:
    if name not in env:
        other = f" (or {instead})" if instead else ""
        raise InvalidArgument(f"{name}{other} is not set; {_WAYS}")
    return launchers.whole(name, env)


def _inherited_listener(env: Mapping[str, str]) -> socket.socket | None:
    """Return a duplicate of the socket that the launcher has passed on; None if it passed none.

    The inherited socket stays open, so that later communicators can duplicate it, too.
    """
    if LISTEN_FD_VARIABLE not in env:
        return None
    fd = _number(env, LISTEN_FD_VARIABLE)
    try:
        os.set_inheritable(fd, False)
        copy = os.dup(fd)
        try:
            listener = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            raise
        if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listener.close()
            raise OSError(errno.EINVAL, "not a listening socket")
    except (OSError, OverflowError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise InvalidArgument(
            f"{LISTEN_FD_VARIABLE}={fd} is not a usable listening socket ({why}): "
            "unset the variable, which only a launcher of r2ccl may set"
        ) from exc
    return listener


def _secret_source(config: Config, env: Mapping[str, str], place: RankPlace) -> SecretSource:
    given = _given_secret(config)
    if given is not None:
        return given
    if place.nranks == 1:
        return GivenSecret(Secret(secrets.token_bytes(SECRET_NBYTES)))
    rank, address = place.rank, place.address
    if place.is_on_one_host and _is_own_address(rank, address):
        return RuntimeFileSecret(env, address, place.port, is_leader=rank == 0)
    raise InvalidArgument(
        f"rank {rank}: no secret is set, and the ranks are not known to be on one host: set "
        "R2CC_SECRET to the same 64 hexadecimal digits on every rank, or R2CC_SECRET_FILE to the "
        "path of a file that contains them (`(umask 077; openssl rand -hex 32 > FILE)`), or start "
        "the job with `r2ccl launch`, which sets the secret"
    )


def _given_secret(config: Config) -> GivenSecret | None:
    if config.secret:
        return GivenSecret(Secret.from_hex(config.secret, "R2CC_SECRET"))
    if config.secret_file:
        return GivenSecret(read_secret_file(config.secret_file))
    return None


def _is_own_address(rank: int, host: str) -> bool:
    """Return True if `host` is an address of this host, or cannot be resolved yet."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except UnicodeError as exc:
        raise naming.unresolvable(rank, host, exc) from exc
    except OSError as exc:
        if naming.is_passing(exc):
            return True
        raise naming.unresolvable(rank, host, exc) from exc
    try:
        with socket.socket(family, kind, proto) as sock:
            sock.bind(address)
    except OSError as exc:
        if exc.errno != errno.EADDRNOTAVAIL and is_exhaustion(exc.errno):
            raise
        return False
    return True


__all__ = ["LISTEN_FD_VARIABLE", "Identity", "RankComm", "host_id", "identify"]

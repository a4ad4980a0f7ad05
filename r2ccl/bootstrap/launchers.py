"""Launchers that give a process its rank in their own variables: Slurm, MPI, Kubernetes.

`LAUNCHERS` lists them. Under an MPI launcher, mpi4py normally provides the ranks. If the launcher
and mpi4py belong to different MPI libraries, ``COMM_WORLD`` has a single rank: n processes would
run n jobs of one rank, each with a wrong result. `require_company` refuses this. If mpi4py does not
provide the ranks, `find_place` takes the rank, the number of ranks and the address of rank 0 from
the variables.

This module must not import mpi4py, since that can initialize MPI.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Mapping

import msgspec

from r2ccl.errors import InvalidArgument

logger = logging.getLogger("r2ccl.bootstrap")

#: Port of the rendezvous if nothing else gives one: torchrun's default MASTER_PORT + 1.
DEFAULT_PORT = 29501
#: First port and number of ports for jobs that the launcher identifies. All are below the
#: ephemeral ports of Linux.
_FIRST_PORT, _NPORTS = 10_000, 20_000


class LauncherVariables(msgspec.Struct, frozen=True):
    """Names of the environment variables that a launcher sets.

    ``rank`` names the variable with the rank, and ``nranks`` the variables with the number of
    ranks; the first of these that is set is used. ``local`` names the variable with the number of
    ranks on this host, ``hosts`` the variable with the list of hosts, and ``job`` the variables
    that together identify the job. An empty field means that the launcher has no such variable.
    """

    name: str
    rank: str
    nranks: tuple[str, ...]
    is_mpi: bool = False
    local: str = ""
    hosts: str = ""
    job: tuple[str, ...] = ()


#: Known launchers, in the order of preference: mpiexec may run in a job step of Slurm, whose
#: variables its ranks then inherit. PMIx has no variable for the number of ranks; Slurm, which can
#: start ranks by PMIx, sets one for the job step.
LAUNCHERS = (
    LauncherVariables(
        "Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), is_mpi=True,
        local="OMPI_COMM_WORLD_LOCAL_SIZE", job=("PMIX_NAMESPACE",),
    ),
    LauncherVariables("MPICH", "PMI_RANK", ("PMI_SIZE",), is_mpi=True, local="MPI_LOCALNRANKS"),
    LauncherVariables(
        "PMIx", "PMIX_RANK", ("SLURM_STEP_NUM_TASKS",), is_mpi=True, job=("PMIX_NAMESPACE",)
    ),
    LauncherVariables(
        "Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        hosts="SLURM_STEP_NODELIST", job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    LauncherVariables("Kubernetes", "JOB_COMPLETION_INDEX", ()),
)  # fmt: skip


class RankPlace(msgspec.Struct, frozen=True):
    """Rank, number of ranks and address of rank 0, from the variables of a launcher.

    ``port`` is the port of the rendezvous unless ``R2CC_PORT`` or ``MASTER_PORT`` is set; 0 means
    that one of these must be set. ``is_on_one_host`` is True if all ranks are known to be on this
    host.
    """

    rank: int
    nranks: int
    address: str
    port: int
    is_on_one_host: bool


def find_launcher(env: Mapping[str, str]) -> LauncherVariables | None:
    """Return the launcher that started this process, according to `env`; None if there is none.

    If an MPI launcher and Slurm give the same rank and size, the ranks are tasks of a job step.
    Slurm is then preferred, because its variables also name the hosts. But if the number of ranks
    on this host is also set, mpiexec runs within the step, and the MPI launcher is preferred.
    """
    found = [each for each in LAUNCHERS if each.rank in env]
    slurm = [each for each in found if each.hosts and each.hosts in env]
    is_nested = any(each.local and each.local in env for each in found)
    if slurm and not is_nested and _numbers(slurm[0], env) == _numbers(found[0], env):
        return slurm[0]
    return found[0] if found else None


def is_mpi(env: Mapping[str, str]) -> bool:
    """Return True if `env` has the variables of a process that an MPI launcher started."""
    return any(each.is_mpi and each.rank in env for each in LAUNCHERS)


def find_place(launcher: LauncherVariables, env: Mapping[str, str]) -> RankPlace:
    """Return the `RankPlace` of this process, which `launcher` started.

    ``MASTER_ADDR`` overrides the address; ``WORLD_SIZE`` gives the number of ranks if the launcher
    does not.

    Raises
    ------
    InvalidArgument
        If a variable is missing, is malformed, or contradicts another one.
    """
    rank = whole(launcher.rank, env)
    sizes = [name for name in (*launcher.nranks, "WORLD_SIZE") if name in env]
    address, is_on_one_host = _address(launcher, env)
    missing = [] if sizes else [launcher.nranks[0] if launcher.nranks else "WORLD_SIZE"]
    missing += [] if address else ["MASTER_ADDR" if not launcher.hosts else launcher.hosts]
    if missing:
        raise InvalidArgument(
            f"{launcher.name} has set {launcher.rank}={rank}, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: {_advice(launcher, missing)}"
        )
    nranks = whole(sizes[0], env)
    if "WORLD_SIZE" in sizes and whole("WORLD_SIZE", env) != nranks:
        raise InvalidArgument(
            f"WORLD_SIZE={env['WORLD_SIZE']}, but {launcher.name} has set {sizes[0]}={nranks}: "
            "unset WORLD_SIZE, or set RANK, WORLD_SIZE, MASTER_ADDR and R2CC_PORT on every rank"
        )
    if not 0 <= rank < nranks:
        raise InvalidArgument(
            f"{launcher.rank}={rank} with {sizes[0]}={nranks}: allowed is 0 to {nranks - 1}"
        )
    return RankPlace(rank, nranks, address, _port(launcher, env), is_on_one_host)


def _address(launcher: LauncherVariables, env: Mapping[str, str]) -> tuple[str, bool]:
    """Return the address of rank 0, and whether all ranks are known to be on this host.

    The address is empty if it is unknown.
    """
    given, listed = env.get("MASTER_ADDR", ""), env.get(launcher.hosts, "")
    if launcher.local:
        is_on_one_host = env.get(launcher.local, "") == env.get(launcher.nranks[0])
    else:
        is_on_one_host = bool(listed) and not set(listed) & set("[,")
    if given:
        return given, is_on_one_host
    host = first_host(listed) if listed else ""
    return "127.0.0.1" if is_on_one_host else host, is_on_one_host


def first_host(listed: str) -> str:
    """Return the first host of a list in Slurm's notation, such as ``node[003-005,9],gpu1``.

    Raises
    ------
    InvalidArgument
        If the first entry of the list is malformed; the other entries are not checked.
    """
    match = re.match(r"((?:[\w.-]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+)(?:,|$)", listed)
    if match is None:
        raise InvalidArgument(
            f"the list of hosts {listed!r} is not in Slurm's notation, such as node[003-005,9]: "
            "set MASTER_ADDR to the host of rank 0"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[1])


def _port(launcher: LauncherVariables, env: Mapping[str, str]) -> int:
    """Return the port of the rendezvous, equal on all ranks of a job.

    If the launcher identifies the job, the port is most likely different from those of other jobs.
    If not, return 0 for an MPI launcher, because another job may be on the same host, and
    `DEFAULT_PORT` for any other launcher.
    """
    names = [env[name] for name in launcher.job if name in env]
    if not names:
        return 0 if launcher.is_mpi else DEFAULT_PORT
    return _FIRST_PORT + zlib.crc32(".".join(names).encode()) % _NPORTS


def _advice(launcher: LauncherVariables, missing: list[str]) -> str:
    if launcher.hosts in missing:
        return (
            "this process is not in a job step: start it with srun, or set MASTER_ADDR to the "
            "host of rank 0"
        )
    if launcher.is_mpi:
        return "set it on every rank, or install mpi4py (r2ccl[mpi]) for the MPI of the launcher"
    return "set it on every rank"


def whole(name: str, env: Mapping[str, str]) -> int:
    """Return the value of the variable `name`, which must be set, as an integer.

    Raises
    ------
    InvalidArgument
        If the value is not a whole number.
    """
    try:
        return int(env[name])
    except ValueError:
        raise InvalidArgument(f"{name}={env[name]!r}: a whole number is needed") from None


def _numbers(launcher: LauncherVariables, env: Mapping[str, str]) -> tuple[int, int]:
    """Return (rank, number of ranks); -1 for a variable that is missing or not a number."""
    size = next((name for name in launcher.nranks if name in env), "")
    return _number(env, launcher.rank), _number(env, size)


class LauncherClaim(msgspec.Struct, frozen=True):
    """Rank and number of ranks that a launcher has set in the environment.

    -1 means that a variable is not set or is not a number. ``told`` quotes the variables, for
    messages.
    """

    rank: int
    nranks: int
    told: str

    def fits(self, nranks: int) -> bool:
        """Return True if a ``COMM_WORLD`` of `nranks` ranks is consistent with these variables."""
        return nranks == self.nranks or (self.nranks < 0 and self.rank < nranks)


def claims(env: Mapping[str, str]) -> list[LauncherClaim]:
    """Return the rank and job size of each MPI launcher in `env`; several if they are nested.

    ``RANK`` and ``WORLD_SIZE``, which other launchers set, are a claim too, if both are set. Claims
    without a number of ranks are returned only if no claim has a number of ranks. A claim of an MPI
    launcher in which the rank is not below the number of ranks is ignored: its variables are from
    two launchers. PMIx is ignored if Open MPI's variables are set: Open MPI also sets PMIx's rank,
    but a claim of PMIx takes its size from Slurm's job step, in which Open MPI's mpirun runs one
    task per host, not per rank.
    """
    found = []
    for each in LAUNCHERS:
        is_open_mpis = each.rank == "PMIX_RANK" and "OMPI_COMM_WORLD_RANK" in env
        if not each.is_mpi or each.rank not in env or is_open_mpis:
            continue
        told = [f"{name}={env[name]}" for name in (each.rank, *each.nranks) if name in env]
        claim = LauncherClaim(*_numbers(each, env), ", ".join(told))
        if claim.nranks < 0 or claim.rank < claim.nranks:
            found.append(claim)
    if "RANK" in env and "WORLD_SIZE" in env:
        ranks = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        found.append(LauncherClaim(*ranks, f"RANK={env['RANK']}, WORLD_SIZE={env['WORLD_SIZE']}"))
    return [claim for claim in found if claim.nranks >= 0] or found


def require_company(nranks: int, library: str, env: Mapping[str, str]) -> None:
    """Raise an error if ``COMM_WORLD`` has one rank although the launcher started several.

    Parameters
    ----------
    nranks : int
        Size of ``COMM_WORLD``.
    library : str
        Name and version of mpi4py's MPI library.
    env : mapping
        Environment of this process.

    Raises
    ------
    InvalidArgument
        If ``COMM_WORLD`` has one rank, but all launchers in the environment report several (see
        `claims`). If only some do, a warning is logged, since it is unknown which of them started
        this process.
    """
    odd = [claim for claim in claims(env) if not claim.fits(nranks)]
    if nranks > 1 or not odd:
        return
    quoted = "; ".join(claim.told for claim in odd)
    if len(odd) < len(claims(env)):
        logger.warning(
            "this job has one rank, but a launcher reports more (%s); if those ranks "
            "belong to one job, start them only with the launcher of mpi4py's MPI (%s)",
            quoted, library,
        )  # fmt: skip
        return
    raise InvalidArgument(
        f"a launcher started this process as one of several ranks ({quoted}), but mpi4py, "
        f"which uses {library}, sees only this one: the launcher belongs to another MPI, or "
        "is `r2ccl launch` or torchrun, which do not start MPI ranks. Either start the job with "
        "the launcher of mpi4py's MPI, or call init() without an MPI communicator; in the latter "
        "case, if an MPI launcher starts the job, also set MASTER_ADDR to the host of rank 0"
    )


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except (KeyError, ValueError):
        return -1


__all__ = [
    "DEFAULT_PORT",
    "LauncherClaim",
    "LauncherVariables",
    "RankPlace",
    "claims",
    "find_launcher",
    "find_place",
    "first_host",
    "is_mpi",
    "require_company",
    "whole",
]

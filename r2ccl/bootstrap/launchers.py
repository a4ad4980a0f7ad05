"""What an MPI launcher says of its job, held against what mpi4py makes of it.

A process that one MPI's launcher started and whose mpi4py is built for another finds itself alone:
``COMM_WORLD`` then has one rank, and n processes would run n jobs of one rank, each with a wrong
result.

Must not import mpi4py: only a world that the caller, or this process, has open is looked at.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from r2ccl.errors import InvalidArgument

logger = logging.getLogger("r2ccl.bootstrap")

#: The rank's variable of each family of launchers, and the one with the number of ranks. PMIx has
#: none of its own; under Slurm, which starts ranks by PMIx too, the step has.
_VARIABLES = {
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "PMIX_RANK": "SLURM_STEP_NUM_TASKS",
}


class LauncherClaim(msgspec.Struct, frozen=True):
    """Rank and number of ranks by the environment; -1: not told. ``told`` quotes the variables."""

    rank: int
    nranks: int
    told: str

    def fits(self, nranks: int) -> bool:
        """Whether a world of `nranks` may be the one this is about."""
        return nranks == self.nranks or (self.nranks < 0 and self.rank < nranks)


def is_launched(env: Mapping[str, str]) -> bool:
    """Whether an MPI launcher started this process."""
    return any(name in env for name in _VARIABLES)


def claims(env: Mapping[str, str]) -> list[LauncherClaim]:
    """Return what launchers say; several, where one was started below another.

    Those that tell no number of ranks only if none does. A rank beyond its number of ranks is of
    two launchers, and says nothing. Open MPI's ranks are told by PMIx too, and under Slurm the step
    then counts hosts.
    """
    found = []
    for rank, nranks in _VARIABLES.items():
        if rank not in env or (rank == "PMIX_RANK" and "OMPI_COMM_WORLD_RANK" in env):
            continue
        told = [f"{name}={env[name]}" for name in (rank, nranks) if name in env]
        claim = LauncherClaim(_number(env, rank), _number(env, nranks), ", ".join(told))
        if claim.nranks < 0 or claim.rank < claim.nranks:
            found.append(claim)
    return [claim for claim in found if claim.nranks >= 0] or found


def require_company(nranks: int, library: str, env: Mapping[str, str]) -> None:
    """Check that ``COMM_WORLD`` is not one rank of several that a launcher started.

    Parameters
    ----------
    nranks : int
        Size of ``COMM_WORLD``.
    library : str
        What mpi4py's MPI calls itself.
    env : mapping

    Raises
    ------
    InvalidArgument
        It is alone, and every launcher of the environment says that it is not. If only some say
        so, that is logged: which of them started the other cannot be known.
    """
    odd = [claim for claim in claims(env) if not claim.fits(nranks)]
    if nranks > 1 or not odd:
        return
    quoted = "; ".join(claim.told for claim in odd)
    if len(odd) < len(claims(env)):
        logger.warning(
            "this is a job of one rank, though an MPI launcher tells of more (%s); if those ranks "
            "are to be one job, start them with the launcher of mpi4py's MPI (%s) alone",
            quoted, library,
        )  # fmt: skip
        return
    raise InvalidArgument(
        f"an MPI launcher started this process as one of several ranks ({quoted}), but mpi4py, "
        f"which uses {library}, sees this one alone: the launcher is of another MPI than mpi4py; "
        "start the job with the launcher of mpi4py's MPI, install mpi4py for the launcher's MPI, "
        "or use `r2ccl launch` or torchrun"
    )


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except (KeyError, ValueError):
        return -1


__all__ = ["LauncherClaim", "claims", "is_launched", "require_company"]

"""Check that the job size set by an MPI launcher agrees with the ``COMM_WORLD`` of mpi4py.

If the launcher and mpi4py belong to different MPI libraries, ``COMM_WORLD`` has a single rank: n
processes would run n jobs of one rank, each with a wrong result.

This module must not import mpi4py, since importing it can initialise MPI.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from r2ccl.errors import InvalidArgument

logger = logging.getLogger("r2ccl.bootstrap")

#: Variable with the rank, per family of launchers, and the one with the number of ranks. PMIx has
#: no variable for the latter; Slurm, which can start ranks by PMIx, sets one for the job step.
_VARIABLES = {
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "PMIX_RANK": "SLURM_STEP_NUM_TASKS",
}


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


def is_launched(env: Mapping[str, str]) -> bool:
    """Return True if `env` has the variables of a process that an MPI launcher started."""
    return any(name in env for name in _VARIABLES)


def claims(env: Mapping[str, str]) -> list[LauncherClaim]:
    """Return the rank and job size of each launcher in `env`; several if launchers are nested.

    Claims without a number of ranks are returned only if none has one. A claim whose rank is not
    below its number of ranks has the variables of two launchers, and is ignored. PMIx is ignored if
    Open MPI's variables are set: Open MPI also sets PMIx's rank, and the size of the job step under
    Slurm is then the number of hosts, not of ranks.
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
        If ``COMM_WORLD`` has one rank, but all launchers in the environment report several. If only
        some do, a warning is logged, since it is unknown which of them started this process.
    """
    odd = [claim for claim in claims(env) if not claim.fits(nranks)]
    if nranks > 1 or not odd:
        return
    quoted = "; ".join(claim.told for claim in odd)
    if len(odd) < len(claims(env)):
        logger.warning(
            "this job has one rank, but an MPI launcher reports more (%s); if those ranks "
            "belong to one job, start them only with the launcher of mpi4py's MPI (%s)",
            quoted, library,
        )  # fmt: skip
        return
    raise InvalidArgument(
        f"an MPI launcher started this process as one of several ranks ({quoted}), but mpi4py, "
        f"which uses {library}, sees only this one: probably launcher and mpi4py belong to "
        "different MPIs; start the job with the launcher of mpi4py's MPI, install mpi4py for the "
        "launcher's MPI, or use `r2ccl launch` or torchrun"
    )


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except (KeyError, ValueError):
        return -1


__all__ = ["LauncherClaim", "claims", "is_launched", "require_company"]

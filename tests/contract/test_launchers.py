"""Ranks that Slurm, Open MPI, MPICH or Kubernetes start find each other by what these set."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from support.jobs import launch
from support.launcher_programs import sum_as

NRANKS = 3
SLURM = {
    "SLURM_NTASKS": str(NRANKS),
    "SLURM_STEP_NUM_TASKS": str(NRANKS),
    "SLURM_JOB_ID": str(os.getpid()),
    "SLURM_STEP_ID": "0",
}
#: Variables, the one with the rank, and whether the ranks may be on several hosts.
ENVIRONMENTS = {
    "slurm-one-host": ({**SLURM, "SLURM_STEP_NODELIST": "node7"}, "SLURM_PROCID", False),
    # The name of the first host is an address, since no other name is known here.
    "slurm": ({**SLURM, "SLURM_STEP_NODELIST": "127.0.0.[1-2]"}, "SLURM_PROCID", True),
    "open-mpi": (
        {
            "OMPI_COMM_WORLD_SIZE": str(NRANKS),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(NRANKS),
            "PMIX_NAMESPACE": f"prterun-node-{os.getpid()}@1",
        },
        "OMPI_COMM_WORLD_RANK", False,
    ),
    "mpich": (
        {"PMI_SIZE": str(NRANKS), "MPI_LOCALNRANKS": str(NRANKS), "R2CC_PORT": "{port}"},
        "PMI_RANK", False,
    ),
    "kubernetes": (
        {"WORLD_SIZE": str(NRANKS), "MASTER_ADDR": "localhost", "R2CC_PORT": "{port}"},
        "JOB_COMPLETION_INDEX", True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_ranks_meet_by_the_variables_of_their_launcher(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    variables, rank_variable, needs_secret = ENVIRONMENTS[name]
    port = str(30_000 + os.getpid() % 2000)
    given = {key: value.replace("{port}", port) for key, value in variables.items()}
    if needs_secret:
        file = tmp_path / "secret"
        file.touch(0o600)
        file.write_text("5a" * 32)
        given["R2CC_SECRET_FILE"] = str(file)
    found = launch(partial(sum_as, given, rank_variable), NRANKS, timeout_s=60)
    assert found == [(rank, NRANKS, 6.0) for rank in range(NRANKS)]

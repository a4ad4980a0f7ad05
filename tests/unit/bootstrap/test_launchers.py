"""Rank, size and address of rank 0 from the variables of Slurm, Kubernetes and MPI's launchers."""

from __future__ import annotations

import pytest

from r2ccl.bootstrap.launchers import (
    DEFAULT_PORT,
    RankPlace,
    find_launcher,
    find_place,
    first_host,
    require_company,
)
from r2ccl.errors import InvalidArgument

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "node[003-005,9],gpu1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-node-12@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0.ranks"}


def place(env: dict[str, str | None]) -> RankPlace:
    given = {name: value for name, value in env.items() if value is not None}
    launcher = find_launcher(given)
    assert launcher is not None
    return find_place(launcher, given)


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[003-005,9],gpu1", "node003"),
        ("node[7,9-12]", "node7"),
        ("rack[2-3]-node[10-12].cluster,x", "rack2-node10.cluster"),
        ("gpu1,node[1-2]", "gpu1"),
        ("10.0.0.7", "10.0.0.7"),
    ],
)
def test_the_first_host_of_a_compressed_list(listed: str, expected: str) -> None:
    assert first_host(listed) == expected


@pytest.mark.parametrize("listed", ["", "node[", "node[]", "node[1-2", "a b", "node[x]", ",a"])
def test_a_list_that_is_not_slurms_is_refused(listed: str) -> None:
    with pytest.raises(InvalidArgument, match="set MASTER_ADDR to the host of rank 0"):
        first_host(listed)


def test_slurm_gives_rank_size_and_the_first_host() -> None:
    found = place(SLURM)
    assert (found.rank, found.nranks, found.address) == (5, 8, "node003")
    assert not found.is_on_one_host
    assert 10_000 <= found.port < 30_000


def test_steps_and_jobs_meet_at_ports_of_their_own() -> None:
    ports = {
        place({**SLURM, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).port
        for job in ("4711", "4712") for step in ("0", "1")
    }  # fmt: skip
    assert len(ports) == 4
    assert place({**SLURM, "SLURM_PROCID": "0"}).port == place(SLURM).port


def test_a_step_on_one_host_meets_on_loopback() -> None:
    found = place({**SLURM, "SLURM_STEP_NODELIST": "node7"})
    assert (found.address, found.is_on_one_host) == ("127.0.0.1", True)


def test_the_size_is_that_of_the_step_not_of_the_job() -> None:
    assert place({**SLURM, "SLURM_NTASKS": "16"}).nranks == 8
    assert place({**SLURM, "SLURM_STEP_NUM_TASKS": None}).nranks == 8


@pytest.mark.parametrize("env", [OPEN_MPI, MPICH])
def test_mpi_ranks_of_one_host_need_no_address(env: dict[str, str]) -> None:
    found = place(env)
    assert (found.rank, found.nranks, found.address) == (1, 4, "127.0.0.1")
    assert found.is_on_one_host


def test_kubernetes_gives_the_rank_and_the_manifest_the_rest() -> None:
    assert place(KUBERNETES) == RankPlace(1, 4, "job-0.ranks", DEFAULT_PORT, is_on_one_host=False)


def test_tasks_of_slurm_that_speak_pmi_have_slurms_hosts() -> None:
    for pmi in ({"PMI_RANK": "5", "PMI_SIZE": "8"}, {"PMIX_RANK": "5"}):
        assert place({**SLURM, **pmi}).address == "node003"


def test_mpiexec_in_a_step_of_slurm_counts_its_own_ranks() -> None:
    daemon = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    found = place({**daemon, **OPEN_MPI})
    assert (found.rank, found.nranks, found.address) == (1, 4, "127.0.0.1")


def test_mpiexec_in_each_task_of_a_step_makes_jobs_of_its_own() -> None:
    """Also for the rank whose number is that of its task."""
    task = {**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}
    assert place({**task, **MPICH}).address == "127.0.0.1"


@pytest.mark.parametrize("env", [SLURM, OPEN_MPI, MPICH, KUBERNETES])
def test_master_addr_wins(env: dict[str, str]) -> None:
    assert place({**env, "MASTER_ADDR": "head"}).address == "head"


def test_master_addr_wins_over_a_list_that_cannot_be_read() -> None:
    assert place({**SLURM, "SLURM_STEP_NODELIST": "a b", "MASTER_ADDR": "head"}).address == "head"


@pytest.mark.parametrize("env", [OPEN_MPI, {"RANK": "1", "WORLD_SIZE": "4"}])
def test_a_world_of_one_rank_in_a_larger_job_is_refused(env: dict[str, str]) -> None:
    require_company(4, "MPI", env)
    with pytest.raises(InvalidArgument, match=r"4.*sees only this one"):
        require_company(1, "MPI", env)


def test_ranks_of_mpiexec_may_inherit_those_of_a_launcher(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alone = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    require_company(1, "MPI", {**alone, "RANK": "1", "WORLD_SIZE": "4"})
    assert "RANK=1, WORLD_SIZE=4" in caplog.text


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({**SLURM, "SLURM_STEP_NODELIST": None}, "SLURM_STEP_NODELIST is not set: .* srun"),
        (
            {"SLURM_PROCID": "0"},
            "SLURM_STEP_NUM_TASKS and SLURM_STEP_NODELIST are not set: .* srun",
        ),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "MASTER_ADDR is not set: .*mpi4py"),
        ({**MPICH, "PMI_SIZE": None}, "PMI_SIZE and MASTER_ADDR are not set"),
        ({"PMIX_RANK": "1"}, "SLURM_STEP_NUM_TASKS and MASTER_ADDR are not set"),
        ({**KUBERNETES, "WORLD_SIZE": None}, "Kubernetes has set .*=1, but WORLD_SIZE is not set"),
        ({**KUBERNETES, "MASTER_ADDR": None}, "but MASTER_ADDR is not set"),
        ({**SLURM, "WORLD_SIZE": "4"}, "WORLD_SIZE=4, but Slurm has set SLURM_STEP_NUM_TASKS=8"),
        ({**SLURM, "SLURM_PROCID": "8"}, "SLURM_PROCID=8 with .*: allowed is 0 to 7"),
        ({**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID='x': a whole number is needed"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a b"}, "not in Slurm's notation"),
    ],
)
def test_half_an_environment_is_refused(env: dict[str, str | None], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        place(env)


def test_an_environment_without_a_launcher_has_none() -> None:
    assert find_launcher({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "WORLD_SIZE": "2"}) is None

"""Sources of rank, nranks and the secret, and which of them are refused."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from r2ccl.bootstrap.auth import SECRET_NBYTES
from r2ccl.bootstrap.identity import identify
from r2ccl.bootstrap.secretfile import RuntimeFileSecret
from r2ccl.config import Config
from r2ccl.errors import InvalidArgument

SECRET = "5a" * 32
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def config(env: dict[str, str]) -> Config:
    return Config.from_env(env)


def test_torchruns_port_is_left_to_its_agent() -> None:
    env = {**TORCHRUN, "R2CC_SECRET": SECRET}
    identity = identify(config(env), None, env)
    assert (identity.rank, identity.nranks) == (1, 4)
    assert (identity.address, identity.port) == ("127.0.0.1", 29501)
    env["R2CC_PORT"] = "1234"
    assert identify(config(env), None, env).port == 1234


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": "four"}, "RANK='four'"),
        ({"RANK": "4"}, "RANK=4 with WORLD_SIZE=4"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"MASTER_PORT": "65535"}, "65536"),
        ({"MASTER_PORT": None}, "MASTER_PORT .or R2CC_PORT. is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR"),
    ],
)
def test_a_bad_environment_is_explained(change: dict[str, str | None], text: str) -> None:
    env = {k: v for k, v in {**TORCHRUN, "R2CC_SECRET": SECRET, **change}.items() if v is not None}
    with pytest.raises(InvalidArgument, match=text):
        identify(config(env), None, env)


def test_an_empty_environment_says_how_to_start() -> None:
    with pytest.raises(InvalidArgument, match="r2ccl launch -n 4"):
        identify(Config(), None, {})


@pytest.mark.parametrize(
    "change", [{"LOCAL_WORLD_SIZE": "2"}, {"LOCAL_WORLD_SIZE": None}, {"MASTER_ADDR": "192.0.2.1"}]
)
def test_several_hosts_need_a_secret_and_are_told_how(change: dict[str, str | None]) -> None:
    env = {k: v for k, v in {**TORCHRUN, **change}.items() if v is not None}
    with pytest.raises(InvalidArgument, match="openssl rand -hex 32"):
        identify(config(env), None, env)


def test_a_single_rank_needs_no_secret() -> None:
    env = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "9"}
    assert identify(config(env), None, env).secret.current() is not None


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_secret_file_is_read(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    file.chmod(mode)
    env = {**TORCHRUN, "R2CC_SECRET_FILE": str(file)}
    found = identify(config(env), None, env).secret.current()
    assert found is not None
    assert found.hex() == SECRET


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_secret_file_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(mode)
    env = {**TORCHRUN, "R2CC_SECRET_FILE": str(file)}
    with pytest.raises(InvalidArgument, match="chmod 600") as caught:
        identify(config(env), None, env)
    assert "no permissions for others, as with mode 0600 or 0400" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_launcher_that_does_not_tell_jobs_apart_needs_a_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("r2ccl.bootstrap.identity._has_mpi4py", lambda: False)
    env = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}
    with pytest.raises(InvalidArgument, match="set R2CC_PORT"):
        identify(config(env), None, env)
    env["R2CC_PORT"] = "29777"
    assert identify(config(env), None, env).port == 29777


def test_a_missing_secret_file_is_named(tmp_path: Path) -> None:
    env = {**TORCHRUN, "R2CC_SECRET_FILE": str(tmp_path / "nowhere")}
    with pytest.raises(InvalidArgument, match="nowhere"):
        identify(config(env), None, env)


# -- the runtime folder ---------------------------------------------------------------------


def sources(base: Path) -> tuple[RuntimeFileSecret, RuntimeFileSecret]:
    env = {"XDG_RUNTIME_DIR": str(base)}
    return (
        RuntimeFileSecret(env, "127.0.0.1", 1, is_leader=True),
        RuntimeFileSecret(env, "127.0.0.1", 1, is_leader=False),
    )


def test_the_secret_travels_in_a_private_file_and_leaves_none(tmp_path: Path) -> None:
    leader, member = sources(tmp_path)
    assert member.current() is None
    leader.publish()
    (file,) = (tmp_path / "r2ccl").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    found, own = member.current(), leader.current()
    assert found is not None
    assert own is not None
    assert found.hex() == own.hex()
    leader.retract()
    assert list((tmp_path / "r2ccl").iterdir()) == []


def test_a_leader_takes_back_only_its_own_file(tmp_path: Path) -> None:
    first, member = sources(tmp_path)
    second, _ = sources(tmp_path)
    first.publish()
    second.publish()  # as the next job on the port
    first.retract()
    found, own = member.current(), second.current()
    assert found is not None
    assert own is not None
    assert found.hex() == own.hex()


def test_a_file_that_cannot_be_taken_back_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leader, _ = sources(tmp_path)
    leader.publish()
    (file,) = (tmp_path / "r2ccl").iterdir()
    file.chmod(0o644)
    leader.retract()
    assert f"rank 0: cannot remove {file}" in caplog.text


def test_a_runtime_file_is_named_with_its_folder(tmp_path: Path) -> None:
    leader, member = sources(tmp_path)
    leader.publish()
    (file,) = (tmp_path / "r2ccl").iterdir()
    file.chmod(0o644)
    with pytest.raises(InvalidArgument, match=f"`chmod 600 {file}`"):
        member.current()
    file.chmod(0o600)
    file.write_text("no secret")
    with pytest.raises(InvalidArgument, match=str(file)):
        member.current()


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r2ccl").mkdir()
    (tmp_path / "r2ccl").chmod(0o755)
    leader, member = sources(tmp_path)
    for use in (leader.publish, member.current):
        with pytest.raises(InvalidArgument, match="accessible to others"):
            use()


def test_a_linked_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "r2ccl").symlink_to(tmp_path / "elsewhere")
    leader, member = sources(tmp_path)
    for use in (leader.publish, member.current):
        with pytest.raises(InvalidArgument, match="not a directory of this user"):
            use()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_linked_secret_file_is_refused_the_leader_replaces_it(tmp_path: Path) -> None:
    leader, member = sources(tmp_path)
    leader.publish()
    (file,) = (tmp_path / "r2ccl").iterdir()
    target = tmp_path / "target"
    target.touch(0o600)
    target.write_text(SECRET)
    file.unlink()
    file.symlink_to(target)
    with pytest.raises(InvalidArgument, match="cannot be opened"):
        member.current()
    leader.publish()
    assert target.read_text() == SECRET
    assert member.current() is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r2ccl").mkdir(mode=0o700)
    os.chown(tmp_path / "r2ccl", 12345, 12345)
    leader, _ = sources(tmp_path)
    with pytest.raises(InvalidArgument, match="another user"):
        leader.publish()


# -- names of rank 0 --------------------------------------------------------------------------


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that makes the resolver fail."""

    def answer(code: int) -> None:
        def refuse(*_: Any, **__: Any) -> Any:
            raise socket.gaierror(code, "the resolver's words")

        monkeypatch.setattr(socket, "getaddrinfo", refuse)

    return answer


NAMED = {**TORCHRUN, "MASTER_ADDR": "head-node.invalid"}


@pytest.mark.parametrize("code", [socket.EAI_FAIL, socket.EAI_FAMILY])
def test_a_name_that_cannot_exist_is_no_job_on_several_hosts(
    resolver: Callable[[int], None], code: int
) -> None:
    resolver(code)
    with pytest.raises(InvalidArgument, match=r"'head-node\.invalid', cannot be resolved \(EAI_"):
        identify(config(NAMED), None, NAMED)


@pytest.mark.parametrize("code", [socket.EAI_AGAIN, socket.EAI_NONAME, socket.EAI_NODATA])
def test_a_name_that_may_come_is_left_to_the_rendezvous(
    resolver: Callable[[int], None], tmp_path: Path, code: int
) -> None:
    resolver(code)
    env = {**NAMED, "XDG_RUNTIME_DIR": str(tmp_path)}
    assert identify(config(env), None, env).address == "head-node.invalid"


# -- rank 0's inherited socket ----------------------------------------------------------------


def test_the_launchers_socket_serves_more_than_one_communicator() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        env = {
            **TORCHRUN,
            "RANK": "0",
            "R2CC_SECRET": SECRET,
            "R2CC_PORT": str(listener.getsockname()[1]),
            "R2CC_LISTEN_FD": str(listener.fileno()),
        }
        for _ in range(2):
            found = identify(config(env), None, env).listener
            assert found is not None
            assert found.getsockname() == listener.getsockname()
            found.close()


@pytest.mark.parametrize("kind", ["closed", "too large", "no socket", "not listening", "no number"])
def test_a_wrong_descriptor_is_refused(kind: str) -> None:
    with socket.socket() as sock, open("/dev/null") as file:
        fd = {
            "closed": "999999",
            "too large": "99999999999",
            "no socket": str(file.fileno()),
            "not listening": str(sock.fileno()),
            "no number": "x",
        }[kind]
        env = {**TORCHRUN, "RANK": "0", "R2CC_SECRET": SECRET, "R2CC_LISTEN_FD": fd}
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(InvalidArgument, match="R2CC_LISTEN_FD"):
            identify(config(env), None, env)
        assert len(os.listdir("/proc/self/fd")) == before


# -- MPI --------------------------------------------------------------------------------------


class FakeComm:
    """Fake mpi4py communicator between threads, with the four calls that bootstrap uses."""

    def __init__(self, nranks: int) -> None:
        self.barrier = threading.Barrier(nranks, timeout=10)
        self.slots: list[Any] = [None] * nranks

    def as_seen_by(self, rank: int) -> FakeRank:
        return FakeRank(self, rank)


class FakeRank:
    def __init__(self, comm: FakeComm, rank: int) -> None:
        self._comm = comm
        self._rank = rank

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return len(self._comm.slots)

    def allgather(self, value: object) -> list[object]:
        self._comm.slots[self._rank] = value
        self._comm.barrier.wait()
        found = list(self._comm.slots)
        self._comm.barrier.wait()
        return found

    def bcast(self, value: object, root: int) -> object:
        return self.allgather(value)[root]


def test_a_communicator_carries_the_address_and_the_secret() -> None:
    comm = FakeComm(3)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda rank: identify(Config(), comm.as_seen_by(rank), {}), range(3)))
    listener = found[0].listener
    assert listener is not None
    assert {(i.address, i.port) for i in found} == {listener.getsockname()}
    secrets = {i.secret.current().hex() for i in found}  # type: ignore[union-attr]
    assert len(secrets) == 1
    listener.close()


def test_a_given_secret_is_not_sent_through_the_communicator() -> None:
    comm, secret = FakeComm(2), "ab" * SECRET_NBYTES
    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(
                lambda rank: identify(Config(secret=secret), comm.as_seen_by(rank), {}), range(2)
            )
        )
    assert [i.secret.current().hex() for i in found] == [secret] * 2  # type: ignore[union-attr]
    assert secret not in str(comm.slots)
    assert found[0].listener is not None
    found[0].listener.close()


@pytest.mark.parametrize("who", [0, 1])
def test_a_secret_that_only_one_rank_was_given_is_refused(who: int) -> None:
    comm = FakeComm(2)
    given = [Config(secret="ab" * SECRET_NBYTES if rank == who else "") for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        begun = [pool.submit(identify, given[rank], comm.as_seen_by(rank), {}) for rank in range(2)]
    with pytest.raises(InvalidArgument, match="set the same secret on every rank"):
        begun[1].result()
    listener = begun[0].result().listener
    assert listener is not None
    listener.close()


class FakeMpi(ModuleType):
    """Fake mpi4py.MPI, built for an MPI that finds `nranks` ranks."""

    Comm = FakeRank

    def __init__(self, nranks: int) -> None:
        super().__init__("mpi4py.MPI")
        self.COMM_WORLD = FakeComm(nranks).as_seen_by(0)
        self.COMM_SELF = FakeComm(1).as_seen_by(0)
        self.is_initialized = True

    def Is_initialized(self) -> bool:
        return self.is_initialized

    def Get_library_version(self) -> str:
        return "MPICH Version:      5.0.2\nMPICH ABI: 18:2:6\0"


@pytest.fixture
def lone_world(monkeypatch: pytest.MonkeyPatch) -> FakeRank:
    """Install an mpi4py that sees one rank."""
    package, mpi = ModuleType("mpi4py"), FakeMpi(1)
    package.MPI = mpi  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    return mpi.COMM_WORLD


OTHER_LAUNCHERS = [
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"},
    {"PMI_RANK": "2", "PMI_SIZE": "4"},
    {"PMIX_RANK": "3"},
    {"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "4"},
    # Open MPI's variables, started by one process per host in a step of Slurm.
    {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "4",
        "PMIX_RANK": "0",
        "SLURM_STEP_NUM_TASKS": "1",
    },
    # Inconsistent variables left by an outer launcher.
    {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "4",
        "PMI_RANK": "3",
        "PMI_SIZE": "1",
    },
]


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("env", OTHER_LAUNCHERS[:2] + OTHER_LAUNCHERS[3:])
def test_a_rank_of_another_mpis_launcher_is_no_job_of_one(
    lone_world: FakeRank, env: dict[str, str], is_given: bool
) -> None:
    with pytest.raises(InvalidArgument, match="belongs to another MPI") as caught:
        identify(Config(), lone_world if is_given else None, env)
    assert all(f"{name}={env[name]}" in str(caught.value) for name in list(env)[:2])
    assert "MPICH Version: 5.0.2" in str(caught.value)


def test_a_rank_beyond_the_world_is_told_without_the_world_size(lone_world: FakeRank) -> None:
    with pytest.raises(InvalidArgument, match="PMIX_RANK=3"):
        identify(Config(), None, OTHER_LAUNCHERS[2])


@pytest.mark.parametrize(
    ("env", "nwarnings"),
    [
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, 0),
        ({"PMIX_RANK": "0"}, 0),
        # mpiexec of one MPI below that of another; the two cannot be told apart.
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "PMI_RANK": "0",
                "PMI_SIZE": "1",
            },
            1,
        ),
    ],
)
def test_a_job_of_one_rank_is_left_alone(
    lone_world: FakeRank,
    caplog: pytest.LogCaptureFixture,
    env: dict[str, str],
    nwarnings: int,
) -> None:
    listener = identify(Config(), None, env).listener
    assert listener is not None
    listener.close()
    assert (
        sum("OMPI_COMM_WORLD_SIZE=4" in each.getMessage() for each in caplog.records) == nwarnings
    )


def test_a_job_of_one_that_is_asked_for_is_no_mistake(lone_world: FakeRank) -> None:
    alone = sys.modules["mpi4py.MPI"].COMM_SELF
    listener = identify(Config(), alone, OTHER_LAUNCHERS[0]).listener
    assert listener is not None
    listener.close()


def test_an_mpi_that_is_not_initialised_is_not_asked(lone_world: FakeRank) -> None:
    sys.modules["mpi4py.MPI"].is_initialized = False  # type: ignore[attr-defined]
    with pytest.raises(InvalidArgument, match=r"call MPI.Init\(\)"):
        identify(Config(), None, OTHER_LAUNCHERS[0])


def test_all_ranks_hear_why_rank_0_cannot_listen() -> None:
    comm = FakeComm(2)
    with socket.create_server(("127.0.0.1", 0)) as taken, ThreadPoolExecutor(2) as pool:
        port = taken.getsockname()[1]
        futures = [
            pool.submit(identify, Config(port=port), comm.as_seen_by(rank), {}) for rank in range(2)
        ]
        for future in futures:
            with pytest.raises(InvalidArgument, match="rank 0 cannot start the rendezvous"):
                future.result(10)

"""Contract tests of the rendezvous of ranks, each a thread with its own environment."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.planes import RAILS, WAIT_S, Job, Number, environment, join, join_all
from support.planes import start_job as start_job  # the fixture
from support.slow import slow_but

from r2ccl.bootstrap import ControlPlane, connect, leader, rendezvous, startup
from r2ccl.bootstrap.identity import Identity, identify
from r2ccl.bootstrap.launch import LocalJob
from r2ccl.bootstrap.messages import Codec
from r2ccl.config import Config
from r2ccl.errors import InvalidArgument, R2cclError, TransportTimeout
from r2ccl.types import Nic


def test_all_ranks_end_with_the_same_table(start_job: Callable[..., Job]) -> None:
    job = start_job(4)
    assert len({plane.peers for plane in job.planes}) == 1
    assert len({plane.communicator_id for plane in job.planes}) == 1
    assert [info.rank for info in job.planes[0].peers] == [0, 1, 2, 3]
    assert all(plane.is_on_one_host for plane in job.planes)
    assert {len(info.rails) for info in job.planes[0].peers} == {2}


def connect_with(job: LocalJob, pool: ThreadPoolExecutor, counts: list[int]) -> list[Future[Any]]:
    """Connect ranks of which rank i has ``counts[i]`` rails."""
    return [
        pool.submit(
            connect,
            Config.from_env(environment(job, rank)),
            codec=Codec(Number),
            nics_for=lambda _nranks, _one, _address, count=count: RAILS[:count],
            env=environment(job, rank),
        )
        for rank, count in enumerate(counts)
    ]


def test_the_rank_with_the_fewest_rails_decides() -> None:
    with LocalJob(2) as job, ThreadPoolExecutor(2) as pool:
        futures = connect_with(job, pool, [2, 1])
        planes = [future.result(WAIT_S) for future in futures]
    assert [len(plane.nics) for plane in planes] == [1, 1]
    for plane in planes:
        plane.close(0)


@pytest.mark.parametrize("rank", [0, 1])
def test_opening_the_listeners_opens_no_other_file(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without a descriptor would take the error for one of its connection to rank 0."""

    def no_file_from_now_on(*_: Any) -> tuple[Nic, ...]:
        monkeypatch.setattr(startup, "host_id", exhausted)
        return RAILS

    def exhausted() -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with LocalJob(2) as job, ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(
                connect,
                Config.from_env(environment(job, each), init_timeout_s=2.0),
                codec=Codec(Number),
                nics_for=no_file_from_now_on if each == rank else lambda *_: RAILS,
                env=environment(job, each),
            )
            for each in range(2)
        ]
        planes = [future.result(WAIT_S) for future in futures]
    for plane in planes:
        plane.close(0)


def test_a_single_rank_needs_no_rendezvous(start_job: Callable[..., Job]) -> None:
    job = start_job(1)
    assert job.planes[0].nranks == 1
    job.seen[0].wait_for(lambda: job.seen[0].ticks > 0)


def test_a_missing_rank_is_named_on_all_others() -> None:
    with LocalJob(4) as job:
        errors = join_all(job, {}, ranks=[0, 1, 3])
    assert all(isinstance(error, TransportTimeout) for error in errors)
    assert all("ranks [2] have not arrived" in str(error) for error in errors)


@pytest.mark.parametrize(("name", "is_told"), [("localhost", True), ("127.0.0.1", False)])
def test_a_host_that_is_loopback_to_itself_says_so(name: str, is_told: bool) -> None:
    """Debian gives a host the address 127.0.1.1 for its own name; other hosts have another one."""
    with LocalJob(2) as job:
        [error] = join_all(job, {0: {"MASTER_ADDR": name, "R2CC_PORT": free_port()}}, ranks=[0])
    assert "ranks [1] have not arrived" in str(error)
    advice = ", the address of localhost on its host, which other hosts cannot reach: if"
    assert (advice in str(error)) is is_told


#: Boot id and network namespace of two machines.
NEAR, FAR = "8f6c/4026531840", "91d0/4026531840"
BY_NAME = "select other interfaces on that host with R2CC_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("nranks", "advice"), [(2, BY_NAME), (5, "set R2CC_CONTROL_ADDRESS on that host to an address")]
)
def test_loopback_is_refused_between_hosts(
    nranks: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = itertools.chain([f"a/{NEAR}"], itertools.repeat(f"b/{FAR}"))
    monkeypatch.setattr(startup, "host_id", lambda: next(hosts))
    with LocalJob(nranks) as job:
        errors = join_all(job, {})
    assert all(isinstance(error, InvalidArgument) for error in errors)
    for error in errors:
        assert "on b gave the other ranks the loopback address 127.0.0.1" in str(error)
        assert advice in str(error)


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("localhost", "loopback address 127.0.0.1"),
        ("0.0.0.0", "address of all interfaces 0.0.0.0"),
    ],
)
def test_a_local_control_address_is_refused_on_all_ranks(
    address: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 gives its address to its child in the tree, rank 3, before any other check."""
    hosts = itertools.chain([f"a/{NEAR}"], itertools.repeat(f"b/{FAR}"))
    monkeypatch.setattr(startup, "host_id", lambda: next(hosts))
    with LocalJob(4) as job:
        errors = join_all(job, {2: {"R2CC_CONTROL_ADDRESS": address}})
    assert all(isinstance(error, InvalidArgument) for error in errors), errors
    text = f"rank 2 on [ab] gave the other ranks the {named}"
    assert all(re.search(text, str(error)) for error in errors), errors


def test_a_malformed_control_address_is_named_on_all_ranks() -> None:
    with LocalJob(4) as job:
        errors = join_all(job, {2: {"R2CC_CONTROL_ADDRESS": "\u00fc" * 99}})
    assert all(isinstance(error, InvalidArgument) for error in errors), errors
    assert all("rank 2: cannot listen at" in str(error) for error in errors)


@pytest.mark.parametrize("listening", ["127.0.0.1", "::"])
def test_rails_are_chosen_by_the_numeric_control_address(listening: str) -> None:
    """The NIC with this address is no rail, so the address must be as NICs have it."""
    seen: list[str] = []

    def choose(_nranks: int, _is_on_one_host: bool, address: str) -> tuple[Nic, ...]:
        seen.append(address)
        return RAILS

    name = {} if listening == "::" else {"control_address": "localhost"}
    with ExitStack() as stack, LocalJob(2) as job, ThreadPoolExecutor(2) as pool:
        if listening == "::":
            both = socket.create_server((listening, 0), family=socket.AF_INET6, dualstack_ipv6=True)
            job.listener = stack.enter_context(both)
            port = both.getsockname()[1]
            job.share = msgspec.structs.replace(job.share, port=port)
        futures = [
            pool.submit(
                connect,
                Config.from_env(environment(job, rank), **name),
                codec=Codec(Number),
                nics_for=choose,
                env=environment(job, rank),
            )
            for rank in range(2)
        ]
        planes = [future.result(WAIT_S) for future in futures]
    assert seen == ["127.0.0.1"] * 2
    for plane in planes:
        assert [plane.peers[0].control_addresses[0][0]] == ["127.0.0.1"]
        plane.close(0)


def test_ranks_of_one_network_namespace_may_use_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = itertools.chain([f"a/{NEAR}"], itertools.repeat(f"b/{NEAR}"))
    monkeypatch.setattr(startup, "host_id", lambda: next(hosts))
    with LocalJob(2) as job:
        assert join_all(job, {}) == [None, None]


def test_rank_0_says_for_whom_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leader, "_FIRST_REPORT_S", 0.1)
    with caplog.at_level(logging.INFO, "r2ccl"), LocalJob(4) as job:
        join_all(job, {}, ranks=[0, 1, 3])
    said = [text for text in caplog.messages if "init has waited" in text]
    assert re.search(r"^rank 0: init has waited 0\.1 s \(of [\d.]+ s\) for ranks ", said[0])
    assert all(text.endswith("for ranks [2]") for text in said[1:])
    assert 2 <= len(said) <= 5, "the interval doubles"


def test_a_rank_says_once_that_rank_0_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "_REPORT_AFTER_S", 0.1)
    with caplog.at_level(logging.INFO, "r2ccl"), LocalJob(2) as job:
        port = free_port()
        join_all(job, {1: {"R2CC_PORT": port}}, ranks=[1])
    (said,) = [text for text in caplog.messages if "was not reached yet" in text]
    assert said.startswith(f"rank 1: rank 0 was not reached yet at 127.0.0.1:{port} (")


def test_a_rank_without_rank_0_says_where_it_looked() -> None:
    with LocalJob(2) as job:
        port = free_port()
        (error,) = join_all(job, {1: {"R2CC_PORT": port}}, ranks=[1])
    assert isinstance(error, TransportTimeout)
    assert f"127.0.0.1:{port}" in str(error)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Return a function that makes the resolver fail the first `n` queries with `code`."""
    resolve = socket.getaddrinfo

    def arrange(code: int, n: int = 1 << 30) -> None:
        left = [n]

        def answer(host: Any, *args: Any, **more: Any) -> Any:
            if host == "head-node" and left[0] > 0:
                left[0] -= 1
                raise socket.gaierror(code, "the resolver's words")
            return resolve("127.0.0.1" if host == "head-node" else host, *args, **more)

        monkeypatch.setattr(socket, "getaddrinfo", answer)

    return arrange


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        return str(reserved.getsockname()[1])


def join_named(job: LocalJob, rank: int, **changes: str) -> BaseException | None:
    env = {**job.environment(rank), "MASTER_ADDR": "head-node", **changes}
    config = Config.from_env(env, init_timeout_s=1.0)
    try:
        connect(config, codec=Codec(Number), nics_for=lambda *_: RAILS, env=env).close(0)
    except R2cclError as exc:
        return exc
    return None


def test_each_address_of_rank_0s_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def answer(host: Any, *args: Any, **more: Any) -> Any:
        found = ["127.0.0.2", "127.0.0.1"] if host == "head-node" else [host]
        return [entry for each in found for entry in resolve(each, *args, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    with LocalJob(2) as job:  # its socket listens at 127.0.0.1
        assert join_all(job, {1: {"MASTER_ADDR": "head-node"}}) == [None, None]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_cannot_exist_ends_init_at_once(
    resolver: Callable[..., None], rank: int
) -> None:
    resolver(socket.EAI_FAIL)
    began_s = time.monotonic()
    with LocalJob(2) as job:
        error = join_named(job, rank)
    assert time.monotonic() < began_s + 0.9
    assert isinstance(error, InvalidArgument)
    assert f"rank {rank}: the host of rank 0, 'head-node', cannot be resolved (EAI_FAIL" in str(
        error
    )


@pytest.mark.parametrize(
    ("rank", "code"),
    slow_but(
        [(0, socket.EAI_AGAIN), (1, socket.EAI_NONAME)],
        itertools.product([0, 1], [socket.EAI_AGAIN, socket.EAI_NONAME]),
    ),
)
def test_a_name_that_does_not_come_in_time_is_invalid(
    resolver: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    rank: int,
    code: int,
) -> None:
    resolver(code)
    with LocalJob(2) as job:
        error = join_named(job, rank)
    assert isinstance(error, InvalidArgument)
    assert f"rank {rank}: the host of rank 0, 'head-node', cannot be resolved" in str(error)
    assert "the resolver's words" in str(error)
    said = [each for each in caplog.records if "cannot be resolved yet" in each.getMessage()]
    assert len(said) == 1


@pytest.mark.parametrize("code", [socket.EAI_AGAIN, socket.EAI_NONAME])
def test_a_name_that_comes_while_the_job_starts_is_waited_for(
    resolver: Callable[..., None], code: int
) -> None:
    resolver(code, 2)
    with LocalJob(2) as job, ThreadPoolExecutor(2) as pool:
        port = free_port()
        futures = [pool.submit(join_named, job, rank, R2CC_PORT=port) for rank in range(2)]
        assert [future.result(15) for future in futures] == [None, None]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({2: {"RANK": "1"}}, "rank 1 was started twice"),
        ({2: {"WORLD_SIZE": "5"}}, "rank 2 was started for 5 ranks, rank 0 for 3"),
        ({2: {"R2CC_SLICE_NBYTES": "4096"}}, r"ranks \[2\] have settings that differ"),
    ],
    ids=["duplicate", "nranks", "settings"],
)
def test_ranks_that_do_not_fit_are_named_on_all(
    changes: dict[int, dict[str, str]], named: str
) -> None:
    with LocalJob(3) as job:
        errors = join_all(job, changes)
    assert all(isinstance(error, InvalidArgument) for error in errors), errors
    for error in errors:
        with pytest.raises(InvalidArgument, match=named):
            raise error or AssertionError


def test_a_second_rank_0_is_told_that_the_port_is_taken() -> None:
    with LocalJob(2) as job:  # the job's socket acts as the first rank 0
        (error,) = join_all(job, {1: {"RANK": "0"}}, ranks=[1])
    assert isinstance(error, InvalidArgument)
    assert "another process uses the port" in str(error)
    assert "R2CC_PORT" in str(error)


def test_one_rank_without_rails_fails_all() -> None:
    with LocalJob(2) as job, ThreadPoolExecutor(2) as pool:
        for future in connect_with(job, pool, [1, 0]):
            with pytest.raises(InvalidArgument, match="rank 1: no usable network interface"):
                future.result(WAIT_S)


def test_without_a_control_thread_the_listener_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Identity] = []

    def remember(*given: Any) -> Identity:
        made.append(identify(*given))
        return made[0]

    def fail(name: str) -> None:
        raise OSError(errno.EMFILE, f"no descriptor left for {name}")

    monkeypatch.setattr(startup, "identify", remember)
    monkeypatch.setattr(startup, "ControlLoop", fail)
    with LocalJob(2) as job, pytest.raises(OSError, match="no descriptor left"):
        join(job, 0, {})
    assert made[0].listener is not None
    assert made[0].listener.fileno() == -1


def test_ranks_of_one_host_share_the_secret_through_a_file(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    stale = tmp_path / "r2ccl" / f"secret-127.0.0.1-{port}"
    stale.parent.mkdir(mode=0o700)
    stale.touch(0o600)
    stale.write_text("ab" * 32)  # left by a crashed job

    def start(rank: int) -> ControlPlane:
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port - 1),
            "XDG_RUNTIME_DIR": str(tmp_path),
        }
        return connect(Config(), codec=Codec(Number), nics_for=lambda *_: RAILS, env=env)

    with ThreadPoolExecutor(3) as pool:
        planes = list(pool.map(start, [1, 2, 0]))  # the others may read the stale file first
    assert os.listdir(stale.parent) == []
    for plane in planes:
        plane.close(0)

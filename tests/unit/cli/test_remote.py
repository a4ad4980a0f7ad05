"""Ranks on several hosts: they start by agents, and end together whatever ends first.

A stand-in takes the place of ssh. The hosts are addresses of the loopback interface.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.slow import slow_but
from support.stand_ins import StandIns

from r2ccl.bootstrap.launch import JobShare
from r2ccl.cli import make_parser
from r2ccl.cli.agent import _Agent
from r2ccl.cli.agentlink import AgentLink, FromAgent, Input, LinkEnded, Start, ToAgent
from r2ccl.cli.rankprocs import HostRanks, JobCommand
from r2ccl.errors import InvalidArgument, R2cclError

WAIT_S = 60.0
HOSTS = "127.0.0.2:1,127.0.0.3:1"
SUM = (
    "import numpy as np, r2ccl\n"
    "with r2ccl.init() as comm: print(comm.allreduce(np.full(3, comm.rank + 1.0))[0])"
)


@pytest.fixture
def stand_ins(tmp_path: Path) -> StandIns:
    (tmp_path / "stand-ins").mkdir()
    return StandIns(tmp_path / "stand-ins")


@pytest.fixture
def ssh(stand_ins: StandIns) -> str:
    """Return a command that takes a host and a command line, as ssh does."""
    return stand_ins.ssh()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait briefly after a failure."""
    monkeypatch.setattr("r2ccl.cli.supervisor.FAILURE_GRACE_S", 0.1)


def run(*args: str) -> int:
    """Run the launcher in this process."""
    parser = make_parser(["launch"])
    parsed = parser.parse_args(["launch", *args])
    status: int = parsed.run(parsed)
    return status


def test_ranks_of_several_hosts_are_one_job(
    stand_ins: StandIns,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ssh = stand_ins.ssh()
    (tmp_path / "sum.py").write_text(SUM)
    monkeypatch.setenv("R2CC_INIT_TIMEOUT_S", "50")
    arguments = ("--hosts", HOSTS, "--ssh", ssh, "--prefix", "--chdir", str(tmp_path), "sum.py")
    status = run(*arguments)
    out, err = capfd.readouterr()
    assert status == 0, err
    assert sorted(out.splitlines()) == ["[0] 3.0", "[1] 3.0"]
    assert sorted(stand_ins.logins.read_text().split()) == ["127.0.0.2", "127.0.0.3"]


def test_each_rank_has_its_place_and_the_secret_is_in_no_command(
    stand_ins: StandIns,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ssh = stand_ins.ssh()
    monkeypatch.setenv("R2CC_RAILS", "3")
    monkeypatch.setenv("R2CC_SECRET_FILE", "/nowhere")
    monkeypatch.setenv("MINE", "m")
    program = (
        f"printf %s $R2CC_SECRET > {tmp_path}/$RANK\n"
        "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT "
        "$R2CC_RAILS $MINE $X "
        f"${{#R2CC_SECRET}} $(cat /proc/[0-9]*/cmdline | grep -caFf {tmp_path}/$RANK) 2>/dev/null"
    )
    hosts = ("--hosts", "localhost:2,127.0.0.3:1", "--master-addr", "127.0.0.2", "--ssh", ssh)
    arguments = ("--env", "MINE", "--env", "X=y", "--tag", "never", "--", "sh", "-c", program)
    assert run(*hosts, *arguments) == 0
    assert sorted(line for line in capfd.readouterr().out.splitlines() if "m y" in line) == [
        "0 3 0 2 127.0.0.2 29500 3 m y 64 0",
        "1 3 1 2 127.0.0.2 29500 3 m y 64 0",
        "2 3 0 1 127.0.0.2 29500 3 m y 64 0",
    ]
    assert stand_ins.logins.read_text() == "127.0.0.3\n"  # this host needs no ssh


def test_words_that_are_not_utf8_reach_the_ranks(
    ssh: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Python has U+DCFF in place of the byte FF of an argument, which no encoding has."""
    program = ("--env", "A=\udcfe", "--", "sh", "-c", 'echo "$0 $A"', "\udcff")
    assert run("--hosts", HOSTS, "--ssh", ssh, "--tag", "never", *program) == 0
    assert capfdbinary.readouterr().out == b"\xff \xfe\n" * 2
    folder = str(tmp_path / "\udcfd")
    with pytest.raises(InvalidArgument, match=r"directory .*\\xfd is not a directory"):
        run("--hosts", HOSTS, "--ssh", ssh, "--chdir", folder, *program)


def test_the_commands_by_hand_have_the_bytes_of_the_words(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    assert run("--hosts", HOSTS, "--by-hand", "echo", "\udcff", "\u00e9") == 0
    assert b" echo '\xff' '\xc3\xa9'\n" in capfdbinary.readouterr().out


ENDS = {
    "rank": ("exit 7", 7, "r2ccl launch: rank 1: exit status 7"),
    # The agent, once it has said that its ranks run.
    "agent": (
        "sleep 0.5; kill -KILL $PPID",
        1,
        "host 127.0.0.3 was lost with ranks [1]: its agent: ",
    ),
}


@pytest.mark.parametrize("who", slow_but(["rank"], ENDS))
def test_what_ends_on_one_host_ends_the_ranks_of_the_other(
    ssh: str, capfd: pytest.CaptureFixture[str], who: str
) -> None:
    act, status, text = ENDS[who]
    script = f"if [ $RANK = 1 ]; then {act}; fi; exec sleep 600"
    assert run("--hosts", HOSTS, "--ssh", ssh, "sh", "-c", script) == status
    assert text in capfd.readouterr().err


@pytest.mark.parametrize("where", slow_but(["-n 2"], ["-n 2", f"--hosts {HOSTS}"]))
def test_standard_input_reaches_rank_0_alone(ssh: str, where: str) -> None:
    command = [
        sys.executable,
        "-m",
        "r2ccl",
        "launch",
        *where.split(),
        "--ssh",
        ssh,
        "--stdin",
        "--prefix",
    ]
    done = subprocess.run(
        [*command, "--prefix", "wc", "-c"], input=b"x" * 200_000, stdout=subprocess.PIPE,
        timeout=WAIT_S, check=True,
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == [b"[0] 200000", b"[1] 0"]


@pytest.fixture
def job(ssh: str, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a launcher whose two ranks have written their process ids."""
    script = f"echo $$ > {tmp_path}/$RANK.new; mv {tmp_path}/$RANK.new {tmp_path}/$RANK.pid; "
    command = [sys.executable, "-m", "r2ccl", "launch", "--hosts", HOSTS, "--ssh", ssh]
    process = subprocess.Popen([*command, "sh", "-c", script + "exec sleep 600"])
    try:
        await_true(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)


def pids(tmp_path: Path) -> list[int]:
    return [int(file.read_text()) for file in tmp_path.glob("*.pid")]


def await_true(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s
        select.select([], [], [], 0.02)


def have_ended(processes: Sequence[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in processes)


@pytest.mark.parametrize("number", slow_but([signal.SIGKILL], [signal.SIGINT, signal.SIGKILL]))
def test_ranks_end_with_their_launcher(
    job: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals
) -> None:
    job.send_signal(number)
    status = job.wait(WAIT_S)
    assert status == (130 if number == signal.SIGINT else -number)
    await_true(lambda: have_ended(pids(tmp_path)))


REFUSALS: dict[str, tuple[list[str], type[Exception], str]] = {
    "folder": (["--chdir", "/nowhere", "true"], InvalidArgument, "host 127.0.0..: the working dir"),
    "program": (["/nowhere/x"], InvalidArgument, "host 127.0.0..: cannot run '/nowhere/x'"),
    "address": (["--master-addr", "a..b", "true"], InvalidArgument, "host 127.0.0.3: .*'a..b'"),
    "agent": (["--python", "false", "true"], R2cclError, "the agent did not start .*exit status 1"),
    "version": (["--python", "echo", "true"], R2cclError, "install the same version"),
    "ssh": (["--ssh", "/nowhere/ssh", "true"], InvalidArgument, "cannot run '/nowhere/ssh'"),
    "no ssh": (["--ssh", " ", "true"], InvalidArgument, "a command is needed"),
    "quote": (["--ssh", "ssh '", "true"], InvalidArgument, "a command is needed"),
}


@pytest.mark.parametrize("what", slow_but(["folder", *list(REFUSALS)[3:]], REFUSALS))
def test_a_host_that_cannot_start_is_named(ssh: str, what: str) -> None:
    arguments, error, text = REFUSALS[what]
    if what == "version":
        script = Path(ssh).with_name("python")
        script.write_text("#!/bin/sh\necho r2ccl agent 9\n")
        script.chmod(0o700)
        arguments = ["--python", str(script), "true"]
    with pytest.raises(error, match=text):
        run("--hosts", HOSTS, "--ssh", ssh, *arguments)


@pytest.mark.parametrize("what", ["attend", "feed"])
def test_an_agent_that_cannot_go_on_ends_with_its_ranks(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async def fail(self: HostRanks, *given: bytes) -> None:
        raise OSError("cannot go on")

    monkeypatch.setattr(HostRanks, what, fail)
    share = JobShare(1, 0, 1, "127.0.0.1", 1, "5e" * 32)
    program = JobCommand(("sleep", "600"), False, {}, "/", True)

    async def receive_all(link: AgentLink[FromAgent]) -> None:
        while True:
            await link.receive()

    async def main() -> None:
        ours, theirs = socket.socketpair()
        link = AgentLink[FromAgent](FromAgent, *await asyncio.open_connection(sock=ours))
        other = AgentLink[ToAgent](ToAgent, *await asyncio.open_connection(sock=theirs))
        running = asyncio.create_task(_Agent(other).run())
        await link.send(Start.of(share, program))
        await link.send(Input(b"x"))
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(OSError, match="cannot go on"):
                await running
            with pytest.raises(LinkEnded):
                await receive_all(link)
        await link.close()

    asyncio.run(main())


def test_the_first_host_must_be_known_by_a_name_for_others() -> None:
    with pytest.raises(InvalidArgument, match="the first host is localhost"):
        run("--hosts", "localhost:1,b:1", "true")


# -- by hand --------------------------------------------------------------------------------


PROGRAMS = {
    "environment": (("sh", "-c", "echo $RANK of $WORLD_SIZE at $MASTER_ADDR $A"),
                    "{} of 2 at 127.0.0.2 b c"),
    "allreduce": ((sys.executable, "-c", SUM), "3.0"),
}  # fmt: skip


@pytest.mark.parametrize("what", slow_but(["environment"], PROGRAMS))
def test_the_commands_by_hand_start_one_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    program, expected = PROGRAMS[what]
    secret = tmp_path / "a secret"
    monkeypatch.setenv("R2CC_SECRET_FILE", str(secret))
    monkeypatch.chdir(tmp_path)
    options = ("--hosts", HOSTS, "--by-hand", "--port", "29871", "--env", "A=b c", "--prefix")
    assert run(*options, *program) == 0
    text = capfd.readouterr().out
    (make,) = (line for line in text.splitlines() if "openssl" in line)
    subprocess.run(["sh", "-c", make.removeprefix("#")], check=True, timeout=WAIT_S)
    commands = text.split("# on 127.0.0.")[1:]
    r2ccl = f'r2ccl() {{ {shlex.quote(sys.executable)} -m r2ccl "$@"; }}\n'
    started = [
        subprocess.Popen(["sh", "-c", r2ccl + each.split("\n", 1)[1]], stdout=subprocess.PIPE)
        for each in commands
    ]
    outputs = [process.communicate(timeout=WAIT_S)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert outputs == [f"[{rank}] {expected.format(rank)}\n" for rank in range(2)]
    assert secret.read_text().strip() not in text


def test_the_commands_by_hand_write_different_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.json"
    assert run("--hosts", HOSTS, "--by-hand", "--json", str(file), "true") == 0
    text = capfd.readouterr().out
    files = re.findall(r"--json (\S+)", text)
    assert files == [f"{tmp_path}/job-0.json", f"{tmp_path}/job-1.json"]
    assert run("--hosts", "a", "--by-hand", "--json", str(file), "true") == 0
    assert f"--json {file} " in capfd.readouterr().out


def test_the_commands_by_hand_contain_no_secret(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R2CC_SECRET", "5e" * 32)
    assert run("--hosts", HOSTS, "--by-hand", "--env", "R2CC_SECRET", "--env", "A=1", "true") == 0
    text = capfd.readouterr().out
    assert "--env A=1" in text
    assert "5e5e" not in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--node-rank", "0", "-n", "2", "true"], "--node-rank needs --hosts"),
        (["--by-hand", "-n", "2", "true"], "--by-hand needs --hosts"),
        (["--port", "1", "-n", "2", "true"], "--port needs --hosts"),
        (["--hosts", HOSTS, "--port", "0", "--by-hand", "true"], "--port 0: allowed is 1 to 65535"),
        (["--hosts", HOSTS, "--node-rank", "2", "true"], "allowed is 0 to 1"),
        (["--hosts", HOSTS, "--node-rank", "0", "true"], "no secret is set"),
        (["--hosts", HOSTS, "-n", "3", "true"], "2 slots"),
        (["--hosts", HOSTS, "--master-addr", "\udcff", "true"], "allowed is text in UTF-8"),
        (["true"], "no number of ranks given"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: list[str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        run(*arguments)


def test_the_only_host_may_have_a_loopback_name(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    place = ("--hosts", "localhost:2", "--node-rank", "0", "--port", port)
    assert run(*place, "--", sys.executable, "-c", SUM) == 0
    assert capfd.readouterr().out.count("3.0") == 2


@pytest.mark.parametrize("address", ["127.0.1.1", "::1"])
def test_a_name_that_is_loopback_at_home_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R2CC_SECRET", "5a" * 32)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = (family, socket.SOCK_STREAM, 6, "", (address, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [found])
    arguments = ("--hosts", HOSTS, "--node-rank", "0", "--master-addr", "a", "true")
    with pytest.raises(InvalidArgument, match=f"'a', the host of rank 0, is {address} here"):
        run(*arguments)

"""Ranks start with the right environment, end within bounded time, and report the first failure."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from support.limits import no_descriptor_left
from support.slow import slow_but

from r2ccl.bootstrap.launch import JobShare, LocalJob, describe_exit, launch
from r2ccl.bootstrap.logs import TERMINAL_VARIABLE
from r2ccl.bootstrap.pool import launch_pool
from r2ccl.cli import make_parser
from r2ccl.cli.rankprocs import HostRanks, JobCommand
from r2ccl.cli.results import check_file
from r2ccl.errors import CommunicatorRevoked, InvalidArgument, R2cclError, TransportTimeout

WAIT_S = 20.0


def environ(name: str) -> partial[object]:
    return partial(eval, f"__import__('os').environ.get({name!r})")


def by_rank(expression: str) -> partial[object]:
    """Evaluate `expression` with ``rank`` in every process."""
    return partial(eval, f"(lambda rank: {expression})(int(__import__('os').environ['RANK']))")


def test_results_come_back_by_rank() -> None:
    assert launch(by_rank("rank * 10"), 3, timeout_s=WAIT_S) == [0, 10, 20]


def test_extra_variables_reach_every_rank() -> None:
    found = launch(environ("SOME_NAME"), 2, timeout_s=WAIT_S, env={"SOME_NAME": "x", "RANK": "9"})
    assert found == ["x", "x"]


def test_the_parents_environment_is_left_alone() -> None:
    before = dict(os.environ)
    secrets = launch(environ("R2CC_SECRET"), 2, timeout_s=WAIT_S)
    assert len(set(secrets)) == 1
    assert len(secrets[0]) == 64
    assert dict(os.environ) == before


def test_the_first_exception_comes_back_with_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        launch(by_rank("1 // (rank - 1)"), 2, timeout_s=WAIT_S)
    assert "rank 1" in str(caught.value.__cause__)
    assert "Traceback" in str(caught.value.__cause__)


def end_late(pause_s: float) -> None:
    """Raise in rank 0, after a pause, what has revoked the communicator of the others."""
    if os.environ["RANK"] == "0":
        time.sleep(pause_s)
        raise OSError("the disk is full")
    raise CommunicatorRevoked("rank 0 ended the communicator")


def test_the_exception_that_ended_the_others_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="the disk is full"):
        launch(partial(end_late, 0.3), 3, timeout_s=WAIT_S)
    monkeypatch.setattr("r2ccl.bootstrap.launch._CAUSE_GRACE_S", 0.2)
    monkeypatch.setattr("r2ccl.bootstrap.launch._FAILURE_GRACE_S", 0.2)
    started = time.monotonic()
    with pytest.raises(CommunicatorRevoked, match="rank 0 ended"):
        launch(partial(end_late, 60.0), 3, timeout_s=WAIT_S)
    assert time.monotonic() - started < WAIT_S / 2


def test_a_rank_that_dies_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r2ccl.bootstrap.launch._FAILURE_GRACE_S", 0.2)
    dies = by_rank(
        "__import__('os').kill(__import__('os').getpid(), 9) if rank == 1 "
        "else __import__('time').sleep(60)"
    )
    started = time.monotonic()
    with pytest.raises(R2cclError, match=r"rank 1 .* SIGKILL"):
        launch(dies, 2, timeout_s=WAIT_S)
    assert time.monotonic() - started < WAIT_S / 2


def test_a_timeout_names_who_is_late() -> None:
    sleeps = by_rank("__import__('time').sleep(60 * (rank == 1))")
    with pytest.raises(TransportTimeout, match=r"ranks \[1\]"):
        launch(sleeps, 2, timeout_s=5.0)  # time enough to start, on a busy machine


def writes_without_end() -> None:
    while True:
        print("x" * 50)
        time.sleep(0.001)


def test_output_without_end_does_not_extend_the_timeout(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TransportTimeout, match=r"ranks \[0\]"):
        launch(writes_without_end, 1, timeout_s=2.0)
    assert "x" * 50 in capsys.readouterr().out


@pytest.mark.parametrize("nranks", [0, -1, "2", None, 10**11])
def test_the_number_of_ranks_is_checked(nranks: Any) -> None:
    with pytest.raises(InvalidArgument, match="from 1 to 16,384"):
        launch(os.getpid, nranks)


def test_the_result_of_a_function_is_no_function() -> None:
    result: Any = os.getpid()
    with pytest.raises(InvalidArgument, match="without calling it"):
        launch(result, 1)


def test_what_cannot_be_sent_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidArgument, match="cannot be sent"):
        launch(lambda: lock, 1)


def test_a_result_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(InvalidArgument, match="result of the function, of type generator, cannot"):
        launch(lambda: (each for each in ()), 1, timeout_s=WAIT_S)


class TwoArguments(Exception):
    """Error that can be pickled, but not made again: its class needs two arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)


def test_a_result_that_cannot_be_made_again_is_named() -> None:
    with pytest.raises(InvalidArgument, match="result of rank 0 was pickled but cannot be unpick"):
        launch(partial(TwoArguments, 1, 2), 1, timeout_s=WAIT_S)


def end_within_result() -> bytes:
    """Write the first half of a result in rank 1, then kill the process."""

    def send_half(connection: Connection, data: Any) -> None:
        if len(data) > 100:  # else the length of the message
            os.write(connection.fileno(), bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(connection.fileno(), data)

    if os.environ["RANK"] == "1":
        Connection._send = send_half  # type: ignore[attr-defined]
    return bytes(100_000)


def test_a_rank_that_dies_while_it_sends_is_named() -> None:
    with pytest.raises(R2cclError, match=r"rank 1 .* sent no result: signal SIGKILL"):
        launch(end_within_result, 2, timeout_s=WAIT_S)


@pytest.mark.parametrize("status", [0, 3])
def test_a_rank_that_calls_exit_does_not_end_the_launcher(status: int) -> None:
    with pytest.raises(R2cclError, match=rf"rank 1 called sys.exit\({status}\)"):
        launch(by_rank(f"rank and __import__('sys').exit({status})"), 2, timeout_s=WAIT_S)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"timeout_s": "abc"}, "timeout_s='abc': allowed is a number of seconds"),
        ({"timeout_s": float("nan")}, "timeout_s=nan: allowed is"),
        ({"env": {"A": 1}}, "env has a wrong variable 'A': names and values must be of type str"),
        ({"env": {"A=B": "1"}}, "env has a wrong variable 'A=B': names"),
        ({"env": ["A"]}, "pass a mapping of names to values"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        launch(os.getpid, 1, **options)


def test_a_script_without_a_guard_is_told_to_add_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, r2ccl\nr2ccl.launch(os.getpid, 1)\n")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=3 * WAIT_S, check=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "InvalidArgument: launch: the main script starts ranks while another process" in last
    assert "in the block `if __name__ == '__main__':`" in last


#: As in a notebook, the main module is no file that a rank could import.
INTERACTIVE = """
import r2ccl

class Minded(Exception):
    pass

def fails():
    raise Minded(here)

here = 5
try:
    r2ccl.launch(fails, 1)
except Minded as exc:
    print(exc)
"""


def test_functions_of_no_file_run_in_ranks() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-"],
        input=INTERACTIVE,
        capture_output=True,
        text=True,
        timeout=3 * WAIT_S,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("5\n", "")


def test_output_of_ranks_is_captured_with_that_of_the_caller(
    capsys: pytest.CaptureFixture[str],
) -> None:
    launch(lambda: (print("out"), print("err", file=sys.stderr), None)[-1], 1, timeout_s=WAIT_S)
    assert capsys.readouterr() == ("out\n", "err\n")


def open_descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")


@pytest.mark.parametrize("spare", [14])
def test_a_launch_without_descriptors_leaves_none_open(
    spare: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = open_descriptors()
    with no_descriptor_left(spare), pytest.raises(OSError, match="Too many open files") as caught:
        launch(os.getpid, 4)
    assert open_descriptors() == before, caught  # whose traceback holds what the call has made


@pytest.mark.parametrize("closed", slow_but(["0, 1, 2"], ["0", "1", "2", "0, 1, 2"]))
def test_ranks_start_if_standard_streams_are_closed(closed: str, tmp_path: Path) -> None:
    code = f"""if 1:
        import os
        from functools import partial
        from r2ccl.bootstrap.launch import launch
        from r2ccl.bootstrap.pool import launch_pool

        for number in ({closed},):
            os.close(number)
        met = "__import__('r2ccl').init().nranks, print('hello', flush=True)"
        found = [launch(partial(eval, met), 2)]
        with launch_pool(2) as pool:
            found.append(pool.run(lambda comm: (comm.nranks, print("hello", flush=True))))
        with open({str(tmp_path / "found")!r}, "a") as file:
            print(found == [[(2, None)] * 2] * 2, file=file)
        os._exit(0)  # Python itself may fail to close a standard stream
    """
    subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=WAIT_S
    )
    assert (tmp_path / "found").read_text() == "True\n"


@pytest.mark.parametrize(
    "start",
    ["launch(print, 1)", "launch_pool(1)", "raise SystemExit(main(['launch', '-n', '1', 'true']))"],
)
def test_a_removed_working_directory_is_named(tmp_path: Path, start: str) -> None:
    code = f"""if 1:
        import os
        from r2ccl.bootstrap.launch import launch
        from r2ccl.bootstrap.pool import launch_pool
        from r2ccl.cli import main

        os.rmdir(os.getcwd())
        {start}
    """
    (tmp_path / "gone").mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "gone", capture_output=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert re.search(b"the working directory .*was removed: change to another", ran.stderr)


def test_a_server_that_exits_early_leaves_none_open(capfd: pytest.CaptureFixture[str]) -> None:
    before = open_descriptors()
    with pytest.raises(R2cclError, match="exited early") as caught:
        launch(os.getpid, 2, env={"PYTHONHOME": "/missing"})
    assert open_descriptors() == before, caught


#: Module that the server imports before it forks, in the place of psutil: it kills the launcher.
KILLS_THE_LAUNCHER = """
import os, signal, sys
if "it.serve" in sys.orig_argv[-1]:
    os.kill(os.getppid(), signal.SIGKILL)
sys.path.remove(os.path.dirname(__file__))
del sys.modules["psutil"]
import psutil
"""


def test_a_server_whose_launcher_is_killed_ends_quietly(tmp_path: Path) -> None:
    (tmp_path / "psutil.py").write_text(KILLS_THE_LAUNCHER)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from r2ccl.bootstrap.launch import launch
launch(lambda: print("a rank runs", flush=True), 2)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=3 * WAIT_S, check=False,
    )  # fmt: skip
    assert ran.returncode == -signal.SIGKILL
    assert "Traceback" not in ran.stderr
    assert not ran.stdout


def test_an_interrupt_of_the_launcher_reaches_every_rank_once() -> None:
    code = (
        "import os, r2ccl, time\n"
        "def fn():\n"
        "    try:\n"
        "        os.write(1, b'ready\\n')\n"
        "        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        time.sleep(0.3)\n"
        "        os.write(1, b'interrupted\\n')\n"
        "try: r2ccl.launch(fn, 2)\n"
        "except KeyboardInterrupt: os.write(1, b'over')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert out.splitlines() == ["interrupted", "interrupted", "over"]


def test_the_port_is_taken_before_any_rank_runs() -> None:
    with LocalJob(2) as job:
        port = int(job.environment(1)["R2CC_PORT"])
        assert job.listener.getsockname() == ("127.0.0.1", port)


@pytest.mark.parametrize(
    ("status", "text"), [(3, "exit status 3"), (-9, "SIGKILL"), (None, "still running")]
)
def test_exit_statuses_are_spelled_out(status: int | None, text: str) -> None:
    assert text in describe_exit(status)


# -- the command ----------------------------------------------------------------------------


def start_command(*args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "r2ccl", "launch", *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run_command(*args: str) -> tuple[int, bytes, bytes]:
    process = start_command(*args)
    try:
        out, err = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    return process.returncode, out, err


def python(code: str) -> Sequence[str]:
    start = "import os, sys, time; rank = int(os.environ['RANK'])\n"
    return ("--", sys.executable, "-c", start + code)


def test_the_command_runs_every_rank_and_tags_their_lines() -> None:
    code = "print('here', os.environ['WORLD_SIZE'], os.environ['NAME'])"
    status, out, _ = run_command("-n", "3", "--env", "NAME=v", "--tag", "always", *python(code))
    assert status == 0
    assert sorted(out.splitlines()) == [b"[%d] here 3 v" % rank for rank in range(3)]


@pytest.mark.parametrize(("is_terminal", "value"), [(False, b"[]"), (True, b"[1]")])
def test_ranks_are_told_of_the_launchers_terminal(is_terminal: bool, value: bytes) -> None:
    reader, writer = os.openpty() if is_terminal else os.pipe()
    command = [sys.executable, "-m", "r2ccl", "launch", "-n", "1"]
    with open(reader, "rb", buffering=0) as shown, open(writer, "wb") as out:
        subprocess.run(
            [*command, *python(f"print('[' + os.environ['{TERMINAL_VARIABLE}'] + ']')")],
            stdout=out, env={**os.environ, TERMINAL_VARIABLE: "1"}, timeout=WAIT_S, check=True,
        )  # fmt: skip
        assert shown.read(100).strip() == value


def test_the_secret_is_in_no_command_line() -> None:
    code = (
        "lines = open('/proc/self/cmdline').read() + open(f'/proc/{os.getppid()}/cmdline').read()\n"
        "print(os.environ['R2CC_SECRET'] in lines, len(os.environ['R2CC_SECRET']))"
    )
    assert run_command("-n", "1", *python(code))[1] == b"False 64\n"


def test_ranks_get_a_port_at_which_rank_0_can_listen() -> None:
    code = (
        "import socket; port = int(os.environ['MASTER_PORT'])\n"
        "if rank == 0: socket.create_server(('', port))\n"
        "print(port, port != int(os.environ['R2CC_PORT']))"
    )
    status, out, err = run_command("-n", "2", "--tag", "never", *python(code))
    assert status == 0, err
    port = out.split()[0]
    assert out.splitlines() == [b"%s True" % port] * 2
    assert int(port) > 1023


def test_functions_get_a_port_at_which_rank_0_can_listen() -> None:
    def ports() -> tuple[str, bool]:
        port = os.environ["MASTER_PORT"]
        if os.environ["RANK"] == "0":
            socket.create_server((os.environ["MASTER_ADDR"], int(port))).close()
        return port, port != os.environ["R2CC_PORT"]

    (port, is_other), second = launch(ports, 2, timeout_s=WAIT_S)
    assert second == (port, is_other)
    assert is_other
    with launch_pool(1) as pool:
        assert pool.run(lambda comm: ports()[1]) == [True]


def test_the_port_of_a_nested_launch_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29411")
    shown = environ("MASTER_PORT")
    code = python("print(os.environ['MASTER_PORT'])")
    assert launch(shown, 1, timeout_s=WAIT_S) == ["29411"]
    monkeypatch.setenv("RANK", "0")
    assert launch(shown, 1, timeout_s=WAIT_S) != ["29411"]
    assert launch(shown, 1, env={"MASTER_PORT": "29411"}, timeout_s=WAIT_S) == ["29411"]
    assert run_command("-n", "1", *code)[1] != b"29411\n"


def test_a_port_that_the_user_sets_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29411")
    code = python("print(os.environ['MASTER_PORT'])")
    assert run_command("-n", "1", *code)[1] == b"29411\n"
    assert run_command("-n", "1", "--env", "MASTER_PORT=29412", *code)[1] == b"29412\n"


def test_the_exit_status_is_the_first_failures() -> None:
    status, _, err = run_command("-n", "2", *python("sys.exit(7 if rank else 0)"))
    assert status == 7
    assert b"rank 1: exit status 7" in err


def run_here(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *args: str
) -> tuple[int, str, str]:
    """Run the command in this process, where those that are left soon lose its patience."""
    monkeypatch.setattr("r2ccl.cli.supervisor.FAILURE_GRACE_S", 0.1)
    parser = make_parser(["launch"])
    parsed = parser.parse_args(["launch", *args])
    status = parsed.run(parsed)
    return (status, *capfd.readouterr())


def test_a_rank_that_fails_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "rank == 1 and os.abort()\ntime.sleep(60)"
    started = time.monotonic()
    status, _, err = run_here(monkeypatch, capfd, "-n", "2", *python(code))
    assert time.monotonic() - started < WAIT_S
    assert status == 128 + signal.SIGABRT
    assert err.splitlines() == ["r2ccl launch: rank 1: signal SIGABRT"]


def test_survivors_may_keep_going_and_the_dead_are_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = (
        "rank == 1 and os.kill(os.getpid(), 9)\n"
        "time.sleep(1)  # ten times what the others are granted else\n"
        "rank == 2 and sys.exit(3)\nprint('finished', rank)"
    )
    args = ("--keep-going", "-n", "4", "--tag", "never", *python(code))
    status, out, err = run_here(monkeypatch, capfd, *args)
    assert status == 128 + signal.SIGKILL
    assert sorted(out.splitlines()) == ["finished 0", "finished 3"]
    assert err.splitlines() == [
        "r2ccl launch: rank 1: signal SIGKILL",
        "r2ccl launch: rank 2: exit status 3",
    ]


def test_a_child_that_outlives_its_rank_holds_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("r2ccl.cli.rankprocs.TERMINATION_GRACE_S", 0.1)
    command = ("--", "sh", "-c", "sleep 60 & echo $!; exit 3")
    status, out, err = run_here(monkeypatch, capfd, "-n", "1", *command)
    os.kill(int(out), signal.SIGKILL)
    assert status == 3
    assert err == "r2ccl launch: rank 0: exit status 3\n"


def test_a_signal_ends_the_children_of_a_rank_too() -> None:
    process = start_command("-n", "1", "--", "sh", "-c", "sleep 60 & echo $!; wait")
    try:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    until_s = time.monotonic() + WAIT_S
    while Path(f"/proc/{child}").exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not Path(f"/proc/{child}").exists()


def test_ranks_end_if_nobody_reads_their_output() -> None:
    process = start_command("-n", "2", "--", "yes")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"y\n"
        process.stdout.close()
        assert process.wait(WAIT_S) == 128 + signal.SIGPIPE
    finally:
        process.kill()
        process.communicate()


class SlowSink:
    """Takes long for each piece of output."""

    def __init__(self) -> None:
        self.taken = b""

    async def output(self, rank: int, stream: str, data: bytes) -> None:
        await asyncio.sleep(0.05)
        self.taken += data

    async def ended(self, rank: int, status: int) -> None:
        pass


def test_no_output_is_lost_if_its_reader_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r2ccl.cli.rankprocs.TERMINATION_GRACE_S", 0.01)
    sink = SlowSink()
    command = ("sh", "-c", "seq 100000")

    async def run() -> None:
        ranks = HostRanks(
            JobShare(1, 0, 1, "127.0.0.1", 1, ""),
            JobCommand(command, False, {}, os.getcwd(), False),
            sink,
        )
        await ranks.start(None)
        await ranks.attend()

    asyncio.run(run())
    assert sink.taken.split() == [b"%d" % number for number in range(1, 100_001)]


def test_input_that_rank_0_does_not_read_is_dropped_quietly() -> None:
    process = start_command("-n", "1", "--stdin", "--", "sh", "-c", "exec <&-; sleep 1")
    try:
        _, err = process.communicate(b"x" * (8 << 20), timeout=WAIT_S)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, b"")


def test_a_start_that_fails_midway_says_only_why() -> None:
    """The ranks that were started are killed before the event loop is closed."""
    limited = ["sh", "-c", 'ulimit -n 40; exec "$@"', "sh"]
    program = ["sh", "-c", "echo here; sleep 60"]
    words = [*limited, sys.executable, "-m", "r2ccl", "launch", "-n", "30", "--", *program]
    ended = subprocess.run(words, capture_output=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 2
    assert ended.stderr == b"r2ccl: cannot run 'sh': Too many open files\n"


def test_a_job_that_keeps_going_is_still_ended_by_a_signal() -> None:
    code = "print('ready')\ntime.sleep(60)"
    process = start_command("--keep-going", "-n", "2", *python(code))
    try:
        assert process.stdout is not None
        assert b"ready" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM


def test_an_interrupt_reaches_every_rank_once() -> None:
    code = (
        "import signal\nseen = []\nsignal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
        "print('ready')\nwhile not seen: time.sleep(0.01)\n"
        "time.sleep(0.3)\nprint('seen', len(seen))\n"
    )
    process = start_command("-n", "2", "--tag", "always", *python(code))
    try:
        assert process.stdout is not None
        first = {process.stdout.readline() for _ in range(2)}
        assert first == {b"[0] ready\n", b"[1] ready\n"}
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert sorted(out.splitlines()) == [b"[0] seen 1", b"[1] seen 1"]
    assert process.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("-n", "2"), "no command given"),
        (("-n", "0", "--", "true"), "from 1 to 16,384"),
        (("-n", "1", "--env", "X", "--", "true"), "NAME=VALUE"),
        (("-n", "1", "--", "/nowhere/program"), "cannot run"),
        (("-n", "1", "nowhere.py"), "cannot run 'nowhere.py'"),
        (("hello.py", "-n", "2"), "options go before the command: r2ccl launch -n 4 -- python"),
        (("-n", "1", "--chdir", "/nowhere", "true"), "/nowhere is not a directory"),
    ],
)
def test_wrong_command_lines_are_explained(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], args: Sequence[str],
    text: str,
) -> None:  # fmt: skip
    with pytest.raises(InvalidArgument, match=text):
        run_here(monkeypatch, capfd, *args)


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (0o644, "cannot run 'hello.txt': the file is not executable: write python hello.txt if"),
        (0o755, "cannot run 'hello.txt': it is not in PATH: write ./hello.txt"),
    ],
)
def test_a_file_that_cannot_be_run_is_explained(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, mode: int,
    text: str,
) -> None:  # fmt: skip
    (tmp_path / "hello.txt").write_text("hello")
    (tmp_path / "hello.txt").chmod(mode)
    with pytest.raises(InvalidArgument, match=text):
        run_here(monkeypatch, capfd, "-n", "1", "--chdir", str(tmp_path), "hello.txt")


def test_a_wrong_command_line_has_a_status_and_no_traceback() -> None:
    status, _, err = run_command("-n", "2")
    assert status == 2
    assert err.startswith(b"r2ccl: no command given")
    assert b"Traceback" not in err


def test_command_options_stay_the_commands() -> None:
    parser = make_parser(["launch"])
    for start in (["-n", "2", "--"], ["-np", "2"], ["-n2", "--tag", "auto"]):
        args = parser.parse_args(["launch", *start, "prog", "-n", "5", "--tag", "x", "--", "y"])
        assert (args.nranks, args.tag) == (2, "auto")
        assert args.command[-7:] == ["prog", "-n", "5", "--tag", "x", "--", "y"]


def test_scripts_and_modules_run_in_the_launchers_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prog.py").write_text("import sys; print(sys.executable, sys.argv[1:])")
    for words in (["prog.py"], ["-m", "prog"]):
        status, out, _ = run_here(
            monkeypatch, capfd, "-n", "1", "--chdir", str(tmp_path), *words, "-n", "--", "x"
        )
        assert status == 0
        assert out == f"{sys.executable} ['-n', '--', 'x']\n"


def test_the_end_of_each_rank_is_written_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.json"
    program = "[ $RANK = 0 ] || kill -KILL $$"
    status, _, _ = run_here(monkeypatch, capfd, "-n", "2", "--json", str(file), "sh", "-c", program)
    found = json.loads(file.read_text())
    assert status == found["status"] == 137
    assert [(each["rank"], each["status"]) for each in found["ranks"]] == [(0, 0), (1, -9)]
    assert {each["host"] for each in found["ranks"]} == {socket.gethostname()}
    assert found["failure"].startswith("rank 1: ")


def test_a_json_file_has_words_that_are_not_utf8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["-n", "1", "--json", str(tmp_path / "job.json"), "test", "\udcff"]
    monkeypatch.setattr(sys, "argv", ["r2ccl", "launch", *words])
    status, _, _ = run_here(monkeypatch, capfd, *words)
    found = json.loads((tmp_path / "job.json").read_text())
    assert (status, found["command"][-2:]) == (0, ["test", r"\xff"])


def test_a_json_file_that_is_a_named_pipe_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(InvalidArgument, match="is a named pipe"):
            check_file(pipe)
    finally:
        os.close(reader)


def test_a_json_file_may_be_the_output_of_the_launcher() -> None:
    reader, writer = os.pipe()
    try:
        check_file(Path(f"/dev/fd/{writer}"))
    finally:
        os.close(reader)
        os.close(writer)


def test_a_json_file_in_a_missing_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "missing" / "job.json")
    with pytest.raises(InvalidArgument, match=r"--json .* cannot be written"):
        run_here(monkeypatch, capfd, "-n", "1", "--json", file, "echo", "started")
    assert capfd.readouterr().out == ""


def test_the_job_is_shown_without_its_secret() -> None:
    with LocalJob(2) as job:
        assert repr(job.share) == "<ranks 0 to 1 of 2>"

"""The root of the command line: it is fast to start, and names the version and all subcommands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from support.slow import slow_but

from r2ccl.cli import COMMANDS, main, make_parser
from r2ccl.config import VERSION

#: Modules that take long to import: packages, and the engine of this library.
HEAVY = ("numpy", "numba", "ml_dtypes", "r2ccl.communicator", "r2ccl.planning", "r2ccl.runtime")
R2CCL = [sys.executable, "-m", "r2ccl"]
_PROGRAM = """
import contextlib, io, json, sys
from r2ccl.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(sys.argv[1:])
print(json.dumps(sorted(sys.modules)))
"""


def imported_by(*arguments: str) -> set[str]:
    """Names of the modules that a process has imported when it has run the command."""
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(json.loads(ran.stdout))


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_root_imports_no_subcommand(option: str) -> None:
    modules = imported_by(option)
    assert modules.isdisjoint(HEAVY)
    assert modules.isdisjoint(f"r2ccl.cli.{name}" for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_subcommand_imports_no_engine(command: str) -> None:
    modules = imported_by(command, "--help")
    assert modules.isdisjoint(HEAVY)
    assert f"r2ccl.cli.{command}" in modules


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"r2ccl {VERSION}\n"


def test_help_lists_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    words = capsys.readouterr().out.split()
    assert set(COMMANDS) <= set(words)


def test_an_unknown_subcommand_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctr"])
    said = capsys.readouterr().err
    assert all(name in said for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_an_option_shows_its_default(command: str) -> None:
    parser = make_parser([command])
    [subparsers] = [each for each in parser._actions if isinstance(each.choices, dict)]
    options = [each for each in subparsers.choices[command]._actions if each.option_strings]
    assert options
    silent = [
        each.option_strings[-1]
        for each in options
        if each.nargs != 0 and each.default not in (None, []) and "default" not in (each.help or "")
    ]
    assert silent == []


#: Commands that write for longer than the test needs to close the pipe or to interrupt them.
WRITING = [
    ["explain", "--no-simulate"],
    ["doctor"],
    ["bench", "-b", "1K", "-e", "64K", "-f", "2", "-n", "1", "-w", "1"],
    ["demo", "--calls", "3"],
    ["launch", "-n", "1", "--", "echo", "hello"],
]


@pytest.mark.parametrize(
    "arguments",
    slow_but(WRITING[::2], [*WRITING, ["--help"]]),
    ids=lambda each: each[0],
)
def test_output_that_nobody_reads_ends_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    # Without a buffer, argparse itself ignores that its help cannot be written.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [*R2CCL, *arguments]
    with open(writer, "wb") as out:
        ran = subprocess.run(
            command, env=env, stdout=out, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert ran.returncode == 128 + signal.SIGPIPE
    # Another rank may still report that rank 0 has gone.
    lines = ran.stderr.splitlines()
    assert [line for line in lines if b"the peer closed the connection" not in line] == []


@pytest.mark.parametrize(
    ("arguments", "buffering"),
    slow_but(
        [(WRITING[0], ""), (WRITING[0], "1"), (WRITING[2], "1")],
        product((WRITING[0], WRITING[2]), ("", "1")),
    ),
    ids=lambda each: each if isinstance(each, str) else each[0],
)
def test_output_on_a_full_disk_is_one_line(arguments: list[str], buffering: str) -> None:
    with open("/dev/full", "wb") as out:
        ran = subprocess.run(
            [*R2CCL, *arguments],
            env={**os.environ, "PYTHONUNBUFFERED": buffering},
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert ran.returncode == 1
    lines = [each for each in ran.stderr.splitlines() if "the peer closed the" not in each]
    assert lines == ["r2ccl: the output cannot be written: No space left on device"]


def test_an_exhausted_resource_is_one_line() -> None:
    program = 'ulimit -n 40; exec "$@"'
    ran = subprocess.run(
        ["sh", "-c", program, "sh", *R2CCL, "demo", "-n", "100"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    [line] = ran.stderr.splitlines()
    assert line.startswith("r2ccl: a resource of the operating system is exhausted: EMFILE: ")


def test_an_array_larger_than_the_address_space_is_one_line() -> None:
    ran = subprocess.run(
        [*R2CCL, "bench", "--nranks", "1", "-b", "1000000G", "-n", "1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    line = ran.stderr.splitlines()[-1]
    assert line.startswith("r2ccl: a resource of the operating system is exhausted: Unable to ")


def test_a_pipe_that_is_not_the_output_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise BrokenPipeError

    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr("r2ccl.cli.explain.run", fail)
        with pytest.raises(BrokenPipeError):
            main(["explain"])


@pytest.mark.parametrize(
    "arguments",
    [["bench", "-n", "100000000"], ["demo", "--calls", "100000"]],
    ids=lambda each: each[0],
)
def test_an_interrupt_of_a_job_is_one_line(arguments: list[str]) -> None:
    with subprocess.Popen(
        [*R2CCL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # as in a terminal, the signal reaches the whole group
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            os.killpg(process.pid, signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()  # the job, if it goes on
    assert (process.returncode, said) == (128 + signal.SIGINT, b"r2ccl: interrupted\n")


@pytest.mark.parametrize("command", ["explain", "doctor"])
def test_an_interrupt_is_one_line(monkeypatch, capsys, command: str) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"r2ccl.cli.{command}.run", interrupt)
    assert main([command]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "r2ccl: interrupted\n"


@pytest.mark.parametrize("arguments", [["netlab", "--nodes", "0", "--", "true"]])
def test_a_message_names_the_command_once(capsys, arguments: list[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said == "r2ccl netlab: a lab cannot have nodes=0; allowed is 1 to 250\n"


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_all_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="shtab, of r2ccl[cli], is not installed")
    with pytest.raises(SystemExit, match="0"):
        main(["--print-completion", shell])
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    for option in ("--lose", "--require", "--keep-going", "--rails"):
        assert option in script


#: Completes the last argument by the script in the first one, as bash does.
_COMPLETING = """
. "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_r2ccl; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["launch", "-n", "2", "t"], "train.py"),
        (["launch", "--hostfile", "t"], "train.py"),
        (["launch", "--chdir", "t"], "there"),
        (["bench", "--json", "t"], "train.py"),
        (["rdmalab", "--report", "t"], "there"),
    ],
    ids=" ".join,
)
def test_completion_knows_files_and_folders(
    words: list[str], completed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab", reason="shtab, of r2ccl[cli], is not installed")
    with pytest.raises(SystemExit, match="0"):
        main(["--print-completion", "bash"])
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "train.py").touch()
    (tmp_path / "there").mkdir()
    arguments = ["bash", "-c", _COMPLETING, "bash", str(script), "r2ccl", *words]
    ran = subprocess.run(
        arguments, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert completed in ran.stdout.split()


def test_completion_without_its_package_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    assert "pip install 'r2ccl[cli]'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--version", "doctor --json", "launch -n 1 -- true"])
def test_a_closed_standard_output_is_no_error(arguments: str) -> None:
    command = f"{sys.executable} -m r2ccl {arguments} >&-"
    ran = subprocess.run(
        ["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr

"""The root of the command line: it is fast to start, and names the version and all subcommands."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from r2ccl.cli import COMMANDS, main
from r2ccl.config import VERSION

#: Modules that take long to import: packages, and the engine of this library.
HEAVY = ("numpy", "numba", "ml_dtypes", "r2ccl.communicator", "r2ccl.planning", "r2ccl.runtime")
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


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_all_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="shtab, of r2ccl[completion], is not installed")
    with pytest.raises(SystemExit, match="0"):
        main(["--print-completion", shell])
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    for option in ("--lose", "--require", "--keep-going", "--rails"):
        assert option in script


def test_completion_without_its_package_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    assert "pip install 'r2ccl[completion]'" in capsys.readouterr().err

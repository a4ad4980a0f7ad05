"""A lab is entered only where one was seen to work; otherwise one sentence says why not."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from r2ccl.testing.netlab import LabError, ensure_privileged, privilege


class Entered(Exception):
    """Stands for the process that `execve` would have replaced."""


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary user; entering a namespace raises `Entered` instead."""

    def execve(path: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        raise Entered(path, argv, env)

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.delenv("R2CC_NETLAB_UNSHARED", raising=False)
    monkeypatch.setattr(privilege, "missing_tools", lambda: "")
    monkeypatch.setattr(privilege, "find_program", lambda name: f"/usr/sbin/{name}")


def answers(monkeypatch: pytest.MonkeyPatch, status: int, out: str = "", err: str = "") -> None:
    """Have the process that tries a lab in a user namespace end so."""

    def run(argv: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert argv[0] == "/usr/sbin/unshare"
        return subprocess.CompletedProcess(argv, status, out, err)

    monkeypatch.setattr(subprocess, "run", run)


def test_a_user_namespace_that_works_is_entered(
    user: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, 0)
    with pytest.raises(Entered) as entered:
        ensure_privileged()
    _, argv, environment = entered.value.args
    assert sys.executable in argv
    assert environment["R2CC_NETLAB_UNSHARED"] == "1"


@pytest.mark.parametrize(
    ("status", "out", "err", "says"),
    [
        (1, "", "unshare: unshare failed: Operation not permitted\n", "Operation not permitted"),
        (0, "netlab is not possible here: no veth", "", "no veth"),
    ],
)
def test_one_that_does_not_is_not(
    user: None, monkeypatch: pytest.MonkeyPatch, status: int, out: str, err: str, says: str
) -> None:
    answers(monkeypatch, status, out, err)
    with pytest.raises(LabError, match=says) as refused:
        ensure_privileged()
    assert "\n" not in str(refused.value)


def test_root_is_told_why_it_cannot_build_a_lab(
    user: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(privilege, "unavailable_reason", lambda: "no veth here")
    answers(monkeypatch, 1, err="Operation not permitted")
    with pytest.raises(LabError, match=r"^no veth here; in a user namespace: .*not permitted"):
        ensure_privileged()


def test_missing_tools_are_no_reason_to_enter_anything(
    user: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(privilege, "missing_tools", lambda: "tc is not there: install iproute2")
    with pytest.raises(LabError, match="install iproute2"):
        ensure_privileged()


def test_who_has_entered_builds_labs(user: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CC_NETLAB_UNSHARED", "1")
    ensure_privileged()


def entered(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run `command` by ``netlab --enter``; skip the test if the machine allows no namespaces."""
    done = subprocess.run(
        [sys.executable, "-m", "r2ccl", "netlab", "--enter", "--", *command],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        check=False,
    )
    if done.returncode == 69:
        assert len(done.stderr.strip().splitlines()) == 1
        pytest.skip(done.stderr.strip())
    return done


def test_enter_runs_a_command_once(tmp_path: Path) -> None:
    done = entered(tmp_path, sys.executable, "-c", "print('inside')")
    assert done.stdout == "inside\n", done.stderr


def test_enter_refuses_a_command_without_a_name(tmp_path: Path) -> None:
    done = entered(tmp_path, "")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("r2ccl netlab: cannot run ''"), done.stderr

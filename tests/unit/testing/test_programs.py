"""Programs of the system are found where an ordinary user's PATH does not look."""

import shutil
from pathlib import Path

import pytest

from r2ccl.testing import programs
from r2ccl.testing.netlab import namespaces


@pytest.fixture
def sbin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the administrator's, with ``tc`` in it; PATH has nothing."""
    folder = tmp_path / "sbin"
    folder.mkdir()
    (folder / "tc").write_text("#!/bin/sh\n")
    (folder / "tc").chmod(0o755)
    monkeypatch.setattr(programs, "_ADMINISTRATOR_FOLDERS", (str(folder),))
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    return folder


def test_the_administrators_folders_are_searched(sbin: Path) -> None:
    assert programs.find_program("tc") == str(sbin / "tc")
    assert programs.find_program("ip") is None


def test_what_is_missing_is_named_with_its_package(sbin: Path) -> None:
    assert programs.describe_missing(["tc"]) == ""
    said = programs.describe_missing(["tc", "ip", "unshare"])
    assert said.startswith("ip, unshare are not in PATH")
    assert "apt-get install iproute2 util-linux" in said


def test_netlab_needs_only_the_programs_that_it_runs(sbin: Path) -> None:
    for name in ("ip", "sh"):
        shutil.copy(sbin / "tc", sbin / name)
    assert namespaces.missing_tools() == ""


def test_path_comes_first(sbin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "tc").write_text("#!/bin/sh\n")
    (own / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", str(own))
    assert programs.find_program("tc") == str(own / "tc")

"""Programs of the system are found where an ordinary user's PATH does not look."""

from pathlib import Path

import pytest

from r2ccl.testing import programs


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
    assert programs.find_program("bridge") is None


def test_what_is_missing_is_named_with_its_package(sbin: Path) -> None:
    assert programs.describe_missing(["tc"]) == ""
    said = programs.describe_missing(["tc", "bridge", "unshare"])
    assert said.startswith("bridge, unshare are not in PATH")
    assert "apt-get install iproute2 util-linux" in said


def test_path_comes_first(sbin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "tc").write_text("#!/bin/sh\n")
    (own / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", str(own))
    assert programs.find_program("tc") == str(own / "tc")

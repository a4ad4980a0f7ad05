"""Network namespaces that cannot be removed are named, with the reason."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from r2ccl.testing.netlab import LabError, namespaces


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(11, "try again"), r"cannot remove namespaces {}-\*: .*try again; run .*--clean"),
        (subprocess.TimeoutExpired("sh", 20), r"namespaces {}-\* were not removed within 20"),
    ],
)
def test_a_removal_that_fails_says_why(
    error: Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise error

    left = "r2cc-1-0-0a"  # of a process that started before the machine did
    (tmp_path / f"{left}-node0").touch()
    monkeypatch.setattr(namespaces, "_RUN", tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(LabError, match=words.format(left)):
        namespaces.clean()

"""Statistics and saved JSON, which all benches share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def common(bench: Callable[[str], ModuleType]) -> ModuleType:
    return bench("common")


def test_statistics(common: ModuleType) -> None:
    assert common.Stats.of([1, 2, 3, 4, 5]) == (3, 2, 4)
    assert common.Stats.of([7.0]) == (7.0, 7.0, 7.0)


def test_json_names_machine_commit_and_command(common: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    common.write_json(path, [{"nbytes": 256, "time_us": 1.5}])

    saved = json.loads(path.read_text())

    assert set(saved) == {"machine", "commit", "command", "results"}
    assert saved["results"] == [{"nbytes": 256, "time_us": 1.5}]
    assert saved["machine"]["cores"] >= 1
    assert saved["command"].startswith("python ")

"""The bench of scale counts what each rank holds, and draws it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tables import BENCH


@pytest.fixture
def scale(bench: Any) -> Any:
    return bench("scale")


def test_it_measures_jobs_and_saves_the_figures(
    scale: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = tmp_path / "scale.json"
    monkeypatch.setenv("PYTHONPATH", str(BENCH))  # ranks import it by name
    monkeypatch.setattr(sys, "argv", ["scale.py", "--ranks", "2,3", "--json", str(saved)])
    assert scale.main() == 0
    two, three = json.loads(saved.read_text())["results"]
    assert (two["data_peers"], three["data_peers"]) == (1, 2)
    assert two["descriptors"] < three["descriptors"]
    assert two["nconnects"] == three["nconnects"] == 0
    assert 0 < two["cpu_ms"] < 5_000


def test_it_draws_every_figure(scale: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of r2ccl[demo], is not installed")
    names = ("n", "descriptors", "data_peers", "cpu_ms", "private_mib")
    scale.plot(tmp_path / "scale.png", [dict.fromkeys(names, 1.0), dict.fromkeys(names, 2.0)])
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")

"""Import of the modules of the benches, which are no package."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a module of the benches."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module

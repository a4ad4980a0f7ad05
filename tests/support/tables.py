"""The figures that `bench/tables.py` saves in its quick form."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.once import once

BENCH = Path(__file__).parents[2] / "bench"


def quick_table(run_folder: Path, name: str) -> Any:
    """Return the rows of table `name`; all processes of a run share them."""

    def run() -> Any:
        path = run_folder / f"{name}.json"
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(BENCH))
            arguments = ["bench/tables.py", "--table", name, "--quick", "--json", str(path)]
            patch.setattr("sys.argv", arguments)
            assert importlib.import_module("tables").main() == 0
        return json.loads(path.read_text())["results"]

    return once(run_folder, f"table-{name}", run)


def rows_of(results: Any, schedule: str, **wanted: Any) -> list[Any]:
    """Return the rows of a schedule or a strategy, at least one."""
    found = [
        row
        for row in results
        if row.get("schedule", row.get("strategy")) == schedule
        and all(row[key] == wanted[key] for key in wanted)
    ]
    assert found
    return found

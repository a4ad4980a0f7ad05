"""torch's own tests of backends pass on r2ccl."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pytorch.jobs import run

pytest.importorskip("torch.distributed", reason="torch is not installed: make test-torch")
pytest.importorskip("expecttest", reason="torch's own tests need the package expecttest")

PROGRAM = Path(__file__).with_name("torch_suite.py")
#: Tests that apply to a backend for CPUs; the others need GPUs, or a backend with a given name.
NAPPLICABLE = 66


@pytest.mark.parametrize("nranks", [2, 3, 4])
def test_all_that_apply_pass(nranks: int, tmp_path: Path) -> None:
    for written in run([PROGRAM, tmp_path], nranks):
        outcomes = json.loads(written.splitlines()[-1])
        passed = [name for name, outcome in outcomes.items() if outcome == "ok"]
        failed = {name: why for name, why in outcomes.items() if why not in ("ok", "skipped")}
        assert failed == {}
        assert len(passed) >= NAPPLICABLE

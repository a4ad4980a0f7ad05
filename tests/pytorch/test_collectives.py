"""Every public collective of torch.distributed has the same outcome on r2ccl as on gloo."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pytorch.jobs import run

pytest.importorskip("torch.distributed", reason="torch is not installed: make test-torch")

PROGRAM = Path(__file__).with_name("collectives_rank.py")


def names() -> list[str]:
    from pytorch.collectives_rank import CASES

    return list(CASES)


@cache
def reports() -> list[dict[str, Any]]:
    """Outcomes of all cases on both backends, by rank."""
    found: list[dict[str, Any]] = json.loads(run([PROGRAM], 3)[0])
    return found


@pytest.mark.parametrize("name", names())
def test_both_backends_have_the_same_outcome(name: str) -> None:
    for rank, report in enumerate(reports()):
        expected, got = (report[name][backend] for backend in ("gloo", "r2ccl"))
        texts = [each.pop("text", "") for each in (expected, got)]
        if name.startswith("beyond"):
            assert got == {"value": True}, f"rank {rank}: {texts}"
            continue
        assert got == expected, f"rank {rank}: {texts}"
        assert ("error" in got) == name.startswith("error"), texts

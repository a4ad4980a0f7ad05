"""torch's ways to train in parallel give the weights that one process computes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytorch.jobs import run

pytest.importorskip("torch.distributed", reason="torch is not installed: make test-torch")

PROGRAM = Path(__file__).with_name("training_rank.py")


def names() -> list[str]:
    from pytorch.training_rank import PROGRAMS

    return list(PROGRAMS)


@pytest.mark.parametrize("name", names())
def test_two_ranks_train_as_one(name: str) -> None:
    run([PROGRAM, name], 2)

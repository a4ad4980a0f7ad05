"""torch 2.14 and newer find the backend by its name, and a Backend in its process groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytorch.jobs import run

torch = pytest.importorskip("torch", reason="torch is not installed: make test-torch")
pytestmark = pytest.mark.skipif(
    torch.__version__ < (2, 14), reason="needs torch 2.14: make test-torch TORCH_VERSION=2.15.0"
)

PROGRAM = Path(__file__).with_name("backend_rank.py")


@pytest.mark.parametrize(
    "name",
    [
        "the_backend_is_found_by_its_name", "calls_of_the_backend_are_calls_of_the_group",
        "the_dispatcher_reaches_the_group", "split_group_and_monitored_barrier_work",
    ],
)  # fmt: skip
def test_what_each_program_asserts(name: str) -> None:
    run([PROGRAM, name], 2)

"""Collectives of a `Communicator` with tensors of torch on the CPU."""

from __future__ import annotations

import pytest
from support import sharing_programs as programs
from support.jobs import launch

pytest.importorskip("torch", reason="torch is not installed: make test-torch")


def test_calls_with_tensors_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CC_SHM", "1")
    launch(programs.repeated_with_tensors, 2, timeout_s=60.0)

"""Forks: actions of a child never affect its parent's communicator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from endings import jobs

SCRIPT = Path(__file__).with_name("fork_rank.py")

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True, params=["0", "1"], ids=["tcp", "shm"])
def shared_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CC_SHM", request.param)


@pytest.mark.parametrize("kind", ["unwinds", "calls"])
def test_a_child_harms_nobody(kind: str) -> None:
    outputs = jobs.run(SCRIPT, kind, nranks=3)
    for rank, (code, out, err) in enumerate(outputs):
        assert code == 0, err
        found = json.loads(out.splitlines()[-1])
        assert not found["error"], found
        assert found["child"] == (0 if rank == 1 else None)


def test_a_death_is_seen_at_once_though_a_child_lives_on() -> None:
    outputs = jobs.run(SCRIPT, "outlives", nranks=3)
    ended_s = jobs.ended_s(outputs[1][1])
    for rank in (0, 2):
        found = json.loads(outputs[rank][1].splitlines()[-1])
        assert found["error"] == "PeerLost", found
        assert "rank 1" in found["text"]
        assert found["raised_s"] - ended_s < 0.5

"""Forks: actions of a child never affect its parent's communicator."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from endings.cells import ended_s
from support import punctual
from support.slow import slow_but

both_ways = pytest.mark.parametrize("is_local", [False, True], ids=["tcp", "shm"])


@pytest.mark.parametrize(
    ("kind", "is_local"),
    slow_but([("unwinds", False), ("calls", True)], product(["unwinds", "calls"], [False, True])),
)
def test_a_child_harms_nobody(run_ranks: Any, kind: str, is_local: bool) -> None:
    outputs = run_ranks("fork_rank", kind, is_local)
    for rank, (code, out, err) in enumerate(outputs):
        assert code == 0, err
        found = json.loads(out.splitlines()[-1])
        assert not found["error"], found
        assert found["child"] == (0 if rank == 1 else None)


@both_ways
def test_a_death_is_seen_at_once_though_a_child_lives_on(run_ranks: Any, is_local: bool) -> None:
    punctual.in_time(lambda: die(run_ranks, is_local))


def die(run_ranks: Any, is_local: bool) -> None:
    outputs = run_ranks("fork_rank", "outlives", is_local)
    died_s = ended_s(outputs[1].out)
    for rank in (0, 2):
        found = json.loads(outputs[rank][1].splitlines()[-1])
        assert found["error"] == "PeerLost", found
        assert "rank 1" in found["text"]
        punctual.check(found["raised_s"] - died_s, 0.5, found)

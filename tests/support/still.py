"""Engines of ranks to which nothing happens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from r2ccl.clock import Clock
from r2ccl.config import Config
from r2ccl.failover.context import RankContext
from r2ccl.planning.plan_cache import Plan
from r2ccl.runtime.engine import Engine


class Still:
    """A transport and a control plane on which nothing happens."""

    nrails = 1

    def __init__(self) -> None:
        self.is_busy = False
        self.soon: list[Any] = []

    def call_soon(self, fn: Any) -> None:
        self.soon.append(fn)

    def poll(self, timeout_s: float) -> list[Any]:
        return []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def make_engine(rank: int = 0, clock: Clock = lambda: 0.0, **settings: Any) -> tuple[Engine, Still]:
    still = Still()
    stand_in: Any = still
    context = RankContext(rank, 3, stand_in, stand_in, Config(**settings), clock)
    return Engine.of_job(context, stand_in), still


def plan(*peers: int) -> Plan:
    """Return a plan with nothing to do."""
    layout: Any = SimpleNamespace(peers=frozenset(peers))
    return Plan(0, layout, np.add, None, False)

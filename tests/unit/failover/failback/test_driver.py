"""Failback driver: an excluded path is neither probed nor connected, and gets no strike."""

from __future__ import annotations

from collections.abc import Callable

from r2ccl.config import Config
from r2ccl.failover.failback.driver import Failback
from r2ccl.transport.base import Probed
from r2ccl.types import PathKey, ProbeKey

KEY = PathKey(1, 0)
STEP_S = 0.02


class Rank:
    """A failback whose probes are all answered at once."""

    def __init__(self) -> None:
        self.now = 0.0
        self.excluded: set[PathKey] = set()
        self.is_alone = False
        self.nprobes = 0
        self.connected: list[PathKey] = []
        self.failback = Failback(
            Config(),
            lambda: self.now,
            ask=self._ask,
            connect=self.connected.append,
            is_alone=lambda peer: self.is_alone,
            is_excluded=self.excluded.__contains__,
        )

    def _ask(self, key: ProbeKey, on_answer: Callable[[Probed], None]) -> None:
        self.nprobes += 1
        on_answer(Probed(key, True, ""))

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            self.failback.tick(self.now)

    def use(self) -> None:
        """Take the path into use, for a moment."""
        self.run(3.0)
        assert self.connected.pop() == KEY
        self.failback.opened(KEY)


def test_an_excluded_path_waits_until_it_is_included() -> None:
    rank = Rank()
    rank.excluded.add(KEY)
    rank.failback.withdrawn(KEY)
    rank.is_alone = True
    rank.run(30.0)
    assert (rank.nprobes, rank.connected, rank.failback.held()) == (0, [], {})
    rank.is_alone = False
    rank.excluded.clear()
    rank.failback.port_up(KEY)
    rank.run(0.5)
    assert (rank.nprobes, rank.connected) == (3, [KEY])


def test_a_failed_path_that_is_excluded_meanwhile_waits_too() -> None:
    rank = Rank()
    rank.failback.failed(KEY)
    rank.excluded.add(KEY)
    rank.run(30.0)
    assert (rank.nprobes, rank.connected) == (0, [])


def test_exclusions_in_succession_prolong_no_hold() -> None:
    failing, excluded = Rank(), Rank()
    for rank, leave in (
        (failing, failing.failback.failed),
        (excluded, excluded.failback.withdrawn),
    ):
        for _ in range(2):
            leave(KEY)
            rank.use()
        leave(KEY)
    assert excluded.failback.held() == {KEY: 0.0}
    assert failing.failback.held()[KEY] > 1.0

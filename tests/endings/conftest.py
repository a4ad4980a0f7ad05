"""The process that forks the ranks of the endings, so that no job waits for imports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.forked_ranks import ForkedRanks, Output

FOLDER = Path(__file__).parent
TIMEOUT_S = 60.0
NRANKS = 3

#: Function that runs a script of this folder, by its name, with an argument and R2CC_SHM.
Run = Callable[[str, str, bool], list[Output]]


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Run]:
    """Run a script of this folder on three ranks, with or without shared memory."""
    scripts = {name: FOLDER / f"{name}.py" for name in ("ending_rank", "fork_rank")}
    with ForkedRanks(list(scripts.values()), ["r2ccl.bootstrap.startup"]) as forked:

        def run(name: str, argument: str, is_local: bool) -> list[Output]:
            environments = [{"R2CC_SHM": str(int(is_local))}] * NRANKS
            return forked.run(scripts[name], argument, environments, TIMEOUT_S)

        yield run

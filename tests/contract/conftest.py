"""Contract tests over the network and, as slow cases, over shared memory of one host."""

from __future__ import annotations

import pytest
from support.slow import slow_but

#: Modules whose tests hold for every way in which data moves, except those marked as `rails`.
BOTH = {
    "test_communicator", "test_group", "test_matrix", "test_messages", "test_mixed", "test_shrink",
    "test_split",
}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_of_rails = metafunc.definition.get_closest_marker("rails") is not None
    if metafunc.module.__name__.rpartition(".")[2] in BOTH and not is_of_rails:
        metafunc.fixturenames.append("shared_memory")
        cases = slow_but(["tcp"], ["tcp", "shm"])
        metafunc.parametrize("shared_memory", cases, indirect=True)


@pytest.fixture
def shared_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks use shared memory, or not."""
    monkeypatch.setenv("R2CC_SHM", "1" if request.param == "shm" else "0")

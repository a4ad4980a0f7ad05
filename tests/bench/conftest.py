"""All tests of the benches are slow: `make test` is for the library."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder as slow."""
    for each in items:
        if Path(__file__).parent in each.path.parents:
            each.add_marker(pytest.mark.slow)

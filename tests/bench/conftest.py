"""Marks the tests of the benches as slow, so that `make test` skips them."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder as slow."""
    folder = Path(__file__).parent
    for each in items:
        if each.path.parent == folder:
            each.add_marker(pytest.mark.slow)

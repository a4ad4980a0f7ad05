"""Slow test cases, which `make test` skips."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return `cases` for ``parametrize``; mark those that are not in `quick` as slow."""
    cases = list(cases)
    assert all(each in cases for each in quick), "a quick case is no case"
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)

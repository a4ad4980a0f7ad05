"""Slow test cases, which `make test` skips."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return `cases` for ``parametrize``; mark those that are not in `quick` as slow."""
    cases = list(cases)
    assert all(each in cases for each in quick), "a quick case is no case"
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)


def sweep(quick: int, step: int) -> pytest.MarkDecorator:
    """Parametrize the `step` between the events that a test tries; all of them are a slow case."""
    return pytest.mark.parametrize("step", slow_but([quick], [quick, step]))


def given(
    quick: int, most: int, *strategies: st.SearchStrategy[Any], **settings: Any
) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Run a test with `quick` examples of hypothesis, and as a slow case with `most`."""

    def decorate(check: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.parametrize("nexamples", slow_but([quick], [quick, most]))
        def test(nexamples: int) -> None:
            limits = hypothesis.settings(max_examples=nexamples, deadline=None, **settings)
            limits(hypothesis.given(*strategies)(check))()

        test.__doc__ = check.__doc__
        return test

    return decorate

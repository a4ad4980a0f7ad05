"""Form of ``pytest.raises`` for ranks: importing pytest takes each of a thousand ranks 0.1 s."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from types import SimpleNamespace


@contextlib.contextmanager
def raises(
    expected: type[BaseException] | tuple[type[BaseException], ...], match: str = ""
) -> Iterator[SimpleNamespace]:
    """Fail unless an `expected` error with a text like `match` is raised; it becomes `value`."""
    caught = SimpleNamespace(value=None)
    try:
        yield caught
    except expected as exc:
        caught.value = exc
    assert caught.value is not None, f"no {expected} was raised"
    assert re.search(match, str(caught.value)), f"{caught.value} is not like {match}"

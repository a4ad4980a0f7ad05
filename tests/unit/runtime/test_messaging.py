"""Arguments of messages: what is refused is named, with what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from r2ccl.errors import InvalidArgument
from r2ccl.runtime.messaging import MessageCalls

COLLECTIVES: Any = SimpleNamespace(is_plain=False, group_here=lambda: None)
CALLS = MessageCalls(COLLECTIVES, SimpleNamespace(send=None, receive=None, probe=None), nranks=2)  # type: ignore[arg-type]
X = np.ones(2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: CALLS.send(X, -1, 0, False, False),
            "to=-1; allowed is 0 to 1",
        ),
        (
            lambda: CALLS.send(X, 0, -1, False, False),
            "tag=-1; allowed are 0 to 2^63 - 1",
        ),
        (
            lambda: CALLS.recv(X, 1.5, 0, False),
            "source=1.5; allowed is 0 to 1 or r2ccl.ANY_SOURCE",
        ),
        (
            lambda: CALLS.probe(0, -2, is_blocking=False),
            "tag=-2; allowed are 0 to 2^63 - 1 and r2ccl.ANY_TAG",
        ),
        (
            lambda: CALLS.sendrecv(X, 0, 0, X, 0, -3),
            "recv_tag=-3; allowed are 0 to 2^63 - 1 and r2ccl.ANY_TAG",
        ),
    ],
)
def test_what_is_refused_is_named_with_what_is_allowed(
    call: Callable[[], object], says: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        call()
    assert str(refused.value) == says

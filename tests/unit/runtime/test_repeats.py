"""Arguments of calls that can be repeated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from r2ccl.runtime.repeats import plain_of
from r2ccl.types import ReduceOp

_PLAIN = [3, 4]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([np.int64(3), 4], (3, 4)),
        ((3, np.uint8(4)), (3, 4)),
        ([True, 4], (1, 4)),
        ([np.array(3), np.array(4)], (3, 4)),
        (np.array([3, 4]), (3, 4)),
        (range(3, 5), (3, 4)),
        ([3.0, 4], [3.0, 4]),
        ([[3], 4], [[3], 4]),
        (np.float32(3), np.float32(3)),
    ],
)
def test_sequences_of_integers_become_tuples(given: Any, wanted: Any) -> None:
    rest = plain_of((ReduceOp.SUM, given, None, 5))
    assert rest == (ReduceOp.SUM, wanted, None, 5)
    assert type(rest[1]) is type(wanted)


@pytest.mark.parametrize("given", [_PLAIN, (3, 4), None, 5])
def test_plain_arguments_stay_what_they_are(given: Any) -> None:
    assert plain_of((given,))[0] is given

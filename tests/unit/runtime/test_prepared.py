"""Envelopes of long messages that compiled code compares with the expected ones."""

from __future__ import annotations

import numpy as np
import pytest

from r2ccl.kernels.arrays import data_of
from r2ccl.kernels.native import callable_of
from r2ccl.runtime.compiled.layout import ENVELOPE_IDENT, EXPECTED_NWORDS

_KIND, _TAG, _IDENT, _SIZE = 2, 7, 41, 1000


@pytest.mark.parametrize(
    ("kind", "tag", "size", "is_any", "is_right"),
    [
        (_KIND, _TAG, _SIZE, 0, True),
        (_KIND + 1, _TAG, _SIZE, 0, False),
        (_KIND, _TAG + 1, _SIZE, 0, False),
        (_KIND, _TAG + 1, _SIZE, 1, True),
        (_KIND, _TAG, _SIZE + 8, 0, False),
    ],
)
def test_an_answer_is_made_for_the_expected_envelope_only(
    kind: int, tag: int, size: int, is_any: int, is_right: bool
) -> None:
    kernel = callable_of("r2ccl.runtime.compiled.answer:make_answer")
    received = np.array([kind, tag, _IDENT, size, 0], np.int64)
    memory = np.array([_KIND, _TAG, _SIZE, is_any, 0, 0, -1, 0, 0], np.int64)
    sources = np.array([0, data_of(received)], np.int64)
    answer_at = data_of(memory) + 8 * EXPECTED_NWORDS
    assert kernel(data_of(sources), 2, answer_at, 40) == (0 if is_right else 1)
    assert memory[EXPECTED_NWORDS + ENVELOPE_IDENT] == (_IDENT if is_right else -1)

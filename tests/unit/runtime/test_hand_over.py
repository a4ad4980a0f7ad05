"""The state of links passes from one held program to another through the table of shared words."""

from collections.abc import Callable

import numpy as np
import pytest

from r2ccl.kernels.arrays import data_of
from r2ccl.kernels.native import callable_of
from r2ccl.runtime.compiled.hand_over import make_hand_over

#: Words 5 and 7 of a program are shared, as words 1 and 0 of the table; the first one is 3 ahead.
ENTRIES = (5, 1, 3, 7, 0, 0)


@pytest.fixture
def hand_over() -> Callable[[int, int, int, int], int]:
    return callable_of(f"{make_hand_over.__module__}:{make_hand_over.__name__}")


def program() -> tuple[np.ndarray, np.ndarray]:
    """Return the words of a program, and its shared words."""
    words = np.arange(100, 110)
    return words, np.array([data_of(words), 2, *ENTRIES])


@pytest.mark.parametrize(("is_ended", "ahead"), [(1, 3), (0, 0)])
def test_the_words_of_the_source_get_into_the_table(hand_over, is_ended: int, ahead: int) -> None:
    (words, shared), table = program(), np.zeros(3, np.int64)
    assert hand_over(data_of(shared), is_ended, 0, data_of(table)) == 0
    assert table.tolist() == [107, 105 + ahead, 0]
    assert words.tolist() == list(range(100, 110))


def test_the_words_of_the_target_come_from_the_table(hand_over) -> None:
    (words, shared), table = program(), np.array([20, 30, 40])
    assert hand_over(0, 1, data_of(shared), data_of(table)) == 0
    assert words.tolist() == [100, 101, 102, 103, 104, 27, 106, 20, 108, 109]
    assert table.tolist() == [20, 30, 40]


def test_the_target_gets_the_words_of_the_source(hand_over) -> None:
    (source, given), (target, taken), table = program(), program(), np.zeros(2, np.int64)
    source += 1000
    hand_over(data_of(given), 1, data_of(taken), data_of(table))
    assert (target[5], target[7]) == (source[5], source[7])

"""The state of links passes from one held program to another through the table of shared words."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from r2ccl.failover.migration.calls import Calls
from r2ccl.kernels.arrays import data_of
from r2ccl.kernels.native import callable_of
from r2ccl.runtime.compiled import layout as at
from r2ccl.runtime.compiled.hand_over import make_hand_over
from r2ccl.runtime.compiled.hold import HeldPrograms
from r2ccl.types import PathKey

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


# Confirmations for links of other programs


class Ended:
    """Held program with one link, whose call has sent `nsends` slices, and none before."""

    plan = arena_nbytes = conns_at = 0
    nslots = 2

    def __init__(self, channel: int, nsends: int) -> None:
        row = at.STATE_NWORDS
        self.words = self.view = np.zeros(row + at.PAIR_NWORDS, np.int64)
        self.arena, self.paths = np.empty(0, np.uint8), ()
        self.traffic: dict[PathKey, list[int]] = {}
        sender = SimpleNamespace(peer=1, channel=channel, posted=0, confirmed=0)
        receiver = SimpleNamespace(posted=0, acked=0)
        given = {"sender": sender, "receiver": receiver, "nsends": nsends, "nreceives": 0}
        self.ends = [SimpleNamespace(row=row, **given)]

    @property
    def confirmed(self) -> int:
        """Number below which slices are confirmed, as this program knows."""
        return int(self.words[at.STATE_NWORDS + at.CONFIRMED])


@pytest.fixture
def held() -> tuple[HeldPrograms, Any, Any]:
    """Return programs with links 5 and 6, each after one call; the second one is current."""
    first, second = Ended(5, 3), Ended(6, 4)
    programs: Any = first, second
    calls: Any = Calls(0)
    held = HeldPrograms(programs[0], (), calls, lambda op: None, 1)
    assert held.has(programs[0])
    held.add(programs[1])
    held.take_over(programs[1], calls, lambda op: None)
    return held, first, second


def test_confirmations_reach_the_program_that_sent(held: tuple[HeldPrograms, Any, Any]) -> None:
    programs, first, second = held
    assert programs.confirm([((1, 5), 2), ((1, 5), 1)])
    programs.spread(is_running=False)
    assert (first.confirmed, second.confirmed) == (2, 0)


@pytest.mark.parametrize("wrong", [((1, 5), 4), ((1, 7), 1), ((2, 5), 1)])
def test_a_confirmation_that_fits_no_program_is_refused(
    held: tuple[HeldPrograms, Any, Any], wrong: tuple[tuple[int, int], int]
) -> None:
    programs, first, _ = held
    assert not programs.confirm([((1, 5), 3), wrong])
    programs.spread(is_running=False)
    assert first.confirmed == 0


@pytest.mark.parametrize(
    ("delayed", "is_delaying"),
    [
        ([], False),
        ([(PathKey(1, 0), 3)], False),
        ([(PathKey(1, 0), 4)], True),  # another communicator
        ([(PathKey(2, 0), 3)], True),  # a connection that the program does not read
        ([(PathKey(1, 1), 3)], True),  # on which it only sends
        ([(PathKey(1, 0), 3), (PathKey(1, 1), 3)], True),
    ],
)
def test_frames_wait_only_for_calls_that_read_them(
    held: tuple[HeldPrograms, Any, Any], delayed: list[tuple[PathKey, int]], is_delaying: bool
) -> None:
    program: Any = Ended(7, 0)
    program.traffic = {PathKey(1, 0): [1, 8, 1, 8], PathKey(1, 1): [1, 8, 0, 0]}
    program.view[at.CONTEXT] = 3
    held[0].delayed = delayed
    assert held[0].delays(program) is is_delaying

"""Contract tests of groups of calls, over real processes and real sockets."""

from __future__ import annotations

import functools
import re

import pytest
from support import group_programs as programs
from support.jobs import launch
from support.slow import slow_but

TIMEOUT_S = 90.0


@pytest.mark.parametrize("nranks", slow_but([3], [1, 2, 3, 4]))
@pytest.mark.parametrize("nfaults", [0, 3])
def test_grouped_collectives_are_exact(nranks: int, nfaults: int) -> None:
    run = functools.partial(programs.collectives, nfaults)
    assert launch(run, nranks, timeout_s=TIMEOUT_S) == [[]] * nranks


@pytest.mark.parametrize("count", [1, 200_000])
def test_grouped_messages_need_no_order(count: int) -> None:
    found = launch(functools.partial(programs.exchanges, count), 3, timeout_s=TIMEOUT_S)
    for rank, got in enumerate(found):
        assert got == [True, 3.0, [(source, rank) for source in range(3)]]


def test_misuse_of_a_group_runs_nothing_of_it() -> None:
    assert launch(programs.misused, 2, timeout_s=TIMEOUT_S) == [[1.0, 2.0]] * 2


def test_groups_of_other_counts_differ() -> None:
    for error in launch(programs.differing, 2, timeout_s=TIMEOUT_S):
        assert re.match(r"InvalidArgument: call \d+ differs between ranks", error)


def test_a_refused_message_leaves_none_of_its_group_under_way() -> None:
    receiver, sender = launch(programs.refused_message, 2, timeout_s=TIMEOUT_S)
    assert "receives up to 199999" in receiver[0]
    assert receiver[0] == sender[0]
    assert receiver[1] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("is_child", [False, True])
def test_a_group_closed_in_its_block_runs_nothing(is_child: bool) -> None:
    run = functools.partial(programs.closed_within, is_child)
    assert launch(run, 2, timeout_s=TIMEOUT_S) == [[1.0, 1.0]] * 2

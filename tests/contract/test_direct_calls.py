"""Blocking messages over TCP: exact wherever a call leaves compiled code, and after cuts."""

from __future__ import annotations

import functools
import itertools

import pytest
from support import direct_call_programs as programs
from support.jobs import launch
from support.slow import slow_but

#: Few slots, so that senders wait for confirmations.
SMALL = {"eager_nbytes": 1 << 12, "slice_nbytes": 1 << 12, "eager_slots": 2}
QUICK = [(0, 2, 0, 60), (1, 3, 1, 60)]
QUICK_REPEATS = [(0, 3, 1, 4)]
CASES = [
    (*each, is_small, 200)
    for each in itertools.product((0, 1, 2, 3), (2, 3, 4))
    for is_small in (0, 1)
]


@pytest.mark.parametrize(("limit", "nranks", "is_small", "nrounds"), slow_but(QUICK, QUICK + CASES))
def test_messages_are_exact_wherever_a_call_leaves(limit, nranks, is_small, nrounds):
    given = functools.partial(programs.mixture, limit, nrounds, SMALL if is_small else {})
    found = launch(given, nranks, timeout_s=100.0)
    assert [nwrong for nwrong, _, _ in found] == [0] * nranks
    assert sum(ndone for _, ndone, _ in found) > 0
    if limit:
        assert sum(nleft for _, _, nleft in found) > 0


@pytest.mark.parametrize(
    ("limit", "nranks", "is_small", "nforms"),
    slow_but(QUICK_REPEATS, QUICK_REPEATS + [(*each[:-1], 12) for each in CASES]),
)
def test_repeated_messages_are_exact(limit, nranks, is_small, nforms):
    given = functools.partial(programs.repeated, limit, nforms, SMALL if is_small else {})
    found = launch(given, nranks, timeout_s=100.0)
    assert [nwrong for nwrong, _, _ in found] == [0] * nranks
    assert limit or sum(nrepeated for _, nrepeated, _ in found) > 0


#: In both of these, messages of held calls are sent again.
CUTS = (1, 12)


@pytest.mark.parametrize("seed", slow_but(CUTS, range(40)))
def test_messages_are_exact_though_a_path_fails(seed: int) -> None:
    program = functools.partial(programs.beside_a_cut, seed, 200)
    found = launch(program, 2 + seed % 3, timeout_s=100.0)
    assert [nwrong for nwrong, _, _ in found] == [0] * len(found)
    if seed in CUTS:  # in others, the path may be unused, or the messages long
        assert sum(nrepeated for _, nrepeated, _ in found) > 0
        assert sum(nrepairs for _, _, nrepairs in found) > 0


def test_a_receive_from_any_rank_is_no_repetition() -> None:
    assert launch(functools.partial(programs.with_any_source, 20), 2, timeout_s=60.0) == [0, 0]


@pytest.mark.parametrize(
    ("seed", "count"),
    slow_but([(1, 3_000), (1, 30_000)], itertools.product(range(10), (3_000, 30_000))),
)
def test_a_repeated_receive_takes_other_messages_too(seed: int, count: int) -> None:
    """Short and long ones."""
    (_, nsends, nsent), (nwrong, nreceives, ntook) = launch(
        functools.partial(programs.surprises, seed, 150, count), 2, timeout_s=100.0
    )
    assert nwrong == 0
    assert nsends > 20
    assert nreceives > 20
    assert nsent == ntook
    assert (nsent > 0) == (count < 10_000)


def test_repeated_sends_that_sockets_do_not_take_are_sent_soon() -> None:
    (nunsent, nforgotten), _ = launch(functools.partial(programs.unread, 20), 2, timeout_s=60.0)
    assert nunsent > 0
    assert nforgotten == 0


def test_ctrl_c_loses_no_counts_of_a_repeated_exchange() -> None:
    program = functools.partial(programs.settled_after_an_interrupt, 50)
    assert launch(program, 2, timeout_s=60.0) == [(50, 50 * 32)] * 2


def test_repeated_long_messages_report_what_is_taken() -> None:
    program = functools.partial(programs.taken_beside_long_ones, 10)
    (nrepeats, ntaken), _ = launch(program, 2, timeout_s=60.0)
    assert nrepeats > 0
    assert ntaken == 10 * 4_000


def test_messages_of_more_sizes_than_are_prepared_are_exact() -> None:
    found = launch(functools.partial(programs.many_sizes, 60, 4, 31), 2, timeout_s=100.0)
    assert [nwrong for nwrong, _ in found] == [0, 0]
    assert all(ndone >= 31 for _, ndone in found)


@pytest.mark.parametrize("makes_collective", [False, True])
def test_confirmations_reach_a_sender_on_a_new_communicator(makes_collective: bool) -> None:
    given = functools.partial(programs.before_it_is_made, makes_collective)
    assert launch(given, 3, timeout_s=60.0) == [0, 0, 0]


def test_a_later_message_does_not_stall_a_long_one() -> None:
    """Compiled code leaves the call at once, because the data follows the later request."""
    found = launch(functools.partial(programs.beside_later_ones, 8), 2, timeout_s=100.0)
    assert [nwrong for nwrong, _, _ in found] == [0, 0]
    assert found[1][1] > 0
    assert sum(seconds > 0.6 for seconds in found[1][2]) < 2  # the first may be slow


def test_a_short_message_before_a_grant_is_not_the_grant() -> None:
    found = launch(functools.partial(programs.before_the_grant, 60), 2, timeout_s=60.0)
    assert found == [(0, 0), (0, 0)]


def test_an_exchange_whose_program_another_thread_drops_is_exact() -> None:
    found = launch(programs.loses_its_program, 2, timeout_s=60.0)
    assert all(is_exact for _, is_exact in found)
    assert any(came for came, _ in found)  # not where a timer has ended the repetition before

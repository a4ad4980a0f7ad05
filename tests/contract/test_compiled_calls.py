"""Calls over TCP in compiled code: results do not depend on where they return to Python."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import compiled_programs as programs
from support.jobs import launch
from support.slow import slow_but
from support.still import plan

from r2ccl.runtime.compiled import call

LIMITS = (0, 1, 2, 3, 4, 5, 7, 11, 16, 25)
#: Limit reached with large slices, too: calls have fewer events if sockets take more at once.
SURE = 11
#: Many slices, and confirmations that peers wait for.
SMALL = {"eager_nbytes": 1 << 10, "slice_nbytes": 1 << 12, "eager_slots": 2}


PROGRAMS = (programs.mixture, programs.repeated, programs.alternating)
QUICK = [
    (programs.mixture, 3, 3, 1, 5),
    (programs.repeated, 0, 3, 0, 5),
    (programs.alternating, 3, 3, 0, 1),
]
CASES = [
    (*each, is_small, 10)
    for each in itertools.product(PROGRAMS, LIMITS, (2, 3, 4))
    for is_small in (0, 1)
]


@pytest.mark.parametrize(
    ("program", "limit", "nranks", "is_small", "ncalls"), slow_but(QUICK, QUICK + CASES)
)
def test_results_are_exact_wherever_a_call_leaves(program, limit, nranks, is_small, ncalls):
    given = functools.partial(program, limit, ncalls, SMALL if is_small else {})
    found = launch(given, nranks, timeout_s=250.0)
    assert [nwrong for nwrong, _, _ in found] == [0] * nranks
    assert sum(ndone for _, ndone, _ in found) > 0
    is_sure = is_small or limit <= SURE if program is programs.mixture else limit <= 3
    if limit and is_sure:
        assert sum(nleft for _, _, nleft in found) > 0


@pytest.mark.parametrize("nranks", slow_but([3], [2, 3, 4]))
def test_results_have_the_bits_of_numpy(nranks: int) -> None:
    late = functools.partial(programs.beside_a_late_rank, 2 * nranks)
    found = launch(late, nranks, timeout_s=60.0)
    assert all(each == found[0] for each in found)
    assert len(set(found[0])) == 3  # the same in every call


@pytest.mark.parametrize("nranks", slow_but([3], [2, 3]))
@pytest.mark.parametrize("kind", programs.KINDS)
def test_every_collective_is_repeated(kind: str, nranks: int) -> None:
    found = launch(functools.partial(programs.repetitions_of, kind), nranks, timeout_s=60.0)
    assert [nwrong for nwrong, _ in found] == [0] * nranks
    assert sum(nrepeated for _, nrepeated in found) > 0


@pytest.mark.parametrize("nranks", [2, 4])
def test_calls_in_turn_are_repeated(nranks: int) -> None:
    found = launch(programs.switches, nranks, timeout_s=60.0)
    assert [nwrong for nwrong, _, _ in found] == [0] * nranks
    assert sum(nrepeated for _, nrepeated, _ in found) > 0
    assert sum(nswitched for _, _, nswitched in found) > 0


@pytest.mark.parametrize("nranks", [3, 4])
def test_a_peer_may_need_a_message_before_the_call(nranks: int) -> None:
    found = launch(functools.partial(programs.needed_first, 30), nranks, timeout_s=60.0)
    assert [nwrong for nwrong, _ in found] == [0] * nranks
    assert sum(nrepeated for _, nrepeated in found) > 0


@pytest.mark.parametrize("nranks", [2, 3])
def test_messages_wait_for_confirmations_during_a_call(nranks: int) -> None:
    found = launch(functools.partial(programs.queued, 12, 300), nranks, timeout_s=60.0)
    assert found == [0] * nranks


def test_messages_keep_their_order_beside_other_calls() -> None:
    assert launch(functools.partial(programs.overtaken, 40), 3, timeout_s=60.0) == [0, 0, 0]


def test_a_message_is_not_delayed_by_calls_with_other_ranks(tmp_path: Path) -> None:
    program = functools.partial(programs.awaited_elsewhere, str(tmp_path), 20)
    assert launch(program, 3, timeout_s=100.0) == [0, 0, 0]


@pytest.mark.parametrize("nranks", slow_but([3], [2, 3, 4]))
def test_calls_of_two_threads_cross(nranks: int) -> None:
    found = launch(functools.partial(programs.crossed, 200), nranks, timeout_s=60.0)
    assert found == [0] * nranks


def test_a_plan_in_use_is_not_made_again(monkeypatch):
    made, given = [], SimpleNamespace(wakeup_number=0)

    def make(*_, **__):
        made.append(1)
        return SimpleNamespace(arena_nbytes=0)

    monkeypatch.setattr(call, "is_supported", lambda _: True)
    monkeypatch.setattr(call, "CompiledProgram", make)
    calls = call.CompiledCalls(given, given, given, given)
    plans = [plan(1) for _ in range(200)]
    for each in plans:
        calls._program_of(plans[0])
        calls._program_of(each)
    assert len(made) == len(plans)


def test_bandwidth_is_measured_as_in_python():
    program = functools.partial(programs.mixture, 0, 5, {"balance": "1", "algo": "ring"})
    assert [nwrong for nwrong, _, _ in launch(program, 3, timeout_s=100.0)] == [0, 0, 0]


def test_eager_slices_that_sockets_do_not_take_are_sent_later():
    program = functools.partial(programs.unread, 3)
    assert launch(program, 3, timeout_s=60.0) == [0, 0, 0]


def test_a_call_that_cannot_run_in_it_keeps_no_scratch_memory():
    assert launch(programs.refused, 2, timeout_s=60.0) == [(1, 0), (1, 0)]


#: In both of these, the calls use the path that fails: the first has two ranks, and the second is
#: an allgather, whose ring passes along each pair of three ranks.
CUTS = (3, 22)


@pytest.mark.parametrize("nforms", [1, 3])
@pytest.mark.parametrize("seed", slow_but(CUTS, range(30)))
def test_repeated_calls_are_exact_though_a_path_fails(seed: int, nforms: int) -> None:
    program = functools.partial(programs.repeated_beside_a_cut, seed, 300, nforms)
    found = launch(program, 2 + seed % 3, timeout_s=100.0)
    assert [nwrong for nwrong, _, _ in found] == [0] * len(found)
    if seed in CUTS and nforms == 1:  # in others, the path may be unused
        assert sum(nrepeated for _, nrepeated, _ in found) > 0
        assert sum(nrepairs for _, _, nrepairs in found) > 0


@pytest.mark.parametrize("nbytes", [1 << 40, 1 << 63, (1 << 64) - 8192])
def test_a_fragment_of_a_wrong_size_fails_its_path_only(nbytes: int) -> None:
    (is_right, causes), (is_right_there, _) = launch(
        functools.partial(programs.wrong_fragment, nbytes), 2, timeout_s=60.0
    )
    assert is_right
    assert is_right_there
    assert any(cause.startswith("EBADMSG") for cause in causes)

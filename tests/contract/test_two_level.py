"""Contract tests of collectives on hosts of several ranks that share memory, over processes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
from support import two_level_programs as programs
from support import values
from support.jobs import launch, survivors
from support.slow import slow_but

import r2ccl

pytestmark = pytest.mark.timeout(300)
TIMEOUT_S = 120.0
HOSTS = [2, 2]


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CC_SHM", "1")
    monkeypatch.setenv("R2CC_SOCKET_IFNAME", "lo")


def run(program: Callable[..., Any], sizes: list[int], *given: Any) -> Any:
    return launch(functools.partial(program, sizes, *given), sum(sizes), timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("sizes", "nchunks"),
    slow_but([(HOSTS, 3)], [(HOSTS, 1), (HOSTS, 3), ([3, 3], 2), ([2, 2, 2], 5)]),
)
def test_all_dtypes_are_exact(sizes: list[int], nchunks: int) -> None:
    has_all_ops = nchunks != 3
    assert run(programs.exact, sizes, nchunks, has_all_ops) == [([], True)] * sum(sizes)


@pytest.mark.parametrize(
    ("sizes", "nchunks", "names"),
    slow_but(
        [(HOSTS, 3, ("float32",))],
        [
            (HOSTS, 3, ("float32",)),
            (HOSTS, 1, ("int8",)),
            (HOSTS, 3, values.DTYPES),
            ([3, 3], 2, ("int16", "float64")),
            ([2, 2, 2], 5, ("complex64", "bool")),
        ],
    ),
)
def test_other_collectives_are_exact(sizes: list[int], nchunks: int, names: tuple[str]) -> None:
    assert run(programs.others_exact, sizes, nchunks, names) == [[]] * sum(sizes)


def test_ranks_numbered_in_turn_get_exact_results() -> None:
    assert run(programs.others_exact, HOSTS, 3, ("int16",), True) == [[]] * 4


def test_a_root_broadcasts_read_only_memory() -> None:
    assert run(programs.read_only_roots, HOSTS) == [[]] * 4


def test_other_collectives_take_two_levels_in_every_way() -> None:
    counts = [programs.NCHUNKS] * 3
    names = ("broadcast", "reduce", "allgather", "reduce_scatter")
    assert run(programs.others_counted, HOSTS) == [dict.fromkeys(names, counts)] * 4


def test_a_part_of_a_sum_is_added_like_the_whole_sum() -> None:
    assert run(programs.scattered_bits, HOSTS) == [True] * 4


def test_every_way_to_call_takes_two_levels() -> None:
    assert run(programs.counted, HOSTS) == [[programs.NCHUNKS] * 4] * 4


def test_all_ranks_get_the_same_bits() -> None:
    found = run(programs.same_bits, HOSTS)
    assert len({bits for bits, _ in found}) == 1
    assert all(is_of_nodes for _, is_of_nodes in found)


@pytest.mark.parametrize(
    ("what", "other", "name"),
    slow_but(
        [("count", 3, "allreduce"), ("barrier", 0, "allreduce"), ("count", 1, "allgather")],
        [
            ("count", 0, "allreduce"),
            ("count", 3, "allreduce"),
            ("barrier", 0, "allreduce"),
            ("scan", 3, "allreduce"),
            ("count", 1, "allgather"),
            ("count", 2, "reduce_scatter"),
            ("barrier", 1, "broadcast"),
            ("count", 3, "broadcast"),
            ("count", 0, "reduce"),
        ],
    ),
)
def test_calls_that_differ_are_found(what: str, other: int, name: str) -> None:
    for error in run(programs.different, HOSTS, other, what, name):
        assert "differs between ranks" in error
        assert f"{name}(count=1000" in error


def test_a_rank_that_does_not_call_is_named() -> None:
    """Also on the other host, where rank 2 waits for rank 3 and has not sent anything."""
    *found, _ = run(programs.late, HOSTS)
    for pending, error in found:
        assert "ranks [3] have not called it" in pending
        assert "ranks [3] have not called it" in error
    assert "data in shared memory from rank 3" in found[2][0]
    assert any(error.startswith("TransportTimeout") for _, error in found)


@pytest.mark.parametrize("rank", [0, 3])
def test_all_hosts_use_the_network_if_one_rank_cannot(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R2CC_SHM", "auto")
    assert run(programs.obstructed, HOSTS, rank) == [(False, 12.0)] * 4


def test_an_error_says_why_memory_cannot_be_shared() -> None:
    with pytest.raises(r2ccl.R2cclError, match=r"rank 3.*in a test|ranks \[3\] cannot"):
        run(programs.obstructed, HOSTS, 3)


def test_hosts_with_unequal_numbers_of_ranks_use_the_network(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R2CC_DEBUG", "INFO")
    logging.getLogger("r2ccl").setLevel(logging.NOTSET)
    assert run(programs.obstructed, [2, 1], -1) == [(False, 9.0)] * 3
    said = capfd.readouterr().err
    told = "the hosts have between 1 and 2 ranks; the network is used instead; to share memory, "
    assert said.count(told) == 1


def test_communicators_of_hosts_and_across_them() -> None:
    assert run(programs.split, HOSTS) == [([True, False, True], 2.0 + 2.0 + 4.0)] * 4


@pytest.mark.parametrize(
    ("how", "cause", "called"),
    slow_but(
        [("revoke", "revoke", "allreduce"), ("interrupt", "KeyboardInterrupt", "reduce_scatter")],
        [
            ("revoke", "revoke", "allreduce"),
            ("interrupt", "KeyboardInterrupt", "allreduce"),
            ("interrupt", "KeyboardInterrupt", "reduce_scatter"),
            ("interrupt", "KeyboardInterrupt", "allgather"),
            ("revoke", "revoke", "broadcast"),
            ("interrupt", "KeyboardInterrupt", "reduce"),
        ],
    ),
)
def test_a_call_that_ends_early_leaves_nothing_behind(how: str, cause: str, called: str) -> None:
    found = run(programs.ended, HOSTS, how, called)
    assert found[1][0] == ("KeyboardInterrupt" if how == "interrupt" else "CommunicatorRevoked")
    for rank, (name, text, is_same, left) in enumerate(found):
        assert is_same, f"memory of rank {rank} was written after its error"
        assert left == []
        if rank != 1:
            assert name == "CommunicatorRevoked"
            assert cause in text


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["allreduce", "reduce_scatter"],
        ["allreduce", "reduce_scatter", "allgather", "broadcast", "reduce"],
    ),
)
def test_survivors_of_a_killed_rank_go_on(name: str) -> None:
    run = functools.partial(programs.killed, HOSTS, 1, name)
    found = survivors(run, 4, [[1]], timeout_s=TIMEOUT_S)
    for error, took_s, total in found.values():
        assert (error, total) == ("PeerLost of rank 1", 3.0)
        assert took_s < 5.0


def test_a_stopped_rank_is_waited_for() -> None:
    assert run(programs.stopped, HOSTS) == [float(1 << 10)] * 4


def test_memory_is_freed_at_the_end() -> None:
    assert run(programs.freed, HOSTS) == [(4, 0)] * 4

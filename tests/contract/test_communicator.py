"""Contract tests of the communicator, over real processes and real sockets."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
from support import collective_programs, failure_programs, operation_programs, part_programs, values
from support.jobs import launch, survivors
from support.slow import slow_but

import r2ccl

TIMEOUT_S = 90.0
#: Timeout of a job with all types and operations, which compiles 131 functions if no earlier test
#: did: 96 s on two busy cores.
COMPILING_S = 240.0


def check_in_one_job(nranks: int, *runs: partial[list[str]], timeout_s: float = TIMEOUT_S) -> None:
    """Each program returns its wrong cases. One job, as starting it costs more than its calls."""
    run = partial(collective_programs.in_one_job, *runs)
    assert launch(run, nranks, timeout_s=timeout_s) == [[]] * nranks


COLLECTIVES = (
    collective_programs.allreduces,
    collective_programs.parted,
    collective_programs.rooted,
    part_programs.exchanges,
    collective_programs.prefixes,
)


#: An element type of each kind: integers, complex numbers, logical, small floats, pairs.
KINDS = ("uint8", "complex64", "bool", "bfloat16", "float32_index")


@pytest.mark.timeout(COMPILING_S + 10)
@pytest.mark.parametrize(
    ("nranks", "names"),
    slow_but([(3, KINDS)], [(3, KINDS), *((nranks, values.DTYPES) for nranks in range(1, 6))]),
    ids=lambda given: str(given) if isinstance(given, int) else f"{len(given)} types",
)
def test_every_collective_dtype_and_op_is_exact(nranks: int, names: tuple[str, ...]) -> None:
    given = {"counts": (0, 7), "names": names}
    programs = (partial(run, **given) for run in COLLECTIVES)
    check_in_one_job(nranks, *programs, timeout_s=COMPILING_S)


@pytest.mark.parametrize(
    ("nranks", "names"),
    slow_but(
        [(3, ("float32",))],
        [(3, ("float32",)), *((nranks, ("float32", "bfloat16")) for nranks in (1, 2, 3, 4, 8))],
    ),
    ids=lambda given: str(given) if isinstance(given, int) else "-".join(given),
)
def test_every_protocol_is_exact(nranks: int, names: tuple[str, ...]) -> None:
    """Use sizes around the eager limit, of one slice, several slices, several channels."""
    counts = (16383, 16384, 16385, 70001, 262144, 1000003)
    reductions = partial(
        collective_programs.allreduces,
        counts=counts,
        names=names,
        ops=values.some_ops,
    )
    given = {"counts": (16385, 100_003), "names": ("float32",)}
    others = [partial(run, **given) for run in COLLECTIVES[1:]]
    check_in_one_job(nranks, reductions, *others)


@pytest.mark.parametrize(
    ("nsent", "nwanted"),
    slow_but(
        [(5, 0), (5, 300_001)], [(5, 0), (0, 5), (300_001, 5), (5, 300_001), (300_001, 300_000)]
    ),
)
@pytest.mark.parametrize(
    "collective", slow_but(["alltoallv"], ["gatherv", "scatterv", "alltoallv"])
)
def test_a_wrong_count_is_found_by_the_two_ranks(collective: str, nsent: int, nwanted: int) -> None:
    """Send from rank 1 to 0 in a gatherv, otherwise from 0 to 1."""
    run = partial(part_programs.wrong_count, collective, nsent, nwanted)
    for error in launch(run, 3, timeout_s=TIMEOUT_S):
        assert "InvalidArgument" in error
        assert f"passes {nsent} elements for rank" in error
        assert f"expects {nwanted} elements from rank" in error


def test_ranks_that_pass_different_counts_are_told() -> None:
    for error in launch(part_programs.different_counts, 3, timeout_s=TIMEOUT_S):
        assert "InvalidArgument" in error
        assert "allgather(count=6, dtype=float64, counts=" in error


@pytest.mark.parametrize("what", ["broadcast", "reduce", "gather", "scan"])
@pytest.mark.parametrize("compiled", slow_but(["auto"], ["auto", "0"]))
def test_ranks_that_wait_for_each_other_are_told(
    what: str, compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R2CC_COMPILED", compiled)
    for error, took_s in launch(
        partial(failure_programs.wait_for_each_other, what), 2, timeout_s=TIMEOUT_S
    ):
        assert error.startswith("InvalidArgument: call 2 differs between ranks: rank")
        assert took_s < 5.0


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("compiled", slow_but(["auto"], ["auto", "0"]))
def test_data_of_a_later_call_is_not_used(is_early: bool, compiled: str) -> None:
    for error in launch(
        partial(failure_programs.leave_out, is_early, compiled), 2, timeout_s=TIMEOUT_S
    ):
        assert error.startswith("InvalidArgument: call 2 differs between ranks: rank 0 called")
        assert "rank 1 called a collective that sends less to rank 0; all ranks must" in error


@pytest.mark.parametrize(("count", "shm"), [(3, 0), (100_000, 0), (100_000, 1)])
def test_a_rank_that_closes_too_early_is_told(count: int, shm: int) -> None:
    run = partial(failure_programs.close_before_the_last_call, count, shm)
    for error, took_s in launch(run, 2, timeout_s=TIMEOUT_S):
        assert "rank 1 called close() after call" in error
        assert "but rank 0 made call" in error
        assert error.startswith("InvalidArgument: rank 1")
        assert took_s < 5.0


@pytest.mark.parametrize(
    "seen", ["nowhere", "with a wrong argument", "in a call", "in a child", "in exclude"]
)
def test_close_raises_an_error_that_no_call_has_raised(seen: str, tmp_path: Path) -> None:
    run = partial(failure_programs.closed_after_the_end, str(tmp_path / "left"), seen)
    found, of_revoker = launch(run, 2, timeout_s=TIMEOUT_S)
    text = "CommunicatorRevoked: rank 0: rank 1 ended the communicator: a reason"
    assert found == ([] if seen.startswith("in ") else [text])
    assert of_revoker == []


def test_close_is_silent_after_ctrl_c_in_a_wait(tmp_path: Path) -> None:
    run = partial(failure_programs.closed_after_ctrl_c, str(tmp_path / "left"))
    found, of_peer = launch(run, 2, timeout_s=TIMEOUT_S)
    assert found == []
    assert "KeyboardInterrupt" in of_peer[0]


def test_a_wait_after_ctrl_c_in_another_is_revoked(tmp_path: Path) -> None:
    run = partial(failure_programs.waited_after_ctrl_c, str(tmp_path / "left"))
    assert launch(run, 2, timeout_s=TIMEOUT_S) == ["CommunicatorRevoked"] * 2


@pytest.mark.parametrize("is_child", [False, True])
def test_two_threads_may_close_at_once(is_child: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "closing")
    run = partial(failure_programs.closed_in_two_threads, path, is_child)
    assert launch(run, 2, timeout_s=TIMEOUT_S) == [[], []]


def test_a_communicator_is_usable_after_wrong_parts() -> None:
    launch(part_programs.usable_after_wrong_parts, 2, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("shm", ["0", "1"])
def test_a_root_broadcasts_read_only_memory(shm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CC_SHM", shm)
    run = partial(collective_programs.read_only_roots, counts=(1, 20_001, 300_001))
    check_in_one_job(2 if shm == "0" else 3, run)


@pytest.mark.parametrize("nranks", slow_but([3], [1, 2, 3, 4]))
def test_inputs_can_be_scaled_and_widened(nranks: int) -> None:
    check_in_one_job(nranks, partial(operation_programs.converted, counts=(0, 7, 20_001)))


def test_a_mean_in_float32_is_rounded_once() -> None:
    assert (
        launch(partial(operation_programs.rounded_once, 5000), 3, timeout_s=TIMEOUT_S) == [True] * 3
    )


@pytest.mark.rails
@pytest.mark.parametrize("is_user_op", [False, True])
def test_a_lost_rail_changes_no_bit_of_a_special_operation(is_user_op: bool) -> None:
    run = partial(operation_programs.special_bits, 200_000, is_user_op=is_user_op)
    healthy, lossy = (
        launch(partial(run, is_lossy=is_lossy), 3, timeout_s=TIMEOUT_S)
        for is_lossy in (False, True)
    )
    assert {bits for bits, _ in (*healthy, *lossy)} == {healthy[0][0]}
    assert sum(nrepairs for _, nrepairs in lossy) > 0


@pytest.mark.parametrize("nranks", slow_but([3], [1, 2, 3, 4, 5]))
def test_operations_of_the_user_are_exact(nranks: int) -> None:
    counts = (1, 700, 30_001)
    check_in_one_job(
        nranks,
        *(partial(operation_programs.user_operations, count=count) for count in counts),
    )


def test_ranks_with_different_operations_are_refused() -> None:
    for said in launch(operation_programs.other_operation, 2, timeout_s=TIMEOUT_S):
        assert said.startswith("InvalidArgument: ")
        assert said.count("op=user_op ") == 2


def test_an_operation_that_fails_ends_the_communicator() -> None:
    said = launch(operation_programs.failing_operation, 3, timeout_s=TIMEOUT_S)
    assert said[1] == "ZeroDivisionError: on purpose"
    assert "CommunicatorRevoked" in said[0]
    assert "ZeroDivisionError" in said[0]
    assert "ZeroDivisionError" in said[2]


def test_a_user_can_bring_a_schedule() -> None:
    run = partial(collective_programs.own_schedules, 300_001)
    assert launch(run, 3, timeout_s=TIMEOUT_S) == [[]] * 3


BEYOND_2_GIB = (2 << 30) + 12345


@pytest.mark.parametrize(
    ("collective", "nbytes"),
    slow_but(
        [("broadcast", (1 << 24) + 12345)],
        [
            ("broadcast", (1 << 24) + 12345),
            ("broadcast", BEYOND_2_GIB),
            ("allreduce", BEYOND_2_GIB),
        ],
    ),
)
def test_large_arrays_are_right_to_the_last_byte(collective: str, nbytes: int) -> None:
    """Sizes beyond 2 GiB are also in test_chunks.py and test_unequal_parts.py."""
    run = partial(collective_programs.right_to_the_last_byte, collective, nbytes)
    assert launch(run, 2, timeout_s=TIMEOUT_S) == [True, True]


def test_parts_lie_beyond_4_gib() -> None:
    assert launch(part_programs.parts_beyond_4gib, 2, timeout_s=TIMEOUT_S) == [True, True]


def test_all_ranks_get_the_same_bits() -> None:
    run = partial(collective_programs.reduced_bits, (100, 300_000), 1)
    first, *others = launch(run, 4, timeout_s=TIMEOUT_S)
    assert others == [first] * 3


@pytest.mark.parametrize("mode", slow_but(["0"], ["0", "1", "auto"]))
def test_modes_give_the_same_bits(mode: str) -> None:
    run = partial(collective_programs.reduced_bits, (200_000,), 2)
    reference = launch(run, 3, timeout_s=TIMEOUT_S)
    assert launch(run, 3, timeout_s=TIMEOUT_S, env={"R2CC_MODE": mode}) == reference


@pytest.mark.parametrize(
    "calls",
    [
        ((10, "float32", "SUM"), (20, "float32", "SUM"), (10, "float32", "SUM")),
        ((10, "float32", "SUM"), (10, "float64", "SUM"), (10, "float32", "SUM")),
        ((10, "float32", "SUM"), (10, "float32", "SUM"), (10, "float32", "MAX")),
        pytest.param(
            ((0, "float32", "SUM"), (1, "float32", "SUM"), (1, "float32", "SUM")),
            marks=pytest.mark.slow,
        ),
        ((10, "float32", "SUM"), (1_000_000, "float32", "SUM"), (10, "float32", "SUM")),
        ((1_000_000, "float32", "SUM"), (1_000_000, "float32", "SUM"), (999_999, "float32", "SUM")),
    ],
)
def test_ranks_that_disagree_are_named(calls: tuple[tuple[int, str, str], ...]) -> None:
    found = launch(partial(failure_programs.disagree, calls), 3, timeout_s=TIMEOUT_S)
    for error, after_s in found:
        assert error.startswith("InvalidArgument"), found
        assert "all ranks must pass the same" in error
        assert after_s < 30


def test_inputs_need_not_be_contiguous() -> None:
    counts = (10, 70_000)
    check_in_one_job(3, *(partial(collective_programs.strided, count=count) for count in counts))


def test_bad_arguments_are_refused_before_any_io() -> None:
    for messages in launch(failure_programs.usable_after_bad_arguments, 2, timeout_s=TIMEOUT_S):
        assert len(messages) == 8
        assert "not C-contiguous" in messages[0]
        assert "read-only" in messages[1]
        assert "overlap in part" in messages[6]
        assert "op=MIN" in messages[7]


@pytest.mark.parametrize("is_busy", [False, True])
def test_wrong_ops_roots_and_schedules_end_nothing(is_busy: bool) -> None:
    run = partial(failure_programs.usable_after_wrong_ops_roots_and_schedules, is_busy)
    assert launch(run, 2, timeout_s=TIMEOUT_S) == [None] * 2


@pytest.mark.parametrize(
    ("victim", "nbytes"),
    slow_but([(0, 1000), (2, 32 << 20)], itertools.product([0, 2], [1000, 32 << 20])),
)
def test_a_killed_rank_is_lost_on_every_survivor(victim: int, nbytes: int) -> None:
    run = partial(failure_programs.killed_report, victim, nbytes)
    reports = survivors(run, 3, [[victim]], timeout_s=TIMEOUT_S)
    for report in reports.values():
        assert report["error"] == "PeerLost"
        assert report["peer"] == victim
        assert report["after"] == "PeerLost"
        assert report["delay_s"] < 10.0


def test_a_rank_lost_in_init_leaves_nothing_to_shrink() -> None:
    run = partial(failure_programs.killed_in_init, 1)
    for peer, text in survivors(run, 3, [[1]], timeout_s=TIMEOUT_S).values():
        assert peer == 1
        assert "left during init" in text
        assert "restart the job" in text
        assert "shrink" not in text


@pytest.mark.parametrize("shm", ["0", "1"])
@pytest.mark.parametrize("ncalls", [0, 5])
def test_control_c_ends_a_blocked_call(ncalls: int, shm: str) -> None:
    run = partial(failure_programs.interrupted, 0, ncalls, shm)
    first, second = launch(run, 2, timeout_s=TIMEOUT_S)
    assert first == "KeyboardInterrupt"
    assert "rank 0 ended the communicator" in second


@pytest.mark.parametrize("shm", ["0", "1"])
@pytest.mark.parametrize("what", ["first", "repeated", "dup"])
def test_control_c_as_a_call_begins_keeps_no_turn(what: str, shm: str) -> None:
    run = partial(failure_programs.interrupted_as_it_begins, what, shm)
    first, second = launch(run, 2, timeout_s=TIMEOUT_S)
    assert first == ["KeyboardInterrupt", "CommunicatorRevoked", "free"]
    assert second[-1] == "free"


def test_a_peer_that_does_not_come_is_named() -> None:
    text = launch(failure_programs.timed_out, 2, timeout_s=TIMEOUT_S)[0]
    assert "waits for" in text
    assert "rank 1" in text


@pytest.mark.rails
@pytest.mark.parametrize("nranks", slow_but([4], [2, 4]))
@pytest.mark.parametrize(("count", "step"), [(1000, 0), (500_000, 1)])
def test_losing_a_rail_changes_no_bit(nranks: int, count: int, step: int) -> None:
    run = partial(failure_programs.lose_rails, count, step, 4)
    reports = launch(run, nranks, timeout_s=TIMEOUT_S)
    assert reports[0][1] >= 1
    reference = launch(
        partial(failure_programs.many_reductions, count, 4), nranks, timeout_s=TIMEOUT_S
    )
    assert [results for results, _ in reports] == reference


EXCHANGES = [
    "alltoall", "alltoallv", "gather", "gatherv", "scatter", "scatterv", "allgatherv",
    "reduce_scatterv", "scan", "exscan",
]  # fmt: skip


@pytest.mark.rails
@pytest.mark.parametrize("collective", slow_but(["alltoallv"], EXCHANGES))
def test_losing_a_rail_changes_no_part(collective: str) -> None:
    """The first call, without a fault, is verified by `test_every_protocol_is_exact`."""
    run = partial(failure_programs.lose_a_rail_in, collective)
    reports = launch(run, 3, timeout_s=TIMEOUT_S)
    assert all(is_right for is_right, _ in reports)
    assert reports[1][1] >= 1


def test_parts_are_exchanged_in_communicators_of_some_ranks() -> None:
    assert launch(part_programs.exchanges_among_some, 5, timeout_s=TIMEOUT_S) == [[]] * 5


def test_registered_memory_is_reduced_like_any_other() -> None:
    assert launch(collective_programs.registered, 2, timeout_s=TIMEOUT_S) == [True, True]


@pytest.mark.rails
def test_fail_stop_mode_reports_the_broken_path() -> None:
    run = partial(failure_programs.lose_rails, 500_000, 1, 2)
    with pytest.raises(r2ccl.R2cclError, match="R2CC_MODE=failstop does not migrate"):
        launch(run, 2, timeout_s=TIMEOUT_S, env={"R2CC_MODE": "failstop"})


def test_prefixes_and_unequal_parts_take_every_operation() -> None:
    counts = (3, 100_000)
    check_in_one_job(
        3,
        *(partial(operation_programs.operations_of_prefixes, count=count) for count in counts),
    )

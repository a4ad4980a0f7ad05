"""Status of a rank while it waits, over real processes, sockets and signals."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import msgspec
import pytest
from support import status_programs
from support.jobs import launch
from support.slow import slow_but

from r2ccl.runtime.status import RankStatus

TIMEOUT_S = 90.0


def test_another_thread_learns_which_rank_is_missing() -> None:
    run = functools.partial(status_programs.stopped_peer, 1)
    (text, *_), *_ = outcomes = launch(run, 3, timeout_s=TIMEOUT_S)
    assert "ranks [1] have not called it (rank 1 was last seen in call 1)" in text
    assert "waits for" in text
    assert [is_right for _, is_right in outcomes] == [True] * 3


def test_a_signal_in_mid_call_dumps_the_status_and_no_more(tmp_path: Path) -> None:
    run = functools.partial(status_programs.dumped_by_signal, str(tmp_path))
    (_, first), (text, second) = launch(run, 2, timeout_s=TIMEOUT_S)
    assert first
    assert second
    (line,) = text.splitlines()
    read = msgspec.json.decode(line, type=RankStatus)
    assert read.rank == 0
    assert [operation.op for operation in read.operations] == [2]
    assert read.pending.absent == {1: 1}
    assert {wait.peer for wait in read.pending.waits} == {1}
    assert sum(path.nbytes_sent for path in read.paths) >= 1 << 20
    assert not (tmp_path / "1.json").exists()


def test_a_signal_before_there_is_a_status_ends_no_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = functools.partial(status_programs.signalled_in_init, str(tmp_path))
    assert launch(run, 2, timeout_s=TIMEOUT_S) == [(False, True)] * 2
    lines = re.findall(r"r2ccl: process \d+ is in init\(\), .*", capfd.readouterr().err)
    assert len(lines) == 3
    assert all(line.endswith("rank 0 logs which") for line in lines)


def test_no_signal_is_taken_without_being_asked_and_none_is_kept() -> None:
    assert launch(status_programs.handler_after_close, 1, timeout_s=TIMEOUT_S) == [[True] * 5]


@pytest.mark.parametrize("victim", slow_but([0], [0, 2]))
def test_the_timeouts_message_names_the_rank_that_did_not_join(victim: int) -> None:
    run = functools.partial(status_programs.not_joined, victim)
    outcomes = launch(run, 4, timeout_s=TIMEOUT_S)
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert "TransportTimeout" in {kind for kind, _ in survivors}
    for _, text in survivors:
        assert (
            f"ranks [{victim}] have not called it (rank {victim} was last seen in call 1)" in text
        )
        assert "R2CC_TIMEOUT_S" in text


def test_a_rail_that_came_back_is_up_with_its_failure_remembered() -> None:
    (states, causes), _ = launch(status_programs.health_after_a_loss, 2, timeout_s=TIMEOUT_S)
    assert states == ["up", "up"]
    assert causes == ["ENETDOWN: cut by the fault plan", ""]

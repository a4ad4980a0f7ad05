"""The record of repairs: what belongs to which failure of which path."""

from r2ccl.failover.migration.repairs import RepairLog
from r2ccl.types import PathKey

A, B = PathKey(1, 0), PathKey(1, 1)


def failed(log: RepairLog, key: PathKey = A, epoch: int = 0, at: float = 1.0) -> None:
    log.failed(key, epoch, "EIO: gone", at)
    log.fenced(key, epoch, at + 0.1)
    log.awaits(key, {0: 5, 2: 8})
    log.resumed(key, {0: 1, 2: 1}, at + 0.2)


def test_the_life_of_a_repair() -> None:
    log = RepairLog()
    failed(log)
    (repair,) = log.repairs
    assert (repair.peer, repair.rail, repair.epoch, repair.cause) == (1, 0, 0, "EIO: gone")
    assert (repair.failed_s, repair.fenced_s, repair.resumed_s) == (1.0, 1.1, 1.2)
    assert repair.moved == {0: 1, 2: 1}
    log.replayed((A, 0), 100)
    log.replayed((A, 0), 20)
    log.replayed((B, 0), 7)
    log.replayed(None, 9)
    assert repair.nbytes_replayed == 120
    log.arrived(B, 2, 8, 1.5)
    log.arrived(B, 0, 5, 1.7)
    assert repair.first_byte_s == 1.5
    log.opened(A, 1, 9.0)
    assert repair.restored_s == 9.0


def test_only_the_slice_that_was_awaited_closes_a_repair() -> None:
    log = RepairLog()
    failed(log)
    log.arrived(B, 0, 6, 2.0)
    log.arrived(B, 1, 5, 2.0)
    log.arrived(PathKey(2, 1), 0, 5, 2.0)
    assert log.open
    assert log.repairs[0].first_byte_s == 0.0


def test_a_repair_nothing_waits_for_is_not_open() -> None:
    log = RepairLog()
    log.failed(A, 0, "EIO", 1.0)
    log.awaits(A, {})
    log.resumed(A, {}, 1.2)
    assert not log.open


def test_a_failures_sequel_is_said_once_and_only_of_that_failure() -> None:
    log = RepairLog()
    log.failed(A, 0, "EIO", 1.0)
    assert log.sequel(A, 0) == ""
    log.resumed(A, {0: 1, 2: 2}, 1.0031)
    assert log.sequel(A, 0) == "moved channels [0, 2] to rail 1, rail 2, in 3.1 ms"
    assert log.sequel(A, 1) == log.sequel(B, 0) == ""
    log.failed(B, 0, "EIO", 2.0)
    log.resumed(B, {}, 2.001)
    assert log.sequel(B, 0) == "no channels moved, in 1.0 ms"


def test_failures_of_two_paths_are_kept_apart() -> None:
    log = RepairLog()
    failed(log, A, at=1.0)
    failed(log, B, at=2.0)
    log.replayed((A, 0), 10)
    log.replayed((B, 0), 20)
    log.opened(A, 1, 3.0)
    first, second = log.repairs
    assert (first.nbytes_replayed, second.nbytes_replayed) == (10, 20)
    assert (first.restored_s, second.restored_s) == (3.0, 0.0)


def test_a_path_that_fails_again_has_two_records() -> None:
    log = RepairLog()
    failed(log, epoch=0, at=1.0)
    log.opened(A, 1, 3.0)
    failed(log, epoch=1, at=4.0)
    assert [r.restored_s for r in log.repairs] == [3.0, 0.0]
    log.opened(A, 2, 5.0)
    assert [r.restored_s for r in log.repairs] == [3.0, 5.0]


def test_a_repair_still_waits_while_its_path_fails_again() -> None:
    log = RepairLog()
    failed(log, epoch=0, at=1.0)
    log.opened(A, 1, 3.0)
    log.failed(A, 1, "EIO: gone", 4.0)
    log.awaits(A, {0: 9})
    log.resumed(A, {0: 1}, 4.2)
    log.arrived(B, 2, 8, 4.5)
    log.arrived(B, 0, 9, 4.6)
    assert [r.first_byte_s for r in log.repairs] == [4.5, 4.6]
    assert not log.open


def test_a_dropped_record_is_not_open() -> None:
    log = RepairLog()
    failed(log)
    for epoch in range(1, 1025):
        log.failed(B, epoch, "EIO", 2.0)
    assert len(log.repairs) == 1024
    assert not log.open


def test_an_epoch_never_used_here_leaves_the_last_record_alone() -> None:
    """The peer's end came up and failed before this one was in use."""
    log = RepairLog()
    failed(log)
    log.awaits(A, {})
    log.resumed(A, {}, 7.0)
    (repair,) = log.repairs
    assert (repair.resumed_s, repair.moved) == (1.2, {0: 1, 2: 1})
    assert [each for each, _ in log.open] == [repair]


def test_the_peer_explains_the_failure_of_one_epoch_only() -> None:
    log = RepairLog()
    failed(log, epoch=1)
    log.explained(A, 0, "EXCLUDED: late")
    assert log.repairs[0].cause == "EIO: gone"
    log.explained(A, 1, "EXCLUDED: by order")
    assert log.repairs[0].cause == "EXCLUDED: by order"


def test_a_path_that_was_never_in_use_has_no_record() -> None:
    log = RepairLog()
    log.opened(A, 0, 1.0)
    log.fenced(A, 0, 1.0)
    log.resumed(A, {}, 1.0)
    log.replayed((A, 0), 1)
    assert not log.repairs

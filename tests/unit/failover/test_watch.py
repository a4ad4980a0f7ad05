"""When silence becomes a suspicion, and when it does not."""

from r2ccl.failover.probes import Watch
from r2ccl.types import PathKey

A, B = PathKey(1, 0), PathKey(1, 1)


def test_silence_with_work_is_suspected_after_the_time_and_again() -> None:
    watch = Watch(0.5)
    found = [round(0.1 * i, 1) for i in range(1, 21) if watch.look(0.1 * i, [(A, 7, True)])]
    assert found == [0.6, 1.1, 1.6] or found == [0.7, 1.2, 1.7]


def test_activity_or_no_work_starts_the_count_again() -> None:
    watch = Watch(0.5)
    activity = 0
    for i in range(100):
        activity += i % 4 == 0
        assert watch.look(0.1 * i, [(A, activity, True), (B, 0, i % 4 != 0)]) == []


def test_only_the_silent_path_is_suspected() -> None:
    watch = Watch(0.5)
    found = set()
    for i in range(30):
        found.update(watch.look(0.1 * i, [(A, i, True), (B, 0, True)]))
    assert found == {B}


def test_a_rank_that_was_away_does_not_blame_its_paths() -> None:
    watch = Watch(0.5)
    watch.look(0.0, [(A, 0, True)])
    watch.look(0.02, [(A, 0, True)])
    assert watch.look(10.0, [(A, 0, True)]) == []
    assert watch.look(20.0, [(A, 0, True)]) == []
    # Three long absences count as three quarters of the time; it takes real looks to go on.
    assert watch.look(30.0, [(A, 0, True)]) == []
    assert watch.look(40.0, [(A, 0, True)]) == [A]


def test_a_path_first_seen_is_not_suspected_at_once() -> None:
    watch = Watch(0.5)
    watch.look(0.0, [])
    assert watch.look(100.0, [(A, 0, True)]) == []
    assert watch.look(100.1, [(A, 0, True)]) == []


def test_paths_are_silent_together_or_not_at_all() -> None:
    watch = Watch(0.5)
    for i in range(30):
        watch.look(0.1 * i, [(A, i, True), (B, 0, True)])
    assert watch.are_silent([B])
    assert not watch.are_silent([A, B])
    for i in range(30, 40):
        watch.look(0.1 * i, [(A, 30, True), (B, 0, True)])
    assert watch.are_silent([A, B])

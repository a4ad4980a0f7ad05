"""Jobs of the tests, whose ranks a process forks: one that is interrupted spoils no other."""

import pytest
from support.forked_ranks import ForkedRanks
from support.jobs import launch


def one() -> int:
    return 1


def two() -> int:
    return 2


def test_the_answer_of_an_interrupted_job_goes_to_no_other(monkeypatch) -> None:
    assert launch(one, 1, timeout_s=60.0) == [1]  # starts the process
    read = ForkedRanks._read

    def interrupt(*_: object) -> None:
        monkeypatch.setattr(ForkedRanks, "_read", read)
        raise KeyboardInterrupt

    monkeypatch.setattr(ForkedRanks, "_read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch(one, 1, timeout_s=60.0)
    assert launch(two, 1, timeout_s=60.0) == [2]

"""The job of a lab reads the output of its ranks to their end."""

import subprocess
import sys

import pytest

from r2ccl.testing.netlab import LabError, ranks
from r2ccl.testing.netlab.ranks import LabJob, RankProcess

#: Twice what a pipe holds.
NBYTES = 1 << 17

WRITES_AT_THE_END = f"""
import signal, sys
def end(*args):
    print("x" * {NBYTES})
    print("ended", flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
signal.pause()
"""
IGNORES_SIGTERM = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
signal.pause()
"""


def start(program: str) -> LabJob:
    """Start one rank and wait until it has set its signal handler."""
    popen = subprocess.Popen(
        [sys.executable, "-c", program],
        bufsize=0,  # `readline` must not take what follows
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert popen.stdout is not None
    popen.stdout.readline()
    job = LabJob(lambda: None)
    job.ranks.append(RankProcess(0, 0, popen))
    return job


def test_output_written_at_sigterm_is_read() -> None:
    lines: list[str] = []
    with start(WRITES_AT_THE_END) as job:
        (result,) = job.stream(0.0, lambda rank, line: lines.append(line))
    assert result.is_timed_out
    assert result.returncode == 3
    assert lines == ["x" * NBYTES, "ended"]
    assert result.output == "".join(f"{line}\n" for line in lines)


def test_a_job_that_has_ended_can_be_waited_for_again() -> None:
    with start('print("up")') as job:
        job.ranks[0].popen.wait()
        for _ in range(2):
            (result,) = job.wait(1.0)
            assert (result.returncode, result.is_timed_out) == (0, False)


def test_a_rank_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "TERM_GRACE_S", 0.05)
    with start(IGNORES_SIGTERM) as job:
        (result,) = job.stream(0.0, lambda rank, line: None)
    assert result.is_timed_out
    assert result.returncode == -9


def test_a_rank_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "TERM_GRACE_S", 0.05)
    monkeypatch.setattr(ranks, "_KILL_TIMEOUT_S", 0.05)
    closed: list[bool] = []
    job = start(IGNORES_SIGTERM)
    job._on_close = lambda: closed.append(True)
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "_signal_group", lambda popen, number: None)
        with pytest.raises(LabError, match=rf"processes \[{job.ranks[0].pid}\] did not end"):
            job.close()
    assert closed
    job.ranks[0].popen.kill()
    job.ranks[0].popen.wait(10)

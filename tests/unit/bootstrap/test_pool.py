"""Ranks of a pool stay alive between calls; a pool whose communicator may not work has ended."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.slow import slow_but

import r2ccl
from r2ccl import ConcurrentCalls, InvalidArgument, LaunchPool, R2cclError, TransportTimeout
from r2ccl.bootstrap.rank_server import RankOutcome

WAIT_S = 30.0


class NotMinded(Exception):
    """Local to this module, which the ranks import."""


@pytest.fixture(scope="module")
def pool() -> Iterator[LaunchPool]:
    """Make a pool in a thread that has ended when the pool is used."""
    made: list[LaunchPool] = []
    thread = threading.Thread(target=lambda: made.append(r2ccl.launch_pool(2)))
    thread.start()
    thread.join()
    with made[0]:
        yield made[0]
        assert made[0].run(by_rank, timeout_s=WAIT_S) == [0, 1]  # no test has ended it


def by_rank(comm: r2ccl.Communicator) -> int:
    return comm.rank


def process_id(comm: r2ccl.Communicator) -> int:
    return os.getpid()


def total(comm: r2ccl.Communicator, x: Any) -> float:
    return float(comm.allreduce(np.array([x], np.float64))[0])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def await_true(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_calls_share_processes_and_communicators(pool: LaunchPool) -> None:
    who = [pool.run(lambda comm: (os.getpid(), id(comm)), timeout_s=WAIT_S) for _ in range(2)]
    assert who[0] == who[1]
    assert len({pid for pid, _ in who[0]} | {os.getpid()}) == 3
    factor = 3
    assert pool.run(lambda comm, x: total(comm, x) * factor, 2.0, timeout_s=WAIT_S) == [12.0, 12.0]


def test_a_large_argument_reaches_every_rank(pool: LaunchPool) -> None:
    x = np.arange(1 << 20)
    sums = pool.run(lambda comm, x: int(x.sum()), x, timeout_s=WAIT_S)
    assert sums == [int(x.sum())] * 2


def test_an_exception_of_all_ranks_leaves_the_pool(pool: LaunchPool) -> None:
    def fails(comm: r2ccl.Communicator) -> None:
        raise NotMinded(comm.rank)

    with pytest.raises(NotMinded) as caught:
        pool.run(fails, timeout_s=WAIT_S)
    rank = caught.value.args[0]
    assert f"rank {rank}:" in str(caught.value.__cause__)
    note = f"ranks [0, 1] raised errors; this is the error of rank {rank}"
    assert caught.value.__notes__ == [note]
    assert pool.run(by_rank, timeout_s=WAIT_S) == [0, 1]


def test_an_exception_of_one_rank_leaves_the_pool_too(pool: LaunchPool) -> None:
    with pytest.raises(ZeroDivisionError):
        pool.run(lambda comm: 1 // comm.rank, timeout_s=WAIT_S)
    assert pool.run(total, 1, timeout_s=WAIT_S) == [2.0, 2.0]


def test_an_interrupt_ends_the_call_and_not_the_pool(pool: LaunchPool, tmp_path: Path) -> None:
    def sleeps(comm: r2ccl.Communicator) -> None:
        (tmp_path / str(comm.rank)).touch()
        time.sleep(WAIT_S)

    def interrupt() -> None:
        await_true(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        pool.run(sleeps, timeout_s=WAIT_S)
    helper.join()
    assert pool.run(by_rank, timeout_s=WAIT_S) == [0, 1]


def test_what_cannot_be_sent_is_refused(pool: LaunchPool) -> None:
    with pytest.raises(InvalidArgument, match="cannot be sent to another process"):
        pool.run(lambda comm, lock: None, threading.Lock())
    with pytest.raises(InvalidArgument, match="belongs to the process that made it"):
        pool.run(lambda comm: pool.run(by_rank))


def test_a_result_that_cannot_be_sent_is_an_exception(pool: LaunchPool) -> None:
    with pytest.raises(InvalidArgument, match="the result of the function, of type lock, cannot"):
        pool.run(lambda comm: threading.Lock(), timeout_s=WAIT_S)


def test_an_exit_and_an_odd_result_leave_the_pool(pool: LaunchPool) -> None:
    with pytest.raises(R2cclError, match=r"rank . called sys.exit\(None\)"):
        pool.run(lambda comm: sys.exit(), timeout_s=WAIT_S)
    with pytest.raises(InvalidArgument, match="cannot be unpickled"):
        pool.run(lambda comm: UnicodeDecodeError.__new__(UnicodeDecodeError), timeout_s=WAIT_S)


def test_a_timeout_that_is_no_number_is_refused(pool: LaunchPool) -> None:
    with pytest.raises(InvalidArgument, match="launch_pool: timeout_s=nan: allowed is a number"):
        pool.run(by_rank, timeout_s=float("nan"))


def test_a_call_during_another_is_refused(pool: LaunchPool, tmp_path: Path) -> None:
    def waits(comm: r2ccl.Communicator) -> None:
        (tmp_path / f"in-{comm.rank}").touch()
        await_true((tmp_path / "go").exists)

    first = threading.Thread(target=lambda: pool.run(waits, timeout_s=WAIT_S))
    first.start()
    await_true(lambda: len(list(tmp_path.iterdir())) == 2)
    for call in (lambda: pool.run(by_rank), pool.close):
        with pytest.raises(ConcurrentCalls, match="while"):
            call()
    (tmp_path / "go").touch()
    first.join()


def test_lines_of_ranks_appear_where_the_caller_prints(
    pool: LaunchPool, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.run(lambda comm: print("here\nand", comm.rank, end=""), timeout_s=WAIT_S)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["[0] and 0", "[0] here", "[1] and 1", "[1] here"]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_neither_uses_nor_ends_a_pool(pool: LaunchPool) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            pool.close()
            pool.run(by_rank, timeout_s=WAIT_S)
        except R2cclError as exc:
            pool._finalizer()
            status = 0 if "forked" in str(exc) else 1
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert pool.run(by_rank, timeout_s=WAIT_S) == [0, 1]


def dies(comm: r2ccl.Communicator) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def leaves_the_others_waiting(comm: r2ccl.Communicator) -> None:
    if comm.rank == 1:
        raise NotMinded
    comm.barrier()


def is_late(comm: r2ccl.Communicator) -> None:
    time.sleep(WAIT_S * comm.rank)


def closes(comm: r2ccl.Communicator) -> None:
    comm.abort()
    raise NotMinded


ENDS = [
    (dies, R2cclError, "rank 1 exited"),
    (leaves_the_others_waiting, NotMinded, r"ranks \[0\] neither returned nor raised"),
    (is_late, TransportTimeout, r"ranks \[1\] neither returned nor raised"),
    (closes, NotMinded, "the communicator does not work any more"),
]


@pytest.mark.parametrize(("fn", "error", "why"), slow_but(ENDS[:2], ENDS))
def test_a_pool_that_cannot_go_on_says_why(
    fn: Callable[..., None],
    error: type[Exception],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("r2ccl.bootstrap.pool._GRACE_S", 0.5)
    pool = r2ccl.launch_pool(2)
    pids = pool.run(process_id)  # and imports this module, which may take long
    with pytest.raises(error) as caught:
        pool.run(fn, timeout_s=1.0 if fn is is_late else WAIT_S)
    assert "make a new one" in caught.value.__notes__[-1]
    with pytest.raises(R2cclError, match=why):
        pool.run(by_rank)
    assert not any(map(is_alive, pids))
    pool.close()


def test_a_timeout_of_many_ranks_names_some() -> None:
    pool = object.__new__(LaunchPool)
    pool.nranks = 300
    error = str(pool._failure({}, 1.0))
    assert "ranks [0, 1, 2, 3, 4, 5, 6, 7] and 292 more did not return within 1 s" in error


def test_a_check_that_does_not_end_has_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = object.__new__(LaunchPool)
    pool.nranks = 2
    monkeypatch.setattr(pool, "_send", lambda call: None)

    def gather(outcomes: dict[int, RankOutcome], until_s: float) -> None:
        outcomes[0] = RankOutcome()

    monkeypatch.setattr(pool, "_gather", gather)
    why = pool._why_unusable({0: RankOutcome(), 1: RankOutcome(error=NotMinded())})
    assert "(ranks [1] did not finish a barrier within" in why


def test_ranks_end_with_a_pool_that_is_forgotten() -> None:
    pool = r2ccl.launch_pool(1)
    (pid,) = pool.run(lambda comm: os.getpid(), timeout_s=WAIT_S)
    assert is_alive(pid)
    del pool
    gc.collect()
    await_true(lambda: not is_alive(pid))


def test_a_setting_that_cannot_be_sent_hides_the_secret() -> None:
    with pytest.raises(InvalidArgument, match=r"init\(.*'\*\*\*'.* cannot be sent") as caught:
        r2ccl.launch_pool(1, secret="5e" * 32, faults=threading.Lock())
    assert "5e5e" not in str(caught.value)


def test_a_wrong_setting_is_reported_by_the_pool() -> None:
    with pytest.raises(InvalidArgument, match="mode"):
        r2ccl.launch_pool(1, mode="nonsense")

"""A function runs on Dask workers as ranks of a communicator."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("distributed")

from interop.dask_functions import (
    fail_on_rank_1,
    length_of,
    lose_rank_2,
    lose_result_of_rank_2,
    set_variable,
    timeout_of,
    total,
)

from r2ccl import CommunicatorRevoked, InvalidArgument, R2cclError, TransportTimeout
from r2ccl.interop.dask import run

pytestmark = [
    # Dask leaves sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(300),
]


def left_on_scheduler(dask_scheduler: Any) -> list[str]:
    names = [*dask_scheduler.extensions["variables"].variables]
    names += [*dask_scheduler.extensions["queues"].queues]
    names += [str(key) for key in dask_scheduler.tasks]
    return [name for name in names if "r2ccl" in name]


def wait_for_workers(client: Any) -> list[str]:
    client.wait_for_workers(3, timeout=60)
    return sorted(client.nthreads())


def test_each_worker_is_a_rank(dask_client: Any) -> None:
    workers = wait_for_workers(dask_client)
    assert run(dask_client, total, 1000) == dict.fromkeys(workers, 6.0)


def test_workers_are_ranks_in_the_order_given(dask_client: Any) -> None:
    workers = wait_for_workers(dask_client)[::-1][:2]
    found = run(dask_client, total, 10, workers=workers)
    assert list(found.items()) == [(each, 3.0) for each in workers]


def test_settings_reach_the_communicator(dask_client: Any) -> None:
    wait_for_workers(dask_client)
    assert set(run(dask_client, timeout_of, timeout_s=77.0).values()) == {77.0}


@pytest.fixture
def submitted(dask_client: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts of the arguments of the tasks that are submitted meanwhile, as Dask logs them."""
    shown, submit = [], dask_client.submit

    def record(*args: Any, **keywords: Any) -> Any:
        shown.append(repr((args, keywords)))
        return submit(*args, **keywords)

    monkeypatch.setattr(dask_client, "submit", record)
    return shown


def test_arguments_of_the_tasks_do_not_show_the_secret(
    dask_client: Any, submitted: list[str]
) -> None:
    wait_for_workers(dask_client)
    secret = "5ec7" * 16
    assert set(run(dask_client, length_of, secret, secret=secret).values()) == {len(secret)}
    assert len(submitted) == 3
    for each in submitted:
        assert "<settings: secret>" in each
        assert "<argument: str>" in each
        assert secret not in each


def test_futures_among_the_arguments_are_resolved(dask_client: Any) -> None:
    wait_for_workers(dask_client)
    count = dask_client.submit(int, "10")
    assert set(run(dask_client, total, count).values()) == {6.0}


def test_nothing_is_left_on_the_scheduler(dask_client: Any) -> None:
    wait_for_workers(dask_client)
    run(dask_client, total, 10)
    deadline_s = time.monotonic() + 30
    while left := dask_client.run_on_scheduler(left_on_scheduler):
        assert time.monotonic() < deadline_s, left


def test_the_cause_is_raised_not_its_consequences(dask_client: Any) -> None:
    wait_for_workers(dask_client)
    with pytest.raises(KeyError, match="of rank 1"):
        run(dask_client, fail_on_rank_1)
    found = list(run(dask_client, fail_on_rank_1, on_error="return").values())
    assert list(map(type, found)) == [CommunicatorRevoked, KeyError, CommunicatorRevoked]


def test_the_others_continue_without_a_lost_worker(dask_client: Any) -> None:
    workers = wait_for_workers(dask_client)
    found = list(run(dask_client, lose_rank_2, on_error="return").values())
    assert found[:2] == [("PeerLost", 3.0)] * 2
    assert isinstance(found[2], R2cclError)
    assert f"rank 2 (worker {workers[2]}) left" in str(found[2])
    assert set(run(dask_client, total, 10, workers=wait_for_workers(dask_client)).values()) == {6.0}


def test_a_result_lost_with_its_worker_is_reported(dask_client: Any) -> None:
    workers = wait_for_workers(dask_client)
    found = list(run(dask_client, lose_result_of_rank_2, on_error="return").values())
    assert found[:2] == [0, 1]
    assert f"rank 2 (worker {workers[2]}) left" in str(found[2])


def test_wrong_settings_of_a_worker_are_the_cause(dask_client: Any) -> None:
    workers = wait_for_workers(dask_client)
    dask_client.run(set_variable, "R2CC_TIMEOUT_S", "soon", workers=workers[1:2])
    try:
        with pytest.raises(InvalidArgument, match="R2CC_TIMEOUT_S"):
            run(dask_client, total, 10, init_timeout_s=2.0)
    finally:
        dask_client.run(set_variable, "R2CC_TIMEOUT_S", None, workers=workers[1:2])


def test_a_worker_without_a_free_thread_is_named(dask_client: Any) -> None:
    workers = wait_for_workers(dask_client)
    busy = dask_client.submit(time.sleep, 8, workers=[workers[1]], pure=False)
    with pytest.raises(TransportTimeout, match="rank 1 did not start"):
        run(dask_client, total, 10, init_timeout_s=2.0)
    busy.result()


@pytest.mark.parametrize("workers", [[], ["tcp://127.0.0.1:1"], None])
def test_wrong_workers_are_refused(dask_client: Any, workers: list[str] | None) -> None:
    given = [wait_for_workers(dask_client)[0]] * 2 if workers is None else workers
    with pytest.raises(InvalidArgument, match="name at least one worker"):
        run(dask_client, total, 10, workers=given)

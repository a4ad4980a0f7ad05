"""Communicators of Ray actors, also when actors die, and the backend of ray.util.collective."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

import ray
import ray.util.collective as collective
from ray.exceptions import RayTaskError

from r2ccl import InvalidArgument, PeerLost, TransportError, TransportTimeout

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    # Ray leaves files and sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(300),
]
WAIT_S = 100


@pytest.fixture
def start(ray_cluster: Path) -> Iterator[Any]:
    """Yield a function that starts actors; end them."""
    from interop.ray_actors import Rank

    started: list[Any] = []

    def start_actors(n: int, node: int = 2) -> list[Any]:
        started.extend(
            Rank.options(resources={f"node{node}": 1}).remote()  # type: ignore[attr-defined]
            for _ in range(n)
        )
        return started[-n:]

    yield start_actors
    for each in started:
        ray.kill(each)


def get(calls: list[Any]) -> list[Any]:
    return list(ray.get(calls, timeout=WAIT_S))


def error_of(call: Any) -> BaseException:
    with pytest.raises(RayTaskError) as caught:
        ray.get(call, timeout=WAIT_S)
    cause: BaseException = caught.value.cause
    return cause


def test_a_group_name_is_used_again_at_once(start: Any) -> None:
    actors = start(3)
    for _ in range(5):
        assert get([each.join.remote(3, rank) for rank, each in enumerate(actors)]) == [6.0] * 3
    get([each.close.remote() for each in actors])
    assert ray.util.list_named_actors() == []


def test_actors_of_two_nodes_use_the_address_in_ray(start: Any) -> None:
    actors = start(1, node=3) + start(1, node=2)
    offers = get([each.offer_when_joining.remote(2, rank) for rank, each in enumerate(actors)])
    assert offers[0] == offers[1]
    assert offers[0][0] == "127.0.0.3"


def test_no_process_and_no_log_shows_the_secret(start: Any, ray_cluster: Path) -> None:
    actors = start(2)
    offers = get([each.offer_when_joining.remote(2, rank) for rank, each in enumerate(actors)])
    secret = offers[0][2].encode()
    assert len(secret) == 64
    pids = get([each.pid.remote() for each in actors])
    shown = [Path(f"/proc/{pid}/{name}") for pid in pids for name in ("environ", "cmdline")]
    logs = [each for each in ray_cluster.rglob("logs/**/*") if each.is_file()]
    assert len(logs) > 2
    for path in (*shown, *logs):
        assert secret not in path.read_bytes(), path


def test_survivors_of_a_killed_actor_shrink(start: Any) -> None:
    actors = start(3)
    get([each.join.remote(3, rank) for rank, each in enumerate(actors)])
    ray.kill(actors[2])
    survivors = get([each.total_of_survivors.remote() for each in actors[:2]])
    assert survivors == [("PeerLost", 3.0, 2)] * 2
    replaced = [*actors[:2], *start(1)]
    assert get([each.join.remote(3, rank) for rank, each in enumerate(replaced)]) == [6.0] * 3


def test_an_actor_that_does_not_join_is_named(start: Any) -> None:
    actors = start(2)
    joins = [each.join.remote(3, rank, init_timeout_s=3) for rank, each in enumerate(actors)]
    errors = [error_of(each) for each in joins]
    assert isinstance(errors[0], TransportTimeout)
    assert "rank 2 did not call join()" in str(errors[0])
    assert isinstance(errors[1], TransportError)


def test_a_value_that_arrives_as_the_timer_fires_counts() -> None:
    from r2ccl.interop.ray.rendezvous import ExchangeActor

    async def exchange() -> list[Any]:
        actor = ExchangeActor(2)

        async def pass_later() -> Any:
            await asyncio.sleep(0)  # the timer of rank 0 fires; rank 0 has not run since
            return await actor.exchange(1, 1, "b", 1.0)

        return await asyncio.gather(actor.exchange(1, 0, "a", 0.0), pass_later())

    assert asyncio.run(exchange()) == [(["a", "b"], [])] * 2


def test_an_ending_group_registers_no_rank(start: Any) -> None:
    from r2ccl.interop.ray.rendezvous import ExchangeActor

    ending = ray.remote(ExchangeActor).options(name="r2ccl-g", num_cpus=0).remote(2)
    try:
        ray.get(ending.close.remote(), timeout=WAIT_S)
        [actor] = start(1)
        # The group that follows has another number of ranks.
        error = error_of(actor.join.remote(3, 1, init_timeout_s=3))
        assert isinstance(error, TransportTimeout)
        assert "rank 0 did not call join()" in str(error)
    finally:
        ray.kill(ending)


def test_the_end_of_rank_0_ends_the_others(start: Any) -> None:
    actors = start(2)
    get([each.pid.remote() for each in actors])
    joins = [each.join.remote(3, rank, init_timeout_s=20) for rank, each in enumerate(actors)]
    while not ray.util.list_named_actors():
        assert ray.wait(joins, timeout=0.1)[0] == []
    ray.kill(actors[0])
    error = error_of(joins[1])
    # Rank 1 looks for a new rank 0 if it had not found the first one yet.
    assert isinstance(error, TransportError)
    assert "rank 0" in str(error)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ((3, 0), "another actor is rank 0"),
        ((3, 1), "another actor has joined as rank 1"),
        ((4, 2), "world_size=4 on rank 2, but 3 on rank 0"),
    ],
)
def test_wrong_ranks_are_reported(start: Any, wrong: tuple[int, int], says: str) -> None:
    actors = start(3)
    get([each.pid.remote() for each in actors])
    places = [(3, 0), (3, 1), wrong]
    joins = [
        each.join.remote(*place, init_timeout_s=10)
        for each, place in zip(actors, places, strict=True)
    ]
    errors = [error_of(each) for each in joins]
    assert all(isinstance(each, (TransportError, InvalidArgument)) for each in errors)
    assert any(says in str(each) for each in errors), errors


def test_a_rank_beyond_the_group_is_refused(start: Any) -> None:
    [actor] = start(1)
    error = error_of(actor.join.remote(2, 2))
    assert isinstance(error, InvalidArgument)
    assert "rank=2 of world_size=2" in str(error)


@pytest.mark.parametrize("is_declared", [False, True])
def test_the_backend_computes_what_numpy_computes(start: Any, is_declared: bool) -> None:
    import r2ccl.interop.ray  # noqa: F401

    actors = start(3)
    if is_declared:
        collective.create_collective_group(actors, 3, [0, 1, 2], backend="r2ccl", group_name="c")
    calls = [
        each.use_backend.remote(3, rank, is_declared=is_declared)
        for rank, each in enumerate(actors)
    ]
    inputs = np.stack([np.arange(6.0).reshape(2, 3) + rank + 1 for rank in range(3)])
    for rank, got in enumerate(get(calls)):
        for name, function in {"SUM": np.sum, "PRODUCT": np.prod, "MIN": np.min}.items():
            np.testing.assert_array_equal(got[f"allreduce {name}"], function(inputs, axis=0))
        np.testing.assert_array_equal(got["allreduce MAX"], inputs.max(axis=0))
        assert got["reduce"].tolist() == [6.0 if rank == 1 else rank + 1.0] * 5
        assert got["broadcast"].tolist() == [3.0] * 5
        assert [each.tolist() for each in got["allgather"]] == [[[r] * 2] * 2 for r in range(3)]
        assert got["reducescatter"].tolist() == [[30.0 * rank + 3]] * 3
        assert got["recv"].tolist() == [7.0 if rank == 2 else 0.0] * 4


def test_errors_reach_the_driver(start: Any) -> None:
    actors = start(2)
    get([each.join.remote(2, rank) for rank, each in enumerate(actors)])
    ray.kill(actors[1])
    assert isinstance(error_of(actors[0].total.remote()), PeerLost)

"""The executor on links that work: every program, order, operation and size gives its result."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st
from support.datapaths import DataPath
from support.slow import given

from r2ccl import kernels
from r2ccl.algos import recursive_doubling, ring
from r2ccl.config import Config
from r2ccl.dtypes import CODES
from r2ccl.planning.lowering import lower
from r2ccl.runtime.executor import HostCall, LandingPool, LaneRun
from r2ccl.schedule.ir import Cost, Op, OpKind, Schedule, Space
from r2ccl.testing.simulation.network import SimNetwork, Timeline
from r2ccl.testing.simulation.transport import SimTransport
from r2ccl.types import ReduceOp

Array = npt.NDArray[Any]


class NoControl:
    """A control plane that is never needed."""

    neighbors: frozenset[int] = frozenset()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


def allocate(nbytes: int) -> Any:
    return np.empty(nbytes, np.uint8)


class Group:
    """Ranks joined by a simulated network on which nothing fails."""

    def __init__(self, nranks: int, seed: int = 0, **settings: Any) -> None:
        self.config = Config(**settings)
        self.timeline = Timeline(seed)
        network = SimNetwork(self.timeline, nranks, 2)
        self.transports = [SimTransport(network, rank) for rank in range(nranks)]
        self.ranks = [
            DataPath(
                rank,
                nranks,
                transport=self.transports[rank],
                control=NoControl(),
                config=self.config,
                clock=self.timeline,
            )
            for rank in range(nranks)
        ]
        self.pools = [LandingPool(allocate, self.config.landing_depth) for _ in range(nranks)]
        for wire in network.wires.values():
            for rank, end in zip(wire.pair, network.connect(wire), strict=True):
                self.ranks[rank].migration.on_opened(end.path.peer, wire.rail, 0, end)

    def run(
        self,
        schedule: Schedule,
        sources: list[Array],
        outputs: list[Array],
        reduce: Callable[..., Any] = np.add,
        finish: Callable[[Array], Any] | None = None,
    ) -> None:
        runs = []
        for rank, path in enumerate(self.ranks):
            progress, calls = path.progress, path.links.calls_of(0)
            layout = lower(
                schedule.program(rank),
                sources[rank].size,
                sources[rank].itemsize,
                slice_nbytes=self.config.slice_nbytes,
                eager_nbytes=self.config.eager_nbytes,
            )
            path.links.begin(calls, 7)
            call = HostCall(layout, sources[rank], outputs[rank], reduce, finish)
            mine = [LaneRun(lane, call, path.links, self.pools[rank]) for lane in layout.lanes]
            calls.consumers = dict(enumerate(mine))
            for run in mine:
                run.advance()
            progress.advance()
            runs += mine
        for _ in range(100_000):
            for path in self.ranks:
                path.progress.step()
            if not any(run.remaining for run in runs):
                break
            assert self.timeline.step() or any(p.progress.step() for p in self.ranks), (
                "nothing moves"
            )
        for path in self.ranks:
            path.progress.finish(path.links.calls_of(0))


def data(nranks: int, count: int, dtype: str = "float32") -> list[Array]:
    random = np.random.default_rng(count)
    return [(random.standard_normal(count) * 100).astype(dtype) for _ in range(nranks)]


@given(
    20,
    60,
    st.integers(1, 5),
    st.integers(0, 200),
    st.integers(1, 3),
    st.sampled_from([4, 20, 64, 1_000]),
    st.sampled_from([0, 8, 64, 1_000]),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1_000),
)
def test_allreduce_is_the_sum(
    nranks: int,
    count: int,
    nchannels: int,
    slice_nbytes: int,
    eager_nbytes: int,
    depth: int,
    is_ring: bool,
    is_in_place: bool,
    seed: int,
) -> None:
    make = ring.allreduce if is_ring else recursive_doubling.allreduce
    group = Group(
        nranks,
        seed,
        slice_nbytes=slice_nbytes,
        eager_nbytes=eager_nbytes,
        landing_depth=depth,
        eager_slots=2,
    )
    sources = data(nranks, count, "int64")
    expected = np.sum(sources, axis=0)
    kept = [source.copy() for source in sources]
    outputs = sources if is_in_place else [np.empty_like(source) for source in sources]
    for _ in range(2):
        group.run(make(nranks, nchannels), sources, outputs)
        for output in outputs:
            np.testing.assert_array_equal(output, expected)
        if is_in_place:
            expected = expected * nranks
        else:
            np.testing.assert_array_equal(sources, kept)


@pytest.mark.parametrize("algorithm", [ring, recursive_doubling])
@pytest.mark.parametrize("eager_nbytes", [0, 1_000])
def test_operands_keep_their_sides(algorithm: Any, eager_nbytes: int) -> None:
    """With an operation that is associative but does not commute, ranks still agree."""
    sides = []

    def first(left: Array, right: Array, out: Array) -> None:
        sides.append((left.copy(), right.copy()))
        out[:] = left

    group = Group(4, slice_nbytes=16, eager_nbytes=eager_nbytes)
    sources = [np.full(8, rank, np.int32) for rank in range(4)]
    outputs = [np.empty_like(source) for source in sources]
    group.run(algorithm.allreduce(4), sources, outputs, first)
    for output in outputs[1:]:
        np.testing.assert_array_equal(output, outputs[0])
    if algorithm is recursive_doubling:
        assert all((left < right).all() for left, right in sides)
        np.testing.assert_array_equal(outputs[0], 0)


@pytest.mark.parametrize("algorithm", [ring, recursive_doubling])
@pytest.mark.parametrize("nranks", [1, 2, 3, 4])
def test_avg_divides_every_element_once(algorithm: Any, nranks: int) -> None:
    group = Group(nranks, slice_nbytes=16, eager_nbytes=0)
    sources = data(nranks, 37, "float64")
    outputs = [np.empty_like(source) for source in sources]
    code = CODES[np.dtype("float64")]
    group.run(
        algorithm.allreduce(nranks, 2),
        sources,
        outputs,
        kernels.reducer(code, ReduceOp.AVG),
        kernels.divider(code, nranks),
    )
    for output in outputs:
        np.testing.assert_allclose(output, np.mean(sources, axis=0))


def test_local_ops_and_scratch() -> None:
    ops = (
        Op(OpKind.COPY, -1, Space.INPUT, 0, Space.SCRATCH, 0),
        Op(OpKind.COPY, -1, Space.INPUT, 0, Space.OUTPUT, 0),
        Op(OpKind.REDUCE, -1, Space.SCRATCH, 0, Space.OUTPUT, 0, (0, 1), True),
    )
    schedule = Schedule(
        name="local",
        collective="allreduce",
        nranks=1,
        nchunks=(1,),
        cost=Cost(0, 0, 0, 3),  # type: ignore[arg-type]
        generate=lambda rank: (ops,),
    )
    source, output = np.arange(10.0), np.zeros(10)
    Group(1).run(schedule, [source], [output], finish=lambda out: np.negative(out, out=out))
    np.testing.assert_array_equal(output, -2 * np.arange(10.0))


@pytest.mark.parametrize("depth", [1, 3])
def test_landing_places_under_way_are_bounded_by_the_depth(depth: int) -> None:
    group = Group(3, slice_nbytes=8, eager_nbytes=0, landing_depth=depth)
    most = 0
    original = group.ranks[0].links.recv

    def recv(link: Any, region: Any, consumer: Any, index: int, is_last: bool) -> None:
        nonlocal most
        original(link, region, consumer, index, is_last)
        most = max(most, len(link.landings))

    group.ranks[0].links.recv = recv  # type: ignore[method-assign]
    sources = data(3, 300)
    group.run(ring.allreduce(3), sources, sources)
    assert most == depth


def test_landing_places_are_kept_from_call_to_call() -> None:
    group = Group(2, slice_nbytes=32, eager_nbytes=0, landing_depth=2)
    sources = data(2, 100)
    for _ in range(3):
        group.run(ring.allreduce(2, 2), sources, sources)
    for pool in group.pools:
        assert sum(map(len, pool._free.values())) <= 2 * 2


def test_pool_returns_what_it_was_given_first() -> None:
    pool = LandingPool(allocate, 2)
    place = pool.take(100)
    assert place.nbytes == 128
    pool.give(place)
    assert pool.take(50) is not place
    assert pool.take(110) is place
    assert pool.take(100) is not place
    assert pool.nbytes == 128 + 64 + 128

"""Which schedule a call runs: alike on all ranks, and what is expected to end first."""

from __future__ import annotations

from fractions import Fraction

import msgspec
import pytest
from hypothesis import strategies as st
from support import slow
from support.healths import health

from r2ccl.algos import optcc, tree
from r2ccl.algos.packed_trees import lower_bound
from r2ccl.config import ALGOS, Config
from r2ccl.failover.health.table import WHOLE, Health, RailShare
from r2ccl.planning.cost_model import UNMEASURED, Choice, Fabric, Rates
from r2ccl.planning.placement import port_time
from r2ccl.planning.planner import Planner
from r2ccl.schedule.check import check
from r2ccl.types import PAIRWISE, ROOTED, CallSignature, Collective, ReduceOp

MIB = 1 << 20
RATES = Rates(100_000, 25_000_000)
#: Nodes 0 and 1 have no common rail.
APART = health(4, 2, r0n0=0, r1n1=0)


def call(collective: Collective, root: int = 0) -> CallSignature:
    return CallSignature(collective, 0, ReduceOp.SUM, 0, root)


def choose(
    nbytes: int,
    of: Health,
    collective: Collective = Collective.ALLREDUCE,
    root: int = 0,
    algo: str = "ring",
    mode: str = "auto",
) -> Choice:
    fabric = Fabric(range(of.nrails), of.nrails, (), RATES)
    return Planner(fabric, Config(algo=algo, mode=mode)).plan(call(collective, root), nbytes, of)


@pytest.mark.parametrize("collective", Collective)
@pytest.mark.parametrize("nbytes", [0, 1000, 1 << 26])
@pytest.mark.parametrize("nranks", [1, 2, 5])
def test_there_is_a_schedule_for_every_call(
    collective: Collective, nbytes: int, nranks: int
) -> None:
    schedule = choose(nbytes, health(nranks, 3), collective, nranks - 1).schedule
    check(schedule)
    computes = "allreduce" if collective is Collective.BARRIER else collective.name.lower()
    computes = computes.removesuffix("v") if collective in PAIRWISE else computes
    assert (schedule.collective, schedule.nranks) == (computes, nranks)
    assert schedule.root == (nranks - 1 if collective in ROOTED else 0)


def test_small_data_takes_few_steps_and_large_data_is_sent_once() -> None:
    for collective in (Collective.BROADCAST, Collective.REDUCE):
        small = choose(1000, health(16, 3), collective, 3).schedule.cost
        large = choose(1 << 26, health(16, 3), collective, 3).schedule.cost
        assert small.steps <= 5 < large.steps
        assert large.sent <= 1 < max(small.sent, small.received)


def test_channels_are_as_many_as_the_data_is_worth() -> None:
    counts = [
        choose(nbytes, health(4, 3), Collective.BROADCAST).schedule.nchannels
        for nbytes in (1000, 1 << 19, 1 << 26)
    ]
    assert counts == [1, 2, 6]


@slow.given(15, 40, st.data())
def test_what_was_asked_before_changes_no_choice(data: st.DataObject) -> None:
    """`explain` is local: a rank that calls it plans as the others do."""
    nodes = data.draw(st.sampled_from([(0, 1, 2), (0, 1, 2, 0, 1), (0, 0, 1, 1, 2, 2)]))
    row = st.tuples(*[st.sampled_from([0, 16])] * 2)
    rows = data.draw(st.tuples(*[row] * 3))
    of = Health(1, 2, bytes(share for node in nodes for share in rows[node]))
    fabric = Fabric(range(2), 2, nodes if len(nodes) > 3 else (), RATES)
    fresh, used = (Planner(fabric, Config()) for _ in range(2))
    for nbytes in data.draw(st.lists(st.sampled_from([100, 128 << 10, MIB, 64 * MIB]), max_size=3)):
        used.explain(nbytes, of)
    collective = data.draw(st.sampled_from(Collective))
    nbytes = data.draw(st.sampled_from([100, 128 << 10, MIB, 64 * MIB]))
    for is_bandwidth_sample in (False, True):
        one, other = (
            planner.plan(call(collective, 1), nbytes, of, is_bandwidth_sample=is_bandwidth_sample)
            for planner in (fresh, used)
        )
        assert (one.placement, one.slice_nbytes) == (other.placement, other.slice_nbytes)
        assert one.schedule.nchunks == other.schedule.nchunks


def test_several_ranks_a_node_measure_rails_with_a_flat_ring() -> None:
    nodes = [0, 0, 1, 1, 2, 2, 3, 3]
    of = health(8, 4, r0n0=0, r0n1=0)
    planner = Planner(Fabric(range(4), 4, nodes, RATES), Config())
    assert not planner.plan(call(Collective.ALLREDUCE), 64 * MIB, of).is_bandwidth_sample
    choice = planner.plan(call(Collective.ALLREDUCE), 64 * MIB, of, is_bandwidth_sample=True)
    assert choice.is_bandwidth_sample


@pytest.mark.parametrize(
    ("nwires", "nodes"), [(4, ()), (1, ()), (4, (0, 0, 1, 1, 2, 2, 3, 3)), (1, (0, 0, 1, 1))]
)
@pytest.mark.parametrize("nbytes", [100, 64 * MIB])
def test_an_excluded_rail_is_planned_as_a_lost_one(
    nwires: int, nodes: tuple[int, ...], nbytes: int
) -> None:
    whole = health(len(nodes) or 4)
    fabric = Fabric(range(4), nwires, nodes, RATES)
    for collective in (Collective.ALLREDUCE, Collective.BROADCAST, Collective.ALLGATHER):
        one, other = (
            Planner(fabric, Config()).plan(call(collective), nbytes, of)
            for of in (whole.changed((), [(1, 2)]), whole.changed([RailShare(1, 2, 0)]))
        )
        assert (one.placement, one.slice_nbytes) == (other.placement, other.slice_nbytes)
        assert one.schedule.nchunks == other.schedule.nchunks


def test_small_parted_calls_have_one_channel_whatever_is_lost() -> None:
    for collective in (Collective.ALLGATHER, Collective.REDUCE_SCATTER):
        for of in (health(), health(r0n1=0), health(r0n1=4, r1n2=0)):
            assert choose(256, of, collective, algo="auto").schedule.nchannels == 1


@pytest.mark.parametrize("algo", ALGOS)
def test_the_named_schedule_runs_where_it_applies(algo: str) -> None:
    whole = {
        "tree": "double_binary_tree", "auto": "ring", "bridged_ring": "ring", "r2cc": "ring",
        "optcc": "ring",
    }  # fmt: skip
    assert choose(64 * MIB, health(), algo=algo).schedule.name == whole.get(algo, algo)
    assert choose(1000, health(), algo=algo).schedule.name == "recursive_doubling"
    lost = choose(64 * MIB, health(r1n0=0), algo=algo).schedule.name
    expected = {"tree": "double_binary_tree", "auto": "packed_trees", "bridged_ring": "ring"}
    assert lost == expected.get(algo, algo)


def test_modes_bound_the_choice() -> None:
    lost = health(r1n0=0)
    chosen = {
        mode: choose(64 * MIB, lost, algo="auto", mode=mode)
        for mode in ("0", "1", "2", "3", "auto")
    }
    names = {mode: choice.schedule.name for mode, choice in chosen.items()}
    assert names == {"0": "ring", "1": "ring", "2": "ring", "3": "r2cc", "auto": "packed_trees"}
    slow = health(r1n0=4)
    assert len(set(choose(64 * MIB, slow, algo="auto", mode="migrate").placement.weights)) == 1
    assert len(set(choose(64 * MIB, slow, algo="auto", mode="balance").placement.weights)) == 2


def test_rails_that_are_one_wire_lose_no_bandwidth() -> None:
    fabric = Fabric(range(4), 1, (), RATES, is_loopback=True)
    sum_ = call(Collective.ALLREDUCE)
    for of in (health(), health(r1n0=0)):
        assert Planner(fabric, Config()).plan(sum_, 64 * MIB, of).schedule.name == "ring"


def test_now_and_then_a_ring_shows_what_the_rails_carry() -> None:
    fabric = Fabric(range(4), 4, (), RATES)
    sum_, lost = call(Collective.ALLREDUCE), health(r1n0=0)
    choice = Planner(fabric, Config()).plan(sum_, 64 * MIB, lost, is_bandwidth_sample=True)
    assert choice.schedule.name == "ring"
    named = Config(algo="packed_trees")
    kept = Planner(fabric, named).plan(sum_, 64 * MIB, lost, is_bandwidth_sample=True)
    assert kept.schedule.name == "packed_trees"


@pytest.mark.parametrize(
    ("alpha_ns", "nbytes", "name"),
    [(1, 64 * MIB, "ring"), (10**6, 64 * MIB, "ring"), (10**6, 128 << 10, "dissemination")],
)
def test_latency_decides_for_little_data_and_bandwidth_for_much(
    alpha_ns: int, nbytes: int, name: str
) -> None:
    fabric = Fabric(range(4), 4, (), Rates(alpha_ns, 25_000_000))
    found = Planner(fabric, Config()).plan(call(Collective.ALLREDUCE), nbytes, health(8))
    assert found.schedule.name == name


@pytest.mark.parametrize(("nbytes", "name"), [(128 << 10, "dissemination"), (64 * MIB, "ring")])
def test_schedules_compete_on_a_single_rail_per_node(nbytes: int, name: str) -> None:
    planner = Planner(Fabric(range(1), 1, (), Rates(10**6, 25_000_000)), Config())
    assert planner.allreduce(nbytes, health(16, 1)).name == name
    looped = planner.fabric._replace(is_loopback=True)
    assert Planner(looped, Config()).allreduce(nbytes, health(16, 1)).name == "ring"


def test_the_prediction_is_the_load_of_the_busiest_port() -> None:
    fabric = Fabric(range(4), 4, (), Rates(1000, 25_000_000))
    chosen = {
        mode: Planner(fabric, Config(mode=mode)).plan(
            call(Collective.ALLREDUCE), 64 * MIB, health(r1n0=0)
        )
        for mode in ("2", "auto")
    }
    ring_s, trees_s = (choice.predicted_ns / 1e9 for choice in chosen.values())
    assert ring_s == pytest.approx(1.5 * 64 * MIB / 3 / 25e6, rel=0.01), "the detour is counted"
    assert 0.4 * 64 * MIB / 25e6 <= trees_s <= 0.42 * 64 * MIB / 25e6


def test_rails_that_are_one_wire_carry_no_more_than_one() -> None:
    planner = Planner(Fabric(range(2), 1, (), RATES, is_loopback=True), Config())
    for of in (health(4, 2), health(4, 2, r0n1=0)):
        table = planner.explain(4 * MIB, of)
        loads = {each.name: each.load for each in (table.chosen, *table.others)}
        assert loads["ring"] == loads["dissemination"] == Fraction(3, 2)
        assert min(loads.values()) == Fraction(3, 2), "the bound of four whole ranks"


def test_rings_on_one_wire_share_it() -> None:
    fabric = Fabric(range(2), 1, (), RATES)
    for channels in (1, 2):
        planner = Planner(fabric, Config(channels=channels))
        found = planner.options(call(Collective.ALLGATHER), 4 * MIB, health(4, 2))
        found += planner.options(call(Collective.ALLTOALL), 4 * MIB, health(4, 2))
        assert {each.load for each in found} == {Fraction(3, 4)}


@pytest.mark.parametrize(
    "collective", [Collective.ALLREDUCE, Collective.ALLTOALL, Collective.SCAN, Collective.ALLGATHER]
)
def test_without_a_common_rail_the_time_is_unknown(collective: Collective) -> None:
    apart = health(2, 2, r0n0=0, r1n1=0)
    planner = Planner(Fabric(range(2), 2, (), RATES), Config())
    found = planner.options(call(collective), 64 * MIB, apart)
    assert not any(each.has_way or each.predicted_ns or each.load for each in found)
    why = planner.explain(64 * MIB, apart).why
    assert why.startswith("although some ranks that exchange data have no common home rail")
    assert "cannot run" not in why


def test_what_is_compared_can_be_read() -> None:
    fabric = Fabric(range(4), 4, (), RATES)
    said = Planner(fabric, Config()).explain(64 * MIB, health(r1n0=0))
    assert said.chosen.name == "packed_trees"
    times = [each.predicted_ns for each in said.others]
    assert times == sorted(times)
    assert {each.name for each in said.others} >= {"ring", "leaf_ring", "r2cc", "optcc"}
    assert "* packed_trees" in str(said)
    for config, why in (
        (Config(mode="balance"), "R2CC_MODE=balance"),
        (Config(algo="tree"), "R2CC_ALGO=tree"),
    ):
        assert why in str(Planner(fabric, config).explain(64 * MIB, health()))
    assert "eager" in str(Planner(fabric, Config()).explain(100, health()))
    assert "excluded" not in str(said)
    assert "all ranks share" not in str(said)
    assert "runs in memory that all ranks share" in str(said._replace(is_local=True))
    excluded = health().changed((), [(1, 0), (2, 3)])
    text = str(Planner(fabric, Config()).explain(64 * MIB, excluded))
    assert text.endswith("\n  excluded: rail 0 of rank 1, rail 3 of rank 2")


@pytest.mark.parametrize(
    ("nbytes", "of"), [(8 * MIB, health()), (40_000_008, health(r1n0=0))], ids=["whole", "lost"]
)
def test_slices_of_the_table_are_whole_elements(nbytes: int, of: Health) -> None:
    said = Planner(Fabric(range(4), 4, (), RATES), Config()).explain(nbytes, of)
    sizes = {each.slice_nbytes for each in (said.chosen, *said.others)}
    assert len(sizes) > 2
    assert all(size % 64 == 0 for size in sizes)


@pytest.mark.parametrize(
    ("named", "of", "reason"),
    [
        ({"algo": "optcc"}, health(), "ring, because R2CC_ALGO=optcc has no schedule for these"),
        ({"algo": "ring"}, APART, "packed_trees, because R2CC_ALGO=ring has no schedule for these"),
        ({"mode": "balance"}, APART, "packed_trees, because R2CC_MODE=balance has no schedule for"),
        ({}, APART, "packed_trees, because some nodes have no common home rail"),
    ],
)
def test_a_family_that_cannot_run_is_no_reason(
    named: dict[str, str], of: Health, reason: str
) -> None:
    fabric = Fabric(range(of.nrails), of.nrails, (), UNMEASURED)
    assert reason in str(Planner(fabric, Config(**named)).explain(8 * MIB, of))  # type: ignore[arg-type]


def test_a_schedule_of_the_users_own_is_placed_like_others() -> None:
    fabric = Fabric(range(4), 4, (), RATES)
    mine = Planner(fabric, Config()).own(
        optcc.allreduce([4, 4, 4, 3], 4, 4), 64 * MIB, health(r1n3=0)
    )
    assert all(edge.number % 4 != 1 for edge in mine.placement.edges if 3 in edge[1:3])


@pytest.mark.parametrize("name", ["mine", "ring", "chain", "direct"])
def test_slices_of_a_users_pipeline_do_not_follow_its_name(name: str) -> None:
    fabric = Fabric(range(4), 4, (), Rates(20_000, 10**9))
    lines = tree.allreduce([tree.line(16, 15)] * 4, "line")
    named = msgspec.structs.replace(lines, name=name)
    planner, whole = Planner(fabric, Config()), Health.whole(16, 4)
    wanted = planner.own(lines, 4 * MIB, whole).slice_nbytes
    assert planner.own(named, 4 * MIB, whole).slice_nbytes == wanted < MIB


def test_trees_leave_a_dead_port_alone_and_have_slices_enough() -> None:
    lost = choose(64 * MIB, health(r1n0=0), algo="packed_trees")
    assert lost.slice_nbytes < Config().slice_nbytes
    assert all(edge.number % 4 != 1 for edge in lost.placement.edges if 0 in edge[1:3])
    bound = lower_bound([48, 64, 64, 64])
    assert port_time(lost.schedule, lost.placement, range(4), health(r1n0=0)) <= bound * 21 / 20


@pytest.mark.parametrize(("nbytes", "most"), [(MIB, 4), (4 * MIB, 8), (16 * MIB, 16)])
def test_an_unmeasured_network_gets_few_large_slices(nbytes: int, most: int) -> None:
    planner = Planner(Fabric((0,), 1), Config())
    for collective in (Collective.BROADCAST, Collective.REDUCE):
        chosen = planner.plan(call(collective), nbytes, health(4, 1))
        assert -(-nbytes // chosen.slice_nbytes) <= most, collective


@slow.given(
    15, 50, st.lists(st.integers(0, WHOLE), min_size=12, max_size=12), st.sampled_from(ALGOS)
)
def test_every_health_gives_a_schedule_that_is_right(shares: list[int], algo: str) -> None:
    of = Health(1, 4, bytes(shares))
    first, again = (choose(8 * MIB, of, algo=algo) for _ in range(2))
    check(first.schedule)
    assert first.placement == again.placement
    assert len(first.placement.weights) == first.schedule.nchannels

"""Campaign of every fault on real sockets: each result is exact, nothing hangs.

R2CC_CAMPAIGN_RUNS sets the runs of each fault (default 2; `make campaign` 50); `make test` has one
job with one of each. Measurements are printed; the tests assert only exact results, and that every
planned fault occurred.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from support import matrix_programs
from support.slow import slow_but

from r2ccl.planning.two_level import count_chunks
from r2ccl.testing import Action, Fault, FaultPlan
from r2ccl.testing.netlab import Lab, unavailable_reason

REASON = unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no netlab here: {REASON}")

RUNS = int(os.environ.get("R2CC_CAMPAIGN_RUNS", "2"))
ROOT = Path(__file__).parents[2]
NODES, RAILS = 4, 4
NBYTES = 16 << 20
#: Slices a rank posts in one run: 12 channels, 6 sends each, of 2 slices.
STEPS = 140
#: Slices that a rank posts at least for a chunk in two levels: 6 channels, 2 sends of a slice each.
#: Half of them in collectives other than allreduce.
LEVEL_STEPS = 12
#: Node whose ranks send over the network, if only those of one do. The root is rank 0.
ONLY_SENDER = {"broadcast": 0, "reduce": 1}

#: Fields of each kind of fault, besides its place and moment.
KINDS: dict[Action, dict[str, Any]] = {
    Action.NIC_DOWN: {"duration_s": 0.4},
    Action.SWITCH_PORT_DOWN: {"duration_s": 0.4},
    Action.BLACKHOLE: {"duration_s": 1.2},
    Action.ISOLATE: {"duration_s": 1.2},
    Action.STOP: {"duration_s": 1.0},
    Action.SLOW: {"duration_s": 1.0, "rate": "20mbit"},
    # The last, because it may go on when its run is over.
    Action.FLAP: {"duration_s": 1.0, "mean_s": 0.1},
}
#: The fault of each run of a job, in this order: one of each kind, or all of one kind.
JOBS: dict[str, tuple[Action, ...]] = {
    "each kind once": tuple(KINDS),
    **{str(kind): (kind,) * RUNS for kind in KINDS},
}


def fault(
    kind: Action, run: int, rng: random.Random, nodes: int = NODES, rails: int = RAILS
) -> Fault:
    """Return the fault of one run: a random NIC at a random slice of the run's allreduce."""
    node, rail = rng.randrange(nodes), rng.randrange(rails)
    where: dict[str, Any] = {"node": node, "rail": rail}
    if kind is Action.STOP:
        where = {"rank": node}
    elif kind is Action.ISOLATE:
        where["peer"] = (node + 1) % nodes
    elif kind is Action.FLAP:
        where["seed"] = run
    step = rng.randrange(STEPS // 2 if nodes == NODES else nodes)
    return Fault(action=kind, at_op=2 * run, at_step=step, **where, **KINDS[kind])


def run_ranks(
    lab: Lab,
    program: str,
    *args: str,
    plan: FaultPlan,
    env: dict[str, str] | None = None,
    nruns: int = RUNS,
) -> list[dict[str, Any]]:
    """Run a program of this folder on every node; return the last line of each rank that ended."""
    script = Path(__file__).with_name(program)
    lines: list[str] = []
    results = lab.run(
        [sys.executable, str(script), *args],
        # Without quarantine, so that NICs can fail again and again. Rings only: faults occur at
        # slices that every operation must have.
        env={
            "PYTHONPATH": str(ROOT),
            "R2CC_MODE": "balance",
            "R2CC_QUARANTINE_CAP_S": "0",
            **(env or {}),
        },
        plan=plan,
        timeout_s=60 + 8 * nruns,
        sink=lines.append,
    )
    killed = [each for each in results if each.returncode == -9]
    expected = 1 if any(each.action is Action.KILL for each in plan.faults) else 0
    assert len(killed) == expected, "\n".join(lines)
    ended = [each for each in results if each not in killed]
    assert all(each.returncode == 0 for each in ended), "\n".join(lines)
    return [json.loads(each.output.strip().splitlines()[-1]) for each in ended]


@pytest.mark.parametrize("job", slow_but(["each kind once"], JOBS))
def test_results_are_exact(job: str) -> None:
    kinds = JOBS[job]
    draws = {kind: random.Random(kind.value) for kind in KINDS}
    runs = len(kinds)
    plan = FaultPlan([fault(kind, run, draws[kind]) for run, kind in enumerate(kinds, 1)])
    with Lab(nodes=NODES, rails=RAILS) as lab:
        reports = run_ranks(lab, "campaign_rank.py", str(runs), str(NBYTES), plan=plan, nruns=runs)
    plan.assert_all_fired()
    for kind in dict.fromkeys(kinds):
        print_repair_times(kind, plan, reports)
    assert [report["exact"] for report in reports] == [runs] * NODES
    for report in reports:
        for kind, (begun_s, ended_s) in zip(kinds, report["times"], strict=True):
            if kind in (Action.STOP, Action.SLOW):
                moved = [e for e in report["repairs"] if begun_s < e["failed_s"] < ended_s]
                assert not moved, "a slow peer is no reason to move"


#: The rank that sends slices in a call whatever its schedule: the root, or any but the root, with
#: a part of its own. In scan and exscan, rank 0 sends to the others.
FROM_ROOT, FROM_FIRST = ("broadcast", "scatter", "scatterv"), ("scan", "exscan")
#: Bytes of a part, and slices that this rank sends at least; in a barrier, one.
PART_NBYTES, PART_STEPS = 512 << 10, 6
COLLECTIVES = (*matrix_programs.COLLECTIVES, "barrier")


def lost_nics(runs: int) -> FaultPlan:
    """Return a plan in which a random NIC goes down in every call of `collectives_rank`."""
    rng, faults = random.Random(runs), []
    for call, (run, name) in enumerate(itertools.product(range(runs), COLLECTIVES)):
        root = run % NODES
        sender = root if name in FROM_ROOT else 0 if name in FROM_FIRST or root else NODES - 1
        where = {"node": rng.randrange(NODES), "rail": rng.randrange(2), "rank": sender}
        step = 0 if name == "barrier" else rng.randrange(PART_STEPS)
        faults.append(
            Fault(
                action=Action.NIC_DOWN, **where, at_op=2 * call, at_step=step,
                duration_s=rng.uniform(0.1, 0.4),
            )
        )  # fmt: skip
    return FaultPlan(faults)


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_every_collective_is_exact() -> None:
    runs = min(RUNS, 20)
    plan = lost_nics(runs)
    env = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "R2CC_MODE": "auto",
        "R2CC_SLICE_NBYTES": str(32 << 10),
    }
    with Lab(nodes=NODES, rails=2) as lab:
        reports = run_ranks(
            lab, "collectives_rank.py", str(runs), str(PART_NBYTES),
            plan=plan, env=env, nruns=len(plan.faults),
        )  # fmt: skip
    plan.assert_all_fired()
    for name in COLLECTIVES:
        nwrong = len(set().union(*(report["wrong"][name] for report in reports)))
        nrepairs = sum(report["nrepairs"][name] for report in reports)
        slowest_s = max(report["slowest_s"][name] for report in reports)
        text = f"{nrepairs} paths moved, at most {slowest_s:.2f} s"
        print(f"{name}: {runs - nwrong}/{runs} exact, {text}")
    nothing: dict[str, list[int]] = {name: [] for name in COLLECTIVES}
    assert [report["wrong"] for report in reports] == [nothing] * NODES
    assert all(sum(report["nrepairs"].values()) > 0 for report in reports)


@pytest.mark.slow
def test_results_are_exact_where_not_all_ranks_have_sessions() -> None:
    nodes, rails = 16, 2
    rng = random.Random(16)
    plan = FaultPlan([fault(Action.NIC_DOWN, run, rng, nodes, rails) for run in range(1, RUNS + 1)])
    with Lab(nodes=nodes, rails=rails) as lab:
        reports = run_ranks(lab, "campaign_rank.py", str(RUNS), str(NBYTES // 4), plan=plan)
    plan.assert_all_fired()
    print_repair_times(Action.NIC_DOWN, plan, reports)
    assert [report["exact"] for report in reports] == [RUNS] * nodes


@pytest.mark.parametrize("runs", slow_but([1], sorted({1, RUNS})))
def test_a_killed_rank_is_lost_on_every_survivor(runs: int) -> None:
    rng = random.Random(9)
    delays = []
    with Lab(nodes=NODES, rails=RAILS) as lab:
        for _ in range(runs):
            victim = rng.randrange(NODES)
            step = rng.randrange(STEPS // 2)
            plan = FaultPlan([Fault(action=Action.KILL, rank=victim, at_op=1, at_step=step)])
            reports = run_ranks(lab, "until_error_rank.py", str(NBYTES), plan=plan)
            plan.assert_all_fired()
            assert len(reports) == NODES - 1
            for report in reports:
                assert report["error"] == "PeerLost"
                assert report["peer"] == victim
                delays.append(report["raised_s"] - plan.fired[0].time_s)
    assert len(delays) == runs * (NODES - 1)
    print(f"kill: PeerLost on every survivor {runs}/{runs}, {spread(delays)} after the kill")


def test_a_pair_without_any_rail_gives_up_on_both_sides() -> None:
    cuts = [Fault(action=Action.NIC_DOWN, node=1, rail=rail, at_op=1, at_step=4) for rail in (0, 1)]
    plan = FaultPlan(cuts)
    env = {"R2CC_NO_RAIL_TIMEOUT_S": "1.5", "R2CC_LAST_RESORT": "none"}
    with Lab(nodes=2, rails=2) as lab:
        reports = run_ranks(lab, "until_error_rank.py", str(NBYTES), plan=plan, env=env)
    plan.assert_all_fired()
    assert [report["error"] for report in reports] == ["NoHealthyRail"] * 2
    assert [report["peer"] for report in reports] == [1, 0]
    delays = [report["raised_s"] - plan.fired[-1].time_s for report in reports]
    assert all(1.4 < delay < 6.0 for delay in delays)
    print(
        f"no rail left, timeout 1.5 s: NoHealthyRail on both sides {spread(delays)} after the cut"
    )


@pytest.mark.parametrize(
    ("name", "runs"),
    slow_but(
        [("allreduce", 1)],
        [
            (name, runs)
            for name in ("allreduce", "reduce_scatter", "allgather", "broadcast", "reduce")
            for runs in sorted({1, RUNS})
        ],
    ),
)
def test_results_of_two_levels_are_exact(name: str, runs: int) -> None:
    """A NIC goes down in one chunk or another of every run; ranks of both groups use it then."""
    nodes, nchunks = 2, count_chunks(NBYTES)
    rng, nsteps = random.Random("levels"), LEVEL_STEPS // (1 if name == "allreduce" else 2)
    faults = []
    for run in range(1, runs + 1):
        node = ONLY_SENDER.get(name, rng.randrange(nodes))
        rail, chunk = rng.randrange(RAILS), rng.randrange(nchunks)
        where = {"node": node, "rail": rail, "rank": nodes * node + rail // nodes}
        op, step = run * (nchunks + 1) + chunk, rng.randrange(nsteps)
        faults.append(
            Fault(action=Action.NIC_DOWN, **where, at_op=op, at_step=step, duration_s=0.4)
        )
    plan = FaultPlan(faults)
    with Lab(nodes=nodes, rails=RAILS, ranks_per_node=2) as lab:
        reports = run_ranks(
            lab, "campaign_rank.py", str(runs), str(NBYTES), name, plan=plan, env={"R2CC_SHM": "1"}
        )
    plan.assert_all_fired()
    print_repair_times(Action.NIC_DOWN, plan, reports)
    assert [report["exact"] for report in reports] == [runs] * (2 * nodes)
    assert all(report["repairs"] for report in reports)


def print_repair_times(kind: Action, plan: FaultPlan, reports: list[dict[str, Any]]) -> None:
    """Print the time from each cut of `kind` to the first replayed byte, and the bytes replayed."""
    firsts = []
    for firing in plan.fired:
        if firing.fault.action is not kind:
            continue
        arrivals = [
            repair["first_byte_s"] - firing.time_s
            for report in reports
            for repair in report["repairs"]
            if repair["rail"] == firing.fault.rail
            and 0 < repair["failed_s"] - firing.time_s < 1.0
            and repair["first_byte_s"]
        ]
        firsts += [min(arrivals)] if arrivals else []
    repairs = [repair for report in reports for repair in report["repairs"]]
    nbytes = sum(repair["nbytes_replayed"] for repair in repairs)
    print(
        f"{kind}: {len(plan.faults)} runs exact on {len(reports)} ranks, "
        f"{len(repairs)} paths repaired, {nbytes} bytes replayed; "
        f"cut to first replayed byte {spread(firsts)}"
    )


def spread(seconds: list[float]) -> str:
    """Format minimum, median and maximum in milliseconds."""
    if not seconds:
        return "none"
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    return f"{low * 1e3:.1f} / {middle * 1e3:.1f} / {high * 1e3:.1f} ms of {len(seconds)}"

"""Results of the degraded bench from its ranks' readings, and its tables of these results."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from support.tables import BENCH

from r2ccl.cli.values import parse_sizes
from r2ccl.schedule.check import check


@pytest.fixture
def task(bench) -> Any:
    return bench("degraded_job").Task(
        what="straggler",
        sizes=(4, 8),
        rounds=3,
        batch_nbytes=16,
        healthy=("ring", "trees"),
        degraded=("ring",),
        lost=((2, 1), (0, 3)),
        ranks_per_node=2,
    )


def saved(bench: Any, tmp_path: Path, *rows: dict[str, Any]) -> Path:
    """A file as the bench saves it."""
    path = tmp_path / "degraded.json"
    bench("common").write_json(path, rows)
    return path


def measured_row(**fields: Any) -> dict[str, Any]:
    return {
        "measure": "schedule",
        "table": "cloudlab",
        "case": "1/3 of one node",
        "schedule": "R2CC-AllReduce, published",
        "k": 16,
        "trees": None,
        "nbytes": 64 << 20,
        "rate_mbps": 100,
        "rounds": 5,
        "measured": 1.3125,
        **fields,
    }


def test_nics_are_lost_right_after_the_healthy_part(task) -> None:
    # Per name, after a barrier: 4 calls of 4 bytes and 2 calls of 8 bytes; in the round that does
    # not count, 1 call of each.
    ops = 2 * ((1 + 1) + 3 * (1 + 4) + (1 + 1) + 3 * (1 + 2))
    plan = task.plan()
    assert [(fault.node, fault.rail, fault.at_op) for fault in plan.faults] == [
        (2, 1, ops),
        (0, 3, ops),
    ]
    assert task.ports_lost == 4


def test_messages_do_not_count_as_collectives(bench) -> None:
    task = bench("degraded_job").Task(
        what="collectives", sizes=(8,), rounds=3, batch_nbytes=0, healthy=("gather", "sendrecv")
    )
    assert task.healthy_ops == (4 + 4) + 4  # gathers and barriers, barriers alone


def test_calls_of_two_levels_count_once_per_chunk(bench) -> None:
    levels, nbytes = bench("degraded_levels"), 64 << 20
    counts = {name: levels.ops_per_call(name, nbytes) for name in levels.LEVELS}
    assert counts["one"] == 1
    assert counts["two"] > 1
    task = bench("degraded_job").Task(
        what="levels", sizes=(nbytes,), rounds=3, batch_nbytes=0, healthy=("allgather",),
        ops_per_call=counts["two"],
    )  # fmt: skip
    assert task.healthy_ops == 4 + 4 * counts["two"]


@pytest.mark.parametrize(("name", "sent"), [("allreduce", 1), ("allgather", 0.5), ("reduce", 1)])
def test_rows_of_levels_compare_with_the_line_rate(bench, name: str, sent: float) -> None:
    levels, job = bench("degraded_levels"), bench("degraded_job")
    nbytes = 64 << 20
    line_s = sent * nbytes / (4 * 200e6 / 8)
    times = {
        (phase, name, nbytes): job.Times([slower * line_s] * 3, [0.5] * 3)
        for phase, slower in ((job.HEALTHY, 1.0), (job.DEGRADED, 1.25))
    }
    whole, lost = levels.rows_of({"two": job.Outcome(times, [], [])}, 200)
    assert (whole["collective"], whole["lost"], lost["lost"]) == (name, 0, 1)
    assert whole["of_line_rate"] == pytest.approx(1.0)
    assert (lost["of_line_rate"], lost["of_healthy"]) == pytest.approx((0.8, 0.8))


#: Runs the healthy part of a task as a rank does, then prints how far its count of calls was off.
COUNTED = """
import sys, msgspec, r2ccl
from degraded_job import HEALTHY, Task
from degraded_rank import Bench, runs_of
task = msgspec.json.decode(sys.argv[1], type=Task)
with r2ccl.init() as comm:
    before = comm.ncalls
    bench = Bench(comm, task)
    bench.run_all(HEALTHY, runs_of(comm, task.healthy, task, ()))
    if comm.rank == 0:
        print(len(bench.readings), comm.ncalls - before - task.healthy_ops)
"""


def test_ranks_make_as_many_calls_as_their_task_counts(bench) -> None:
    names = bench("degraded_collectives").NAMES
    task = bench("degraded_job").Task(
        what="collectives", sizes=(96,), rounds=2, batch_nbytes=192, healthy=names
    )
    text = msgspec.json.encode(task).decode()
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "r2ccl",
            "launch",
            "-n",
            "3",
            "--",
            sys.executable,
            "-c",
            COUNTED,
            text,
        ],
        env={**os.environ, "PYTHONPATH": f"{BENCH}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.split()[-2:] == [str(2 * len(names)), "0"]


def test_a_wrong_result_of_a_collective_ends_the_bench(bench) -> None:
    rank = bench("degraded_rank")
    task = bench("degraded_job").Task(
        what="collectives", sizes=(96,), rounds=1, batch_nbytes=0, healthy=("gather",)
    )

    class Idle:
        rank, nranks = 0, 3

        def barrier(self) -> None:
            pass

    measured = rank.Bench(Idle(), task)
    with pytest.raises(SystemExit, match="24 of 24 elements are wrong"):
        measured.run_all("healthy", {("gather", 96): lambda x, out: None})


def test_no_schedule_does_better_than_the_bound(bench) -> None:
    study = bench("degraded_collectives")

    def share(name: str, lost: str) -> float:
        return study.bound_s(name, (), 1 << 20) / study.bound_s(name, study.LOST[lost], 1 << 20)

    # An allreduce can do more of its work on the other nodes: 31 and 30 of 32 NICs are left.
    assert [share("allreduce", lost) for lost in study.LOST] == pytest.approx([31 / 32, 30 / 32])
    for name in set(study.NAMES) - {"allreduce"}:
        assert [share(name, lost) for lost in study.LOST] == pytest.approx([7 / 8, 6 / 8])


def test_shares_of_the_healthy_speed(bench, capsys) -> None:
    study, job = bench("degraded_collectives"), bench("degraded_job")
    times = {
        (job.HEALTHY, "gather", 1 << 20): job.Times([0.7, 0.7, 0.7], [0.5]),
        (job.DEGRADED, "gather", 1 << 20): job.Times([0.7, 0.8, 1.4], [0.5]),
    }
    rows = study.rows_of({lost: job.Outcome(times, [], [16]) for lost in study.LOST})
    assert [(row["collective"], row["lost"]) for row in rows] == [
        ("gather", "1 of 8"), ("gather", "2 of 8")
    ]  # fmt: skip
    for row in rows:
        assert row["share"] == pytest.approx(7 / 8)
        assert (row["low"], row["high"]) == pytest.approx((0.7 / 1.1, 0.7 / 0.75))
    assert [row["published_low"] for row in rows] == [0.85, None]
    study.print_rows(Console(width=140), rows)
    printed = capsys.readouterr().out
    assert "87.5%" in printed
    assert "published for 1 of 8: 85%-89%" in printed


def test_a_job_that_loses_nothing_has_no_plan(bench) -> None:
    task = bench("degraded_job").Task(what="planner", sizes=(4,), rounds=1, batch_nbytes=0)
    assert task.plan() is None
    assert task.ncalls(4) == 1


def test_a_call_lasts_from_the_last_begin_to_the_last_end(bench, task) -> None:
    job = bench("degraded_job")

    def said(*spans: tuple[float, float]) -> Any:
        readings = [job.Reading("healthy", "ring", 8, begun, end, 0.5) for begun, end in spans]
        return job.Said(readings, [], [])

    found = job.put_together(task, [said((1.0, 3.0), (10.0, 13.0)), said((2.0, 4.0), (9.0, 12.0))])
    [(key, times)] = found.items()
    assert key == ("healthy", "ring", 8)
    assert times.seconds == [1.0, 1.5]  # two calls a reading
    assert times.cores == [0.5, pytest.approx(1 / 3)]


def outcome(bench: Any, seconds: dict[str, list[float]], predicted: dict[str, float]) -> Any:
    """Outcome of a job of one size; its first prediction is that of the chosen schedule."""
    job = bench("degraded_job")
    names = list(predicted)
    return job.Outcome(
        {(job.DEGRADED, name, 64): job.Times(found, [0.5]) for name, found in seconds.items()},
        [job.Prediction(name, 64, predicted[name], name == names[0]) for name in names],
        [16],
    )


def test_regret_and_error_are_those_of_what_was_chosen(bench) -> None:
    report = bench("degraded_report")
    found = outcome(
        bench,
        {"auto": [1.0, 1.2], "auto again": [1.2, 1.4], "ring": [1.5, 1.5], "trees": [1.0, 1.0]},
        {"leaves": 1.5, "ring": 1.4, "trees": 1.6},
    )
    [point] = report.points_of("1", found)
    assert (point.choice, point.best, point.chosen_s) == ("leaves", "trees", 1.2)
    assert point.regret == pytest.approx(0.2)
    assert point.error == pytest.approx(0.25)
    assert point.noise == pytest.approx(1 - 1.1 / 1.3)
    assert not point.is_good
    first, *others = point.flat()
    assert (first["measure"], first["choice"], first["best"]) == ("point", "leaves", "trees")
    assert {(each["schedule"], each["seconds"], each["predicted_s"]) for each in others} == {
        ("leaves", 1.2, 1.5),
        ("ring", 1.5, 1.4),
        ("trees", 1.0, 1.6),
    }


@pytest.mark.parametrize(
    ("again", "other", "is_good"), [(1.0, 0.97, True), (1.0, 0.9, False), (1.25, 0.96, True)]
)
def test_a_choice_may_be_as_far_off_as_two_readings_of_it(bench, again, other, is_good) -> None:
    found = outcome(
        bench, {"auto": [1.0], "auto again": [again], "ring": [other]}, {"trees": 1.0, "ring": 1.0}
    )
    [point] = bench("degraded_report").points_of("1", found)
    assert point.is_good == is_good


def test_the_best_choice_has_no_regret(bench) -> None:
    found = outcome(bench, {"auto": [1.0], "auto again": [1.0], "ring": [2.0]}, {"t": 1, "ring": 2})
    [point] = bench("degraded_report").points_of("1", found)
    assert (point.best, point.regret, point.noise, point.error) == ("t", 0, 0, 0)


def points(bench: Any) -> list[Any]:
    """Four points, one of which is bad, with errors of both signs."""
    return [
        bench("degraded_report").Point(
            pattern="1", nbytes=64, choice="trees", chosen_s=1.0, predicted_s=predicted,
            noise=0.01, times={"ring": ring}, predictions={"trees": predicted, "ring": 1.0},
        )
        for predicted, ring in ((1.02, 1.5), (0.9, 0.99), (1.1, 0.8), (1.04, 2.0))
    ]  # fmt: skip


def test_the_verdict_is_of_all_points(bench) -> None:
    verdict = bench("degraded_report").verdict_of(points(bench))
    assert (verdict["points"], verdict["share_good"]) == (4, 0.75)
    assert verdict["median_error"] == pytest.approx(0.07)
    assert abs(verdict["worst_error"]) == pytest.approx(0.1)
    assert verdict["worst_regret"] == pytest.approx(0.25)


def test_bad_points_are_marked(bench, capsys) -> None:
    report = bench("degraded_report")
    out = Console(width=140)
    report.print_points(out, points(bench))
    report.print_verdict(out, report.verdict_of(points(bench)))
    printed = capsys.readouterr().out
    assert [line.count("!") for line in printed.splitlines() if "64 B" in line] == [0, 0, 1, 0]
    assert "at 75.0% of them" in printed


def test_there_are_60_points_of_nics_there_are(bench) -> None:
    degraded, cases = bench("degraded"), bench("degraded_cases")
    sizes = parse_sizes(degraded._SIZES)
    assert len(degraded.PATTERNS) * len(sizes) == 60
    assert len({frozenset(lost) for lost in degraded.PATTERNS.values()}) == len(degraded.PATTERNS)
    for lost in degraded.PATTERNS.values():
        assert len(set(lost)) == len(lost)
        assert all(0 <= rail < cases.STRAGGLER_NICS for _, rail in lost)
        assert min(cases.nics_left(lost)) > 0


@pytest.mark.parametrize("what", ["cloudlab", "straggler"])
def test_what_runs_is_named_and_adds_up_everything(bench, what) -> None:
    cases = bench("degraded_cases")
    lists = [cases.cloudlab((1, 2))] if what == "cloudlab" else map(cases.straggler, LOST)
    for made in map(list, lists):
        assert len({each.key for each in made}) == len(made)
        for each in made:
            check(each.schedule)


LOST = [(), ((2, 1),), ((0, 3), (2, 0), (2, 2))]


def test_bounds_and_models_are_those_of_the_networks(bench) -> None:
    cases = bench("degraded_cases")
    assert list(cases.STRAGGLER.values()) == LOST
    assert [cases.straggler_bound(lost) for lost in LOST] == [1, Fraction(16, 15), Fraction(4, 3)]
    assert [next(cases.straggler(lost)).model for lost in LOST] == [1, Fraction(4, 3), 2]
    assert cases.cloudlab_bound() == Fraction(9, 10)


def test_a_job_s_rows_have_the_names_of_the_tables_rows(bench) -> None:
    cases, job, rows = bench("degraded_cases"), bench("degraded_job"), bench("tables_rows")
    rng = random.Random(1)
    made = list(cases.straggler(LOST[1]))
    times = {
        (job.DEGRADED, each.key, 64): job.Times([2 * rng.random() for _ in range(3)], [0.5])
        for each in made
    }
    times[job.HEALTHY, cases.BALANCE, 64] = fault_free = job.Times([0.5], [0.5])
    found = bench("degraded_report").schedule_rows(
        "netlab", "1/4 of one node", made, job.Outcome(times, [], [16]), fault_free, 1.25
    )
    assert len(found) == len(made)  # nothing of the healthy phase
    for each in found:
        assert each["measured"] == each["seconds"] / 0.5
        assert each["low"] <= each["measured"] <= each["high"]
    names = {rows.name_of(row) for row in bench("tables_netlab").netlab_rows(True)}
    assert {tuple(each[field] for field in rows.RowName._fields) for each in found} <= names


def test_measured_figures_get_into_their_rows_alone(bench, tmp_path) -> None:
    rows = bench("tables_rows")
    path = saved(bench, tmp_path, measured_row(), measured_row(k=3), {"measure": "point"})
    measured = rows.read_measured(path)
    assert len(measured) == 2
    fields = {"table": "cloudlab", "case": "1/3 of one node", "n": 3, "slices": 64}
    times = {"bound": 0.9, "simulated": 1.319, "over_bound": 1.319 / 0.9}
    name = "R2CC-AllReduce, published"
    simulated = [rows.Row(**fields, **times, schedule=name, k=k) for k in (8, 16)]
    done, notes = rows.with_measured(simulated, measured)
    assert [row.measured for row in done] == [None, 1.3125]
    assert [row.simulated for row in done] == [1.319, 1.319]
    assert notes == ["measured: in a netlab, 64 MiB, NICs of 100 Mbit/s, median of 5"]


def run_table(
    bench: Any, monkeypatch: pytest.MonkeyPatch, table: str, measured: Path, *more: str
) -> Any:
    arguments = ["bench/tables.py", "--table", table, "--quick", "--measured", str(measured), *more]
    monkeypatch.setattr("sys.argv", arguments)
    return bench("tables").main()


def test_a_table_shows_measured_beside_simulated(bench, monkeypatch, tmp_path) -> None:
    path = saved(bench, tmp_path, measured_row())
    table = tmp_path / "table.json"
    assert run_table(bench, monkeypatch, "cloudlab", path, "--json", str(table)) == 0
    results = json.loads(table.read_text())["results"]
    found = {(row["schedule"], row["k"]): row["measured"] for row in results}
    assert found.pop(("R2CC-AllReduce, published", 16)) == 1.3125
    assert set(found.values()) == {None}


@pytest.mark.parametrize(
    ("table", "text", "complaint"),
    [
        ("optcc", None, "--measured applies to --table cloudlab and netlab only"),
        ("netlab", None, "nothing of table netlab"),
        ("cloudlab", "no JSON", "is not a file that degraded.py --json saved"),
        (
            "cloudlab",
            '{"results": [{"seconds": 1}]}',
            "is not a file that degraded.py --json saved",
        ),
    ],
)
def test_files_with_nothing_of_a_table_are_refused(
    bench, monkeypatch, tmp_path, capsys, table, text, complaint
) -> None:
    path = saved(bench, tmp_path, measured_row())
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit):
        run_table(bench, monkeypatch, table, path)
    assert complaint in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--what", "cloudlab", "--sizes", "2M"],
        ["--what", "planner", "--nbytes", "2M"],
        ["--what", "planner", "--patterns", "4 of one node"],
        ["--what", "straggler", "--rounds", "0"],
        ["--what", "straggler", "--nbytes", "0"],
        ["--what", "planner", "--sizes", "2M,6"],
        ["--what", "collectives", "--sizes", "2M"],
    ],
)
def test_settings_that_make_no_sense_are_refused(bench, monkeypatch, capsys, arguments) -> None:
    monkeypatch.setattr("sys.argv", ["bench/degraded.py", *arguments])
    with pytest.raises(SystemExit):
        bench("degraded").parse_arguments()
    assert "error" in capsys.readouterr().err

"""The tables' figures: simulated, against the lower bound, the closed forms and the papers."""

from __future__ import annotations

import importlib
import json
import statistics
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from r2ccl.algos import packed_trees
from r2ccl.schedule.check import check

BENCH = Path(__file__).parents[2] / "bench"
TABLES = ["bound", "optcc", "cloudlab", "multi-failure"]

#: What a tolerance of 0.01 of a slice may take off a time.
ROUNDING = 1e-3


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the benches."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the quick form of a table saves; each runs once."""
    saved: dict[str, Any] = {}

    def run(name: str) -> Any:
        if name not in saved:
            path = tmp_path_factory.mktemp("tables") / "table.json"
            with pytest.MonkeyPatch.context() as patch:
                patch.syspath_prepend(str(BENCH))
                arguments = ["bench/tables.py", "--table", name, "--quick", "--json", str(path)]
                patch.setattr("sys.argv", arguments)
                assert importlib.import_module("tables").main() == 0
            saved[name] = json.loads(path.read_text())["results"]
        return saved[name]

    return run


def figures(results: Any, schedule: str, **wanted: Any) -> list[Any]:
    """The rows of a schedule, at least one."""
    found = [
        row
        for row in results
        if row.get("schedule") == schedule and all(row[key] == wanted[key] for key in wanted)
    ]
    assert found
    return found


@pytest.mark.parametrize("name", TABLES)
def test_no_simulation_is_faster_than_the_bound_or_called_measured(quick, name) -> None:
    for row in quick(name):
        assert row["measured"] is None
        if "simulated" in row:
            assert row["simulated"] >= row["bound"] * (1 - ROUNDING)
            assert row["over_bound"] == pytest.approx(row["simulated"] / row["bound"])


def test_measured_and_simulated_have_columns_of_their_own(bench, capsys) -> None:
    rows = bench("tables_rows")
    fields = {"table": "bound", "case": "1/2", "schedule": "ring", "n": 8, "slices": 4}
    times = {"bound": 1.125, "simulated": 1.25, "over_bound": 1.25 / 1.125}
    shown = [rows.Row(**fields, **times), rows.Row(**fields, **times, measured=1.375)]
    rows.print_rows(Console(width=160), "made", shown, [])
    heading, first, second = (
        [cell.strip() for cell in line.strip("┃│").replace("│", "┃").split("┃")]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("┃", "│"))
    )
    assert [row[heading.index("simulated")] for row in (first, second)] == ["1.250", "1.250"]
    assert [row[heading.index("measured")] for row in (first, second)] == ["not measured", "1.375"]


def test_packed_trees_are_close_to_the_bound(quick, bench) -> None:
    limit = bench("tables_bound").limit
    assert (limit(Fraction(1, 3)), limit(Fraction(1, 2))) == (1.03, 1.05)
    for schedule in ("packed trees", "packed trees, cheapest"):
        found = figures(quick("bound"), schedule)
        assert {(row["n"], row["case"]) for row in found} == {
            (n, lost) for n in (8, 16) for lost in ("1/3", "1/2")
        }
        assert all(row["over_bound"] <= limit(Fraction(row["case"])) for row in found)


@pytest.mark.parametrize(("lost", "trees", "slices"), [("1/3", 28, 96), ("1/2", 4, 160)])
def test_packed_trees_of_64_nodes_are_close_to_the_bound(bench, lost, trees, slices) -> None:
    rows = bench("tables_rows")
    bandwidths = rows.straggler(64, Fraction(lost))
    time = rows.time_of(packed_trees.allreduce(bandwidths, trees), bandwidths, slices)
    limit = bench("tables_bound").limit(Fraction(lost))
    assert time <= limit * float(packed_trees.lower_bound(bandwidths))


def test_a_setting_that_is_too_coarse_is_not_called_cheapest(bench, monkeypatch) -> None:
    bound = bench("tables_bound")
    monkeypatch.setattr(bound, "_GRID", [(4, 8), (4, 64)])
    *_, row = bound.packed_rows(8, Fraction(1, 2))
    assert (row.schedule, row.trees, row.slices) == ("packed trees, cheapest", 4, 64)
    monkeypatch.setattr(bound, "_GRID", [(4, 8), (4, 16)])
    *_, row = bound.packed_rows(8, Fraction(1, 2))
    assert (row.schedule, row.trees, row.slices) == ("packed trees, finest tried", 4, 16)
    assert row.over_bound > 1.05


def test_balance_is_a_ring_as_slow_as_the_straggler(quick) -> None:
    for row in figures(quick("bound"), "ring, Balance"):
        assert row["simulated"] == pytest.approx(float(1 / (1 - Fraction(row["case"]))), rel=1e-3)


def test_optcc_takes_what_its_paper_says(quick) -> None:
    for row in figures(quick("optcc"), "OptCC", n=8):
        exact = Fraction(row["k"] + 1, row["k"]) * 2 / Fraction(14, 8)  # l (k + 1)/k, l = 2
        assert row["model"] == pytest.approx(float(exact))
        assert row["over_model"] == pytest.approx(1, abs=0.03)
    for row in figures(quick("optcc"), "OptCC", n=16, k=64):
        assert row["simulated"] <= 1.06


def test_cloudlab_is_as_the_published_model_says(quick) -> None:
    results = quick("cloudlab")
    assert figures(results, "ring, Balance")[0]["simulated"] == pytest.approx(1.5, abs=0.05)
    published = figures(results, "R2CC-AllReduce, published")
    for row in published:
        assert row["over_model"] == pytest.approx(1, abs=0.01)
        assert row["simulated"] == pytest.approx(float(row["paper"]), rel=0.02)
    [packed] = figures(results, "packed trees among nodes")
    assert packed["simulated"] < min(row["simulated"] for row in published)


def test_the_published_model_is_that_of_six_ranks(bench) -> None:
    model_of = bench("tables_cloudlab").model_of
    assert [float(model_of(k)) for k in (1, 2, 4, 8, 16)] == [1.6, 1.45, 1.375, 1.3375, 1.31875]


@pytest.mark.parametrize("nchunks", [1, 3])
def test_the_published_schedule_adds_up_everything(bench, nchunks) -> None:
    check(bench("tables_cloudlab").published(nchunks))


def test_packed_trees_outlive_several_failures(quick) -> None:
    patterns = [row for row in quick("multi-failure") if row["table"] == "multi-failure pattern"]
    times = [
        {key.removesuffix(", sim/bound"): row[key] for key in row if key.endswith("sim/bound")}
        for row in patterns
    ]
    packed = [each.pop("packed trees") for each in times]
    assert len(packed) == 5
    assert statistics.median(packed) <= 1.08
    for ours, others in zip(packed, times, strict=True):
        assert ours <= 1.03 * min(others.values())


def test_rows_of_several_failures_are_of_patterns(quick) -> None:
    results = quick("multi-failure")
    by_number = {row["number"]: row for row in results if "number" in row}
    for schedule in ("packed trees", "leaf ring", "nested rings", "ring, Balance"):
        middle, worst = figures(results, schedule)
        ratios = sorted(row[f"{schedule}, sim/bound"] for row in by_number.values())
        assert middle["over_bound"] == ratios[2]
        assert worst["over_bound"] == ratios[-1]
        for row in (middle, worst):
            own = by_number[int(row["case"].split()[-1])]
            assert row["bound"] == own["bound"]
            assert row["over_bound"] == own[f"{schedule}, sim/bound"]


def test_patterns_depend_on_seed_and_number_alone(bench) -> None:
    failures = bench("tables_failures")
    drawn = [failures.draw(1, number) for number in range(500)]
    assert drawn[7] == failures.draw(1, 7)
    assert len(set(drawn)) == 500
    assert failures.draw(2, 7) != drawn[7]
    lost = [failures.NICS - alive for pattern in drawn for alive in pattern]
    for nics, chance in enumerate(failures.PROBABILITIES):
        assert lost.count(nics) / len(lost) == pytest.approx(chance, abs=0.02)


def test_processes_find_what_one_finds(bench) -> None:
    failures = bench("tables_failures")
    assert failures.judge_all(3, [4, 5], 2) == failures.judge_all(3, [4, 5], 1)


@pytest.mark.parametrize(
    "arguments",
    [
        "--table multi-failure --patterns 0",
        "--table multi-failure --jobs 0",
        "--table multi-failure --first -1",
        "--table optcc --mpi",
        "--table bound --seed 1",
        "--table none",
        "--quick",
    ],
)
def test_other_arguments_are_refused(bench, monkeypatch, capsys, arguments) -> None:
    monkeypatch.setattr("sys.argv", ["bench/tables.py", *arguments.split()])
    with pytest.raises(SystemExit):
        bench("tables").parse_arguments()
    assert "error: " in capsys.readouterr().err

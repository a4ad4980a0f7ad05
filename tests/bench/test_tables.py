"""The tables' figures: simulated, against the lower bound, the closed forms and the papers."""

from __future__ import annotations

import argparse
import statistics
from fractions import Fraction

import pytest
from rich.console import Console
from support.slow import slow_but
from support.tables import rows_of

from r2ccl.algos import packed_trees
from r2ccl.schedule.check import check

TABLES = ["bound", "optcc", "cloudlab", "multi-failure"]

#: Share by which a tolerance of 0.01 of a slice may shorten a time.
ROUNDING = 1e-3


@pytest.mark.parametrize("name", slow_but(["optcc"], TABLES))
def test_no_simulation_beats_the_bound_or_is_called_measured(quick, name) -> None:
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


@pytest.mark.parametrize(
    ("lost", "trees", "slices"), slow_but([("1/2", 4, 160)], [("1/3", 28, 96), ("1/2", 4, 160)])
)
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


def test_optcc_takes_what_its_paper_says(quick) -> None:
    for row in rows_of(quick("optcc"), "OptCC", n=8):
        exact = Fraction(row["k"] + 1, row["k"]) * 2 / Fraction(14, 8)  # l (k + 1)/k, l = 2
        assert row["model"] == pytest.approx(float(exact))
        assert row["over_model"] == pytest.approx(1, abs=0.03)
    for row in rows_of(quick("optcc"), "OptCC", n=16, k=64):
        assert row["simulated"] <= 1.06


def test_cloudlab_is_as_the_published_model_says(quick) -> None:
    results = quick("cloudlab")
    assert rows_of(results, "ring, Balance")[0]["simulated"] == pytest.approx(1.5, abs=0.05)
    published = rows_of(results, "R2CC-AllReduce, published")
    for row in published:
        assert row["over_model"] == pytest.approx(1, abs=0.01)
        assert row["simulated"] == pytest.approx(float(row["paper"]), rel=0.02)
    [packed] = rows_of(results, "packed trees among nodes")
    assert packed["simulated"] < min(row["simulated"] for row in published)


def test_the_published_model_is_that_of_six_ranks(bench) -> None:
    model_of = bench("tables_cloudlab").model_of
    assert [float(model_of(k)) for k in (1, 2, 4, 8, 16)] == [1.6, 1.45, 1.375, 1.3375, 1.31875]


@pytest.mark.parametrize("nchunks", [1, 3])
def test_the_published_schedule_adds_up_everything(bench, nchunks) -> None:
    check(bench("tables_cloudlab").published(nchunks))


def test_patterns_depend_on_seed_and_number_alone(bench) -> None:
    failures = bench("tables_failures")
    drawn = [failures.draw(1, number) for number in range(500)]
    assert drawn[7] == failures.draw(1, 7)
    assert len(set(drawn)) == 500
    assert failures.draw(2, 7) != drawn[7]
    lost = [failures.NICS - alive for pattern in drawn for alive in pattern]
    for nics, chance in enumerate(failures.PROBABILITIES):
        assert lost.count(nics) / len(lost) == pytest.approx(chance, abs=0.02)


@pytest.mark.parametrize("numbers", slow_but([[3]], [[3], [3, 4]]))
def test_processes_find_what_one_finds(bench, numbers) -> None:
    failures = bench("tables_failures")
    assert failures.judge_all(3, numbers, 2) == failures.judge_all(3, numbers, 1)


LOST = {"none": (), "one": ((0,),), "two of a node": ((0, 1),), "one of each": ((0,), (0,))}


@pytest.mark.parametrize("lost", slow_but(["none"], LOST))
def test_closed_forms_are_close_to_what_is_simulated(bench, lost) -> None:
    strategies = bench("tables_strategies")
    for strategy in strategies.Strategy:
        pattern = strategies.canonical(strategy, LOST[lost])
        nbytes = 1 << 30
        simulated, model = (
            time_of(strategies.PAIR, strategy, pattern, nbytes)
            for time_of in (strategies.allreduce_s, strategies.model_s)
        )
        assert model * (1 - ROUNDING) <= simulated <= 1.02 * model


def test_patterns_are_merged_only_where_a_strategy_cannot_tell(bench) -> None:
    strategies = bench("tables_strategies")
    lost = ((), (5,), (7, 0), (3, 6))
    assert strategies.canonical(strategies.Strategy.HOT_REPAIR, lost) == ((0, 1), (0, 3), (0,))
    assert strategies.canonical(strategies.Strategy.BALANCE, lost) == ((0, 1), (0, 1), (0,))


def test_a_lost_nic_s_channels_move_to_the_next_one_alive(bench) -> None:
    strategies = bench("tables_strategies")
    backups = strategies.PAIR.backups(((0, 1, 7),))
    assert backups[0].tolist() == [2, 2, 2, 3, 4, 5, 6, 2]
    assert backups[1].tolist() == list(range(8))


def test_draws_depend_on_seed_and_number_alone_and_grow(bench) -> None:
    training = bench("tables_training")
    drawn = [training.draw(1, number, 64) for number in range(100)]
    assert drawn[7] == training.draw(1, 7, 64) != training.draw(2, 7, 64)
    assert len(set(drawn)) == 100
    assert all(len(set(nics)) == 10 and 0 <= min(nics) <= max(nics) < 512 for nics in drawn)
    before, after = (training.by_node(drawn[7][:count], 64) for count in (4, 10))
    assert all(set(few) <= set(many) for few, many in zip(before, after, strict=True))
    assert sum(map(len, after)) == 10


def test_at_any_time_as_many_nics_are_away_as_their_lives_say(bench) -> None:
    training = bench("tables_training")
    away = [len(training.draw_any_time(1, number, 64)) for number in range(300)]
    assert statistics.fmean(away) == pytest.approx(512 * 48 / 20_048, rel=0.15)


def test_processes_find_the_steps_that_one_finds(bench) -> None:
    training, strategies = bench("tables_training"), bench("tables_strategies")
    setting = training._large(32)
    tasks = [(strategies.Strategy.BALANCE, ((0,),)), (strategies.Strategy.LEAF, ((0,),))]
    alone, spread = (
        training._map(setting, tasks, argparse.Namespace(jobs=jobs, mpi=False)) for jobs in (1, 2)
    )
    assert alone == spread


@pytest.mark.parametrize("name", slow_but(["optcc"], ["optcc", "r2ccl-inference"]))
def test_a_plot_has_a_line_a_row_and_points_that_are_numbers(quick, bench, tmp_path, name) -> None:
    plots = bench("tables_plot")
    axis, lines = plots.lines_of(quick(name))
    assert axis == ("T/T0" if name == "optcc" else "% above the time without failures")
    assert len(lines) == len([row for row in quick(name) if "simulated" in row])
    assert all("simulated" in line.figures and "measured" not in line.figures for line in lines)
    plots.plot(tmp_path / "made" / "table.png", "a table", quick(name))
    assert (tmp_path / "made" / "table.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_nothing_is_simulated_in_vain(bench, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = ["bench/tables.py", "--table", "bound", "--plot", "table.png"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(ImportError, match=r"r2ccl\[demo\]"):
        bench("tables").main()


@pytest.mark.parametrize(
    "arguments",
    [
        "--table multi-failure --patterns 0",
        "--table r2ccl-training --patterns 0",
        "--table r2ccl-inference --seed 1",
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

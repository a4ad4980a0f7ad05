"""The comparison of schedules: the planner's own predictions and choice, and its simulation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from r2ccl.cli import forecast, main, make_parser
from r2ccl.cli.explain import COLLECTIVES
from r2ccl.cli.forecast import Comparison, compare, scenario_of
from r2ccl.planning.cluster import ClusterShape
from r2ccl.planning.cost_model import Rates

SMALL = ("--nodes", "4", "--nics", "2", "--rate", "100gbit", "--nbytes", "16M")


def found_by(*options: str, is_simulated: bool = True) -> Comparison:
    args = make_parser(["explain"]).parse_args(["explain", *SMALL, *options])
    return compare(scenario_of(args), is_simulated=is_simulated)


def test_predictions_are_those_of_the_planner() -> None:
    rows = ((16, 16), (16, 0), (16, 16), (16, 16))
    cluster = ClusterShape(rows, 1, Rates(5_000, 12_500_000_000))
    explained = cluster.planner.explain(16 << 20, cluster.health)
    found = found_by("--lose", "1:1", is_simulated=False)
    assert found.why_degraded == explained.why
    choices = (explained.chosen, *explained.others)
    assert {name: each.predicted_s for name, each in found.degraded.items()} == {
        each.name: pytest.approx(each.predicted_ns / 1e9) for each in choices
    }
    [chosen] = [name for name, each in found.degraded.items() if each.is_chosen]
    assert chosen == explained.chosen.name


def test_simulations_agree_with_predictions_of_the_choice() -> None:
    found = found_by("--lose", "1:1")
    for forecasts in (found.healthy, found.degraded):
        [chosen] = [each for each in forecasts.values() if each.is_chosen]
        assert chosen.simulated_s == pytest.approx(chosen.predicted_s, rel=0.25)
    ring = found.healthy["ring"]
    assert ring.simulated_s == pytest.approx(1.5 * (16 << 20) / 25e9, rel=0.1)


def test_a_lost_nic_and_a_slow_one_cost_time() -> None:
    whole = found_by().healthy["ring"].simulated_s
    lost = found_by("--lose", "1:1").degraded["ring"].simulated_s
    slow = found_by("--slow", "1:1:0.5").degraded["ring"].simulated_s
    assert whole is not None
    assert slow is not None
    assert lost is not None
    assert whole < slow <= lost


def test_nothing_is_degraded_without_a_loss() -> None:
    assert found_by(is_simulated=False).degraded == {}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_has_one_choice(collective: str) -> None:
    found = found_by("--collective", collective, "--lose", "2:0")
    for forecasts in (found.healthy, found.degraded):
        assert sum(each.is_chosen for each in forecasts.values()) == 1
        assert all(each.simulated_s for each in forecasts.values())


@pytest.mark.parametrize(
    ("collective", "has_levels"), [("allreduce", True), ("allgather", True), ("alltoall", False)]
)
def test_several_ranks_per_node_run_in_two_levels(collective: str, has_levels: bool) -> None:
    given = ("--collective", collective)
    found = found_by(*given, "--ranks-per-node", "2", is_simulated=False)
    assert (found.nchunks > 0) == has_levels
    assert found_by(*given, is_simulated=False).nchunks == 0


def test_large_simulations_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "_MOST_SLICES", 1)
    found = found_by()
    assert all(each.simulated_s is None for each in found.healthy.values())
    assert all(each.predicted_s for each in found.healthy.values())
    assert any("ring is not simulated" in note for note in found.notes)


def explain(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["explain", *SMALL, *options]) == 0
    return capsys.readouterr().out


def test_the_table_marks_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explain(capsys, "--lose", "1:1").splitlines()
    assert lines[0] == "allreduce of 16 MiB on 4 nodes x 2 NICs of 100 Gbit/s"
    assert "NIC 1 of node 1 lost" in lines
    marked = [line for line in lines if line.startswith("*")]
    reasons = [line for line in lines if line.startswith("runs ")]
    assert len(marked) == len(reasons) == 2
    assert [line.split()[1] for line in marked] == [
        line.removeprefix("runs ").partition(":")[0] for line in reasons
    ]


def test_the_json_has_the_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = json.loads(explain(capsys, "--lose", "1:1", "--json"))
    assert list(found) == [
        "version", "scenario", "healthy", "degraded", "why", "why_degraded", "nchunks", "notes",
    ]  # fmt: skip
    assert found["scenario"]["lost"] == [[1, 1]]
    assert set(found["healthy"]["ring"]) == {
        "predicted_s", "simulated_s", "steps", "load", "slice_nbytes", "is_chosen",
    }  # fmt: skip


def test_the_picture_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of r2ccl[demo], is not installed")
    path = tmp_path / "times.png"
    explain(capsys, "--lose", "1:1", "--png", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "module", "reason"),
    [
        (["--png", "x.png"], "matplotlib.figure", "pip install 'r2ccl[demo]'"),
        ([], "r2ccl.flowsim.choices", "pip install 'r2ccl[compiled]'"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, capsys, options, module, reason) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["explain", *SMALL, *options]) == 2
    assert reason in capsys.readouterr().err


def test_without_the_simulator_there_are_predictions(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "r2ccl.flowsim.choices", None)
    assert "* " in explain(capsys, "--no-simulate")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            ["--lose", "4:0"],
            "--lose names: allowed are nodes 0 to 3 and NICs 0 to 1",
        ),
        (["--slow", "0:2:0.5"], "no NIC 0:2, which --slow names"),
        (["--nodes", "1"], "a network needs 2 nodes or more"),
        (["--nodes", "600", "--ranks-per-node", "2"], "allowed are up to 1024 ranks"),
        (["--nbytes", "0"], "--nbytes 0: allowed is 256 or more"),
        (["--lose", "1:0", "--lose", "1:1"], "names all NICs of node 1"),
        (["--lose", "1:0", "--slow", "1:0:0.5"], "name NIC 1:0 twice"),
    ],
)
def test_a_wrong_cluster_is_refused(capsys, options, reason) -> None:
    assert main(["explain", *SMALL, *options]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--lose", "1"], "write NODE:NIC"),
        (["--slow", "1:1"], "write NODE:NIC:FRACTION"),
        (["--slow", "1:1:2"], "write NODE:NIC:FRACTION"),
        (["--nodes", "0"], "allowed is 1 to 9999"),
        (["--rate", "fast"], "is not a rate"),
    ],
)
def test_a_wrong_argument_is_a_usage_error(capsys, options, reason) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["explain", *options])
    assert reason in capsys.readouterr().err

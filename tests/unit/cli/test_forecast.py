"""The comparison of schedules: the planner's own predictions and choice, and its simulation."""

from __future__ import annotations

import json
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.slow import slow_but

from r2ccl.cli import forecast, main, make_parser
from r2ccl.cli.explain import COLLECTIVES
from r2ccl.cli.forecast import Comparison, compare, scenario_of
from r2ccl.cli.forecast_output import to_text
from r2ccl.planning.cluster import ClusterShape
from r2ccl.planning.cost_model import Rates

#: Bytes of the calls whose times are predicted and simulated.
SIZES = ("4K", "256K", "16M", "256M")
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


def test_one_option_names_several_nics() -> None:
    listed = found_by("--lose", "1:1,2:0", "--slow", "3:0:0.5,0:1:0.25", is_simulated=False)
    assert listed.scenario.lost == ((1, 1), (2, 0))
    assert listed.scenario.slow == ((3, 0, 8), (0, 1, 4))


def test_a_slow_nic_is_neither_lost_nor_whole() -> None:
    found = found_by("--slow", "0:0:0.98,1:0:0.01", is_simulated=False)
    assert found.scenario.slow == ((0, 0, 15), (1, 0, 1))


def test_the_reason_names_the_two_fastest_and_their_times() -> None:
    found = found_by("--nics", "8", "--lose", "1:1", is_simulated=False)
    for why, forecasts in ((found.why, found.healthy), (found.why_degraded, found.degraded)):
        compared = re.search("compared were (.+?)(;|$)", why)
        assert compared is not None
        names = re.split(", | and ", compared[1])
        times = sorted((forecasts[name].predicted_s, name) for name in names)
        assert len(times) > 2
        for time_s, name in times[:2]:
            assert f"{1e3 * time_s:.3f} ms" in why
            assert name in (*re.findall("(?:before|to) ([a-z_]+)", why), *chosen_of(forecasts))
    assert "dissemination competes only while all NICs work" in found.why_degraded
    assert "dissemination" not in found.why_degraded.partition(";")[2].partition(";")[0]


def chosen_of(forecasts: dict[str, forecast.Forecast]) -> list[str]:
    return [name for name, each in forecasts.items() if each.is_chosen]


def test_schedules_that_cannot_run_are_named() -> None:
    found = found_by("--nodes", "3", "--lose", "0:0,1:1", is_simulated=False)
    assert "ring and tree cannot run, because some nodes have no common rail" in found.why_degraded


def test_one_nic_per_node_is_no_shared_wire() -> None:
    found = found_by("--nics", "1", is_simulated=False)
    assert "compared were dissemination, " in found.why


@pytest.mark.parametrize(
    ("nodes", "nbytes"),
    slow_but(
        [*product((2, 3), SIZES), (8, "256K")],
        product((2, 3, 8, 64), SIZES),
    ),
)
def test_predictions_are_within_a_third_of_simulations(nodes: int, nbytes: str) -> None:
    found = found_by("--nodes", str(nodes), "--nics", "4", "--nbytes", nbytes, "--lose", "1:1")
    ratios = {
        (state, name): each.predicted_s / each.simulated_s
        for state, forecasts in (("healthy", found.healthy), ("degraded", found.degraded))
        for name, each in forecasts.items()
        if each.predicted_s and each.simulated_s
    }
    assert len(ratios) >= 10
    assert {key: each for key, each in ratios.items() if not 2 / 3 < each < 3 / 2} == {}


@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter", "broadcast", "reduce"])
@pytest.mark.parametrize("nodes", [5, 8])
def test_predictions_of_other_collectives(collective: str, nodes: int) -> None:
    options = ["--nodes", str(nodes), "--nbytes", "320K", "--collective", collective]
    for name, each in found_by(*options).healthy.items():
        assert each.simulated_s == pytest.approx(each.predicted_s, rel=1 / 3), name


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


@pytest.mark.parametrize("collective", ["allreduce", "alltoall", "gather"])
def test_nodes_without_a_common_nic_have_no_times(collective: str) -> None:
    found = found_by("--nodes", "2", "--lose", "0:0,1:1", "--collective", collective)
    assert all(each.simulated_s for each in found.healthy.values())
    [(name, forecast)] = found.degraded.items()
    assert forecast.is_chosen
    assert forecast.predicted_s is forecast.simulated_s is None
    [note] = found.notes
    assert note.startswith(f"{name} is not simulated: no rail is alive at both rank")
    assert "no common home rail" in found.why_degraded


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


def test_the_text_counts_chunks() -> None:
    found = found_by("--ranks-per-node", "2", is_simulated=False)
    for nchunks, words in ((1, "in 1 chunk:"), (2, "in 2 chunks:")):
        assert words in to_text(msgspec.structs.replace(found, nchunks=nchunks))


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
        (["--nodes", "0"], "--nodes 0: allowed is 2 to 1024"),
        (["--nodes", "1"], "--nodes 1: allowed is 2 to 1024"),
        (["--nodes", "9999"], "--nodes 9999: allowed is 2 to 1024"),
        (["--nics", "33"], "--nics 33: allowed is 1 to 32"),
        (["--nodes", "600", "--ranks-per-node", "2"], "1200 ranks in all; allowed is 2 to 1024"),
        (["--lose", "1:0,4:0"], "no NIC 4:0, which --lose names"),
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
        (["--nodes", "x"], "invalid int value"),
        (["--lose", "1:1,2"], "write NODE:NIC"),
        (["--rate", "fast"], "is not a rate"),
    ],
)
def test_a_wrong_argument_is_a_usage_error(capsys, options, reason) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["explain", *options])
    assert reason in capsys.readouterr().err

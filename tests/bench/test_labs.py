"""Benches in labs: who can run them, their settings, and the faults that they draw."""

from __future__ import annotations

import os
import random
from fractions import Fraction
from typing import Any

import pytest

from r2ccl.errors import InvalidArgument
from r2ccl.testing import Action
from r2ccl.testing.netlab import LabError, LabShape


def refuse() -> None:
    raise LabError("no namespaces here")


def test_an_ordinary_user_runs_chaos_in_a_user_namespace(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chaos = bench("chaos")
    entered: list[str] = []
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("sys.argv", ["bench/chaos.py", "--jobs", "0"])
    monkeypatch.setattr(chaos, "ensure_privileged", lambda: entered.append("entered"))
    assert chaos.main() == 0
    assert entered == ["entered"]
    monkeypatch.setattr(chaos, "ensure_privileged", refuse)
    assert chaos.main() == 69
    assert "no namespaces here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [(InvalidArgument("no such lab"), 2), (LabError("no namespaces here"), 69)],
)
def test_a_wrong_shape_is_told_from_a_machine_that_cannot(
    error: Exception, status: int, bench: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    labs = bench("labs")
    monkeypatch.setattr(labs, "ensure_privileged", lambda: None)
    with pytest.raises(SystemExit) as ended, labs.ready_for_labs("scale"):
        raise error
    assert ended.value.code == status
    assert capsys.readouterr().err == f"scale: {error}\n"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("failover", ["--runs", "0"]),
        ("failover", ["--rate", "3"]),
        ("failover", ["--nbytes", "0"]),
        ("failover", ["--nbytes", "512K"]),
        ("failover", ["--nbytes", "8388609"]),
        ("overhead", ["--jobs", "0"]),
        ("overhead", ["--rounds", "0"]),
    ],
)
def test_settings_that_measure_nothing_are_refused(
    name: str, arguments: list[str], bench: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.argv", [f"bench/{name}.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        bench(name).parse_arguments()
    assert "must be" in capsys.readouterr().err


@pytest.mark.parametrize("rate_mbps", [4, 6, 201])
def test_a_slow_nic_has_the_part_that_the_bound_assumes(bench: Any, rate_mbps: int) -> None:
    failover = bench("failover")
    fault = failover.draw_fault(Action.SLOW, random.Random(1), rate_mbps)
    kbit = int(fault.rate.removesuffix("kbit"))
    assert Fraction(kbit, 1000 * rate_mbps) == Fraction(1, failover.SLOW_PART)
    assert LabShape(rate=fault.rate).rate == fault.rate  # tc knows this unit

"""The demo: it cuts a rail in mid-call, tells of it, and fails if a result is wrong."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from r2ccl.cli import demo_rank, main


@pytest.mark.parametrize("nrails", [2, 4])
def test_the_demo_survives_the_loss_of_a_rail(nrails: int, tmp_path: Path) -> None:
    options = ["-n", "2", "--calls", "2", "--nbytes", "1M", "--rails", str(nrails)]
    options += ["--json", "demo.json"]
    ran = subprocess.run(
        [sys.executable, "-m", "r2ccl", "demo", *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,  # no checkout is needed
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == f"2 ranks, {nrails} rails each: 2 allreduces of 1 MiB"
    assert [line.partition(":")[0] for line in lines if line.startswith("call")] == [
        f"call {number}" for number in range(2)
    ]
    assert lines[-1].startswith("OK: rail 1 of rank 0 was cut in mid-call")
    found = json.loads((tmp_path / "demo.json").read_text())
    assert [found[name] for name in ("nranks", "nrails", "nbytes", "nwrong")] == [
        2, nrails, 1 << 20, 0,
    ]  # fmt: skip
    assert len(found["seconds"]) == 2
    assert {each["rail"] for each in found["repairs"]} == {1}


class OneRank:
    """Communicator of one rank whose allreduce adds `added` to the result."""

    rank, nranks = 0, 1

    def __init__(self, added: float) -> None:
        self.added = added

    def __enter__(self) -> OneRank:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def allreduce(self, x):
        if x.size > 1:
            x += self.added
        return x

    def repairs(self):
        return ()

    def health(self):
        return type("Report", (), {"rails": [0] * 4})


@pytest.mark.parametrize("added", [0, 1])
def test_wrong_elements_are_counted(monkeypatch, capsys, caplog, added) -> None:
    caplog.set_level(logging.WARNING, "r2ccl")  # the demo sets it; the test restores it

    class Plan:
        def __enter__(self) -> None: ...
        def __exit__(self, *exc: object) -> None: ...
        def assert_all_fired(self) -> None: ...

    monkeypatch.setattr(demo_rank, "fail_at", lambda **where: Plan())
    monkeypatch.setattr(demo_rank, "init", lambda faults: OneRank(added))
    assert demo_rank.run_rank(2, 4096, 0).nwrong == added * 2 * 1024
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match("FAILED: 2048 elements are wrong" if added else "OK: ", last)


def test_a_rail_that_was_not_cut_is_no_success(monkeypatch, capsys, caplog) -> None:
    caplog.set_level(logging.WARNING, "r2ccl")  # the demo sets it; the test restores it
    monkeypatch.setattr(demo_rank, "init", lambda faults: OneRank(0))
    with pytest.raises(AssertionError, match="did not fire"):
        demo_rank.run_rank(2, 4096, 0)
    assert "OK" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-n", "1"], "-n 1: allowed is 2 or more"),
        (["--rails", "1"], "--rails 1"),
        (["--calls", "1"], "--calls 1"),
        (["--nbytes", "1K"], "--nbytes 1024: allowed is 1048576 or more"),
    ],
)
def test_a_demo_without_a_failure_in_mid_call_is_refused(capsys, options, reason) -> None:
    assert main(["demo", *options]) == 2
    assert reason in capsys.readouterr().err

"""Benches that break things, and the demo, in a lab: short runs of the real programs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from r2ccl.testing.netlab import unavailable_reason

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    reason = unavailable_reason()
    if reason:
        pytest.skip(reason)


def run(*argv: str | Path, cwd: Path) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_bench_says_what_a_fault_costs(tmp_path: Path) -> None:
    run(
        ROOT / "bench/failover.py", "--runs", "1", "--faults", "nic_down,blackhole,stop",
        "--nbytes", "8M", "--json", "out.json", "--png", "out.png", cwd=tmp_path,
    )  # fmt: skip
    saved = json.loads((tmp_path / "out.json").read_text())
    rows = {row["fault"]: row for row in saved["results"] if row["measure"] == "fault"}
    assert set(rows) == {"nic_down", "blackhole", "stop"}
    assert 0 < rows["nic_down"]["detection_ms"] < rows["nic_down"]["last_resume_ms"]
    # Silence is detected by a timeout, so not earlier.
    assert rows["blackhole"]["detection_ms"] > 1e3 * rows["blackhole"]["suspicion_timeout_s"] / 2
    # A stopped process is not a failed rail: nothing moves.
    assert rows["stop"]["detection_ms"] is None
    assert all(row["before_mbps"] > row["struck_mbps"] for row in rows.values())
    states = {row["state"]: row for row in saved["results"] if row["measure"] == "goodput"}
    assert set(states) == {"healthy", "under nic_down", "under blackhole"}
    assert states["under nic_down"]["bound_mbps"] == 750, "15 of 16 NICs of 200 Mbit/s, each way"
    assert 0 < states["under nic_down"]["worst_share_of_bound"] <= 1
    calls = [row for row in saved["results"] if row["measure"] == "call"]
    assert {row["fault"] for row in calls} == set(rows)
    assert all(row["begun_s"] < row["ended_s"] for row in calls)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_first_call_connects_its_paths_and_a_second_does_not(tmp_path: Path) -> None:
    run(ROOT / "bench/first_call.py", "--nodes", "8", "--json", "out.json", cwd=tmp_path)
    (row,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert row["ncalls"] == 16
    assert 0 < row["again_ms_median"] < row["first_ms_median"] <= row["first_ms_max"]


def test_strangers_at_the_rail_ports_cost_no_rail_and_no_result(tmp_path: Path) -> None:
    written = run(
        ROOT / "bench/strangers.py", "--rates", "2000", "--rounds", "2", "--window-s", "1.5",
        "--json", "out.json", cwd=tmp_path,
    )  # fmt: skip
    assert "0 rails given up" in written
    (row,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert row["opened_per_s"] > 100, "there was a flood"
    assert row["repairs"] == 0


def test_demo_loses_a_nic_and_no_bit(tmp_path: Path) -> None:
    written = run(ROOT / "examples/train_digits.py", "--epochs", "1", cwd=tmp_path)
    assert "CARRIER_DOWN" in written
    assert "ms after the failure, at rank" in written
    assert written.rstrip().splitlines()[-1].startswith("OK: a NIC died during an allreduce")
    assert (tmp_path / "out/demo.png").read_bytes().startswith(b"\x89PNG")

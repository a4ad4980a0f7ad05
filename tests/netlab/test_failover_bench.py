"""The failover bench and the demo in a lab: short runs of the real thing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from r2ccl.testing.netlab import unavailable_reason

ROOT = Path(__file__).parents[2]


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
    # Silence is found by its timeout, so not before.
    assert rows["blackhole"]["detection_ms"] > 1e3 * rows["blackhole"]["suspicion_timeout_s"] / 2
    # A stopped process is not a failed rail: nothing moves.
    assert rows["stop"]["detection_ms"] is None
    assert all(row["before_mbps"] > row["during_mbps"] for row in rows.values())
    states = [row["state"] for row in saved["results"] if row["measure"] == "goodput"]
    assert states == ["healthy", "one of four NICs lost"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_demo_loses_a_nic_and_no_bit(tmp_path: Path) -> None:
    written = run(ROOT / "examples/train_digits.py", "--epochs", "1", cwd=tmp_path)
    assert "CARRIER_DOWN" in written
    assert "ms after the cut, at rank" in written
    assert written.rstrip().splitlines()[-1].startswith("OK: a NIC died in mid-allreduce")
    assert (tmp_path / "out/demo.png").read_bytes().startswith(b"\x89PNG")

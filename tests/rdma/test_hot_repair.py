"""NICs die under a running job: real ports, real queue pairs, and every sum exact."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from r2ccl.testing.rdmalab import Shape

#: Rounds of random cuts; ``make test-rdma`` sets more.
ROUNDS = int(os.environ.get("R2CC_RDMA_ROUNDS", "6"))
PROGRAM = Path(__file__).with_name("repair_rank.py")


@pytest.fixture(autouse=True)
def _all_links_up(lab: Shape) -> None:
    for node in range(lab.nodes):
        for nic in range(lab.nics):
            subprocess.run(["ip", "link", "set", f"n{node}r{nic}", "up"], check=True)


def run(scenario: str, folder: Path, rounds: int = 1) -> dict[str, Any]:
    """Run four ranks on two nodes; return what rank 0 wrote."""
    report = folder / "report.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "r2ccl", "launch", "-n", "4", "--",
            sys.executable, str(PROGRAM), scenario, str(rounds), str(report),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    found: dict[str, Any] = json.loads(report.read_text())
    return found


@pytest.mark.timeout(700)
def test_a_nic_dies_at_any_moment_on_either_side(lab: Shape, tmp_path: Path) -> None:
    report = run("random", tmp_path, ROUNDS)
    assert report["nsums"] == 2 + 4 * ROUNDS
    repairs = [repair for note in report["notes"] for repair in note["repairs"]]
    assert repairs, "no NIC was ever missed"
    fences = sorted(repair["fence_ms"] for repair in repairs)
    resumes = sorted(repair["resume_ms"] for repair in repairs)
    print(
        f"{ROUNDS} rounds exact; {len(repairs)} paths repaired at rank 0; evidence to fenced "
        f"{fences[0]:.0f} / {fences[len(fences) // 2]:.0f} / {fences[-1]:.0f} ms, to going on "
        f"{resumes[0]:.0f} / {resumes[len(resumes) // 2]:.0f} / {resumes[-1]:.0f} ms"
    )


@pytest.mark.timeout(400)
def test_traffic_returns_to_a_restored_nic(lab: Shape, tmp_path: Path) -> None:
    """Two NICs one after another, then the first back and the third down."""
    notes = run("several", tmp_path)["notes"]
    assert [note["routes"] for note in notes] == [[1, 2], [2], [0]]


@pytest.mark.timeout(400)
def test_tcp_is_the_last_resort_and_rdma_takes_over_again(lab: Shape, tmp_path: Path) -> None:
    without, after = run("everything", tmp_path)["notes"]
    assert all(rail < 0 for rail in without["routes"]), "TCP's rails come before RDMA's"
    assert after["routes"] == [0, 1, 2]

"""NICs die under a running job: real ports, real queue pairs, and every sum exact."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from r2ccl.testing.rdmalab import MachineShape

#: Rounds of random cuts; ``make test-rdma`` sets more.
ROUNDS = int(os.environ.get("R2CC_RDMA_ROUNDS", "6"))
PROGRAM = Path(__file__).with_name("repair_rank.py")


@pytest.fixture(autouse=True)
def _all_links_whole(lab: MachineShape) -> Iterator[None]:
    """Whatever a test that fails leaves: neither the next one here nor other tests meet it."""
    mend(lab)
    yield
    mend(lab)


def mend(lab: MachineShape) -> None:
    for node in range(lab.nodes):
        for nic in range(lab.nics):
            subprocess.run(["ip", "link", "set", lab.netdev(node, nic), "up"], check=True)
            # There is nothing to delete where nothing was left.
            subprocess.run(
                ["tc", "qdisc", "del", "dev", lab.netdev(node, nic), "root"],
                stderr=subprocess.DEVNULL, check=False,
            )  # fmt: skip


def run(scenario: str, folder: Path, rounds: int = 1) -> list[dict[str, Any]]:
    """Run four ranks on two nodes; return what each wrote."""
    done = subprocess.run(
        [
            sys.executable, "-m", "r2ccl", "launch", "-n", "4", "--",
            sys.executable, str(PROGRAM), scenario, str(rounds), str(folder),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def repairs_of(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [repair for report in reports for note in report["notes"] for repair in note["repairs"]]


def spread(values: Iterable[float]) -> str:
    """Spell min / median / max in milliseconds."""
    found = sorted(values)
    return f"{found[0]:.0f} / {found[len(found) // 2]:.0f} / {found[-1]:.0f} ms"


@pytest.mark.timeout(700)
def test_a_nic_dies_at_any_moment_on_either_side(lab: MachineShape, tmp_path: Path) -> None:
    reports = run("random", tmp_path, ROUNDS)
    assert {report["nsums"] for report in reports} == {2 + 4 * ROUNDS}
    repairs = repairs_of(reports)
    assert repairs, "no NIC was ever missed"
    print(
        f"\n{ROUNDS} NICs down, every sum exact; {len(repairs)} ends of paths repaired; "
        f"evidence to fenced {spread(repair['fence_ms'] for repair in repairs)}, "
        f"to going on {spread(repair['resume_ms'] for repair in repairs)}"
    )


@pytest.mark.timeout(700)
def test_a_wire_swallows_everything_and_no_port_says_so(lab: MachineShape, tmp_path: Path) -> None:
    rounds = max(1, ROUNDS // 2)
    reports = run("swallow", tmp_path, rounds)
    assert {report["nsums"] for report in reports} == {2 + 8 * rounds}
    repairs = repairs_of(reports)
    assert any("RETRY_EXC_ERR" in repair["cause"] for repair in repairs), "no queue pair noticed"
    assert not any("PORT_ERR" in repair["cause"] for repair in repairs)
    began = [note["began_s"][0] for note in reports[0]["notes"]]
    lost = [
        [repair for report in reports for repair in report["notes"][index]["repairs"]]
        for index in range(rounds)
    ]
    silent = [
        1e3 * (min(repair["failed_s"] for repair in ends) - began_s)
        for ends, began_s in zip(lost, began, strict=True)
        if ends
    ]
    print(
        f"\n{rounds} black holes, every sum exact; hole to first evidence {spread(silent)} "
        f"(a queue pair gives up after 4 times 2^16 x 4.096 us, 1074 ms), "
        f"evidence to going on {spread(repair['resume_ms'] for repair in repairs)}"
    )


@pytest.mark.timeout(400)
def test_traffic_returns_to_a_restored_nic(lab: MachineShape, tmp_path: Path) -> None:
    """Two NICs one after another, then the first back and the third down."""
    notes = run("several", tmp_path)[0]["notes"]
    assert [note["routes"] for note in notes] == [[1, 2], [2], [0]]


@pytest.mark.timeout(400)
def test_tcp_is_the_last_resort_and_rdma_takes_over_again(
    lab: MachineShape, tmp_path: Path
) -> None:
    without, after = run("everything", tmp_path)[0]["notes"]
    assert all(rail < 0 for rail in without["routes"]), "TCP's rails come before RDMA's"
    assert after["routes"] == [0, 1, 2]

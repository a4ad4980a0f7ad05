"""What ranks find to be broken, on real queue pairs: each kind of fault named at both ends.

Three nodes are needed: a wire between two takes the carrier of both. R2CC_RDMA_ROUNDS sets the
rounds of each kind, a job for all of them; a killed process takes a job of its own each.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from r2ccl.testing.rdmalab import MachineShape

ROUNDS = int(os.environ.get("R2CC_RDMA_ROUNDS", "6"))
PROGRAM = Path(__file__).with_name("verdicts_rank.py")
NRANKS = 3

Rounds = list[dict[str, Any]]


def run(
    kind: str, lab: MachineShape, folder: Path, first: int = 0, rounds: int = ROUNDS
) -> list[Rounds]:
    """Run a rank on each node, from round `first` on; return by rank what it wrote, if it did."""
    if lab.nodes < NRANKS:
        pytest.skip(f"a lab of {NRANKS} nodes is needed: r2ccl rdmalab --nodes {NRANKS} --nics 2")
    done = subprocess.run(
        [
            sys.executable, "-m", "r2ccl", "launch", "--keep-going", "-n", str(NRANKS), "--",
            sys.executable, str(PROGRAM), kind, str(first), str(rounds), str(folder),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert (done.returncode != 0) == (kind == "kill"), done.stdout
    files = [folder / f"{rank}.json" for rank in range(NRANKS)]
    return [json.loads(each.read_text()) if each.exists() else [] for each in files]


def by_round(reports: list[Rounds]) -> list[Rounds]:
    """Return what the ranks found, of each round."""
    return [list(each) for each in zip(*reports, strict=True)]


@pytest.mark.timeout(1000)
def test_a_dead_nic_is_local_to_its_node_and_remote_to_others(
    lab: MachineShape, tmp_path: Path
) -> None:
    for each in by_round(run("nic_down", lab, tmp_path)):
        node, nic = each[0]["node"], each[0]["nic"]
        others = [rank for rank in range(NRANKS) if rank != node]
        print(f"nic_down: node {node}, NIC {nic}: {[report['found'] for report in each]}")
        assert each[node]["found"] == {f"{peer} {nic}": "local_nic" for peer in others}
        for rank in others:
            assert each[rank]["found"] == {f"{node} {nic}": "remote_nic"}


@pytest.mark.timeout(1000)
def test_a_nic_that_swallows_everything_is_told_from_its_peers(
    lab: MachineShape, tmp_path: Path
) -> None:
    for each in by_round(run("hole", lab, tmp_path)):
        node, nic = each[0]["node"], each[0]["nic"]
        print(f"hole: node {node}, NIC {nic}: {[report['found'] for report in each]}")
        # It is noticed where there is traffic, so on one of the two paths at least.
        found = each[node]["found"]
        assert set(found.values()) == {"local_nic"}
        for rank in set(range(NRANKS)) - {node}:
            mirrored = {f"{node} {nic}": "remote_nic"} if f"{rank} {nic}" in found else {}
            assert each[rank]["found"] == mirrored


@pytest.mark.timeout(1000)
def test_two_nics_that_do_not_reach_each_other_are_a_link(
    lab: MachineShape, tmp_path: Path
) -> None:
    for each in by_round(run("isolate", lab, tmp_path)):
        nic = each[0]["nic"]
        print(f"isolate: nodes 1 and 2, NIC {nic}: {[report['found'] for report in each]}")
        expected: list[dict[str, str]] = [{}, {f"2 {nic}": "link"}, {f"1 {nic}": "link"}]
        assert [report["found"] for report in each] == expected


@pytest.mark.timeout(1000)
def test_a_stopped_process_is_slow_and_nothing_moves(lab: MachineShape, tmp_path: Path) -> None:
    for each in by_round(run("stop", lab, tmp_path)):
        victim = each[0]["node"]
        print(f"stop: rank {victim}: {[report['found'] for report in each]}")
        assert [report["nrepairs"] for report in each] == [0] * NRANKS, "nothing may move"
        found = [kind for report in each for kind in report["found"].values()]
        assert set(found) == {"peer_slow"}
        blamed = {path.split()[0] for rank in range(NRANKS) for path in each[rank]["found"]}
        assert str(victim) in blamed


@pytest.mark.timeout(1000)
def test_a_killed_process_is_lost_to_both_others(lab: MachineShape, tmp_path: Path) -> None:
    for turn in range(ROUNDS):
        folder = tmp_path / str(turn)
        folder.mkdir()
        reports = run("kill", lab, folder, first=turn, rounds=1)
        (victim,) = (rank for rank in range(NRANKS) if not reports[rank])
        said = [reports[rank][0] for rank in range(NRANKS) if rank != victim]
        print(f"kill: rank {victim}: {said}")
        assert victim, "rank 0 kills"
        assert [each["lost"] for each in said] == [victim] * 2

"""What ranks find to be broken, on real queue pairs: each kind of fault named at both ends.

Three nodes are needed: a wire between two takes the carrier of both. R2CC_RDMA_ROUNDS sets the
rounds of each kind.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from r2ccl.testing.rdmalab import Shape

ROUNDS = int(os.environ.get("R2CC_RDMA_ROUNDS", "6"))
PROGRAM = Path(__file__).with_name("verdicts_rank.py")
NRANKS = 3

Round = dict[str, Any]


def run(kind: str, lab: Shape, folder: Path) -> list[list[Round]]:
    """Run a rank on each node; return by round what each rank wrote."""
    if lab.nodes < NRANKS:
        pytest.skip(f"a lab of {NRANKS} nodes is needed: r2ccl rdmalab --nodes {NRANKS} --nics 2")
    done = subprocess.run(
        [
            sys.executable, "-m", "r2ccl", "launch", "-n", str(NRANKS), "--",
            sys.executable, str(PROGRAM), kind, str(ROUNDS), str(folder),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NRANKS)]
    return [list(each) for each in zip(*reports, strict=True)]


@pytest.mark.timeout(1000)
def test_a_dead_nic_is_local_to_its_node_and_remote_to_the_others(
    lab: Shape, tmp_path: Path
) -> None:
    for each in run("nic_down", lab, tmp_path):
        node, nic = each[0]["node"], each[0]["nic"]
        others = [rank for rank in range(NRANKS) if rank != node]
        print(f"nic_down: node {node}, NIC {nic}: {[report['found'] for report in each]}")
        assert each[node]["found"] == {f"{peer} {nic}": "local_nic" for peer in others}
        for rank in others:
            assert each[rank]["found"] == {f"{node} {nic}": "remote_nic"}


@pytest.mark.timeout(1000)
def test_a_stopped_process_is_slow_and_nothing_moves(lab: Shape, tmp_path: Path) -> None:
    for each in run("stop", lab, tmp_path):
        victim = each[0]["node"]
        print(f"stop: rank {victim}: {[report['found'] for report in each]}")
        assert [report["nrepairs"] for report in each] == [0] * NRANKS, "nothing may move"
        found = [kind for report in each for kind in report["found"].values()]
        assert set(found) == {"peer_slow"}
        blamed = {path.split()[0] for rank in range(NRANKS) for path in each[rank]["found"]}
        assert str(victim) in blamed

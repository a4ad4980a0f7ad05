"""DDP and FSDP2 on real NICs: trainings with and without a lost NIC end with the same weights.

R2CC_CAMPAIGN_RUNS sets the trainings of each kind in the slow cases (default 10). The weights have
equal bits with the setting for which docs/torch.md promises it; by default, they agree within
rounding.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from pytorch.jobs import ROOT
from support.slow import slow_but

from r2ccl.testing import Action, Fault, FaultPlan
from r2ccl.testing.netlab import Lab, unavailable_reason

pytest.importorskip("torch.distributed", reason="torch is not installed: make test-torch")
REASON = unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no netlab here: {REASON}")

PROGRAM = Path(__file__).with_name("rails_rank.py")
RUNS = int(os.environ.get("R2CC_CAMPAIGN_RUNS", "10"))
NODES, RAILS = 4, 4
#: Slices that every rank sends at least in a collective of a training, for each R2CC_ALGO.
NSLICES = {"ring": NODES - 1, "auto": 1}
ENV = {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    "OMP_NUM_THREADS": "1",
    # Without quarantine, so that NICs can fail again and again.
    "R2CC_QUARANTINE_CAP_S": "0",
}


def train(
    lab: Lab, nruns: int, algo: str, folder: Path, plan: FaultPlan | None = None
) -> list[dict[str, Any]]:
    """Run the program on every node; return what each rank printed."""
    lines: list[str] = []
    results = lab.run(
        [sys.executable, str(PROGRAM), str(nruns), str(folder)],
        env={**ENV, "R2CC_ALGO": algo}, plan=plan, timeout_s=60 + 30 * nruns, sink=lines.append,
    )  # fmt: skip
    assert all(each.returncode == 0 for each in results), "\n".join(lines)
    return [json.loads(each.output.strip().splitlines()[-1]) for each in results]


def cuts(trainings: list[tuple[str, int, int, str]], algo: str) -> FaultPlan:
    """Return a plan in which a random NIC goes down in a random collective of each training."""
    rng, faults = random.Random(23), []
    for _, first, end, _ in trainings:
        op, step = rng.randrange(first, end), rng.randrange(NSLICES[algo])
        node, rail = rng.randrange(NODES), rng.randrange(RAILS)
        faults.append(
            Fault(
                action=Action.NIC_DOWN, node=node, rail=rail, at_op=op, at_step=step,
                duration_s=rng.uniform(0.1, 1.0),
            )
        )  # fmt: skip
    return FaultPlan(faults)


def train_twice(nruns: int, algo: str, folder: Path) -> list[list[dict[str, Any]]]:
    """Train without a failure, then with a cut in each training; return what the ranks printed."""
    folders = [folder / name for name in ("healthy", "struck")]
    for each in folders:
        each.mkdir()
    with Lab(nodes=NODES, rails=RAILS) as lab:
        healthy = train(lab, nruns, algo, folders[0])
        plan = cuts(healthy[0]["trainings"], algo)
        struck = train(lab, nruns, algo, folders[1], plan)
    plan.assert_all_fired()
    print(f"{len(plan.fired)} trainings, {sum(len(r['rails left']) for r in struck)} paths moved")
    assert [rank["rails left"] for rank in healthy] == [[]] * NODES
    assert {fault.rail for fault in plan.faults} == {
        rail for rank in struck for rail in rank["rails left"]
    }
    return [healthy, struck]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("nruns", slow_but([1], sorted({1, RUNS})))
def test_a_lost_nic_changes_no_bit_of_the_weights(nruns: int, tmp_path: Path) -> None:
    healthy, struck = train_twice(nruns, "ring", tmp_path)
    weights = {(name, bits) for rank in healthy for name, _, _, bits in rank["trainings"]}
    assert len(weights) == 2, "trainings of a way without a failure differ"
    for rank in struck:
        assert rank["trainings"] == healthy[0]["trainings"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("nruns", slow_but([1], sorted({1, RUNS})))
def test_a_lost_nic_changes_weights_by_rounding_only(nruns: int, tmp_path: Path) -> None:
    import torch
    from pytorch.rails_rank import model

    train_twice(nruns, "auto", tmp_path)
    expected = torch.load(tmp_path / "healthy/0.pt")
    for untrained, trained in zip(model().parameters(), expected[0], strict=True):
        assert not torch.allclose(untrained, trained, rtol=1e-2, atol=1e-4)
    for rank in range(NODES):
        torch.testing.assert_close(torch.load(tmp_path / f"struck/{rank}.pt"), expected)

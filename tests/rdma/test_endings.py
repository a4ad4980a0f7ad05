"""Endings of ranks whose slices travel over queue pairs: the lines of `endings` that verbs change.

The tests on sockets have all lines. Those that differ only above the transport are not repeated:
SIGTERM ends a rank as Ctrl-C does, a method that a handler calls as one that a thread calls,
`revoke` as `abort`; ranks that wait in `init` have opened no device, and those in `shrink` have
closed theirs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import endings
import pytest
from endings import cells
from endings.cells import ended_s
from support import punctual
from support.forked_ranks import ForkedRanks, Output

from r2ccl.testing.rdmalab import MachineShape

#: Waits and limits are so many times longer than on sockets. The processor is emulated: a loop of
#: Python takes 16 times as long as outside (3,000,000 additions: 1.9 s and 0.12 s), a wait takes no
#: longer, and an end is made of both. The slowest took 1.4 s: on two cores, at a load of 10.
SCALE = 4.0
TIMEOUT_S = 90.0
NRANKS, NICS = 3, 1
FOLDER = Path(next(iter(endings.__path__)))
ENDING, FORK = FOLDER / "ending_rank.py", FOLDER / "fork_rank.py"

CELLS = [
    ("interrupt", "idle"),
    ("kill", "idle"),
    *((each, "call") for each in ("abort_thread", "close_thread", "interrupt", "twice", "kill")),
    *((ending, "async") for ending in ("abort_thread", "interrupt")),
    *((ending, "repair") for ending in ("abort_thread", "close_thread", "twice", "kill")),
    *((ending, "flow") for ending in ("abort_thread", "interrupt", "twice", "kill")),
]


@pytest.fixture(scope="module")
def ranks(lab: MachineShape) -> Iterator[ForkedRanks]:
    with ForkedRanks([ENDING, FORK], ["rdma.preloaded"]) as forked:
        yield forked


def run(ranks: ForkedRanks, lab: MachineShape, script: Path, argument: str) -> list[Output]:
    """Run a job of three ranks on two nodes."""
    environments = [
        {
            "R2CC_HCA": "=" + ",".join(lab.devices(rank * lab.nodes // NRANKS)[:NICS]),
            "R2CC_SOCKET_IFNAME": "=lo",
            "R2CC_RAILS": "1",
            "R2CC_INIT_TIMEOUT_S": "60",
            "R2CC_PEER_TIMEOUT_S": "30",
            "R2CC_SUSPICION_TIMEOUT_S": "5",
        }
        for rank in range(NRANKS)
    ]
    began_s = time.monotonic()
    outputs = ranks.run(script, argument, environments, TIMEOUT_S)
    print(f"\n{script.stem} {argument}: {time.monotonic() - began_s:.1f} s", end=" ")
    return outputs


def require_verbs(found: dict[int, dict[str, Any]]) -> None:
    """Assert that every rank's links were on RDMA NICs, and on none else."""
    for rank, each in found.items():
        assert each["rails"], each
        assert all("rxe_" in name for name in each["rails"].values()), (rank, each["rails"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ending", "moment"), CELLS)
def test_an_end(ranks: ForkedRanks, lab: MachineShape, ending: str, moment: str) -> None:
    punctual.in_time(lambda: end(ranks, lab, ending, moment))


def end(ranks: ForkedRanks, lab: MachineShape, ending: str, moment: str) -> None:
    outputs = run(ranks, lab, ENDING, cells.plan(ending, moment, SCALE))
    seen = cells.read(outputs, ending)
    delays = [f"{each['raised_s'] - seen.ended_s:.2f}" for each in seen.found.values()]
    print(f"raised after {' '.join(delays)} s", end=" ")
    require_verbs(seen.found)
    cells.judge(seen, ending, moment, SCALE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["unwinds", "outlives"])
def test_a_child_harms_nobody(ranks: ForkedRanks, lab: MachineShape, kind: str) -> None:
    punctual.in_time(lambda: fork(ranks, lab, kind))


def fork(ranks: ForkedRanks, lab: MachineShape, kind: str) -> None:
    outputs = run(ranks, lab, FORK, kind)
    is_killed = kind == "outlives"
    found = {}
    for rank, (code, out, err) in enumerate(outputs):
        if not (is_killed and rank == 1):
            assert code == 0, err
            found[rank] = json.loads(out.splitlines()[-1])
    require_verbs(found)
    for rank, each in found.items():
        if is_killed:
            assert each["error"] == "PeerLost", each
            assert "rank 1" in each["text"]
            punctual.check(each["raised_s"] - ended_s(outputs[1].out), 0.5 * SCALE, each)
        else:
            assert not each["error"], each
            assert each["child"] == (0 if rank == 1 else None)

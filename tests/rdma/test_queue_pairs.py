"""Queue pairs that the kernel counts for each rank, as the number of ranks grows.

Ranks are forked from a process that has imported everything, and share the NICs of their node. The
timeouts are long because the processor is emulated: without KVM, 8 ranks take some minutes, so the
tests run only if R2CC_RDMA_QUEUE_PAIRS is set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked_ranks import ForkedRanks
from support.slow import slow_but

from r2ccl.algos.neighbors import neighbors
from r2ccl.testing.rdmalab import MachineShape

pytestmark = pytest.mark.skipif(
    not os.environ.get("R2CC_RDMA_QUEUE_PAIRS"),
    reason="takes minutes on an emulated processor: set R2CC_RDMA_QUEUE_PAIRS=1",
)
PROGRAM = Path(__file__).with_name("queue_pairs_rank.py")
START_S, TIMEOUT_S = 300.0, 300.0


@pytest.fixture(scope="module")
def ranks(lab: MachineShape) -> Iterator[ForkedRanks]:
    with ForkedRanks([PROGRAM], ["rdma.preloaded", "r2ccl.factory"], START_S) as forked:
        yield forked


def environment(hcas: tuple[str, ...]) -> dict[str, str]:
    return {
        "R2CC_HCA": "=" + ",".join(hcas),
        "R2CC_SOCKET_IFNAME": "=lo",
        "R2CC_RAILS": "1",
        "R2CC_SHM": "0",
        "R2CC_MODE": "failstop",  # without the queue pairs of probes
        "R2CC_INIT_TIMEOUT_S": "200",
        "R2CC_CONNECT_TIMEOUT_S": "150",
        "R2CC_PEER_TIMEOUT_S": "120",
        "R2CC_NO_RAIL_TIMEOUT_S": "120",
    }


@pytest.mark.timeout(START_S + TIMEOUT_S)
@pytest.mark.parametrize(("nranks", "nrails"), slow_but([(2, 1)], [(2, 1), (4, 1), (8, 1), (8, 2)]))
def test_queue_pairs_grow_with_the_neighbors(
    ranks: ForkedRanks, lab: MachineShape, nranks: int, nrails: int
) -> None:
    environments = [
        environment(lab.devices(rank * lab.nodes // nranks)[:nrails]) for rank in range(nranks)
    ]
    outputs = ranks.run(PROGRAM, "", environments, TIMEOUT_S)
    assert [each.returncode for each in outputs] == [0] * nranks, outputs
    found = [json.loads(each.out.splitlines()[-1]) for each in outputs]
    print(f"\n{nranks} ranks, {nrails} rails: init() took {found[0]['init_s']:.0f} s", end=" ")
    for each in found:
        npeers = len(neighbors(each["rank"], nranks))
        assert npeers <= 5
        assert each["npeers"] == npeers
        assert each["nqps"] == npeers * nrails

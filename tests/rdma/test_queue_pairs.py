"""Queue pairs that the kernel counts for each rank, as the number of ranks grows.

Ranks are forked from a process that has imported everything, and share the NIC of a node. The
timeouts are long because the processor is emulated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked_ranks import ForkedRanks
from support.slow import slow_but

from r2ccl.algos.neighbors import neighbors
from r2ccl.testing.rdmalab import MachineShape

PROGRAM = Path(__file__).with_name("queue_pairs_rank.py")
TIMEOUT_S = 400.0


@pytest.fixture(scope="module")
def ranks(lab: MachineShape) -> Iterator[ForkedRanks]:
    with ForkedRanks([PROGRAM], ["rdma.preloaded", "r2ccl.factory"]) as forked:
        yield forked


def expected(rank: int, nranks: int, nrails: int) -> int:
    """Return the queue pairs of `rank`: of paths, and of probes in both directions."""
    nvias = min(nrails, 2)  # the port of a peer is probed from the same rail and the next one
    return len(neighbors(rank, nranks)) * nrails * (1 + 2 * nvias)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("nranks", "nrails"), slow_but([(2, 2)], [(2, 2), (4, 1), (8, 1), (8, 2)]))
def test_queue_pairs_grow_with_the_neighbors(
    ranks: ForkedRanks, lab: MachineShape, nranks: int, nrails: int
) -> None:
    environments = [
        {
            "R2CC_HCA": "=" + ",".join(lab.devices(rank * lab.nodes // nranks)[:nrails]),
            "R2CC_SOCKET_IFNAME": "=lo",
            "R2CC_RAILS": "1",
            "R2CC_INIT_TIMEOUT_S": "200",
            "R2CC_CONNECT_TIMEOUT_S": "150",
            "R2CC_PEER_TIMEOUT_S": "120",
            "R2CC_NO_RAIL_TIMEOUT_S": "120",
            "R2CC_SUSPICION_TIMEOUT_S": "30",
        }
        for rank in range(nranks)
    ]
    wanted = expected(0, nranks, nrails)
    outputs = ranks.run(PROGRAM, str(wanted), environments, TIMEOUT_S)
    assert [each.returncode for each in outputs] == [0] * nranks, outputs
    found = [json.loads(each.out.splitlines()[-1]) for each in outputs]
    print("\n" + "\n".join(map(str, found)))
    for each in found:
        assert each["npeers"] == len(neighbors(each["rank"], nranks))
        assert each["nqps"] == expected(each["rank"], nranks, nrails)

"""Tests that a rank creates queue pairs for its neighbors at the start, not for all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from r2ccl.algos.neighbors import neighbors
from r2ccl.config import Config
from r2ccl.failover.context import RankContext
from r2ccl.failover.failover import Failover
from r2ccl.failover.migration.links import Links
from r2ccl.testing.fakepyverbs import FakeFabric, installed
from r2ccl.transport.verbs.registration import RegistrationCache

NRAILS = 2


def created(nranks: int) -> int:
    """Return how many queue pairs rank 0, which calls all its peers, creates for paths."""
    fabric = FakeFabric()
    with installed(fabric) as loaded:
        devices = [
            loaded.device.RdmaDevice(f"nic{rail}", 1, lambda: (0, "fe80::1"), None, fastpath="0")
            for rail in range(NRAILS)
        ]
        transport = loaded.transport.VerbsTransport(
            0, devices, RegistrationCache([each.registrar for each in devices], 1 << 30),
            eager_nbytes=64, timeout=14, retry_cnt=7, probe_timeout_s=1.0, clock=lambda: 0.0,
        )  # fmt: skip
        before = len(fabric.qps)
        offered: set[int] = set()
        control: Any = SimpleNamespace(
            neighbors=frozenset(),
            send=lambda peer, message: offered.add(peer),
            open_session=lambda peer: None,
        )
        first = neighbors(0, nranks, ())
        context = RankContext(
            0, nranks, transport, control, Config(), lambda: 0.0, nwires=NRAILS, neighbors=first
        )
        failover = Failover(context, Links(context))
        failover.start()
        assert offered == set(first)
        found = len(fabric.qps) - before
        failover.fence_all()
        transport.close()
        return found


@pytest.mark.parametrize(("nranks", "npeers"), [(8, 5), (64, 11), (1024, 19)])
def test_queue_pairs_grow_with_the_logarithm_of_the_ranks(nranks: int, npeers: int) -> None:
    assert created(nranks) == NRAILS * npeers

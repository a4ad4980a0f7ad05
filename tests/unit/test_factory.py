"""Decisions of `r2ccl.init` before any connection is made: arguments, and RDMA ports to use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import r2ccl
from r2ccl.factory import choose_hcas
from r2ccl.testing.fakepyverbs import FakeFabric, installed
from r2ccl.topology.hcas import ROCE_V2, Gid, Hca, select_hcas
from r2ccl.transport.verbs.queue_depths import completions

HCAS = tuple(
    Hca(name, 1, "", "Ethernet", "ACTIVE", 0, -1, (Gid(0, ROCE_V2, "fe80::1"),))
    for name in ("mlx5_0", "mlx5_1", "mlx5_2")
)


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFabric]:
    """A fabric whose NICs can serve 8 ranks; pyverbs is installed."""
    monkeypatch.setattr("r2ccl.factory.find_spec", lambda name: name)
    fabric = FakeFabric(max_cqe=completions(7))
    with installed(fabric):
        yield fabric


@pytest.mark.parametrize("given", ["nccl", 4, ["n1", "n2"]])
def test_a_comm_that_is_no_communicator_is_refused(given: Any) -> None:
    with pytest.raises(r2ccl.InvalidArgument, match=r"^comm=.*: pass a communicator of mpi4py, or"):
        r2ccl.init(given)


@pytest.mark.parametrize("given", ["nic_down", 4, []])
def test_faults_that_are_no_plan_are_refused(given: Any) -> None:
    with pytest.raises(r2ccl.InvalidArgument, match=r"^faults=.*: pass a plan of r2ccl.testing"):
        r2ccl.init(faults=given)


@pytest.mark.parametrize("pattern", ["", "^mlx5_2"])
def test_a_nic_that_cannot_be_opened_is_left_out_and_said(
    fabric: FakeFabric, pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    fabric.broken = {"mlx5_0"}
    allowed = select_hcas(HCAS, pattern)
    assert choose_hcas(HCAS, pattern, 8) == allowed[1:]
    (record,) = caplog.records
    assert "mlx5_0:1 is not used: RDMA NIC mlx5_0 cannot be opened" in record.getMessage()
    # The setting that it advises excludes this port, and the others that were excluded.
    advice = record.getMessage().partition("set R2CC_HCA=")[2]
    assert select_hcas(HCAS, advice) == allowed[1:]


def test_a_nic_that_cannot_serve_all_ranks_is_left_out(
    fabric: FakeFabric, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_hcas(HCAS, "^=mlx5_0,mlx5_1", 9) == ()
    (record,) = caplog.records
    assert "can serve 8 ranks, but the job has 9" in record.getMessage()
    assert record.getMessage().endswith("set R2CC_HCA=^=mlx5_0,mlx5_1,=mlx5_2:1")


def test_a_nic_that_the_user_names_is_used_or_the_job_fails(fabric: FakeFabric) -> None:
    fabric.broken = {"mlx5_0"}
    assert choose_hcas(HCAS, "mlx5_0,mlx5_1", 9) == HCAS[:2]


@pytest.mark.parametrize("pattern", ["", "^mlx5_2"])
def test_without_pyverbs_no_nic_is_used_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("r2ccl.factory.find_spec", lambda name: None)
    assert choose_hcas(HCAS, pattern, 8) == ()
    (record,) = caplog.records
    assert "RDMA NICs were found, but this Python has no pyverbs" in record.getMessage()


def test_without_pyverbs_a_nic_that_the_user_names_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("r2ccl.factory.find_spec", lambda name: None)
    with pytest.raises(r2ccl.InvalidArgument, match="R2CC_HCA selects RDMA NICs, but this Python"):
        choose_hcas(HCAS, "mlx5_0", 8)

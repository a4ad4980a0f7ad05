"""Capabilities of a machine, fixes of missing requirements, and the exit status of the doctor."""

from __future__ import annotations

import msgspec
import pytest

from r2ccl.cli import doctor_report, main
from r2ccl.cli.capabilities import Capabilities, DoctorFindings, capabilities_of, missing_of
from r2ccl.cli.cards import Card, CudaFacts
from r2ccl.cli.diagnosis import DoctorFinding, Facts
from r2ccl.config import Config
from r2ccl.topology.hcas import Gid, Hca
from r2ccl.topology.interfaces import Interface
from r2ccl.topology.machine import Machine, NumaNode

LO = Interface("lo", 1, ("127.0.0.1",), True, is_loopback=True)
ETH0 = Interface("eth0", 2, ("10.0.0.1",), True, speed_mbps=1000)
ETH1 = Interface("eth1", 3, ("10.1.0.1",), True, speed_mbps=1000)
PORT = Hca(
    "mlx5_0", 1, "eth1", "Ethernet", "ACTIVE", 100_000, 0, (Gid(1, "RoCE v2", "::ffff:10.1.0.1"),)
)
FACTS = Facts(
    platform="linux",
    kernel="6.1",
    python="python3",
    has_rdma_class=False,
    interfaces=(LO, ETH0, ETH1),
    hostname="here",
)
GOOD = DoctorFinding("x", "ok", "works")
BROKEN = DoctorFinding("kernel", "error", "has no RDMA", "modprobe ib_uverbs")
FINDINGS = DoctorFindings((), DoctorFinding("shm", "ok", "works"), (), (), (BROKEN,))
GPU = Card(
    ordinal=0, name="H", bus_id="0", capability=(9, 0), nsms=1, memory_nbytes=1,
    open_error="", kernel_error="", waits_on_memory=True,
)  # fmt: skip


def found(
    facts: Facts = FACTS,
    cuda: CudaFacts | None = None,
    findings: DoctorFindings = FINDINGS,
    **settings: str,
) -> Capabilities:
    return capabilities_of(facts, cuda or CudaFacts(), findings, Config(**settings))


def test_tcp_and_shared_memory() -> None:
    uses = found()
    assert uses == Capabilities((), ("eth0", "eth1"), shm=True, loopback=True, gpus=())
    assert str(uses) == (
        "r2ccl will use shared memory within this host, TCP over eth0, eth1 between hosts, and "
        "no GPU"
    )


def test_rdma_is_used_only_if_verbs_are_usable() -> None:
    facts = msgspec.structs.replace(FACTS, hcas=(PORT,))
    assert found(facts).rdma == ()
    usable = msgspec.structs.replace(FINDINGS, verbs=(GOOD,))
    assert found(facts, findings=usable).rdma == ("mlx5_0:1",)
    assert found(facts, findings=usable, hca="none").rdma == ()


def test_a_nic_that_is_declared_failed_is_not_used() -> None:
    assert found(failed_nics="here:eth1").tcp == ("eth0",)


def test_the_last_resort_is_not_listed() -> None:
    assert found(socket_ifname="eth0", last_resort="eth1").tcp == ("eth0",)


def test_loopback_is_no_rail_between_hosts() -> None:
    uses = found(socket_ifname="=lo")
    assert uses == Capabilities((), (), shm=True, loopback=True, gpus=())
    assert "nothing between hosts" in str(uses)


def test_a_gpu_whose_kernels_fail_is_not_used() -> None:
    bad = msgspec.structs.replace(GPU, ordinal=1, kernel_error="no compiler")
    untried = msgspec.structs.replace(GPU, ordinal=2, open_error=None, kernel_error=None)
    uses = found(cuda=CudaFacts(gpus=(GPU, bad, untried)))
    assert uses.gpus == (0,)
    assert str(uses).endswith("and arrays on GPU 0")


def test_a_machine_without_network_has_loopback() -> None:
    none = msgspec.structs.replace(FINDINGS, sharing=DoctorFinding("shm", "warning", "", "fix"))
    uses = found(msgspec.structs.replace(FACTS, interfaces=(LO,)), findings=none)
    assert uses == Capabilities((), (), shm=False, loopback=True, gpus=())
    assert uses.is_any
    assert str(uses) == "r2ccl will use TCP within this host, nothing between hosts, and no GPU"
    assert not found(msgspec.structs.replace(FACTS, interfaces=()), findings=none).is_any


def test_what_is_missing_comes_with_its_fix() -> None:
    rdma, gpu = missing_of(["rdma", "gpu", "shm", "rdma"], found(), FINDINGS, Config())
    assert (rdma.check, rdma.fix) == ("rdma", "kernel: modprobe ib_uverbs")
    assert "pip install 'r2ccl[gpu]'" in gpu.fix
    assert missing_of([], found(), FINDINGS, Config()) == ()


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"hca": "none"}, "unset R2CC_HCA"),
        ({"failed_nics": "here:eth1"}, "unset R2CC_FAILED_NICS"),
        ({"hca": "^mlx5_0", "failed_nics": "a:b"}, "unset R2CC_HCA and R2CC_FAILED_NICS"),
        ({}, "see the section rails"),
    ],
)
def test_only_settings_that_are_set_are_to_be_unset(settings: dict[str, str], fix: str) -> None:
    usable = msgspec.structs.replace(FINDINGS, verbs=(GOOD,))
    (rdma,) = missing_of(["rdma"], found(), usable, Config(**settings))
    assert rdma.fix == fix


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(doctor_report, "gather", lambda: FACTS)
    monkeypatch.setattr(doctor_report, "read_cuda", lambda nics: CudaFacts())
    one = Machine.of([NumaNode(0, (0,))])
    monkeypatch.setattr(doctor_report, "read_machine", lambda topology: one)
    monkeypatch.setattr(doctor_report, "examine_sharing", lambda config: FINDINGS.sharing)
    return monkeypatch


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ([], 0),
        (["--require", "shm"], 0),
        (["--require", "shm,rdma"], 1),
        (["--require", "shm", "--require", "gpu"], 1),
    ],
)
def test_the_status_depends_on_what_is_required(machine, capsys, options, status) -> None:
    assert main(["doctor", *options]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("r2ccl will use shared memory")
    assert ("required" in lines) == (status == 1)
    if status:
        assert sum("is required, but cannot be used" in line for line in lines) == 1


def test_a_machine_that_can_exchange_nothing_fails(machine, capsys) -> None:
    machine.setattr(doctor_report, "gather", lambda: msgspec.structs.replace(FACTS, interfaces=()))
    no = DoctorFinding("shm", "warning", "no memory", "set R2CC_SHM=0")
    machine.setattr(doctor_report, "examine_sharing", lambda config: no)
    assert main(["doctor"]) == 1
    assert "r2ccl will use nothing" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "value"), [("SOCKET_IFNAME", "eth7"), ("HCA", "mlx5_9")])
def test_a_setting_that_init_refuses_leaves_nothing(machine, capsys, name, value) -> None:
    machine.setenv(f"R2CC_{name}", value)
    assert main(["doctor", "--require", "shm"]) == 1
    said = capsys.readouterr().out
    assert "init() raises InvalidArgument, see the error about rails" in said.splitlines()[-1]
    assert f"error   rails       R2CC_{name}='{value}'" in said
    assert "fix: rails: " in said


def test_a_named_port_needs_pyverbs() -> None:
    facts = msgspec.structs.replace(FACTS, hcas=(PORT,), pyverbs_error="not installed")
    assert found(facts).is_any
    assert not found(facts, hca="mlx5_0").is_any


def test_an_unknown_requirement_is_a_usage_error(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--require", "rdma,dma"])
    assert "'dma'; allowed are rdma, gpu, shm" in capsys.readouterr().err

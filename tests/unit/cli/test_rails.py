"""What the doctor says of interfaces and RDMA ports: which would be rails, why not the others."""

import msgspec
import pytest

from r2ccl.cli.diagnosis import DoctorFinding, Facts
from r2ccl.cli.rails import examine_rails
from r2ccl.config import Config
from r2ccl.topology.hcas import Gid, Hca
from r2ccl.topology.interfaces import Interface, select

LO = Interface("lo", 1, ("127.0.0.1",), True, is_loopback=True)
ETH0 = Interface("eth0", 2, ("10.0.0.1",), True, speed_mbps=1000)
ETH1 = Interface("eth1", 3, ("10.1.0.1",), True, speed_mbps=100_000)
DOCKER = Interface("docker0", 4, ("172.17.0.1",), True)
PORT = Hca(
    "mlx5_0", 1, "eth1", "Ethernet", "ACTIVE", 100_000, 0,
    (Gid(1, "RoCE v2", "::ffff:10.1.0.1", "eth1"),),
)  # fmt: skip


def examine(
    *interfaces: Interface,
    hcas: tuple[Hca, ...] = (),
    pyverbs_error: str = "",
    **settings: object,
) -> list[DoctorFinding]:
    facts = Facts(
        platform="linux",
        kernel="6.1",
        python="python3",
        pyverbs_error=pyverbs_error,
        hcas=hcas,
        interfaces=interfaces,
        cards=("eth0", "eth1"),
        hostname="node7",
    )
    return list(examine_rails(facts, Config(**settings)))  # type: ignore[arg-type]


def about(name: str, findings: list[DoctorFinding]) -> DoctorFinding:
    (found,) = (each for each in findings if each.says.startswith(f"{name} ("))
    return found


def test_the_rails_shown_are_those_chosen_in_their_order() -> None:
    interfaces = (DOCKER, ETH1, LO, ETH0)
    findings = examine(*interfaces)
    shown = [(each.check, each.says.split()[0]) for each in findings if each.level == "ok"]
    chosen = enumerate(select(interfaces, Config()))
    assert shown == [(f"rail {rail}", nic.name) for rail, nic in chosen]
    assert "100 Gbit/s, 10.1.0.1" in about("eth1", findings).says


@pytest.mark.parametrize(
    ("odd", "settings", "why"),
    [
        (LO, {}, "all ranks are on one host"),
        (DOCKER, {}, "containers"),
        (ETH1, {"socket_ifname": "=eth0"}, "does not name it"),
        (ETH1, {"socket_ifname": "^eth1"}, "excludes it"),
        (ETH1, {"rails": 1}, "R2CC_RAILS=1"),
        (Interface("veth0", 9, (), False), {}, "no carrier"),
    ],
)
def test_what_is_left_out_on_purpose_has_its_reason(
    odd: Interface, settings: dict[str, object], why: str
) -> None:
    found = about(odd.name, examine(ETH0, odd, **settings))
    assert (found.check, found.level, found.fix) == ("no rail", "skipped", "")
    assert why in found.says


@pytest.mark.parametrize(
    ("changes", "why", "fix"),
    [
        ({"is_up": False}, "no carrier", "ip link set eth1 up"),
        ({"addresses": ()}, "no address", "ip address add ADDRESS/24 dev eth1"),
    ],
)
def test_a_card_that_cannot_be_used_is_a_warning_with_its_fix(
    changes: dict[str, object], why: str, fix: str
) -> None:
    found = about("eth1", examine(ETH0, msgspec.structs.replace(ETH1, **changes)))
    assert found.level == "warning"
    assert why in found.says
    assert fix in found.fix


def test_rdma_ports_are_rails_behind_those_of_sockets() -> None:
    findings = examine(ETH0, ETH1, hcas=(PORT,))
    assert [each.check for each in findings if each.level == "ok"] == ["rail 0", "rail 1"]
    assert about("eth0", findings).check == "rail 0"
    assert findings[1].says.startswith("mlx5_0:1 (RDMA, 100 Gbit/s, ACTIVE)")
    assert "its RDMA port is the rail" in about("eth1", findings).says
    assert "last resort" in findings[-1].says


@pytest.mark.parametrize(
    ("hca", "pyverbs_error", "settings", "why"),
    [
        (PORT, "ModuleNotFoundError: No module named 'pyverbs'", {}, "pyverbs does not work"),
        (msgspec.structs.replace(PORT, state="DOWN"), "", {}, "not ACTIVE"),
        (PORT, "", {"hca": "none"}, "turns RDMA off"),
        (PORT, "", {"hca": "^mlx5"}, "R2CC_HCA=^mlx5 excludes it"),
        (msgspec.structs.replace(PORT, gids=()), "", {}, "no GID"),
        (msgspec.structs.replace(PORT, gids=()), "", {"hca": "^mlx5_9"}, "no GID"),
    ],
)
def test_an_rdma_port_that_is_no_rail_has_its_reason(
    hca: Hca, pyverbs_error: str, settings: dict[str, object], why: str
) -> None:
    findings = examine(ETH0, ETH1, hcas=(hca,), pyverbs_error=pyverbs_error, **settings)
    (port,) = (each for each in findings if each.says.startswith("mlx5_0:1"))
    assert port.level == "skipped"
    assert why in port.says
    assert about("eth1", findings).level == "ok"


def test_an_rdma_port_that_no_name_selects_says_so() -> None:
    other = msgspec.structs.replace(PORT, name="mlx5_1")
    findings = examine(ETH0, ETH1, hcas=(PORT, other), hca="mlx5_0")
    assert about("mlx5_1:1", findings).says.endswith("R2CC_HCA=mlx5_0 does not name it")


def test_a_single_rail_is_a_warning() -> None:
    last = examine(ETH0)[-1]
    assert last.level == "warning"
    assert "fewer than two usable rails" in last.says
    assert last.fix == "add another interface with an address"


@pytest.mark.parametrize(
    ("settings", "why"),
    [({}, "no interface qualifies"), ({"hca": "mlx9"}, "names no ACTIVE RDMA port")],
)
def test_no_rail_at_all_is_an_error(settings: dict[str, object], why: str) -> None:
    (found,) = examine(LO, **settings)
    assert found.level == "error"
    assert why in found.says
    assert found.fix


def test_a_nic_declared_failed_is_no_rail_that_is_ok() -> None:
    findings = examine(ETH0, ETH1, failed_nics="node8:eth0,node7:eth1")
    assert about("eth0", findings).level == "ok"
    failed = about("eth1", findings)
    assert (failed.check, failed.level) == ("rail 1", "skipped")
    assert "R2CC_FAILED_NICS declares it failed" in failed.says
    assert "fewer than two usable rails" in findings[-1].says
    assert "remove NICs that work from R2CC_FAILED_NICS" in findings[-1].fix


@pytest.mark.parametrize(
    ("failed_nics", "level", "words"),
    [
        ("node7:1", "ok", "as 2 rails: R2CC_FAILED_NICS declares rail 1 failed, so no data path"),
        ("node7:0", "ok", "declares rail 0 failed, so no data path uses it"),
        ("node7:lo", "skipped", "declares it failed, so no data path uses it"),
        ("node7:0,node7:1", "skipped", "declares it failed"),
    ],
)
def test_rails_of_one_interface_fail_one_by_one(failed_nics: str, level: str, words: str) -> None:
    found = about("lo", examine(LO, socket_ifname="=lo", rails=2, failed_nics=failed_nics))
    assert (found.check, found.level) == ("rail 0", level)
    assert words in found.says

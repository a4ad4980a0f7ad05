"""What the doctor says of machines as they were found: every way not to have verbs, and its fix."""

import json
from collections.abc import Sequence

import msgspec
import pytest

from r2ccl.cli import doctor_report, main
from r2ccl.cli.cards import CudaFacts
from r2ccl.cli.diagnosis import CHECKS, DoctorFinding, Facts, examine, is_usable
from r2ccl.cli.gpus import examine_gpus
from r2ccl.config import Config
from r2ccl.errors import TransportError
from r2ccl.shm.segment import Segment
from r2ccl.topology.hcas import Gid, Hca
from r2ccl.topology.interfaces import Interface
from r2ccl.topology.machine import Machine, NumaNode

GID = Gid(1, "RoCE v2", "::ffff:10.50.0.1", "eth0")
ROCE = Hca("mlx5_0", 1, "eth0", "Ethernet", "ACTIVE", 100_000, 0, (GID,))
SECOND = msgspec.structs.replace(ROCE, name="mlx5_1", netdev="eth1")

HEALTHY = Facts(
    platform="linux",
    kernel="6.1.0-50-amd64",
    python="/usr/bin/python3 (3.11.2)",
    verbs_devices=("mlx5_0",),
    is_distribution_pyverbs=True,
    is_pyverbs_fitting=True,
    has_rdma_class=True,
    rdma_modules=("ib_core", "ib_uverbs", "mlx5_ib"),
    hcas=(ROCE,),
    uverbs=(("/dev/infiniband/uverbs0", ""),),
    memlock_nbytes=-1,
    interfaces=(
        Interface("lo", 1, ("127.0.0.1",), True, is_loopback=True),
        Interface("eth0", 2, ("10.50.0.1",), True, speed_mbps=100_000),
    ),
)

#: As Soft-RoCE's test machine had it: a kernel that was built without RDMA.
WITHOUT_KERNEL = msgspec.structs.replace(
    HEALTHY,
    kernel="6.18.44",
    pyverbs_error="pyverbs.pyverbs_error.PyverbsRDMAError: Failed to get devices list",
    verbs_devices=(),
    has_rdma_class=False,
    rdma_modules=(),
    hcas=(),
    uverbs=(),
)


NO_GPU = CudaFacts(bindings="13.0.1", error="there is no CUDA driver", status="NO_CUDA")
MACHINE = Machine.of([NumaNode(0, (0, 1))])
SHARING = DoctorFinding("shm", "ok", "ranks of this host share memory")


def with_(**changes: object) -> Facts:
    return msgspec.structs.replace(HEALTHY, **changes)


def of(facts: Facts, check: str) -> DoctorFinding:
    (found,) = (finding for finding in examine(facts) if finding.check == check)
    return found


def test_a_healthy_machine_has_nothing_to_fix() -> None:
    findings = examine(HEALTHY)
    assert {finding.level for finding in findings} == {"ok"}
    assert {finding.fix for finding in findings} == {""}
    assert is_usable(findings)


ABSENT = "ModuleNotFoundError: No module named 'pyverbs'"
PRIVATE = (
    "ImportError: /lib/x86_64-linux-gnu/libibverbs.so.1: version `IBVERBS_PRIVATE_59' not found "
    "(required by /v/lib/python3.11/site-packages/pyverbs/device.cpython-311-x86_64-linux-gnu.so)"
)
NO_LIBRARY = "ImportError: libibverbs.so.1: cannot open shared object file: No such file"


@pytest.mark.parametrize(
    ("changes", "check", "says", "fix"),
    [
        (
            {"pyverbs_error": ABSENT, "is_distribution_pyverbs": False},
            "pyverbs",
            "not installed",
            "apt-get install python3-pyverbs",
        ),
        ({"pyverbs_error": ABSENT}, "pyverbs", "does not find it", "ln -sf"),
        (
            {"pyverbs_error": ABSENT, "is_pyverbs_fitting": False},
            "pyverbs",
            "another Python",
            "/usr/bin/python3 -m venv",
        ),
        ({"pyverbs_error": PRIVATE}, "pyverbs", "another rdma-core", "pip uninstall pyverbs"),
        ({"pyverbs_error": NO_LIBRARY}, "pyverbs", "lacks a library", "libibverbs1"),
        (
            {"pyverbs_error": "signal SIGSEGV"},
            "pyverbs",
            "signal SIGSEGV",
            "--reinstall",
        ),
        ({"pyverbs_error": "no answer within 60 s"}, "pyverbs", "does not list", "dmesg"),
        ({"platform": "darwin"}, "kernel", "darwin", "Linux"),
        ({"has_rdma_class": False}, "kernel", "/sys/class/infiniband", "r2ccl rdmalab"),
        (
            {"rdma_modules": ("ib_core",), "uverbs": ()},
            "kernel",
            "ib_uverbs is not loaded",
            "modprobe ib_uverbs",
        ),
        ({"hcas": (), "verbs_devices": ()}, "devices", "none", "modprobe"),
        (
            {"hcas": (msgspec.structs.replace(ROCE, state="DOWN"),)},
            "ports",
            "mlx5_0:1 is DOWN",
            "ip link set eth0 up",
        ),
        (
            {
                "hcas": (
                    Hca("ib0", 1, "", "InfiniBand", "INIT", 100_000, 0, (Gid(0, "", "fe80::1"),)),
                ),
                "verbs_devices": ("ib0",),
            },
            "ports",
            "ib0:1 is INIT",
            "subnet manager",
        ),
        (
            {"hcas": (msgspec.structs.replace(ROCE, gids=()),)},
            "gids",
            "mlx5_0:1 has no RoCE v2 GID",
            "ip address add ADDRESS/24 dev eth0",
        ),
        (
            {"hcas": (Hca("ib0", 1, "", "InfiniBand", "ACTIVE", 100_000, 0, ()),)},
            "gids",
            "ib0:1 has no GID at index 0",
            "subnet manager",
        ),
        (
            {"uverbs": (("/dev/infiniband/uverbs0", "Permission denied"),)},
            "permission",
            "/dev/infiniband/uverbs0 (Permission denied)",
            "chmod 0666",
        ),
        ({"uverbs": ()}, "permission", "no /dev/infiniband/uverbs*", "--device=/dev/infiniband"),
        ({"memlock_nbytes": 8 << 20}, "memlock", "8192 KiB", "ulimit -l unlimited"),
        ({"verbs_devices": ()}, "listing", "does not list mlx5_0", "ibverbs-providers"),
    ],
)
def test_each_reason_is_an_error_with_its_fix(
    changes: dict[str, object], check: str, says: str, fix: str
) -> None:
    facts = with_(**changes)
    found = of(facts, check)
    assert found.level == "error"
    assert says in found.says
    assert fix in found.fix
    assert not is_usable(examine(facts))


def test_only_roce_ports_without_a_gid_need_an_address() -> None:
    infiniband = Hca("ib0", 1, "", "InfiniBand", "ACTIVE", 100_000, 0, ())
    assert "ip address" not in of(with_(hcas=(infiniband,)), "gids").fix
    both = of(with_(hcas=(infiniband, msgspec.structs.replace(ROCE, gids=()))), "gids")
    assert both.says == "ib0:1 has no GID at index 0, mlx5_0:1 has no RoCE v2 GID"
    assert "dev eth0; start the InfiniBand fabric's subnet manager (opensm); " in both.fix


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"hcas": (ROCE, msgspec.structs.replace(SECOND, state="DOWN"))}, "ports"),
        ({"hcas": (ROCE, msgspec.structs.replace(SECOND, gids=()))}, "gids"),
        ({"hcas": (ROCE, SECOND)}, "listing"),
    ],
)
def test_what_spares_another_port_is_a_warning(changes: dict[str, object], check: str) -> None:
    facts = with_(**{"verbs_devices": ("mlx5_0", "mlx5_1"), **changes})
    if check == "listing":
        facts = msgspec.structs.replace(facts, verbs_devices=("mlx5_0",))
    found = of(facts, check)
    assert found.level == "warning"
    assert "mlx5_1" in found.says
    assert found.fix
    assert is_usable(examine(facts))


def test_what_cannot_be_looked_at_is_not_called_good() -> None:
    findings = examine(WITHOUT_KERNEL, is_required=True)
    levels = {finding.check: finding.level for finding in findings}
    assert levels == {
        "pyverbs": "ok",
        "kernel": "error",
        "devices": "error",
        "ports": "skipped",
        "gids": "skipped",
        "permission": "skipped",
        "memlock": "ok",
        "listing": "skipped",
    }


def test_rdma_that_is_not_there_is_no_error() -> None:
    (found,) = examine(WITHOUT_KERNEL)
    assert (found.check, found.level, found.fix) == ("devices", "skipped", "")
    assert found.says.startswith("not present: ")
    assert not is_usable((found,))
    hidden = msgspec.structs.replace(WITHOUT_KERNEL, uverbs=HEALTHY.uverbs)
    assert of(hidden, "devices").level == "error", "a container without the NIC's files"


def test_the_limit_does_not_bind_who_may_lock() -> None:
    assert of(with_(memlock_nbytes=0, may_lock=True), "memlock").level == "ok"


@pytest.mark.parametrize(("facts", "has_rdma"), [(HEALTHY, True), (WITHOUT_KERNEL, False)])
def test_the_command_tells_in_text_and_json(
    facts: Facts,
    has_rdma: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[list[str]] = []

    def read_cuda(nics: Sequence[str]) -> CudaFacts:
        asked.append(list(nics))
        return NO_GPU

    monkeypatch.setattr(doctor_report, "gather", lambda: facts)
    monkeypatch.setattr(doctor_report, "read_cuda", read_cuda)
    monkeypatch.setattr(doctor_report, "read_machine", lambda topology: MACHINE)
    monkeypatch.setattr(doctor_report, "examine_sharing", lambda config: SHARING)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    sections = [line for line in text.splitlines() if line.isalpha()]
    assert sections == ["rails", "gpus", "topology", "verbs"]
    for finding in (*examine(facts), *examine_gpus(NO_GPU, Config())):
        assert finding.says in text
        assert finding.fix in text
    assert "1 NUMA node, 0 GPUs, 0 NIC ports" in text
    within = "r2ccl will use shared memory within this host,"
    between = "RDMA over mlx5_0:1" if has_rdma else "TCP over eth0"
    assert text.splitlines()[-1] == f"{within} {between} between hosts, and no GPU"
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == [
        "version", "uses", "missing", "findings", "facts", "cuda", "machine",
    ]  # fmt: skip
    assert report["uses"] == {
        "rdma": ["mlx5_0:1"] if has_rdma else [],
        "tcp": ["eth0"],
        "shm": True,
        "loopback": True,
        "gpus": [],
    }
    assert report["missing"] == []
    assert msgspec.convert(report["facts"], Facts) == facts
    assert msgspec.convert(report["cuda"], CudaFacts) == NO_GPU
    assert msgspec.convert(report["machine"], Machine) == MACHINE
    assert len(report["findings"]["verbs"]) == (len(CHECKS) if has_rdma else 1)
    assert len(report["findings"]["gpus"]) == len(report["findings"]["topology"]) == 1
    # Device memory is registered with the RDMA ports that are rails.
    assert asked == [["mlx5_0:1"] if has_rdma else []] * 2


def test_a_machine_without_a_gpu_is_healthy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_report, "gather", lambda: HEALTHY)
    monkeypatch.setattr(doctor_report, "read_cuda", lambda nics: NO_GPU)
    monkeypatch.setenv("R2CC_HCA", "none")
    assert main(["doctor"]) == 0
    assert "skipped gpus        none: there is no CUDA driver" in capsys.readouterr().out


def test_ports_outside_the_setting_are_not_registered_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Sequence[str]] = []

    def read_cuda(nics: Sequence[str]) -> CudaFacts:
        asked.append(nics)
        return NO_GPU

    monkeypatch.setattr(doctor_report, "gather", lambda: HEALTHY)
    monkeypatch.setattr(doctor_report, "read_cuda", read_cuda)
    for pattern in ("none", "mlx9"):
        monkeypatch.setenv("R2CC_HCA", pattern)
        main(["doctor"])
    assert [list(each) for each in asked] == [[], []]


def test_this_machine_can_be_examined() -> None:
    findings = examine(doctor_report.gather())
    assert all(finding.says for finding in findings)
    assert all(bool(f.fix) == (f.level in ("warning", "error")) for f in findings)


@pytest.mark.parametrize(
    ("shm", "problem", "level", "says"),
    [
        ("0", "", "skipped", "could be used"),
        ("0", "no memory", "skipped", "could not be used: no memory"),
        ("auto", "", "ok", "share memory"),
        ("1", "no memory", "warning", "cannot be used: no memory"),
    ],
)
def test_it_says_whether_ranks_can_share_memory(
    shm: str, problem: str, level: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nranks: int) -> Segment:
        raise TransportError(problem)

    if problem:
        monkeypatch.setattr(Segment, "create_of_group", refuse)
    found = doctor_report.examine_sharing(Config(shm=shm))
    assert (found.check, found.level) == ("shm", level)
    assert says in found.says
    assert bool(found.fix) == (level == "warning")

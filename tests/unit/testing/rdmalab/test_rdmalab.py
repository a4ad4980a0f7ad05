"""The lab without its virtual machine: what it makes, what it needs, how a machine is ended."""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from r2ccl.cli import make_parser
from r2ccl.cli import rdmalab as command
from r2ccl.errors import InvalidArgument
from r2ccl.testing.rdmalab import MachineShape, RdmaLabError, VirtualMachine, VmResult, packages, vm
from r2ccl.testing.rdmalab.guest import missing_ports
from r2ccl.testing.rdmalab.packages import Need, find_kernel, fits
from r2ccl.testing.rdmalab.shape import address_lines, device_lines, link_lines, sysctls
from r2ccl.topology.hcas import Gid, Hca

# Shape


def test_a_lab_describes_itself_to_the_programs_in_it() -> None:
    shape = MachineShape(nodes=4, nics=2)
    assert MachineShape.from_environment(shape.environment()) == shape
    assert MachineShape.from_environment({}) is None


@pytest.mark.parametrize(
    "wrong",
    [{"nodes": 0}, {"nics": 0}, {"nodes": 99}, {"nics": 99}, {"nodes": "2"}, {"nics": 2.5}],
)
def test_sizes_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="allowed is 1 to"):
        MachineShape(**wrong)


def test_two_nodes_are_joined_by_cables() -> None:
    assert list(link_lines(MachineShape(nodes=2, nics=2), ())) == [
        "link add n0r0 type veth peer name n1r0",
        "link add n0r1 type veth peer name n1r1",
    ]


def test_more_nodes_meet_in_a_bridge_for_each_rail() -> None:
    lines = list(link_lines(MachineShape(nodes=3, nics=2), ()))
    assert [line for line in lines if "type bridge" in line] == [
        "link add br0 type bridge",
        "link add br1 type bridge",
    ]
    for rail in range(2):
        for node in range(3):
            assert f"link add n{node}r{rail} type veth peer name s{node}r{rail}" in lines
            assert f"link set s{node}r{rail} mtu 9000 master br{rail} up" in lines


def test_each_nic_has_an_address_of_its_rail_and_a_device() -> None:
    shape = MachineShape(nodes=2, nics=2)
    assert list(address_lines(shape))[-2:] == [
        "address replace 10.51.0.2/24 dev n1r1",
        "link set n1r1 mtu 9000 up",
    ]
    assert next(device_lines(shape, ())) == "link add rxe_n0r0 type rxe netdev n0r0"
    assert shape.devices(1) == ("rxe_n1r0", "rxe_n1r1")
    assert sysctls(shape)["net/ipv4/conf/n1r0/accept_local"] == "1"
    assert sysctls(shape)["net/ipv4/conf/all/rp_filter"] == "0"


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_what_is_there_is_not_made_again(nodes: int) -> None:
    shape = MachineShape(nodes=nodes, nics=2)
    made = [line.split() for line in link_lines(shape, ())]
    present = {words[i + 1] for words in made for i, w in enumerate(words) if w in ("add", "name")}
    assert not [line for line in link_lines(shape, present) if "link add" in line]
    devices = {shape.device(node, rail) for node, rail in shape.places()}
    assert not list(device_lines(shape, devices))


def test_ports_that_cannot_be_used_yet_are_named() -> None:
    def port(name: str, state: str, *gids: str) -> Hca:
        table = tuple(Gid(i, "RoCE v2", gid) for i, gid in enumerate(gids))
        return Hca(name, 1, name[4:], "Ethernet", state, 10_000, -1, table)

    shape = MachineShape(nodes=2, nics=2)
    good = port("rxe_n0r0", "ACTIVE", "fe80::1", "::ffff:10.50.0.1")
    assert missing_ports(
        shape, [good, port("rxe_n1r0", "DOWN"), port("rxe_n0r1", "ACTIVE", "fe80::1")]
    ) == [
        "rxe_n1r0: DOWN",
        "rxe_n0r1: no GID ::ffff:10.51.0.1",
        "rxe_n1r1: no such device",
    ]


# Packages


def fake_kernel(root: Path, version: str, *, has_rxe: bool = True) -> Path:
    folder = root / "lib/modules" / version / "kernel/drivers/infiniband/sw/rxe"
    folder.mkdir(parents=True)
    if has_rxe:
        (folder / "rdma_rxe.ko.xz").touch()
    image = root / "boot" / f"vmlinuz-{version}"
    image.parent.mkdir(exist_ok=True)
    image.touch()
    return image


def test_the_newest_kernel_that_has_soft_roce_is_booted(tmp_path: Path) -> None:
    assert find_kernel(tmp_path) is None
    fake_kernel(tmp_path, "6.1.0-9-amd64")
    newest = fake_kernel(tmp_path, "6.1.0-50-amd64")
    fake_kernel(tmp_path, "6.12.1-cloud-amd64", has_rxe=False)
    assert find_kernel(tmp_path) == newest


def test_a_kernel_without_its_image_does_not_count(tmp_path: Path) -> None:
    fake_kernel(tmp_path, "6.1.0-9-amd64").unlink()
    assert find_kernel(tmp_path) is None


def test_pyverbs_of_another_python_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "device.cpython-399-x86_64-linux-gnu.so").touch()
    assert not fits(tmp_path)
    tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
    (tmp_path / f"device.{tag}-x86_64-linux-gnu.so").touch()
    assert fits(tmp_path)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the site-packages of an environment that lacks nothing but pyverbs."""
    monkeypatch.setattr(packages, "missing", tuple)
    monkeypatch.setattr(packages, "fits", lambda path: True)
    monkeypatch.setattr(packages, "_is_venv", lambda: True)
    monkeypatch.setattr(packages, "_can_import", lambda module: False)
    monkeypatch.setattr(packages.sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def test_the_distributions_pyverbs_is_linked_and_said_to_be(environment: Path) -> None:
    said: list[str] = []
    packages.prepare(said.append)
    assert (environment / "pyverbs").readlink() == packages.DISTRIBUTION_PYVERBS
    assert [str(environment) in line for line in said] == [True]


def test_a_link_to_nothing_is_replaced(environment: Path) -> None:
    (environment / "pyverbs").symlink_to(environment / "gone")
    packages.prepare(lambda line: None)
    assert (environment / "pyverbs").readlink() == packages.DISTRIBUTION_PYVERBS


def test_a_link_that_cannot_be_made_is_explained(environment: Path) -> None:
    (environment / "pyverbs").touch()
    with pytest.raises(RdmaLabError, match="by hand"):
        packages.prepare(lambda line: None)


LACKS = (Need("QEMU", "qemu-system-x86", bool), Need("virtme-ng", "", bool))


def test_what_is_missing_is_named_with_the_command_that_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packages, "missing", lambda: LACKS)
    reason = packages.unavailable_reason() or ""
    assert "QEMU, virtme-ng" in reason
    assert "apt-get install --no-install-recommends qemu-system-x86" in reason
    assert f"{sys.executable} -m pip install virtme-ng" in reason


def test_a_user_who_is_not_root_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(packages, "missing", lambda: LACKS[:1])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RdmaLabError, match="qemu-system-x86"):
        packages.prepare(said.append)
    assert not said


def test_another_processor_is_refused_before_any_installation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packages.platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(packages, "missing", lambda: LACKS)
    monkeypatch.setattr(packages, "_call", lambda argv: pytest.fail(str(argv)))
    with pytest.raises(RdmaLabError, match="riscv64"):
        packages.prepare(lambda line: pytest.fail(line))


# The machine's life, with a shell in the place of the virtual machine


@pytest.mark.parametrize("wrong", [{"cpus": 0}, {"cpus": "2"}, {"memory": "4"}, {"memory": 4}])
def test_a_machine_of_no_size_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        VirtualMachine(**wrong)  # type: ignore[arg-type]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the machine's script here, without a machine and without devices."""
    monkeypatch.setattr(vm, "unavailable_reason", lambda: None)
    monkeypatch.setattr(vm, "_virtme_command", lambda script, machine: ["sh", str(script)])
    monkeypatch.setattr(vm.sys, "executable", "true")
    monkeypatch.chdir("/")  # a checkout in /tmp would not be seen in a machine


def run(script: str, timeout_s: float = 20.0, **more: object) -> tuple[VmResult, str]:
    pieces: list[bytes] = []
    result = vm.run(
        ["sh", "-c", script],
        shape=MachineShape(nodes=2, nics=3),
        timeout_s=timeout_s,
        sink=pieces.append,
        **more,  # type: ignore[arg-type]
    )
    return result, b"".join(pieces).decode()


@pytest.mark.usefixtures("bare")
def test_output_status_environment_and_report_come_back(tmp_path: Path) -> None:
    report = tmp_path / "out" / "report"
    result, output = run(
        'echo "$R2CC_RDMALAB $R2CC_RDMALAB_NODES $R2CC_RDMALAB_NICS $MINE"; echo err >&2;'
        ' pwd; echo done > "$R2CC_RDMALAB_REPORT/file"; exit 7',
        report=report,
        environment={"MINE": "a 'quoted' $value"},
    )
    assert (result.status, result.is_timed_out) == (7, False)
    assert "1 2 3 a 'quoted' $value\n" in output
    assert "err\n" in output
    assert f"{os.getcwd()}\n" in output
    assert (report / "file").read_text() == "done\n"


@pytest.mark.usefixtures("bare")
def test_bytes_that_are_not_utf_8_reach_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "MINE", os.fsdecode(b"\xfe"))
    word = os.fsdecode(b"\xff")
    result, output = run(f"printf '%s %s' \"$MINE\" {word} | od -An -tx1")
    assert (result.status, output.split()[-3:]) == (0, ["fe", "20", "ff"])


def test_a_report_that_is_a_file_is_a_wrong_command_line(
    bare: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(command, "prepare", lambda say: None)
    assert command.main(parsed("--report", str(file), "--", "true")) == 2
    assert f"{file} for results (File exists)" in capsys.readouterr().err


@pytest.mark.usefixtures("bare")
def test_results_are_not_sent_where_the_machine_has_a_directory() -> None:
    with pytest.raises(RdmaLabError, match="which has its own /var/tmp"):
        run("true", report=Path("/var/tmp/report"))


@pytest.mark.usefixtures("bare")
def test_the_deadline_ends_the_machine_and_all_its_processes(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    result, _ = run(f"sleep 600 & echo $! $$ > {pids}; trap '' TERM; wait", timeout_s=1.0)
    assert (result.status, result.is_timed_out) == (124, True)
    for pid in map(int, pids.read_text().split()):
        await_true(lambda pid=pid: not is_running(pid), "its processes end")


@pytest.mark.usefixtures("bare")
def test_a_machine_that_does_not_boot_is_not_one_without_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vm.sys, "executable", "false")
    with pytest.raises(RdmaLabError, match="did not create the lab's devices"):
        run("true")
    monkeypatch.setattr(vm, "_virtme_command", lambda script, machine: ["false"])
    with pytest.raises(RdmaLabError, match="did not boot"):
        run("true")


@pytest.mark.usefixtures("bare")
def test_a_machine_that_panics_under_the_command_is_not_a_result() -> None:
    with pytest.raises(RdmaLabError, match="ended before its command"):
        run("kill -KILL $PPID")


OWNER = """
import sys
from pathlib import Path
from r2ccl.testing.rdmalab import vm
with vm._started(Path(sys.argv[1]), ["sh", "-c", "sleep 600 & echo $! $$; wait"]) as process:
    print(process.stdout.readline().decode(), end="", flush=True)
    sys.stdin.read()
"""


def test_nothing_is_left_when_the_owner_is_killed(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(private)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        owner.send_signal(signal.SIGKILL)
    for pid in pids:
        await_true(lambda pid=pid: not is_running(pid), "the machine's processes end")
    await_true(lambda: not private.exists(), "the private directory goes")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def await_true(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Poll for what no descriptor tells: that processes of others have gone."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {timeout_s} s"
        select.select([], [], [], 0.01)


# Command line


def parsed(*argv: str) -> argparse.Namespace:
    parser = make_parser(["rdmalab"])
    return parser.parse_args(["rdmalab", *argv])


def test_a_wrong_command_line_is_told_from_a_machine_that_cannot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(say: object) -> None:
        raise RdmaLabError("no QEMU here")

    monkeypatch.setattr(command, "prepare", refuse)
    assert command.main(parsed()) == 2
    assert command.main(parsed("--nodes", "0", "--", "true")) == 2
    assert command.main(parsed("--", "true")) == 69
    assert "no QEMU here" in capsys.readouterr().err
    monkeypatch.setattr(command, "prepare", lambda say: None)
    monkeypatch.setattr(command, "run", lambda *_, **__: refuse(None))
    assert command.main(parsed("--", "true")) == 70


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (VmResult(status=5, is_timed_out=False, boot_s=1.0, total_s=2.0), 5),
        (VmResult(status=124, is_timed_out=True, boot_s=1.0, total_s=2.0), 124),
    ],
)
def test_the_command_passes_the_exit_status_on(
    result: VmResult, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: dict[str, object] = {}

    def record(argv: list[str], **options: object) -> VmResult:
        given.update(options, argv=argv)
        return result

    monkeypatch.setattr(command, "prepare", lambda say: None)
    monkeypatch.setattr(command, "run", record)
    file = tmp_path / "lab.json"
    options = ("--nodes", "4", "--memory", "1G", "--json", str(file))
    assert command.main(parsed(*options, "--", "echo", "--x")) == status
    found = json.loads(file.read_text())
    assert (found["status"], found["is_timed_out"], found["nodes"]) == (status, status == 124, 4)
    assert found["command"] == ["echo", "--x"]
    assert given["argv"] == ["echo", "--x"]
    assert given["shape"] == MachineShape(nodes=4, nics=3)
    assert given["machine"] == VirtualMachine(memory="1G")

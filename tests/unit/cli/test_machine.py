"""What the doctor says of a machine's shape, and the file it writes for NCCL."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.machines.recorded import put, record

from r2ccl import cli
from r2ccl.cli import doctor_report
from r2ccl.cli.cards import CudaFacts
from r2ccl.cli.diagnosis import DoctorFinding
from r2ccl.cli.machine import examine_machine, save_xml
from r2ccl.errors import InvalidArgument
from r2ccl.topology.affinity import Affinity, host_routes
from r2ccl.topology.machine import Machine, NumaNode
from r2ccl.topology.nccl_xml import format_xml

Load = Callable[[str], Machine]
NO_NICS = Machine.of([NumaNode(0, (0, 1))])


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return lambda name: record(tmp_path, name).read()


def of(findings: tuple[DoctorFinding, ...], check: str) -> list[DoctorFinding]:
    assert all(bool(f.fix) == (f.level in ("warning", "error")) for f in findings)
    return [finding for finding in findings if finding.check == check]


def test_every_gpu_has_a_line_with_its_nic_and_its_backups(load: Load) -> None:
    machine = load("dgx_h100")
    findings = examine_machine(machine, "NVML", ())
    assert findings[0] == DoctorFinding(
        "machine", "ok", "2 NUMA nodes, 8 GPUs, 13 NIC ports; NVLinks from NVML"
    )
    lines = [finding.says for finding in of(findings, "route")]
    preferences = Affinity(machine).preferences()
    assert len(lines) == len(preferences) == 8
    for line, routes in zip(lines, preferences.values(), strict=True):
        first, _, then = line.partition("; then ")
        backups = [port.removesuffix(" (PXN)") for port in then.partition(" and ")[0].split(", ")]
        assert first == str(routes[0])
        assert backups == [route.port for route in routes[1:4]]
        assert [" (PXN)" in part for part in then.split(", ")] == [
            route.via is not None for route in routes[1:4]
        ]
        assert then.endswith(" and 9 more")


def test_a_single_nic_has_no_backups(load: Load) -> None:
    machine = load("workstation")
    lines = [finding.says for finding in of(examine_machine(machine, "", ()), "route")]
    assert lines == [str(routes[0]) for routes in Affinity(machine).preferences().values()]


def test_without_gpus_the_nics_are_in_the_order_of_a_process(load: Load) -> None:
    machine = load("cloud_vm")
    cpus = machine.nodes[0].cpus
    findings = examine_machine(machine, "", cpus)
    assert "NVLinks" not in findings[0].says
    lines = [finding.says for finding in of(findings, "route")]
    assert lines == [str(route) for route in host_routes(machine, cpus)]
    assert lines


def test_a_machine_without_nics_has_no_routes() -> None:
    (found,) = examine_machine(NO_NICS, "", (0,))
    assert found.says == "1 NUMA node, 0 GPUs, 0 NIC ports"


def test_assumptions_are_said_and_too_few_lanes_are_a_warning(
    tmp_path: Path,
) -> None:
    recorded = record(tmp_path, "dgx_h100")
    put(recorded.function("0000:1b:00.0") / "current_link_width", "8")
    put(recorded.sysfs / "class/net/eno3/speed", "-1")
    machine = recorded.read()
    said = of(examine_machine(machine, "", ()), "machine")[1:]
    assert len(said) == len(machine.remarks)
    (warning,) = (finding for finding in said if finding.level == "warning")
    assert warning.says == "0000:1b:00.0: uses 8 of 16 PCIe lanes"
    assert warning.fix == "reseat the card"
    (assumed,) = (finding for finding in said if finding.level == "skipped")
    assert assumed.says == "eno3: rate unknown, assuming 10 Gbit/s"


# The file


def test_the_file_is_one_that_can_be_read_again(load: Load, tmp_path: Path) -> None:
    machine, path = load("hgx_a100"), tmp_path / "machine.xml"
    path.write_text("what was there")
    save_xml(machine, str(path))
    assert path.read_text() == format_xml(machine)


def test_others_may_read_the_file_as_the_umask_says(tmp_path: Path) -> None:
    plain, path = tmp_path / "plain", tmp_path / "machine.xml"
    plain.touch()
    save_xml(NO_NICS, str(path))
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    path, link = tmp_path / "machine.xml", tmp_path / "link"
    path.touch()
    link.symlink_to(path)
    save_xml(NO_NICS, str(link))
    assert link.is_symlink()
    assert path.read_text() == format_xml(NO_NICS)


@pytest.mark.parametrize("name", [".", "absent/machine.xml", "file/machine.xml", "fifo"])
def test_what_cannot_be_written_is_told_and_nothing_is_left(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InvalidArgument, match=r"--topology-xml .*: .*; name a file"):
        save_xml(NO_NICS, str(tmp_path / name))
    assert sorted(tmp_path.iterdir()) == before


def test_the_file_of_another_process_with_this_number_stays(tmp_path: Path) -> None:
    """Processes of two containers that share the folder may have the same number."""
    other = tmp_path / f".machine.xml.{os.getpid()}"
    other.write_text("what another process writes")
    save_xml(NO_NICS, str(tmp_path / "machine.xml"))
    assert other.read_text() == "what another process writes"


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "machine.xml"
    path.write_text("what was there")

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(InvalidArgument, match="No space left"):
        save_xml(NO_NICS, str(path))
    assert [each.read_text() for each in tmp_path.iterdir()] == ["what was there"]


def test_the_command_writes_the_file_and_asks_only_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[bool] = []

    def read_cuda(nics: object = (), *, is_tried: bool = True) -> CudaFacts:
        asked.append(is_tried)
        return CudaFacts()

    monkeypatch.setattr(doctor_report, "read_cuda", read_cuda)
    monkeypatch.setattr(doctor_report, "read_machine", lambda topology: NO_NICS)
    path = tmp_path / "machine.xml"
    assert cli.main(["doctor", "--topology-xml", str(path)]) == 0
    assert path.read_text() == format_xml(NO_NICS)
    # A file without GPUs is no secret.
    assert capsys.readouterr() == ("", "skipped gpus        none: cuda.bindings is not installed\n")
    assert cli.main(["doctor", "--topology-xml", "-"]) == 0
    assert capsys.readouterr().out == format_xml(NO_NICS)
    assert asked == [False, False]
    assert cli.main(["doctor", "--topology-xml", str(tmp_path)]) == 2
    assert "not a regular file" in capsys.readouterr().err

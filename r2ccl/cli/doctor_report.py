"""Report of ``r2ccl doctor`` on a machine's rails, GPUs, topology and verbs.

`gather` and `r2ccl.cli.gpufacts` collect facts about the machine. `r2ccl.cli.rails`,
`r2ccl.cli.gpus`, `r2ccl.cli.machine` (which NIC each GPU uses) and `r2ccl.cli.diagnosis` (verbs)
interpret the facts. pyverbs and CUDA are tried in separate processes, because a pyverbs that does
not match libibverbs, or a broken driver, may crash the process, and because importing pyverbs
configures logging.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from r2ccl.cli import apart, tables
from r2ccl.cli.capabilities import DoctorFindings, capabilities_of, missing_of
from r2ccl.cli.diagnosis import DoctorFinding, Facts, examine
from r2ccl.cli.gpufacts import read_cuda
from r2ccl.cli.gpus import examine_gpus
from r2ccl.cli.machine import examine_machine, save_xml
from r2ccl.cli.rails import examine_rails
from r2ccl.config import VERSION, Config
from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.shm.segment import Segment
from r2ccl.testing.rdmalab.packages import DISTRIBUTION_PYVERBS, fits
from r2ccl.topology.hcas import list_hcas, select_hcas
from r2ccl.topology.interfaces import list_interfaces
from r2ccl.topology.sysfs import read_machine

_PROBE_TIMEOUT_S = 60.0

#: Program that prints the RDMA devices of pyverbs; on failure, the last line of its standard error
#: is the exception. A device name is bytes in some versions and str in others.
_PROBE = """
import os
import pyverbs.device
for device in pyverbs.device.get_device_list():
    print(os.fsdecode(device.name))
"""

#: Number of CAP_IPC_LOCK: capabilities(7), linux/capability.h.
_CAP_IPC_LOCK = 14


def gather() -> Facts:
    """Return the facts about this machine that the checks of rails and verbs examine."""
    error, devices = _probe_pyverbs()
    return Facts(
        platform=sys.platform,
        kernel=platform.release(),
        python=f"{sys.executable} ({platform.python_version()})",
        pyverbs_error=error,
        verbs_devices=devices,
        is_distribution_pyverbs=DISTRIBUTION_PYVERBS.is_dir(),
        is_pyverbs_fitting=fits(DISTRIBUTION_PYVERBS),
        has_rdma_class=Path("/sys/class/infiniband").is_dir(),
        rdma_modules=_rdma_modules(),
        hcas=list_hcas(),
        uverbs=tuple(
            (str(path), _why_not_opened(path))
            for path in sorted(Path("/dev/infiniband").glob("uverbs*"))
        ),
        memlock_nbytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        may_lock=_may_lock(),
        interfaces=list_interfaces(),
        cards=tuple(path.parent.name for path in Path("/sys/class/net").glob("*/device")),
        hostname=platform.node(),
    )


def report(required: Sequence[str], *, is_json: bool) -> int:
    """Print the report; return 0 if ranks can exchange data and nothing in `required` is missing.

    Otherwise return 1. `required` has names in `r2ccl.cli.doctor.REQUIREMENTS`.

    Raises
    ------
    InvalidArgument
        If `Config.from_env` refuses a setting.
    """
    config = Config.from_env(os.environ)
    facts = gather()
    cuda = read_cuda(_rdma_rails(facts, config))
    machine = read_machine(cuda.topology)
    findings = DoctorFindings(
        rails=examine_rails(facts, config),
        sharing=examine_sharing(config),
        gpus=examine_gpus(cuda, config),
        topology=examine_machine(machine, cuda.topology.links_from, os.sched_getaffinity(0)),
        verbs=examine(facts, is_required="rdma" in required),
    )
    uses = capabilities_of(facts, cuda, findings, config)
    missing = missing_of(required, uses, findings, config)
    if is_json:
        found = {"version": VERSION, "uses": uses, "missing": missing, "findings": findings}
        seen = {"facts": facts, "cuda": cuda, "machine": machine}
        print(msgspec.json.format(msgspec.json.encode({**found, **seen})).decode())
    else:
        sections = {
            "rails": (*findings.rails, findings.sharing),
            "gpus": findings.gpus,
            "topology": findings.topology,
            "verbs": findings.verbs,
            **({"required": missing} if missing else {}),
        }
        _print(sections)
        print(f"\n{uses}")
    return 0 if uses.is_any and not missing else 1


def _print(sections: Mapping[str, Sequence[DoctorFinding]]) -> None:
    """Print the findings as tables, or as lines if `tables.terminal` returns None."""
    console = tables.terminal()
    if console is None:
        print("\n\n".join("\n".join([name, *map(show, each)]) for name, each in sections.items()))
        return
    for name, findings in sections.items():
        rows = [
            (each.level, each.check, f"{each.says}\nfix: {each.fix}" if each.fix else each.says)
            for each in findings
        ]
        styles = [tables.LEVEL_STYLES[each.level] for each in findings]
        tables.draw(console, name, ("", "", ""), rows, styles=styles)


def examine_sharing(config: Config) -> DoctorFinding:
    """Return a finding that says whether ranks on this machine can share memory.

    To find out, load the compiled code, then create a segment of shared memory and remove it.
    """
    problem = ""
    try:
        from r2ccl.shm.machine import UNSUPPORTED

        problem = UNSUPPORTED
        if not problem:
            from r2ccl.shm.group import preload

            preload()
            Segment.create_of_group(1).close()
    except (ImportError, OSError, TransportError) as exc:
        problem = str(exc)
    if config.shm == "0":
        able = f"could not be used: {problem}" if problem else "could be used"
        return DoctorFinding("shm", "skipped", f"{able}; R2CC_SHM=0 excludes it")
    if problem:
        fix = "remove the cause, or set R2CC_SHM=0"
        return DoctorFinding("shm", "warning", f"shared memory cannot be used: {problem}", fix)
    return DoctorFinding("shm", "ok", "ranks of this host share memory, if one user runs them")


def write_topology(target: str) -> None:
    """Write the topology file; if the search for GPUs failed or found none, say why on stderr.

    `target` is the path of the file, or ``-`` for standard output.

    Raises
    ------
    InvalidArgument
        If the file cannot be written.
    """
    cuda = read_cuda(is_tried=False)
    if cuda.died or not cuda.gpus:
        print(show(examine_gpus(cuda, Config())[0]), file=sys.stderr)
    save_xml(read_machine(cuda.topology), target)


def show(finding: DoctorFinding) -> str:
    """Return a finding as a line of text, followed by a line with its fix, if any."""
    line = f"{finding.level:8}{finding.check:12}{finding.says}"
    return f"{line}\n{'':20}fix: {finding.fix}" if finding.fix else line


def _probe_pyverbs() -> tuple[str, tuple[str, ...]]:
    """Return the error of pyverbs, empty if it works, and the RDMA devices that it lists."""
    ended = apart.run(_PROBE, timeout_s=_PROBE_TIMEOUT_S)
    return ended.error, () if ended.error else tuple(ended.said.split())


def _rdma_rails(facts: Facts, config: Config) -> Sequence[str]:
    """Return the labels of the RDMA ports that are rails.

    The result is empty if pyverbs does not work or R2CC_HCA is invalid.
    """
    if facts.pyverbs_error:
        return ()
    try:
        return [hca.label for hca in select_hcas(facts.hcas, config.hca)]
    except InvalidArgument:  # reported among the findings about rails
        return ()


def _why_not_opened(path: Path) -> str:
    """Return the reason why a device cannot be opened; empty if it can.

    The function opens the device, because the file mode may permit what a container's cgroup
    forbids.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


def _rdma_modules() -> tuple[str, ...]:
    try:
        lines = Path("/proc/modules").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:  # a kernel without modules
        return ()
    loaded = [line.split()[0] for line in lines]
    return tuple(
        sorted(name for name in loaded if name.startswith("ib_") or name.endswith(("_ib", "_rxe")))
    )


def _may_lock() -> bool:
    """Return True if this process has CAP_IPC_LOCK, which exempts it from the memlock limit."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return False
    held = next(line.split()[1] for line in lines if line.startswith("CapEff:"))
    return bool(int(held, 16) >> _CAP_IPC_LOCK & 1)


__all__ = ["examine_sharing", "gather", "report", "show", "write_topology"]

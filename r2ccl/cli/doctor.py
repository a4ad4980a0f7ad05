"""``r2ccl doctor``: which rails this machine has, whether verbs can be used, and the fixes.

`gather` reads the machine; what that means is the part of `r2ccl.cli.rails` (the rails) and of
`r2ccl.cli.diagnosis` (verbs). pyverbs is tried in a
process of its own, for a copy that does not fit its library may crash, and importing it sets up
logging.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import msgspec

from r2ccl.cli.diagnosis import Facts, Finding, examine, is_usable
from r2ccl.cli.rails import examine_rails
from r2ccl.config import Config
from r2ccl.testing.rdmalab.packages import DISTRIBUTION_PYVERBS, fits
from r2ccl.topology.hcas import list_hcas
from r2ccl.topology.interfaces import list_interfaces

_PROBE_TIMEOUT_S = 60.0

#: Prints the devices that verbs list; ends with a line that names the exception. A name is bytes in
#: some versions and text in others.
_PROBE = """
import os
import pyverbs.device
for device in pyverbs.device.get_device_list():
    print(os.fsdecode(device.name))
"""

#: capabilities(7), and linux/capability.h for the number.
_CAP_IPC_LOCK = 14


def gather() -> Facts:
    """Read this machine."""
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
    )


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``doctor`` command to those of ``r2ccl``; its namespace goes to `main`."""
    parser = subparsers.add_parser(
        "doctor",
        help="say which rails this machine has, and whether verbs can be used",
        description="Say which rails r2ccl would use on this machine, with the settings in force, "
        "and whether verbs can be used. Exit status 0: they can.",
    )
    parser.add_argument("--json", action="store_true", help="facts and findings, for programs")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run the parsed command; return 0 where verbs can be used, else 1."""
    facts = gather()
    findings = examine(facts)
    rails = examine_rails(facts, Config.from_env(os.environ))
    usable = is_usable(findings)
    if args.json:
        report = {"is_usable": usable, "findings": findings, "rails": rails, "facts": facts}
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print("\n".join(["rails", *map(show, rails), "", "verbs", *map(show, findings)]))
        print(f"verbs can{'' if usable else 'not'} be used here")
    return 0 if usable else 1


def show(finding: Finding) -> str:
    """Return a finding as text: a line, and one more for the fix."""
    line = f"{finding.level:8}{finding.check:12}{finding.says}"
    return f"{line}\n{'':20}fix: {finding.fix}" if finding.fix else line


def _probe_pyverbs() -> tuple[str, tuple[str, ...]]:
    """Return the last line of what went wrong, and the devices that verbs list."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"ImportError: no answer within {_PROBE_TIMEOUT_S:.0f} s", ()
    if done.returncode == 0:
        return "", tuple(done.stdout.split())
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"ImportError: crashed with status {done.returncode}", ()


def _why_not_opened(path: Path) -> str:
    """Open it: its mode does not tell, for a container may forbid a device (cgroups)."""
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
    """Whether this process holds CAP_IPC_LOCK, which the limit does not bind."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return False
    held = next(line.split()[1] for line in lines if line.startswith("CapEff:"))
    return bool(int(held, 16) >> _CAP_IPC_LOCK & 1)


__all__ = ["add_parser", "gather", "main", "show"]

"""Report on a machine's topology as findings, and its export as an NCCL topology file.

`r2ccl.topology.sysfs` reads the `Machine`; `r2ccl.topology.affinity` chooses the NICs of each GPU.
Invariant: a finding has a fix if and only if it is a warning.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Collection
from pathlib import Path

from r2ccl.cli.diagnosis import DoctorFinding
from r2ccl.errors import InvalidArgument
from r2ccl.topology.affinity import Affinity, NicRoute, host_routes
from r2ccl.topology.machine import Machine
from r2ccl.topology.nccl_xml import format_xml

#: Last words of a remark of `r2ccl.topology.sysfs` about a problem that can be fixed.
_RESEAT = "reseat the card"
#: Largest number of backup NICs that are shown per GPU.
_MOST_BACKUPS = 3


def examine_machine(
    machine: Machine, links_from: str, cpus: Collection[int]
) -> tuple[DoctorFinding, ...]:
    """Return findings about a machine's parts, its routes from GPUs to NICs, and its problems.

    The first finding counts the parts. One finding per GPU that reaches a NIC follows, with the
    NICs in the order in which the GPU prefers them. Without GPUs, one finding per reachable NIC
    port follows, ordered by speed, then by distance. The last findings are the remarks in
    `machine`.

    Parameters
    ----------
    machine : Machine
    links_from : str
        Source of the facts about NVLinks, see `r2ccl.topology.gpus.GpuFacts`; empty if there are
        none.
    cpus : collection of int
        CPUs on which this process may run. Without GPUs, equally fast NICs are ordered by their
        distance to these CPUs.
    """
    counts = (
        f"{_count(len(machine.nodes), 'NUMA node')}, {_count(len(machine.gpus), 'GPU')}, "
        f"{_count(len(machine.ports), 'NIC port')}"
    )
    source = f"; NVLinks from {links_from}" if links_from else ""
    return (
        DoctorFinding("machine", "ok", counts + source),
        *_routes(machine, cpus),
        *map(_remark, machine.remarks),
    )


def save_xml(machine: Machine, target: str) -> None:
    """Write a description of `machine` as an NCCL topology file; replace the file atomically.

    Parameters
    ----------
    machine : Machine
    target : str
        Path of the file, which is replaced if it exists; ``-`` writes to standard output.

    Raises
    ------
    InvalidArgument
        If the file cannot be written, or exists and is not a regular file.
    """
    text = format_xml(machine)
    if target == "-":
        sys.stdout.write(text)
        return
    path = Path(os.path.realpath(target))
    try:
        if path.exists() and not path.is_file():
            raise _refusal(target, "it exists and is not a regular file")
        _replace(path, text)
    except OSError as exc:
        raise _refusal(target, exc.strerror or str(exc)) from exc


def _replace(path: Path, text: str) -> None:
    # Not named after the process id: a process in another container may have the same one.
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        # Not made by tempfile: its mode would keep other users' jobs from reading the file.
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _refusal(target: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"--topology-xml {target}: {why}; name a file that can be written or created, or - for "
        "standard output"
    )


def _routes(machine: Machine, cpus: Collection[int]) -> list[DoctorFinding]:
    if not machine.gpus:
        return [DoctorFinding("route", "ok", str(route)) for route in host_routes(machine, cpus)]
    preferences = Affinity(machine).preferences()
    return [DoctorFinding("route", "ok", _preference(routes)) for routes in preferences.values()]


def _preference(routes: tuple[NicRoute, ...]) -> str:
    first, *backups = routes
    if not backups:
        return str(first)
    shown = [f"{each.port} (PXN)" if each.via else each.port for each in backups[:_MOST_BACKUPS]]
    rest = len(backups) - len(shown)
    return f"{first}; then {', '.join(shown)}{f' and {rest} more' if rest else ''}"


def _remark(remark: str) -> DoctorFinding:
    says, sign, fix = remark.rpartition("; ")
    if sign and fix == _RESEAT:
        return DoctorFinding("machine", "warning", says, fix)
    return DoctorFinding("machine", "skipped", remark)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


__all__ = ["examine_machine", "save_xml"]

"""Finds the rails near each rank's GPU, with the same result on all ranks.

Every rank sends a report to all others: the part of its host's topology between its GPU and its
NICs. The reports of a host's ranks are merged into one machine. For this machine
`r2ccl.topology.affinity` assigns home rails to GPUs, and finds the rails that a GPU reaches best
through the memory of another GPU (NCCL's PXN). All rails are home rails of all GPUs of a host if
one of its ranks has no usable report, if its ranks name different NICs for a rail, or if its merged
machine exceeds a limit.

A GPU gets n_rails // n_gpus home rails, at least one, but no more than its own PCIe link can use; a
GPU that reaches no NIC gets all rails. A spare rail goes to one GPU that can use the rail, if the
rail is no more distant from this GPU than the farthest of the GPU's other home rails. A spare rail
never goes to several GPUs: the ranks of a host have equal parts of the data, so a rail shared by
some ranks would delay all ranks.

Invariants: all ranks return the same home rails, even if a rank fails to read its topology or sends
a malformed report; the time is bounded, because reports larger than those of any real machine are
refused.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping, Sequence

import msgspec

from r2ccl.errors import InvalidArgument
from r2ccl.topology.affinity import Affinity
from r2ccl.topology.distance import Distance
from r2ccl.topology.machine import Machine, PciDevice, merge, parse_bus_id
from r2ccl.types import AllgatherBytes

_log = logging.getLogger(__name__)

#: First message of a rank: size of its report in bytes, and number of its rails.
_HEAD = struct.Struct("<II")
#: Last message of a rank: its home rails, one bit per rail.
_HOMES = struct.Struct("<Q")
_MOST_RAILS = 8 * _HOMES.size
#: Size limit of a report in bytes. Every rank receives all reports. A NIC and the two switches
#: above it take 700 bytes.
_MOST_NBYTES = 64 << 10
#: Limits per host: PCI devices (GPUs, NICs and the devices above them), devices on one PCI path,
#: NUMA nodes, and different link rates. Real machines have some tens of devices, 5 on a path, 8
#: nodes and 5 rates. At the limits the assignment takes seconds; its time grows with the product of
#: the four numbers.
_MOST_DEVICES, _MOST_DEPTH, _MOST_NODES, _MOST_RATES = 256, 16, 32, 16


class PxnRoute(msgspec.Struct, frozen=True):
    """A rail whose NIC this rank's GPU reaches best through the memory of another GPU.

    In a `NicAffinity`, ``rail`` is the index of the rail in the `labels` of `find_nic_affinity`. In
    the argument of `PxnRoutes`, it is the number of the rail in the transport. ``via`` is the PCI
    bus ID of the other GPU, which another rank of this host uses.
    """

    rail: int
    via: str


class NicAffinity(msgspec.Struct, frozen=True):
    """Home rails of all ranks, and PXN routes of this rank; result of `find_nic_affinity`.

    ``homes[rank]`` has the home rails of `rank` as ascending indices into the `labels` of
    `find_nic_affinity`, at least one. ``pxn_routes`` has the routes of this rank, ordered by rail.
    """

    homes: tuple[tuple[int, ...], ...]
    pxn_routes: tuple[PxnRoute, ...]


def find_nic_affinity(
    rank: int,
    nodes: Sequence[Sequence[int]],
    *,
    bus_id: str,
    labels: Sequence[str],
    read: Callable[[], Machine],
    allgather: AllgatherBytes,
) -> NicAffinity:
    """Find the rails near each rank's GPU.

    Parameters
    ----------
    rank : int
    nodes : sequence of sequence of int
        Ranks of each host.
    bus_id : str
        PCI bus ID of this rank's GPU.
    labels : sequence of str
        This rank's RDMA port for each rail, such as ``mlx5_0:1``. All ranks must pass the same
        number of labels.
    read : callable
        Returns the topology of this host as this process sees it, including this rank's GPU.
    allgather : callable
        See `AllgatherBytes`.

    Returns
    -------
    NicAffinity

    Raises
    ------
    InvalidArgument
        On all ranks, if they have different numbers of rails, no rails, or more than 64.
    R2cclError
        If `allgather` raises it.

    Notes
    -----
    *Collective*: all ranks. *Cost*: three allgathers, one of them with some kilobytes per rank.
    """
    nrails, received = _exchange(
        rank, len(labels), _encode_report(rank, bus_id, labels, read), allgather
    )
    members = next(tuple(node) for node in nodes if rank in node)
    reports, why = _reports_of(members, received, nrails)
    machine = merge([report.machine for report in reports]) if reports else None
    homes: tuple[int, ...] = tuple(range(nrails))
    pxn_routes: tuple[PxnRoute, ...] = ()
    if machine is None or (why := _excess(machine)):
        told = f"every NIC: {why}"
    else:
        mine = reports[members.index(rank)]
        homes, pxn_routes = _assign(mine, machine)
        told = _summary(mine.labels, homes, pxn_routes)
    _log.info("rank %d: home rails of GPU %s: %s", rank, bus_id, told)
    masks = allgather(_HOMES.pack(sum(1 << rail for rail in homes)))
    return NicAffinity(tuple(_rails_of(mask, nrails) for mask in masks), pxn_routes)


def common_homes(homes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the rails that a group of ranks plans with: the union of their home rails.

    Parameters
    ----------
    homes : sequence of sequence of int
        Home rails of each rank of the group.

    Returns
    -------
    tuple of int
        Rails in ascending order.
    """
    return tuple(sorted({rail for rails in homes for rail in rails}))


class _MachineReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Report of a rank: its GPU, its port of each rail, and the machine's devices between them."""

    bus_id: str
    labels: tuple[str, ...]
    machine: Machine


def _encode_report(
    rank: int, bus_id: str, labels: Sequence[str], read: Callable[[], Machine]
) -> bytes:
    """Return this rank's report, encoded.

    If the topology cannot be read or the report would be too large, log why and return ``b""``.
    """
    try:
        report = msgspec.msgpack.encode(_report_of(bus_id, labels, read()))
        why = ""
        if len(report) > _MOST_NBYTES:
            why = f"the report of its PCI paths has {len(report)} bytes, more than {_MOST_NBYTES}"
    except Exception as exc:  # drivers may raise anything, and the other ranks wait for a report
        report, why = b"", f"{type(exc).__name__}: {exc}"
    if why:
        _log.warning(
            "rank %d: cannot determine which NICs are near GPU %s (%s): all NICs count as near on "
            "this host; see the topology section of `r2ccl doctor`",
            rank, bus_id, why,
        )  # fmt: skip
        return b""
    return report


def _report_of(bus_id: str, labels: Sequence[str], machine: Machine) -> _MachineReport:
    """Return a report with only the devices of `machine` between the GPU and the ports.

    Raises
    ------
    InvalidArgument
        If the machine lacks the GPU, a port, or a device between them.
    """
    gpu = machine.gpu(parse_bus_id(bus_id))
    ports = [machine.port(label) for label in labels]
    devices = {device.bus_id: device for device in machine.pci}
    above: dict[str, PciDevice] = {}
    for each in (gpu.bus_id, *(port.bus_id for port in ports)):
        at = each
        while at in devices and at not in above:
            above[at] = devices[at]
            at = devices[at].parent
    used = {device.numa_node for device in above.values()} | {port.numa_node for port in ports}
    part = Machine.of(
        [node for node in machine.nodes if node.id in used],
        above.values(),
        [gpu],
        ports,
        [link for link in machine.nvlinks if link.gpu == gpu.bus_id],
    )
    return _MachineReport(gpu.bus_id, tuple(labels), part)


_report_decoder = msgspec.msgpack.Decoder(_MachineReport)


def _decode(received: bytes) -> _MachineReport | None:
    """Return the decoded report of a rank; None if it is unusable."""
    try:
        report = _report_decoder.decode(received)
        report = _report_of(
            report.bus_id, report.labels, report.machine
        )  # drop parts of the machine that are not needed
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    # Link rates are looked up by CPU model and compute capability, which must not be negative.
    least = min(*(gpu.compute_capability for gpu in report.machine.gpus),
                *(node.model for node in report.machine.nodes))  # fmt: skip
    return report if least >= 0 else None


def _exchange(
    rank: int, nrails: int, report: bytes, allgather: AllgatherBytes
) -> tuple[int, list[bytes]]:
    """Exchange `report` among all ranks; return the number of rails, and each rank's report.

    A report above the size limit is returned as ``b""``. Raise InvalidArgument on all ranks if they
    have different numbers of rails, no rails, or too many.
    """
    heads = [_parse_head(received) for received in allgather(_HEAD.pack(len(report), nrails))]
    counts = [head[1] for head in heads if head is not None] or [nrails]
    if not 1 <= min(counts) == max(counts) <= _MOST_RAILS:
        raise InvalidArgument(
            f"rank {rank}: ranks have {min(counts)} to {max(counts)} RDMA rails: give all ranks "
            f"the same number, 1 to {_MOST_RAILS}, with R2CC_HCA"
        )
    lengths = [head[0] if head is not None and head[0] <= _MOST_NBYTES else 0 for head in heads]
    longest = max(1, *lengths)
    received = allgather(report[:longest].ljust(longest, b"\0"))
    return counts[0], [each[:length] for each, length in zip(received, lengths, strict=True)]


def _parse_head(received: bytes) -> tuple[int, int] | None:
    if len(received) != _HEAD.size:
        return None
    nbytes, nrails = _HEAD.unpack(received)
    return nbytes, nrails


def _reports_of(
    members: Sequence[int], received: Sequence[bytes], nrails: int
) -> tuple[list[_MachineReport], str]:
    """Return the decoded reports of a host's ranks, and an empty string.

    If a report is unusable, or the reports contradict each other, return no report and the reason.
    """
    reports: list[_MachineReport] = []
    for member in members:
        report = _decode(received[member])
        if report is None:
            return [], f"rank {member} sent no usable report of its topology"
        if len(report.labels) != nrails:
            return [], f"rank {member} names {len(report.labels)} NICs for {nrails} rails"
        if reports and report.labels != reports[0].labels:
            return [], f"ranks {members[0]} and {member} use different NICs for a rail"
        reports.append(report)
    return reports, ""


def _excess(machine: Machine) -> str:
    """Return a description of a limit that a host's merged machine exceeds; empty if none."""
    parents = {device.bus_id: device.parent for device in machine.pci}
    links = {(device.speed_mtps, device.width) for device in machine.pci}
    speeds = {port.speed_mbps for port in machine.ports}
    for what, count, most in (
        ("PCI devices", len(parents), _MOST_DEVICES),
        ("PCI devices on one path", _depth(parents), _MOST_DEPTH),
        ("NUMA nodes", len(machine.nodes), _MOST_NODES),
        ("rates of links", len(links) + len(speeds), _MOST_RATES),
    ):
        if count > most:
            return f"the ranks of this host report more than {most} {what}"
    return ""


def _depth(parents: Mapping[str, str]) -> int:
    """Return the number of devices on the longest PCI path, or `_MOST_DEPTH` + 1 if it is larger.

    `parents` maps the bus ID of each device to the bus ID of its parent device. The limit ends the
    search even if a report contains a cycle.
    """
    at, depth = set(parents), 0
    while at and depth <= _MOST_DEPTH:
        at = {parents[each] for each in at} - {""}
        depth += 1
    return depth


def _assign(mine: _MachineReport, machine: Machine) -> tuple[tuple[int, ...], tuple[PxnRoute, ...]]:
    """Return the home rails and the PXN routes of a rank's GPU."""
    gpus = [gpu.bus_id for gpu in machine.gpus]
    affinity = Affinity(machine, gpus=gpus, ports=mine.labels)
    rails = {label: rail for rail, label in enumerate(mine.labels)}
    found = _homes(affinity, len(mine.labels) // len(gpus)).get(mine.bus_id, mine.labels)
    routes = affinity.preferences().get(mine.bus_id, ())
    vias = {rails[route.port]: route.via for route in routes if route.via is not None}
    pxn_routes = tuple(PxnRoute(rail, via) for rail, via in sorted(vias.items()))
    return tuple(sorted({rails[label] for label in found})), pxn_routes


def _homes(affinity: Affinity, share: int) -> dict[str, list[str]]:
    """Return the home ports of each GPU, by the GPU's bus ID.

    A GPU gets max(1, `share`) ports, or fewer if it cannot use that many. `Affinity.assign` places
    one more flow per GPU; the additional flows show which GPUs can use a spare port. A spare port
    goes to the first GPU from which the port is no more distant than the farthest of the GPU's
    other ports, because a flow on a longer path could delay other flows.
    """
    nflows = max(1, share)
    routes = affinity.assign(nflows + 1)
    homes: dict[str, list[str]] = {}
    farthest: dict[str, Distance] = {}
    for route in routes:
        if route.channel < nflows:
            homes.setdefault(route.gpu, []).append(route.port)
            farthest[route.gpu] = max(route.distance, farthest.get(route.gpu, Distance.LOC))
    taken = {port for ports in homes.values() for port in ports}
    for route in routes:
        is_left = route.channel == nflows and route.port not in taken
        if is_left and route.distance <= farthest[route.gpu]:
            taken.add(route.port)
            homes[route.gpu].append(route.port)
    return homes


def _rails_of(received: bytes, nrails: int) -> tuple[int, ...]:
    """Return the home rails in a rank's last message; all rails if the message is invalid."""
    mask = _HOMES.unpack(received)[0] if len(received) == _HOMES.size else 0
    if not 0 < mask < 1 << nrails:
        return tuple(range(nrails))
    return tuple(rail for rail in range(nrails) if mask >> rail & 1)


def _summary(labels: Sequence[str], homes: Sequence[int], pxn_routes: Sequence[PxnRoute]) -> str:
    parts = [", ".join(labels[rail] for rail in homes)]
    parts += [f"{labels[pxn_route.rail]} through GPU {pxn_route.via}" for pxn_route in pxn_routes]
    return "; ".join(parts)


__all__ = ["NicAffinity", "PxnRoute", "common_homes", "find_nic_affinity"]

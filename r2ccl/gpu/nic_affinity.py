"""Which rails are near to which rank's GPU, as all ranks know it: a basis for their plans.

Every rank tells the part of its machine that lies between its GPU and the rails. What the ranks of
a host tell is one machine, of which `r2ccl.topology.affinity` says where each GPU is at home, and
which rails it reaches best through the memory of another GPU (NCCL's PXN). Where a rank cannot
tell, or those of a host have different NICs for a rail, every rail is home to all GPUs of the host.

A GPU has as many homes as there are rails for each GPU in use, and fewer where those fill its own
link. A rail that is then left over becomes home to one GPU more, if that has use for it and it is
as near as those it has; never to several: the members of a host have equal parts of the data, and a
rail that some of them share, while others do not, would hold up all.

Must not read the machine, which is passed in, nor import links or plans. Invariants: all ranks
return the same homes, whatever single ranks fail at and whatever they say; and soon, for no machine
is judged that is larger than any there is.
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

#: What a rank says first: how many bytes will describe its machine, how many rails there are.
_HEAD = struct.Struct("<II")
#: What it says last: its homes, a bit for each rail.
_HOMES = struct.Struct("<Q")
_MOST_RAILS = 8 * _HOMES.size
#: All ranks hear it of all. A NIC and two switches above it take some 700 bytes.
_MOST_NBYTES = 64 << 10
#: Of a host that is judged: devices that lead to its GPUs and NICs, how many of them to one, NUMA
#: nodes, and rates of links. Machines have some tens, 5, 8 and 5; a judgement of what has just so
#: many of each takes seconds, and beyond that the time grows with their product.
_MOST_DEVICES, _MOST_DEPTH, _MOST_NODES, _MOST_RATES = 256, 16, 32, 16


class PxnRoute(msgspec.Struct, frozen=True):
    """A rail that a GPU had better reach through the memory of another one.

    ``rail`` is the position among the RDMA rails, ``via`` the bus id of the other GPU, which some
    rank of this host uses.
    """

    rail: int
    via: str


class NicAffinity(msgspec.Struct, frozen=True):
    """What `find_nic_affinity` finds out.

    ``homes`` are those of every rank: positions of rails, ascending, one at least. ``pxn_routes`` are
    this rank's, by rail.
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
    """Find out together which rails are near to whose GPU.

    Parameters
    ----------
    rank : int
    nodes : sequence of sequence of int
        Of every host its ranks.
    bus_id : str
        Of this rank's GPU.
    labels : sequence of str
        Of every RDMA rail this rank's port, ``mlx5_0:1``. All ranks have as many.
    read : callable
        Returns this host's machine as this process sees it, with its own GPU at least.
    allgather : callable

    Returns
    -------
    NicAffinity

    Raises
    ------
    InvalidArgument
        Ranks have different numbers of rails, or none, or more than 64; raised by all ranks.

    Notes
    -----
    *Collective*: all ranks. *Cost*: three messages to all, one of them of some kilobytes.
    """
    nrails, said = _exchange(rank, len(labels), _describe(rank, bus_id, labels, read), allgather)
    members = next(tuple(node) for node in nodes if rank in node)
    reports, why = _reports_of(members, said, nrails)
    machine = merge([report.machine for report in reports]) if reports else None
    homes: tuple[int, ...] = tuple(range(nrails))
    pxn_routes: tuple[PxnRoute, ...] = ()
    if machine is None or (why := _excess(machine)):
        told = f"every NIC: {why}"
    else:
        mine = reports[members.index(rank)]
        homes, pxn_routes = _judge(mine, machine)
        told = _told(mine.labels, homes, pxn_routes)
    _log.info("rank %d: GPU %s is at home on %s", rank, bus_id, told)
    masks = allgather(_HOMES.pack(sum(1 << rail for rail in homes)))
    return NicAffinity(tuple(_rails_of(mask, nrails) for mask in masks), pxn_routes)


def common_homes(homes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the rails that a group of ranks plans with: those at home with any of them.

    Parameters
    ----------
    homes : sequence of sequence of int
        Of every rank of the group.

    Returns
    -------
    tuple of int
        Ascending.
    """
    return tuple(sorted({rail for rails in homes for rail in rails}))


class _MachineReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank tells: its GPU, its ports by rail, and what of its machine these depend on."""

    bus_id: str
    labels: tuple[str, ...]
    machine: Machine


def _describe(rank: int, bus_id: str, labels: Sequence[str], read: Callable[[], Machine]) -> bytes:
    """Return this rank's report, encoded; empty where it has none to give."""
    try:
        report = msgspec.msgpack.encode(_report_of(bus_id, labels, read()))
        why = ""
        if len(report) > _MOST_NBYTES:
            why = f"what describes the way has {len(report)} bytes, more than {_MOST_NBYTES}"
    except Exception as exc:  # of drivers too: whatever it is, the others wait for this rank
        report, why = b"", f"{type(exc).__name__}: {exc}"
    if why:
        _log.warning(
            "rank %d: cannot tell which NICs are near to GPU %s (%s): all count as near on this "
            "host; see what r2ccl doctor says of the topology",
            rank, bus_id, why,
        )  # fmt: skip
        return b""
    return report


def _report_of(bus_id: str, labels: Sequence[str], machine: Machine) -> _MachineReport:
    """Return a report with that part of a machine which its ways from the GPU to ports depend on.

    Raises
    ------
    InvalidArgument
        The GPU or a port is not there, or the machine is not whole.
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


def _understand(said: bytes) -> _MachineReport | None:
    """Return the report that a rank gave; None where it is none that can be judged."""
    try:
        report = msgspec.msgpack.decode(said, type=_MachineReport)
        report = _report_of(
            report.bus_id, report.labels, report.machine
        )  # nothing more than is asked for
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    # The figures for links are by models and compute capabilities, and begin at 0.
    least = min(*(gpu.compute_capability for gpu in report.machine.gpus),
                *(node.model for node in report.machine.nodes))  # fmt: skip
    return report if least >= 0 else None


def _exchange(
    rank: int, nrails: int, report: bytes, allgather: AllgatherBytes
) -> tuple[int, list[bytes]]:
    """Return how many rails all ranks have, and what each told; too much is as good as nothing."""
    heads = [_head_of(said) for said in allgather(_HEAD.pack(len(report), nrails))]
    counts = [head[1] for head in heads if head is not None] or [nrails]
    if not 1 <= min(counts) == max(counts) <= _MOST_RAILS:
        raise InvalidArgument(
            f"rank {rank}: ranks have {min(counts)} to {max(counts)} RDMA rails: give all of them "
            f"as many, 1 to {_MOST_RAILS}, with R2CC_HCA"
        )
    lengths = [head[0] if head is not None and head[0] <= _MOST_NBYTES else 0 for head in heads]
    longest = max(1, *lengths)
    said = allgather(report[:longest].ljust(longest, b"\0"))
    return counts[0], [each[:length] for each, length in zip(said, lengths, strict=True)]


def _head_of(said: bytes) -> tuple[int, int] | None:
    if len(said) != _HEAD.size:
        return None
    nbytes, nrails = _HEAD.unpack(said)
    return nbytes, nrails


def _reports_of(
    members: Sequence[int], said: Sequence[bytes], nrails: int
) -> tuple[list[_MachineReport], str]:
    """Return the reports of a host's ranks; none, and why, where these do not tell what is near."""
    reports: list[_MachineReport] = []
    for member in members:
        report = _understand(said[member])
        if report is None:
            return [], f"rank {member} does not know its machine"
        if len(report.labels) != nrails:
            return [], f"rank {member} names {len(report.labels)} NICs for {nrails} rails"
        if reports and report.labels != reports[0].labels:
            return [], f"ranks {members[0]} and {member} have different NICs for a rail"
        reports.append(report)
    return reports, ""


def _excess(machine: Machine) -> str:
    """Say what a host, as its ranks tell it together, has more of than any; empty: nothing."""
    parents = {device.bus_id: device.parent for device in machine.pci}
    links = {(device.speed_mtps, device.width) for device in machine.pci}
    speeds = {port.speed_mbps for port in machine.ports}
    for what, count, most in (
        ("PCI devices", len(parents), _MOST_DEVICES),
        ("PCI devices on one way", _depth(parents), _MOST_DEPTH),
        ("NUMA nodes", len(machine.nodes), _MOST_NODES),
        ("rates of links", len(links) + len(speeds), _MOST_RATES),
    ):
        if count > most:
            return f"its ranks tell of more than {most} {what}"
    return ""


def _depth(parents: Mapping[str, str]) -> int:
    """Return how many devices lead to the one that is farthest down, itself included.

    BackendSelector are followed a little beyond what is allowed, for they may be circles.
    """
    at, depth = set(parents), 0
    while at and depth <= _MOST_DEPTH:
        at = {parents[each] for each in at} - {""}
        depth += 1
    return depth


def _judge(mine: _MachineReport, machine: Machine) -> tuple[tuple[int, ...], tuple[PxnRoute, ...]]:
    """Return the homes and the pxn_routes of a rank's GPU in its host's machine."""
    gpus = [gpu.bus_id for gpu in machine.gpus]
    affinity = Affinity(machine, gpus=gpus, ports=mine.labels)
    rails = {label: rail for rail, label in enumerate(mine.labels)}
    found = _homes(affinity, len(mine.labels) // len(gpus)).get(mine.bus_id, mine.labels)
    routes = affinity.preferences().get(mine.bus_id, ())
    vias = {rails[route.port]: route.via for route in routes if route.via is not None}
    pxn_routes = tuple(PxnRoute(rail, via) for rail, via in sorted(vias.items()))
    return tuple(sorted({rails[label] for label in found})), pxn_routes


def _homes(affinity: Affinity, share: int) -> dict[str, list[str]]:
    """Return the ports that each GPU is at home on: `share` of them, as far as it has use for them.

    One more flow of each GPU shows who has use for a port that is left over. The first of these
    gets it to which it is no farther than those it has: on a longer way it could hold up others.
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


def _rails_of(said: bytes, nrails: int) -> tuple[int, ...]:
    """Return the homes that a rank told; all rails where it told none, or such as there are not."""
    mask = _HOMES.unpack(said)[0] if len(said) == _HOMES.size else 0
    if not 0 < mask < 1 << nrails:
        return tuple(range(nrails))
    return tuple(rail for rail in range(nrails) if mask >> rail & 1)


def _told(labels: Sequence[str], homes: Sequence[int], pxn_routes: Sequence[PxnRoute]) -> str:
    ways = [", ".join(labels[rail] for rail in homes)]
    ways += [f"{labels[pxn_route.rail]} through GPU {pxn_route.via}" for pxn_route in pxn_routes]
    return "; ".join(ways)


__all__ = ["NicAffinity", "PxnRoute", "common_homes", "find_nic_affinity"]

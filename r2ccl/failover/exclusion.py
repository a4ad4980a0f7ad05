"""Maps the NICs that an operator has declared failed to the ranks and rails that use them.

``R2CC_FAILED_NICS`` identifies the host of a NIC by its name or number; `Communicator.exclude`
identifies the host by one of its ranks. A NIC given by name is excluded for all ranks of the host
that use it. A NIC given by the number of a rail is excluded for all ranks of the host
(``R2CC_FAILED_NICS``) or for the given rank only (`Communicator.exclude`).

All functions are pure. The `PeerInfo` of all ranks, which `declared` and `ports_of` read, is equal
on all ranks, so all ranks get the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import NamedTuple, SupportsIndex, TypeAlias

from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.config import parse_failures
from r2ccl.errors import InvalidArgument

#: Rank and rail of a port.
Port: TypeAlias = tuple[int, int]


class Declared(NamedTuple):
    """Ports that are excluded at the start, and entries of ``R2CC_FAILED_NICS`` without effect.

    ``unknown`` has the entries that name no NIC of this job, each written ``host:nic``.
    """

    ports: frozenset[Port]
    unknown: tuple[str, ...]


def declared(peers: Sequence[PeerInfo]) -> Declared:
    """Return the ports that are excluded at the start, and the entries that name no NIC.

    The ports are the ports of NICs in the ``R2CC_FAILED_NICS`` of any rank, and the ports that were
    excluded before a shrink.

    Parameters
    ----------
    peers : sequence of PeerInfo
        One per rank.

    Raises
    ------
    InvalidArgument
        If a rank with such a port has no rail left, or no rail left in common with another rank.
    """
    nodes = list(dict.fromkeys(info.host for info in peers))
    ports = {(info.rank, rail) for info in peers for rail in info.excluded}
    entries = dict.fromkeys(each for info in peers for each in parse_failures(info.failed_nics))
    unknown = []
    for host, nic in entries:
        at = nodes[int(host)] if host.isdecimal() and int(host) < len(nodes) else ""
        found = {
            (info.rank, rail)
            for info in peers
            if info.host == at or _is_host(info.hostname, host)
            for rail in _rails(info, nic)
        }
        ports |= found
        if not found:
            unknown.append(f"{host}:{nic}")
    _check(peers, ports)
    return Declared(frozenset(ports), tuple(unknown))


def ports_of(
    peers: Sequence[PeerInfo], rank: SupportsIndex, nic: str | SupportsIndex
) -> tuple[Port, ...]:
    """Return the ports that a NIC on the host of `rank` serves.

    Parameters
    ----------
    peers : sequence of PeerInfo
        One per rank.
    rank : int
    nic : str or int
        If the name of a NIC is given, its ports of all ranks of the host are returned; if the
        number of a rail is given, only the port of `rank`.

    Raises
    ------
    InvalidArgument
        If there is no such rank or NIC.
    """
    at = _number(rank)
    if not 0 <= at < len(peers):
        raise InvalidArgument(f"rank={rank}; allowed is 0 to {len(peers) - 1}")
    own = peers[at]
    if not isinstance(nic, str):
        found = [(at, _number(nic))] if 0 <= _number(nic) < len(own.nics) else []
    else:
        node = [info for info in peers if info.host == own.host]
        found = [
            (info.rank, rail)
            for info in node
            for rail, name in enumerate(info.nics)
            if _is_nic(name, nic)
        ]
    if not found:
        raise InvalidArgument(
            f"nic={nic!r} names no NIC: {describe_nics(own)}; pass one of these "
            "names, or the number of a rail"
        )
    return tuple(found)


def describe_nics(info: PeerInfo) -> str:
    """Return a clause for messages: a rank, its host, and its NICs with the rail of each."""
    nics = ", ".join(f"{name} (rail {rail})" for rail, name in enumerate(info.nics))
    return f"rank {info.rank} on {info.hostname} has {nics}"


def _number(given: SupportsIndex) -> int:
    """Return `given` as an int; -1 if it is not an integer."""
    try:
        return index(given)
    except TypeError:
        return -1


def is_declared(text: str, hostname: str, rail: int, name: str) -> bool:
    """Return whether ``R2CC_FAILED_NICS=text`` names the NIC `name` of the host `hostname`.

    An entry may give the NIC by its name or by the number of its `rail`. Entries that give the host
    by its number do not count.
    """
    return any(
        _is_host(hostname, host) and (nic == str(rail) or _is_nic(name, nic))
        for host, nic in parse_failures(text)
    )


def _rails(info: PeerInfo, nic: str) -> list[int]:
    return [rail for rail, name in enumerate(info.nics) if nic == str(rail) or _is_nic(name, nic)]


def _is_nic(name: str, nic: str) -> bool:
    """Return whether `nic` is `name`, or the device (``mlx5_0``) of port `name` (``mlx5_0:1``)."""
    return nic in (name, name.partition(":")[0])


def _is_host(hostname: str, host: str) -> bool:
    """Return whether `host` is `hostname`, or the part of `hostname` before the first dot."""
    return host in (hostname, hostname.partition(".")[0])


def _check(peers: Sequence[PeerInfo], ports: set[Port]) -> None:
    left = [
        {rail for rail in range(len(info.nics)) if (info.rank, rail) not in ports} for info in peers
    ]
    for rank, info in enumerate(peers):
        if info.nics and not left[rank]:
            raise InvalidArgument(
                f"rank {rank} on {info.hostname} (NICs: {', '.join(info.nics)}) has no rail left, "
                "because of NICs excluded before a shrink or declared failed (R2CC_FAILED_NICS): "
                "exclude fewer NICs"
            )
    for rank in sorted({rank for rank, _ in ports}):
        for peer, info in enumerate(peers):
            if not left[rank] & left[peer]:
                raise InvalidArgument(
                    f"rank {rank} on {peers[rank].hostname} (NICs: {', '.join(peers[rank].nics)}) "
                    f"and rank {peer} on {info.hostname} have no common rail left, because of NICs "
                    "excluded before a shrink or declared failed (R2CC_FAILED_NICS): exclude fewer "
                    "NICs"
                )


__all__ = ["Declared", "Port", "declared", "describe_nics", "is_declared", "ports_of"]

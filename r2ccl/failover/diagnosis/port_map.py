"""Map of the ports of all ranks: which ports share a NIC, and their names in messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.failover.diagnosis.verdict import Naming
from r2ccl.types import Nic


class PortMap(NamedTuple):
    """NICs and names of the ports of all ranks, as one rank knows them.

    ``nics(rail)`` returns a NIC identifier per rank; ranks with equal identifiers share a NIC.
    ``name(rank, rail)`` returns the name of a port for users, such as ``rank 2 rail 1 (n2 eth1)``.
    """

    nics: Callable[[int], Sequence[str]]
    name: Naming


def port_map_of(rank: int, peers: Sequence[PeerInfo], nics: Sequence[Nic]) -> PortMap:
    """Return the port map of rank `rank`.

    Ranks of one host share a NIC if they announced the same address, or the same RDMA port, for a
    rail.

    Parameters
    ----------
    rank : int
    peers : sequence of PeerInfo
        Announced information of every rank, by rank.
    nics : sequence of Nic
        This rank's NICs, by rail. A port of this rank is named after its NIC (`Nic.name`), a port
        of another rank after its address or RDMA port.
    """

    def end(of: PeerInfo, rail: int) -> str:
        addresses = [address for address, _ in of.rails]
        return (*addresses, *of.hcas)[rail]

    def nics_on(rail: int) -> Sequence[str]:
        return [f"{info.host} {end(info, rail)}" for info in peers]

    def name(of: int, rail: int) -> str:
        what = nics[rail].name if of == rank else end(peers[of], rail)
        return f"{_plain_name(of, rail)} ({peers[of].hostname} {what})"

    return PortMap(nics_on, name)


def own_ports(nranks: int) -> PortMap:
    """Return the port map of `nranks` ranks that share no NIC."""
    alone = [str(each) for each in range(nranks)]
    return PortMap(lambda _: alone, _plain_name)


def _plain_name(rank: int, rail: int) -> str:
    return f"rank {rank} rail {rail}"


__all__ = ["PortMap", "own_ports", "port_map_of"]

"""Which ports of which ranks are one NIC, and what people call them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.failover.diagnosis.verdict import Naming
from r2ccl.types import Nic


class PortMap(NamedTuple):
    """The ports of all ranks, as one rank knows them.

    ``nics(rail)``: of every rank, its end of a rail; equal strings are one NIC. ``name(rank,
    rail)``: what people call a port.
    """

    nics: Callable[[int], Sequence[str]]
    name: Naming


def port_map_of(rank: int, peers: Sequence[PeerInfo], nics: Sequence[Nic]) -> PortMap:
    """Return NICs and names of ports as rank `rank` knows them.

    Ranks of one host share a NIC if they gave the same address, or the same RDMA port, for a rail.

    Parameters
    ----------
    rank : int
    peers : sequence of PeerInfo
        Of every rank.
    nics : sequence of Nic
        This rank's rails, by number: of its own ports the interface is known, of others' sockets
        the address only.
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
    """Return the map of ranks that have NICs of their own."""
    alone = [str(each) for each in range(nranks)]
    return PortMap(lambda _: alone, _plain_name)


def _plain_name(rank: int, rail: int) -> str:
    return f"rank {rank} rail {rail}"


__all__ = ["PortMap", "own_ports", "port_map_of"]

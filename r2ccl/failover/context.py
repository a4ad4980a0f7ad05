"""Context of one rank: the values that all parts of its data plane share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from r2ccl.bootstrap.base import ControlPort
from r2ccl.clock import Clock
from r2ccl.config import Config
from r2ccl.failover.diagnosis.port_map import PortMap
from r2ccl.failover.health.table import Health
from r2ccl.transport.base import Transport


class RankContext(NamedTuple):
    """One rank of a job: its transport, control plane and settings, and facts about other ranks.

    Attributes
    ----------
    rank, nranks : int
    transport : Transport
    control : ControlPort
    config : Config
    clock : Clock
    nwires : int
        Number of rails whose bandwidths add up; 1 if all rails share one wire, as on loopback.
    last_resorts : frozenset of int
        TCP rails that carry data between two ranks only if no other path between these ranks is up.
        Empty if there are no other TCP rails. Also empty with RDMA rails: all TCP rails are then
        used in this way.
    nodes : sequence of int
        Node number of each rank, from 0; empty if there is one node, or one rank per node.
    hosts : sequence of str
        Host name of every rank, for messages; empty: not known.
    port_map : PortMap or None
        Shared NICs and names of ports; None: no two ranks share a NIC.
    excluded : frozenset of (int, int)
        Rank and rail of the rails that are excluded at the start; equal on all ranks.
    neighbors : collection of int or None
        Ranks to which data paths are connected at the start; paths to other ranks are connected
        when a call needs them. None: all ranks.
    """

    rank: int
    nranks: int
    transport: Transport
    control: ControlPort
    config: Config
    clock: Clock
    nwires: int = 1
    last_resorts: frozenset[int] = frozenset()
    nodes: Sequence[int] = ()
    hosts: Sequence[str] = ()
    port_map: PortMap | None = None
    neighbors: Collection[int] | None = None
    excluded: frozenset[tuple[int, int]] = frozenset()

    @property
    def peers(self) -> list[int]:
        """All other ranks, in ascending order."""
        return [peer for peer in range(self.nranks) if peer != self.rank]

    @property
    def first_peers(self) -> Sequence[int]:
        """Ranks to which data paths are connected at the start, in ascending order."""
        return self.peers if self.neighbors is None else sorted(self.neighbors)

    @property
    def nrails(self) -> int:
        """Number of rails of the transport."""
        return self.transport.nrails

    @property
    def joined(self) -> list[int]:
        """RDMA rails: to connect a path, its two ends exchange endpoint info (`Connector`)."""
        return [rail for rail in range(self.nrails) if self.transport.joins(rail)]

    @property
    def homes(self) -> list[int]:
        """Home rails: the RDMA rails or, if there are none, all TCP rails except last resorts."""
        sockets = (rail for rail in range(self.nrails) if rail not in self.last_resorts)
        return self.joined or list(sockets)

    @property
    def is_measured(self) -> bool:
        """True if the bandwidth of rails is measured from the traffic."""
        wanted = self.config.balance
        is_several = self.nwires > 1 if wanted == "auto" else wanted == "1"
        return is_several and self.config.is_balanced

    def whole_health(self) -> Health:
        """Return the initial health: excluded rails are down, all others have their full rate."""
        return Health.whole(self.nranks, self.nrails, self.config.digest(), self.excluded)

    @property
    def has_bypasses(self) -> bool:
        """True if bypasses may be used.

        Bypasses are used neither in the fail-stop baseline nor with R2CC_FABRIC=none.
        """
        return self.config.is_resilient and self.config.fabric != "none"


__all__ = ["RankContext"]

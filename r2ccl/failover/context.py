"""Values that all parts of one rank's data path are given when they are made."""

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
    """One rank of a job, what it sends by, and what it knows of the others.

    ``nwires`` rails add bandwidth to one another. ``last_resorts`` are used only where two ranks
    have nothing else. ``nodes`` has every rank's node where several share one, else it is empty.
    ``hosts`` has their names, for people; empty: not known. ``port_map``: which ports are one NIC,
    and what people call them; None: every rank has NICs of its own. Data paths to
    ``neighbors`` are connected at the start, others when a plan needs them; None: to all ranks.
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

    @property
    def peers(self) -> list[int]:
        """All other ranks."""
        return [peer for peer in range(self.nranks) if peer != self.rank]

    @property
    def first_peers(self) -> Sequence[int]:
        """Ranks that data paths are connected to at the start, in rising order."""
        return self.peers if self.neighbors is None else sorted(self.neighbors)

    @property
    def nrails(self) -> int:
        """Rails of the transport."""
        return self.transport.nrails

    @property
    def joined(self) -> list[int]:
        """Rails whose ends the transport connects itself: those of RDMA NICs."""
        return [rail for rail in range(self.nrails) if self.transport.joins(rail)]

    @property
    def homes(self) -> list[int]:
        """Rails channels are at home on: not those of TCP beside RDMA, nor the last resort."""
        sockets = (rail for rail in range(self.nrails) if rail not in self.last_resorts)
        return self.joined or list(sockets)

    @property
    def is_measured(self) -> bool:
        """Whether the rates of rails are measured from the traffic."""
        wanted = self.config.balance
        is_several = self.nwires > 1 if wanted == "auto" else wanted == "1"
        return is_several and self.config.is_balanced

    def whole_health(self) -> Health:
        """Return the health of a network in which nothing is down or slow."""
        return Health.whole(self.nranks, self.nrails, self.config.digest())

    @property
    def has_bypasses(self) -> bool:
        """Whether there are ways round where rails do not lead; the fail-stop baseline has none."""
        return self.config.is_resilient and self.config.fabric != "none"


__all__ = ["RankContext"]

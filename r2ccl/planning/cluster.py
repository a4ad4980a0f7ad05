"""Shape of a cluster, for benches and commands that plan for it without running on it."""

from __future__ import annotations

import msgspec

from r2ccl.config import Config
from r2ccl.failover.health.table import Health
from r2ccl.planning.cost_model import Fabric, Rates
from r2ccl.planning.planner import Planner


class ClusterShape(msgspec.Struct, frozen=True):
    """A cluster in which all nodes have equally many NICs and ranks.

    Parameters
    ----------
    rows : tuple of tuple of int
        One row per node, with a number per rail: the share of its bandwidth that the NIC has left,
        0 (down) to `r2ccl.failover.health.table.WHOLE`.
    ranks_per_node : int
    rates : Rates
        Latency of a step, and bandwidth of a whole NIC.
    """

    rows: tuple[tuple[int, ...], ...]
    ranks_per_node: int
    rates: Rates

    @property
    def nrails(self) -> int:
        """Number of NICs of every node."""
        return len(self.rows[0])

    @property
    def teams(self) -> list[range]:
        """Ranks of each node; ranks are numbered node by node."""
        per = self.ranks_per_node
        return [range(node * per, (node + 1) * per) for node in range(len(self.rows))]

    @property
    def nodes(self) -> list[int]:
        """Node of each rank."""
        return [node for node, team in enumerate(self.teams) for _ in team]

    @property
    def health(self) -> Health:
        """Health that all ranks agree on."""
        return Health(1, self.nrails, bytes(x for node in self.nodes for x in self.rows[node]))

    @property
    def fabric(self) -> Fabric:
        """Network as the planner of every rank sees it; every rail is a home rail."""
        nodes = self.nodes if self.ranks_per_node > 1 else ()
        return Fabric(range(self.nrails), self.nrails, nodes, self.rates)

    @property
    def planner(self) -> Planner:
        """A new planner with the default settings, equal to the planner of every rank."""
        return Planner(self.fabric, Config())


__all__ = ["ClusterShape"]

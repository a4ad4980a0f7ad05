"""The network a schedule is simulated on: nodes, their ports, what happens to them and when.

Imports `errors`. Invariant: a `Network` that exists is valid: every port has a bandwidth each way,
every rank a node that is there, and changes lie in time order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from r2ccl.errors import InvalidArgument

#: Bytes per second of every port: ``table[node][rail]``.
Bandwidths = tuple[tuple[float, ...], ...]


class Change(NamedTuple):
    """From ``time_s`` on, the port (`node`, `rail`) has `bandwidth` bytes/s each way; 0: dead."""

    time_s: float
    node: int
    rail: int
    bandwidth: float


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes with full-duplex ports, one a rail, joined by a network that is never the limit itself.

    Parameters
    ----------
    egress, ingress : tuple of tuple of float
        Bytes/s out of and into every port, ``[node][rail]``; 0: dead. By default as fast in as
        out.
    nodes : tuple of int
        Node of each rank; by default one rank a node, in order.
    alpha_s : float
        Seconds between a slice's end on the wire and its landing.
    inside_bandwidth : float
        Bytes/s each way between a rank and the others of its node; infinite: free.
    inside_alpha_s : float
        As `alpha_s`, within a node.
    reduction_rate : float
        Bytes/s at which a rank reduces on one channel; 0: reducing takes no time.
    changes : tuple of Change
        What happens to ports later, in any order.

    Raises
    ------
    InvalidArgument
        A table that is empty or has rows of different lengths; a value that is negative, infinite
        where it must not be, or no number; a node or a rail that is not there.

    Examples
    --------
    >>> whole = Network.uniform(8, 4, 50e9, alpha_s=5e-6)
    >>> whole.without(3, 0).egress[3]
    (0.0, 50000000000.0, 50000000000.0, 50000000000.0)
    """

    egress: Bandwidths
    ingress: Bandwidths = ()
    nodes: tuple[int, ...] = ()
    alpha_s: float = 0.0
    inside_bandwidth: float = math.inf
    inside_alpha_s: float = 0.0
    reduction_rate: float = 0.0
    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        put = msgspec.structs.force_setattr
        if not self.ingress:
            put(self, "ingress", self.egress)
        if not self.nodes:
            put(self, "nodes", tuple(range(len(self.egress))))
        put(self, "changes", tuple(sorted(self.changes, key=lambda change: change.time_s)))
        self._check_tables()
        self._check_numbers()

    @classmethod
    def uniform(
        cls,
        nnodes: int,
        nrails: int,
        bandwidth: float,
        *,
        ranks_per_node: int = 1,
        alpha_s: float = 0.0,
        inside_bandwidth: float = math.inf,
        inside_alpha_s: float = 0.0,
        reduction_rate: float = 0.0,
    ) -> Network:
        """Give `nnodes` nodes `nrails` ports of `bandwidth` bytes/s each way."""
        if ranks_per_node < 1:
            raise _wrong("ranks_per_node", ranks_per_node, "1 or more")
        return cls(
            egress=((float(bandwidth),) * nrails,) * nnodes,
            nodes=tuple(node for node in range(nnodes) for _ in range(ranks_per_node)),
            alpha_s=alpha_s,
            inside_bandwidth=inside_bandwidth,
            inside_alpha_s=inside_alpha_s,
            reduction_rate=reduction_rate,
        )

    @property
    def nnodes(self) -> int:
        """Nodes, with ranks or without."""
        return len(self.egress)

    @property
    def nrails(self) -> int:
        """Ports of every node."""
        return len(self.egress[0])

    @property
    def nranks(self) -> int:
        """Ranks on all nodes."""
        return len(self.nodes)

    def changed(self, *changes: Change) -> Network:
        """Let more happen later."""
        return msgspec.structs.replace(self, changes=(*self.changes, *changes))

    def without(self, node: int, *rails: int, time_s: float = 0.0) -> Network:
        """Let some rails of `node` die, from the beginning or at `time_s`."""
        if time_s > 0:
            return self.changed(*(Change(time_s, node, rail, 0.0) for rail in rails))
        return self._scaled(node, rails, 0.0)

    def degraded(self, node: int, fraction: float) -> Network:
        """Leave every rail of `node` only `fraction` of its bandwidth, from the beginning."""
        return self._scaled(node, range(self.nrails), fraction)

    def _scaled(self, node: int, rails: Iterable[int], fraction: float) -> Network:
        factors = [1.0] * self.nrails
        for rail in rails:
            self._check_port(node, rail)
            factors[rail] = fraction
        self._check_port(node, 0)

        def scaled(table: Bandwidths) -> Bandwidths:
            row = tuple(b * factor for b, factor in zip(table[node], factors, strict=True))
            return (*table[:node], row, *table[node + 1 :])

        return msgspec.structs.replace(
            self, egress=scaled(self.egress), ingress=scaled(self.ingress)
        )

    def _check_tables(self) -> None:
        lengths = [[len(row) for row in table] for table in (self.egress, self.ingress)]
        if not self.egress or not self.egress[0] or lengths[0] != lengths[1]:
            raise _wrong("egress, ingress", lengths, "one row a node, of one length")
        if len(set(lengths[0])) > 1:
            raise _wrong("egress", lengths[0], "one row a node, of one length")
        if min(self.nodes) < 0 or max(self.nodes) >= self.nnodes:
            raise _wrong("nodes", self.nodes, f"0 to {self.nnodes - 1} for every rank")
        for change in self.changes:
            self._check_port(change.node, change.rail)

    def _check_port(self, node: int, rail: int) -> None:
        if not 0 <= node < self.nnodes or not 0 <= rail < self.nrails:
            ports = f"nodes 0 to {self.nnodes - 1} with rails 0 to {self.nrails - 1}"
            raise _wrong("(node, rail)", (node, rail), ports)

    def _check_numbers(self) -> None:
        named = {
            "bandwidth": [b for table in (self.egress, self.ingress) for row in table for b in row],
            "alpha_s": [self.alpha_s, self.inside_alpha_s],
            "reduction_rate": [self.reduction_rate],
            "change": [value for change in self.changes for value in (change[0], change[3])],
        }
        for name, values in named.items():
            _check_finite(name, values)
        if not self.inside_bandwidth > 0:
            raise _wrong("inside_bandwidth", self.inside_bandwidth, "above 0")


def _check_finite(name: str, values: Sequence[float]) -> None:
    for value in values:
        if not 0 <= value < math.inf:
            raise _wrong(name, value, "0 or more, and finite")


def _wrong(name: str, value: object, allowed: str) -> InvalidArgument:
    return InvalidArgument(f"network: {name}={value}; allowed is {allowed}")


__all__ = ["Bandwidths", "Change", "Network"]

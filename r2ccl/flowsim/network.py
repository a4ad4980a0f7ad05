"""Simulated network: nodes, their ports, and the changes of port bandwidth over time.

The constructor of `Network` checks its arguments: every port has a bandwidth in each direction, and
every rank has an existing node. It sorts the changes by time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from r2ccl.errors import InvalidArgument

#: Bandwidth of every port in bytes/s: ``table[node][rail]``.
Bandwidths = tuple[tuple[float, ...], ...]


class Change(NamedTuple):
    """Change of one port's bandwidth at a given time.

    From `time_s` on, port `rail` of `node` has `bandwidth` bytes/s in each direction; 0 means dead.
    """

    time_s: float
    node: int
    rail: int
    bandwidth: float


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes with one full-duplex port per rail.

    Between nodes, only the ports limit the bandwidth; within a node, `inside_bandwidth` does.

    Parameters
    ----------
    egress, ingress : tuple of tuple of float
        Bandwidth of every port in bytes/s, ``[node][rail]``; 0 means dead. `ingress` defaults to
        `egress`.
    nodes : tuple of int
        Node of each rank. Default: one rank per node, in order.
    alpha_s : float
        Latency between nodes: seconds from the moment at which the last byte of a slice is sent to
        the moment at which the slice has landed.
    inside_bandwidth : float
        Total bandwidth in bytes/s, in each direction, between a rank and the other ranks of its
        node. If it is infinite, a transfer within a node takes only `inside_alpha_s`.
    inside_alpha_s : float
        As `alpha_s`, within a node.
    reduction_rate : float
        Bytes per second that a rank reduces on one channel; 0: reductions take no time.
    changes : tuple of Change
        Later changes of port bandwidth, in any order.

    Raises
    ------
    InvalidArgument
        If `egress` has no node or no rail, the rows of a table differ in length, or the tables
        differ in shape; if `inside_bandwidth` is not above 0; if another value is negative,
        infinite or NaN; or if a node or a rail does not exist.

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
        """Return a network of `nnodes` nodes with `nrails` equal ports each.

        Each port has `bandwidth` bytes/s per direction. The ranks are numbered node by node.
        `ranks_per_node` is the number of ranks on each node; all other arguments are as in
        `Network`.

        Raises
        ------
        InvalidArgument
            If `nnodes`, `nrails` or `ranks_per_node` is below 1, or for the reasons given in
            `Network`.
        """
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
        """Number of nodes, including those without a rank."""
        return len(self.egress)

    @property
    def nrails(self) -> int:
        """Number of ports of every node, one per rail."""
        return len(self.egress[0])

    @property
    def nranks(self) -> int:
        """Number of ranks on all nodes."""
        return len(self.nodes)

    def changed(self, *changes: Change) -> Network:
        """Return a copy of the network with further `changes`.

        Raises
        ------
        InvalidArgument
            For the reasons given in `Network`.
        """
        return msgspec.structs.replace(self, changes=(*self.changes, *changes))

    def without(self, node: int, *rails: int, time_s: float = 0.0) -> Network:
        """Return a copy of the network in which `rails` of `node` fail at `time_s`.

        `time_s` is in seconds from the start of the simulation; 0: the rails are dead from the
        start. Changes that the network already has still apply, so a later change can revive a
        rail.

        Raises
        ------
        InvalidArgument
            If the node or a rail does not exist, or `time_s` is negative, infinite or NaN.
        """
        self._check_port(node, 0)
        _check_finite("time_s", [time_s])
        if time_s > 0:
            return self.changed(*(Change(time_s, node, rail, 0.0) for rail in rails))
        return self._scaled(node, rails, 0.0)

    def degraded(self, node: int, fraction: float) -> Network:
        """Return a copy of the network in which `node` has `fraction` of its initial bandwidth.

        The initial bandwidth of each rail of the node is multiplied by `fraction`.
        `Network.changes` is not modified.

        Raises
        ------
        InvalidArgument
            If the node does not exist, or `fraction` is negative or not finite.
        """
        _check_finite("fraction", [fraction])
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
            allowed = "one row per node, all of the same length above 0, equal in both"
            raise _wrong("row lengths of egress, ingress", lengths, allowed)
        if len(set(lengths[0])) > 1:
            allowed = "one row per node, all of the same length"
            raise _wrong("row lengths of egress", lengths[0], allowed)
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
            "alpha_s or inside_alpha_s": [self.alpha_s, self.inside_alpha_s],
            "reduction_rate": [self.reduction_rate],
            "time_s or bandwidth of a change": [
                value for change in self.changes for value in (change[0], change[3])
            ],
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

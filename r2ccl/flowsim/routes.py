"""Egress and ingress port of every link, given the bandwidths of the ports.

A link between nodes has a *home rail* at each end, and uses both while they are alive. A link is
never assigned to a port without bandwidth.

Ports are numbered in this order: egress of every (node, rail), ingress of every (node, rail),
egress of every rank to the other ranks of its node, ingress of every rank from the other ranks of
its node. With node ports (`PortRoutes.has_node_ports`), a node has one port per direction, with the
summed bandwidth of its rails.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from r2ccl.errors import InvalidArgument
from r2ccl.flowsim.loops.state import FREE, NOWHERE
from r2ccl.flowsim.network import Network
from r2ccl.schedule.graph import Bools, Ints

Floats = npt.NDArray[np.float64]

#: ``rails(src, dst, channel)`` returns the egress and the ingress home rail of every link, given
#: its source rank, destination rank and channel. All are integer arrays of shape (nlinks,).
Rails = Callable[[Ints, Ints, Ints], tuple[Ints, Ints]]


class PortRoutes(NamedTuple):
    """Home rails of all links; together with the rails that are alive, they determine the ports.

    Parameters
    ----------
    network : Network
    src, dst : ndarray of int64, shape (nlinks,)
        Source and destination rank of each link.
    egress, ingress : ndarray of int64, shape (nlinks,)
        Home rail of each link at its source and at its destination.
    has_node_ports : bool
        True if all rails of a node are modeled as one port.
    """

    network: Network
    src: Ints
    dst: Ints
    egress: Ints
    ingress: Ints
    has_node_ports: bool

    @property
    def ports_per_node(self) -> int:
        """Number of ports of a node per direction."""
        return 1 if self.has_node_ports else self.network.nrails

    def bandwidths(self, table: Floats) -> Floats:
        """Return the bandwidth of every port in bytes/s, in the order of port numbers.

        Parameters
        ----------
        table : ndarray of float64, shape (2, nnodes, nrails)
            Bandwidth of every rail in bytes/s: egress, then ingress.
        """
        ports = table.sum(2) if self.has_node_ports else table
        inside = np.full(2 * self.network.nranks, self.network.inside_bandwidth)
        return np.concatenate([ports.ravel(), inside])

    def ports(self, table: Floats) -> Ints:
        """Return the egress and ingress port of every link.

        A link whose home rail is dead at either end uses a rail that is alive at both ends. If
        there are several such rails, the links that need one are spread over them round-robin,
        separately for each pair of source and destination rank. With node ports, home rails are
        ignored, and each end needs only one rail that is alive.

        Parameters
        ----------
        table : ndarray of float64, shape (2, nnodes, nrails)
            Bandwidth of every rail in bytes/s: egress, then ingress.

        Returns
        -------
        ndarray of int64, shape (2, nlinks)
            Numbers of the egress port (row 0) and of the ingress port (row 1) of each link;
            `NOWHERE` if no rail that is alive can carry the link, `FREE` if the link is within a
            node and `Network.inside_bandwidth` is infinite.
        """
        nodes = np.array(self.network.nodes)
        source, target = nodes[self.src], nodes[self.dst]
        egress, ingress = self._alive(table, source, target)
        width = self.ports_per_node
        is_lost = egress < 0
        first_in = self.network.nnodes * width
        egress = np.where(is_lost, NOWHERE, source * width + egress)
        ingress = np.where(is_lost, NOWHERE, first_in + target * width + ingress)
        is_inside = source == target
        if math.isinf(self.network.inside_bandwidth):
            egress[is_inside] = ingress[is_inside] = FREE
        else:
            egress[is_inside] = 2 * first_in + self.src[is_inside]
            ingress[is_inside] = 2 * first_in + self.network.nranks + self.dst[is_inside]
        return np.stack([egress, ingress])

    def _alive(self, table: Floats, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """Return each link's rail at its source and its destination; -1 if no rail can carry it.

        `source` and `target` are the nodes of the links' ends. If all rails of a node are modeled
        as one port, the rail is 0.
        """
        is_up: Bools = np.asarray(table > 0)
        if self.has_node_ports:
            carries: Bools = np.asarray(is_up.any(2))
            rail = np.where(carries[0, source] & carries[1, target], 0, -1)
            return rail, rail
        at_home = is_up[0, source, self.egress] & is_up[1, target, self.ingress]
        away = np.flatnonzero(~at_home)
        both = is_up[0, source[away]] & is_up[1, target[away]]
        rail = _pick(both, _turns(self.src[away] * self.network.nranks + self.dst[away]))
        egress, ingress = self.egress.copy(), self.ingress.copy()
        egress[away] = ingress[away] = rail
        return egress, ingress


def _turns(pairs: Ints) -> Ints:
    """Return, for each element of `pairs`, the number of earlier elements equal to it."""
    order = np.argsort(pairs, kind="stable")
    _, counts = np.unique(pairs, return_counts=True)
    turns = np.empty(pairs.size, np.int64)
    turns[order] = np.arange(pairs.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return turns


def _pick(allowed: Bools, turns: Ints) -> Ints:
    """Return one allowed column for each row of `allowed`; -1 if no column is allowed.

    If row i has n allowed columns, the result is number ``turns[i] % n`` of them, from 0.
    """
    number = allowed.cumsum(1)
    count = number[:, -1]
    wanted = turns % np.maximum(count, 1) + 1
    column = (allowed & (number == wanted[:, None])).argmax(1)
    return np.where(count > 0, column, -1)


def home_rails(
    network: Network, rails: Rails | None, src: Ints, dst: Ints, channel: Ints
) -> tuple[Ints, Ints]:
    """Return the egress and ingress home rail of every link.

    If `rails` is None, both are rail ``channel % nrails``.

    Raises
    ------
    InvalidArgument
        If `rails` does not return two integer arrays with one existing rail per link.
    """
    if rails is None:
        home = channel % network.nrails
        return home, home
    sides = [np.asarray(side) for side in rails(src, dst, channel)]
    if len(sides) != 2 or not all(_is_rails(side, src.shape, network.nrails) for side in sides):
        raise InvalidArgument(
            f"rails() returned {sides}; it must return two integer arrays of {src.size} elements: "
            f"the rail of each link at its source and at its destination, 0 to {network.nrails - 1}"
        )
    return sides[0].astype(np.int64), sides[1].astype(np.int64)


def _is_rails(side: npt.NDArray[Any], shape: tuple[int, ...], nrails: int) -> bool:
    is_whole = side.shape == shape and np.issubdtype(side.dtype, np.integer)
    return bool(is_whole and np.all((side >= 0) & (side < nrails)))


def timeline(network: Network) -> list[tuple[float, Floats]]:
    """Return the bandwidth of every rail over time.

    Returns
    -------
    list of (float, ndarray of float64, shape (2, nnodes, nrails))
        A time in seconds, and the egress and ingress bandwidth in bytes/s from that time on. The
        first time is 0.
    """
    found = [(0.0, np.array([network.egress, network.ingress], np.float64))]
    for change in network.changes:
        time_s, table = found[-1]
        if change.time_s > time_s:
            found.append((change.time_s, table.copy()))
        found[-1][1][:, change.node, change.rail] = change.bandwidth
    return found


__all__ = ["Floats", "PortRoutes", "Rails", "home_rails", "timeline"]

"""Which ports a link's slices leave and enter by, given what is alive.

Imports `network` and NumPy. Invariant: a port that a link is given has bandwidth.

Ports are numbered: egress of every (node, rail), ingress of every (node, rail), egress of every
rank to its own node, ingress of every rank from its own node. Seen as node ports, a node has one
port each way with the bandwidth of all of its rails.
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

#: ``rails(src, dst, channel)``, three arrays of one shape (nlinks,), returns the rails that links
#: leave and enter by while those are alive, two arrays of that shape.
Rails = Callable[[Ints, Ints, Ints], tuple[Ints, Ints]]


class PortRoutes(NamedTuple):
    """Where links go on a network.

    Parameters
    ----------
    network : Network
    src, dst : ndarray of int64, shape (nlinks,)
        Ranks.
    egress, ingress : ndarray of int64, shape (nlinks,)
        Rails they are at home on.
    has_node_ports : bool
        Whether a node's rails are one port.
    """

    network: Network
    src: Ints
    dst: Ints
    egress: Ints
    ingress: Ints
    has_node_ports: bool

    @property
    def ports_per_node(self) -> int:
        """Ports of a node each way."""
        return 1 if self.has_node_ports else self.network.nrails

    def bandwidths(self, table: Floats) -> Floats:
        """Bandwidth of every port, of what every rail has each way: (2, nnodes, nrails)."""
        ports = table.sum(2) if self.has_node_ports else table
        inside = np.full(2 * self.network.nranks, self.network.inside_bandwidth)
        return np.concatenate([ports.ravel(), inside])

    def ports(self, table: Floats) -> Ints:
        """Egress and ingress port of every link, (2, nlinks), given what every rail has each way.

        A link whose rail is dead at either end makes a detour over one that is alive at both; such
        links between two ranks take turns. `NOWHERE`: there is none.
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
        """Rail of every link at both ends, -1 for those that have none."""
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
    """How many times the same value came before, for each."""
    order = np.argsort(pairs, kind="stable")
    _, counts = np.unique(pairs, return_counts=True)
    turns = np.empty(pairs.size, np.int64)
    turns[order] = np.arange(pairs.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return turns


def _pick(allowed: Bools, turns: Ints) -> Ints:
    """Column of the allowed one whose turn it is in each row, -1 if none is."""
    number = allowed.cumsum(1)
    count = number[:, -1]
    wanted = turns % np.maximum(count, 1) + 1
    column = (allowed & (number == wanted[:, None])).argmax(1)
    return np.where(count > 0, column, -1)


def home_rails(
    network: Network, rails: Rails | None, src: Ints, dst: Ints, channel: Ints
) -> tuple[Ints, Ints]:
    """Rails that links are at home on: those that `rails` says, or the channel's own.

    Raises
    ------
    InvalidArgument
        A rail that is not there, or not one a link.
    """
    if rails is None:
        home = channel % network.nrails
        return home, home
    sides = [np.asarray(side) for side in rails(src, dst, channel)]
    if len(sides) != 2 or not all(_is_rails(side, src.shape, network.nrails) for side in sides):
        raise InvalidArgument(
            f"rails returned {sides}; give a rail of 0 to {network.nrails - 1} at either end of "
            f"each of {src.size} links"
        )
    return sides[0].astype(np.int64), sides[1].astype(np.int64)


def _is_rails(side: npt.NDArray[Any], shape: tuple[int, ...], nrails: int) -> bool:
    is_whole = side.shape == shape and np.issubdtype(side.dtype, np.integer)
    return bool(is_whole and np.all((side >= 0) & (side < nrails)))


def timeline(network: Network) -> list[tuple[float, Floats]]:
    """What every rail has each way, (2, nnodes, nrails), from each time on; the first is 0."""
    found = [(0.0, np.array([network.egress, network.ingress], np.float64))]
    for change in network.changes:
        time_s, table = found[-1]
        if change.time_s > time_s:
            found.append((change.time_s, table.copy()))
        found[-1][1][:, change.node, change.rail] = change.bandwidth
    return found


__all__ = ["Floats", "PortRoutes", "Rails", "home_rails", "timeline"]

"""Time of an alltoall with one rail per channel for all pairs, computed without its flows.

The load that two ranks exchange on each rail depends only on the shares of their nodes' ports.
Nodes whose ports have equal shares are of one *kind*, and the loads are added up per kind instead
of per pair of ranks. A network has few kinds: most nodes have their full bandwidth.

Invariant: the times are those of `r2ccl.planning.placement.port_time` and `mean_time`, from
integers and fractions only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from r2ccl.failover.health.table import Health
from r2ccl.planning.placement import ports_of

_Ints: TypeAlias = npt.NDArray[np.int64]


def alltoall_time(
    nchannels: int, homes: Sequence[int], health: Health, nodes: Sequence[int] = ()
) -> tuple[Fraction | None, Fraction]:
    """Return the time of the busiest port in an alltoall, and the average time of all ports.

    The data that a rank sends to another rank is divided among `nchannels` channels, which are
    placed on the home rails in turn.

    Parameters
    ----------
    nchannels : int
    homes : sequence of int
    health : Health
    nodes : sequence of int, optional
        Node of each rank; ranks of a node share its ports. Default: one rank per node.

    Returns
    -------
    busiest : Fraction or None
        As `r2ccl.planning.placement.port_time`; None if two nodes have no common home rail.
    mean : Fraction
        As `r2ccl.planning.placement.mean_time`.
    """
    node_of = nodes or range(health.nranks)
    ports, sizes = ports_of(homes, health, node_of), Counter(node_of)
    nranks, unit = health.nranks, health.nranks * nchannels
    total = nchannels * sum(size * (nranks - size) for size in sizes.values())
    capacity = sum(map(sum, ports.values()))
    mean = Fraction(total, capacity * unit) if capacity else Fraction(0)
    # Numbers of ranks of the nodes of each kind: the nodes whose ports have equal shares.
    kinds: dict[tuple[int, ...], list[int]] = {}
    for node, row in ports.items():
        kinds.setdefault(tuple(row), []).append(sizes[node])
    rows = np.array(list(kinds), np.int64)
    ranks = np.array([sum(each) for each in kinds.values()], np.int64)
    channels = np.bincount(np.arange(nchannels) % len(homes), minlength=len(homes))
    busiest = Fraction(0)
    for kind, (shares, each) in enumerate(kinds.items()):
        both = np.minimum(rows[kind], rows)
        for size in set(each):
            peers = ranks.copy()
            peers[kind] -= size
            if peers[~both.any(axis=1)].any():
                return None, mean
            loads = _loads(both, peers, channels)
            times = (load / share for load, share in zip(loads, shares, strict=True) if share)
            busiest = max(busiest, size * max(times, default=Fraction(0)))
    return busiest / unit, mean


def _loads(both: _Ints, peers: _Ints, channels: _Ints) -> list[Fraction]:
    """Return the amount of data that a rank exchanges with other nodes on each home rail.

    The unit is what one channel carries from a rank to another rank. `peers` has the number of
    ranks on the other nodes of each kind. ``both[kind]`` has, for each rail, the lesser of the
    shares that this rank's node and a node of that kind have. `channels` has the number of channels
    on each rail. The channels of a rail that is down at either end detour over the other rails, in
    proportion to ``both``.
    """
    is_up = both > 0
    direct = (peers @ is_up) * channels
    moved = peers * (~is_up @ channels)
    sums = both.sum(axis=1)
    # Detours whose shares have the same sum have the same denominator.
    denominators = sorted({*sums[moved > 0].tolist()})
    common = lcm(*denominators)
    loads = [common * load for load in direct.tolist()]
    for each in denominators:
        chosen = sums == each
        detours = (moved[chosen] @ both[chosen]).tolist()
        loads = [load + common // each * more for load, more in zip(loads, detours, strict=True)]
    return [Fraction(load, common) for load in loads]


__all__ = ["alltoall_time"]

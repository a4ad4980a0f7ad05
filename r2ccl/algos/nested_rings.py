"""Nested rings: allreduce as concurrent rings over ever smaller sets of faster nodes.

The algorithm suits arbitrary bandwidths.

Let b_1 < b_2 < ... be the distinct bandwidths, b_0 = 0, and m_j the number of nodes with bandwidth
b_j or more. Ring j has these m_j nodes as its core and reduces the share Y_j of the data. The
slower nodes are its leaves (`r2ccl.algos.leaf_ring`): they send and receive this share once. Ring 1
contains all nodes. All rings run at the same time.

The shares are derived as follows. Every node sends each byte at least once; a node in the core of
ring j sends (n - 2)/m_j more per byte. A node with bandwidth b_i thus finishes in time T if

    1 + (n - 2) (Y_1/m_1 + ... + Y_i/m_i) <= T b_i.

Choose the share of each ring such that it uses the bandwidth by which its core exceeds the slower
nodes: (n - 2) Y_j/m_j = T (b_j - b_(j-1)), and (n - 2) Y_1/m_1 = T b_1 - 1 for ring 1. Then every
node finishes at T. The sum of m_j (b_j - b_(j-1)) over all j is the sum of all bandwidths, so the
shares add up to 1 for

    T = 2(n - 1) / (sum of all nodes' bandwidths).

If this T is below 1/b_1, the time in which the slowest node sends and receives the data once, then
ring 1 gets no share, the other rings get shares in these proportions, and T = 1/b_1. The time is
therefore `packed_trees.lower_bound` for all bandwidths. This ignores latency and the start and end
of the rings, and assumes that the rings share every port in exactly these proportions. If all flows
share a port equally, as is common, the rings finish one after the other and take longer.

Steps: the maximum over the rings that have a share. Bytes on the wire: if ring 1 has a share, T b
for a node with bandwidth b.

The algorithm of Wang et al. uses the same recursion over subsets of faster nodes, but adds the slow
nodes' data afterwards. Nested rings reach the lower bound in cases in which `leaf_ring` does not,
such as bandwidths that all differ. If flows share ports equally, `leaf_ring` and `packed_trees` are
faster.

References
----------
Wang et al., "Reliable and resilient collective communication library for LLM training and serving",
arXiv:2512.25059, 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from r2ccl.algos.bandwidths import require_positive
from r2ccl.algos.blend import blend
from r2ccl.algos.leaf_ring import part
from r2ccl.errors import InvalidArgument
from r2ccl.schedule.ir import Schedule


class Ring(NamedTuple):
    """One of the nested rings: its core, and its share of the data."""

    core: tuple[int, ...]
    share: Fraction


def allreduce(
    bandwidths: Sequence[int],
    nsegments: int = 16,
    nchannels: int = 1,
    order: Sequence[int] | None = None,
) -> Schedule:
    """Build the allreduce over nested rings.

    Parameters
    ----------
    bandwidths : sequence of int
        Bandwidth of each node, in any unit, above 0.
    nsegments : int
        Number of segments of each ring that has leaves.
    nchannels : int
        Number of channels of each ring, of equal weight.
    order : sequence of int, optional
        All nodes, in the order in which the rings visit them. Default: 0 to n - 1.

    Raises
    ------
    InvalidArgument
        If there is no node; if a bandwidth, `nsegments` or `nchannels` is below 1; or if `order` is
        not a permutation of the nodes.
    """
    if nsegments < 1:
        raise InvalidArgument(f"nsegments={nsegments}; give 1 or more")
    n = len(bandwidths)
    places = tuple(range(n) if order is None else order)
    if sorted(places) != list(range(n)):
        raise InvalidArgument(f"order={places}: give a permutation of 0 to {n - 1}")
    found = rings(bandwidths)
    parts = [
        part(
            n,
            [node for node in places if node in ring.core],
            [()] * (nsegments if len(ring.core) < n else 1),
        )
        for ring in found
    ]
    return blend("nested_rings", parts, [ring.share for ring in found], [nchannels] * len(found))


def rings(bandwidths: Sequence[int]) -> tuple[Ring, ...]:
    """Return the rings and their shares, from the ring of all nodes to that of the fastest nodes.

    The module docstring derives the shares. With one or two nodes, the ring of all nodes is the
    only one.

    Raises
    ------
    InvalidArgument
        If there is no node, or a bandwidth is below 1.
    """
    n = len(bandwidths)
    require_positive(bandwidths)
    levels = sorted(set(bandwidths))
    cores = [tuple(v for v in range(n) if bandwidths[v] >= level) for level in levels]
    if n <= 2:  # no node can transfer data on behalf of another
        return (Ring(cores[0], Fraction(1)),)
    time = Fraction(2 * (n - 1), sum(bandwidths))
    steps = [b - a for a, b in pairwise([0, *levels])]
    if time * levels[0] >= 1:
        shares = [
            len(core) * time * step / (n - 2) for core, step in zip(cores, steps, strict=True)
        ]
        shares[0] -= Fraction(n, n - 2)
    else:
        weights = [len(core) * step for core, step in zip(cores[1:], steps[1:], strict=True)]
        shares = [Fraction(0), *(Fraction(weight, sum(weights)) for weight in weights)]
    return tuple(Ring(*each) for each in zip(cores, shares, strict=True))


__all__ = ["Ring", "allreduce", "rings"]

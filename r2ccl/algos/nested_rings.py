"""Nested rings: an allreduce for nodes of any bandwidths, by peeling off rings of the faster ones.

Let b_1 < b_2 < ... be the bandwidths there are, and m_j the number of nodes with b_j or more. Ring
j runs among those m_j; the slower nodes are its leaves (`r2ccl.algos.leaf_ring`), which send and
receive its share Y_j of the data once. Ring 1 is that of all. All rings run at the same time.

The shares: in ring j a node of the core makes (n - 2)/m_j more transfers of a byte than the one
that every node has to make. So a node with bandwidth b_i ends in time T if

    1 + (n - 2) (Y_1/m_1 + ... + Y_i/m_i) <= T b_i.

Let each ring take up what bandwidth its core has more than the nodes around it:
(n - 2) Y_j/m_j = T (b_j - b_(j-1)), and T b_1 - 1 for ring 1. Then every node ends at T, and as
m_j (b_j - b_(j-1)), over all j, is the sum of the bandwidths, the shares add up to 1 for

    T = 2(n - 1) / (sum of all nodes' bandwidths).

Where that is below 1/b_1, the time in which the slowest node sends and receives the data once, ring
1 gets nothing, the others their shares in proportion, and T = 1/b_1. So nested rings take
`packed_trees.lower_bound`, exactly, for any bandwidths. That is without latency, start and end, and
if every port is shared by the rings in just these proportions all the time; where the flows of all
rings share it as equals, as they mostly do, rings end one after another and T is longer.

Steps: those of the longest ring that has a share. Bytes on the wire: T b by a node with bandwidth
b, in the first case.

It is the recursion over faster and faster subsets that was published, but for the slow nodes' data,
which does not come in afterwards. It is exact where `leaf_ring` is not, as with bandwidths that all
differ; but where ports are shared as equals, `leaf_ring` and `packed_trees` are faster.

Imports `bandwidths`, `blend`, `leaf_ring`, `schedule` and `errors`. Invariant: shares are exact
fractions of the integers given, equal on every rank.

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
    """One of the rings: its core, and its share of the data."""

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
        Of every node, in any unit, above 0.
    nsegments : int
        Of each ring that has leaves.
    nchannels : int
        Channels of each ring, of equal weight.
    order : sequence of int, optional
        All nodes as they follow one another in the rings. Default: 0 to n - 1.

    Raises
    ------
    InvalidArgument
        No node, a bandwidth or a number below 1, an order that is no permutation of the nodes.
    """
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
    """Return the rings, from that of all nodes to that of the fastest; see the top of this file.

    Raises
    ------
    InvalidArgument
        No node, or a bandwidth below 1.
    """
    n = len(bandwidths)
    require_positive(bandwidths)
    levels = sorted(set(bandwidths))
    cores = [tuple(v for v in range(n) if bandwidths[v] >= level) for level in levels]
    if n <= 2:  # nobody could carry anything for somebody else
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

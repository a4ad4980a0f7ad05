"""Roles of the ranks in a leaf ring: core, leaves, and the share of data each leaf relays.

`r2ccl.algos.leaf_ring` explains the roles. Each byte is sent 2(n - 1) times: by a leaf once, or
twice if the leaf relays; the remaining times by the m ranks of the core, in equal parts. All ranks
finish together, at time T = 2(n - 1) / (sum of all bandwidths), if a rank with bandwidth b sends
each byte T b times on average; but every rank sends each byte at least once. This gives the bound
`packed_trees.lower_bound`. A leaf ring reaches the bound unless a leaf would have to send a byte
more than twice, the leaves together would have to relay a byte more than m - 1 times, or the core
ranks differ in bandwidth.

All computations use exact fractions, so that all ranks choose the same roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from r2ccl.algos.bandwidths import require_positive


class Roles(NamedTuple):
    """Roles of all ranks in a leaf ring.

    Attributes
    ----------
    core : tuple of int
        Ranks of the ring, in rank order.
    relaying : dict of int to Fraction
        Share of the data that each leaf relays.
    time : Fraction
        Time of the allreduce of one unit of data, with bandwidths in units of data per unit of
        time. Latency, and the start and end of the pipeline, are not included.
    """

    core: tuple[int, ...]
    relaying: dict[int, Fraction]
    time: Fraction


def choose(bandwidths: Sequence[int]) -> Roles:
    """Choose the core, and the share that each leaf relays, for the least time.

    For each bandwidth, try the core that consists of all ranks with this bandwidth or more.

    Parameters
    ----------
    bandwidths : sequence of int
        Bandwidth of each rank, in any unit, above 0.

    Raises
    ------
    InvalidArgument
        If there is no rank, or a bandwidth is below 1.
    """
    require_positive(bandwidths)
    n = len(bandwidths)
    levels = sorted(set(bandwidths))
    cores = [[rank for rank in range(n) if bandwidths[rank] >= level] for level in levels]
    # `min` returns the first, and so the largest, of several cores with the same time.
    return min((_roles(bandwidths, core) for core in cores), key=lambda each: each.time)


def deal(roles: Roles, nsegments: int) -> list[tuple[int, ...]]:
    """Return, for each of `nsegments` segments, the leaves that relay in it.

    The share that a leaf relays is rounded to whole segments, which are spread evenly. In a
    segment, fewer leaves relay than the core has ranks. A leaf that is left out for this reason can
    relay in a later segment instead.
    """
    due = dict.fromkeys(roles.relaying, Fraction(1, 2))
    dealt = []
    for _ in range(nsegments):
        due = {leaf: due[leaf] + share for leaf, share in roles.relaying.items()}
        order = sorted((-each, leaf) for leaf, each in due.items() if each >= 1)
        chosen = tuple(leaf for _, leaf in order[: len(roles.core) - 1])
        due |= {leaf: due[leaf] - 1 for leaf in chosen}
        dealt.append(chosen)
    return dealt


def _roles(bandwidths: Sequence[int], core: Sequence[int]) -> Roles:
    """Return the roles with the given core, such that all ranks finish together if possible."""
    n, inside = len(bandwidths), set(core)
    of_core = min(bandwidths[rank] for rank in core) * len(core)
    leaves = {rank: bandwidths[rank] for rank in range(n) if rank not in inside}
    if not leaves:
        return Roles(tuple(core), {}, Fraction(2 * (n - 1), of_core))
    time = max(_even_time(n, of_core, list(leaves.values())), Fraction(1, min(leaves.values())))
    most = {leaf: min(Fraction(1), time * bandwidth - 1) for leaf, bandwidth in leaves.items()}
    can = sum(most.values(), Fraction(0))
    without = 2 * (n - 1) - len(leaves)
    used = min(max(without - of_core * time, Fraction(0)), can, Fraction(len(core) - 1))
    relaying = {leaf: each * used / can if can else Fraction(0) for leaf, each in most.items()}
    return Roles(tuple(core), relaying, max(time, (without - used) / of_core))


def _even_time(nranks: int, of_core: int, leaves: list[int]) -> Fraction:
    """Return the time at which all ranks finish together, for one unit of data.

    A leaf transfers each byte at most twice; a leaf that has bandwidth for more finishes earlier.
    `of_core` is the bandwidth of the core, and `leaves` are the bandwidths of the leaves.
    """
    ntransfers = 2 * (nranks - 1)
    while True:
        time = Fraction(ntransfers, of_core + sum(leaves))
        below = [bandwidth for bandwidth in leaves if time * bandwidth <= 2]
        if len(below) == len(leaves):
            return time
        ntransfers -= 2 * (len(leaves) - len(below))
        leaves = below


__all__ = ["Roles", "choose", "deal"]

"""Roles in a leaf ring: who forms the core, who is a leaf, and how often a leaf relays.

Every byte takes 2(n - 1) transfers. A leaf makes one of them, two where it relays, and the core of
m ranks the rest, each as many. With bandwidths b all would end together if everybody made T b of
them, for T = 2(n - 1) / (sum of all b); but nobody can make less than one. Hence the bound,
`packed_trees.lower_bound`, and it is reached here but where a leaf would have to make more than
two, or all leaves together relay more than m - 1 times, or the core is not of one bandwidth.

Imports `bandwidths`. Invariant: exact fractions of the integers given, so that all ranks choose the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from r2ccl.algos.bandwidths import require_positive


class Roles(NamedTuple):
    """Who does what.

    Attributes
    ----------
    core : tuple of int
        Ranks of the ring, in rank order.
    relaying : dict of int to Fraction
        Of each leaf, the share of the data for which it relays.
    time : Fraction
        Of one unit of data, with bandwidths in units a time; without latency, start and end.
    """

    core: tuple[int, ...]
    relaying: dict[int, Fraction]
    time: Fraction


def choose(bandwidths: Sequence[int]) -> Roles:
    """Choose the core, and how often its leaves relay, for the least time.

    Parameters
    ----------
    bandwidths : sequence of int
        Of every rank, in any unit, above 0.

    Raises
    ------
    InvalidArgument
        No rank, or a bandwidth below 1.
    """
    require_positive(bandwidths)
    n = len(bandwidths)
    levels = sorted(set(bandwidths))
    cores = [[rank for rank in range(n) if bandwidths[rank] >= level] for level in levels]
    # Of several with the same time the largest core.
    return min((_roles(bandwidths, core) for core in cores), key=lambda each: each.time)


def deal(roles: Roles, nsegments: int) -> list[tuple[int, ...]]:
    """Name the leaves that relay in each segment: their shares, evenly spread and rounded.

    Fewer relay in a segment than the core has ranks; who has to wait for that is first in the next.
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
    """Choose how often the leaves of `core` relay, such that all end together if they can."""
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
    """Return when all end together but those leaves that would have to make more than two."""
    ntransfers = 2 * (nranks - 1)
    while True:
        time = Fraction(ntransfers, of_core + sum(leaves))
        below = [bandwidth for bandwidth in leaves if time * bandwidth <= 2]
        if len(below) == len(leaves):
            return time
        ntransfers -= 2 * (len(leaves) - len(below))
        leaves = below


__all__ = ["Roles", "choose", "deal"]

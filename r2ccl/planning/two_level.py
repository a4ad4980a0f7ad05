"""Plans of two-level allreduces: shared memory within nodes, the network between them.

All nodes have equally many ranks. A call is divided into chunks, and a chunk into one part per rank
of a node. Rank i of every node reduces part i of its node's inputs, runs an allreduce of it with
the ranks i of the other nodes, which form a *group*, and distributes the result in its node. The
home rails are divided among the groups, each of which may use the others' rails while some of its
own are down (`r2ccl.failover.migration.routes`).

Parts are proportional to what the home rails of their groups carry together, so all groups end at
the same time. A rail that is down somewhere counts as the best one, because its channels spread
over all other rails of the node, whichever groups these belong to. A lost NIC therefore costs every
group the same, and a slow NIC costs its group work that the others take over. Modes that do not
plan by health always divide alike, so that their results keep the same bits.

The rails are divided in the order of their numbers, which is usually that of the NUMA nodes, as is
the order of the ranks.

Invariant: equal health gives equal divisions, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import ceil, isqrt, lcm
from typing import NamedTuple

import msgspec

from r2ccl.config import Config
from r2ccl.dtypes import dtype_of
from r2ccl.failover.health.table import WHOLE, Health
from r2ccl.planning.cost_model import Fabric
from r2ccl.planning.plan_cache import GroupPlanCache, Plan, PlanCache
from r2ccl.planning.planner import Planner
from r2ccl.schedule.chunks import Range, cut
from r2ccl.types import CallSignature


class Chunk(NamedTuple):
    """Piece of the buffer of a call that the two levels handle at a time.

    ``first`` and ``end`` are elements of the buffer. ``parts`` are the parts of the ranks of a
    node, in elements of the chunk; some may be empty.
    """

    first: int
    end: int
    parts: tuple[Range, ...]


class TwoLevelPlans:
    """Divisions and network plans of the two-level allreduces of one communicator.

    Parameters
    ----------
    rank : int
    teams : sequence of sequence of int
        Ranks of each node, in ascending order; equally many, at least two.
    plans : PlanCache
        Plans of the communicator, in one level.
    config : Config
    """

    def __init__(
        self, rank: int, teams: Sequence[Sequence[int]], plans: PlanCache, config: Config
    ) -> None:
        fabric, nlocal = plans.fabric, len(teams[0])
        index = next(team for team in teams if rank in team).index(rank)
        nranks = nlocal * len(teams)
        self._teams = teams
        self._plans = plans
        self._config = config
        self._divided = divide_rails(fabric, nlocal)
        self._group = GroupPlanCache(
            rank,
            sorted(team[index] for team in teams),
            nranks,
            fabric,
            config,
            homes=self._divided[index],
            place=plans.place,
        )
        #: Predicts the calls of the first group in a network without failures.
        first = fabric._replace(nodes=(), homes=self._divided[0])
        self._planner = Planner(first, config)
        shares = self._shares([1] * len(fabric.homes))
        #: Share of the buffer that is the part of the first group, and number of groups that share
        #: its rails.
        self._first_share = Fraction(shares[0], sum(shares))
        self._nsharers = sum(self._divided[0][0] in homes for homes in self._divided)
        self._whole = Health.whole(len(teams), max(fabric.homes) + 1)
        self._chunks: dict[tuple[int, CallSignature], tuple[Chunk, ...] | None] = {}

    def divide(self, call: CallSignature, health: Health, op: int) -> tuple[Chunk, ...] | None:
        """Return the chunks of an allreduce; None: it runs in one level.

        Parameters
        ----------
        call : CallSignature
        health : Health
            Health to plan the call with, equal on all ranks.
        op : int
            Number of the last collective.

        Notes
        -----
        A call runs in one level where that is predicted to take less time, and from time to time to
        sample the bandwidth of the rails (`PlanCache.is_bandwidth_sample`).
        """
        if self._plans.is_bandwidth_sample(call, health, op):
            return None
        return self.chunks(call, health)

    def chunks(self, call: CallSignature, health: Health) -> tuple[Chunk, ...] | None:
        """Return the chunks of an allreduce that is no bandwidth sample; see `divide`."""
        key = (health.version, call)
        if key not in self._chunks:
            if len(self._chunks) >= _KEPT:
                self._chunks.pop(next(iter(self._chunks)))
            self._chunks[key] = self._divide(call, health)
        return self._chunks[key]

    def plan(self, call: CallSignature, count: int, health: Health) -> Plan:
        """Return the plan of this rank's group for its part of a chunk, of `count` elements.

        The plan has the signature of the whole `call`, so that calls that differ are told apart.
        """
        part = msgspec.structs.replace(call, count=count)
        return self._group(part, health)._replace(signature=call.pack())

    def _divide(self, call: CallSignature, health: Health) -> tuple[Chunk, ...] | None:
        itemsize = dtype_of(call.dtype).itemsize
        nbytes = call.count * itemsize
        shares = self._shares([1] * len(self._plans.fabric.homes))
        if nbytes <= self._config.eager_nbytes:
            if not self._has_fewer_steps(nbytes, health.nranks):
                return None
        elif self._config.is_planned:
            rows = self._ports(health)
            weights = rail_weights(rows)
            if self._plans.fabric.nwires == 1:  # losing one of these rails costs no bandwidth
                slowdown = slowdown_of([[max(row)] for row in rows], [1])
            else:
                slowdown = slowdown_of(rows, weights)
            if slowdown is None or not self._is_faster(nbytes, health, slowdown):
                return None
            shares = self._shares(weights)
        edges = cut(call.count, [1] * count_chunks(nbytes), itemsize)
        return tuple(
            Chunk(first, end, tuple(pairwise(cut(end - first, shares, itemsize))))
            for first, end in pairwise(edges)
        )

    def _ports(self, health: Health) -> list[list[int]]:
        """Return the share of each node's port on each home rail: the least of its ranks."""
        homes = self._plans.fabric.homes
        return [
            [min(health.share(rank, rail) for rank in team) for rail in homes]
            for team in self._teams
        ]

    def _shares(self, weights: Sequence[int]) -> list[int]:
        """Return the share of each group's part: the weights of its home rails."""
        weight_of = dict(zip(self._plans.fabric.homes, weights, strict=True))
        every = [rail for homes in self._divided for rail in homes]
        common = lcm(*(every.count(rail) for rail in weight_of))
        return [
            sum(weight_of[rail] * common // every.count(rail) for rail in homes)
            for homes in self._divided
        ]

    def _is_faster(self, nbytes: int, health: Health, slowdown: Fraction) -> bool:
        """Return whether two levels are predicted to be as fast as one, between the nodes.

        Within a node, shared memory is always faster than what one level uses there.
        """
        one_ns = self._plans.choose(nbytes, health).predicted_ns
        part_nbytes = self._part_nbytes(nbytes)
        two = self._planner.allreduce(part_nbytes, self._whole)
        if part_nbytes <= self._config.eager_nbytes:
            two_ns = two.schedule.cost.steps * self._plans.fabric.rates.alpha_ns
        else:
            two_ns = two.predicted_ns * self._nsharers
        return two_ns * slowdown <= one_ns * _AS_GOOD

    def _has_fewer_steps(self, nbytes: int, nranks: int) -> bool:
        """Return whether little data takes fewer steps in two levels, whatever the health is."""
        whole = Health.whole(nranks, self._whole.nrails)
        one = self._plans.choose(nbytes, whole).schedule
        two = self._planner.allreduce(self._part_nbytes(nbytes), self._whole).schedule
        return two.cost.steps + _LOCAL_STEPS < one.cost.steps

    def _part_nbytes(self, nbytes: int) -> int:
        return ceil(nbytes * self._first_share)


def divide_rails(fabric: Fabric, nlocal: int) -> list[tuple[int, ...]]:
    """Return the home rails of each of `nlocal` groups.

    They are disjoint if there are enough; otherwise ranks share rails. Rails that share one wire
    are home rails of all groups.
    """
    homes = tuple(fabric.homes)
    if fabric.nwires == 1:
        return [homes] * nlocal
    if nlocal > len(homes):
        return [(homes[index * len(homes) // nlocal],) for index in range(nlocal)]
    edges = cut(len(homes), [1] * nlocal)
    return [homes[first:end] for first, end in pairwise(edges)]


def rail_weights(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the relative bandwidth of each rail; `rows` are the shares of the nodes' ports.

    That is the least share of a port; for a rail that is down somewhere, that of the best rail.
    """
    worst = [min(column) for column in zip(*rows, strict=True)]
    best = max(worst) or WHOLE
    return [each or best for each in worst]


def slowdown_of(rows: Sequence[Sequence[int]], weights: Sequence[int]) -> Fraction | None:
    """Return how much longer the busiest port is busy than in a network without failures.

    Rail r carries ``weights[r]``. Between two nodes, the load of a rail that is down spreads over
    those that are up, in proportion to their shares. Neighbors are the nodes of a ring. The result
    is None if two neighbors have no common rail.
    """
    busiest = Fraction(0)
    for one, other in pairwise((*rows, rows[0])):
        both = [min(pair) for pair in zip(one, other, strict=True)]
        if not any(both):
            return None
        moved = sum(weight for weight, share in zip(weights, both, strict=True) if not share)
        detour = Fraction(moved, sum(both))
        times = (
            Fraction(weight, share) + detour
            for weight, share in zip(weights, both, strict=True)
            if share
        )
        busiest = max(busiest, *times)
    return busiest * len(weights) * WHOLE / sum(weights)


def count_chunks(nbytes: int) -> int:
    """Return the number of chunks of a call of `nbytes`.

    The first step within the nodes and the last one do not overlap with the network, and take the
    less time the smaller the chunks are. Between two chunks, the network idles for `_GAP_NS`.
    """
    exposed_ns = 2 * nbytes * 10**9 // _LOCAL_BYTES_PER_S
    return max(1, min(_MOST_CHUNKS, isqrt(exposed_ns // _GAP_NS)))


#: Rate of one step within a node, in bytes of the chunk per second, and the time in which a network
#: call ends and the next one fills its pipeline.
_LOCAL_BYTES_PER_S = 4 * 10**9
_GAP_NS = 1_000_000
_MOST_CHUNKS = 32
#: Steps of the network that those within a node cost, for little data. (netlab, 2 nodes of 2
#: ranks on 2 cores, 8 bytes to 64 KiB: two levels save one step, and take 1.2 times as long.)
_LOCAL_STEPS = 1
#: Factor of the predicted time of one level up to which two levels are preferred: the error of
#: predictions.
_AS_GOOD = Fraction(102, 100)
#: Most divisions kept.
_KEPT = 1024

__all__ = [
    "Chunk",
    "TwoLevelPlans",
    "count_chunks",
    "divide_rails",
    "rail_weights",
    "slowdown_of",
]

"""Plans of two-level allreduces: shared memory within nodes, the network between them.

All nodes have the same number of ranks. A call is divided into chunks, and a chunk into one part
per rank of a node. The i-th rank of every node reduces part i over its node, runs an allreduce of
the sum with the i-th ranks of the other nodes (together a *group*), and distributes the result
within its node. All groups run at the same time, in one of two ways:

- *At home*: the home rails are divided among the groups. If a rail is down, its channels spread
  over all other rails of the node, also those of other groups (`r2ccl.failover.migration.routes`).
  A part is proportional to the total bandwidth of its group's home rails, where a rail that is down
  on some node counts as much as the best rail. A lost NIC therefore delays all groups equally, and
  a slow NIC makes the part of its group smaller.
- *Everywhere*: every group plans over all home rails, by their health, and parts are equal. The
  groups share the ports. Schedules other than rings can then send less data through a node that has
  lost NICs.

The rails are divided in the order of their numbers, because rails and ranks are usually both
numbered in the order of the NUMA nodes. With ``R2CC_MODE`` failstop, migrate or balance, the
division is always the same, so that the results keep the same bits.

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
    """Piece of the buffer of a call, which passes through the steps of both levels as a unit.

    It has the elements ``first`` to ``end`` (exclusive) of the buffer. ``parts`` has the part of
    each rank of a node, as a range of elements from the start of the chunk; parts may be empty.
    (The chunk of a schedule is another thing: a part of a channel.)
    """

    first: int
    end: int
    parts: tuple[Range, ...]


class Division(NamedTuple):
    """Division of a call into chunks; groups run at home if ``is_at_home``, else everywhere."""

    chunks: tuple[Chunk, ...]
    is_at_home: bool


class TwoLevelPlans:
    """Divisions and network plans of the two-level allreduces of one communicator.

    Parameters
    ----------
    rank : int
    teams : sequence of sequence of int
        Ranks of each node, in ascending order: two or more, equally many on all nodes.
    plans : PlanCache
        Plans of the communicator for calls in one level.
    config : Config
    """

    def __init__(
        self, rank: int, teams: Sequence[Sequence[int]], plans: PlanCache, config: Config
    ) -> None:
        fabric, nlocal = plans.fabric, len(teams[0])
        index = next(team for team in teams if rank in team).index(rank)
        self._teams = teams
        self._plans = plans
        self._config = config
        self._divided = divide_rails(fabric, nlocal)
        members = sorted(team[index] for team in teams)
        #: Plans of this rank's group: at home (True) and everywhere (False).
        self._groups = {
            is_at_home: GroupPlanCache(
                rank,
                members,
                nlocal * len(teams),
                fabric,
                config,
                homes=self._divided[index] if is_at_home else (),
                place=plans.place,
            )
            for is_at_home in (True, False)
        }
        # Predictions must be equal on all ranks, so all ranks predict the time of the first group,
        # in which each node has one rank.
        among_nodes = fabric._replace(nodes=())
        self._at_home = Planner(among_nodes._replace(homes=self._divided[0]), config)
        self._everywhere = Planner(among_nodes, config)
        self._whole = Health.whole(len(teams), max(fabric.homes) + 1)
        shares = self._shares([1] * len(fabric.homes))
        #: Without failures: share of the buffer that the first group reduces, and number of groups
        #: that use its rails.
        self._first_share = Fraction(shares[0], sum(shares))
        self._nsharers = sum(self._divided[0][0] in homes for homes in self._divided)
        self._kept: dict[tuple[int, CallSignature], Division | None] = {}

    def divide(self, call: CallSignature, health: Health, op: int) -> Division | None:
        """Return the division of an allreduce; None if it runs in one level.

        Parameters
        ----------
        call : CallSignature
        health : Health
            Health to plan the call with, equal on all ranks.
        op : int
            Number of the collective before this one, equal on all ranks.

        Notes
        -----
        A call runs in one level if it must sample the bandwidth of the rails
        (`PlanCache.is_bandwidth_sample`). So does a call of at most ``R2CC_EAGER_NBYTES`` unless
        two levels need fewer steps, and, in the modes r2cc and auto, a larger one if that is
        predicted to take less time.
        """
        if self._plans.is_bandwidth_sample(call, health, op):
            return None
        return self.division(call, health)

    def division(self, call: CallSignature, health: Health) -> Division | None:
        """Return the division of an allreduce that is not a bandwidth sample; see `divide`."""
        key = (health.version, call)
        if key not in self._kept:
            if len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = self._divide(call, health)
        return self._kept[key]

    def plan(self, call: CallSignature, count: int, health: Health, *, is_at_home: bool) -> Plan:
        """Return the plan of this rank's group for its part of a chunk, of `count` elements.

        The plan has the signature of the whole `call`, so that a rank that makes a different call
        is detected.
        """
        part = msgspec.structs.replace(call, count=count)
        return self._groups[is_at_home](part, health)._replace(signature=call.pack())

    def _divide(self, call: CallSignature, health: Health) -> Division | None:
        itemsize = dtype_of(call.dtype).itemsize
        nbytes = call.count * itemsize
        weights = [1] * len(self._plans.fabric.homes)
        is_at_home = True
        if nbytes <= self._config.eager_nbytes:
            if not self._has_fewer_steps(nbytes, health.nranks):
                return None
        elif self._config.is_planned:
            rows = self._ports(health)
            fastest = self._fastest(nbytes, health, rows)
            if fastest is None:
                return None
            is_at_home = fastest
            weights = rail_weights(rows)
        shares = self._shares(weights) if is_at_home else [1] * len(self._divided)
        edges = cut(call.count, [1] * count_chunks(nbytes), itemsize)
        chunks = tuple(
            Chunk(first, end, tuple(pairwise(cut(end - first, shares, itemsize))))
            for first, end in pairwise(edges)
        )
        return Division(chunks, is_at_home)

    def _ports(self, health: Health) -> list[list[int]]:
        """Return the share of each node's port on each home rail: the least among its ranks."""
        homes = self._plans.fabric.homes
        return [
            [min(health.share(rank, rail) for rank in team) for rail in homes]
            for team in self._teams
        ]

    def _shares(self, weights: Sequence[int]) -> list[int]:
        """Return the relative sizes of the groups' parts: sums of the weights of their home rails.

        The weight of a rail that several groups share is divided among them.
        """
        weight_of = dict(zip(self._plans.fabric.homes, weights, strict=True))
        every = [rail for homes in self._divided for rail in homes]
        common = lcm(*(every.count(rail) for rail in weight_of))
        return [
            sum(weight_of[rail] * common // every.count(rail) for rail in homes)
            for homes in self._divided
        ]

    def _fastest(self, nbytes: int, health: Health, rows: Sequence[Sequence[int]]) -> bool | None:
        """Return whether groups are faster at home than everywhere; None if one level is fastest.

        Only the times between the nodes are compared: within a node, two levels use shared memory,
        which is always faster than one level.
        """
        one_ns = self._plans.choose(nbytes, health).predicted_ns
        home_ns = self._home_ns(nbytes, rows)
        if home_ns is not None and min(map(min, rows)) == WHOLE:
            return True if home_ns <= one_ns * _AS_GOOD else None
        carried = msgspec.structs.replace(
            self._whole,
            version=health.version,
            shares=b"".join(self._row(row) for row in rows),
        )
        all_ns = self._everywhere.allreduce(nbytes, carried).predicted_ns
        if home_ns is not None and home_ns <= min(all_ns, one_ns) * _AS_GOOD:
            return True
        return False if all_ns <= one_ns * _AS_GOOD else None

    def _row(self, row: Sequence[int]) -> bytes:
        found = bytearray([WHOLE] * self._whole.nrails)
        for rail, share in zip(self._plans.fabric.homes, row, strict=True):
            found[rail] = share
        return bytes(found)

    def _home_ns(self, nbytes: int, rows: Sequence[Sequence[int]]) -> Fraction | None:
        """Return the predicted time of groups at home; None if two nodes have no common rail."""
        if self._plans.fabric.nwires == 1:  # losing one of these rails costs no bandwidth
            slowdown = slowdown_of([[max(row)] for row in rows], [1])
        else:
            slowdown = slowdown_of(rows, rail_weights(rows))
        if slowdown is None:
            return None
        part_nbytes = self._part_nbytes(nbytes)
        first = self._at_home.allreduce(part_nbytes, self._whole)
        if part_nbytes <= self._config.eager_nbytes:
            return first.schedule.cost.steps * self._plans.fabric.rates.alpha_ns * slowdown
        return first.predicted_ns * self._nsharers * slowdown

    def _has_fewer_steps(self, nbytes: int, nranks: int) -> bool:
        """Return whether two levels need fewer steps for little data, in a healthy network."""
        whole = Health.whole(nranks, self._whole.nrails)
        one = self._plans.choose(nbytes, whole).schedule
        two = self._at_home.allreduce(self._part_nbytes(nbytes), self._whole).schedule
        return two.cost.steps + _LOCAL_STEPS < one.cost.steps

    def _part_nbytes(self, nbytes: int) -> int:
        return ceil(nbytes * self._first_share)


def divide_rails(fabric: Fabric, nlocal: int) -> list[tuple[int, ...]]:
    """Return the home rails of each of `nlocal` groups.

    The groups have different rails if there are at least `nlocal` rails; otherwise they share
    rails. Rails that share one wire are home rails of all groups.
    """
    homes = tuple(fabric.homes)
    if fabric.nwires == 1:
        return [homes] * nlocal
    if nlocal > len(homes):
        return [(homes[index * len(homes) // nlocal],) for index in range(nlocal)]
    edges = cut(len(homes), [1] * nlocal)
    return [homes[first:end] for first, end in pairwise(edges)]


def rail_weights(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the relative bandwidth of each rail; `rows` has the shares of each node's ports.

    The bandwidth of a rail is its least share among the nodes. A rail that is down on a node counts
    as much as the best rail.
    """
    worst = [min(column) for column in zip(*rows, strict=True)]
    best = max(worst) or WHOLE
    return [each or best for each in worst]


def slowdown_of(rows: Sequence[Sequence[int]], weights: Sequence[int]) -> Fraction | None:
    """Return the time for which the busiest port is busy, relative to a network without failures.

    `rows` has the shares of each node's ports, in the order of a ring. Rail r carries
    ``weights[r]``. Between two neighbors, the load of a rail that is down spreads over those that
    are up, in proportion to their shares. Returns None if two neighbors have no common rail.
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

    The first and the last step of a call, within the nodes, do not overlap with the network; they
    are shorter with smaller chunks. Between two chunks, the network idles for `_GAP_NS`.
    """
    exposed_ns = 2 * nbytes * 10**9 // _LOCAL_BYTES_PER_S
    return max(1, min(_MOST_CHUNKS, isqrt(exposed_ns // _GAP_NS)))


#: Rate of one step within a node, in bytes of the chunk per second, and idle time of the network
#: while one call ends and the next one fills its pipeline.
_LOCAL_BYTES_PER_S = 4 * 10**9
_GAP_NS = 1_000_000
_MOST_CHUNKS = 32
#: Cost of the steps within a node, in steps of the network, for little data. (netlab, 2 nodes of 2
#: ranks on 2 cores, 8 bytes to 64 KiB: two levels save one step, and take 1.2 times as long.)
_LOCAL_STEPS = 1
#: Two levels are preferred up to this multiple of the predicted time of one level, because
#: predictions have about this error.
_AS_GOOD = Fraction(102, 100)
#: Maximum number of divisions kept.
_KEPT = 1024

__all__ = [
    "Chunk",
    "Division",
    "TwoLevelPlans",
    "count_chunks",
    "divide_rails",
    "rail_weights",
    "slowdown_of",
]

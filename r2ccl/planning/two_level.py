"""Plans of collectives in two levels: shared memory within nodes, the network between them.

All nodes have the same number of ranks. A call is divided into chunks. A chunk consists of one
piece of the buffer or, in an allgather and a reduce-scatter, of one piece of each node's block,
which is the data of the node's ranks. A piece has one part per rank of a node. The i-th ranks of
all nodes are a *group*, which runs the collective over the network on the i-th parts. Before and
after it, the ranks of each node reduce, copy or collect the parts
(`r2ccl.runtime.two_level_steps`). All groups run at the same time, in one of two ways:

- *At home*: the home rails are divided among the groups. If a rail is down, its channels spread
  over all other rails of the node, even rails of other groups (`r2ccl.failover.migration.routes`).
  A part is proportional to the total bandwidth of its group's home rails, where a rail counts as
  much as its slowest NIC that is up. A lost NIC therefore delays all groups equally, and a slow NIC
  makes the part of its group smaller.
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
from itertools import accumulate, chain, pairwise
from math import ceil, inf, isqrt, lcm
from typing import NamedTuple, TypeAlias

import msgspec

from r2ccl.config import Config
from r2ccl.dtypes import dtype_of
from r2ccl.failover.health.table import WHOLE, Health
from r2ccl.planning.cost_model import Choice, Fabric
from r2ccl.planning.kept import Kept
from r2ccl.planning.placement import rail_weights
from r2ccl.planning.plan_cache import GroupPlanCache, Plan, PlanCache
from r2ccl.planning.planner import Planner
from r2ccl.schedule.chunks import Parts, Range, cut
from r2ccl.types import PARTED, REDUCTIONS, ROOTED, USER_OP, CallSignature, Collective

#: Collectives that can run in two levels.
COLLECTIVES = frozenset(
    (
        Collective.ALLREDUCE,
        Collective.BROADCAST,
        Collective.REDUCE,
        Collective.ALLGATHER,
        Collective.REDUCE_SCATTER,
    )
)


class Piece(NamedTuple):
    """Elements ``first`` to ``end`` (exclusive) of the buffer of a call.

    ``parts`` has the part of each rank of a node, as a range of elements from the start of the
    piece; parts may be empty.
    """

    first: int
    end: int
    parts: tuple[Range, ...]


#: Pieces that pass through the steps of both levels together: one or, in a collective in `PARTED`,
#: one in the block of each node. (The chunk of a schedule is another thing: a part of a channel.)
Chunk: TypeAlias = tuple[Piece, ...]


class NodePlace(NamedTuple):
    """Place of a rank: its node, its rank within the node, and the node's number of ranks."""

    node: int
    local_rank: int
    nlocal: int


class Division(NamedTuple):
    """Division of a call into chunks.

    Attributes
    ----------
    chunks : tuple of Chunk
    is_at_home : bool
        True if groups run at home, False if they run everywhere.
    predicted_ns : int
        Predicted time between the nodes, in ns; 0 if it was not predicted, as with little data.
    """

    chunks: tuple[Chunk, ...]
    is_at_home: bool
    predicted_ns: int


class TwoLevelPlans:
    """Divisions and network plans of the two-level calls of one communicator.

    Parameters
    ----------
    rank : int
    teams : sequence of sequence of int
        Ranks of each node, in ascending order. All nodes have equally many ranks, two or more.
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
        self._index = index
        #: True if ranks are numbered node by node: a node's parts are then adjacent in a buffer.
        self._is_in_order = list(chain(*teams)) == list(range(len(teams) * nlocal))
        self._plans = plans
        self._config = config
        self._divided = divide_rails(fabric, nlocal)
        self._members = members = sorted(team[index] for team in teams)
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
        #: Without failures: share of the buffer that the first group's parts have together, and
        #: number of groups that use the first group's rails.
        self._first_share = Fraction(shares[0], sum(shares))
        self._nsharers = sum(self._divided[0][0] in homes for homes in self._divided)
        self._kept: Kept[tuple[int, CallSignature, tuple[int, ...]], Division | None] = Kept(
            _KEPT, _KEPT_SIZE
        )

    def division(
        self, call: CallSignature, health: Health, sizes: tuple[int, ...] = ()
    ) -> Division | None:
        """Return the division of a call; None if it runs in one level.

        Parameters
        ----------
        call : CallSignature
            Signature of a call with data.
        health : Health
            Health to plan the call with, equal on all ranks.
        sizes : tuple of int, optional
            For a collective in `PARTED`, number of elements of each rank's part. Default: equal
            parts.

        Notes
        -----
        A call runs in one level if its collective is not in `COLLECTIVES`, its operation is
        user-defined, or its collective is in `PARTED` and the ranks are not numbered node by node.
        A call of at most ``R2CC_EAGER_NBYTES`` runs in one level unless two levels need fewer
        steps. In the modes r2cc and auto, a larger call runs in one level if that is predicted to
        take less time by more than 2 %. It also runs in one level if some neighbors would have no
        common home rail, both with groups at home and with groups everywhere.
        """
        key = (health.version, call, sizes)
        try:  # another thread may drop the result between two look-ups
            return self._kept[key]
        except KeyError:
            found = self._divide(call, health, sizes)
            return self._kept.keep(key, found, _size_of(found) + len(sizes))

    def is_bandwidth_sample(
        self, call: CallSignature, health: Health, op: int, division: Division
    ) -> bool:
        """Return whether a call with a `division` must run in one level as a bandwidth sample.

        `division` is the result of the method `division` for `call`. If this method returns False,
        the call uses `division`. `op` is the number of the collective before `call`, equal on all
        ranks. This method also counts the call; see `PlanCache.is_bandwidth_sample`.
        """
        return self._plans.is_bandwidth_sample(call, health, op, division.predicted_ns)

    def plan(
        self,
        call: CallSignature,
        count: int,
        health: Health,
        *,
        is_at_home: bool,
        parts: Parts | None = None,
    ) -> Plan:
        """Return the plan of this rank's group for its parts of a chunk.

        The plan has the signature of the whole `call`, so that a rank that makes a different call
        is detected.

        Parameters
        ----------
        call : CallSignature
            Signature of the whole call.
        count : int
            Number of elements of the group's parts of the chunk, together.
        health : Health
        is_at_home : bool
            As in the `Division` of the call.
        parts : Parts, optional
            For a collective in `PARTED`, places of the parts of the group's members.
        """
        root = call.root
        if call.collective in ROOTED:
            root = self._members.index(self._teams[self.place_of(root).node][self._index])
        part = msgspec.structs.replace(call, count=count, root=root)
        plan = self._groups[is_at_home](part, health, parts)
        return plan._replace(signature=call.pack())

    def place_of(self, rank: int) -> NodePlace:
        """Return the place of a rank among the nodes."""
        node = next(node for node, team in enumerate(self._teams) if rank in team)
        return NodePlace(node, self._teams[node].index(rank), len(self._teams[node]))

    def bounds(self, count: int, sizes: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the index of the first element of each rank's part of a buffer, then `count`.

        Parts follow one another in the order of the ranks; for `sizes`, see `division`.
        """
        nranks = len(self._teams) * len(self._teams[0])
        return tuple(accumulate(sizes or (count // nranks,) * nranks, initial=0))

    def _divide(
        self, call: CallSignature, health: Health, sizes: tuple[int, ...]
    ) -> Division | None:
        if call.collective not in COLLECTIVES:
            return None
        is_parted = call.collective in PARTED
        if is_parted and not self._is_in_order:
            return None
        if call.collective in REDUCTIONS and call.op >= USER_OP:
            return None
        itemsize = dtype_of(call.dtype).itemsize
        nbytes = call.count * itemsize
        weights = [1] * len(self._plans.fabric.homes)
        is_at_home, predicted_ns = True, 0
        if nbytes <= self._config.eager_nbytes:
            if not self._has_fewer_steps(call, nbytes, health.nranks):
                return None
        else:
            rows = self._ports(health)
            if self._config.is_planned:
                fastest = self._fastest(call, nbytes, health, rows)
                if fastest is None:
                    return None
                is_at_home, predicted_ns = fastest
                weights = rail_weights(rows)
            else:
                predicted_ns = int(self._home_ns(call, nbytes, rows) or 0)
        shares = self._shares(weights) if is_at_home else [1] * len(self._divided)
        blocks = self._blocks(call.count, sizes) if is_parted else [(0, call.count)]
        nchunks = count_chunks(nbytes, len(blocks))
        every = [_pieces(block, nchunks, shares, itemsize) for block in blocks]
        return Division(tuple(zip(*every, strict=True)), is_at_home, predicted_ns)

    def _blocks(self, count: int, sizes: tuple[int, ...]) -> list[Range]:
        """Return each node's block in a buffer of `count` elements: the parts of its ranks."""
        bounds = self.bounds(count, sizes)
        return [(bounds[team[0]], bounds[team[-1] + 1]) for team in self._teams]

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

    def _fastest(
        self, call: CallSignature, nbytes: int, health: Health, rows: Sequence[Sequence[int]]
    ) -> tuple[bool, int] | None:
        """Return whether groups run at home (False: everywhere), and the predicted time in ns.

        Return None if one level is faster by more than 2 % (`_AS_GOOD`), or if some neighbors have
        no common home rail both at home and everywhere. Only the times between the nodes are
        compared; the times of the steps within a node are neglected.
        """
        one = self._plans.choice_of(call, health)
        one_ns = one.predicted_ns if one.has_way else inf
        home_ns = self._home_ns(call, nbytes, rows)
        if home_ns is not None and min(map(min, rows)) == WHOLE:
            return (True, int(home_ns)) if home_ns <= one_ns * _AS_GOOD else None
        carried = msgspec.structs.replace(
            self._whole,
            version=health.version,
            shares=b"".join(self._row(row) for row in rows),
        )
        nodes = self._of_nodes(self._everywhere, call, nbytes, carried)
        all_ns = nodes.predicted_ns if nodes.has_way else inf
        if home_ns is not None and home_ns <= min(all_ns, one_ns) * _AS_GOOD:
            return True, int(home_ns)
        if nodes.has_way and all_ns <= one_ns * _AS_GOOD:
            return False, nodes.predicted_ns
        return None

    def _of_nodes(
        self, planner: Planner, call: CallSignature, nbytes: int, health: Health
    ) -> Choice:
        """Return the choice of `planner` for `call` among the nodes, with one rank per node.

        The buffer has `nbytes` bytes; `health` is the health of the nodes. The root of `call` is
        replaced by its node.
        """
        root = self.place_of(call.root).node if call.collective in ROOTED else call.root
        return planner.plan(msgspec.structs.replace(call, root=root), nbytes, health)

    def _row(self, row: Sequence[int]) -> bytes:
        found = bytearray([WHOLE] * self._whole.nrails)
        for rail, share in zip(self._plans.fabric.homes, row, strict=True):
            found[rail] = share
        return bytes(found)

    def _home_ns(
        self, call: CallSignature, nbytes: int, rows: Sequence[Sequence[int]]
    ) -> Fraction | None:
        """Return the predicted time of groups at home, in ns.

        Return None if two neighbors in the ring of nodes have no common home rail.
        """
        if self._plans.fabric.nwires == 1:  # losing one of these rails costs no bandwidth
            slowdown = slowdown_of([[max(row)] for row in rows], [1])
        else:
            slowdown = slowdown_of(rows, rail_weights(rows))
        if slowdown is None:
            return None
        part_nbytes = self._part_nbytes(nbytes)
        first = self._of_nodes(self._at_home, call, part_nbytes, self._whole)
        if part_nbytes <= self._config.eager_nbytes:
            return first.schedule.cost.steps * self._plans.fabric.rates.alpha_ns * slowdown
        return first.predicted_ns * self._nsharers * slowdown

    def _has_fewer_steps(self, call: CallSignature, nbytes: int, nranks: int) -> bool:
        """Return whether two levels need fewer steps for little data, in a healthy network."""
        one = self._plans.choice_of(call, Health.whole(nranks, self._whole.nrails))
        two = self._of_nodes(self._at_home, call, self._part_nbytes(nbytes), self._whole)
        # Within a node, every two pieces of a chunk cost as much as an allreduce.
        nlocal = _LOCAL_STEPS * (len(self._teams) if call.collective in PARTED else 2) // 2
        return two.schedule.cost.steps + nlocal < one.schedule.cost.steps

    def _part_nbytes(self, nbytes: int) -> int:
        return ceil(nbytes * self._first_share)


def _pieces(block: Range, nchunks: int, shares: Sequence[int], itemsize: int) -> list[Piece]:
    """Divide a block into one piece per chunk, and each piece into parts by `shares`."""
    start, end = block
    edges = cut(end - start, [1] * nchunks, itemsize)
    return [
        Piece(start + lo, start + hi, tuple(pairwise(cut(hi - lo, shares, itemsize))))
        for lo, hi in pairwise(edges)
    ]


def _size_of(division: Division | None) -> int:
    """Return the number of ranges of a division, which take most of its memory."""
    chunks = division.chunks if division else ()
    return sum(1 + len(piece.parts) for chunk in chunks for piece in chunk)


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


def slowdown_of(rows: Sequence[Sequence[int]], weights: Sequence[int]) -> Fraction | None:
    """Return the time for which the busiest port is busy, relative to a network without failures.

    ``rows[i][r]`` is the share (`r2ccl.failover.health.table`) of the port of node i on rail r; the
    nodes form a ring in this order. Rail r carries an amount of data proportional to
    ``weights[r]``. Between two neighbors, the load of a rail that is down spreads over the rails
    that are up, in proportion to their shares. Returns None if two neighbors have no common rail.
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


def count_chunks(nbytes: int, npieces: int = 1) -> int:
    """Return the number of chunks of a call of `nbytes`; each chunk has `npieces` pieces.

    The first and the last step of a call run within the nodes and do not overlap with the network.
    They are shorter with smaller chunks. Between two chunks, the network idles for `_GAP_NS`. The
    number of chunks minimizes the sum of both times, up to `_MOST_CHUNKS`. If a chunk has more than
    two pieces, there are fewer chunks, because every piece takes a step within the nodes.
    """
    exposed_ns = 2 * nbytes * 10**9 // _LOCAL_BYTES_PER_S
    nchunks = max(1, min(_MOST_CHUNKS, isqrt(exposed_ns // _GAP_NS)))
    return -(-2 * nchunks // max(2, npieces))


#: Rate of one step within a node, in bytes of the chunk per second, and idle time of the network
#: while one chunk ends and the next one fills the pipeline, in ns.
_LOCAL_BYTES_PER_S = 4 * 10**9
_GAP_NS = 1_000_000
_MOST_CHUNKS = 32
#: Cost of the steps within a node, in steps of the network, for little data. (netlab, 2 nodes of 2
#: ranks on 2 cores, 8 bytes to 64 KiB: two levels save one step, and take 1.2 times as long.)
_LOCAL_STEPS = 1
#: Two levels are preferred up to this multiple of the predicted time of one level, because
#: predictions have about this error.
_AS_GOOD = Fraction(102, 100)
#: Maximum number of divisions kept, and maximum size of all together, in ranges and sizes of parts
#: (75 to 120 bytes each, measured with tracemalloc). An allgather of unequal parts can have other
#: sizes in every call.
_KEPT = 1024
_KEPT_SIZE = 1 << 18

__all__ = [
    "COLLECTIVES",
    "Chunk",
    "Division",
    "NodePlace",
    "Piece",
    "TwoLevelPlans",
    "count_chunks",
    "divide_rails",
    "slowdown_of",
]

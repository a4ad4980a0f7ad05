"""Bypass: the path between two ranks without a common rail, and the search for its *way*.

A way is either a connection between ports of different rails (*cross way*), or one through a third
rank that forwards. The lower rank dials when no path to the peer on a home rail is up. It gives the
control plane a list of ways; the first way that works becomes the bypass. On a fabric where all
NICs reach each other, a cross way usually works before a third rank is asked. A bypass that fails
is fenced, and its slices are replayed, as for any other path. Each round of the search begins at a
different position in the list of ways. The higher rank always accepts a bypass.

While a path to the peer is up on a TCP rail that is a last resort, only cross ways are tried, and
only in one round: third ranks need not forward data that can travel directly. If the home rails are
RDMA rails, there is no search while a path to the peer on any TCP rail is up. No way begins at an
excluded port of this rank or leads to an excluded port; a third rank may forward over any port.

Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from r2ccl.bootstrap.base import ControlPort
from r2ccl.clock import Clock
from r2ccl.failover.migration.path import Path, PathState
from r2ccl.types import BYPASS, BypassWay, PathKey

#: Maximum number of ways of each kind (cross ways, third ranks) given to the control plane at once.
MAX_WAYS = 32
#: Time from the start of a round, in which all its ways are tried, to the next round, in seconds.
ROUND_S = 3.5
#: Minimum pause before a failed bypass is dialed again, in seconds.
PAUSE_S = 0.2
#: Time that the paths on rails to a peer get to connect before the search for a bypass, in seconds.
PATIENCE_S = 0.2


class Bypasses:
    """The search of one rank for bypasses to its peers.

    Parameters
    ----------
    rank, nranks : int
    paths : mapping of PathKey to Path
        Paths of this rank; read only.
    homes, sockets, last_resorts : collection of int
        Home rails; all TCP rails; and the TCP rails that are used only as a last resort.
    fabric : str
        ``full``: NICs of different rails reach each other, so no third rank is asked; ``rail``:
        NICs of different rails do not reach each other, so only third ranks are asked; ``auto``:
        both are tried.
    share : callable
        ``share(rank, rail)``: share of its bandwidth that a port has left, as far as known; 0:
        down.
    is_excluded : callable
        ``is_excluded(rank, rail)``: returns whether a port is excluded.
    control : ControlPort
    clock : Clock
    """

    def __init__(
        self,
        rank: int,
        nranks: int,
        *,
        paths: Mapping[PathKey, Path],
        homes: Collection[int],
        sockets: Sequence[int],
        last_resorts: Collection[int] = (),
        fabric: str,
        share: Callable[[int, int], float],
        is_excluded: Callable[[int, int], bool],
        control: ControlPort,
        clock: Clock,
    ) -> None:
        self._rank = rank
        self._nranks = nranks
        self._paths = paths
        self._homes = homes
        self._sockets = sockets
        #: Rails whose ports a cross way may join.
        self._crossed = [rail for rail in sockets if rail not in last_resorts]
        self._fabric = fabric
        self._share = share
        self._is_excluded = is_excluded
        self._control = control
        self._clock = clock
        #: Per peer: rounds begun since a home rail was up, and earliest time of the next round.
        self._nrounds: dict[int, int] = {}
        self._due_s: dict[int, float] = {}

    def admit(self, peer: int) -> None:
        """Accept the first bypass from `peer`, if `peer` is the lower rank, which dials."""
        if peer < self._rank:
            self._control.accept_path(peer, BYPASS, 0)

    def connecting(self, peer: int) -> None:
        """Delay the search for a bypass to `peer` by `PATIENCE_S`: paths on rails are connecting.

        Do nothing if, as far as known, no home rail is up at both ranks.
        """
        if any(self._share(self._rank, at) and self._share(peer, at) for at in self._homes):
            self._due_s[peer] = self._clock() + PATIENCE_S

    def lost(self, key: PathKey) -> None:
        """Set the time of the next search round after the loss of path `key`.

        The round may begin at once if a path on a rail was lost, and after `PAUSE_S` if the bypass
        was lost.
        """
        if key.is_bypass:
            self._due_s[key.peer] = self._clock() + PAUSE_S
        else:
            self._due_s.pop(key.peer, None)

    def found(self, key: PathKey) -> None:
        """End the search for a bypass if path `key`, which came up, is on a home rail."""
        if key.rail not in self._homes:
            return
        self._due_s.pop(key.peer, None)
        if self._nrounds.pop(key.peer, 0):
            self._control.cancel_path(key.peer, BYPASS)

    def seek(self, peer: int) -> bool:
        """Begin a round of the search for a bypass to `peer` if a round is due.

        No round is due at the higher rank of the pair. At the lower rank, no round is due while a
        path on a home rail is up, while the bypass is not down, or before the time that
        `connecting`, `lost` or the previous round has set. While a path on another TCP rail is up,
        at most one round is due, or no round if the home rails are RDMA rails.

        Returns
        -------
        bool
            True if the control plane was told to dial; False if no round is due, or there is no
            candidate to dial.
        """
        now = self._clock()
        if (
            peer < self._rank
            or now < self._due_s.get(peer, 0.0)
            or self._paths[PathKey(peer, BYPASS)].state is not PathState.DOWN
            or self._is_up(peer, self._homes)
        ):
            return False
        nrounds = self._nrounds.get(peer, 0)
        has_last_resort = self._is_up(peer, self._sockets)
        if has_last_resort and (nrounds or not set(self._homes) & set(self._sockets)):
            return False
        self._nrounds[peer] = nrounds + 1
        self._due_s[peer] = now + ROUND_S
        ways = self._ways(peer, nrounds, with_forwarders=not has_last_resort)
        if ways:
            self._control.dial_bypass(peer, self._paths[PathKey(peer, BYPASS)].epoch, ways)
        return bool(ways)

    def _is_up(self, peer: int, rails: Collection[int]) -> bool:
        return any(self._paths[PathKey(peer, rail)].state is PathState.UP for rail in rails)

    def _ways(self, peer: int, nrounds: int, *, with_forwarders: bool) -> list[BypassWay]:
        """Return the ways to dial `peer`, alternating between other rails and third ranks.

        Within each kind, the ways most likely to work come first; later rounds begin at a different
        position in the list.
        """
        cross: list[BypassWay] = [] if self._fabric == "rail" else self._cross_ways(peer, nrounds)
        others: list[BypassWay] = []
        if with_forwarders and self._fabric != "full":
            others = self._forwarders(peer, nrounds)
        pairs = zip_longest(cross[:MAX_WAYS], others[:MAX_WAYS])
        return [way for way in chain.from_iterable(pairs) if way is not None]

    def _cross_ways(self, peer: int, nrounds: int) -> list[BypassWay]:
        rails = self._crossed
        lit = {
            key.rail
            for key, path in self._paths.items()
            if path.state is PathState.UP and not key.is_bypass
        }

        def likelihood(way: BypassWay) -> tuple[bool, bool]:
            return (
                not self._is_carrying(peer, way.rail),
                not self._is_carrying(self._rank, way.via) or way.via not in lit,
            )

        pairs = [BypassWay(via, peer, rail) for via in rails for rail in rails if via != rail]
        ways = [way for way in pairs if self._is_allowed(way)]
        ways.sort(key=likelihood)
        # Each round starts with other ways: one that worked may have failed since, and a round has
        # no time for more than MAX_WAYS.
        return _turned(ways, nrounds * (MAX_WAYS if len(ways) > MAX_WAYS else 1))

    def _forwarders(self, peer: int, nrounds: int) -> list[BypassWay]:
        """Return ways to dial `peer` through third ranks, over every TCP rail that may reach them.

        Third ranks that, as far as known, share a working rail with `peer` come first, followed by
        all other third ranks; the search ends after `MAX_WAYS` ranks of the first group. Within
        both groups, the first ways use the rail of each third rank that most likely works, the next
        ways its second rail, and so on. If rails are equally likely to work, different third ranks
        begin with different rails, because a rail may have failed unnoticed.
        """
        # The first rank depends on the pair; each round starts after the ranks of the last one.
        first = self._rank + peer + 1 + nrounds * MAX_WAYS
        joined: list[tuple[int, int, BypassWay]] = []
        doubtful: list[tuple[int, int, BypassWay]] = []
        for number in range(self._nranks):
            rank = (first + number) % self._nranks
            if rank in (self._rank, peer):
                continue
            is_joined = any(
                self._is_carrying(rank, at) and self._is_carrying(peer, at) for at in self._sockets
            )
            # If this rank has no data paths to the third rank, any rail may lead to it.
            is_peer = PathKey(rank, BYPASS) in self._paths
            rails = [at for at in self._sockets if not is_peer or self._is_up(rank, (at,))]
            rails = _turned(rails, number + nrounds)
            rails.sort(key=lambda at, rank=rank: not self._carries_both(rank, at))  # type: ignore[misc]
            found = joined if is_joined else doubtful
            found += [
                (turn, number, way)
                for turn, rail in enumerate(rails)
                if self._is_allowed(way := BypassWay(rail, rank, rail))
            ]
            if len({way.to for *_, way in joined}) >= MAX_WAYS:
                break
        return [way for *_, way in (*sorted(joined), *sorted(doubtful))]

    def _is_allowed(self, way: BypassWay) -> bool:
        ends = ((self._rank, way.via), (way.to, way.rail))
        return not any(self._is_excluded(*end) for end in ends)

    def _carries_both(self, rank: int, rail: int) -> bool:
        return self._is_carrying(self._rank, rail) and self._is_carrying(rank, rail)

    def _is_carrying(self, rank: int, rail: int) -> bool:
        return self._share(rank, rail) > 0


def _turned(items: Sequence[Any], by: int) -> list[Any]:
    """Return the items rotated left by `by` positions."""
    at = by % len(items) if items else 0
    return [*items[at:], *items[:at]]


__all__ = ["Bypasses"]

"""Bypass: the path of two ranks that have no rail in common, and the ways it may go.

The lower rank dials when no path leads to the peer. It offers the control plane all ways it can
think of, cross ways between ports of different rails and ranks that may forward, and the first that
works is taken: on a fabric where all NICs reach each other a cross way does before anyone else is
asked. A bypass that fails is fenced and replayed like any other path; each round begins with other
ways than the one before. The higher rank always lets one in.

Where the last resort leads to the peer, only cross ways are tried, once, when slices wait: nobody
has to carry for others what can go by itself. Beside RDMA any path of sockets is that last resort.

Must not import sockets or the control plane; owned by one caller at a time, like
`r2ccl.failover.migration.driver`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from r2ccl.bootstrap.base import ControlPort
from r2ccl.clock import Clock
from r2ccl.failover.migration.path import Path, PathState
from r2ccl.types import BYPASS, BypassWay, PathKey

#: Ways given to the control plane at a time, of either kind.
MAX_WAYS = 32
#: By then all of them have been tried.
ROUND_S = 3.5
#: A bypass that broke is not dialed again sooner.
PAUSE_S = 0.2


class Bypasses:
    """The bypasses of one rank.

    Parameters
    ----------
    rank, nranks : int
    paths : mapping of PathKey to Path
        Read, never changed.
    homes, sockets, last_resorts : collection of int
        Rails slices travel on as long as they can, those that consist of sockets, and of these the
        ones that are no ordinary rails.
    fabric : str
        ``full``: ports of different rails reach each other; ``rail``: they do not; ``auto``:
        whatever works first.
    share : callable
        ``share(rank, rail)``: what a port carries, as far as is known; 0: nothing.
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
        control: ControlPort,
        clock: Clock,
    ) -> None:
        self._rank = rank
        self._nranks = nranks
        self._paths = paths
        self._homes = homes
        self._sockets = sockets
        #: Rails whose ports a cross way may join, if bypasses are for sockets at all.
        self._crossed = [rail for rail in sockets if rail not in last_resorts]
        self._fabric = fabric
        self._share = share
        self._control = control
        self._clock = clock
        #: For peers that have no home rail up: rounds begun, and when the next one may be.
        self._nrounds: dict[int, int] = {}
        self._due_s: dict[int, float] = {}

    def admit(self, peer: int) -> None:
        """Accept the first bypass of `peer`, if that is the end which dials."""
        if peer < self._rank:
            self._control.accept_path(peer, BYPASS, 0)

    def lost(self, key: PathKey) -> None:
        """A path was lost: what failed before may be what is needed now."""
        if key.is_bypass:
            self._due_s[key.peer] = self._clock() + PAUSE_S
        else:
            self._due_s.pop(key.peer, None)

    def found(self, key: PathKey) -> None:
        """A path came up; one at home ends the search."""
        if key.rail not in self._homes:
            return
        self._due_s.pop(key.peer, None)
        if self._nrounds.pop(key.peer, 0):
            self._control.cancel_path(key.peer, BYPASS)

    def seek(self, peer: int) -> bool:
        """Begin a round of ways to `peer`, if it needs one; return whether one was begun."""
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
        """Return ways to `peer`, the likelier ones first, both kinds in turn."""
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

        ways = [BypassWay(via, peer, rail) for via in rails for rail in rails if via != rail]
        ways.sort(key=likelihood)
        # A way may work at first, and then not; and there may be more than a round has time for.
        return _turned(ways, nrounds * (MAX_WAYS if len(ways) > MAX_WAYS else 1))

    def _forwarders(self, peer: int, nrounds: int) -> list[BypassWay]:
        """Return ways through ranks this one reaches; first those `peer` should reach, by one rail.

        A path may be up only because nobody has missed anything on it yet, so ranks are asked over
        different rails.
        """
        # Pairs begin at different ranks, and each round after those of the one before.
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
            # Where this rank has no data path it cannot know: what carries may do.
            is_peer = PathKey(rank, BYPASS) in self._paths
            rails = [at for at in self._sockets if not is_peer or self._is_up(rank, (at,))]
            rails = _turned(rails, number + nrounds)
            rails.sort(key=lambda at, rank=rank: not self._carries_both(rank, at))  # type: ignore[misc]
            found = joined if is_joined else doubtful
            found += [
                (turn, number, BypassWay(rail, rank, rail)) for turn, rail in enumerate(rails)
            ]
            if len({way.to for *_, way in joined}) >= MAX_WAYS:
                break
        return [way for *_, way in (*sorted(joined), *sorted(doubtful))]

    def _carries_both(self, rank: int, rail: int) -> bool:
        """Whether this rank's port and that of `rank` carry anything, as far as is known."""
        return self._is_carrying(self._rank, rail) and self._is_carrying(rank, rail)

    def _is_carrying(self, rank: int, rail: int) -> bool:
        """Whether a port carries anything, as far as is known."""
        return self._share(rank, rail) > 0


def _turned(items: Sequence[Any], by: int) -> list[Any]:
    """Return the items from number `by` on, and round."""
    at = by % len(items) if items else 0
    return [*items[at:], *items[:at]]


__all__ = ["Bypasses"]

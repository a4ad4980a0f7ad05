"""Bypass: the path of two ranks that have no rail in common, and the ways it may go.

The lower rank dials when slices wait and no rail leads to the peer. It offers the control plane
all ways it can think of, cross ways between ports of different rails and ranks that may forward,
and the first that works is taken: on a fabric where all NICs reach each other a cross way does
before anyone else is asked. A bypass that fails is fenced and replayed like any other path; its
next life may go another way. The higher rank always lets one in.

Where the last resort leads to the peer, only cross ways are tried, and only once: nobody has to
carry for others what can go by itself.

Must not import sockets or the control plane; owned by one caller at a time, like `r2ccl.recovery`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, zip_longest

from r2ccl.clock import Clock
from r2ccl.ports import ControlPort
from r2ccl.resilience.path import Path, PathState
from r2ccl.types import BYPASS, PathKey, Way

#: Ways given to the control plane at a time, of either kind.
MAX_WAYS = 32
#: By then all of them have been tried.
ROUND_S = 3.0


class Bypasses:
    """The bypasses of one rank.

    Parameters
    ----------
    rank, nranks : int
    paths : mapping of PathKey to Path
        Read, never changed.
    homes, sockets : collection of int
        Rails slices travel on as long as they can, and those that consist of sockets.
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
        self._fabric = fabric
        self._share = share
        self._control = control
        self._clock = clock
        #: Of peers that have no home rail up: rounds begun, and when the next one may be.
        self._nrounds: dict[int, int] = {}
        self._due_s: dict[int, float] = {}

    def start(self) -> None:
        """Let the lower ranks in."""
        for peer in range(self._rank):
            self._control.accept_path(peer, BYPASS, 0)

    def lost(self, peer: int) -> None:
        """A path to `peer` was lost: what failed before may be what is needed now."""
        self._due_s.pop(peer, None)

    def found(self, peer: int) -> None:
        """A path to `peer` came up."""
        if self._is_up(peer, self._homes):
            self._nrounds.pop(peer, None)
            self._due_s.pop(peer, None)

    def seek(self, peer: int) -> None:
        """Slices for, or of, `peer` are wanted: begin a round of ways, if it needs one."""
        now = self._clock()
        if (
            peer < self._rank
            or now < self._due_s.get(peer, 0.0)
            or self._paths[PathKey(peer, BYPASS)].state is not PathState.DOWN
            or self._is_up(peer, self._homes)
        ):
            return
        nrounds = self._nrounds.get(peer, 0)
        has_last_resort = self._is_up(peer, self._sockets)
        if has_last_resort and nrounds:
            return
        self._nrounds[peer] = nrounds + 1
        self._due_s[peer] = now + ROUND_S
        ways = self._ways(peer, nrounds, with_forwarders=not has_last_resort)
        if ways:
            self._control.dial_bypass(peer, self._paths[PathKey(peer, BYPASS)].epoch, ways)

    def _is_up(self, peer: int, rails: Collection[int]) -> bool:
        return any(self._paths[PathKey(peer, rail)].state is PathState.UP for rail in rails)

    def _ways(self, peer: int, nrounds: int, *, with_forwarders: bool) -> list[Way]:
        """Return ways to `peer`, the likelier ones first, both kinds in turn."""
        cross: list[Way] = [] if self._fabric == "rail" else self._cross_ways(peer)
        others: list[Way] = []
        if with_forwarders and self._fabric != "full":
            others = self._forwarders(peer, nrounds)
        pairs = zip_longest(cross[:MAX_WAYS], others[:MAX_WAYS])
        return [way for way in chain.from_iterable(pairs) if way is not None]

    def _cross_ways(self, peer: int) -> list[Way]:
        rails = [rail for rail in self._sockets if rail in self._homes] or self._sockets
        ways = [Way(via, peer, rail) for via in rails for rail in rails if via != rail]

        def likelihood(way: Way) -> tuple[bool, bool]:
            return (
                not self._is_carrying(peer, way.rail),
                not self._is_carrying(self._rank, way.via) or self._is_dark(way.via),
            )

        return sorted(ways, key=likelihood)

    def _is_dark(self, rail: int) -> bool:
        """Whether no path of this rank's port is up."""
        return not any(
            self._paths[PathKey(peer, rail)].state is PathState.UP
            for peer in range(self._nranks)
            if peer != self._rank
        )

    def _forwarders(self, peer: int, nrounds: int) -> list[Way]:
        """Return ways through ranks this one reaches; first those `peer` should reach, by one rail.

        A path may be up only because nobody has missed anything on it yet.
        """
        # Pairs begin at different ranks, and each round after those of the one before.
        first = self._rank + peer + 1 + nrounds * MAX_WAYS
        ranks = [(first + number) % self._nranks for number in range(self._nranks)]
        by_turn: list[tuple[bool, int, int, Way]] = []
        for number, rank in enumerate(ranks):
            if rank in (self._rank, peer):
                continue
            is_joined = any(
                self._is_carrying(rank, at) and self._is_carrying(peer, at) for at in self._sockets
            )
            rails = [at for at in self._sockets if self._is_up(rank, (at,))]
            rails.sort(
                key=lambda at: (
                    not (self._is_carrying(self._rank, at) and self._is_carrying(rank, at))
                )
            )
            by_turn += [
                (not is_joined, turn, number, Way(rail, rank, rail))
                for turn, rail in enumerate(rails)
            ]
        return [way for *_, way in sorted(by_turn)]

    def _is_carrying(self, rank: int, rail: int) -> bool:
        """Whether a port carries anything, as far as is known."""
        return self._share(rank, rail) > 0


__all__ = ["Bypasses"]

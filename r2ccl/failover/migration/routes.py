"""Routing: which path each channel to a peer rides, and what is set going when that changes.

A channel is at *home* on one rail. While its home to a peer is down it rides another path, chosen
so that the paths that are left are loaded in proportion to what they carry; it goes home as soon
as its home is up, which fences nothing, because slices are known by number
(`r2ccl.failover.migration.link`).

Must not import sockets or the control plane; owned by one caller at a time, like
`r2ccl.failover.migration.driver`. Invariant: a route is a path that is up, or None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from r2ccl.failover.migration.link import RecvLink, SendLink
from r2ccl.failover.migration.links import Links
from r2ccl.failover.migration.path import PathState, choose_routes
from r2ccl.failover.migration.repairs import RepairLog
from r2ccl.types import BYPASS, PathKey


class Routes:
    """Routes of all channels of one rank.

    Parameters
    ----------
    links : Links
        Those that are routed, over its paths.
    nrails : int
    homes : sequence of int
        Rails channels are at home on: channel c on ``homes[c % len(homes)]``. The others are the
        last resort.
    share : callable
        What a path carries, in any unit, the same for all; above 0.
    log : RepairLog
        Told of what is written again.
    """

    def __init__(
        self,
        links: Links,
        *,
        nrails: int,
        homes: Sequence[int],
        share: Callable[[PathKey], float],
        log: RepairLog,
    ) -> None:
        self._links = links
        self._paths = links.paths
        self._nrails = nrails
        self._homes = homes
        self._share = share
        self._log = log

    def up(self, peer: int) -> list[PathKey]:
        """Paths to `peer` that may be used, by rail; the bypass comes last."""
        keys = (PathKey(peer, rail) for rail in (*range(self._nrails), BYPASS))
        return [key for key in keys if key in self._paths and self._is_up(key)]

    def _is_up(self, key: PathKey) -> bool:
        return self._paths[key].state is PathState.UP

    def go_home(self, peer: int) -> None:
        """A path to `peer` came up: channels at home on it go there, those without a route too."""
        for channel in self._channels(peer):
            self._set(peer, channel, self._home(peer, channel))
        self.reroute(peer)

    def begin(self, peer: int, channel: int) -> None:
        """Give the new links of (peer, channel) their route."""
        self._set(peer, channel, self._home(peer, channel))
        self.reroute(peer)

    def lose(self, key: PathKey) -> None:
        """`key` is down: what rides it has no route."""
        for (peer, channel), link in self._links.senders.items():
            if link.route == key:
                self._set(peer, channel, None)

    def proposal(self, peer: int) -> dict[int, int]:
        """Return a rail for every channel to `peer` that has no route."""
        return {channel: key.rail for channel, key in self._choose(peer).items()}

    def reroute(self, peer: int, proposed: Mapping[int, int] | None = None) -> dict[int, int]:
        """Give every channel without a route one, and set its waiting slices going.

        Parameters
        ----------
        peer : int
        proposed : mapping of int to int, optional
            Rails the peer proposes, followed as far as they are up here.

        Returns
        -------
        dict of int to int
            Channel to its new rail.
        """
        up = self.up(peer)
        routes = self._choose(peer)
        for channel in routes:
            wanted = PathKey(peer, (proposed or {}).get(channel, -1))
            if wanted in up:
                routes[channel] = wanted
        for channel, key in routes.items():
            self._set(peer, channel, key)
        for channel in self._channels(peer):
            self._set_going(
                self._links.senders[peer, channel], self._links.receivers[peer, channel]
            )
        return {channel: key.rail for channel, key in routes.items()}

    def _set_going(self, sender: SendLink, receiver: RecvLink) -> None:
        if sender.route is None:
            return
        # What was consumed while there was no route could not be confirmed then.
        self._links.confirm_all((receiver,))
        for landing in receiver.unnamed():
            self._links.name(receiver, landing)
        for item in sender.waiting():
            self._log.replayed(item.lost_on, len(item.view))
            self._links.write(sender, item, None, is_replay=True)

    def _home(self, peer: int, channel: int) -> PathKey | None:
        key = PathKey(peer, self._home_rail(channel))
        return key if self._is_up(key) else None

    def _home_rail(self, channel: int) -> int:
        return self._homes[channel % len(self._homes)]

    def _choose(self, peer: int) -> dict[int, PathKey]:
        """Choose among the paths that are up, for the channels that have no route.

        Channels on a detour are spread among themselves: the channels of any one schedule that
        lost their home then go to different rails, whatever other schedules ran before. Those at
        home only decide between rails with as many detours.
        """
        unrouted: list[int] = []
        detours: Counter[PathKey] = Counter()
        at_home: Counter[PathKey] = Counter()
        for (other, channel), link in self._links.senders.items():
            if other != peer:
                continue
            if link.route is None:
                unrouted.append(channel)
            elif link.route.rail == self._home_rail(channel):
                at_home[link.route] += 1
            else:
                detours[link.route] += 1
        return choose_routes(unrouted, self.up(peer), detours, self._weight, at_home)

    def _weight(self, key: PathKey) -> float:
        if key.is_bypass:
            return _BYPASS_WEIGHT
        return self._share(key) * (1.0 if key.rail in self._homes else _LAST_RESORT_WEIGHT)

    def _set(self, peer: int, channel: int, key: PathKey | None) -> None:
        self._links.senders[peer, channel].route = key
        self._links.receivers[peer, channel].route = key

    def _channels(self, peer: int) -> list[int]:
        return [channel for to, channel in self._links.senders if to == peer]


#: So small that every path on a home rail is fuller before a channel goes elsewhere, and that a
#: bypass is fuller before one goes to the last resort: the two are up together only if the bypass
#: is between NICs of rails, which the network of the rendezvous seldom equals.
_BYPASS_WEIGHT, _LAST_RESORT_WEIGHT = 1e-6, 1e-12

__all__ = ["Routes"]

"""Routing: assigns each channel a path to its peer, and sends slices that waited for a path.

Each channel has a home rail. While the path to a peer on that rail is down, the channel uses
another path. Such channels are spread over the remaining paths in proportion to the bandwidth of
these paths. A channel returns to its home rail as soon as the path on that rail is up. No path is
fenced for that, because slices are identified by number (`r2ccl.failover.migration.link`).

Not thread-safe. Invariant: until the communicator ends, a route is a path that is up, or None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from r2ccl.failover.migration.calls import local_channel
from r2ccl.failover.migration.link import RecvLink, SendLink
from r2ccl.failover.migration.links import Links
from r2ccl.failover.migration.path import PathState, choose_routes
from r2ccl.failover.migration.repairs import RepairLog
from r2ccl.types import PathKey


class Routes:
    """Routing table: the path of every channel between one rank and each peer.

    Parameters
    ----------
    links : Links
        Links and paths of this rank.
    homes : sequence of int
        Home rails: channel c of a communicator has ``homes[c % len(homes)]``. A rail that is not in
        `homes` is used only while neither a path on a home rail nor a bypass is up.
    share : callable
        ``share(path)``: relative bandwidth of a path, in the same unit for all paths; above 0.
    log : RepairLog
        Records the bytes that are replayed.
    """

    def __init__(
        self,
        links: Links,
        *,
        homes: Sequence[int],
        share: Callable[[PathKey], float],
        log: RepairLog,
    ) -> None:
        self._links = links
        self._paths = links.paths
        self._homes = homes
        self._share = share
        self._log = log

    def up(self, peer: int) -> list[PathKey]:
        """Return the paths to `peer` that are up, in the order of their rails, the bypass last."""
        return [path.key for path in self._links.paths_to(peer) if path.state is PathState.UP]

    def _is_up(self, key: PathKey) -> bool:
        return self._paths[key].state is PathState.UP

    def go_home(self, peer: int) -> None:
        """Move the channels between this rank and `peer` back to their home rails.

        A channel whose home rail is down gets another path, if one is up.
        """
        for channel in self._channels(peer):
            self._set(peer, channel, self._home(peer, channel))
        self.reroute(peer)

    def begin(self, peer: int, channel: int) -> None:
        """Assign a route to the two new links with `peer` on `channel`, if a path to `peer` is up.

        Other channels to `peer` that have no route also get one, as in `reroute`.
        """
        self._set(peer, channel, self._home(peer, channel))
        self.reroute(peer)

    def lose(self, key: PathKey) -> tuple[int, ...]:
        """Remove the routes that use path `key`, which is being fenced; return their channels."""
        senders = self._links.senders.items()
        lost = tuple(channel for (_, channel), link in senders if link.route == key)
        for channel in lost:
            self._set(key.peer, channel, None)
        return lost

    def rails(self, peer: int, channels: Iterable[int]) -> dict[int, int]:
        """Return the rail of each of `channels` to `peer`; omit channels without a route."""
        routes = {channel: self._links.senders[peer, channel].route for channel in channels}
        return {channel: route.rail for channel, route in routes.items() if route is not None}

    def proposal(self, peer: int) -> dict[int, int]:
        """Return the rail to propose to `peer` for each channel that has no route to `peer`.

        The result is empty if no path to `peer` is up. This method assigns no route.
        """
        return {channel: key.rail for channel, key in self._choose(peer).items()}

    def reroute(self, peer: int, proposed: Mapping[int, int] | None = None) -> None:
        """Assign routes to the channels to `peer` that have none, and send the waiting frames.

        Eager slices, announcements of landing places, and confirmations may wait for a route. If no
        path to `peer` is up, nothing is assigned and nothing is sent.

        Parameters
        ----------
        peer : int
        proposed : mapping of int to int, optional
            Rails that the peer proposes; used where the path is up at this end.
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

    def _set_going(self, sender: SendLink, receiver: RecvLink) -> None:
        if sender.route is None:
            return
        # Slices consumed while the link had no route could not be confirmed then.
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
        return self._homes[local_channel(channel) % len(self._homes)]

    def _choose(self, peer: int) -> dict[int, PathKey]:
        """Return a path that is up for each channel to `peer` that has no route.

        Only channels away from their home rail count as load. The channels of one schedule that
        lost their home rail are therefore spread over all paths, regardless of earlier schedules.
        Channels on their home rail only break ties.
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


#: Weights of a bypass, and of a rail that is no home rail (a last resort). They are so small that a
#: channel goes to a bypass only if no home rail is up, and to a last resort only if no bypass is up
#: either. While a last resort is up, only bypasses between NICs of different rails may be dialed;
#: these are usually faster than the last resort.
_BYPASS_WEIGHT, _LAST_RESORT_WEIGHT = 1e-6, 1e-12

__all__ = ["Routes"]

"""Opens and closes the PXN routes of one rank: routes to distant NICs through other GPUs' memory.

`r2ccl.gpu.nic_affinity` finds the rails that this GPU reaches best through another GPU. The routes
are opened when a rail that this rank's group uses is down or slow at any rank of the group. To open
a route, the rank opens the other GPU, which this process must see, allocates slots in that GPU's
memory, and lets `r2ccl.gpu.pxn.transport` use the slots for the rail. Without a route, slices
travel to the NIC directly, which is correct but slower.

Invariant: a route is opened only while no stream waits for the host, because opening may wait for
the device. Only one attempt is made to open each route.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from r2ccl.device.base import Device
from r2ccl.errors import TransportError
from r2ccl.failover.health.table import WHOLE, Health
from r2ccl.gpu.nic_affinity import PxnRoute
from r2ccl.gpu.pxn.relay import Relay
from r2ccl.gpu.pxn.transport import PxnTransport
from r2ccl.gpu.registered_memory import Register, RunInDataLoop
from r2ccl.transport.base import Registered

_log = logging.getLogger(__name__)


class _Opened(NamedTuple):
    rail: int
    via: str
    relay: Relay
    peer: Device
    address: int
    registered: Registered


class PxnRoutes:
    """PXN routes of one rank's GPU.

    Parameters
    ----------
    device : Device
    rank : int
    wanted : iterable of PxnRoute
        Possible routes; their ``rail`` is a rail number of the transport.
    members, homes : sequence of int
        The group of ranks, including this one, with which this rank exchanges data, and the rails
        that the group uses. Routes are needed when one of these rails has lost bandwidth at one of
        these ranks.
    transport : PxnTransport
        Transport that sends slices over the routes; borrowed.
    register : callable
        See `Register`.
    run_in_data_loop : callable
        See `RunInDataLoop`.
    open_peer : callable
        Opens and returns the GPU at a PCI bus ID, or returns None if this process does not see it.
        `close` closes the GPU.
    health : callable
        Returns the current health of all ranks' rails.
    slot_nbytes, nslots : int
        Size of a slot in bytes, and number of slots of each route.
    """

    def __init__(
        self,
        device: Device,
        rank: int,
        wanted: Iterable[PxnRoute],
        members: Sequence[int],
        homes: Sequence[int],
        *,
        transport: PxnTransport,
        register: Register,
        run_in_data_loop: RunInDataLoop,
        open_peer: Callable[[str], Device | None],
        health: Callable[[], Health],
        slot_nbytes: int,
        nslots: int,
    ) -> None:
        self._device = device
        self._rank = rank
        #: Bus ID of the other GPU of each route that was not tried yet, by rail.
        self._wanted = {each.rail: each.via for each in wanted}
        #: Pairs of rank and rail; routes are needed when one of these has lost bandwidth.
        self._meets = [(member, rail) for member in members for rail in homes]
        self._transport = transport
        self._register = register
        self._run_in_data_loop = run_in_data_loop
        self._open_peer = open_peer
        self._health = health
        self._slot_nbytes = slot_nbytes
        self._nslots = nslots
        #: Version of the health that `open` used last.
        self._seen = -1
        #: Other GPUs by bus ID; None for a GPU that this process does not see.
        self._peers: dict[str, Device | None] = {}
        self._opened: list[_Opened] = []

    @property
    def is_open_needed(self) -> bool:
        """True if `open` would attempt to open a route."""
        health = self._health()
        return bool(self._wanted) and health.version != self._seen and bool(self._needed(health))

    def open(self) -> None:
        """Open the routes that the current health of the rails makes necessary.

        A route that cannot be opened is logged and not attempted again.
        """
        health = self._health()
        self._seen = health.version
        for rail in self._needed(health):
            via = self._wanted.pop(rail)
            try:
                why = self._open(rail, via)
            except TransportError as exc:
                why = str(exc)
            _log.info(
                "rank %d: slices for rail %d %s GPU %s%s", self._rank, rail,
                "do not pass through" if why else "pass through", via, f": {why}" if why else "",
            )  # fmt: skip

    def drain(self, timeout_s: float) -> bool:
        """Wait for the copies of all routes; return whether all copies ended or failed.

        Wait up to `timeout_s` seconds for each direction of a route; after a route whose copies did
        not end in time, do not wait for the remaining routes. Call this method only after a
        collective has failed: the communicator ends, so no new copy begins.
        """

        # Run in the data loop, because the transport polls copies there until it is closed.
        def wait() -> bool:
            are_over = True
            for each in self._opened:
                are_over &= each.relay.drain(timeout_s if are_over else 0.0)
            return are_over

        return bool(self._run_in_data_loop(wait))

    def close(self, timeout_s: float) -> bool:
        """Close all routes and free their memory; no slice may be in flight.

        Wait up to `timeout_s` seconds for the copies in each direction of a route. If they do not
        end in time, the slots of the route are not freed, and the method does not wait for the
        copies of the remaining routes. If a route cannot be closed because of an error, the other
        routes are closed nevertheless. A warning is logged in both cases.

        Returns
        -------
        bool
            True if all copies ended or failed, so that none uses memory of this rank's GPU.
        """
        hanging: set[str] = set()
        for each in self._opened:
            self._use(each.rail, None)
            with self._logging_failures(each.via):
                limit_s = 0.0 if hanging else timeout_s
                if self._end(each, limit_s):
                    continue
                hanging.add(each.via)
                _log.warning(
                    "rank %d: copies through the memory of GPU %s did not end in time, so the "
                    "memory was not freed; end the process", self._rank, each.via,
                )  # fmt: skip
        self._opened.clear()
        for via, peer in self._peers.items():
            if peer is not None and via not in hanging:
                with self._logging_failures(via):
                    peer.close()
        self._peers.clear()
        return not hanging

    def _needed(self, health: Health) -> list[int]:
        """Return the rails whose routes `health` makes necessary and that were not tried yet.

        A rail that is down at this rank needs no route.
        """
        if all(health.share(*port) == WHOLE for port in self._meets):
            return []
        return [rail for rail in self._wanted if health.share(self._rank, rail)]

    def _end(self, opened: _Opened, timeout_s: float) -> bool:
        """Close a route if its copies end within `timeout_s`; return whether it was closed."""
        relay = opened.relay

        def settle() -> bool:
            is_over = relay.drain(timeout_s)
            relay.collect()
            return is_over

        if not self._run_in_data_loop(settle):
            return False
        try:
            self._run_in_data_loop(relay.close)
        finally:
            self._run_in_data_loop(opened.registered.close)
            opened.peer.free(opened.address)
        return True

    @contextlib.contextmanager
    def _logging_failures(self, via: str) -> Iterator[None]:
        """Log a `TransportError` of the route through GPU `via` instead of raising it."""
        try:
            yield
        except TransportError as exc:
            _log.warning(
                "rank %d: closing the PXN route through GPU %s failed: %s; check the driver's "
                "messages (dmesg, Xid)", self._rank, via, exc,
            )  # fmt: skip

    def _open(self, rail: int, via: str) -> str:
        """Open a route; return an empty string, or the reason why this process cannot open it."""
        peer = self._peer(via)
        if peer is None:
            return "this process does not see that GPU (CUDA_VISIBLE_DEVICES)"
        self._device.reach(peer)
        peer.reach(self._device)
        nbytes = self._slot_nbytes * self._nslots
        address = peer.allocate(nbytes)
        registered: Registered | None = None
        try:
            registered = self._run_in_data_loop(lambda: self._register(address, nbytes))
            relay = Relay(peer, address, self._slot_nbytes, self._nslots, home=self._device)
        except BaseException:
            if registered is not None:
                self._run_in_data_loop(registered.close)
            peer.free(address)
            raise
        self._use(rail, relay)
        self._opened.append(_Opened(rail, via, relay, peer, address, registered))
        return ""

    def _use(self, rail: int, relay: Relay | None) -> None:
        self._run_in_data_loop(lambda: self._transport.use(rail, relay))

    def _peer(self, via: str) -> Device | None:
        if via not in self._peers:
            self._peers[via] = self._open_peer(via)
        return self._peers[via]


__all__ = ["PxnRoutes"]

"""PxnRoutes: through the memory of other GPUs to the NICs beside them, once a near NIC is lost.

What `r2ccl.gpu.nic_affinity` found to be the better way to a rail is opened when the near rails are
not whole any more, here or at a rank that this one meets there: the other GPU, if this process sees
it, slots in its memory, and the use of them on that rail (`r2ccl.gpu.pxn.transport`). Until then,
and wherever that cannot be, slices go to the NIC directly, which is right, if slower.

Must not know schedules. Invariant: a pxn_route is opened before the device is given anything that
waits for the host, for opening it may wait for the device; each is tried once.
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
from r2ccl.gpu.registered_memory import Own, Register
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
    """The pxn_routes of one rank's GPU.

    Parameters
    ----------
    device : Device
    rank : int
    wanted : iterable of PxnRoute
        Their rails are numbered as the transport does.
    members, homes : sequence of int
        Ranks, this one among them, and the rails they meet on: pxn_routes are needed once one of
        these is not whole at any of them.
    transport : PxnTransport
        Carries all of them; borrowed.
    register : callable
        Registers device memory with every NIC.
    own : callable
        Runs something as the owner of the data loop.
    open_peer : callable
        Gives the GPU of a bus id, to be closed here; None: this process does not see it.
    health : callable
        Returns the newest health of all ranks' rails.
    slot_nbytes, nslots : int
        Of each pxn_route.
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
        own: Own,
        open_peer: Callable[[str], Device | None],
        health: Callable[[], Health],
        slot_nbytes: int,
        nslots: int,
    ) -> None:
        self._device = device
        self._rank = rank
        #: Those that were not tried yet, by rail.
        self._wanted = {each.rail: each.via for each in wanted}
        self._meets = [(member, rail) for member in members for rail in homes]
        self._transport = transport
        self._register = register
        self._own = own
        self._open_peer = open_peer
        self._health = health
        self._slot_nbytes = slot_nbytes
        self._nslots = nslots
        #: Version of the health that was looked at last.
        self._seen = -1
        #: By bus id; None: not visible.
        self._peers: dict[str, Device | None] = {}
        self._opened: list[_Opened] = []

    @property
    def are_due(self) -> bool:
        """Whether `open` has something to do."""
        health = self._health()
        return bool(self._wanted) and health.version != self._seen and bool(self._needed(health))

    def open(self) -> None:
        """Open what is needed with the rails as they are, as far as it can be."""
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
                "do not go through" if why else "go through", via, f": {why}" if why else "",
            )  # fmt: skip

    def drain(self, timeout_s: float) -> bool:
        """Wait until no copy is under way, at most `timeout_s`; whether none is.

        After a call that failed, with which the communicator ends: none is begun any more.
        """

        # Until the transport is closed it looks at copies too: not while they are waited for.
        def wait() -> bool:
            are_over = True
            for each in self._opened:
                are_over &= each.relay.drain(timeout_s if are_over else 0.0)
            return are_over

        return bool(self._own(wait))

    def close(self, timeout_s: float) -> bool:
        """End all pxn_routes, and free their memory where nothing works on it any more.

        No slice is under way. Where copies are not over after `timeout_s` the other GPU's memory is
        kept; one that fails keeps nothing else from being freed. Either is logged.

        Returns
        -------
        bool
            Whether nothing works on memory of this rank's GPU any more.
        """
        hanging: set[str] = set()
        for each in self._opened:
            self._use(each.rail, None)
            with self._telling(each.via):
                if self._end(each, 0.0 if hanging else timeout_s):
                    continue
                hanging.add(each.via)
                _log.warning(
                    "rank %d: copies through GPU %s are not over after %g s: its memory is kept; "
                    "end the process", self._rank, each.via, timeout_s,
                )  # fmt: skip
        self._opened.clear()
        for via, peer in self._peers.items():
            if peer is not None and via not in hanging:
                with self._telling(via):
                    peer.close()
        self._peers.clear()
        return not hanging

    def _needed(self, health: Health) -> list[int]:
        """List the rails whose pxn_routes are to be opened, as the rails are."""
        if all(health.share(*port) == WHOLE for port in self._meets):
            return []
        return [rail for rail in self._wanted if health.share(self._rank, rail)]

    def _end(self, opened: _Opened, timeout_s: float) -> bool:
        """End a pxn_route unless copies are under way; whether it did."""
        relay = opened.relay

        def settle() -> bool:
            is_over = relay.drain(timeout_s)
            relay.collect()
            return is_over

        if not self._own(settle):
            return False
        try:
            self._own(relay.close)
        finally:
            self._own(opened.registered.close)
            opened.peer.free(opened.address)
        return True

    @contextlib.contextmanager
    def _telling(self, via: str) -> Iterator[None]:
        """Log what fails of a way through another GPU."""
        try:
            yield
        except TransportError as exc:
            _log.warning("rank %d: the way through GPU %s failed: %s", self._rank, via, exc)

    def _open(self, rail: int, via: str) -> str:
        """Open a pxn_route; return why there is none."""
        peer = self._peer(via)
        if peer is None:
            return "this process does not see it (CUDA_VISIBLE_DEVICES)"
        self._device.reach(peer)
        peer.reach(self._device)
        nbytes = self._slot_nbytes * self._nslots
        address = peer.allocate(nbytes)
        registered: Registered | None = None
        try:
            registered = self._own(lambda: self._register(address, nbytes))
            relay = Relay(peer, address, self._slot_nbytes, self._nslots, home=self._device)
        except BaseException:
            if registered is not None:
                self._own(registered.close)
            peer.free(address)
            raise
        self._use(rail, relay)
        self._opened.append(_Opened(rail, via, relay, peer, address, registered))
        return ""

    def _use(self, rail: int, relay: Relay | None) -> None:
        self._own(lambda: self._transport.use(rail, relay))

    def _peer(self, via: str) -> Device | None:
        if via not in self._peers:
            self._peers[via] = self._open_peer(via)
        return self._peers[via]


__all__ = ["PxnRoutes"]

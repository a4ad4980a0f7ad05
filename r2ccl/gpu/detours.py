"""Detours: through the memory of other GPUs to the NICs beside them, once a near NIC is lost.

What `r2ccl.gpu.nearness` found to be the better way to a rail is opened when the near rails are not
whole any more, here or at a rank that this one meets there: the other GPU, if this process sees it,
slots in its memory, and the use of them on that rail (`r2ccl.transport.relayed`). Until then, and
wherever that cannot be, slices go to the NIC directly, which is right, if slower.

Must not know schedules. Invariant: a detour is opened before the device is given anything that
waits for the host, for opening it may wait for the device; each is tried once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from r2ccl.device.base import Device
from r2ccl.errors import TransportError
from r2ccl.gpu.nearness import Detour
from r2ccl.gpu.wired import Own, Register
from r2ccl.resilience.health import WHOLE, Health
from r2ccl.transport.base import Registered
from r2ccl.transport.relay import Relay
from r2ccl.transport.relayed import RelayedTransport

_log = logging.getLogger(__name__)


class _Opened(NamedTuple):
    rail: int
    relay: Relay
    peer: Device
    address: int
    registered: Registered


class Detours:
    """The detours of one rank's GPU.

    Parameters
    ----------
    device : Device
    rank : int
    wanted : iterable of Detour
        Their rails are numbered as the transport does.
    members, homes : sequence of int
        Ranks, this one among them, and the rails they meet on: detours are needed once one of
        these is not whole at any of them.
    transport : RelayedTransport
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
        Of each detour.
    """

    def __init__(
        self,
        device: Device,
        rank: int,
        wanted: Iterable[Detour],
        members: Sequence[int],
        homes: Sequence[int],
        *,
        transport: RelayedTransport,
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
        """Whether `open` may have something to do."""
        return bool(self._wanted) and self._health().version != self._seen

    def open(self) -> None:
        """Open what is needed with the rails as they are, as far as it can be."""
        health = self._health()
        self._seen = health.version
        if all(health.share(*port) == WHOLE for port in self._meets):
            return
        for rail in [each for each in self._wanted if health.share(self._rank, each)]:
            via = self._wanted.pop(rail)
            try:
                why = self._open(rail, via)
            except TransportError as exc:
                why = str(exc)
            _log.info(
                "rank %d: slices for rail %d %s GPU %s%s", self._rank, rail,
                "do not go through" if why else "go through", via, f": {why}" if why else "",
            )  # fmt: skip

    def close(self, timeout_s: float) -> None:
        """End all detours, and free their memory where nothing works on it any more.

        No slice is under way.

        Raises
        ------
        TransportError
            A device failed.
        """
        for rail, relay, peer, address, registered in self._opened:
            self._use(rail, None)
            # What hangs is kept: other rooms say so of this rank's own GPU.
            if relay.drain(timeout_s):
                relay.collect()
                relay.close()
                self._own(registered.close)
                peer.free(address)
        self._opened.clear()
        for found in self._peers.values():
            if found is not None:
                found.close()
        self._peers.clear()

    def _open(self, rail: int, via: str) -> str:
        """Open a detour; return why there is none."""
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
        self._opened.append(_Opened(rail, relay, peer, address, registered))
        return ""

    def _use(self, rail: int, relay: Relay | None) -> None:
        self._own(lambda: self._transport.use(rail, relay))

    def _peer(self, via: str) -> Device | None:
        if via not in self._peers:
            self._peers[via] = self._open_peer(via)
        return self._peers[via]


__all__ = ["Detours"]

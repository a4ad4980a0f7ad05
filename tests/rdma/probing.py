"""Two ranks in one process that join probes over a mailbox and ask each other; for the tests."""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from r2ccl.failover.connector import Answer, Connector, EndpointReady, Offer
from r2ccl.topology.hcas import GidFinder, Hca
from r2ccl.topology.neighbours import Neighbours
from r2ccl.transport.base import Joined, Probed
from r2ccl.types import ProbeKey

PATIENCE_S = 30.0
#: Two processors are emulated here: a probe must not fail because nobody ran.
PROBE_TIMEOUT_S = 1.0


def open_transport(rank: int, hcas: Sequence[Hca], fastpath: str = "0") -> Any:
    """Open a `VerbsTransport` over ports."""
    from r2ccl.transport.verbs.device import RdmaDevice
    from r2ccl.transport.verbs.registration import RegistrationCache
    from r2ccl.transport.verbs.transport import VerbsTransport

    devices = []
    for hca in hcas:
        find_gid = GidFinder(hca.name, hca.port)
        neighbours = Neighbours(find_gid.interface)
        devices.append(RdmaDevice(hca.name, hca.port, find_gid, neighbours, fastpath))
    cache = RegistrationCache([device.registrar for device in devices], 1 << 30)
    return VerbsTransport(
        rank, devices, cache, eager_nbytes=64, timeout=16, retry_cnt=3,
        probe_timeout_s=PROBE_TIMEOUT_S,
    )  # fmt: skip


class TwoRanks:
    """Ranks 0 and 1, their joiners, and the messages between them."""

    def __init__(self, ports: Sequence[Sequence[Hca]]) -> None:
        self.transports = [open_transport(rank, ports[rank]) for rank in (0, 1)]
        self.mail: deque[tuple[int, int, Offer | Answer | EndpointReady]] = deque()
        self.joiners = [self._connector(rank) for rank in (0, 1)]
        self.joined: list[ProbeKey] = []
        self.probed: list[Probed] = []
        #: Longest time the loop stood still, with Python's lock held.
        self.longest_s = 0.0

    def _connector(self, rank: int) -> Connector:
        def send(peer: int, message: Any) -> None:
            self.mail.append((rank, peer, message))

        def use(*_: object) -> None:
            raise AssertionError("there are no paths here")

        return Connector(rank, self.transports[rank], send, use, time.monotonic)

    def turn(self) -> None:
        """One round of both ranks; a probe of rank 0 that failed is joined anew."""
        began = time.monotonic()
        while self.mail:
            sender, receiver, message = self.mail.popleft()
            self.joiners[receiver].on_message(sender, message)
        for connector, transport in zip(self.joiners, self.transports, strict=True):
            connector.tick(time.monotonic())
            for event in transport.poll(0.0):
                if isinstance(event, Joined):
                    connector.on_joined(event)
                    if not event.error:
                        self.joined.append(event.key)
                elif isinstance(event, Probed):
                    self.probed.append(event)
                    if event.is_answered is False:
                        connector.begin_probe(event.key)
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        time.sleep(0.001)

    def until(self, is_done: Any, what: str) -> None:
        """Go on until `is_done`."""
        give_up = time.monotonic() + PATIENCE_S
        while not is_done():
            assert time.monotonic() < give_up, f"waited in vain for {what}"
            self.turn()

    def join(self, *keys: ProbeKey) -> None:
        """Have rank 0 join its connections."""
        for key in keys:
            self.joiners[0].begin_probe(key)
        self.until(lambda: set(keys) <= set(self.joined), f"{keys}")

    def ask(self, key: ProbeKey) -> Probed:
        """Have rank 0 probe; rank 1 does nothing meanwhile."""
        self.transports[0].probe(key)
        began = time.monotonic()
        while True:
            for event in self.transports[0].poll(PATIENCE_S):
                if isinstance(event, Probed):
                    if event.is_answered is False:
                        self.joiners[0].begin_probe(key)
                    return event
            assert time.monotonic() - began < PATIENCE_S, f"no answer about {key}"

    def close(self) -> None:
        """Free everything."""
        for connector, transport in zip(self.joiners, self.transports, strict=True):
            connector.close()
            transport.close()


@contextmanager
def silent(name: str, address: str) -> Iterator[None]:
    """Have all that interface `name` sends to `address` vanish: it goes to nobody's NIC."""
    entry = ["neigh", "replace", address, "lladdr", "02:00:00:00:00:99", "nud", "permanent"]
    ip(*entry, "dev", name)
    try:
        yield
    finally:
        ip("neigh", "del", address, "dev", name)


def ip(*words: str) -> None:
    """Run ``ip``."""
    subprocess.run(["ip", *words], check=True, timeout=PATIENCE_S)

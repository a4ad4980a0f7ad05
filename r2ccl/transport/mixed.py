"""Several transports as one: the first rails belong to the first, the next to the second ...

So one communicator holds RDMA and TCP rails, and a link moves from one kind to the other as it
moves between rails of one kind. Must not import sockets or verbs. Invariant: a path's calls and
events pass unchanged; every rail belongs to exactly one part.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from r2ccl.transport.base import Endpoint, Event, Frame, Probed, Registered, Transport
from r2ccl.transport.wakeup import Wakeup
from r2ccl.types import BYPASS, PathKey, ProbeKey


class TransportPart(Transport, Protocol):
    """A transport that can be waited for together with others."""

    def fileno(self) -> int:
        """Descriptor that is readable when an armed transport has something to report."""
        ...

    def arm(self) -> None:
        """Have the descriptor become readable at the next event; then poll once more."""
        ...

    def limit_s(self, timeout_s: float) -> float:
        """Cut a sleep of `timeout_s` short if something has to be done before its end."""
        ...


class _Registrations:
    """`Registered` with several parts."""

    def __init__(self, made: Sequence[Registered]) -> None:
        self._made = made

    def close(self) -> None:
        """End all of them."""
        for each in self._made:
            each.close()


class MixedTransport:
    """`Transport` made of others.

    Parameters
    ----------
    parts : sequence of TransportPart
        Rails in this order; a part numbers its paths by the rails of the whole. The first one, of
        sockets, has the bypasses too.
    """

    def __init__(self, parts: Sequence[TransportPart]) -> None:
        self.nrails = sum(part.nrails for part in parts)
        self._parts = parts
        rails = (part for part in parts for _ in range(part.nrails))
        self._by_rail = {**dict(enumerate(rails)), BYPASS: parts[0]}
        #: Probes that no part can make.
        self._refused: list[Event] = []
        self._epoll = select.epoll()
        # One of its own: a part's would be taken by the polls before the sleep.
        self._wakeup = Wakeup()
        self._epoll.register(self._wakeup.number, select.EPOLLIN)
        for part in parts:
            self._epoll.register(part.fileno(), select.EPOLLIN)

    def joins(self, rail: int) -> bool:
        """See `Transport.joins`."""
        return self._by_rail[rail].joins(rail)

    def offer(self, key: PathKey | ProbeKey) -> Endpoint:
        """See `Transport.offer`."""
        return self._by_rail[key.rail].offer(key)

    def open(self, path: PathKey, endpoint: Any) -> None:
        """See `Transport.open`."""
        self._by_rail[path.rail].open(path, endpoint)

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """See `Transport.allocate`: memory of the last part, the most demanding, serves all."""
        return self._parts[-1].allocate(nbytes)

    def register(self, memory: npt.NDArray[np.uint8]) -> Registered:
        """See `Transport.register`: as for `allocate`."""
        return self._parts[-1].register(memory)

    def register_device(self, address: int, nbytes: int) -> Registered:
        """See `Transport.register_device`: every part that has a rail must reach it."""
        made: list[Registered] = []
        try:
            for part in self._parts:
                if part.nrails:
                    made.append(part.register_device(address, nbytes))
        except BaseException:
            _Registrations(made).close()
            raise
        return _Registrations(made)

    def is_open(self, path: PathKey) -> bool:
        """See `Transport.is_open`."""
        return self._by_rail[path.rail].is_open(path)

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: object, is_replay: bool = False
    ) -> None:
        """See `Transport.isend`."""
        self._by_rail[path.rail].isend(path, frame, view, token, is_replay)

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        """See `Transport.irecv`."""
        self._by_rail[path.rail].irecv(path, frame, region, ack)

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """See `Transport.confirm`."""
        self._by_rail[path.rail].confirm(path, channel, ack)

    def flush(self) -> None:
        """See `Transport.flush`."""
        for part in self._parts:
            part.flush()

    def poll(self, timeout_s: float) -> list[Event]:
        """See `Transport.poll`."""
        events = self._collect()
        if events or timeout_s <= 0:
            return events
        for part in self._parts:
            part.arm()
        events = self._collect()
        if events:
            return events
        for part in self._parts:
            timeout_s = part.limit_s(timeout_s)
        for fd, _ in self._epoll.poll(timeout_s):
            if fd == self._wakeup.number:
                self._wakeup.clear()
        return self._collect()

    def wake(self) -> None:
        """See `Transport.wake`."""
        self._wakeup.wake()

    def fence(self, path: PathKey) -> None:
        """See `Transport.fence`."""
        self._by_rail[path.rail].fence(path)

    def has_unsent(self) -> bool:
        """See `Transport.has_unsent`."""
        return any(part.has_unsent() for part in self._parts)

    def is_stuck(self, path: PathKey) -> bool:
        """See `Transport.is_stuck`."""
        return self._by_rail[path.rail].is_stuck(path)

    def probe(self, key: ProbeKey) -> None:
        """See `Transport.probe`; there is no way between rails of different parts."""
        rails = range(self.nrails)
        if key.rail not in rails or key.via not in rails:
            self._refused.append(Probed(key, None, f"there are {self.nrails} rails"))
        elif self._by_rail[key.rail] is not self._by_rail[key.via]:
            self._refused.append(Probed(key, None, "the two rails are of different kinds"))
        else:
            self._by_rail[key.rail].probe(key)

    def descriptors(self) -> list[int]:
        """See `Transport.descriptors`."""
        if self._epoll.closed:
            return []
        own = [self._epoll.fileno(), self._wakeup.number]
        return own + [fd for part in self._parts for fd in part.descriptors()]

    def close(self) -> None:
        """Close every part, whatever those before it raise. Idempotent."""
        with ExitStack() as steps:  # the last one first
            steps.callback(self._close_descriptors)
            for part in reversed(self._parts):
                steps.callback(part.close)

    def _close_descriptors(self) -> None:
        if not self._epoll.closed:
            self._epoll.close()
            self._wakeup.close()

    def _collect(self) -> list[Event]:
        events, self._refused = self._refused, []
        for part in self._parts:
            events += part.poll(0.0)
        return events


__all__ = ["MixedTransport", "TransportPart"]

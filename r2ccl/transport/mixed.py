"""Transport made of several transports (parts), so that a communicator can use TCP and RDMA rails.

The rails are numbered consecutively: the first part's rails, then the second part's, and so on. A
method call for a path is forwarded to the part that has the path's rail, and that part reports the
path's events. Bypasses belong to the first part.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from r2ccl.transport.base import Endpoint, Event, Frame, MemoryUse, Probed, Registered, Transport
from r2ccl.transport.wakeup import Wakeup
from r2ccl.types import BYPASS, PathKey, ProbeKey


class TransportPart(Transport, Protocol):
    """Transport with a file descriptor, so that one epoll can wait for several transports."""

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when an event occurs after `arm`."""
        ...

    def arm(self) -> None:
        """Make the descriptor of `fileno` become readable at the next event.

        An event that occurred before this call need not make the descriptor readable. So call
        `poll` once more between `arm` and the wait.
        """
        ...

    def limit_s(self, timeout_s: float) -> float:
        """Return the time until `poll` must be called, at most `timeout_s`, in seconds."""
        ...


class _Registrations:
    """Registrations of the same memory with several parts of a `MixedTransport`."""

    def __init__(self, made: Sequence[Registered]) -> None:
        self._made = made

    def close(self) -> None:
        for each in self._made:
            each.close()


class MixedTransport:
    """`Transport` made of other transports.

    Parameters
    ----------
    parts : sequence of TransportPart
        Owned. Their rails are numbered consecutively in this order, and each part uses these
        numbers in its path keys. The first part must use sockets, because it carries the bypasses.
        Host memory is registered only with the last part, so no other part may need registration.
    """

    def __init__(self, parts: Sequence[TransportPart]) -> None:
        self.nrails = sum(part.nrails for part in parts)
        self._parts = parts
        rails = (part for part in parts for _ in range(part.nrails))
        self._by_rail = {**dict(enumerate(rails)), BYPASS: parts[0]}
        #: Outcomes of probes that no part can make, for the next `poll`.
        self._refused: list[Event] = []
        self._epoll = select.epoll()
        # A part's own wakeup would not do: the polls that precede the wait would clear it.
        self._wakeup = Wakeup()
        self._epoll.register(self._wakeup.number, select.EPOLLIN)
        for part in parts:
            self._epoll.register(part.fileno(), select.EPOLLIN)

    def joins(self, rail: int) -> bool:
        """Implement `Transport.joins`."""
        return self._by_rail[rail].joins(rail)

    def offer(self, key: PathKey | ProbeKey) -> Endpoint:
        """Forward `Transport.offer` to the part that has this rank's port of the connection."""
        return self._by_rail[key.via if isinstance(key, ProbeKey) else key.rail].offer(key)

    def open(self, path: PathKey, endpoint: Any) -> None:
        """Implement `Transport.open`."""
        self._by_rail[path.rail].open(path, endpoint)

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return `nbytes` bytes allocated by the last part; the other parts accept any memory."""
        return self._parts[-1].allocate(nbytes)

    def register(self, memory: npt.NDArray[np.uint8]) -> Registered:
        """Register `memory` with the last part; the other parts need no registration."""
        return self._parts[-1].register(memory)

    def register_device(self, address: int, nbytes: int) -> Registered:
        """Register device memory with every part that has rails, or with none if one fails.

        Raises
        ------
        TransportError
            If a part cannot register the memory.
        InvalidArgument
            If the bytes are not part of one allocation.
        """
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
        """Implement `Transport.is_open`."""
        return self._by_rail[path.rail].is_open(path)

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: object, is_replay: bool = False
    ) -> None:
        """Implement `Transport.isend`."""
        self._by_rail[path.rail].isend(path, frame, view, token, is_replay)

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        """Implement `Transport.irecv`."""
        self._by_rail[path.rail].irecv(path, frame, region, ack)

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """Implement `Transport.confirm`."""
        self._by_rail[path.rail].confirm(path, channel, ack)

    def flush(self) -> None:
        """Implement `Transport.flush`."""
        for part in self._parts:
            part.flush()

    def poll(self, timeout_s: float) -> list[Event]:
        """Poll all parts; if none has events, wait up to `timeout_s` seconds for one."""
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
        """Implement `Transport.wake`."""
        self._wakeup.wake()

    def fence(self, path: PathKey) -> None:
        """Implement `Transport.fence`."""
        self._by_rail[path.rail].fence(path)

    def memory_use(self) -> MemoryUse:
        """Implement `Transport.memory_use`."""
        return MemoryUse(*map(sum, zip(*(part.memory_use() for part in self._parts), strict=True)))

    def has_unsent(self) -> bool:
        """Implement `Transport.has_unsent`."""
        return any(part.has_unsent() for part in self._parts)

    def is_stuck(self, path: PathKey) -> bool:
        """Implement `Transport.is_stuck`."""
        return self._by_rail[path.rail].is_stuck(path)

    def probe(self, key: ProbeKey) -> None:
        """Start a probe, as `Transport.probe` does.

        ``Probed.is_answered`` is also None if the two rails belong to different parts.
        """
        rails = range(self.nrails)
        if key.rail not in rails or key.via not in rails:
            self._refused.append(Probed(key, None, f"no such rail: there are {self.nrails}"))
        elif self._by_rail[key.rail] is not self._by_rail[key.via]:
            self._refused.append(Probed(key, None, "the two rails belong to different transports"))
        else:
            self._by_rail[key.rail].probe(key)

    def descriptors(self) -> list[int]:
        """Return the descriptors of epoll, wakeup and all parts; empty after `close`."""
        if self._epoll.closed:
            return []
        own = [self._epoll.fileno(), self._wakeup.number]
        return own + [fd for part in self._parts for fd in part.descriptors()]

    def close(self) -> None:
        """Close every part, even if closing another one raises. Idempotent."""
        with ExitStack() as steps:  # callbacks run last to first
            steps.callback(self._close_descriptors)
            for part in reversed(self._parts):
                steps.callback(part.close)

    def _close_descriptors(self) -> None:
        # Both are idempotent: a close that Ctrl-C interrupted between them is repeated.
        self._epoll.close()
        self._wakeup.close()

    def _collect(self) -> list[Event]:
        events, self._refused = self._refused, []
        for part in self._parts:
            events += part.poll(0.0)
        return events


__all__ = ["MixedTransport", "TransportPart"]

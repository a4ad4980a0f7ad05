"""A transport around a transport that lets a fault plan strike at a given slice.

The library has no "if testing": whoever wants faults wraps the transport. Under a netlab the fault
is applied to the real NIC by the lab; without one, ``nic_down`` silences this rank's connections of
the rail and reports them as failed. They come back by being dialed again.

Invariant: with no fault left, a call costs one comparison more than the inner transport's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl.errors import InvalidArgument
from r2ccl.testing.faults import Action
from r2ccl.testing.faults_reporter import Due, FaultReporter
from r2ccl.transport.base import Endpoint, Event, Failed, Frame, Registered, Transport
from r2ccl.types import PathKey, ProbeKey


class ReportingTransport:
    """Reports each slice posted, then passes it on.

    Parameters
    ----------
    inner : Transport
    make_reporter : callable
        Takes what applies a fault of this rank; returns who is told of its slices, None: nobody.
    """

    def __init__(
        self,
        inner: Transport,
        make_reporter: Callable[[Callable[[Due], None]], FaultReporter | None],
    ) -> None:
        self.nrails = inner.nrails
        self._inner = inner
        #: Slices number the collectives of a communicator from 1; plans those of its user, from 0.
        self._first_op: int | None = None
        self._op = 0
        self._step = 0
        #: Paths whose failure is on its way to the owner: nothing is sent on them any more.
        self._silent: set[PathKey] = set()
        self._injected: list[Event] = []
        self._open: set[PathKey] = set()
        self._reporter = make_reporter(self._cut)

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: object, is_replay: bool = False
    ) -> None:
        """Report the slice, which may break the rail it is about to ride, and send it."""
        if self._reporter is not None and self._first_op is not None:
            if frame.op != self._op:
                self._op, self._step = frame.op, 0
            self._reporter.at(frame.op - self._first_op, self._step)
            self._step += 1
        if path not in self._silent:
            self._inner.isend(path, frame, view, token, is_replay)

    def begin(self, first_op: int) -> None:
        """From collective `first_op` on the communicator is its user's."""
        self._first_op = first_op

    def joins(self, rail: int) -> bool:
        """See `Transport.joins`."""
        return self._inner.joins(rail)

    def offer(self, key: PathKey | ProbeKey) -> Endpoint:
        """See `Transport.offer`."""
        return self._inner.offer(key)

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """See `Transport.allocate`."""
        return self._inner.allocate(nbytes)

    def register(self, memory: npt.NDArray[np.uint8]) -> Registered:
        """See `Transport.register`."""
        return self._inner.register(memory)

    def register_device(self, address: int, nbytes: int) -> Registered:
        """See `Transport.register_device`."""
        return self._inner.register_device(address, nbytes)

    def open(self, path: PathKey, endpoint: Any) -> None:
        """See `Transport.open`."""
        self._open.add(path)
        self._inner.open(path, endpoint)

    def is_open(self, path: PathKey) -> bool:
        """See `Transport.is_open`."""
        return self._inner.is_open(path)

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        """See `Transport.irecv`."""
        if path not in self._silent:
            self._inner.irecv(path, frame, region, ack)

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """See `Transport.confirm`."""
        if path not in self._silent:
            self._inner.confirm(path, channel, ack)

    def flush(self) -> None:
        """See `Transport.flush`."""
        self._inner.flush()

    def poll(self, timeout_s: float) -> list[Event]:
        """See `Transport.poll`; a cut path reports its failure first."""
        events = self._inner.poll(0.0 if self._injected else timeout_s)
        injected, self._injected = self._injected, []
        return injected + events

    def wake(self) -> None:
        """See `Transport.wake`."""
        self._inner.wake()

    def fence(self, path: PathKey) -> None:
        """See `Transport.fence`."""
        self._open.discard(path)
        self._silent.discard(path)
        self._inner.fence(path)

    def has_unsent(self) -> bool:
        """See `Transport.has_unsent`."""
        return self._inner.has_unsent()

    def is_stuck(self, path: PathKey) -> bool:
        """See `Transport.is_stuck`."""
        return self._inner.is_stuck(path)

    def probe(self, key: ProbeKey) -> None:
        """See `Transport.probe`."""
        self._inner.probe(key)

    def descriptors(self) -> list[int]:
        """See `Transport.descriptors`."""
        return self._inner.descriptors()

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()

    def _cut(self, due: Due) -> None:
        """Break this rank's paths on the fault's rail."""
        fault = due.fault
        if fault.action is not Action.NIC_DOWN:
            raise InvalidArgument(
                f"fault {fault.action}: without a netlab only nic_down can be applied"
            )
        for path in [path for path in self._open if path.rail == fault.rail]:
            if self._inner.is_open(path) and path not in self._silent:
                self._silent.add(path)
                self._injected.append(Failed(path, "ENETDOWN", "cut by the fault plan"))


__all__ = ["ReportingTransport"]

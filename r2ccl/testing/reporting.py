"""Transport wrapper that applies the faults of a plan at given slices.

Tests inject faults by wrapping the transport, so the rest of the library contains no test code. In
a netlab the lab applies each fault. Without a netlab, the only fault is ``nic_down``, and its node
must be the number of the rank that triggers the fault. The wrapper then stops sending on this
rank's connections of the rail and reports the connections as failed; the library reconnects them.

The wrapper adds one method call to each call of the transport, and a few comparisons to each slice
sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl.errors import InvalidArgument
from r2ccl.testing.faults import Action
from r2ccl.testing.faults_reporter import Due, FaultReporter
from r2ccl.transport.base import (
    Endpoint,
    Event,
    Failed,
    Frame,
    MemoryUse,
    Registered,
    Transport,
)
from r2ccl.types import PathKey, ProbeKey


class ReportingTransport:
    """Transport that reports slices of the user's collectives to a `FaultReporter`, and sends them.

    Parameters
    ----------
    inner : Transport
        The transport that does the work; `close` closes it.
    make_reporter : callable
        Function that returns the reporter of the rank, or None if there is no plan. It is called
        once, with a function that applies the fault of a `Due` to this rank's connections.
    """

    def __init__(
        self,
        inner: Transport,
        make_reporter: Callable[[Callable[[Due], None]], FaultReporter | None],
    ) -> None:
        self.nrails = inner.nrails
        self._inner = inner
        #: Number of the user's first collective. Frames count all collectives of the
        #: communicator from 1; fault plans count only the user's, from 0.
        self._first_op: int | None = None
        #: Newest collective of which this rank has posted a slice, and the number of its slices
        #: posted so far, including those posted again.
        self._op = 0
        self._step = 0
        #: Paths cut by a fault and not opened again: nothing new is queued on them.
        self._silent: set[PathKey] = set()
        self._injected: list[Event] = []
        self._open: set[PathKey] = set()
        self._reporter = make_reporter(self._cut)

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: object, is_replay: bool = False
    ) -> None:
        """Report a slice, so that the faults due before it are applied, and send the slice.

        Only slices of the user's newest collective are reported. A slice on a path that a fault has
        cut is not sent.

        Raises
        ------
        TransportTimeout, InvalidArgument
            If a fault that is due cannot be applied; see `FaultReporter.at`.
        """
        if self._reporter is not None and self._first_op is not None:
            if frame.op > self._op:
                self._op, self._step = frame.op, 0
            # Slices of older collectives do not count: their faults can no longer fire.
            if frame.op == self._op:
                self._reporter.at(frame.op - self._first_op, self._step)
                self._step += 1
        if path not in self._silent:
            self._inner.isend(path, frame, view, token, is_replay)

    def begin(self, first_op: int) -> None:
        """Count collective `first_op` as the user's first; earlier collectives get no faults."""
        self._first_op = first_op

    def joins(self, rail: int) -> bool:
        """Forward to `Transport.joins` of the inner transport."""
        return self._inner.joins(rail)

    def offer(self, key: PathKey | ProbeKey) -> Endpoint:
        """Forward to `Transport.offer` of the inner transport."""
        return self._inner.offer(key)

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Forward to `Transport.allocate` of the inner transport."""
        return self._inner.allocate(nbytes)

    def register(self, memory: npt.NDArray[np.uint8]) -> Registered:
        """Forward to `Transport.register` of the inner transport."""
        return self._inner.register(memory)

    def register_device(self, address: int, nbytes: int) -> Registered:
        """Forward to `Transport.register_device` of the inner transport."""
        return self._inner.register_device(address, nbytes)

    def open(self, path: PathKey, endpoint: Any) -> None:
        """Forward to the inner transport; a path that an earlier fault cut is no longer cut."""
        self._open.add(path)
        self._silent.discard(path)
        self._inner.open(path, endpoint)

    def is_open(self, path: PathKey) -> bool:
        """Return False for a cut path; otherwise forward to the inner transport."""
        return path not in self._silent and self._inner.is_open(path)

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        """Forward to the inner transport unless the path is cut."""
        if path not in self._silent:
            self._inner.irecv(path, frame, region, ack)

    def confirm(self, path: PathKey, channel: int, ack: int) -> None:
        """Forward to the inner transport unless the path is cut."""
        if path not in self._silent:
            self._inner.confirm(path, channel, ack)

    def flush(self) -> None:
        """Forward to `Transport.flush` of the inner transport."""
        self._inner.flush()

    def poll(self, timeout_s: float) -> list[Event]:
        """Return the failures of newly cut paths, followed by the inner transport's events.

        The inner transport's own `Failed` of a cut path is left out, because a path must report
        `Failed` only once.
        """
        events = self._inner.poll(0.0 if self._injected else timeout_s)
        if self._silent:
            events = [
                event
                for event in events
                if not (isinstance(event, Failed) and event.path in self._silent)
            ]
        injected, self._injected = self._injected, []
        return injected + events

    def wake(self) -> None:
        """Forward to `Transport.wake` of the inner transport."""
        self._inner.wake()

    def fence(self, path: PathKey) -> None:
        """Forward to `Transport.fence` of the inner transport, also for a cut path."""
        self._open.discard(path)
        self._inner.fence(path)

    def memory_use(self) -> MemoryUse:
        """Forward to `Transport.memory_use` of the inner transport."""
        return self._inner.memory_use()

    def has_unsent(self) -> bool:
        """Forward to `Transport.has_unsent` of the inner transport."""
        return self._inner.has_unsent()

    def is_stuck(self, path: PathKey) -> bool:
        """Forward to `Transport.is_stuck` of the inner transport."""
        return self._inner.is_stuck(path)

    def probe(self, key: ProbeKey) -> None:
        """Forward to `Transport.probe` of the inner transport."""
        self._inner.probe(key)

    def descriptors(self) -> list[int]:
        """Forward to `Transport.descriptors` of the inner transport."""
        return self._inner.descriptors()

    def close(self) -> None:
        """Forward to `Transport.close` of the inner transport."""
        self._inner.close()

    def _cut(self, due: Due) -> None:
        """Report this rank's open paths on the fault's rail as failed, and stop sending on them.

        Raises
        ------
        InvalidArgument
            If the fault is not ``nic_down`` (no other works without a netlab), its node is not this
            rank, or its rail does not exist.
        """
        fault = due.fault
        if fault.action is not Action.NIC_DOWN:
            raise InvalidArgument(
                f"rank {due.rank}: fault {fault}: without a netlab, only nic_down can be applied; "
                "run under `r2ccl netlab`"
            )
        if fault.node != due.rank:
            raise InvalidArgument(
                f"rank {due.rank}: fault {fault}: without a netlab, a rank can only cut its own "
                f"connections; give it node={due.rank}, or run under `r2ccl netlab`"
            )
        if fault.rail not in range(self.nrails):
            raise InvalidArgument(
                f"rank {due.rank}: fault {fault}: rail {fault.rail} does not exist; allowed is "
                f"0 to {self.nrails - 1}"
            )
        for path in [path for path in self._open if path.rail == fault.rail]:
            if self.is_open(path):
                self._silent.add(path)
                self._injected.append(Failed(path, "ENETDOWN", "cut by the fault plan"))


__all__ = ["ReportingTransport"]

"""Reactions of a node of the verbs bench to the events of a path, per kind of run.

A separate `Role` drives each path, through the transport interface alone, in the order in which the
library calls it. A role is done when its peer has confirmed all slices, or when it has sent that
confirmation itself.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque

from verbs_pair import Run

from r2ccl.config import Config
from r2ccl.transport.base import Arrived, Cleared, Confirmed, Event, Frame, Transport
from r2ccl.types import PathKey

_EAGER_NBYTES = Config().eager_nbytes


class Side:
    """One end of one path during one run: its memory, and the frames of its slices."""

    def __init__(self, transport: Transport, path: PathKey, run: Run) -> None:
        self.transport = transport
        self.path = path
        self.run = run
        slots = run.window if run.kind == "slices" else 1
        memory = memoryview(transport.allocate(slots * run.nbytes))  # type: ignore[arg-type]
        memory[:] = bytes(len(memory))  # touches every page: no page faults later
        self._slots = [memory[at : at + run.nbytes] for at in range(0, len(memory), run.nbytes)]

    def slot(self, seq: int) -> memoryview:
        """Return the memory of slice `seq`."""
        return self._slots[seq % len(self._slots)]

    def send(self, seq: int, token: object = None) -> None:
        """Send slice `seq`."""
        self.transport.isend(self.path, self._frame(seq), self.slot(seq), token)

    def want(self, seq: int, nconsumed: int) -> None:
        """Name the landing place of slice `seq`; the frame also confirms `nconsumed` slices."""
        self.transport.irecv(self.path, self._frame(seq, ack=nconsumed), self.slot(seq))

    def keep(self, event: Arrived) -> None:
        """Copy an eager payload to the place of its slice."""
        if event.payload is not None:
            self.slot(event.frame.seq)[: len(event.payload)] = event.payload

    def reply(self) -> None:
        """Confirm to the sender that all slices have arrived."""
        self.transport.isend(self.path, self._frame(self.run.count), memoryview(b""), None)

    def _frame(self, seq: int, ack: int = 0) -> Frame:
        return Frame(self.path.rail, seq, ack, 1, 0)


class Role(ABC):
    """Behaviour of one end of one path in one run.

    Parameters
    ----------
    side : Side
    """

    def __init__(self, side: Side) -> None:
        self.is_done = False
        #: Round trips in seconds; empty for runs that do not measure latency.
        self.trips_s: list[float] = []
        self._side = side

    @abstractmethod
    def start(self) -> None:
        """Start the run: do everything that needs no event."""

    @abstractmethod
    def on(self, event: Event) -> None:
        """React to an event of the path."""


class SliceSource(Role):
    """Sender of cleared slices: sends each when its landing place is known."""

    def start(self) -> None:
        """Do nothing: no slice can be sent without a landing place."""

    def on(self, event: Event) -> None:
        """Send the slice whose landing place was named; finish at the reply."""
        if isinstance(event, Cleared):
            self._side.send(event.frame.seq, event.token)
        elif isinstance(event, Arrived):
            self.is_done = True


class SliceSink(Role):
    """Receiver of cleared slices: keeps `Run.window` landing places named."""

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        self._narrived = 0

    def start(self) -> None:
        """Name the first landing places."""
        for seq in range(min(self._side.run.window, self._side.run.count)):
            self._side.want(seq, 0)

    def on(self, event: Event) -> None:
        """Name the next landing place; reply after the last slice."""
        if isinstance(event, Arrived):
            run = self._side.run
            self._narrived += 1
            if event.frame.seq + run.window < run.count:
                self._side.want(event.frame.seq + run.window, self._narrived)
            if self._narrived == run.count:
                self._side.reply()
                self.is_done = True


class MessageSource(Role):
    """Sender of eager slices: keeps `Run.window` of them unconfirmed."""

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        self._sent = 0

    def start(self) -> None:
        """Send the first slices."""
        self._send_below(self._side.run.window)

    def on(self, event: Event) -> None:
        """Send as many slices as were confirmed; finish at the reply."""
        if isinstance(event, Confirmed):
            self._send_below(event.ack + self._side.run.window)
        elif isinstance(event, Arrived):
            self.is_done = True

    def _send_below(self, end: int) -> None:
        for seq in range(self._sent, min(end, self._side.run.count)):
            self._side.send(seq)
            self._sent = seq + 1


class MessageSink(Role):
    """Receiver of eager slices: confirms half a window at a time, as the library does."""

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        self._narrived = 0

    def start(self) -> None:
        """Do nothing: eager slices need no landing place."""

    def on(self, event: Event) -> None:
        """Copy an eager slice and confirm; reply after the last slice."""
        if isinstance(event, Arrived):
            side = self._side
            side.keep(event)
            self._narrived += 1
            if self._narrived % max(1, side.run.window // 2) == 0:
                side.transport.confirm(side.path, side.path.rail, self._narrived)
            if self._narrived == side.run.count:
                side.reply()
                self.is_done = True


class PingPong(Role):
    """Either end of a latency run: one slice goes back and forth, landing places one ahead."""

    def __init__(self, side: Side, is_first: bool) -> None:
        super().__init__(side)
        self._is_first = is_first
        self._is_eager = side.run.nbytes <= _EAGER_NBYTES
        self._tokens: deque[object] = deque()
        self._narrived = 0
        self._nsent = 0
        self._sent_s = 0.0

    def start(self) -> None:
        """Name the first landing place; the first node sends."""
        if not self._is_eager:
            self._side.want(0, 0)
        self._send()

    def on(self, event: Event) -> None:
        """Receive a slice or a landing place, and send the next slice."""
        if isinstance(event, Cleared):
            self._tokens.append(event.token)
        elif isinstance(event, Arrived):
            self._take(event)
        self._send()
        self.is_done = self._narrived == self._nsent == self._side.run.count

    def _take(self, event: Arrived) -> None:
        if self._nsent:
            self.trips_s.append(time.monotonic() - self._sent_s)
        self._side.keep(event)
        self._narrived += 1
        if not self._is_eager and self._narrived < self._side.run.count:
            self._side.want(self._narrived, self._narrived)

    def _send(self) -> None:
        is_turn = self._nsent < min(self._narrived + self._is_first, self._side.run.count)
        if is_turn and (self._is_eager or self._tokens):
            self._sent_s = time.monotonic()
            self._side.send(self._nsent, None if self._is_eager else self._tokens.popleft())
            self._nsent += 1


def role_of(node: int, side: Side) -> Role:
    """Return the role of this node's end."""
    if side.run.kind == "latency":
        return PingPong(side, is_first=node == 0)
    if side.run.kind == "slices":
        return SliceSink(side) if node else SliceSource(side)
    return MessageSink(side) if node else MessageSource(side)


__all__ = ["Role", "Side", "role_of"]

"""Regroup: from a communicator that lost ranks to the one its survivors go on with.

`r2ccl.failover.shrink.protocol` says who agrees on whom, and when it is safe to go on; here it
meets the old communicator's control plane, whose sessions between survivors outlive its data plane,
and the clock. What others say may come before this rank knows of any failure, so `EventQueue`
listens from the communicator's first day. Only the old control plane says who is gone: one that a
successor lost and the old control plane did not was late, and is met again.

The calling thread owns the table and connects the new communicator; the control thread only queues
what it hears, and interrupts a connecting that has become pointless. This module does not know what
a communicator is, beyond `Successor`. Invariants: every wait ends by the deadline; of the
successors made, the one that is returned is the only one left open.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Generic, Protocol, TypeAlias, TypeVar

from r2ccl.bootstrap.control import ControlHandler, ControlPlane
from r2ccl.bootstrap.messages import Goodbye
from r2ccl.bootstrap.succession import Succession
from r2ccl.clock import monotonic
from r2ccl.errors import CommunicatorRevoked, NoQuorum, PeerLost, TransportTimeout
from r2ccl.failover.shrink.protocol import Built, Done, Message, Shrinking, ShrinkStep, View

_log = logging.getLogger(__name__)

#: A successor that could not be connected is tried again after this long, unless the old control
#: plane says before who is gone, or that others try again.
_RETRY_S = 0.5

#: A peer, and what it said, or why it is gone.
News: TypeAlias = tuple[int, Message | str]


class Successor(Protocol):
    """What is made of the survivors: a communicator that is not connected yet."""

    def connect(self) -> None:
        """Connect it, or raise and leave nothing open."""
        ...

    def revoke(self, why: str) -> None:
        """End it everywhere; from any thread, at once. A `connect` under way raises."""
        ...

    def abort(self, why: str) -> None:
        """Leave it in bounded time."""
        ...


_S = TypeVar("_S", bound=Successor)


class Building:
    """A successor that is being connected, and what makes that pointless."""

    def __init__(
        self, members: Collection[int], give_up_at: float, revoke: Callable[[str], None]
    ) -> None:
        self.give_up_at = give_up_at
        self.is_stopped = False
        self._members = frozenset(members)
        self._revoke = revoke

    def is_upset_by(self, news: News) -> bool:
        """Whether a member is lost, or starts over; that others are done is no reason to stop."""
        peer, what = news
        return peer in self._members and not isinstance(what, Built)

    def stop(self, why: str) -> None:
        """Have `Successor.connect` raise."""
        if not self.is_stopped:
            self.is_stopped = True
            self._revoke(why)


class EventQueue:
    """Handler of a control plane: keeps what concerns shrinking, passes the rest on.

    Parameters
    ----------
    handler : ControlHandler
        The engine; it is told of losses too.
    """

    def __init__(self, handler: ControlHandler) -> None:
        self._handler = handler
        self._news: deque[News] = deque()
        self._changed = threading.Condition()
        self._building: Building | None = None
        #: Why nothing is to be made of what is heard, empty: it is.
        self._end = ""

    # Called in the control thread

    def on_message(self, peer: int, message: object) -> None:
        """See `ControlHandler.on_message`."""
        if isinstance(message, View | Built | Done):
            self._put((peer, message))
            return
        if isinstance(message, Goodbye):
            self._put((peer, "it left"))
        self._handler.on_message(peer, message)

    def on_path(self, peer: int, rail: int, epoch: int, sock: socket.socket) -> None:
        """See `ControlHandler.on_path`."""
        self._handler.on_path(peer, rail, epoch, sock)

    def on_peer_lost(self, peer: int, why: str, last_heard_s: float) -> None:
        """See `ControlHandler.on_peer_lost`."""
        self._put((peer, why))
        self._handler.on_peer_lost(peer, why, last_heard_s)

    def on_tick(self, now: float) -> None:
        """See `ControlHandler.on_tick`."""
        self._handler.on_tick(now)
        building = self._building
        if building is not None and now >= building.give_up_at:
            building.stop("shrink() is out of time")

    def _put(self, news: News) -> None:
        with self._changed:
            self._news.append(news)
            self._changed.notify_all()
            building = self._building
        if building is not None and building.is_upset_by(news):
            building.stop(f"shrink() starts over because of rank {news[0]}")

    # Called by any thread

    def end(self, why: str) -> None:
        """Have a shrinking that is under way, and any later one, raise."""
        with self._changed:
            self._end = self._end or why
            self._changed.notify_all()
            building = self._building
        if building is not None:
            building.stop(why)

    # Called by the user's thread

    def take(self, timeout_s: float) -> News | None:
        """Return the oldest news, or None if there is none within `timeout_s`.

        Raises
        ------
        CommunicatorRevoked
            It was ended.
        """
        with self._changed:
            has_some = self._changed.wait_for(lambda: self._news or self._end, timeout_s)
            if self._end:
                raise CommunicatorRevoked(f"shrink() was broken off: {self._end}")
            return self._news.popleft() if has_some else None

    @contextlib.contextmanager
    def during(self, building: Building) -> Iterator[None]:
        """Stop `building` as soon as it is pointless, which it may be already."""
        with self._changed:
            self._building = building
            upset = [news for news in self._news if building.is_upset_by(news)]
        if upset:
            building.stop(f"shrink() starts over because of rank {upset[0][0]}")
        try:
            yield
        finally:
            self._building = None


def regroup(
    table: Shrinking,
    event_queue: EventQueue,
    control: ControlPlane,
    make: Callable[[ControlPlane, tuple[int, ...]], _S],
) -> _S:
    """Agree with the other survivors who they are, and connect their communicator.

    *Collective*: all ranks that are left. `control` is the caller's to close, afterwards, so that
    what was said last is heard.

    Parameters
    ----------
    table : Shrinking
        A fresh one.
    event_queue : EventQueue
        The handler of `control` since its start.
    control : ControlPlane
        The old one, running. Its data plane must not be used any more.
    make : callable
        Takes the new control plane, which it owns even if it raises, and the old ranks of its
        members; returns the successor.

    Raises
    ------
    NoQuorum
        Too few are left, as this rank sees it.
    TransportTimeout
        Some rank did not call, or could not be connected, within ``config.init_timeout_s``; names
        it.
    TransportError
        No rail can be opened again.
    """
    attempt = _Regrouping(table, event_queue, control, make)
    try:
        return attempt.run()
    finally:
        attempt.close()


class _Regrouping(Generic[_S]):
    def __init__(
        self,
        table: Shrinking,
        event_queue: EventQueue,
        control: ControlPlane,
        make: Callable[[ControlPlane, tuple[int, ...]], _S],
    ) -> None:
        self._table = table
        self._event_queue = event_queue
        self._control = control
        self._make = make
        self._timeout_s = control.setting.config.init_timeout_s
        self._give_up_at = monotonic() + self._timeout_s
        #: Listeners that the last View told of.
        self._succession: Succession | None = None
        self._held: _S | None = None
        self._failure: PeerLost | CommunicatorRevoked | None = None
        #: When a failure that nothing here explains has all survivors meet again.
        self._retry_at = math.inf

    def run(self) -> _S:
        """Do what the table says, until it says that it is over."""
        while True:
            step = self._table.step
            if step is ShrinkStep.GO_ON:
                return self._go_on()
            # What is known already may change the step, and a step costs more than a look.
            news = self._event_queue.take(0.0)
            if news is not None:
                self._hear(news)
            elif step is ShrinkStep.STOP:
                raise NoQuorum(
                    rank=self._control.rank,
                    nranks=self._control.nranks,
                    alive=self._table.alive,
                    gone=self._table.gone,
                )
            elif step is ShrinkStep.TELL:
                self._tell()
            elif step is ShrinkStep.BUILD:
                self._build()
            else:
                self._wait()

    def close(self) -> None:
        """Leave what is not returned; bounded."""
        self._drop()
        if self._succession is not None:
            self._succession.close()

    def _hear(self, news: News) -> None:
        peer, what = news
        if isinstance(what, str):
            self._table.lost(peer, what)
        else:
            self._table.heard(peer, what)

    def _tell(self) -> None:
        self._retry_at = math.inf
        if self._succession is not None:
            self._succession.close()
        self._succession = Succession(self._control)
        self._control.broadcast(self._table.tell(self._succession.peer_info))
        _log.info(
            "rank %d: shrinking without ranks %s, attempt %d",
            self._control.rank, self._gone(), self._table.attempt + 1,
        )  # fmt: skip

    def _build(self) -> None:
        infos = self._table.begin_building()
        self._drop()
        assert self._succession is not None, "a View was told"
        members = tuple(infos)
        successor = self._make(self._succession.make(infos, self._table.attempt), members)
        building = Building(members, self._give_up_at, successor.revoke)
        try:
            with self._event_queue.during(building):
                successor.connect()
        except (PeerLost, CommunicatorRevoked) as exc:
            # Whoever is gone will be heard of here, and that decides. But one that was only late
            # is lost there alone.
            self._failure = exc
            self._retry_at = monotonic() + _RETRY_S
            _log.info("rank %d: not connected: %s", self._control.rank, exc)
            return
        if building.is_stopped:
            successor.abort("shrink() starts over")
            return
        self._held = successor
        self._control.broadcast(self._table.built())

    def _go_on(self) -> _S:
        assert self._held is not None, "nothing was built"
        held, self._held = self._held, None
        self._control.broadcast(self._table.go_on())
        return held

    def _wait(self) -> None:
        until = min(self._give_up_at, self._retry_at)
        news = self._event_queue.take(max(0.0, until - monotonic()))
        if news is not None:
            self._hear(news)
        elif until == self._retry_at:
            self._retry_at = math.inf
            self._table.not_built()
        else:
            raise TransportTimeout(
                f"rank {self._control.rank}: shrink() gave up after {self._timeout_s:g} s: "
                f"{self._missing()}; look at their logs, or raise R2CC_INIT_TIMEOUT_S",
                rank=self._control.rank,
            ) from self._failure

    def _missing(self) -> str:
        if absent := self._table.absent():
            return f"ranks {absent} have not called shrink()"
        if undecided := self._table.undecided():
            attempt = f", for attempt {self._table.attempt + 1}" * bool(self._table.attempt)
            return f"ranks {undecided} have not said that ranks {self._gone()} are gone{attempt}"
        return f"ranks {self._table.unbuilt()} have not connected ({self._failure or 'silent'})"

    def _gone(self) -> list[int]:
        return sorted(self._table.gone)

    def _drop(self) -> None:
        if self._held is not None:
            self._held.abort("shrink() did not go on with it")
            self._held = None


__all__ = ["Building", "EventQueue", "News", "Successor", "regroup"]

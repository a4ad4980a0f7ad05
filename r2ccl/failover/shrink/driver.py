"""Driver of shrink: builds the communicator of the ranks that survived a failure.

`r2ccl.failover.shrink.protocol` decides which ranks are members and when the new communicator may
be used. This module connects the protocol to a clock and to the control plane of the old
communicator, whose sessions between survivors remain open after its data plane has failed. A
message from another rank may arrive before this rank knows of any failure, so an `EventQueue`
receives the control messages from the start of the communicator. The new communicator is called
the *successor*. A failure to connect the successor does not show that a rank is gone: only the old
control planes report lost ranks. If these control planes still reach all members, a member was only
late, and the survivors make another attempt with the same members.

The thread that calls `regroup` owns the `Shrinking` state machine and connects the successor. For
shrink, the control thread only queues events, and interrupts a connection attempt that can no
longer succeed.

Invariants: every wait ends by the deadline; when `regroup` ends, every successor that it does not
return is closed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

from r2ccl.bootstrap.control import ControlHandler, ControlPlane
from r2ccl.bootstrap.messages import Goodbye
from r2ccl.bootstrap.succession import Succession
from r2ccl.clock import monotonic
from r2ccl.errors import CommunicatorRevoked, NoQuorum, PeerLost, TransportTimeout
from r2ccl.failover.shrink.protocol import Built, Done, Message, Shrinking, ShrinkStep, View

_log = logging.getLogger(__name__)

#: Time after which a failed connection attempt is repeated, in seconds. A loss or a new View that
#: arrives earlier starts the next attempt at once.
_RETRY_S = 0.5

#: Event: a peer, with its message or, as text, the reason why it is gone.
News: TypeAlias = tuple[int, Message | str]


class Successor(Protocol):
    """New communicator of the survivors, as `regroup` uses it; initially not connected."""

    def connect(self) -> None:
        """Connect to all members, or raise and leave nothing open.

        Raises
        ------
        PeerLost, CommunicatorRevoked
            If a member cannot be connected, or `revoke` was called; `regroup` tries again.
        R2cclError
            Any other error, which ends `regroup`.
        """
        ...

    def revoke(self, why: str) -> None:
        """End the communicator on all ranks, so that a running `connect` raises.

        Any thread may call this method. It does not block.
        """
        ...

    def abort(self, why: str) -> None:
        """Close this rank's end in bounded time; `why` is the reason, for messages."""
        ...


_S = TypeVar("_S", bound=Successor)


class Building:
    """Attempt to connect a successor, with the conditions that end the attempt early.

    Parameters
    ----------
    members : collection of int
        Ranks of the members in the old communicator.
    give_up_at : float
        Clock reading in seconds at which the attempt times out.
    revoke : callable
        ``revoke(why)``: `Successor.revoke` of the successor.
    """

    def __init__(
        self, members: Collection[int], give_up_at: float, revoke: Callable[[str], None]
    ) -> None:
        self.give_up_at = give_up_at
        self.is_stopped = False
        self._members = frozenset(members)
        self._revoke = revoke

    def is_upset_by(self, news: News) -> bool:
        """Return whether `news` makes this attempt pointless.

        The attempt is pointless once a member is lost, or has sent any message other than `Built`:
        that member no longer takes part in this attempt.
        """
        peer, what = news
        return peer in self._members and not isinstance(what, Built)

    def stop(self, why: str) -> None:
        """Make `Successor.connect` raise, with the reason `why`.

        Only the first call has an effect. Any thread may call it.
        """
        if not self.is_stopped:
            self.is_stopped = True
            self._revoke(why)


class EventQueue:
    """Control handler that queues the events that shrink needs, and passes on other events.

    Parameters
    ----------
    rank : int
        This rank in the old communicator, for errors.
    handler : ControlHandler
        Handler (the engine) that gets all events except the messages of shrink. Losses and
        `Goodbye` messages are queued here and also passed to the handler.
    """

    def __init__(self, rank: int, handler: ControlHandler) -> None:
        self._rank = rank
        self._handler = handler
        self._news: deque[News] = deque()
        self._changed = threading.Condition()
        self._building: Building | None = None
        #: Reason why shrink was cancelled; empty: it was not.
        self._end = ""

    # Called by the control thread

    def on_message(self, peer: int, message: object) -> None:
        """Queue a message of shrink; pass any other message to the handler.

        `Goodbye` is passed on and also queued, as the loss of `peer`.
        """
        if isinstance(message, View | Built | Done):
            self._put((peer, message))
            return
        if isinstance(message, Goodbye):
            self._put((peer, "it left"))
        self._handler.on_message(peer, message)

    def on_path(self, peer: int, rail: int, epoch: int, sock: socket.socket) -> None:
        """Pass the connection of a path to the handler."""
        self._handler.on_path(peer, rail, epoch, sock)

    def on_peer_lost(self, peer: int, why: str, last_heard_s: float | None) -> None:
        """Queue the loss of `peer` and pass it to the handler."""
        self._put((peer, why))
        self._handler.on_peer_lost(peer, why, last_heard_s)

    def on_tick(self, now: float) -> None:
        """Pass the tick to the handler, and stop a connection attempt that has timed out."""
        self._handler.on_tick(now)
        building = self._building
        if building is not None and now >= building.give_up_at:
            building.stop("shrink() timed out")

    def _put(self, news: News) -> None:
        with self._changed:
            self._news.append(news)
            self._changed.notify_all()
            building = self._building
        if building is not None and building.is_upset_by(news):
            building.stop(_starts_over(news[0]))

    # Called by any thread

    def end(self, why: str) -> None:
        """Cancel shrink for the reason `why`.

        A running call of `regroup` raises `CommunicatorRevoked`, unless it is about to return. All
        later calls raise the same error.
        """
        with self._changed:
            self._end = self._end or why
            self._changed.notify_all()
            building = self._building
        if building is not None:
            building.stop(why)

    # Called by the user's thread

    def take(self, timeout_s: float) -> News | None:
        """Return the oldest event, or None if none arrives within `timeout_s` seconds.

        Raises
        ------
        CommunicatorRevoked
            If `end` was called.
        """
        with self._changed:
            has_some = self._changed.wait_for(lambda: self._news or self._end, timeout_s)
            if self._end:
                raise CommunicatorRevoked(f"rank {self._rank}: shrink() was cancelled: {self._end}")
            return self._news.popleft() if has_some else None

    @contextlib.contextmanager
    def during(self, building: Building) -> Iterator[None]:
        """Return a context manager that stops `building` if an event or `end` makes it pointless.

        Events queued before the ``with`` block, and an earlier call of `end`, count too.
        """
        with self._changed:
            self._building = building
            end = self._end
            upset = [news for news in self._news if building.is_upset_by(news)]
        if end:
            building.stop(end)
        elif upset:
            building.stop(_starts_over(upset[0][0]))
        try:
            yield
        finally:
            self._building = None


def regroup(
    table: Shrinking,
    event_queue: EventQueue,
    control: ControlPlane,
    make: Callable[[ControlPlane, tuple[int, ...]], _S],
    excluded: Sequence[int] = (),
) -> _S:
    """Agree with the other survivors on the members, and connect the new communicator.

    *Collective*: all surviving ranks. The caller closes `control` after the return or the error,
    so that the last messages still reach the other ranks.

    Parameters
    ----------
    table : Shrinking
        State machine of this rank, newly made with the quorum rule.
    event_queue : EventQueue
        Handler of `control` since its start.
    control : ControlPlane
        Control plane of the old communicator, still running. The data plane of the old
        communicator must no longer be used.
    make : callable
        ``make(control, members)`` returns the successor, not connected. ``control`` is the new
        control plane. The successor owns it; if `make` raises, `make` has closed it. ``members``
        are the ranks of the members in the old communicator.
    excluded : sequence of int, optional
        Rails of this rank that are excluded now and remain excluded in the successor.

    Returns
    -------
    Successor
        The connected successor, of the type that `make` returns.

    Raises
    ------
    NoQuorum
        If the survivors that this rank knows of have no quorum.
    TransportTimeout
        If a rank did not call `shrink`, did not agree or could not be connected within
        ``config.init_timeout_s`` of the old communicator. The message names the ranks.
    TransportError
        If the survivors have no rail that all of them can reopen.
    CommunicatorRevoked
        If `EventQueue.end` was called.
    R2cclError
        Any other error of `make` or `Successor.connect`.
    """
    regrouping = _Regrouping(table, event_queue, control, make, excluded)
    try:
        return regrouping.run()
    finally:
        regrouping.close()


class _Regrouping(Generic[_S]):
    def __init__(
        self,
        table: Shrinking,
        event_queue: EventQueue,
        control: ControlPlane,
        make: Callable[[ControlPlane, tuple[int, ...]], _S],
        excluded: Sequence[int],
    ) -> None:
        self._table = table
        self._event_queue = event_queue
        self._control = control
        self._make = make
        self._excluded = excluded
        self._timeout_s = control.setting.config.init_timeout_s
        self._give_up_at = monotonic() + self._timeout_s
        #: Listeners whose addresses the last View contains.
        self._succession: Succession | None = None
        #: Successor that is connected but not returned yet, and error of the last failed attempt.
        self._held: _S | None = None
        self._failure: PeerLost | CommunicatorRevoked | None = None
        #: Clock reading at which a failed connection attempt leads to the next attempt, if no loss
        #: has explained the failure by then.
        self._retry_at = math.inf

    def run(self) -> _S:
        """Execute the steps of `Shrinking` until the successor is ready; return the successor."""
        while True:
            step = self._table.step
            if step is ShrinkStep.GO_ON:
                return self._go_on()
            # Handle queued events first: they may change the step, and a step is expensive.
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
        """Close everything that `run` opened and did not return, in bounded time."""
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
        self._succession = Succession(self._control, self._excluded)
        self._control.broadcast(self._table.tell(self._succession.peer_info))
        _log.info(
            "rank %d: shrink() proposes that these ranks are gone: %s; attempt %d",
            self._control.rank, self._gone(), self._table.attempt + 1,
        )  # fmt: skip

    def _build(self) -> None:
        infos = self._table.begin_building()
        self._drop()
        assert self._succession is not None, "no View was sent"
        members = tuple(infos)
        successor = self._make(self._succession.make(infos, self._table.attempt), members)
        building = Building(members, self._give_up_at, successor.revoke)
        try:
            with self._event_queue.during(building):
                successor.connect()
        except (PeerLost, CommunicatorRevoked) as exc:
            # If a member is gone, the old control plane will report it, which starts the next
            # attempt. If a member was only late, the next attempt starts at `_retry_at`.
            self._failure = exc
            self._retry_at = monotonic() + _RETRY_S
            _log.info(
                "rank %d: shrink() could not connect, and tries again: %s", self._control.rank, exc
            )
            return
        if building.is_stopped:
            successor.abort("shrink() starts over")
            return
        self._held = successor
        self._control.broadcast(self._table.built())

    def _go_on(self) -> _S:
        assert self._held is not None, "no successor was built"
        held, self._held = self._held, None
        done = self._table.go_on()
        self._control.broadcast(done)
        self._control.tell_contacts(done)
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
                f"{self._missing()}, or raise R2CC_INIT_TIMEOUT_S",
                rank=self._control.rank,
            ) from self._failure

    def _missing(self) -> str:
        if absent := self._table.absent():
            return f"ranks {absent} have not called shrink(): look at the logs of these ranks"
        if undecided := self._table.undecided():
            attempt = f" in attempt {self._table.attempt + 1}" * bool(self._table.attempt)
            who = f"ranks {gone} are" if (gone := self._gone()) else "no rank is"
            return (
                f"ranks {undecided} have not agreed that {who} gone{attempt}: look at the logs of "
                f"ranks {undecided}"
            )
        unbuilt = self._table.unbuilt()
        own = f"rank {self._control.rank}"
        who = f"ranks {unbuilt} have" if unbuilt else f"{own} has"
        whose = f"ranks {unbuilt}" if unbuilt else own
        return (
            f"{who} not connected the new communicator ({self._failure or 'no error reported'}): "
            f"look at the log of {whose}"
        )

    def _gone(self) -> list[int]:
        return sorted(self._table.gone)

    def _drop(self) -> None:
        if self._held is not None:
            self._held.abort("shrink() did not use this communicator")
            self._held = None


def _starts_over(rank: int) -> str:
    return f"shrink() starts over: rank {rank} is gone, or no longer takes part in this attempt"


__all__ = ["Building", "EventQueue", "News", "Successor", "regroup"]

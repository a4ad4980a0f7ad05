"""Mistakes that the library could make, or once made, each as a context manager.

The tests check that the simulator finds them, and that the repaired library passes the plans that
did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import msgspec

from r2ccl.failover.failover import Failover
from r2ccl.failover.migration.driver import _ACTIONS, Migration
from r2ccl.failover.migration.link import Landing, LinkReport, RecvLink, SendLink, Slice, SliceState
from r2ccl.failover.migration.links import Links
from r2ccl.failover.migration.path import PathState
from r2ccl.failover.migration.routes import Routes
from r2ccl.planning.lowering import Step
from r2ccl.runtime.executor import LaneRun
from r2ccl.schedule.ir import OpKind
from r2ccl.testing.simulation.control import SimControl
from r2ccl.testing.simulation.network import End, MessageKind, SimNetwork
from r2ccl.types import PathKey

Mistake = Callable[[], contextlib.AbstractContextManager[Any]]


def _without(owner: type, method: str, inner: type, silenced: str) -> Mistake:
    """Run `method` of `owner` while `silenced` of `inner` does nothing."""
    original = getattr(owner, method)

    def wrong(self: Any, *args: Any) -> Any:
        with mock.patch.object(inner, silenced, return_value=None):
            return original(self, *args)

    return lambda: _replaced(owner, method, wrong)


@contextlib.contextmanager
def _replaced(owner: type, method: str, wrong: Callable[..., Any]) -> Iterator[None]:
    """Replace a method, and its entry in `_ACTIONS` if `Migration` has one."""
    original = getattr(owner, method)
    actions = {action: wrong for action, fn in _ACTIONS.items() if fn is original}
    with mock.patch.object(owner, method, wrong), mock.patch.dict(_ACTIONS, actions):
        yield


def _no_fence() -> contextlib.AbstractContextManager[Any]:
    """Report fences without fencing: late writes still reach memory."""
    original = SimNetwork.refuse

    def write_nevertheless(self: SimNetwork, end: End, piece: Any) -> None:
        if piece.message.kind is MessageKind.WRITE:
            self.write(piece.message, piece.is_last)
        original(self, end, piece)

    return mock.patch.object(SimNetwork, "refuse", write_nevertheless)


def _released_when_confirmed() -> contextlib.AbstractContextManager[Any]:
    """Release memory on confirmation alone, although the NIC may still read it."""

    def release(self: SendLink) -> list[Slice]:
        released = []
        while self.outstanding and self.outstanding[0].seq < self.confirmed:
            released.append(self.outstanding.popleft())
        return released

    return mock.patch.object(SendLink, "_release", release)


def _released_when_retired() -> contextlib.AbstractContextManager[Any]:
    """Release memory when the request is retired, although the slice may have to be replayed."""

    def release(self: SendLink) -> list[Slice]:
        released = []
        while self.outstanding and self.outstanding[0].state >= SliceState.RETIRED:
            released.append(self.outstanding.popleft())
        return released

    return mock.patch.object(SendLink, "_release", release)


def _overwritten_while_sent() -> contextlib.AbstractContextManager[Any]:
    """Reduce into memory that is still being sent."""
    original = LaneRun._is_ready

    def is_ready(self: LaneRun, step: Step, k: int) -> bool:
        return step.kind is OpKind.RECV_REDUCE or original(self, step, k)

    return mock.patch.object(LaneRun, "_is_ready", is_ready)


def _has_failed(run: LaneRun) -> bool:
    """Return whether a path has failed before."""
    return any(path.cause for path in run._links.paths.values())


def _reduced_as_it_comes() -> contextlib.AbstractContextManager[Any]:
    """After a repair, add data in order of arrival: the right sum, but not the right bits."""
    original = LaneRun._is_ready

    def is_ready(self: LaneRun, step: Step, k: int) -> bool:
        if not _has_failed(self):
            return original(self, step, k)
        after = list(step.after)
        if step.kind is OpKind.RECV_REDUCE:
            after = [each for each in after if self._steps[each[0]].kind is not OpKind.RECV_REDUCE]
        else:  # waits for everything that is added, in any order
            for index, _, _ in after:
                if self._steps[index].kind is OpKind.RECV_REDUCE:
                    after.extend(self._steps[index].after)
        return original(self, msgspec.structs.replace(step, after=tuple(after)), k)

    return mock.patch.object(LaneRun, "_is_ready", is_ready)


def _divided_when_replayed() -> contextlib.AbstractContextManager[Any]:
    """Divide replayed data by the number of ranks, as if it were the whole sum."""
    original = LaneRun._use

    def use(self: LaneRun, cursor: Any, index: int, step: Step, data: Any) -> None:
        if step.kind is OpKind.RECV_REDUCE and _has_failed(self):
            step = msgspec.structs.replace(step, is_final=True)
        original(self, cursor, index, step, data)

    return mock.patch.object(LaneRun, "_use", use)


def _early_slices_unreported() -> contextlib.AbstractContextManager[Any]:
    """Omit slices that arrived early from the receiver's report."""

    def report(self: RecvLink) -> LinkReport:
        return LinkReport(self.channel, self.consumed, self.received)

    return mock.patch.object(RecvLink, "report", report)


def _only_known_routes_watched() -> contextlib.AbstractContextManager[Any]:
    """Detect silence only on paths of this end's own routes and slices."""

    def has_work(self: Failover, key: PathKey) -> bool:
        for sender in self._links.senders_to(key.peer):
            if any(item.path == key and not item.is_eager for item in sender.outstanding):
                return True
        return any(
            (receiver.route if landing.region is None else landing.path) == key
            for receiver in self._links.receivers_from(key.peer)
            for landing in receiver.landings.values()
        )

    def watched(self: Failover) -> Iterator[tuple[PathKey, int, bool]]:
        for key, path in self._links.paths.items():
            if path.state is PathState.UP:
                yield key, path.activity, has_work(self, key)

    return mock.patch.object(Failover, "_watched", watched)


def _stuck_paths_unwatched() -> contextlib.AbstractContextManager[Any]:
    """Ignore paths on which nothing is awaited, although they may swallow confirmations."""

    def watched(self: Failover) -> Iterator[tuple[PathKey, int, bool]]:
        waited_for = self._links.awaited_peers()
        for key, path in self._links.paths.items():
            if path.state is PathState.UP:
                yield key, path.activity, key.peer in waited_for

    return mock.patch.object(Failover, "_watched", watched)


def _alone_since_last_call() -> contextlib.AbstractContextManager[Any]:
    """Count the time without a path from the last check, not from the loss."""
    original = Migration._fence

    def fence(self: Migration, path: Any) -> None:
        before = dict(self.cut_off_since)
        original(self, path)
        self.cut_off_since = before

    return _replaced(Migration, "_fence", fence)


def _epoch_welcome_once() -> contextlib.AbstractContextManager[Any]:
    """Accept a connection once per epoch, even if its dialer never learned of it."""
    original = SimControl.let_in

    def let_in(self: SimControl, peer: int, rail: int, epoch: int, end: End) -> None:
        original(self, peer, rail, epoch, end)
        self._expected.pop(PathKey(peer, rail), None)

    return mock.patch.object(SimControl, "let_in", let_in)


@contextlib.contextmanager
def _never_confirmed_again() -> Iterator[None]:
    """Never repeat a confirmation that could not be sent for lack of a route."""
    with (
        _without(Routes, "_set_going", Links, "confirm_all")(),
        _without(Failover, "tick", Links, "confirm_all")(),
    ):
        yield


def _replay_confirmed_early() -> contextlib.AbstractContextManager[Any]:
    """Let a replay's confirmation cover slices that it overtook on their path."""
    original = RecvLink.early_ack

    def early_ack(self: RecvLink, landing: Landing) -> int:
        landing.was_lost = False
        return original(self, landing)

    return mock.patch.object(RecvLink, "early_ack", early_ack)


def _report_must_not_be_older() -> contextlib.AbstractContextManager[Any]:
    """Reject a report that is older than a confirmation that overtook it."""
    original = SendLink.resume

    def resume(self: SendLink, path: PathKey, epoch: int, report: LinkReport) -> list[Slice]:
        assert self.confirmed <= report.received, "outside confirmed .. posted"
        return original(self, path, epoch, report)

    return mock.patch.object(SendLink, "resume", resume)


MISTAKES: dict[str, Mistake] = {
    "no fence": _no_fence,
    "released when confirmed": _released_when_confirmed,
    "released when retired": _released_when_retired,
    "overwritten while sent": _overwritten_while_sent,
    "reduced as it comes": _reduced_as_it_comes,
    "divided when replayed": _divided_when_replayed,
    "early slices unreported": _early_slices_unreported,
    "confirmations lost without a route": _never_confirmed_again,
    "credits of a report unnoticed": _without(Migration, "_resume", Links, "touch_channel"),
    "only known routes watched": _only_known_routes_watched,
    "stuck paths unwatched": _stuck_paths_unwatched,
    "epoch welcome once": _epoch_welcome_once,
    "alone since the last call": _alone_since_last_call,
    "replay confirmed early": _replay_confirmed_early,
    "report must not be older": _report_must_not_be_older,
}

__all__ = ["MISTAKES"]

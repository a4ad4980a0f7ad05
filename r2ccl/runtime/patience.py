"""Callers that wait in the data loop, the timeouts of the waits, and the errors of the callers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from r2ccl.errors import CommunicatorRevoked, R2cclError, TransportTimeout
from r2ccl.runtime.status import Pending


class Patience(NamedTuple):
    """Timeout of a wait, the setting that it comes from, and a function that describes the wait.

    The setting is the name of a keyword of `r2ccl.init`, such as ``timeout_s``.
    """

    timeout_s: float
    setting: str
    pending: Callable[[], Pending]


class Caller(Protocol):
    """Calls or messages of one communicator, or one wait for a message, in the data loop.

    Attributes
    ----------
    waiting : Patience or None
        The current wait; None if there is none.
    since_s : float
        Time at which the last wait began, in seconds of the loop's clock.
    is_calling : bool
        True while a call is in progress in the thread that owns the data loop. Stays True if the
        call cannot end properly.
    has_raised : bool
        True once a call has raised the error that ended the communicator.
    peers : frozenset of int
        Ranks of the job that the running call exchanges data with.
    """

    waiting: Patience | None
    since_s: float
    is_calling: bool
    has_raised: bool
    peers: frozenset[int]

    def tick(self, now: float) -> None:
        """Do the periodic work of the communicator; `now` is in seconds."""
        ...

    def check(self) -> None:
        """Raise the error of the communicator if it has ended."""
        ...


def without_frames(error: R2cclError) -> R2cclError:
    """Return a copy of `error` without its traceback, which would keep arrays of callers alive."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    return copy


def revoked(rank: int, reason: R2cclError) -> CommunicatorRevoked:
    """Return the error for a call that `rank` made after the communicator ended with `reason`."""
    error = CommunicatorRevoked(
        f"rank {rank}: the communicator was revoked: {reason}", reason=reason
    )
    error.__cause__ = reason
    return error


def timed_out(patience: Patience) -> TransportTimeout:
    """Return the error for a wait that has exceeded its timeout."""
    pending = patience.pending()
    awaited = {*pending.absent, *(wait.peer for wait in pending.waits)}
    setting = patience.setting
    raised = f"raise the timeout ({setting}= or R2CC_{setting.upper()})"
    advice = f"{raised} if the call only needs more time"
    if awaited:
        advice = f"check these ranks, or {raised} if they are only slow"
    return TransportTimeout(
        f"{pending}; gave up after {patience.timeout_s:g} s: {advice}",
        rank=pending.rank,
        peer=awaited.pop() if len(awaited) == 1 else None,
    )


__all__ = ["Caller", "Patience", "revoked", "timed_out", "without_frames"]

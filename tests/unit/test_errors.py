"""Exceptions as values: what is kept when they pass from one process to another."""

from __future__ import annotations

import pickle

import pytest

from r2ccl.bootstrap.auth import HandshakeRejected
from r2ccl.errors import (
    CommunicatorRevoked,
    InternalError,
    NoHealthyRail,
    NoQuorum,
    PeerLost,
    R2cclError,
    ScheduleError,
    TransportTimeout,
    format_ranks,
)

ERRORS = [
    CommunicatorRevoked("closed", reason=TransportTimeout("late", rank=1, status="TIMEOUT")),
    HandshakeRejected("wrong proof"),
    InternalError("a slice too many"),
    NoHealthyRail(rank=0, peer=1, since_s=2.5, causes={0: "ENETDOWN", 1: "EOF"}),
    NoQuorum(rank=0, nranks=4, alive=[0], gone={1: "gone", 2: "gone", 3: "silent"}),
    PeerLost(rank=0, peer=3, last_heard_s=None, why="gone", host="n3", last_op=7),
    ScheduleError("deadlock", rank=2, channel=0),
    TransportTimeout("rank 1: late", rank=1, peer=2, rail=0, status="TIMEOUT"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_can_be_pickled_with_its_attributes(error: R2cclError) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert repr(vars(found)) == repr(vars(error))


@pytest.mark.parametrize("is_met", [True, False])
@pytest.mark.parametrize("host", ["", "(none)"])
def test_a_host_without_a_name_is_not_named(host: str, is_met: bool) -> None:
    error = PeerLost(rank=0, peer=3, last_heard_s=None, why="gone", host=host, is_met=is_met)
    assert error.host == ""
    assert " on " not in str(error).partition("(gone")[0]


def test_only_some_of_many_ranks_are_named() -> None:
    assert format_ranks(range(8)) == "[0, 1, 2, 3, 4, 5, 6, 7]"
    assert format_ranks({3: "x", 1: "y"}) == "[1, 3]"
    assert format_ranks(range(299, 0, -1)) == "[1, 2, 3, 4, 5, 6, 7, 8] and 291 more"

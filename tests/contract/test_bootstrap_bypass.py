"""Contract tests of bypasses: across rails, through a third rank, and rejected ones."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.planes import WAIT_S, Job, turn_away
from support.planes import start_job as start_job  # the fixture

from r2ccl.bootstrap import bypass
from r2ccl.bootstrap.auth import Claim, Purpose
from r2ccl.types import BYPASS, BypassWay


def connect(job: Job, epoch: int, *ways: BypassWay, low: int = 0, high: int = 1) -> None:
    job.planes[high].accept_path(low, BYPASS, epoch)
    job.planes[low].dial_bypass(high, epoch, ways)
    job.seen[low].wait_for(lambda: (high, BYPASS, epoch) in job.seen[low].paths)
    job.seen[high].wait_for(lambda: (low, BYPASS, epoch) in job.seen[high].paths)


def ends(job: Job, epoch: int, low: int = 0, high: int = 1) -> tuple[socket.socket, socket.socket]:
    found = job.seen[low].paths[high, BYPASS, epoch], job.seen[high].paths[low, BYPASS, epoch]
    for sock in found:
        sock.settimeout(WAIT_S)
    return found


def test_a_cross_way_joins_ports_of_different_rails(start_job: Callable[..., Job]) -> None:
    job = start_job(2)
    connect(job, 4, BypassWay(0, 1, 1))
    left, right = ends(job, 4)
    assert left.getsockname()[0] == "127.0.0.1"
    assert left.getpeername() == right.getsockname() == job.planes[0].peers[1].rails[1]
    for sock in (left, right):
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2000
    left.sendall(b"across")
    assert right.recv(100) == b"across"


def test_a_third_rank_forwards_both_ways_until_one_end_closes(
    start_job: Callable[..., Job],
) -> None:
    job = start_job(3)
    connect(job, 0, BypassWay(1, 2, 1))
    left, right = ends(job, 0)
    assert left.getpeername() == job.planes[0].peers[2].rails[1]
    payload = bytes(range(256)) * (1 << 12)
    for source, target in ((left, right), (right, left)):
        sent = 0
        source.setblocking(False)
        found = bytearray()
        while len(found) < len(payload):
            with contextlib.suppress(BlockingIOError):
                sent += source.send(payload[sent : sent + (1 << 16)])
            with contextlib.suppress(BlockingIOError):
                target.setblocking(False)
                found += target.recv(1 << 16)
        assert bytes(found) == payload
    right.settimeout(WAIT_S)
    left.close()
    assert right.recv(1) == b""


def test_a_dead_way_does_not_hold_up_the_others(start_job: Callable[..., Job]) -> None:
    job = start_job(3)
    # The listener of rank 2's first rail listens no more; its second rail works.
    job.planes[2]._listener._sockets[0].shutdown(socket.SHUT_RDWR)
    connect(job, 0, BypassWay(0, 2, 0), BypassWay(1, 2, 1))
    left, right = ends(job, 0)
    right.sendall(b"here")
    assert left.recv(100) == b"here"


def test_an_end_of_an_older_epoch_is_not_let_in(start_job: Callable[..., Job]) -> None:
    job = start_job(2)
    job.planes[1].accept_path(0, BYPASS, 2)
    job.planes[0].dial_bypass(1, 1, [BypassWay(0, 1, 1)])
    job.planes[0].call_later(0.2, lambda: job.planes[0].dial_bypass(1, 2, [BypassWay(0, 1, 1)]))
    job.seen[1].wait_for(lambda: (0, BYPASS, 2) in job.seen[1].paths)
    assert len(job.seen[1].paths) == 1
    assert job.planes[1].rejections()["path of an older epoch"] == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"beyond": 1}, "nobody to forward to"),  # the forwarder itself
        ({"beyond": 0}, "nobody to forward to"),  # the rank that asks
        ({"beyond": 9}, "nobody to forward to"),
        ({"src": 9, "beyond": 2}, "no rank of this communicator"),
        ({"dst": 2, "beyond": 2}, "wrong pair of ranks"),
        ({"communicator": b"x" * 16, "beyond": 2}, "another communicator"),
    ],
)
def test_what_is_not_forwarded(
    start_job: Callable[..., Job], change: dict[str, Any], reason: str
) -> None:
    job = start_job(3)
    plane = job.planes[1]
    claim = Claim(Purpose.FORWARD, plane.communicator_id, 0, 1)._replace(**change)
    turn_away(plane, claim)
    assert plane.rejections() == {reason: 1}


def test_a_rank_forwards_a_bounded_number(
    start_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bypass, "MAX_FORWARDED", 1)
    job = start_job(4)
    connect(job, 0, BypassWay(0, 3, 0))
    job.planes[2].accept_path(0, BYPASS, 0)
    job.planes[0].dial_bypass(2, 0, [BypassWay(0, 3, 0), BypassWay(0, 1, 0)])
    job.seen[2].wait_for(lambda: (0, BYPASS, 0) in job.seen[2].paths)
    assert job.planes[3].rejections()["too many connections to forward"] == 1


class Attempts:
    """Connection attempts that succeed or fail on request; each socket is one end of a pair."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.made: list[socket.socket] = []

    def close(self) -> None:
        for sock in self.made:
            sock.close()

    def after(self, delay_s: float, fails: bool = False) -> Callable[[], Any]:
        number = len(self.begun)

        async def attempt() -> socket.socket:
            self.begun.append(number)
            await asyncio.sleep(delay_s)
            if fails:
                raise ConnectionRefusedError(number)
            ours, theirs = socket.socketpair()
            self.made += [ours, theirs]
            return ours

        return attempt


@pytest.fixture
def attempts() -> Iterator[Attempts]:
    made = Attempts()
    yield made
    made.close()


def test_the_first_to_succeed_is_taken_and_the_others_closed(attempts: Attempts) -> None:
    works = [attempts.after(5.0), attempts.after(0.0, fails=True), attempts.after(0.05)]
    found = asyncio.run(bypass.first_of(works, stagger_s=0.01))
    assert found is attempts.made[0]
    assert len(attempts.begun) == 3
    again = [attempts.after(0.02), attempts.after(0.02)]
    found = asyncio.run(bypass.first_of(again, stagger_s=0.0))
    assert [sock.fileno() >= 0 for sock in attempts.made[2::2]].count(True) == 1
    assert found.fileno() >= 0


def test_none_that_succeeds_is_an_error_that_says_why(attempts: Attempts) -> None:
    works = [attempts.after(0.0, fails=True), attempts.after(0.01, fails=True)]
    with pytest.raises(OSError, match="none of 2 routes works; last error:"):
        asyncio.run(bypass.first_of(works))
    with pytest.raises(OSError, match="none of 0 routes works"):
        asyncio.run(bypass.first_of([]))


def test_a_way_that_times_out_is_named_by_its_error() -> None:
    async def attempt() -> socket.socket:
        async with asyncio.timeout(0.0):
            await asyncio.sleep(5.0)
        raise AssertionError

    with pytest.raises(OSError, match=r"last error: TimeoutError$"):
        asyncio.run(bypass.first_of([attempt]))

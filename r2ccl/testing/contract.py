"""Transport contract: the promises of `r2ccl.transport.base` as checks for any implementation.

Call each function of `CHECKS` and of `r2ccl.testing.probecontract.PROBE_CHECKS` with a fresh
`Bench` of your transport, and close the bench afterwards. A check raises AssertionError if the
transport breaks its promise, or a wait takes longer than ``Bench.patience_s``. The checks use only
the `Transport` interface.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from r2ccl.transport.base import (
    Arrived,
    Cleared,
    Confirmed,
    Event,
    Failed,
    Fenced,
    Frame,
    Sent,
    Transport,
)
from r2ccl.types import PathKey


class Bench(Protocol):
    """Two ranks, 0 and 1, with rails 0 and 1, joined by the transport under test.

    Attributes
    ----------
    transports : sequence of Transport
        The transports of rank 0 and rank 1. They must accept eager slices of 64 bytes.
    patience_s : float
        Longest time in seconds that an expected event may take. Allow several probe timeouts.
    cross : bool or None
        Expected `Probed.is_answered` of a probe from rank 0's port on rail 1 to rank 1's port on
        rail 0: True, or None if the network does not connect different rails.
    """

    transports: Sequence[Transport]
    patience_s: float
    cross: bool | None

    def endpoints(self, rail: int) -> tuple[Any, Any]:
        """Make a new connection on `rail`; return the endpoints for ``open`` at ranks 0 and 1."""
        ...

    def run(self) -> None:
        """Run a simulated network until it is idle; do nothing on a real one."""
        ...

    def break_path(self, rail: int) -> None:
        """Break the newest connection of `rail` in a way that both ends can detect."""
        ...

    def join_probes(self) -> None:
        """Establish the connections for probes of rank 0 to rank 1, if the transport needs any."""
        ...

    def silence(self, rail: int) -> None:
        """Disconnect rank 1's port of `rail` from the fabric without notifying either rank."""
        ...

    def close(self) -> None:
        """Close both transports and free all resources."""
        ...


class Side:
    """One rank's end of a path, and all events of its transport that `poll` collected."""

    def __init__(self, bench: Bench, rank: int, rail: int) -> None:
        self.transport = bench.transports[rank]
        self.path = PathKey(1 - rank, rail)
        self.events: list[Event] = []
        self.payloads: list[bytes] = []

    def poll(self) -> None:
        """Poll the transport without waiting; keep its events, and copies of eager payloads."""
        for event in self.transport.poll(0.0):
            if isinstance(event, Arrived) and event.payload is not None:
                self.payloads.append(bytes(event.payload))
            self.events.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        """Return this path's events of one kind, oldest first."""
        return [e for e in self.events if isinstance(e, kind) and e.path == self.path]

    def queue(self, seq: int, data: bytes | bytearray, token: object = None, **more: Any) -> None:
        """Queue slice `seq` of channel 3, with the bytes of `data`, without flushing.

        `token` is the token of a `Cleared` event; None sends the slice eagerly. `more` may contain
        ``ack`` of the frame (default 0), and ``is_replay`` of `Transport.isend`.
        """
        frame = Frame(3, seq, more.pop("ack", 0), 5, 77)
        self.transport.isend(self.path, frame, memoryview(data), token, **more)

    def send(self, seq: int, data: bytes | bytearray, token: object = None, **more: Any) -> None:
        """Queue slice `seq` of channel 3 as `queue` does, and flush."""
        self.queue(seq, data, token, **more)
        self.transport.flush()

    def want(self, seq: int, region: bytearray, ack: int = 0) -> None:
        """Announce `region` as landing place of slice `seq` of channel 3, and flush.

        If `ack` is above 0, the transport may itself confirm the peer's slices below `ack` as soon
        as it is certain that this slice will land.
        """
        self.transport.irecv(self.path, Frame(3, seq, 2, 5, 77), memoryview(region), ack)
        self.transport.flush()

    def fence(self) -> None:
        """Start fencing this end of the path."""
        self.transport.fence(self.path)


class JoinedPair:
    """One connection of a bench, opened at both ends.

    Attributes
    ----------
    bench : Bench
    a, b : Side
        The sides of rank 0 and rank 1.
    """

    def __init__(self, bench: Bench, rail: int = 0) -> None:
        self.bench = bench
        self.a, self.b = (Side(bench, rank, rail) for rank in (0, 1))
        for side, endpoint in zip((self.a, self.b), bench.endpoints(rail), strict=True):
            side.transport.open(side.path, endpoint)

    def settle(self) -> None:
        """Run the network, then flush and poll both sides, five times in total."""
        for _ in range(5):
            self.bench.run()
            for side in (self.a, self.b):
                side.transport.flush()
                side.poll()

    def until(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait until `is_done()` is true.

        Raises
        ------
        AssertionError
            If the wait exceeds ``Bench.patience_s``. The message contains `what`, a description of
            the condition.
        """
        give_up = time.monotonic() + self.bench.patience_s
        while not is_done():
            assert time.monotonic() < give_up, f"timed out waiting for {what}"
            self.settle()

    def until_count(self, side: Side, kind: type[Any], count: int = 1) -> list[Any]:
        """Wait until `side` has at least `count` events of `kind`; return all of them.

        Raises
        ------
        AssertionError
            If the wait exceeds ``Bench.patience_s``.
        """
        self.until(lambda: len(side.of(kind)) >= count, f"{count} {kind.__name__} of {side.path}")
        return side.of(kind)

    def cleared(self, region: bytearray, seq: int = 0) -> object:
        """Let side `b` announce `region` for slice `seq`; return the token that side `a` gets."""
        before = len(self.a.of(Cleared))
        self.b.want(seq, region)
        return self.until_count(self.a, Cleared, before + 1)[-1].token


class Talker:
    """Sender of eager slices that keeps the send queue of one side full.

    The constructor queues 40 slices. Each call of `turn` queues one more slice if slices arrived in
    the previous call, up to 100 slices in total. The transport must therefore deliver credits or
    acknowledgments to the peer while the queue of slices is full.
    """

    _AT_ONCE = 40
    _AT_MOST = 100

    def __init__(self, side: Side, seed: int) -> None:
        self.side = side
        self.nqueued = 0
        self._seed = seed
        self._nread = 0
        for _ in range(self._AT_ONCE):
            self._queue()
        side.transport.flush()

    def slice(self, seq: int) -> bytes:
        """Return the payload of slice `seq`."""
        return bytes(random_bytes(64, self._seed + seq))

    def turn(self) -> None:
        """Poll, queue one more slice if the previous turn received any, and flush."""
        nread = len(self.side.payloads)
        self.side.poll()
        if nread > self._nread and self.nqueued < self._AT_MOST:
            self._queue()
        self._nread = nread
        self.side.transport.flush()

    def _queue(self) -> None:
        self.side.queue(self.nqueued, self.slice(self.nqueued))
        self.nqueued += 1


def random_bytes(nbytes: int, seed: int = 0) -> bytearray:
    """Return `nbytes` random bytes, the same for the same `seed`."""
    return bytearray(np.random.default_rng(seed).bytes(nbytes))


def check_eager(bench: Bench) -> None:
    """Check that eager slices, including an empty one, arrive with frame and payload, in order.

    The sender must report `Sent` for each of them, in the same order.
    """
    pair = JoinedPair(bench)
    for seq, nbytes in enumerate((64, 1, 0, 63)):
        pair.a.send(seq, random_bytes(nbytes, seq), ack=seq)
    arrived = pair.until_count(pair.b, Arrived, 4)
    assert [event.frame for event in arrived] == [Frame(3, s, s, 5, 77) for s in range(4)]
    assert all(event.payload is not None for event in arrived)
    assert pair.b.payloads == [bytes(random_bytes(n, s)) for s, n in enumerate((64, 1, 0, 63))]
    assert [event.seq for event in pair.until_count(pair.a, Sent, 4)] == [0, 1, 2, 3]


def check_cleared(bench: Bench) -> None:
    """Check that cleared slices of 1 byte to over 1 MiB land in the region announced for them."""
    pair = JoinedPair(bench)
    for seq, nbytes in enumerate((1, 65, 4096, (1 << 20) + 3)):
        region = bytearray(nbytes)
        token = pair.cleared(region, seq)
        notice = pair.a.of(Cleared)[-1]
        assert (notice.nbytes, notice.frame) == (nbytes, Frame(3, seq, 2, 5, 77))
        pair.a.send(seq, random_bytes(nbytes), token)
        last = pair.until_count(pair.b, Arrived, seq + 1)[-1]
        assert last.payload is None
        assert last.frame.seq == seq
        assert region == random_bytes(nbytes)


def check_confirmations_ride_along(bench: Bench) -> None:
    """Check that the ``ack`` in the frame of an eager or cleared slice reaches the peer."""
    pair = JoinedPair(bench)
    token = pair.cleared(bytearray(100))
    pair.a.send(0, random_bytes(100), token, ack=5)
    pair.a.send(1, random_bytes(10), ack=6)

    def known() -> int:
        events = [*pair.b.of(Confirmed), *(event.frame for event in pair.b.of(Arrived))]
        return max((event.ack for event in events), default=0)

    pair.until(lambda: known() == 6, "the eager slice's confirmation")
    token = pair.cleared(bytearray(100), 2)
    pair.a.send(2, random_bytes(100), token, ack=8)
    pair.until(lambda: known() == 8, "the cleared slice's confirmation")


def check_early_confirmation(bench: Bench) -> None:
    """Check that a slice that the transport itself confirms is also reported as arrived.

    The transport must report it even if the receiver fences the path right after the confirmation.
    A transport that confirms no slice itself passes the check.
    """
    pair = JoinedPair(bench)
    region = bytearray(300_000)
    pair.b.want(0, region, ack=1)
    token = pair.until_count(pair.a, Cleared)[0].token
    pair.a.send(0, random_bytes(300_000), token)
    pair.until(lambda: bool(pair.a.of(Confirmed) or pair.b.of(Arrived)), "the slice")
    pair.b.fence()
    pair.until_count(pair.b, Fenced)
    confirmed, arrived = pair.a.of(Confirmed), pair.b.of(Arrived)
    assert [(event.channel, event.ack) for event in confirmed] in ([], [(3, 1)])
    if confirmed:
        assert [event.is_confirmed for event in arrived] == [True]
        assert region == random_bytes(300_000)


def check_order(bench: Bench) -> None:
    """Check that all cleared slices arrive, in the order sent."""
    pair = JoinedPair(bench)
    regions = [bytearray(5_000) for _ in range(8)]
    tokens = [pair.cleared(region, seq) for seq, region in enumerate(regions)]
    for seq, token in enumerate(tokens):
        pair.a.send(seq, random_bytes(5_000, seq), token)
    arrived = pair.until_count(pair.b, Arrived, 8)
    assert [event.frame.seq for event in arrived] == list(range(8))
    assert regions == [random_bytes(5_000, seq) for seq in range(8)]


def check_both_ways(bench: Bench) -> None:
    """Check that eager slices arrive if both sides send at once.

    At the same time, a cleared slice goes in one direction, and confirmations go in the other.
    """
    pair = JoinedPair(bench)
    region = bytearray(200_000)
    token = pair.cleared(region)
    for seq in range(20):
        pair.a.send(100 + seq, random_bytes(60, seq))
        pair.b.send(200 + seq, random_bytes(50, seq))
        pair.b.transport.confirm(pair.b.path, 9, seq + 1)
        if seq == 10:
            pair.a.send(0, random_bytes(200_000), token)
    pair.until_count(pair.b, Arrived, 21)
    pair.until_count(pair.a, Arrived, 20)
    assert region == random_bytes(200_000)
    assert pair.a.payloads == [bytes(random_bytes(50, seq)) for seq in range(20)]
    assert pair.b.payloads == [bytes(random_bytes(60, seq)) for seq in range(20)]
    confirmed = pair.until_count(pair.a, Confirmed, 20)
    assert [(e.channel, e.ack) for e in confirmed] == [(9, ack) for ack in range(1, 21)]


def check_both_ways_full(bench: Bench) -> None:
    """Check that no deadlock occurs if both sides keep their send queues full."""
    pair = JoinedPair(bench)
    talkers = Talker(pair.a, seed=0), Talker(pair.b, seed=100)
    give_up = time.monotonic() + bench.patience_s

    def has_all(reader: Talker, writer: Talker) -> bool:
        return len(reader.side.payloads) == writer.nqueued

    while not (has_all(*talkers) and has_all(*talkers[::-1])):
        narrived = [len(talker.side.payloads) for talker in talkers]
        assert time.monotonic() < give_up, (
            f"timed out: only {narrived} slices arrived at sides a and b"
        )
        bench.run()
        for talker in talkers:
            talker.turn()
    for reader, writer in (talkers, talkers[::-1]):
        assert reader.side.payloads == [writer.slice(seq) for seq in range(writer.nqueued)]


def check_view_is_free_when_sent(bench: Bench) -> None:
    """Check that the sender may overwrite the view of a cleared slice after `Sent`."""
    pair = JoinedPair(bench)
    region = bytearray(300_000)
    data = random_bytes(300_000)
    token = pair.cleared(region)
    pair.a.send(0, data, token)
    pair.until_count(pair.a, Sent)
    data[:] = bytes(300_000)
    pair.until_count(pair.b, Arrived)
    assert region == random_bytes(300_000)


def check_replay(bench: Bench) -> None:
    """Check that a replayed slice arrives exactly once; it may overtake slices queued earlier."""
    pair = JoinedPair(bench)
    regions = [bytearray(50_000) for _ in range(3)]
    tokens = [pair.cleared(region, seq) for seq, region in enumerate(regions)]
    pair.a.send(0, random_bytes(50_000, 0), tokens[0])
    pair.a.send(1, random_bytes(50_000, 1), tokens[1])
    pair.a.send(2, random_bytes(50_000, 2), tokens[2], is_replay=True)
    pair.until_count(pair.b, Arrived, 3)
    pair.settle()
    assert sorted(event.frame.seq for event in pair.b.of(Arrived)) == [0, 1, 2]
    assert regions == [random_bytes(50_000, seq) for seq in range(3)]


def check_paths_are_apart(bench: Bench) -> None:
    """Check that paths of the same ranks on two rails are independent, even if one is fenced."""
    first, second = JoinedPair(bench, 0), JoinedPair(bench, 1)
    # Both pairs use one transport per rank: a poll through either pair returns events of both.
    second.a.events, second.b.events = first.a.events, first.b.events
    second.b.payloads = first.b.payloads
    first.a.send(0, random_bytes(10))
    second.a.send(0, random_bytes(20))
    first.until_count(first.b, Arrived)
    second.until_count(second.b, Arrived)
    first.b.fence()
    first.until_count(first.b, Fenced)
    assert second.b.transport.is_open(second.b.path)
    second.a.send(1, random_bytes(30))
    second.until_count(second.b, Arrived, 2)
    assert not second.b.of(Failed)


def check_break(bench: Bench) -> None:
    """Check that each end of a broken path reports `Failed` once.

    Until the fence, ``isend``, ``irecv`` and ``confirm`` on the path must do nothing.
    """
    pair = JoinedPair(bench)
    pair.a.send(0, random_bytes(10))
    pair.until_count(pair.b, Arrived)
    bench.break_path(0)
    for side in (pair.a, pair.b):
        pair.until_count(side, Failed)
        assert not side.transport.is_open(side.path)
        assert side.of(Failed)[0].status
        side.send(1, random_bytes(10))
        side.want(2, bytearray(10))
        side.transport.confirm(side.path, 3, 1)
    pair.settle()
    for side in (pair.a, pair.b):
        side.fence()
        pair.until_count(side, Fenced)
    pair.settle()
    assert [len(side.of(Failed)) for side in (pair.a, pair.b)] == [1, 1]
    assert [len(side.of(Arrived)) for side in (pair.a, pair.b)] == [0, 1]


def check_fence_is_last(bench: Bench) -> None:
    """Check that `Fenced` is reported once, as the last event of a path."""
    pair = JoinedPair(bench)
    for seq in range(5):
        pair.a.send(seq, random_bytes(60))
        pair.b.send(seq, random_bytes(60))
    pair.b.fence()
    pair.until_count(pair.b, Fenced)
    pair.a.send(9, random_bytes(60))
    pair.settle()
    mine = [event for event in pair.b.events if getattr(event, "path", None) == pair.b.path]
    assert isinstance(mine[-1], Fenced)
    assert len(pair.b.of(Fenced)) == 1
    assert not pair.b.transport.is_open(pair.b.path)


def check_fence_keeps_writes_out(bench: Bench) -> None:
    """Check that after `Fenced` no write reaches a landing place announced before the fence.

    The check covers slices that the peer sends before the fence and after it.
    """
    pair = JoinedPair(bench)
    regions = [bytearray(100_000) for _ in range(2)]
    tokens = [pair.cleared(region, seq) for seq, region in enumerate(regions)]
    pair.a.send(0, random_bytes(100_000), tokens[0])
    pair.b.fence()
    pair.until_count(pair.b, Fenced)
    before = [bytes(region) for region in regions]
    narrived = len(pair.b.of(Arrived))
    pair.a.send(1, random_bytes(100_000), tokens[1])
    pair.settle()
    assert regions == before
    assert len(pair.b.of(Arrived)) == narrived


def check_fence_frees_the_view(bench: Bench) -> None:
    """Check that the transport does not read a view after the sender reported `Fenced`."""
    pair = JoinedPair(bench)
    region = bytearray(400_000)
    data = random_bytes(400_000)
    pair.a.send(0, data, pair.cleared(region))
    pair.a.fence()
    pair.until_count(pair.a, Fenced)
    data[:] = b"\xff" * len(data)
    pair.settle()
    clean = random_bytes(400_000)
    assert all(byte in (0, clean[i]) for i, byte in enumerate(region))


def check_reopen(bench: Bench) -> None:
    """Check that a fenced path can be reopened and reports no events of the earlier connection."""
    old = JoinedPair(bench)
    region = bytearray(1_000)
    token = old.cleared(region)
    for side in (old.a, old.b):
        side.fence()
        old.until_count(side, Fenced)
    new = JoinedPair(bench)
    new.b.want(0, bytearray(500))
    assert new.until_count(new.a, Cleared)[0].nbytes == 500
    new.a.send(7, random_bytes(40))
    assert new.until_count(new.b, Arrived)[0].frame.seq == 7
    assert not new.b.of(Fenced)
    assert region == bytearray(1_000)
    assert token is not None


def check_wake(bench: Bench) -> None:
    """Check that a `wake` before `poll` makes the `poll` return without waiting."""
    transport = bench.transports[0]
    transport.wake()
    began = time.monotonic()
    transport.poll(bench.patience_s)
    assert time.monotonic() - began < bench.patience_s / 2


def check_unknown_path(bench: Bench) -> None:
    """Check that calls on a path that was never opened do nothing."""
    side = Side(bench, 0, 0)
    assert not side.transport.is_open(side.path)
    assert not side.transport.is_stuck(side.path)
    side.send(0, random_bytes(10))
    side.want(0, bytearray(10))
    side.transport.confirm(side.path, 0, 1)
    bench.run()
    side.poll()
    assert not side.events


def check_idle_path_is_not_stuck(bench: Bench) -> None:
    """Check that `is_stuck` becomes False after all data of the path has arrived."""
    pair = JoinedPair(bench)
    assert pair.a.transport.is_open(pair.a.path)
    pair.a.send(0, random_bytes(64))
    pair.until_count(pair.b, Arrived)
    pair.until(lambda: not pair.a.transport.is_stuck(pair.a.path), "an idle path")


CHECKS: tuple[Callable[[Bench], None], ...] = (
    check_eager,
    check_cleared,
    check_confirmations_ride_along,
    check_early_confirmation,
    check_order,
    check_both_ways,
    check_both_ways_full,
    check_view_is_free_when_sent,
    check_replay,
    check_paths_are_apart,
    check_break,
    check_fence_is_last,
    check_fence_keeps_writes_out,
    check_fence_frees_the_view,
    check_reopen,
    check_wake,
    check_unknown_path,
    check_idle_path_is_not_stuck,
)

__all__ = ["CHECKS", "Bench", "JoinedPair", "Side", "random_bytes"]

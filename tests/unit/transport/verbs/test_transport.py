"""Verbs over NICs in memory whose calls fail: the rail fails, never the communicator."""

from __future__ import annotations

import errno
import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from r2ccl.errors import TransportError
from r2ccl.testing.fakepyverbs import (
    FakeChannel,
    FakeContext,
    FakeDomain,
    FakeFabric,
    FakeQueuePair,
    FakeRegion,
    installed,
)
from r2ccl.transport.base import (
    Arrived,
    Cleared,
    Confirmed,
    Failed,
    Fenced,
    Frame,
    Joined,
    RailChanged,
)
from r2ccl.transport.verbs.registration import RegistrationCache
from r2ccl.types import PathKey, ProbeKey

PATH = PathKey(1, 0)
PROBE = ProbeKey(1, 0, 0)


class Pair:
    """Rank 0 (``near``), and rank 1 (``far``), each with the given NICs."""

    def __init__(self, loaded: Any, nics: int = 1) -> None:
        self.loaded = loaded
        self.now = 100.0
        self.error: Any = loaded.device.PyverbsError("gone")
        self.near, self.far = (self._open(rank, nics) for rank in (0, 1))

    def _open(self, rank: int, nics: int) -> Any:
        devices = [self.device(f"n{rank}r{rail}") for rail in range(nics)]
        return self.loaded.transport.VerbsTransport(
            rank, devices, RegistrationCache([each.registrar for each in devices], 1 << 30),
            eager_nbytes=64, timeout=14, retry_cnt=7, probe_timeout_s=1.0, clock=lambda: self.now,
        )  # fmt: skip

    def device(self, name: str, neighbours: Any = None) -> Any:
        return self.loaded.device.RdmaDevice(
            name, 1, lambda: (0, "fe80::1"), neighbours, fastpath="0"
        )

    def connect(self, path: PathKey = PATH) -> None:
        self.far.open(PathKey(0, path.rail), self.join(path))

    def join(self, path: PathKey = PATH) -> Any:
        """Open the near end of `path` only; return the far end."""
        low, high = self.near.offer(path), self.far.offer(PathKey(0, path.rail))
        high.join(low.info, is_caller=False)
        low.join(high.info, is_caller=True)
        assert self.near.poll(0.0) == [Joined(path, low)]
        self.near.open(path, low)
        return high

    def fail(self, *_: Any) -> Any:
        raise self.error


@contextmanager
def paired(nics: int = 1, fabric: FakeFabric | None = None) -> Iterator[Pair]:
    with installed(fabric or FakeFabric()) as loaded:
        pair = Pair(loaded, nics)
        try:
            yield pair
        finally:
            pair.near.close()
            pair.far.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with paired() as made:
        yield made


def test_the_fake_leaves_nothing_behind() -> None:
    shown = vars(importlib.import_module("r2ccl.transport.verbs"))
    before = shown.copy()
    with paired() as pair:
        assert shown["device"] is pair.loaded.device
    assert all(shown.get(name) is before.get(name) for name in vars(pair.loaded))


def test_an_endpoint_info_with_a_malformed_gid_is_refused(pair: Pair) -> None:
    end = pair.near.offer(PATH)
    info = msgspec.msgpack.decode(end.info)
    wrong = msgspec.msgpack.encode(["nonsense" if each == "fe80::1" else each for each in info])
    assert wrong != end.info
    with pytest.raises(TransportError, match="cannot be decoded") as caught:
        end.join(wrong, is_caller=True)
    assert caught.value.status == "ENDPOINT_INFO"


def test_a_removed_nic_fails_the_offer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    end = pair.near.offer(PROBE)
    monkeypatch.setattr(pair.near._devices[0].context, "query_port", pair.fail)
    for ask in (partial(pair.near.offer, PATH), partial(getattr, end, "info")):
        with pytest.raises(TransportError, match="n0r0 refused to query port 1: gone") as caught:
            ask()
        assert caught.value.status == "DEVICE"
    end.close()


@pytest.mark.parametrize("call", ["query_port", "post_recv"])
def test_a_queue_pair_that_cannot_begin_is_closed(
    pair: Pair, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []
    device = pair.near._devices[0]
    monkeypatch.setattr(FakeRegion, "close", lambda region: closed.append(region))
    monkeypatch.setattr(FakeContext if call == "query_port" else FakeQueuePair, call, pair.fail)
    with pytest.raises(TransportError, match=r"n0r0 refused to .*: gone"):
        pair.loaded.queuepair.QueuePair(device, ring_nbytes=4096, timeout=14, retry_cnt=7)
    assert device.context.fabric.qps == {}
    assert len(closed) == 1


def test_a_refused_flush_is_told_once_with_its_rail(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair.connect()
    monkeypatch.setattr(FakeQueuePair, "post_recv", pair.fail)
    pair.near.fence(PATH)
    assert pair.near.poll(0.0) == [Fenced(PATH)]
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0: rail 0 to rank 1: n0r0 refused to flush a queue pair: gone; the queue pair is "
        "destroyed"
    ]


def test_replays_overtake_other_slices_in_their_order(pair: Pair) -> None:
    pair.connect()
    for seq in range(4):
        pair.far.irecv(PathKey(0, 0), Frame(0, seq, 0, 1, 0), memoryview(bytearray(8)))
    pair.far.flush()
    cleared = [event for event in pair.near.poll(0.0) if isinstance(event, Cleared)]
    for seq, event in enumerate(cleared):
        frame, view = Frame(0, seq, 0, 1, 0), memoryview(bytes(8))
        pair.near.isend(PATH, frame, view, event.token, is_replay=seq >= 2)
    pair.near.flush()
    arrived = [event for event in pair.far.poll(0.0) if isinstance(event, Arrived)]
    assert [event.frame.seq for event in arrived] == [2, 3, 0, 1]


def test_a_queue_pair_that_is_not_reset_is_told_with_its_rail(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    end = pair.near.offer(PATH)
    monkeypatch.setattr(FakeQueuePair, "modify", pair.fail)
    end.close()
    monkeypatch.undo()
    pair.near.offer(PATH).close()  # now there is a spare one
    monkeypatch.setattr(FakeQueuePair, "to_init", pair.fail)
    pair.near.offer(PATH).close()
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 0: rail 0 to rank 1: n0r0 refused to {what} a queue pair: gone; the queue pair is "
        "destroyed"
        for what in ("reset", "renew")
    ]


@pytest.mark.parametrize("key", [PathKey(1, 1), ProbeKey(1, 0, 1)])
def test_an_offer_on_a_port_that_is_down_names_the_rail(
    key: PathKey | ProbeKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paired(2) as pair:
        monkeypatch.setattr(pair.near._devices[1], "is_active", lambda: False)
        said = r"rank 0: port 1 of n0r1 \(rail 1, to rank 1\) is not ACTIVE; check its cable"
        with pytest.raises(TransportError, match=said) as caught:
            pair.near.offer(key)
        assert (caught.value.peer, caught.value.rail) == (1, 1)


PORT_ERR, PORT_ACTIVE, DEVICE_FATAL = 10, 9, 8


@pytest.mark.parametrize(("event", "is_up"), [(PORT_ERR, False), (PORT_ACTIVE, True)])
def test_an_event_of_the_other_port_of_a_nic_is_ignored(
    event: int, is_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device passes an event to both contexts; only one port has the state of the event."""
    with paired(2, FakeFabric(nports=2)) as pair:
        for rail, device in enumerate(pair.near._devices):
            monkeypatch.setattr(device, "is_active", lambda rail=rail: (rail == 1) == is_up)
            device.context.raise_event(event)
        assert pair.near.poll(0.0) == [RailChanged(1, is_up)]


def test_every_port_event_of_a_nic_with_one_port_counts(pair: Pair) -> None:
    """The port may be up again already; no other port can have raised the event."""
    pair.near._devices[0].context.raise_event(PORT_ERR)
    assert pair.near.poll(0.0) == [RailChanged(0, is_up=False)]


@pytest.mark.parametrize("call", ["is_active", "query_port"])
def test_a_broken_nic_fails_its_rail_whatever_its_ports(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paired(1, FakeFabric(nports=2)) as pair:
        device = pair.near._devices[0]
        if call == "query_port":  # the device is gone: its events are believed
            monkeypatch.setattr(device.context, "query_port", pair.fail)
        device.context.raise_event(DEVICE_FATAL if call == "is_active" else PORT_ERR)
        [event] = pair.near.poll(0.0)
        assert (event.rail, event.is_up) == (0, False)
        assert bool(event.why) == (call == "is_active")


def test_data_held_until_the_open_is_not_overwritten(pair: Pair) -> None:
    """The peer must not reuse the ring before the events that borrow it have been reported."""
    end, path = pair.join(), PathKey(0, 0)
    for seq in range(20):
        pair.near.isend(PATH, Frame(0, seq, 0, 1, 0), memoryview(bytes([seq]) * 8), None)
    for _ in range(2):
        pair.near.flush()
        pair.far.poll(0.0)
    pair.far.open(path, end)
    found: list[tuple[int, int]] = []
    for _ in range(4):
        pair.far.confirm(path, 5, 1)  # a message, which carries a credit
        pair.far.flush()
        pair.near.poll(0.0)
        pair.near.flush()
        for event in pair.far.poll(0.0):
            assert isinstance(event, Arrived)
            assert event.payload is not None
            found.append((event.frame.seq, event.payload[0]))
    assert found == [(seq, seq) for seq in range(20)]


def test_a_peer_with_a_full_ring_goes_on_after_the_open(pair: Pair) -> None:
    end = pair.join()
    for channel in range(20):
        pair.near.confirm(PATH, channel, 1)
    pair.near.flush()
    for _ in range(2):
        pair.far.poll(0.0)
        pair.far.flush()
    pair.far.open(PathKey(0, 0), end)
    narrived = 0
    for _ in range(4):
        narrived += len(pair.far.poll(0.0))
        pair.far.flush()
        pair.near.poll(0.0)
        pair.near.flush()
    assert narrived == 20


def test_an_end_that_fails_before_the_open_is_told(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, path = pair.join(), PathKey(0, 0)
    pair.near.confirm(PATH, 0, 1)
    pair.near.flush()
    with monkeypatch.context() as refused:
        refused.setattr(FakeQueuePair, "post_recv", pair.fail)
        (event,) = pair.far.poll(0.0)
    assert isinstance(event, Joined)
    assert "refused to post a receive request" in event.error
    pair.far.open(path, end)
    assert any(isinstance(event, Failed) for event in pair.far.poll(0.0))
    assert not pair.far.is_open(path)


def test_data_after_a_failure_is_held_until_the_open(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, path = pair.join(), PathKey(0, 0)
    pair.near.confirm(PATH, 0, 1)
    pair.near.flush()
    with monkeypatch.context() as refused:
        refused.setattr(FakeQueuePair, "post_recv", pair.fail)
        assert [type(event) for event in pair.far.poll(0.0)] == [Joined]
    pair.near.confirm(PATH, 1, 1)
    pair.near.flush()
    assert pair.far.poll(0.0) == []
    pair.far.open(path, end)
    kinds = [type(event) for event in pair.far.poll(0.0)]
    assert kinds == [Confirmed, Failed, Confirmed]


def test_a_message_without_room_at_the_peer_is_unsent(pair: Pair) -> None:
    pair.connect()
    assert not pair.near.has_unsent()
    for channel in range(20):
        pair.near.confirm(PATH, channel, 1)
    pair.near.flush()
    assert pair.near.has_unsent()
    for _ in range(4):
        for side in (pair.far, pair.near):
            side.poll(0.0)
            side.flush()
    assert not pair.near.has_unsent()


@pytest.mark.parametrize("is_fenced", [False, True])
def test_a_path_that_is_over_has_nothing_unsent(
    pair: Pair, is_fenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.connect()
    for channel in range(20):
        pair.near.confirm(PATH, channel, 1)
    pair.near.flush()
    if is_fenced:
        pair.near.fence(PATH)
    else:
        pair.far.poll(0.0)
        pair.far.flush()
        pair.far.poll(0.0)
        pair.far.flush()  # a credit
        monkeypatch.setattr(FakeQueuePair, "post_recv", pair.fail)
        assert Failed in map(type, pair.near.poll(0.0))
    assert not pair.near.has_unsent()


@pytest.mark.parametrize("call", ["get_async_event", "get_cq_event"])
def test_a_removed_device_takes_its_rail_down(
    pair: Pair, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptors of a removed device stay readable and have nothing to read."""
    device = pair.near._devices[0]
    is_async = call == "get_async_event"
    os.eventfd_write(device.async_fd if is_async else device.channel_fd, 1)
    monkeypatch.setattr(FakeContext if is_async else FakeChannel, call, pair.fail)
    [event] = pair.near.poll(0.0)
    assert (type(event), event.is_up) == (RailChanged, False)
    assert "n0r0 refused to" in event.why
    assert pair.near.poll(0.0) == []


def test_what_a_removed_nic_had_counts_as_destroyed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel refuses every call for it; the other NIC is freed nevertheless."""

    gone = set[str]()

    def refuse(call: Any) -> Any:
        def called(part: Any, *given: Any) -> Any:
            if (part if isinstance(part, FakeContext) else part.context).name in gone:
                raise pair.error
            return call(part, *given)

        return called

    for kind, call in [(FakeQueuePair, "modify"), (FakeQueuePair, "close"),
                       (FakeDomain, "close"), (FakeContext, "close")]:  # fmt: skip
        monkeypatch.setattr(kind, call, refuse(getattr(kind, call)))
    with paired(2) as pair:
        pair.error.error_code = errno.EIO
        qps = pair.near._devices[0].context.fabric.qps
        for rail in (0, 1):
            pair.connect(PathKey(1, rail))
            pair.near.offer(ProbeKey(1, rail, rail)).info  # noqa: B018  makes its queue pair
        end = pair.near.offer(ProbeKey(1, 0, 0))
        assert end.info
        gone.add("n0r0")
        end.close()
        pair.near.fence(PATH)
        assert pair.near.poll(0.0) == [Fenced(PATH)]
        assert pair.near.poll(0.0) == []
        pair.near.close()
        assert {qp.context.name for qp in qps.values()} == {"n0r0", "n1r0", "n1r1"}
        os.close(pair.near._devices[0].async_fd)
    assert [record.getMessage() for record in caplog.records] == [
        "n0r0 was removed, with all of its resources (gone): check dmesg",
        "rank 0: rail 0 to rank 1: n0r0 refused to flush a queue pair: gone; the queue pair is "
        "destroyed",
    ]


def test_nics_are_opened_by_one_thread_at_a_time(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyverbs does not tell the descriptor that it opened: it is the one that is new."""
    lock, second_is_here, steps = threading.Lock(), threading.Event(), list[str]()
    make = pair.loaded.device.Context

    class Lock:
        def __enter__(self) -> None:
            if threading.current_thread() is second:
                second_is_here.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def observed(name: str) -> Any:
        steps.append(f"{name} begins")
        if name == "first":
            second.start()
            second_is_here.wait()
        second_is_here.set()
        made = make(name)
        steps.append(f"{name} ends")
        return made

    monkeypatch.setattr(pair.loaded.device, "_opening", Lock())
    monkeypatch.setattr(pair.loaded.device, "Context", observed)
    opened: list[Any] = []
    second = threading.Thread(target=lambda: opened.append(pair.device("second")))
    try:
        opened.append(pair.device("first"))
    finally:
        second.join()
        for device in opened:
            device.close()
    assert steps == ["first begins", "first ends", "second begins", "second ends"]
    assert len(opened) == 2


def test_a_refused_write_keeps_no_memory(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.connect()
    data = np.zeros(8, np.uint8)
    registration = pair.near.register(data)
    pair.far.irecv(PathKey(0, 0), Frame(0, 0, 0, 1, 0), memoryview(bytearray(8)))
    pair.far.flush()
    (cleared,) = pair.near.poll(0.0)
    assert isinstance(cleared, Cleared)
    pair.near.isend(PATH, Frame(0, 0, 0, 1, 0), data.data, cleared.token)
    with monkeypatch.context() as refused:
        refused.setattr(FakeQueuePair, "post_send", pair.fail)
        pair.near.flush()
    registration.close()
    assert registration.is_idle, "it can be evicted"


class Unreadable:
    """A neighbour table that the kernel does not let one read."""

    def knows(self, source: str, destination: str) -> bool:
        raise PermissionError(errno.EPERM, "not permitted")

    def close(self) -> None:
        """Do nothing."""


def test_a_neighbour_that_cannot_be_looked_up_fails_the_join(pair: Pair) -> None:
    info = pair.far.offer(PathKey(0, 0)).info
    end = pair.near.offer(PATH)
    pair.near._devices[0]._neighbours = Unreadable()
    with pytest.raises(TransportError, match="of fe80::1 cannot be looked up: EPERM") as caught:
        end.join(info, is_caller=True)
    assert caught.value.status == "NO_NEIGHBOUR"


@pytest.mark.parametrize("call", ["poll", "req_notify"])
def test_a_nic_that_cannot_be_polled_fails_only_its_rail(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paired(2) as pair:
        pair.connect(PathKey(1, 0))
        pair.connect(PathKey(1, 1))
        monkeypatch.setattr(pair.near._devices[1].cq, call, pair.fail)
        (changed,) = pair.near.poll(0.001)
        assert (changed.rail, changed.is_up) == (1, False)
        assert changed.why.startswith("n0r1 refused to ")
        assert pair.near.poll(0.001) == []  # it is reported once
        pair.near.fence(PathKey(1, 1))
        pair.now += 2.0
        assert pair.near.poll(0.0) == [Fenced(PathKey(1, 1))]
        with pytest.raises(TransportError, match="no longer reports completions"):
            pair.near.offer(PathKey(1, 1))
        pair.near.confirm(PathKey(1, 0), 0, 1)
        pair.near.flush()
        assert pair.far.poll(0.0) == [Confirmed(PathKey(0, 0), 0, 1)]


def test_a_refused_domain_leaves_none_open(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeDomain] = []
    closed: list[FakeDomain] = []

    def make(context: FakeContext) -> FakeDomain:
        if made:
            pair.fail()
        made.append(FakeDomain(context))
        return made[0]

    monkeypatch.setattr(pair.loaded.probe, "PD", make)
    monkeypatch.setattr(FakeDomain, "close", lambda domain: closed.append(domain))
    devices = [*pair.near._devices, *pair.far._devices]
    with pytest.raises(TransportError, match="n1r0 refused to make a protection domain: gone"):
        pair.loaded.probe.VerbsProber(devices, 1.0, lambda: pair.now)
    assert closed == made

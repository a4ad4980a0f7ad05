"""`PxnTransport` step by step: what waits for what, and whose the slots are in every ending."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from r2ccl.clock import monotonic
from r2ccl.device.views import address_of, view_of
from r2ccl.errors import TransportError
from r2ccl.gpu.pxn import transport
from r2ccl.gpu.pxn.relay import Relay
from r2ccl.gpu.pxn.transport import PxnTransport
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu
from r2ccl.testing.fakedevice.board import Board
from r2ccl.testing.simulation.relays import CheckedRelay
from r2ccl.transport.base import (
    Arrived,
    Cleared,
    Confirmed,
    Event,
    Failed,
    Fenced,
    Frame,
    RailChanged,
    Sent,
)
from r2ccl.types import PathKey

PATH, OTHER = PathKey(1, 0), PathKey(2, 0)
SLOT_NBYTES = 64
TOKEN = "token"


class IdleBoard(Board):
    """Cards that work when a test says so, and not when one is asked whether it is done."""

    def advance(self) -> None:
        """Run nothing."""


def idle_gpu(**options: Any) -> FakeGpu:
    return FakeGpu(board=IdleBoard(0, are_hosts_one=True, clock=monotonic), **options)


class Inner:
    """A transport that keeps what it is told, and reports what a test puts into ``events``."""

    nrails = 2

    def __init__(self) -> None:
        self.up = {PATH, OTHER}
        self.events: list[Event] = []
        self.sent: list[tuple[PathKey, int, memoryview, bool]] = []
        self.named: list[tuple[PathKey, int, memoryview, int]] = []
        self.calls: list[Any] = []
        self.timeouts: list[float] = []

    def is_open(self, path: PathKey) -> bool:
        return path in self.up

    def isend(
        self, path: PathKey, frame: Frame, view: memoryview, token: object, is_replay: bool = False
    ) -> None:
        self.sent.append((path, frame.seq, view, is_replay))

    def irecv(self, path: PathKey, frame: Frame, region: memoryview, ack: int = 0) -> None:
        self.named.append((path, frame.seq, region, ack))

    def poll(self, timeout_s: float) -> list[Event]:
        self.timeouts.append(timeout_s)
        events, self.events = self.events, []
        return events

    def limit_s(self, timeout_s: float) -> float:
        return timeout_s / 2

    def fence(self, path: PathKey) -> None:
        self.up.discard(path)
        self.calls.append(("fence", path))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            self.calls.append((name, *given))
            return name

        return call


class Rig:
    """A transport on both rails of which slices are transport, and the memory of its caller."""

    def __init__(self, nslots: int = 2, **gpu: Any) -> None:
        self.gpu = idle_gpu(**gpu)
        self.device = FakeDevice(self.gpu)
        self.inner = Inner()
        self.transport = PxnTransport(self.inner)
        self.relay = CheckedRelay(self.device, SLOT_NBYTES, nslots)
        for rail in range(2):
            self.transport.use(rail, self.relay)

    def memory(self, nbytes: int = 16, value: int = 0) -> memoryview:
        made = view_of(self.device.caller_memory(nbytes), nbytes)
        self.device.write(address_of(made), np.full(nbytes, value, np.uint8))
        return made

    def bytes_of(self, view: memoryview) -> bytes:
        return self.device.read(address_of(view), len(view)).tobytes()

    def send(
        self, seq: int, view: memoryview, path: PathKey = PATH, token: object = TOKEN, **more: bool
    ) -> None:
        self.transport.isend(path, Frame(3, seq, 0, 5, 77), view, token, **more)

    def want(self, seq: int, region: memoryview, path: PathKey = PATH, ack: int = 0) -> None:
        self.transport.irecv(path, Frame(3, seq, 0, 5, 77), region, ack)

    def land(self, seq: int, value: int, path: PathKey = PATH) -> Arrived:
        """Have the NIC write the slice named as `seq`, and report it."""
        place = next(region for at, number, region, _ in self.inner.named if number == seq)
        self.device.nic_write(address_of(place), np.full(len(place), value, np.uint8))
        self.inner.events.append(Arrived(path, Frame(3, seq, 9, 5, 77), None, 1.25))
        return self.inner.events[-1]  # type: ignore[return-value]

    def report(self, *events: Event) -> list[Event]:
        self.inner.events += events
        return self.transport.poll(0.0)

    def poll(self) -> list[Event]:
        """Let the GPU do all it can, and look."""
        self.gpu.run()
        return self.transport.poll(0.0)

    @property
    def seqs(self) -> list[int]:
        return [seq for _, seq, _, _ in self.inner.sent]

    def refuse(self, method: str) -> None:
        self.device.refusals[method] = "CUDA_ERROR_LAUNCH_FAILED"


@pytest.fixture
def rig() -> Rig:
    return Rig()


# Sending


def test_a_slice_leaves_its_slot_once_the_copy_is_known_done(rig: Rig) -> None:
    view = rig.memory(16, value=7)
    rig.send(0, view)
    assert not rig.transport.poll(0.0)
    assert not rig.inner.sent
    rig.gpu.run()
    assert not rig.inner.sent  # nobody has asked yet
    assert not rig.transport.poll(0.0)
    ((_, _, slot, _),) = rig.inner.sent
    assert ("flush",) in rig.inner.calls
    assert address_of(slot) != address_of(view)
    assert rig.bytes_of(slot) == b"\7" * 16
    assert rig.relay.nfree == 1
    assert rig.report(Sent(PATH, 3, 0)) == [Sent(PATH, 3, 0)]
    assert rig.relay.nfree == 2


def test_what_follows_on_the_path_waits_and_keeps_its_order(rig: Rig) -> None:
    rig.send(0, rig.memory())
    rig.send(1, rig.memory(SLOT_NBYTES + 1))
    rig.send(2, memoryview(b"on the host"))
    rig.send(3, memoryview(b"eager"), token=None)
    rig.send(4, rig.memory(), is_replay=True)
    rig.send(5, rig.memory())  # there is no slot left
    rig.send(6, rig.memory(SLOT_NBYTES + 1), path=OTHER)
    assert rig.seqs == [6]
    rig.poll()
    assert rig.seqs == [6, 0, 1, 2, 3, 4, 5]
    assert [seq for _, seq, _, is_replay in rig.inner.sent if is_replay] == [4]


def test_what_cannot_be_relayed_is_sent_and_named_at_once(rig: Rig) -> None:
    large, empty = rig.memory(SLOT_NBYTES + 1), rig.memory()[:0]
    host = memoryview(bytearray(8))
    for seq, view in enumerate((large, empty, host)):
        rig.send(seq, view)
        rig.want(seq, view, ack=4)
    rig.send(3, host, token=None)
    assert [view for _, _, view, _ in rig.inner.sent] == [large, empty, host, host]
    assert [(view, ack) for _, _, view, ack in rig.inner.named] == [
        (large, 4),
        (empty, 4),
        (host, 4),
    ]
    assert rig.relay.nfree == 2


def test_a_full_relay_lets_slices_go_directly(rig: Rig) -> None:
    regions = [rig.memory() for _ in range(3)]
    for seq, region in enumerate(regions):
        rig.want(seq, region)
    places = [region for _, _, region, _ in rig.inner.named]
    assert [place is region for place, region in zip(places, regions, strict=True)] == [
        False,
        False,
        True,
    ]
    rig.send(9, rig.memory())
    assert rig.seqs == [9]


@pytest.mark.parametrize("is_fenced", [True, False])
def test_what_waits_on_a_path_that_is_out_of_use_is_dropped(rig: Rig, is_fenced: bool) -> None:
    rig.send(0, rig.memory())
    rig.send(1, memoryview(b"behind"))
    if is_fenced:
        rig.transport.fence(PATH)
    else:
        rig.inner.up.discard(PATH)
    rig.poll()
    assert not rig.inner.sent
    assert rig.relay.nfree == 2


def test_a_path_that_is_not_open_takes_no_slot(rig: Rig) -> None:
    rig.inner.up.clear()
    rig.send(0, rig.memory())
    rig.want(0, rig.memory())
    assert rig.relay.nfree == 2
    assert not rig.transport.is_busy


# Receiving


def test_a_slice_lands_in_a_slot_and_is_reported_in_its_region(rig: Rig) -> None:
    region = rig.memory()
    rig.want(0, region)
    event = rig.land(0, 5)
    assert not rig.transport.poll(0.0)
    assert rig.relay.nfree == 1
    assert rig.poll() == [Arrived(PATH, Frame(3, 0, 9, 5, 77), None, 1.25)]
    assert event.frame.ack == 9
    assert rig.bytes_of(region) == b"\5" * 16
    assert rig.relay.nfree == 2


def test_events_of_a_path_keep_their_order_and_others_go_on(rig: Rig) -> None:
    rig.want(0, rig.memory())
    landed = rig.land(0, 5)
    later: list[Event] = [
        Cleared(PATH, landed.frame, 8, TOKEN),
        Confirmed(PATH, 3, 1),
        Sent(PATH, 3, 4),
        Failed(PATH, "EOF", "closed"),
    ]
    others: list[Event] = [Confirmed(OTHER, 3, 1), RailChanged(0, False)]
    assert rig.report(*later, *others) == others
    rig.transport.fence(PATH)
    assert rig.report(Fenced(PATH)) == []
    assert rig.poll() == [landed, *later, Fenced(PATH)]
    assert rig.relay.nfree == 2


def test_a_held_payload_outlives_the_poll_it_was_borrowed_for(rig: Rig) -> None:
    rig.want(0, rig.memory())
    rig.land(0, 5)
    lent = bytearray(b"eager")
    assert not rig.report(Arrived(PATH, Frame(3, 1, 0, 5, 77), memoryview(lent), 1.5))
    lent[:] = b"other"
    event = rig.poll()[1]
    assert isinstance(event, Arrived)
    assert event.payload == b"eager"


def test_no_slice_a_copy_could_lose_is_confirmed_by_the_inner(rig: Rig) -> None:
    rig.want(0, rig.memory(), ack=1)  # relayed
    rig.want(1, memoryview(bytearray(8)), ack=2)  # behind it
    rig.want(2, memoryview(bytearray(8)), path=OTHER, ack=3)
    rig.land(0, 5)
    rig.transport.poll(0.0)
    rig.want(3, memoryview(bytearray(8)), ack=4)  # the copy is under way
    rig.poll()
    rig.want(4, memoryview(bytearray(8)), ack=5)
    assert [(seq, ack) for _, seq, _, ack in rig.inner.named] == [
        (0, 0),
        (1, 0),
        (2, 3),
        (3, 0),
        (4, 5),
    ]


def test_what_a_nic_wrote_is_flushed_before_it_is_copied() -> None:
    """Else the fake finds the copy to miss it; also where it is a slice that is passed on."""
    rig = Rig(reorders_remote_writes=True)
    region = rig.memory()
    direct = rig.memory()
    rig.device.nic_write(address_of(direct), np.full(16, 6, np.uint8))
    rig.send(1, direct)
    rig.poll()
    assert rig.bytes_of(rig.inner.sent[0][2]) == b"\6" * 16
    rig.want(0, region)
    rig.land(0, 5)
    rig.transport.poll(0.0)
    assert [type(event) for event in rig.poll()] == [Arrived]
    assert rig.bytes_of(region) == b"\5" * 16


# Fences


def test_fenced_waits_for_the_copy_of_a_slice_that_was_dropped(rig: Rig) -> None:
    view = rig.memory()
    rig.send(0, view)
    rig.transport.fence(PATH)
    assert rig.relay.nfree == 1
    assert not rig.report(Fenced(PATH))
    assert not rig.transport.poll(0.0)
    assert rig.poll() == [Fenced(PATH)]
    assert rig.relay.nfree == 2
    rig.device.free_caller_memory(address_of(view))  # found, if the copy were under way
    assert not rig.inner.sent


def test_a_fence_gives_back_what_the_nic_had(rig: Rig) -> None:
    rig.send(0, rig.memory())
    rig.poll()
    rig.want(0, rig.memory())
    assert rig.relay.nfree == 0
    rig.transport.fence(PATH)
    assert rig.report(Fenced(PATH)) == [Fenced(PATH)]
    assert rig.relay.nfree == 2


def test_a_fence_of_one_path_leaves_the_slots_of_another(rig: Rig) -> None:
    rig.want(0, rig.memory())
    rig.want(1, rig.memory(), path=OTHER)
    rig.transport.fence(PATH)
    assert rig.report(Fenced(PATH)) == [Fenced(PATH)]
    assert rig.relay.nfree == 1
    rig.land(1, 5, path=OTHER)
    assert not rig.transport.poll(0.0)
    assert len(rig.poll()) == 1


def test_a_path_relays_again_after_its_fence(rig: Rig) -> None:
    rig.refuse("copy")
    rig.send(0, rig.memory())
    assert [type(event) for event in rig.transport.poll(0.0)] == [Failed]
    rig.transport.fence(PATH)
    assert rig.report(Fenced(PATH)) == [Fenced(PATH)]
    rig.inner.up.add(PATH)
    rig.device.refusals.clear()
    rig.transport.use(0, CheckedRelay(rig.device, SLOT_NBYTES, 1))
    assert rig.transport.is_open(PATH)
    rig.send(0, rig.memory())
    rig.poll()
    assert rig.seqs == [0]


# Failures


def failed(events: list[Event]) -> list[tuple[PathKey, str]]:
    return [(event.path, event.status) for event in events if isinstance(event, Failed)]


@pytest.mark.parametrize("method", ["copy", "record"])
def test_a_copy_that_cannot_be_begun_is_the_paths_failure(rig: Rig, method: str) -> None:
    rig.refuse(method)
    rig.send(0, rig.memory())
    assert not rig.transport.is_open(PATH)
    assert rig.transport.limit_s(1.0) == 0.0
    events = rig.transport.poll(1.0)
    assert failed(events) == [(PATH, "CUDA_ERROR_LAUNCH_FAILED")]
    assert "CUDA_ERROR_LAUNCH_FAILED" in events[0].detail  # type: ignore[union-attr]
    assert "dmesg" in events[0].detail  # type: ignore[union-attr]
    rig.send(1, memoryview(b"host"))
    rig.want(1, memoryview(bytearray(8)))
    rig.transport.confirm(PATH, 3, 1)
    assert not rig.inner.sent
    assert not rig.inner.named
    assert ("confirm", PATH, 3, 1) not in rig.inner.calls
    assert rig.report(Failed(PATH, "EOF", "closed")) == []
    rig.transport.fence(PATH)
    assert rig.report(Fenced(PATH)) == [Fenced(PATH)]


def test_a_relay_that_failed_is_used_no_more(rig: Rig) -> None:
    rig.refuse("copy")
    rig.send(0, rig.memory())
    rig.device.refusals.clear()
    assert isinstance(rig.relay.error, TransportError)
    view = rig.memory()
    rig.send(1, view, path=OTHER)
    rig.want(1, view, path=OTHER)
    assert [sent[2] for sent in rig.inner.sent] == [view]
    assert [named[2] for named in rig.inner.named] == [view]


def test_a_slice_without_its_copy_is_missing_and_others_arrive(rig: Rig) -> None:
    rig.want(0, rig.memory())
    rig.want(1, memoryview(bytearray(8)))
    rig.land(0, 5)
    rig.refuse("copy")
    events = rig.report(Arrived(PATH, Frame(3, 1, 0, 5, 77), None, 1.5))
    assert [type(event) for event in events] == [Failed, Arrived]
    assert failed(events) == [(PATH, "CUDA_ERROR_LAUNCH_FAILED")]
    assert events[1].frame.seq == 1  # type: ignore[union-attr]


def test_a_copy_that_fails_later_fails_each_path_it_was_for(rig: Rig) -> None:
    rig.want(0, rig.memory())
    rig.land(0, 5)
    rig.transport.poll(0.0)
    rig.send(0, rig.memory(), path=OTHER)
    rig.send(1, memoryview(b"behind"), path=OTHER)
    rig.gpu.run()
    rig.refuse("is_done")
    status = "CUDA_ERROR_LAUNCH_FAILED"
    events = rig.transport.poll(0.0)
    assert sorted(failed(events)) == [(PATH, status), (OTHER, status)]
    assert len(events) == 2
    assert not rig.inner.sent
    for path in (PATH, OTHER):
        rig.transport.fence(path)
        assert rig.report(Fenced(path)) == [Fenced(path)]
    assert not rig.transport.is_busy


def test_a_path_that_is_being_fenced_does_not_fail_too(rig: Rig) -> None:
    rig.want(0, rig.memory())
    rig.land(0, 5)
    rig.transport.poll(0.0)
    rig.transport.fence(PATH)
    rig.gpu.run()
    rig.refuse("is_done")
    assert rig.report(Fenced(PATH)) == [Fenced(PATH)]
    assert not rig.transport.is_busy


# Sleeping, and the end of a use


def test_nothing_sleeps_while_copies_are_under_way(rig: Rig) -> None:
    rig.transport.poll(4.0)
    assert rig.transport.limit_s(4.0) == 2.0
    rig.send(0, rig.memory())
    assert rig.transport.limit_s(4.0) == 0.0
    assert rig.transport.is_busy
    rig.transport.poll(4.0)
    rig.gpu.run()
    rig.transport.poll(4.0)
    assert not rig.transport.is_busy
    assert rig.transport.limit_s(4.0) == 2.0
    rig.transport.poll(4.0)
    assert rig.inner.timeouts == [4.0, 0.0, 0.0, 4.0]


def test_a_use_that_ended_leaves_nothing_to_look_at(rig: Rig) -> None:
    rig.send(0, rig.memory())
    rig.want(0, rig.memory())
    rig.transport.use(0, None)
    rig.send(1, rig.memory())  # behind the first
    rig.want(1, rig.memory())
    rig.poll()
    assert rig.seqs == [0, 1]
    rig.land(0, 5)
    rig.transport.poll(0.0)
    rig.report(Sent(PATH, 3, 0))
    assert [type(event) for event in rig.poll()] == [Arrived, Sent]
    assert rig.relay.nfree == 2
    assert not rig.transport._states
    rig.transport.poll(4.0)
    assert rig.inner.timeouts[-1] == 4.0
    rig.device.free(rig.relay._slots[0].address)
    rig.relay.close()


def test_without_a_use_all_calls_only_pass() -> None:
    inner = Inner()
    transport = PxnTransport(inner)
    view = memoryview(b"host")
    transport.isend(PATH, Frame(3, 0, 0, 5, 77), view, TOKEN, True)
    transport.irecv(PATH, Frame(3, 0, 0, 5, 77), view, 6)
    assert inner.sent == [(PATH, 0, view, True)]
    assert inner.named == [(PATH, 0, view, 6)]
    memory = np.empty(1, np.uint8)
    for name, given in {
        "joins": (1,), "offer": (PATH,), "open": (PATH, None), "allocate": (8,),
        "register": (memory,), "register_device": (1, 2), "confirm": (PATH, 3, 1), "flush": (),
        "wake": (), "is_stuck": (PATH,), "probe": (None,), "fileno": (), "arm": (), "close": (),
    }.items():  # fmt: skip
        result = getattr(transport, name)(*given)
        assert inner.calls.pop() == (name, *given)
        assert result in (name, None)


def test_close_waits_for_the_copies(rig: Rig) -> None:
    view = rig.memory()
    rig.send(0, view)
    rig.send(1, memoryview(b"behind"))
    rig.transport.close()
    rig.device.free_caller_memory(address_of(view))
    assert rig.relay.nfree == 2
    assert not rig.inner.sent
    rig.relay.close()


def test_close_says_that_a_gpu_hangs(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_CLOSE_TIMEOUT_S", 0.01)
    word = rig.device.allocate(4)
    rig.device.write(word, np.zeros(4, np.uint8))
    rig.device.wait_word(rig.relay._inwards._stream, word, 1)
    rig.send(0, rig.memory())
    with caplog.at_level(logging.WARNING, "r2ccl"):
        rig.transport.close()
    assert ["a GPU may hang" in record.message for record in caplog.records] == [True]


def test_close_waits_for_the_relays_behind_one_that_hangs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the second relay can end only after the wait for the first."""
    monkeypatch.setattr(transport, "_CLOSE_TIMEOUT_S", 0.01)
    second, path = CheckedRelay(rig.device, SLOT_NBYTES, 2), PathKey(1, 1)
    rig.transport.use(1, second)
    rig.inner.up.add(path)
    words = [rig.device.allocate_pinned(64).view(np.uint32) for _ in range(2)]
    for relay, word in zip((rig.relay, second), words, strict=True):
        rig.device.wait_word(relay._inwards._stream, word.ctypes.data, 1)
    drain = rig.relay.drain

    def drain_first(timeout_s: float) -> bool:
        is_done = drain(timeout_s)
        words[1][0] = 1
        return is_done

    rig.relay.drain = drain_first  # type: ignore[method-assign]
    view = rig.memory()
    rig.send(0, rig.memory(), PATH)
    rig.send(0, view, path)
    rig.transport.close()
    assert (rig.relay.nfree, second.nfree) == (1, 2)
    rig.device.free_caller_memory(address_of(view))
    second.close()


def test_a_relay_refuses_what_has_no_room_in_a_slot() -> None:
    rig = Rig(nslots=1)
    assert rig.relay.take(SLOT_NBYTES + 1) is None
    slot = rig.relay.take(SLOT_NBYTES)
    assert slot is not None
    assert rig.relay.take(1) is None
    rig.relay.give(slot)
    assert rig.relay.nfree == 1


# Two GPUs


class Pair:
    """A relay in the memory of the GPU beside the one that has the slices."""

    def __init__(self) -> None:
        card = idle_gpu()
        self.home = FakeDevice(card, "rank 0", ordinal=0)
        self.beside = FakeDevice(card.beside(), "rank 0", ordinal=1)
        self.home.reach(self.beside)
        self.beside.reach(self.home)
        self.address = self.beside.allocate(SLOT_NBYTES)

    def relay(self) -> Relay:
        return Relay(self.beside, self.address, SLOT_NBYTES, 1, home=self.home)

    def streams(self) -> list[int]:
        """How many streams and events each device has."""
        return [len(each._streams) + len(each._events) for each in (self.home, self.beside)]


def test_the_gpu_that_has_what_is_copied_copies_it() -> None:
    """What NICs wrote to its memory is in order, or flushed, for it alone."""
    pair = Pair()
    relay = pair.relay()
    slot = relay.take(16)
    assert slot is not None
    region = view_of(pair.home.caller_memory(16), 16)
    pair.home.write(address_of(region), np.full(16, 7, np.uint8))
    relay.copy_in(slot, region)
    assert [len(each.pending()) for each in (pair.home, pair.beside)] == [2, 0]
    assert relay.drain(1.0)
    assert relay.collect() == [slot]
    relay.copy_out(slot, region)
    assert [len(each.pending()) for each in (pair.home, pair.beside)] == [0, 2]
    assert relay.drain(1.0)
    assert relay.collect() == [slot]
    relay.close()


@pytest.mark.parametrize("method", ["make_stream", "make_event"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_relay_that_cannot_be_made_leaves_nothing_behind(method: str, which: int) -> None:
    pair = Pair()
    before = pair.streams()
    (pair.home, pair.beside)[which].refusals[method] = "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(TransportError):
        pair.relay()
    assert pair.streams() == before

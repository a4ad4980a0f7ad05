"""PXN routes are opened when a near rail is lost, once, and given back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from r2ccl.device.views import view_of
from r2ccl.errors import TransportError
from r2ccl.failover.health.table import Health, RailShare
from r2ccl.gpu.nic_affinity import PxnRoute
from r2ccl.gpu.pxn.relay import Relay
from r2ccl.gpu.pxn.routes import PxnRoutes
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu

NRAILS, SLOT_NBYTES, NSLOTS = 4, 256, 3
VIA = {1: "0000:01:00.0", 2: "0000:01:00.0", 3: "0000:02:00.0"}


class Used:
    """What of a `PxnTransport` pxn_routes see."""

    def __init__(self) -> None:
        self.relays: dict[int, Relay] = {}

    def use(self, rail: int, relay: Relay | None) -> None:
        if relay is None:
            del self.relays[rail]
        else:
            self.relays[rail] = relay


class Bench:
    """Rank 0 and its GPU, two more GPUs beside it, and rank 2 that it meets on rail 0."""

    def __init__(self) -> None:
        cards = [FakeGpu(1)]
        cards += [cards[0].beside(bus_id=via) for via in dict.fromkeys(VIA.values())]
        self.device, *peers = (FakeDevice(card, "rank 0", at) for at, card in enumerate(cards))
        self.peers: dict[str, Any] = {each.bus_id: each for each in peers}
        self.is_owner = False
        self.asked: list[str] = []
        self.used: Any = Used()
        self.health = Health.whole(3, NRAILS)
        self.registered: list[tuple[int, int]] = []
        self.refuses: Callable[[], bool] = lambda: False
        self.pxn_routes = PxnRoutes(
            self.device,
            0,
            [PxnRoute(rail, via) for rail, via in VIA.items()],
            (0, 2),
            (0,),
            transport=self.used,
            register=self.register,
            run_in_data_loop=self.own,
            open_peer=self.open_peer,
            health=lambda: self.health,
            slot_nbytes=SLOT_NBYTES,
            nslots=NSLOTS,
        )

    def own(self, fn: Callable[[], Any]) -> Any:
        self.is_owner = True
        try:
            return fn()
        finally:
            self.is_owner = False

    def open_peer(self, via: str) -> Any:
        self.asked.append(via)
        return self.peers[via]

    def register(self, address: int, nbytes: int) -> Any:
        if self.refuses():
            raise TransportError("no NIC reaches it", status="NO_DIRECT_WAY")
        self.registered.append((address, nbytes))
        bench = self

        class Registered:
            def close(self) -> None:
                bench.registered.remove((address, nbytes))

        return Registered()

    def lose(self, *ports: tuple[int, int], share: int = 0) -> None:
        self.health = self.health.changed(RailShare(rank, rail, share) for rank, rail in ports)
        if self.pxn_routes.is_open_needed:
            self.pxn_routes.open()

    def close(self) -> None:
        assert self.pxn_routes.drain(1.0)
        assert self.pxn_routes.close(1.0)
        assert not self.registered
        assert not self.used.relays
        self.device.close()


def test_nothing_is_opened_while_the_near_rails_are_whole() -> None:
    bench = Bench()
    bench.lose((0, 1), (2, 3), (1, 0))
    assert not bench.asked
    assert not bench.pxn_routes.is_open_needed
    bench.close()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_near_rail_lost_at_either_end_opens_all_that_are_up(rank: int) -> None:
    bench = Bench()
    bench.lose((rank, 0), (0, 2))
    assert sorted(bench.used.relays) == [1, 3]
    assert sorted(bench.asked) == sorted({VIA[1], VIA[3]})
    assert [nbytes for _, nbytes in bench.registered] == [SLOT_NBYTES * NSLOTS] * 2
    bench.lose((rank, 0), share=2)
    assert sorted(bench.used.relays) == [1, 3]
    # What comes back later, while the near rail is still slow, is opened then.
    bench.health = bench.health.changed([RailShare(0, 2, 4)])
    assert bench.pxn_routes.is_open_needed
    bench.pxn_routes.open()
    assert sorted(bench.used.relays) == [1, 2, 3]
    assert len(bench.asked) == 2
    assert not bench.pxn_routes.is_open_needed
    bench.close()


def test_slots_are_beside_the_nic_and_both_gpus_reach_each_other() -> None:
    bench = Bench()
    bench.lose((0, 0))
    relay = bench.used.relays[3]
    slot = relay.take(SLOT_NBYTES)
    assert slot is not None
    mine = bench.device.allocate(SLOT_NBYTES)
    relay.copy_in(slot, view_of(mine, SLOT_NBYTES))
    assert relay.drain(1.0)
    relay.collect()
    relay.copy_out(slot, view_of(mine, SLOT_NBYTES))
    assert relay.drain(1.0)
    relay.collect()
    relay.give(slot)
    bench.peers[VIA[3]].export(slot.address)  # which only the GPU that has it can
    bench.device.free(mine)
    bench.close()


@pytest.mark.parametrize("how", ["invisible", "reach", "memory", "nics"])
def test_what_cannot_be_opened_is_done_without(how: str, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    if how == "invisible":
        bench.peers[VIA[1]] = None
    elif how == "reach":
        bench.peers[VIA[1]].refusals["reach"] = "NO_PEER_ACCESS"
    elif how == "memory":
        bench.peers[VIA[1]].refusals["allocate"] = "CUDA_ERROR_OUT_OF_MEMORY"
    else:
        bench.refuses = lambda: bench.asked == [VIA[1]]
    with caplog.at_level(logging.INFO, "r2ccl"):
        bench.lose((0, 0))
    assert sorted(bench.used.relays) == [3]
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith(f"rank 0: slices for rail 1 do not pass through GPU {VIA[1]}: ")
    bench.lose((2, 0))
    assert len(bench.asked) == 2
    bench.close()


def test_rails_that_cannot_be_reached_are_not_waited_for() -> None:
    """Opening waits for earlier calls: there must be something to open."""
    bench = Bench()
    bench.lose((0, 0), (0, 1), (0, 2))
    assert sorted(bench.used.relays) == [3]
    bench.health = bench.health.changed([RailShare(2, 1, 0)])
    assert not bench.pxn_routes.is_open_needed
    bench.health = bench.health.changed([RailShare(0, 1, 16)])
    assert bench.pxn_routes.is_open_needed
    bench.close()


def test_copies_are_waited_for_by_the_owner_of_the_loop_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    bench.lose((0, 0))
    asked: list[str] = []

    def watched(name: str) -> Any:
        original = getattr(Relay, name)

        def method(relay: Relay, *given: Any) -> Any:
            assert bench.is_owner, f"{name} by who does not own the loop"
            asked.append(name)
            return original(relay, *given)

        return method

    for name in ("drain", "collect", "close"):
        monkeypatch.setattr(Relay, name, watched(name))
    bench.close()
    assert set(asked) == {"drain", "collect", "close"}


@pytest.mark.parametrize("call", ["destroy_stream", "free", "close"])
def test_a_gpu_that_fails_keeps_nothing_else_from_being_freed(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    bench.lose((0, 0))
    lost, other = (bench.peers[via] for via in (VIA[1], VIA[3]))

    def fail(*given: Any) -> None:
        raise TransportError("the GPU is lost", status="CUDA_ERROR_UNKNOWN")

    monkeypatch.setattr(lost, call, fail)
    with caplog.at_level(logging.WARNING, "r2ccl"):
        bench.close()
    assert other._is_closed
    said = {record.getMessage() for record in caplog.records}
    assert len(said) == 1
    assert f"GPU {VIA[1]}" in said.pop()


@pytest.mark.parametrize("is_home", [False, True])
def test_what_a_hanging_gpu_works_on_is_kept(
    is_home: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    bench.lose((0, 0), (0, 1))
    relay = bench.used.relays[2]
    peer, other = (bench.peers[via] for via in (VIA[2], VIA[3]))
    copier = bench.device if is_home else peer
    word = copier.allocate_pinned(64)
    lane = relay._inwards if is_home else relay._outwards
    copier.wait_word(lane._stream, int(word.ctypes.data), 1)
    mine = bench.device.allocate(SLOT_NBYTES)
    slot = relay.take(SLOT_NBYTES)
    assert slot is not None
    (relay.copy_in if is_home else relay.copy_out)(slot, view_of(mine, SLOT_NBYTES))
    with caplog.at_level(logging.WARNING, "r2ccl"):
        assert not bench.pxn_routes.drain(0.01)
        assert relay.is_busy
        assert not bench.pxn_routes.close(0.01)
    assert f"the memory of GPU {VIA[2]} did not end in time" in caplog.text
    assert not bench.used.relays
    assert other._is_closed
    assert not peer._is_closed
    word.view("uint32")[0] = 1
    peer.export(slot.address)
    assert relay.drain(1.0)
    peer.close()
    bench.device.close()

"""Others on a fake GPU's memory: NICs that write to it, and GPUs that are let reach it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.fake_bench import NBYTES, PAGE, Bench, by_seeds, launch_add, load_add

from r2ccl.errors import TransportError
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu, Misuse, Race, StillInUse


def a_copy_reads_what_a_nic_wrote(b: Bench, is_right: bool) -> None:
    landing, target = b.memory(), b.memory()
    b.device.nic_write(landing, b.data)
    if is_right:
        b.device.flush_remote_writes()
    b.device.copy(target, landing, NBYTES, b.first)
    b.finish(b.first)
    b.holds(target, b.data)


def a_kernel_that_was_given_before_the_flush(b: Bench, is_right: bool) -> None:
    kernel, landing, target = load_add(b.device), b.memory(), b.memory()
    b.device.nic_write(landing, b.data)
    if is_right:
        b.device.flush_remote_writes()
    launch_add(b.device, kernel, target, landing, b.memory(b.data), b.first)
    b.device.flush_remote_writes()
    b.finish(b.first)
    b.holds(target, b.data + b.data)


def a_copy_overwrites_what_a_nic_wrote(b: Bench, is_right: bool) -> None:
    landing = b.memory()
    b.device.nic_write(landing, b.data + 1)
    if is_right:
        b.device.flush_remote_writes()
    b.device.copy(landing, b.memory(b.data), NBYTES, b.first)
    b.finish(b.first)
    b.holds(landing, b.data)


def a_flush_is_of_the_last_write_too(b: Bench, is_right: bool) -> None:
    landing, target = b.memory(), b.memory()
    for turn in range(3):
        b.device.nic_write(landing, b.data + turn)
        if is_right or turn < 2:
            b.device.flush_remote_writes()
        b.device.copy(target, landing, NBYTES, b.first)
        b.finish(b.first)
        b.holds(target, b.data + turn)


def a_stream_waits_for_a_word_that_a_host_wrote_too_early(b: Bench, is_right: bool) -> None:
    landing, target = b.memory(), b.memory()
    words = b.device.allocate_pinned(NBYTES).view(np.uint32)
    b.device.wait_word(b.first, words.ctypes.data, 1)
    b.device.copy(target, landing, NBYTES, b.first)
    b.device.nic_write(landing, b.data)
    if is_right:
        b.device.flush_remote_writes()
    words[0] = 1
    b.finish(b.first)
    b.holds(target, b.data)


CASES = [
    a_copy_reads_what_a_nic_wrote,
    a_kernel_that_was_given_before_the_flush,
    a_copy_overwrites_what_a_nic_wrote,
    a_flush_is_of_the_last_write_too,
    a_stream_waits_for_a_word_that_a_host_wrote_too_early,
]
by_name = pytest.mark.parametrize("act", CASES, ids=lambda act: act.__name__)


@by_name
def test_work_that_no_flush_precedes_is_found(act: Callable[[Bench, bool], None]) -> None:
    for seed in range(40):
        with pytest.raises(Race, match=r"a NIC of rank 0, which writes 64 bytes"):
            act(Bench(seed, reorders_remote_writes=True), False)


@by_seeds
@by_name
def test_work_after_a_flush_sees_what_nics_wrote(
    act: Callable[[Bench, bool], None], nseeds: int
) -> None:
    for seed in range(nseeds):
        act(Bench(seed, reorders_remote_writes=True), True)


@by_name
@pytest.mark.parametrize("is_right", [False, True])
def test_a_card_that_keeps_the_order_needs_no_flush(
    act: Callable[[Bench, bool], None], is_right: bool
) -> None:
    for seed in range(40):
        b = Bench(seed)
        assert not b.device.reorders_remote_writes
        act(b, is_right)


def test_hosts_and_nics_see_what_nics_wrote_without_a_flush() -> None:
    """A NIC that sends it on, a second one that writes there, and who frees it."""
    b = Bench(reorders_remote_writes=True)
    assert b.device.reorders_remote_writes
    landing = b.memory()
    for turn in range(2):
        b.device.nic_write(landing, b.data + turn)
        b.holds(landing, b.data + turn)

    b.device.free(landing)


@pytest.mark.parametrize("reorders", [False, True])
def test_a_nic_writes_after_the_work_its_host_knows_to_be_over(reorders: bool) -> None:
    for is_right in (True, False):
        for seed in range(40):
            b = Bench(seed, reorders_remote_writes=reorders)
            landing, target = b.memory(b.data), b.memory()
            b.device.copy(target, landing, NBYTES, b.first)
            if is_right:
                b.finish(b.first)
                b.device.nic_write(landing, b.data + 1)
            else:
                with pytest.raises(Race, match=r"a NIC of rank 0|copy of"):
                    b.device.nic_write(landing, b.data + 1)


def test_each_process_flushes_what_was_written_for_it() -> None:
    b = Bench(are_hosts_one=False, reorders_remote_writes=True)
    landing, target, stream = b.memory(), b.peer.allocate(NBYTES), b.peer.make_stream()
    theirs = b.peer.map(b.device.export(landing)[0])
    b.device.nic_write(landing, b.data)
    b.device.flush_remote_writes()
    b.peer.hear(b.device.tell())
    b.peer.copy(target, theirs, NBYTES, stream)
    b.finish(stream, b.peer)
    b.device.hear(b.peer.tell())

    b.device.nic_write(landing, b.data)
    b.peer.flush_remote_writes()
    b.peer.hear(b.device.tell())
    b.peer.copy(target, theirs, NBYTES, stream)
    with pytest.raises(Race, match="a NIC of rank 0"):
        b.gpu.run()


def test_memory_a_kernel_may_read_stays_taken_after_a_nics_write() -> None:
    b = Bench(reorders_remote_writes=True)
    landing = b.memory()
    b.device.nic_write(landing, b.data)
    b.device.flush_remote_writes()
    b.device.copy(b.memory(), landing, NBYTES, b.first)
    with pytest.raises(StillInUse):
        b.device.free(landing)


def test_a_card_that_its_host_cannot_flush_says_so() -> None:
    b = Bench(reorders_remote_writes=True)
    b.device.refusals["flush_remote_writes"] = "NO_FLUSH"
    with pytest.raises(TransportError) as caught:
        b.device.flush_remote_writes()
    assert caught.value.status == "NO_FLUSH"


def test_a_nic_that_writes_to_pinned_memory_needs_no_flush() -> None:
    for seed in range(40):
        b = Bench(seed, reorders_remote_writes=True)
        slot, target = b.device.allocate_pinned(NBYTES), b.memory()
        b.device.nic_write(slot.ctypes.data, b.data)
        b.device.copy(target, slot.ctypes.data, NBYTES, b.first)
        b.finish(b.first)
        b.holds(target, b.data)


# Peers


class Pair(Bench):
    """A bench whose first process has a second GPU, which it lets the first reach."""

    def __init__(self, seed: int = 0, *, reaches: bool = True, **options: Any) -> None:
        super().__init__(seed)
        self.beside = FakeDevice(self.gpu.beside(**options), "rank 0", ordinal=1)
        self.theirs = self.beside.allocate(NBYTES)
        self.beside.write(self.theirs, self.data)
        self.stream = self.beside.make_stream()
        if reaches:
            self.device.reach(self.beside)


def test_cards_beside_each_other_are_different_gpus() -> None:
    b = Pair()

    assert b.device.uuid != b.beside.uuid
    assert b.device.bus_id != b.beside.bus_id
    assert (b.device.ordinal, b.beside.ordinal) == (0, 1)
    card = b.gpu.beside(uuid=bytes(16), bus_id="0001:02:03.0", capability=(8, 0))
    device = FakeDevice(card)
    assert (device.uuid, device.bus_id, device.capability) == (bytes(16), "0001:02:03.0", (8, 0))


@by_seeds
def test_a_gpu_reads_and_writes_the_memory_of_one_it_reaches(nseeds: int) -> None:
    for seed in range(nseeds):
        b = Pair(seed)
        mine = b.memory()
        b.device.copy(mine, b.theirs, NBYTES, b.first)
        launch_add(b.device, load_add(b.device), b.theirs, mine, mine, b.first)
        b.finish(b.first)
        b.holds(mine, b.data)
        assert bytes(b.beside.read(b.theirs, NBYTES)) == bytes(b.data + b.data)


def uses(b: Pair) -> list[Callable[[], object]]:
    """Whatever takes an address of the other GPU's memory."""
    mine = b.memory()
    return [
        lambda: b.device.copy(mine, b.theirs, NBYTES, b.first),
        lambda: b.device.copy(b.theirs, mine, NBYTES, b.first),
        lambda: b.device.copy_rows(mine, 8, b.theirs, 16, 8, 2, b.first),
        lambda: b.device.write_word(b.first, b.theirs, 1),
        lambda: b.device.wait_word(b.first, b.theirs, 1),
        lambda: b.device.read(b.theirs, NBYTES),
        lambda: b.device.write(b.theirs, b.data),
    ]


def test_what_a_gpu_was_not_let_reach_is_not_its_to_use() -> None:
    for turn in range(len(uses(Pair()))):
        uses(Pair())[turn]()
        with pytest.raises(Misuse, match=r"is memory of another GPU: call `reach`"):
            uses(Pair(reaches=False))[turn]()


def test_a_kernel_uses_only_what_its_gpu_reaches() -> None:
    for seed in range(40):
        b = Pair(seed, reaches=False)
        kernel, mine = load_add(b.device), b.memory()
        launch_add(b.device, kernel, mine, b.theirs, mine, b.first)
        with pytest.raises(Misuse, match="call `reach`"):
            b.gpu.run()


def test_reaching_is_one_way() -> None:
    b = Pair()
    with pytest.raises(Misuse, match="call `reach`"):
        b.beside.copy(b.theirs, b.memory(), NBYTES, b.stream)


def test_later_allocations_are_reached_and_a_gpu_reaches_itself() -> None:
    b = Pair()
    b.device.reach(b.beside)
    b.device.reach(b.device)
    later = b.beside.allocate(NBYTES)

    b.device.copy(later, b.memory(b.data), NBYTES, b.first)
    b.finish(b.first)

    assert bytes(b.beside.read(later, NBYTES)) == bytes(b.data)


def test_a_gpu_of_another_machine_is_not_reached() -> None:
    b = Bench()
    with pytest.raises(TransportError) as caught:
        b.device.reach(FakeDevice(FakeGpu(uuid=bytes(16)), "rank 0"))
    assert caught.value.status == "NO_PEER_ACCESS"
    b.device.refusals["reach"] = "CUDA_ERROR_TOO_MANY_PEERS"
    with pytest.raises(TransportError) as caught:
        b.device.reach(FakeDevice(b.gpu.beside(), "rank 0"))
    assert caught.value.status == "CUDA_ERROR_TOO_MANY_PEERS"


def test_what_another_process_opened_is_not_reached() -> None:
    b = Bench()
    with pytest.raises(Misuse, match="rank 7 is another process: use `map` for its memory"):
        b.device.reach(FakeDevice(b.gpu.beside(), "rank 7"))


def test_work_of_two_gpus_on_one_memory_is_ordered_by_the_host() -> None:
    for is_right in (True, False):
        for seed in range(40):
            b = Pair(seed)
            mine, more = b.memory(), b.beside.allocate(NBYTES)
            b.beside.copy(b.theirs, more, NBYTES, b.stream)
            if is_right:
                b.finish(b.stream, b.beside)
            b.device.copy(mine, b.theirs, NBYTES, b.first)
            if is_right:
                b.finish(b.first)
            else:
                with pytest.raises(Race):
                    b.gpu.run()


def test_memory_is_freed_while_a_peer_uses_it() -> None:
    for is_right in (True, False):
        b = Pair()
        b.device.copy(b.memory(), b.theirs, NBYTES, b.first)
        if is_right:
            b.finish(b.first)
            b.beside.free(b.theirs)
        else:
            with pytest.raises(StillInUse):
                b.beside.free(b.theirs)


@pytest.mark.parametrize("reorders", [True, False])
def test_what_a_nic_wrote_is_flushed_on_the_gpu_it_wrote_to(reorders: bool) -> None:
    """Relayed: a NIC writes to one GPU's memory, and the other copies it from there."""
    for is_right in (True, False):
        for seed in range(40):
            b = Pair(seed, reorders_remote_writes=reorders)
            mine = b.memory()
            b.beside.nic_write(b.theirs, b.data + 1)
            (b.beside if is_right else b.device).flush_remote_writes()
            b.device.copy(mine, b.theirs, NBYTES, b.first)
            if is_right or not reorders:
                b.finish(b.first)
                b.holds(mine, b.data + 1)
            else:
                with pytest.raises(Race, match="a NIC of rank 0"):
                    b.gpu.run()


WRONG: dict[str, Callable[[Pair, Any], object]] = {
    "free": lambda b, _: b.device.free(b.theirs),
    "export": lambda b, _: b.device.export(b.theirs),
    "nic_write": lambda b, _: b.device.nic_write(b.theirs, b.data),
    "free_caller_memory": lambda b, _: b.device.free_caller_memory(b.beside.caller_memory(8)),
    "free_pinned": lambda b, _: b.device.free_pinned(b.beside.allocate_pinned(8)),
    "unpin": lambda b, pages: (b.beside.pin(pages), b.device.unpin(pages)),
}


@pytest.mark.parametrize("act", WRONG.values(), ids=WRONG)
def test_peer_memory_is_the_peers_to_free_and_to_export(
    act: Callable[[Pair, Any], object],
) -> None:
    pages = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
    with pytest.raises(Misuse):
        act(Pair(), pages)


def test_pinned_memory_is_for_all_gpus_of_the_process() -> None:
    b = Pair(reaches=False)
    slot = b.device.allocate_pinned(NBYTES)
    b.device.host_writes(slot)
    slot[:] = b.data + 1

    b.beside.copy(b.theirs, slot.ctypes.data, NBYTES, b.stream)
    b.finish(b.stream, b.beside)

    assert bytes(b.beside.read(b.theirs, NBYTES)) == bytes(b.data + 1)


def test_closing_one_gpu_leaves_the_other_of_its_process() -> None:
    b = Pair()
    b.device.copy(b.memory(), b.memory(), NBYTES, b.first)
    assert len(b.device.pending()) == 1
    assert b.beside.pending() == []

    b.beside.close()

    assert b.gpu.pending()
    mine = b.memory(b.data)
    b.finish(b.first)
    b.holds(mine, b.data)
    FakeDevice(b.gpu.beside(), "rank 0")


def test_a_free_that_may_wait_waits_for_its_own_gpu_alone() -> None:
    gpu = FakeGpu()
    device = FakeDevice(gpu, is_strict=False)
    beside = FakeDevice(gpu.beside())
    source, target, stream = beside.allocate(NBYTES), beside.allocate(NBYTES), beside.make_stream()
    beside.copy(target, source, NBYTES, stream)
    gpu.run()
    device.free(device.allocate(NBYTES))
    with pytest.raises(Race):
        beside.read(target, NBYTES)

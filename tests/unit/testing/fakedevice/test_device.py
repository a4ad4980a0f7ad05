"""The fake GPU: what it looks at, and what it refuses."""

from __future__ import annotations

import ctypes
import mmap
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example
from hypothesis import strategies as st
from support.fake_bench import NBYTES, PAGE, Bench, by_seeds, launch_add, load_add, pattern
from support.slow import given

from r2ccl.device.base import Stream
from r2ccl.errors import TransportError
from r2ccl.testing.fakedevice import (
    POISON,
    FakeDevice,
    FakeGpu,
    FakeKernel,
    Grid,
    MemoryKind,
    Misuse,
    Race,
    StillInUse,
)
from r2ccl.testing.fakedevice.order import Access, Shadow, Stamp


@pytest.mark.parametrize("first", Access)
@pytest.mark.parametrize("second", Access)
def test_words_race_with_what_is_no_word_and_not_with_each_other(
    first: Access, second: Access
) -> None:
    is_word = {Access.SET, Access.WAIT}
    writes = {Access.WRITE, Access.SET}
    is_race = bool({first, second} & writes) and not {first, second} <= is_word
    shadow = Shadow()
    shadow.touch(0, 8, first, Stamp(1, 1, "first"), {1: 1})
    shadow.touch(8, 8, second, Stamp(2, 1, "beside"), {2: 1})
    shadow.touch(4, 4, second, Stamp(1, 2, "later"), {1: 2})

    if is_race:
        with pytest.raises(Race):
            shadow.touch(0, 4, second, Stamp(2, 2, "second"), {2: 2})
    else:
        shadow.touch(0, 4, second, Stamp(2, 2, "second"), {2: 2})
    shadow.touch(0, 4, second, Stamp(2, 3, "ordered"), {1: 1, 2: 3})


def test_memory_that_was_freed_has_no_past() -> None:
    shadow = Shadow()
    shadow.touch(0, 16, Access.WRITE, Stamp(1, 1, "first"), {1: 1})
    shadow.forget(4, 8)

    shadow.touch(4, 8, Access.WRITE, Stamp(2, 1, "second"), {2: 1})
    for start in (0, 12):
        with pytest.raises(Race, match=r"first[\s\S]*beside"):
            shadow.touch(start, 4, Access.WRITE, Stamp(2, 2, "beside"), {2: 2})


@by_seeds
def test_a_word_that_went_back_is_waited_for_anew(nseeds: int) -> None:
    """Each round sets it to 1 and, when the other stream has read, back to 0."""
    for seed in range(nseeds):
        b = Bench(seed)
        flag = b.device.allocate_pinned(NBYTES).view(np.uint32)
        shared, target = b.memory(), b.memory()
        for turn in range(3):
            b.device.copy(shared, b.memory(b.data + turn), NBYTES, b.first)
            b.device.write_word(b.first, flag.ctypes.data, 1)
            b.device.wait_word(b.second, flag.ctypes.data, 1)
            b.device.copy(target, shared, NBYTES, b.second)
            b.finish(b.second)
            b.holds(target, b.data + turn)
            flag[0] = 0


# What a silent host computes with


def test_a_silent_host_that_looks_too_early_finds_poison() -> None:
    b = Bench()
    slot = b.device.allocate_pinned(NBYTES)
    b.device.copy(slot.ctypes.data, b.memory(b.data), NBYTES, b.first)

    assert (slot == POISON).all()
    b.finish(b.first)
    assert bytes(slot) == bytes(b.data)


def test_what_a_stream_waits_for_the_host_with_is_left_alone() -> None:
    """The host may use the slot until it sets the word."""
    b = Bench()
    words = b.device.allocate_pinned(NBYTES).view(np.uint32)
    slot = b.device.allocate_pinned(NBYTES)
    b.device.wait_word(b.first, words.ctypes.data, 1)
    b.device.copy(slot.ctypes.data, b.memory(b.data), NBYTES, b.first)

    slot[:] = 9
    b.gpu.run()
    assert (slot == 9).all()
    words[0] = 1
    b.finish(b.first)
    assert bytes(slot) == bytes(b.data)


@by_seeds
def test_a_slot_that_earlier_work_still_reads_is_not_poisoned(nseeds: int) -> None:
    for seed in range(nseeds):
        b = Bench(seed)
        slot, out = b.device.allocate_pinned(NBYTES), b.memory()
        slot[:] = b.data
        b.device.copy(out, slot.ctypes.data, NBYTES, b.first)
        b.device.copy(slot.ctypes.data, b.memory(b.data + 1), NBYTES, b.first)
        b.finish(b.first)
        b.holds(out, b.data)
        assert bytes(slot) == bytes(b.data + 1)


def test_a_waiter_for_work_that_may_be_under_way_may_be_so_too() -> None:
    b = Bench()
    slot, between = b.device.allocate_pinned(NBYTES), b.memory()
    b.device.copy(between, b.memory(b.data), NBYTES, b.first)
    b.device.record(b.done, b.first)
    b.device.wait(b.second, b.done)
    b.device.copy(slot.ctypes.data, between, NBYTES, b.second)

    assert (slot == POISON).all()
    b.finish(b.second)
    assert bytes(slot) == bytes(b.data)


def test_only_what_a_copy_writes_is_poisoned() -> None:
    b = Bench()
    slot = b.device.allocate_pinned(3 * NBYTES)
    b.device.copy(slot.ctypes.data + NBYTES, b.memory(), NBYTES, b.first)

    assert not slot[:NBYTES].any()
    assert not slot[2 * NBYTES :].any()
    slot[:NBYTES] = 1
    b.finish(b.first)


# Random programs, against the definition


class Step(NamedTuple):
    """Of stream `who`, or the host (2): what it does to block or event `which`."""

    who: int
    verb: str
    which: int


def steps() -> st.SearchStrategy[list[Step]]:
    streams, three = st.integers(0, 1), st.integers(0, 2)
    return st.lists(
        st.one_of(
            st.builds(Step, streams, st.sampled_from(["copy to", "copy from"]), three),
            st.builds(Step, streams, st.sampled_from(["record", "wait"]), three),
            st.builds(Step, st.just(2), st.sampled_from(["read", "write", "synchronize"]), three),
        ),
        max_size=12,
    )


def is_ordered_right(program: list[Step]) -> bool:
    """Whether conflicting steps are ordered: reachability, and nothing of clocks."""
    after: list[set[int]] = []  # per step, those that surely come before it
    last: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    recorded: dict[int, set[int]] = {}
    for number, step in enumerate(program):
        if step.who == 2:
            before = set(last[2])
            if step.verb == "synchronize":
                before |= recorded.get(step.which, set())
            last[2] = before | {number}
        else:
            before = last[step.who] | last[2]
            if step.verb == "wait":
                before |= recorded.get(step.which, set())
            last[step.who] = before | {number}
            if step.verb == "record":
                recorded[step.which] = set(last[step.who])
        after.append(before)
    touching = [
        (i, step.which, step.verb in ("copy to", "write"))
        for i, step in enumerate(program)
        if step.verb in ("copy to", "copy from", "read", "write")
    ]
    return not any(
        block == other and (writes or also) and i not in after[j]
        for i, block, writes in touching
        for j, other, also in touching
        if i < j
    )


def execute(program: list[Step], seed: int) -> None:
    b = Bench(seed)
    blocks = [b.device.allocate_pinned(NBYTES) for _ in range(3)]
    mine = {0: b.memory(), 1: b.memory()}
    events = [b.device.make_event() for _ in range(3)]
    streams = {0: b.first, 1: b.second}
    for step in program:
        at, event = blocks[step.which].ctypes.data, events[step.which]
        if step.verb == "copy to":
            b.device.copy(at, mine[step.who], NBYTES, streams[step.who])
        elif step.verb == "copy from":
            b.device.copy(mine[step.who], at, NBYTES, streams[step.who])
        elif step.verb == "record":
            b.device.record(event, streams[step.who])
        elif step.verb == "wait":
            b.device.wait(streams[step.who], event)
        elif step.verb == "read":
            b.device.host_reads(blocks[step.which])
        elif step.verb == "write":
            b.device.host_writes(blocks[step.which])
            blocks[step.which][:] = step.which
        else:
            assert b.device.synchronize(event, 10.0)
    b.gpu.run()


@given(75, 300, steps(), st.integers(0, 2**32))
@example(program=[Step(0, "copy to", 0), Step(0, "record", 0), Step(1, "wait", 0),
                  Step(1, "copy from", 0)], seed=0)  # fmt: skip
def test_a_program_fails_exactly_if_it_is_not_ordered(program: list[Step], seed: int) -> None:
    if is_ordered_right(program):
        execute(program, seed)
    else:
        with pytest.raises(Race):
            execute(program, seed)


# Processes, threads, words


def ring(devices: list[FakeDevice], rank: int, data: Any, found: list[Any], start: Any) -> None:
    """Pass blocks around a ring through the next rank's memory, with words both ways."""
    device, nranks = devices[rank], len(devices)
    inbox, mine = device.allocate(NBYTES), device.allocate(NBYTES)
    words = device.allocate(8)  # filled, read
    device.write(words, np.zeros(8, np.uint8))
    device.write(mine, data)
    found[rank] = (device.export(inbox)[0], device.export(words)[0])
    start.wait(10.0)
    theirs, their_words = (device.map(handle) for handle in found[(rank + 1) % nranks])
    stream, done = device.make_stream(), device.make_event()
    for turn in range(1, nranks):
        device.wait_word(stream, their_words + 4, turn - 1)
        device.copy(theirs, mine, NBYTES, stream)
        device.write_word(stream, their_words, turn)
        device.wait_word(stream, words, turn)
        device.copy(mine, inbox, NBYTES, stream)
        device.write_word(stream, words + 4, turn)
    device.record(done, stream)
    assert device.synchronize(done, 30.0)
    found[rank] = device.read(mine, NBYTES)
    start.wait(10.0)
    device.unmap(theirs)
    device.unmap(their_words)
    start.wait(10.0)
    device.close()


def run_ranks(nranks: int, rank_program: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            rank_program(rank)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(nranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


@pytest.mark.parametrize("seed", range(10))
def test_ranks_on_threads_pass_blocks_around_a_ring(seed: int) -> None:
    gpu, nranks = FakeGpu(seed), 4
    devices = [FakeDevice(gpu, f"rank {rank}") for rank in range(nranks)]
    found: list[Any] = [None] * nranks
    start = threading.Barrier(nranks)

    run_ranks(nranks, lambda rank: ring(devices, rank, pattern(rank), found, start))

    for rank in range(nranks):
        assert bytes(found[rank]) == bytes(pattern((rank + 1) % nranks))
    assert gpu.pending() == []


def test_a_thread_that_waits_ends_when_another_does_wrong() -> None:
    b = Bench()
    words = b.device.allocate_pinned(NBYTES)
    b.device.wait_word(b.first, words.ctypes.data, 1)
    b.device.record(b.done, b.first)
    done, waiting = b.done, threading.Event()

    def program(rank: int) -> None:
        if rank:
            assert waiting.wait(10.0)
            b.peer.copy(0x1234, 0x5678, 1, Stream(1))
        else:
            waiting.set()
            with pytest.raises(Misuse):
                b.device.synchronize(done, 60.0)

    with pytest.raises(Misuse, match="rank 1 has no memory at"):
        run_ranks(2, program)


def test_a_wait_has_a_deadline_and_says_so() -> None:
    b = Bench()
    words = b.device.allocate_pinned(NBYTES)
    b.device.wait_word(b.first, words.ctypes.data, 1)
    b.device.record(b.done, b.first)

    assert not b.device.synchronize(b.done, 0.01)
    assert len(b.device.pending()) == 2
    words[0] = 1
    assert b.device.synchronize(b.done, 10.0)
    assert b.device.pending() == []


@pytest.mark.parametrize(
    ("found", "wanted", "passes"),
    [(5, 5, True), (6, 5, True), (4, 5, False), (2, 2**32 - 1, True), (2**32 - 1, 2, False)],
)
def test_words_are_compared_as_differences(found: int, wanted: int, passes: bool) -> None:
    b = Bench()
    words = b.device.allocate_pinned(NBYTES).view(np.uint32)
    words[0] = found
    b.device.wait_word(b.first, words.ctypes.data, wanted)
    b.device.record(b.done, b.first)

    assert b.device.synchronize(b.done, 0.0) is passes


def test_hosts_that_tell_each_other_nothing_know_nothing() -> None:
    for is_told in (True, False):
        b = Bench(are_hosts_one=False)
        shared = b.memory()
        theirs = b.peer.map(b.device.export(shared)[0])
        b.device.copy(shared, b.memory(b.data), NBYTES, b.first)
        b.finish(b.first)
        if is_told:
            b.peer.hear(b.device.tell())
            assert bytes(b.peer.read(theirs, NBYTES)) == bytes(b.data)
        else:
            with pytest.raises(Race):
                b.peer.read(theirs, NBYTES)


def test_two_mappings_of_a_shared_file_are_the_same_memory(tmp_path: Path) -> None:
    """Each rank maps the file itself: the bytes have two addresses in this process."""
    path = tmp_path / "words"
    path.write_bytes(bytes(2 * PAGE))
    for seed in range(40):
        b = Bench(seed)
        places = []
        for device in (b.device, b.peer):
            with path.open("r+b") as file:
                memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)[PAGE:]
            memory[:8] = 0
            places.append((memory, device.pin(memory)))
        shared, target = b.memory(), b.peer.allocate(NBYTES)
        theirs, stream = b.peer.map(b.device.export(shared)[0]), b.peer.make_stream()
        b.device.copy(shared, b.memory(b.data), NBYTES, b.first)
        b.device.write_word(b.first, places[0][1], 1)
        b.peer.wait_word(stream, places[1][1], 1)
        b.peer.copy(target, theirs, NBYTES, stream)
        b.finish(stream, b.peer)
        assert bytes(b.peer.read(target, NBYTES)) == bytes(b.data)
        b.finish(b.first)

        b.peer.wait_word(stream, places[1][1], 2)
        b.device.unpin(places[0][0])
        places[1][0][0] = 2
        b.finish(stream, b.peer)


# Kernels


def touches_of_add(grid: Grid, out: int, left: int, right: int, nbytes: int) -> Any:
    return [(left, nbytes), (right, nbytes)], [(out, nbytes)]


def test_a_kernel_that_declares_accesses_is_guarded_like_a_copy() -> None:
    b = Bench()
    kernel = load_add(b.device, touches_of_add)
    slot, out = b.device.allocate_pinned(NBYTES), b.device.allocate_pinned(NBYTES)
    slot[:] = b.data
    launch_add(b.device, kernel, out.ctypes.data, slot.ctypes.data, b.memory(b.data), b.first)
    assert (out == POISON).all()
    slot[0] += 1

    with pytest.raises(Race, match="the host, which wrote to"):
        b.finish(b.first)


def test_a_kernel_may_work_in_place() -> None:
    for touches in (None, touches_of_add):
        b = Bench()
        kernel, slot = load_add(b.device, touches), b.device.allocate_pinned(NBYTES)
        slot[:] = b.data
        at = slot.ctypes.data
        launch_add(b.device, kernel, at, at, b.memory(b.data), b.first)
        b.finish(b.first)
        assert bytes(slot) == bytes(b.data + b.data)


def test_a_kernel_reaches_no_more_than_it_declares() -> None:
    b = Bench()
    kernel = load_add(b.device, lambda *given: ([], [(given[1], NBYTES)]))
    launch_add(b.device, kernel, b.memory(), b.memory(), b.memory(), b.first)

    with pytest.raises(Misuse, match="which it did not declare"):
        b.finish(b.first)


def test_work_after_an_undeclared_kernel_is_unguarded_before_it() -> None:
    b = Bench()
    kernel, slot, out = load_add(b.device), b.device.allocate_pinned(NBYTES), b.memory()
    slot[:] = b.data
    launch_add(b.device, kernel, out, slot.ctypes.data, b.memory(b.data), b.first)
    b.device.copy(slot.ctypes.data, b.memory(b.data + 1), NBYTES, b.first)
    assert bytes(slot) == bytes(b.data)  # no poison: the kernel may read it

    b.finish(b.first)
    assert bytes(b.device.read(out, NBYTES)) == bytes(b.data + b.data)
    assert bytes(slot) == bytes(b.data + 1)


# What the driver would refuse, or not survive


def misuses(b: Bench) -> dict[str, Callable[[], object]]:
    device, here = b.device, b.memory()
    words = b.device.allocate_pinned(PAGE)
    pages = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
    device.pin(pages)
    freed = b.memory()
    device.free(freed)
    theirs = b.peer.allocate(NBYTES)
    kernel = load_add(device)
    return {
        "has no memory at 0x10": lambda: device.copy(here, 16, 1, b.first),
        "any more: 64 bytes of device memory": lambda: device.copy(freed + 8, here, 1, b.first),
        "rank 0 has not mapped": lambda: device.copy(here, theirs, 1, b.first),
        "reach beyond": lambda: device.copy(here, words.ctypes.data, NBYTES + 1, b.first),
        "the host's address of": lambda: device.copy(here, pages.ctypes.data, 1, b.first),
        "is not a stream of rank 1": lambda: b.peer.record(b.peer.make_event(), b.first),
        "is not an event of rank 1": lambda: b.peer.is_done(b.done),
        "source and target of a copy of": lambda: device.copy(here, here + 4, 8, b.first),
        "rows of 8 bytes exceed the pitch 4 or 8": lambda: device.copy_rows(
            here, 4, words.ctypes.data, 8, 8, 2, b.first
        ),
        "is not aligned": lambda: device.write_word(b.first, here + 2, 1),
        "is not the start of device memory of this device": lambda: device.free(here + 8),
        "is not the start of pinned memory of this device": lambda: device.free_pinned(words[8:]),
        "has not pinned": lambda: device.unpin(words),
        "is pinned already": lambda: device.pin(pages),
        "to pin are not whole pages": lambda: device.pin(words[1:]),
        "is not a stream made by rank 0": lambda: device.destroy_stream(Stream(1)),
        "`kernels` has no scale: add a FakeKernel": lambda: device.load(b"scale", "scale"),
        "argument -1 does not fit c_ulong": lambda: device.launch(
            kernel, 1, 1, b.first, [(-1, ctypes.c_uint64)]
        ),
        "0 blocks of 32 threads are not a valid grid": lambda: device.launch(
            kernel, 0, 32, b.first, []
        ),
        "is not a kernel of rank 1": lambda: b.peer.launch(kernel, 1, 32, Stream(1), []),
        "two processes with the name rank 1 open the same GPU": lambda: FakeDevice(b.gpu, "rank 1"),
        "a caller cannot allocate": lambda: device.caller_memory(8, MemoryKind.PINNED),
        "an allocation needs at least 1 byte, not 0": lambda: device.allocate(0),
        "the array is not contiguous": lambda: device.host_reads(words[::2]),
    }


@pytest.mark.parametrize("says", misuses(Bench()))
def test_a_wrong_call_is_refused_where_it_is_made(says: str) -> None:
    act = misuses(Bench())[says]

    with pytest.raises(Misuse, match=re.escape(says)) as caught:
        act()

    assert Path(__file__).name in str(caught.value) or "already" in says


def test_the_processor_cannot_use_an_address_of_device_memory() -> None:
    """Not even by accident: such addresses are not canonical on x86-64, nor mapped elsewhere."""
    address = FakeDevice(FakeGpu()).allocate(NBYTES)
    assert address >= 1 << 47
    assert address % 256 == 0
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert not any(
        int(first, 16) <= address < int(end, 16)
        for first, end in (line.split()[0].split("-") for line in maps)
    )


@pytest.mark.parametrize(
    ("act", "status"),
    [
        (lambda b: b.device.export(b.device.caller_memory(8, MemoryKind.POOLED)), "NO_IPC"),
        (lambda b: b.device.export(b.device.caller_memory(8, MemoryKind.MANAGED)), "NO_IPC"),
        (lambda b: b.device.map(b.device.export(b.memory())[0]), "CUDA_ERROR_INVALID_CONTEXT"),
        (lambda b: b.device.map(bytes(64)), "CUDA_ERROR_INVALID_HANDLE"),
        (lambda b: b.device.load(b".entry other", "add"), "CUDA_ERROR_NOT_FOUND"),
    ],
)
def test_what_depends_on_the_machine_fails_as_the_driver_does(act: Any, status: str) -> None:
    b = Bench()

    with pytest.raises(TransportError) as caught:
        act(b)

    assert caught.value.status == status
    b.device.close()  # nothing is broken


def test_a_card_without_words_says_so() -> None:
    b = Bench(waits_on_memory=False)

    assert not b.device.waits_on_memory
    with pytest.raises(TransportError) as caught:
        b.device.wait_word(b.first, b.memory(), 1)
    assert caught.value.status == "CUDA_ERROR_NOT_SUPPORTED"


def test_any_call_can_be_made_to_fail() -> None:
    b = Bench()
    b.device.refusals["copy"] = "CUDA_ERROR_ILLEGAL_ADDRESS"
    with pytest.raises(TransportError, match="copy failed") as caught:
        b.device.copy(b.memory(), b.memory(), 1, b.first)
    assert caught.value.status == "CUDA_ERROR_ILLEGAL_ADDRESS"

    b.device.refusals.clear()
    b.device.copy(b.memory(), b.memory(), 1, b.first)


def test_a_handle_of_freed_memory_maps_nothing() -> None:
    b = Bench()
    shared = b.memory()
    handle, offset = b.device.export(shared + 8)
    assert offset == 8
    assert len(handle) == 64
    b.device.free(shared)

    with pytest.raises(TransportError) as caught:
        b.peer.map(handle)
    assert caught.value.status == "CUDA_ERROR_INVALID_HANDLE"


def test_a_handle_of_a_process_that_ended_maps_nothing() -> None:
    b = Bench()
    handle, _ = b.device.export(b.memory())
    b.device.close()

    with pytest.raises(TransportError) as caught:
        b.peer.map(handle)
    assert caught.value.status == "CUDA_ERROR_INVALID_HANDLE"


def test_a_copy_of_nothing_touches_nothing() -> None:
    b = Bench()
    slot, block = b.device.allocate_pinned(NBYTES), b.memory()
    b.device.copy(slot.ctypes.data + NBYTES, block + 8, 0, b.first)
    b.device.copy(block + 8, slot.ctypes.data + 8, 0, b.second)
    slot[:] = 1
    b.device.host_writes(slot)
    b.device.free(block)
    b.gpu.run()


def test_no_two_allocations_have_one_number() -> None:
    b = Bench()
    first = b.memory()
    number = b.device.buffer_id(first)
    assert b.device.buffer_id(first + 8) == number
    b.device.free(first)

    assert b.device.buffer_id(b.memory()) != number


# Waits of the driver


@by_seeds
def test_without_strictness_the_calls_that_wait_wait(nseeds: int) -> None:
    for seed in range(nseeds):
        gpu = FakeGpu(seed)
        device = FakeDevice(gpu, is_strict=False)
        stream, event = device.make_stream(), device.make_event()
        source, target = device.allocate(NBYTES), device.allocate(NBYTES)
        device.copy(target, source, NBYTES, stream)
        device.record(event, stream)
        device.free(source)
        device.destroy_event(event)
        device.copy(target, device.allocate(NBYTES), NBYTES, stream)
        device.destroy_stream(stream)
        device.free(target)
        device.close()
        assert gpu.pending() == []


def test_what_does_not_end_is_still_an_error_then() -> None:
    gpu = FakeGpu()
    device = FakeDevice(gpu, is_strict=False, timeout_s=0.01)
    stream, words = device.make_stream(), device.allocate_pinned(NBYTES)
    device.wait_word(stream, words.ctypes.data, 1)

    with pytest.raises(StillInUse, match="has not run"):
        device.free_pinned(words)


def test_closing_waits_for_the_streams_made_here_and_runs_once() -> None:
    b = Bench()
    b.device.copy(b.memory(), b.memory(), NBYTES, b.first)

    b.device.close()
    b.device.close()

    assert b.gpu.pending() == []
    with pytest.raises(Misuse, match="which is closed"):
        b.device.make_stream()


def test_closing_says_what_does_not_end() -> None:
    gpu = FakeGpu()
    device = FakeDevice(gpu, timeout_s=0.01)
    words = device.allocate_pinned(NBYTES)
    device.wait_word(device.make_stream(), words.ctypes.data, 3)

    with pytest.raises(
        StillInUse, match=r"wait for 3 in [\s\S]* did not end in time|did not end in time"
    ):
        device.close()


def test_another_may_have_the_name_of_a_process_that_is_closed() -> None:
    b = Bench()
    b.device.close()

    again = FakeDevice(b.gpu, "rank 0")
    again.copy(again.allocate(8), again.allocate(8), 8, again.make_stream())
    again.close()


def test_other_seeds_run_work_in_other_orders_one_seed_in_one() -> None:
    def order(seed: int) -> tuple[int, ...]:
        b = Bench(seed)
        ran: list[int] = []
        b.device.kernels["note"] = FakeKernel(lambda grid, value: ran.append(value))
        kernel = b.device.load(b"note", "note")
        for turn in range(4):
            for stream in (b.first, b.second):
                value = turn + 10 * stream
                b.device.launch(kernel, 1, 1, stream, [(value, ctypes.c_int64)])
        assert b.gpu.run() == 8
        return tuple(ran)

    assert order(1) == order(1)
    assert len({order(seed) for seed in range(20)}) > 5


def test_the_default_streams_are_each_one_stream_for_a_thread() -> None:
    b = Bench()
    target = b.memory()
    b.device.copy(target, b.memory(), NBYTES, Stream(0))
    b.device.copy(target, b.memory(b.data), NBYTES, Stream(1))
    b.finish(Stream(0))
    b.holds(target, b.data)
    b.device.copy(target, b.memory(), NBYTES, Stream(2))
    b.device.copy(target, b.memory(), NBYTES, Stream(1))

    with pytest.raises(Race):
        b.gpu.run()


def test_random_numbers_elsewhere_are_left_alone() -> None:
    state = random.getstate()
    b = Bench(1)
    b.device.copy(b.memory(), b.memory(), NBYTES, b.first)
    b.finish(b.first)
    assert random.getstate() == state

"""Each wrong order is found by the fake GPU, in every run, and the right one of each passes.

A case takes a bench and whether to do it right.
"""

from __future__ import annotations

import inspect
import mmap
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support.fake_bench import NBYTES, PAGE, Bench, by_seeds, launch_add, load_add
from support.slow import slow_but

from r2ccl.device.base import Stream
from r2ccl.testing.fakedevice import Race, StillInUse, WrongOrder


def a_stream_does_not_wait_for_another(b: Bench, is_right: bool) -> None:
    source, between, target = b.memory(b.data), b.memory(), b.memory()
    b.device.copy(between, source, NBYTES, b.first)
    if is_right:
        b.device.record(b.done, b.first)
        b.device.wait(b.second, b.done)
    b.device.copy(target, between, NBYTES, b.second)
    b.finish(b.second)
    b.finish(b.first)
    b.holds(target, b.data)


def an_event_is_recorded_before_the_work(b: Bench, is_right: bool) -> None:
    source, between, target = b.memory(b.data), b.memory(), b.memory()
    if not is_right:
        b.device.record(b.done, b.first)
    b.device.copy(between, source, NBYTES, b.first)
    if is_right:
        b.device.record(b.done, b.first)
    b.device.wait(b.second, b.done)
    b.device.copy(target, between, NBYTES, b.second)
    b.finish(b.second)
    b.finish(b.first)
    b.holds(target, b.data)


def an_event_is_waited_for_before_it_is_recorded(b: Bench, is_right: bool) -> None:
    source, between, target = b.memory(b.data), b.memory(), b.memory()
    if not is_right:
        b.device.wait(b.second, b.done)
    b.device.copy(between, source, NBYTES, b.first)
    b.device.record(b.done, b.first)
    if is_right:
        b.device.wait(b.second, b.done)
    b.device.copy(target, between, NBYTES, b.second)
    b.finish(b.second)
    b.finish(b.first)
    b.holds(target, b.data)


def the_host_looks_before_the_copy_is_done(b: Bench, is_right: bool) -> None:
    source, slot = b.memory(b.data), b.device.allocate_pinned(NBYTES)
    b.device.copy(slot.ctypes.data, source, NBYTES, b.first)
    if is_right:
        b.finish(b.first)
    b.device.host_reads(slot)
    assert bytes(slot) == bytes(b.data) or not is_right


def the_host_believes_a_stream_that_was_not_asked(b: Bench, is_right: bool) -> None:
    """The copy is over, as it happens, but the host asked the other stream."""
    source, slot = b.memory(b.data), b.device.allocate_pinned(NBYTES)
    b.device.copy(slot.ctypes.data, source, NBYTES, b.first)
    b.device.copy(b.memory(), b.memory(), NBYTES, b.second)
    b.gpu.run()
    b.finish(b.first if is_right else b.second)
    b.device.host_reads(slot)


def a_slot_is_filled_again_before_it_was_copied_out(b: Bench, is_right: bool) -> None:
    slot, targets = b.device.allocate_pinned(NBYTES), (b.memory(), b.memory())
    for turn, target in enumerate(targets):
        if turn and is_right:
            assert b.device.synchronize(b.done, 10.0)
        b.device.host_writes(slot)
        slot[:] = b.data + turn
        b.device.copy(target, slot.ctypes.data, NBYTES, b.first)
        b.device.record(b.done, b.first)
    b.finish(b.first)
    for turn, target in enumerate(targets):
        b.holds(target, b.data + turn)


def a_silent_host_fills_a_slot_again_before_it_was_copied_out(b: Bench, is_right: bool) -> None:
    slot, targets = b.device.allocate_pinned(NBYTES), (b.memory(), b.memory())
    for turn, target in enumerate(targets):
        if turn and is_right:
            assert b.device.synchronize(b.done, 10.0)
        slot[:] = b.data + turn
        b.device.copy(target, slot.ctypes.data, NBYTES, b.first)
        b.device.record(b.done, b.first)
    b.finish(b.first)
    for turn, target in enumerate(targets):
        b.holds(target, b.data + turn)


def a_silent_host_writes_where_the_gpu_will(b: Bench, is_right: bool) -> None:
    source, slot = b.memory(b.data), b.device.allocate_pinned(NBYTES)
    b.device.copy(slot.ctypes.data, source, NBYTES, b.first)
    if is_right:
        b.finish(b.first)
    slot[3] = 7
    b.finish(b.first)


def of_two_slots_one_is_never_waited_for(b: Bench, is_right: bool) -> None:
    slots = [b.device.allocate_pinned(NBYTES) for _ in range(2)]
    events = [b.device.make_event() for _ in range(2)]
    streams, target = (b.first, b.second), [b.memory() for _ in range(4)]
    for turn in range(4):
        slot = turn % 2
        assert b.device.synchronize(events[slot if is_right else 0], 10.0)
        b.device.host_writes(slots[slot])
        slots[slot][:] = b.data + turn
        b.device.copy(target[turn], slots[slot].ctypes.data, NBYTES, streams[slot])
        b.device.record(events[slot], streams[slot])
    for stream in streams:
        b.finish(stream)
    for turn in range(4):
        b.holds(target[turn], b.data + turn)


def a_target_is_overwritten_before_it_was_read(b: Bench, is_right: bool) -> None:
    between, target, fresh = b.memory(b.data), b.memory(), b.memory()
    b.device.copy(target, between, NBYTES, b.first)
    b.device.record(b.done, b.first)
    if is_right:
        b.device.wait(b.second, b.done)
    b.device.copy(between, fresh, NBYTES, b.second)
    b.finish(b.first)
    b.finish(b.second)
    b.holds(target, b.data)


def memory_is_freed_while_work_waits_for_it(b: Bench, is_right: bool) -> None:
    source, target = b.memory(), b.memory()
    b.device.copy(target, source, NBYTES, b.first)
    if is_right:
        b.finish(b.first)
    b.device.free(source)


def memory_is_freed_although_nobody_asked_for_the_end(b: Bench, is_right: bool) -> None:
    source, target = b.memory(), b.memory()
    b.device.copy(target, source, NBYTES, b.first)
    b.gpu.run()
    if is_right:
        b.finish(b.first)
    b.device.free(target)


def pinned_memory_is_freed_under_a_copy(b: Bench, is_right: bool) -> None:
    slot, target = b.device.allocate_pinned(NBYTES), b.memory()
    b.device.copy(target, slot.ctypes.data, NBYTES, b.first)
    if is_right:
        b.finish(b.first)
    b.device.free_pinned(slot)


def a_stream_is_destroyed_with_work(b: Bench, is_right: bool) -> None:
    b.device.copy(b.memory(), b.memory(), NBYTES, b.first)
    if is_right:
        b.finish(b.first)
    b.device.destroy_stream(b.first)


def an_event_is_destroyed_before_it_is_done(b: Bench, is_right: bool) -> None:
    b.device.copy(b.memory(), b.memory(), NBYTES, b.first)
    b.device.record(b.done, b.first)
    if is_right:
        assert b.device.synchronize(b.done, 10.0)
    b.device.destroy_event(b.done)


def the_callers_input_is_not_waited_for(b: Bench, is_right: bool) -> None:
    theirs = b.device.caller_stream()
    array, target = b.memory(), b.memory()
    b.device.copy(array, b.memory(b.data), NBYTES, theirs)
    if is_right:
        b.device.record(b.done, theirs)
        b.device.wait(b.first, b.done)
    b.device.copy(target, array, NBYTES, b.first)
    b.finish(b.first)
    b.finish(theirs)
    b.holds(target, b.data)


def the_caller_does_not_wait_for_the_result(b: Bench, is_right: bool) -> None:
    legacy = Stream(1)
    result, target = b.memory(), b.memory()
    b.device.copy(result, b.memory(b.data), NBYTES, b.first)
    if is_right:
        b.device.record(b.done, b.first)
        b.device.wait(legacy, b.done)
    b.device.copy(target, result, NBYTES, legacy)
    b.finish(legacy)
    b.finish(b.first)
    b.holds(target, b.data)


def the_callers_stream_uses_what_is_closed(b: Bench, is_right: bool) -> None:
    theirs, slot = b.device.caller_stream(), b.device.allocate_pinned(NBYTES)
    b.device.copy(b.memory(), slot.ctypes.data, NBYTES, theirs)
    if is_right:
        b.finish(theirs)
    b.device.close()


def two_processes_have_no_word_between_them(b: Bench, is_right: bool) -> None:
    shared, target, word = b.memory(), b.peer.allocate(NBYTES), b.memory()
    b.device.write(word, np.zeros(NBYTES, np.uint8))
    theirs = b.peer.map(b.device.export(shared)[0])
    flag = b.peer.map(b.device.export(word)[0])
    stream = b.peer.make_stream()
    b.device.copy(shared, b.memory(b.data), NBYTES, b.first)
    if is_right:
        b.device.write_word(b.first, word + 4, 1)
        b.peer.wait_word(stream, flag + 4, 1)
    b.peer.copy(target, theirs, NBYTES, stream)
    b.finish(stream, b.peer)
    b.finish(b.first)
    assert bytes(b.peer.read(target, NBYTES)) == bytes(b.data)


def a_word_is_set_before_the_data(b: Bench, is_right: bool) -> None:
    words = b.device.allocate_pinned(NBYTES)
    flag, shared, target = words.ctypes.data, b.memory(), b.memory()
    if not is_right:
        b.device.write_word(b.first, flag, 1)
    b.device.copy(shared, b.memory(b.data), NBYTES, b.first)
    if is_right:
        b.device.write_word(b.first, flag, 1)
    b.device.wait_word(b.second, flag, 1)
    b.device.copy(target, shared, NBYTES, b.second)
    b.finish(b.second)
    b.finish(b.first)
    b.holds(target, b.data)


def a_word_is_waited_for_that_was_set_long_ago(b: Bench, is_right: bool) -> None:
    """The second round waits for the first round's value."""
    flag = b.device.allocate_pinned(NBYTES).ctypes.data
    shared, target = b.memory(), b.memory()
    for turn in (1, 2):
        b.device.copy(shared, b.memory(b.data + turn), NBYTES, b.first)
        b.device.write_word(b.first, flag, turn)
        b.device.wait_word(b.second, flag, turn if is_right else 1)
        b.device.copy(target, shared, NBYTES, b.second)
        b.device.record(b.done, b.second)
        b.device.wait(b.first, b.done)
    b.finish(b.second)
    b.finish(b.first)
    b.holds(target, b.data + 2)


def the_host_sets_a_word_before_the_data(b: Bench, is_right: bool) -> None:
    words = b.device.allocate_pinned(NBYTES).view(np.uint32)
    slot, target = b.device.allocate_pinned(NBYTES), b.memory()
    b.device.wait_word(b.first, words.ctypes.data, 1)
    b.device.copy(target, slot.ctypes.data, NBYTES, b.first)
    if not is_right:
        words[0] = 1
    b.device.host_writes(slot)
    slot[:] = b.data
    if is_right:
        words[0] = 1
    b.finish(b.first)
    b.holds(target, b.data)


def a_silent_host_sets_a_word_before_the_data(b: Bench, is_right: bool) -> None:
    words = b.device.allocate_pinned(NBYTES).view(np.uint32)
    slot, target = b.device.allocate_pinned(NBYTES), b.memory()
    b.device.wait_word(b.first, words.ctypes.data, 1)
    b.device.copy(target, slot.ctypes.data, NBYTES, b.first)
    if not is_right:
        words[0] = 1
        b.device.make_event()  # any call: the stream may go on from here
    slot[:] = b.data
    words[0] = 1
    b.finish(b.first)
    b.holds(target, b.data)


def memory_is_freed_that_another_process_has_mapped(b: Bench, is_right: bool) -> None:
    shared = b.memory()
    theirs = b.peer.map(b.device.export(shared)[0])
    if is_right:
        b.peer.unmap(theirs)
    b.device.free(shared)


def memory_is_unmapped_under_a_copy(b: Bench, is_right: bool) -> None:
    theirs = b.peer.map(b.device.export(b.memory())[0])
    stream = b.peer.make_stream()
    b.peer.copy(b.peer.allocate(NBYTES), theirs, NBYTES, stream)
    if is_right:
        b.finish(stream, b.peer)
    b.peer.unmap(theirs)


def memory_is_unpinned_while_a_stream_waits_for_its_word(b: Bench, is_right: bool) -> None:
    words = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
    b.device.wait_word(b.first, b.device.pin(words) + 8, 1)
    if is_right:
        words[8] = 1
        b.finish(b.first)
    b.device.unpin(words)


def a_test_reads_the_result_before_it_is_there(b: Bench, is_right: bool) -> None:
    target = b.memory()
    b.device.copy(target, b.memory(b.data), NBYTES, b.first)
    if is_right:
        b.finish(b.first)
    b.device.read(target, NBYTES)


def a_kernel_does_not_wait_for_its_input(b: Bench, is_right: bool) -> None:
    kernel = load_add(b.device)
    left, right, out = b.memory(), b.memory(b.data), b.memory()
    b.device.copy(left, b.memory(b.data), NBYTES, b.first)
    if is_right:
        b.device.record(b.done, b.first)
        b.device.wait(b.second, b.done)
    launch_add(b.device, kernel, out, left, right, b.second)
    b.finish(b.second)
    b.finish(b.first)
    b.holds(out, b.data + b.data)


class Case(NamedTuple):
    act: Callable[[Bench, bool], None]
    error: type[WrongOrder]


CASES = [
    Case(a_stream_does_not_wait_for_another, Race),
    Case(an_event_is_recorded_before_the_work, Race),
    Case(an_event_is_waited_for_before_it_is_recorded, Race),
    Case(the_host_looks_before_the_copy_is_done, Race),
    Case(the_host_believes_a_stream_that_was_not_asked, Race),
    Case(a_slot_is_filled_again_before_it_was_copied_out, Race),
    Case(a_silent_host_fills_a_slot_again_before_it_was_copied_out, Race),
    Case(a_silent_host_writes_where_the_gpu_will, Race),
    Case(of_two_slots_one_is_never_waited_for, Race),
    Case(a_target_is_overwritten_before_it_was_read, Race),
    Case(memory_is_freed_while_work_waits_for_it, StillInUse),
    Case(memory_is_freed_although_nobody_asked_for_the_end, StillInUse),
    Case(pinned_memory_is_freed_under_a_copy, StillInUse),
    Case(a_stream_is_destroyed_with_work, StillInUse),
    Case(an_event_is_destroyed_before_it_is_done, StillInUse),
    Case(the_callers_input_is_not_waited_for, Race),
    Case(the_caller_does_not_wait_for_the_result, Race),
    Case(the_callers_stream_uses_what_is_closed, StillInUse),
    Case(two_processes_have_no_word_between_them, Race),
    Case(a_word_is_set_before_the_data, Race),
    Case(a_word_is_waited_for_that_was_set_long_ago, Race),
    Case(the_host_sets_a_word_before_the_data, Race),
    Case(a_silent_host_sets_a_word_before_the_data, Race),
    Case(memory_is_freed_that_another_process_has_mapped, StillInUse),
    Case(memory_is_unmapped_under_a_copy, StillInUse),
    Case(memory_is_unpinned_while_a_stream_waits_for_its_word, StillInUse),
    Case(a_test_reads_the_result_before_it_is_there, Race),
    Case(a_kernel_does_not_wait_for_its_input, Race),
]


@pytest.mark.parametrize("nseeds", slow_but([10], [10, 40]))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.act.__name__)
def test_the_wrong_order_is_found_whatever_is_run_first(case: Case, nseeds: int) -> None:
    for seed in range(nseeds):
        with pytest.raises(case.error):
            case.act(Bench(seed), False)


@by_seeds
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.act.__name__)
def test_the_right_order_passes_whatever_is_run_first(case: Case, nseeds: int) -> None:
    for seed in range(nseeds):
        case.act(Bench(seed), True)


def test_a_race_names_both_and_where_they_were_enqueued() -> None:
    with pytest.raises(Race) as caught:
        a_stream_does_not_wait_for_another(Bench(), False)

    lines, first = inspect.getsourcelines(a_stream_does_not_wait_for_another)
    copies = [first + i for i, line in enumerate(lines) if "device.copy(" in line]
    found = re.findall(r"copy of .* on stream 0x\w+ of rank 0, enqueued at (.*):(\d+)",
                       str(caught.value))  # fmt: skip
    assert sorted(int(line) for _, line in found) == copies
    assert {name for name, _ in found} == {Path(__file__).name}


def test_after_an_error_every_call_fails_so_that_no_thread_waits() -> None:
    b = Bench()
    with pytest.raises(Race) as caught:
        a_stream_does_not_wait_for_another(b, False)

    with pytest.raises(Race) as again:
        b.peer.make_stream()
    assert again.value is caught.value

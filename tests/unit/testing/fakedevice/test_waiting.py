"""Calls of the fake GPU that wait: a full launch queue, blocking launches, memory management."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from support.fake_bench import NBYTES, Bench

from r2ccl.device.base import Stream
from r2ccl.testing.fakedevice import FakeDevice, Misuse, Race, WouldHang

IMPATIENT = {"patience_s": 0.05}


def park(b: Bench) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Let the first stream wait for a word of the host; return the word."""
    word = b.device.allocate_pinned(NBYTES).view(np.uint32)
    b.device.wait_word(b.first, word.ctypes.data, 1)
    return word


def release_after(seconds: float, word: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> None:
    def release() -> None:
        word[0] = 1

    threading.Timer(seconds, release).start()


def test_a_full_launch_queue_behind_a_parked_wait_would_hang() -> None:
    b = Bench(queue_limit=16, **IMPATIENT)
    park(b)
    for _ in range(15):
        b.device.record(b.done, b.first)
    with pytest.raises(WouldHang, match=r"record[^\n]* at \S+:\d+\nat [\s\S]*wait for 1 in"):
        b.device.record(b.done, b.first)


def test_a_full_launch_queue_waits_for_room() -> None:
    b = Bench(queue_limit=4)
    word = park(b)
    release_after(0.05, word)
    for _ in range(40):
        b.device.record(b.done, b.first)
    b.finish(b.first)


def test_a_blocking_wait_for_its_own_thread_would_hang() -> None:
    b = Bench(is_blocking=True, **IMPATIENT)
    with pytest.raises(WouldHang, match="wait for 1 in"):
        park(b)


def test_a_blocking_launch_returns_when_its_work_is_over() -> None:
    b = Bench(is_blocking=True)
    slot, block = b.device.allocate_pinned(NBYTES), b.memory(b.data)
    b.device.copy(slot.ctypes.data, block, NBYTES, b.first)
    assert b.gpu.pending() == []


MANAGING: dict[str, Callable[[FakeDevice, bytes], object]] = {
    "allocate": lambda device, handle: device.allocate(8),
    "allocate_pinned": lambda device, handle: device.allocate_pinned(8),
    "map": lambda device, handle: device.map(handle),
    "load": lambda device, handle: device.load(b"add", "add"),
}


@pytest.mark.parametrize("method", MANAGING)
def test_memory_management_behind_a_parked_stream_would_hang(method: str) -> None:
    b = Bench(is_serial=True, **IMPATIENT)
    handle, _ = b.peer.export(b.peer.allocate(8))
    park(b)
    with pytest.raises(WouldHang, match=rf"{method} of rank 0[\s\S]*wait for 1 in"):
        MANAGING[method](b.device, handle)


def test_memory_management_waits_for_its_own_process_alone() -> None:
    b = Bench(is_serial=True)
    word = park(b)
    b.peer.allocate(8)
    release_after(0.02, word)
    b.device.allocate(8)
    assert b.gpu.pending() == []


def test_memory_management_orders_work_of_its_process_alone() -> None:
    for owner in ("device", "peer"):
        b = Bench(is_serial=True, are_hosts_one=False)
        shared = b.memory()
        b.peer.hear(b.device.tell())
        theirs = b.peer.map(b.device.export(shared)[0])
        if owner == "device":
            b.device.copy(shared, b.memory(b.data), NBYTES, b.first)
        else:
            source, stream = b.peer.allocate(NBYTES), b.peer.make_stream()
            b.peer.write(source, b.data)
            b.peer.copy(theirs, source, NBYTES, stream)
        b.gpu.run()
        b.device.allocate(NBYTES)
        if owner == "device":
            b.holds(shared, b.data)
        else:
            with pytest.raises(Race):
                b.device.read(shared, NBYTES)


def test_work_on_a_stream_that_captures_is_misuse() -> None:
    b = Bench()
    b.device.capture(b.first)
    assert b.device.is_capturing(b.first)
    assert not b.device.is_capturing(b.second)
    b.device.capture(b.first, is_capturing=False)
    b.device.record(b.done, b.first)
    b.device.capture(b.first)
    with pytest.raises(Misuse, match="captures a graph"):
        b.device.record(b.done, b.first)


@pytest.mark.parametrize("handle", [0, 1])
def test_both_handles_of_the_default_stream_capture(handle: int) -> None:
    b = Bench()
    b.device.capture(Stream(handle))
    for same in map(Stream, (0, 1)):
        assert b.device.is_capturing(same)
    assert not b.device.is_capturing(Stream(2))
    with pytest.raises(Misuse, match="captures a graph"):
        b.device.record(b.done, Stream(1 - handle))


def test_memory_that_is_gone_has_no_number() -> None:
    b = Bench()
    address = b.device.caller_memory(NBYTES)
    handle, _ = b.device.export(address)
    mapped = b.peer.map(handle)
    assert b.device.buffer_id(address)
    b.device.free_caller_memory(address)
    assert b.device.buffer_id(address) == 0
    b.peer.unmap(mapped)

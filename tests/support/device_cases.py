"""Contract tests of `Device`, for the fake device and for a GPU."""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Any

import numpy as np
import pytest

from r2ccl.device.base import Device, Stream
from r2ccl.errors import TransportError

TIMEOUT_S = 30.0
NBYTES = 1 << 16
#: ``out[i] = source[i] + step`` for unsigned 32-bit integers.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry add(.param .u64 out, .param .u64 source, .param .u64 count, .param .u32 step)
{
    .reg .pred %p<2>;
    .reg .b32 %r<7>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [out];
    ld.param.u64 %rd2, [source];
    ld.param.u64 %rd3, [count];
    ld.param.u32 %r6, [step];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.s32 %r4, %r1, %r2, %r3;
    cvt.u64.u32 %rd4, %r4;
    setp.ge.u64 %p1, %rd4, %rd3;
    @%p1 bra DONE;
    shl.b64 %rd5, %rd4, 2;
    add.u64 %rd6, %rd2, %rd5;
    ld.global.u32 %r5, [%rd6];
    add.u32 %r5, %r5, %r6;
    add.u64 %rd7, %rd1, %rd5;
    st.global.u32 [%rd7], %r5;
DONE:
    ret;
}
"""


class Bench:
    """Stream of a device, and helpers of the tests."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = device.make_stream()
        self.event = device.make_event()

    def finish(self, stream: Stream | None = None) -> None:
        self.device.record(self.event, self.stream if stream is None else stream)
        assert self.device.synchronize(self.event, TIMEOUT_S)

    def upload(self, data: Any) -> int:
        """Return new device memory that holds a copy of an array."""
        pinned = self.pinned(data)
        address = self.device.allocate(pinned.nbytes)
        self.device.copy(address, pinned.ctypes.data, pinned.nbytes, self.stream)
        self.finish()
        return address

    def pinned(self, data: Any) -> Any:
        pinned = self.device.allocate_pinned(data.nbytes)
        pinned[:] = data.reshape(-1).view(np.uint8)
        return pinned

    def download(self, address: int, nbytes: int = NBYTES) -> Any:
        pinned = self.device.allocate_pinned(nbytes)
        self.device.copy(pinned.ctypes.data, address, nbytes, self.stream)
        self.finish()
        return pinned.copy()


def random_bytes(seed: int, nbytes: int = NBYTES) -> Any:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


class DeviceCases:
    """Contract tests; a subclass provides the fixture ``device``."""

    @pytest.fixture
    def bench(self, device: Device) -> Bench:
        return Bench(device)

    def test_it_says_what_it_is(self, device: Device) -> None:
        assert device.ordinal == 0
        assert len(device.uuid) == 16
        assert any(device.uuid)
        assert device.capability >= (7, 0)
        assert device.nsms >= 1
        assert device.waits_on_memory

    def test_memory_is_aligned_and_holds_what_was_copied_to_it(self, bench: Bench) -> None:
        for nbytes in (1, 3, 4096, NBYTES, (1 << 20) + 5):
            data = random_bytes(nbytes, nbytes)
            address = bench.upload(data)
            other = bench.device.allocate(nbytes)
            assert address % 256 == other % 256 == 0
            bench.device.copy(other, address, nbytes, bench.stream)
            assert (bench.download(other, nbytes) == data).all()

    def test_a_copy_of_nothing_is_nothing(self, bench: Bench) -> None:
        address = bench.upload(random_bytes(1))
        bench.device.copy(address, bench.device.allocate(8), 0, bench.stream)
        assert (bench.download(address) == random_bytes(1)).all()

    def test_pinned_memory_is_zero(self, bench: Bench) -> None:
        memory = bench.device.allocate_pinned(NBYTES)
        assert (memory.dtype, memory.shape) == (np.uint8, (NBYTES,))
        assert not memory.any()
        assert memory.ctypes.data % 64 == 0
        bench.device.free_pinned(memory)

    @pytest.mark.parametrize("nrows", [1, 7])
    def test_rows_are_copied_and_nothing_between_them(self, bench: Bench, nrows: int) -> None:
        source, before = random_bytes(1, 7 * 96), random_bytes(2, 7 * 128)
        target = bench.upload(before)
        bench.device.copy_rows(target, 128, bench.upload(source), 96, 40, nrows, bench.stream)

        wanted = before.reshape(7, 128).copy()
        wanted[:nrows, :40] = source.reshape(7, 96)[:nrows, :40]
        assert (bench.download(target, before.size) == wanted.reshape(-1)).all()

    def test_rows_go_to_pinned_memory_and_back(self, bench: Bench) -> None:
        data = random_bytes(1, 4 * 64)
        pinned = bench.device.allocate_pinned(4 * 16)
        at = pinned.ctypes.data
        bench.device.copy_rows(at, 16, bench.upload(data), 64, 16, 4, bench.stream)
        bench.finish()
        assert (pinned.reshape(4, 16) == data.reshape(4, 64)[:, :16]).all()

    def test_pages_of_the_caller_can_be_pinned_and_unpinned(self, bench: Bench) -> None:
        memory = np.frombuffer(mmap.mmap(-1, 4 * mmap.PAGESIZE), np.uint8)
        memory[:] = random_bytes(3, memory.size)
        at = bench.device.pin(memory)
        target = bench.device.allocate(memory.size)
        bench.device.copy(target, at, memory.size, bench.stream)
        assert (bench.download(target, memory.size) == memory).all()
        bench.device.unpin(memory)
        again = bench.device.pin(memory)
        assert again > 0
        bench.device.unpin(memory)

    def test_each_allocation_has_a_number_of_its_own(self, bench: Bench) -> None:
        seen = set()
        for _ in range(5):
            address = bench.device.allocate(NBYTES)
            assert bench.device.buffer_id(address) == bench.device.buffer_id(address + 100)
            seen.add(bench.device.buffer_id(address))
            bench.device.free(address)
        assert len(seen) == 5

    def test_streams_are_ordered_by_events(self, bench: Bench) -> None:
        """Copy blocks back and forth between two streams; each step needs the one before."""
        device, other = bench.device, bench.device.make_stream()
        events = [device.make_event(), device.make_event()]
        nbytes = 1 << 22
        data = random_bytes(4, nbytes)
        places = [bench.upload(data), *(device.allocate(nbytes) for _ in range(2))]
        for turn in range(20):
            mine, theirs = (bench.stream, other) if turn % 2 else (other, bench.stream)
            device.wait(mine, events[(turn + 1) % 2])
            device.copy(places[(turn + 1) % 3], places[turn % 3], nbytes, mine)
            device.record(events[turn % 2], mine)
            device.wait(theirs, events[turn % 2])
            if turn % 3 == 2:  # overwrite the source once it has been read
                device.copy(places[turn % 3], places[(turn + 1) % 3], nbytes, theirs)
                device.record(events[(turn + 1) % 2], theirs)
        device.wait(bench.stream, events[0])
        device.wait(bench.stream, events[1])
        assert (bench.download(places[20 % 3], nbytes) == data).all()

    def test_an_event_that_was_never_recorded_is_done(self, bench: Bench) -> None:
        assert bench.device.is_done(bench.device.make_event())

    def test_a_stream_waits_for_a_word_of_the_host(self, bench: Bench) -> None:
        device = bench.device
        words = device.allocate_pinned(4096).view(np.uint32)
        target = device.allocate_pinned(NBYTES)
        source = bench.upload(random_bytes(5))
        device.wait_word(bench.stream, words.ctypes.data + 8, 3)
        device.copy(target.ctypes.data, source, NBYTES, bench.stream)
        device.record(bench.event, bench.stream)

        assert not device.is_done(bench.event)
        words[2] = 2
        assert not device.synchronize(bench.event, 0.02)
        assert not target.any()
        words[2] = 3
        assert device.synchronize(bench.event, TIMEOUT_S)
        assert (target == random_bytes(5)).all()

    @pytest.mark.parametrize(("found", "wanted"), [(5, 4), (2, 2**32 - 3), (0, 0)])
    def test_words_are_compared_as_differences(self, bench: Bench, found: int, wanted: int) -> None:
        words = bench.device.allocate_pinned(4096).view(np.uint32)
        words[0] = found
        bench.device.wait_word(bench.stream, words.ctypes.data, wanted)
        bench.finish()

    def test_a_stream_writes_words_in_order_with_its_work(self, bench: Bench) -> None:
        device, other = bench.device, bench.device.make_stream()
        pages = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        flag = device.pin(pages)
        shared, target = device.allocate(NBYTES), device.allocate(NBYTES)
        for turn in range(1, 11):
            source = bench.upload(random_bytes(turn))
            device.wait_word(other, flag, turn)
            device.copy(target, shared, NBYTES, other)
            device.write_word(other, flag + 64, turn)
            device.copy(shared, source, NBYTES, bench.stream)
            device.write_word(bench.stream, flag, turn)
            device.wait_word(bench.stream, flag + 64, turn)
            assert (bench.download(target) == random_bytes(turn)).all()
        assert pages.view(np.uint32)[0] == 10
        bench.finish(other)
        device.unpin(pages)

    def test_a_word_may_be_in_device_memory(self, bench: Bench) -> None:
        device, other = bench.device, bench.device.make_stream()
        word = bench.upload(np.zeros(4, np.uint32))
        device.wait_word(other, word + 4, 9)
        device.record(bench.event, other)
        assert not device.is_done(bench.event)
        device.write_word(bench.stream, word + 4, 9)
        assert device.synchronize(bench.event, TIMEOUT_S)

    def test_a_kernel_gets_its_arguments(self, bench: Bench) -> None:
        device, count = bench.device, 1000
        kernel = device.load(PTX, "add")
        data = np.arange(count, dtype=np.uint32)
        out, source = device.allocate(4 * count), bench.upload(data)
        arguments = [(out, ctypes.c_uint64), (source, ctypes.c_uint64), (count, ctypes.c_uint64),
                     (2**32 - 5, ctypes.c_uint32)]  # fmt: skip
        device.launch(kernel, 4, 256, bench.stream, arguments)
        assert (bench.download(out, 4 * count).view(np.uint32) == data - np.uint32(5)).all()

    def test_an_entry_that_is_not_there_is_said(self, device: Device) -> None:
        with pytest.raises(TransportError) as caught:
            device.load(PTX, "subtract")
        assert caught.value.status == "CUDA_ERROR_NOT_FOUND"

    def test_the_default_streams_take_work_too(self, bench: Bench) -> None:
        data = random_bytes(6)
        for stream in (Stream(0), Stream(1), Stream(2)):
            target = bench.device.allocate(NBYTES)
            bench.device.copy(target, bench.upload(data), NBYTES, stream)
            bench.device.record(bench.event, stream)
            bench.device.wait(bench.stream, bench.event)
            assert (bench.download(target) == data).all()

    def test_any_thread_may_call(self, bench: Bench) -> None:
        data, found, failures = random_bytes(7), [], []

        def work() -> None:
            try:
                own = Bench(bench.device)
                found.append(own.download(own.upload(data)))
            except BaseException as exc:
                failures.append(exc)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert failures == []
        assert len(found) == 3
        assert all((each == data).all() for each in found)

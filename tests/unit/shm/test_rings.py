"""Rings of frames: what is put arrives once and in order, whatever room there is."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from support.reading_programs import needs_reading
from support.ringpairs import joined

from r2ccl.shm.layout import SLEEP_NS, WAITERS
from r2ccl.shm.message_layout import (
    ABANDONED,
    DATA_FRAME,
    FRAME,
    FRAME_NBYTES,
    IDLE,
    MOVED,
    RECEIVED_ALL,
    REQUEST,
    ROOM,
    SENT_ALL,
    UNREADABLE,
)

_KIND, _DTYPE = 1, 3


def _data(number, nbytes):
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8).tobytes()


def _put(rings, number, nbytes):
    return rings.put(1, _KIND, _DTYPE, -number, number, nbytes, _data(number, nbytes))


def _take(rings):
    """Take a frame from rank 0; return its number after a check of all its parts."""
    assert rings.pump(False) == FRAME
    assert rings.peer == 0
    frame = rings.frame()
    assert frame[:3] == (_KIND, _DTYPE, -frame.ident)
    assert frame.size == len(frame.data)
    assert bytes(frame.data) == _data(frame.ident, frame.size)
    rings.consume(0, len(frame.data))
    return frame.ident


def test_frames_arrive_in_order_while_the_ring_wraps():
    choice = random.Random(1)
    with joined(2) as (sender, receiver):
        nput = ntaken = 0
        while nput < 400:
            size = choice.choice((0, 1, 63, 64, 65, 5000, 200_000))
            if _put(sender, nput + 1, size):
                nput += 1
            else:
                assert nput > ntaken
                for _ in range(choice.randrange(1, nput - ntaken + 1)):
                    ntaken += 1
                    assert _take(receiver) == ntaken
        while ntaken < nput:
            ntaken += 1
            assert _take(receiver) == ntaken
        assert receiver.pump(False) == IDLE


def test_a_full_ring_has_room_once_frames_are_taken():
    with joined(2) as (sender, receiver):
        half = sender.ring_nbytes // 2 - FRAME_NBYTES
        assert sender.fits(half)
        assert not sender.fits(half + 1)
        assert _put(sender, 1, half)
        assert _put(sender, 2, half)
        assert not _put(sender, 3, 0)
        assert sender.pump(False) == IDLE
        assert _take(receiver) == 1
        assert sender.pump(False) == ROOM
        assert _put(sender, 3, half)
        assert [_take(receiver), _take(receiver)] == [2, 3]


def test_an_empty_ring_has_room_for_any_frame():
    """Although the position of the receiver is published late."""
    with joined(2) as (sender, receiver):
        half = sender.ring_nbytes // 2 - FRAME_NBYTES
        for number in range(1, 3000):
            assert _put(sender, number, half if number % 50 == 0 else number % 500)
            assert _take(receiver) == number


@pytest.mark.parametrize("nbytes", [1, 8191, 100_001, 5_000_003])
def test_long_messages_move_in_pieces(nbytes):
    source, target = _data(nbytes, nbytes), bytearray(nbytes + 1)
    with joined(3) as ranks:
        sender, receiver = ranks[0], ranks[2]
        sender.allocate(2)
        sender.send_data(2, memoryview(source))
        receiver.receive_data(0, memoryview(target)[:nbytes])
        events, until_s = set(), time.monotonic() + 30
        while {(0, SENT_ALL), (2, RECEIVED_ALL)} - events:
            for rank in (0, 2):
                event = ranks[rank].pump(False)
                if event not in (IDLE, MOVED):
                    events.add((rank, event))
            assert time.monotonic() < until_s, events
        assert (sender.peer, receiver.peer) == (2, 0)
        assert target == source + b"\0"


def test_a_forgotten_message_does_not_move():
    source, target = _data(1, 100_000), bytearray(100_000)
    with joined(2) as (sender, receiver):
        sender.allocate(1)
        sender.send_data(1, memoryview(source))
        receiver.receive_data(0, memoryview(target))
        receiver.forget(is_closing=False)
        while sender.pump(False) != SENT_ALL:
            pass
        assert receiver.pump(False) == FRAME  # data of no message: the driver refuses it
        assert not any(target)


def _announce(sender, receiver, source):
    """Announce a message to rank 1; return the address at which it may be read."""
    assert sender.put(1, REQUEST, _DTYPE, 0, 1, len(source), announced=memoryview(source))
    assert receiver.pump(False) == FRAME
    frame = receiver.frame()
    assert (frame.kind, frame.size, bytes(frame.data)) == (REQUEST, len(source), b"")
    receiver.consume(0, 0)
    return frame.readable_at


@needs_reading
@pytest.mark.parametrize("nbytes", [1 << 16, 1_000_003])
def test_an_announced_message_is_read(nbytes):
    source, target = _data(nbytes, nbytes), bytearray(nbytes + 1)
    with joined(2, can_read=True) as (sender, receiver):
        readable_at = _announce(sender, receiver, source)
        receiver.receive_data(0, memoryview(target)[:nbytes], readable_at, is_timed=True)
        # Data of a message that was granted later stays in the ring meanwhile.
        assert sender.put(1, DATA_FRAME, 0, 0, 0, 3, b"abc")
        assert receiver.pump(False) == RECEIVED_ALL
        assert target == source + b"\0"
        assert receiver.pump(False) == FRAME


@needs_reading
@pytest.mark.parametrize("nbytes", [8, (1 << 16) - 1])
def test_a_small_message_is_not_read(nbytes):
    with joined(2, can_read=True) as (sender, receiver):
        assert _announce(sender, receiver, _data(1, nbytes)) == 0


def test_no_message_is_read_by_a_rank_that_cannot():
    with joined(2) as (sender, receiver):
        assert _announce(sender, receiver, _data(1, 100_000)) == 0


@needs_reading
def test_memory_that_cannot_be_read_is_reported():
    target = bytearray(100_000)
    with joined(2, can_read=True) as (_, receiver):
        receiver.receive_data(0, memoryview(target), 8)
        assert receiver.pump(False) == UNREADABLE
        assert receiver.peer == 0
        assert receiver.pump(False) == IDLE


@needs_reading
def test_a_message_that_its_sender_dropped_does_not_arrive():
    source, target = np.ones(100_000, np.uint8), bytearray(100_000)
    with joined(2, can_read=True) as (sender, receiver):
        readable_at = _announce(sender, receiver, source)
        sender.forget(is_closing=False)
        source[:] = 2
        receiver.receive_data(0, memoryview(target), readable_at)
        assert receiver.pump(False) == IDLE
        receiver.forget(is_closing=False)
        assert receiver.pump(False) == IDLE


@needs_reading
def test_a_message_whose_sender_has_closed_is_abandoned():
    source, target = np.ones(100_000, np.uint8), bytearray(100_000)
    with joined(2, can_read=True) as (sender, receiver):
        readable_at = _announce(sender, receiver, source)
        sender.forget(is_closing=True)
        receiver.receive_data(0, memoryview(target), readable_at)
        assert (receiver.pump(False), receiver.peer) == (ABANDONED, 0)
        assert receiver.pump(False) == IDLE


def test_data_sent_before_a_close_arrives_and_no_more():
    target = bytearray(1000)
    with joined(2) as (sender, receiver):
        sender.allocate(1)
        sender.send_data(1, memoryview(bytes(range(100))))
        assert sender.pump(False) == SENT_ALL
        sender.forget(is_closing=True)
        receiver.receive_data(0, memoryview(target))
        assert receiver.pump(False) == ABANDONED
        assert target[:100] == bytes(range(100))


def test_a_full_ring_to_a_closed_rank_refuses_no_frame():
    with joined(2) as (sender, receiver):
        while sender.put(1, 1, 0, 0, 0, 1000, bytes(1000)):
            pass
        assert sender.pump(False) == IDLE
        receiver.forget(is_closing=True)
        assert sender.pump(False) == ROOM
        assert sender.put(1, 1, 0, 0, 0, 1000, bytes(1000))


def test_a_rank_knows_how_many_of_its_messages_are_read():
    with joined(3) as ranks:
        for peer, change in ((0, 1), (0, 1), (2, 1), (0, -1)):
            ranks[1].count_read(peer, change)
        ranks[2].count_read(0, 1)
        assert [each.nreading for each in ranks] == [2, 0, 1]


def test_a_wait_ends_after_some_milliseconds():
    with joined(2) as (rings, _):
        began_s = time.monotonic()
        assert rings.pump(True) == IDLE
        assert time.monotonic() - began_s >= 0.002


def test_a_frame_and_a_wake_end_a_wait():
    with joined(2) as (sender, receiver):
        receiver._waits[SLEEP_NS] = 900_000_000
        found = []

        def wait():
            began_s = time.monotonic()
            found.append((receiver.pump(True), time.monotonic() - began_s < 0.8))

        for act, event in ((lambda: _put(sender, 1, 5), FRAME), (receiver.wake, IDLE)):
            thread = threading.Thread(target=wait)
            thread.start()
            while not receiver._own.messages[WAITERS:][:8].any():
                time.sleep(0.001)
            act()
            thread.join()
            assert found.pop() == (event, True)
            while receiver.pump(False) == FRAME:
                receiver.consume(0, len(receiver.frame().data))


def test_direct_calls_are_admitted_up_to_a_limit():
    with joined(2) as (sender, receiver):
        nbytes = 1 << 16
        nsent = 0
        while sender.admits(1, nbytes):
            nsent += 1
        assert nsent == 16
        assert sender.admits(1, 0)
        receiver.took(0, nbytes)
        assert sender.admits(1, nbytes)
        assert not sender.admits(1, nbytes)

"""Direct calls: one compiled call sends and receives, or says how far it came."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from support.reading_programs import needs_reading
from support.ringpairs import joined

from r2ccl.kernels.arrays import DATA
from r2ccl.shm import message_layout as layout
from r2ccl.shm.layout import (
    CHANGED,
    FINISHED,
    SLEEP_NS,
    SLEEP_S,
    SPIN,
    SPIN_MAX,
    SPIN_MIN,
    TOKEN,
    YIELDS,
)
from r2ccl.shm.message_layout import AWAITS, DONE, FINISHED_OTHER, OPEN, READS, TO_PUT
from r2ccl.shm.message_transfer import MOST_ROW_BITS
from r2ccl.shm.rings import DirectCall, Operand

_F64 = 8
_NOTHING = np.empty(0, np.uint8)


def _prepare(rings, peer, x=None, out=None, tag=0, recv_tag=-1, most_short=1 << 16):
    sent = None if x is None else Operand(x, peer, _F64, tag)
    received = None if out is None else Operand(out, peer, _F64, recv_tag)
    is_short = x is not None and x.nbytes <= most_short
    return DirectCall(rings, sent, received, is_short=is_short, has_form=True)


def _run(rings, call, x=None, out=None):
    x, out = (_NOTHING if each is None else each for each in (x, out))
    return rings.direct(rings.state, rings.table, call.at, id(x) + DATA, id(out) + DATA)


def _step(call):
    return int(call.words[layout.SEND_STEP]), int(call.words[layout.RECV_STEP])


def _exchange(ranks, count, ntimes):
    """Exchange arrays between two ranks, which are threads; return the results of their calls."""
    found = [[], []]

    def exchange(rank):
        rings = ranks[rank]
        x, out = np.empty(count), np.empty(count)
        call = _prepare(rings, 1 - rank, x, out)
        for number in range(ntimes):
            x[:] = np.arange(count) + 1000 * rank + number
            found[rank].append(_run(rings, call, x, out))
            assert (out == np.arange(count) + 1000 * (1 - rank) + number).all()

    threads = [threading.Thread(target=exchange, args=(rank,)) for rank in (0, 1)]
    for rings in ranks:
        rings._waits[SLEEP_NS] = 999_000_000
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("count", [0, 1, 128, 8192, 8193, 300_000])
def test_both_ranks_exchange_in_one_call(count):
    with joined(2) as ranks:
        assert _exchange(ranks, count, 20) == [[FINISHED_OTHER] + [FINISHED] * 19] * 2


def _classes(rings, peer):
    """Return, for each class of sizes, what a rank remembers of the transfers from a peer."""
    words = rings._words[peer][layout.CLASSES :]
    return words.reshape(layout.NCLASSES, layout.CLASS_NWORDS)


def _read_next(receiver, number):
    """Let the next message of class `number` (at most 3) be read: it is in the second row."""
    _classes(receiver, 0)[number, layout.CLASS_NMESSAGES] = 1 << (MOST_ROW_BITS - number)


@needs_reading
@pytest.mark.parametrize(("count", "number"), [(8193, 0), (20_000, 1), (300_000, 5)])
def test_long_messages_are_exact_with_both_transfers(count, number):
    with joined(2, can_read=True) as ranks:
        assert _exchange(ranks, count, 130) == [[FINISHED_OTHER] + [FINISHED] * 129] * 2
        for rank in (0, 1):
            nmessages, *durations_ns = _classes(ranks[rank], 1 - rank)[number]
            assert nmessages == 130
            assert all(durations_ns)
            assert ranks[rank].nreading == 0


@needs_reading
def test_a_message_comes_in_frames_if_it_cannot_be_read():
    with joined(2, can_read=True) as ranks:
        ranks[0]._own.words[TOKEN // 8] += 1  # as if another process had the number
        assert _exchange(ranks, 20_000, 80) == [[FINISHED_OTHER] + [FINISHED] * 79] * 2
        assert _classes(ranks[1], 0)[1, layout.CLASS_NS + 1] == 0
        assert ranks[0].nreading == 0


def test_a_time_that_an_earlier_call_left_does_not_count():
    with joined(2) as ranks:
        for rank in (0, 1):
            words = ranks[rank]._words[1 - rank]
            words[layout.IN_BEGUN_NS], words[layout.IN_SIZE] = 1, 100_000
        assert _exchange(ranks, 16, 2) == [[FINISHED_OTHER, FINISHED]] * 2
        for rank in (0, 1):
            assert not _classes(ranks[rank], 1 - rank).any()


@needs_reading
def test_a_message_that_its_sender_dropped_does_not_arrive():
    with joined(2, can_read=True) as (sender, receiver):
        x, out = np.ones(20_000), np.zeros(20_000)
        assert _run(sender, _prepare(sender, 1, x), x) == OPEN
        sender.forget(is_closing=False)
        x[:] = 2
        _read_next(receiver, 1)
        call = _prepare(receiver, 0, out=out)
        assert _run(receiver, call, out=out) == OPEN
        assert _step(call) == (DONE, READS)
        assert sender.nreading == 1


def test_no_rank_sleeps_too_long():
    with joined(2) as ranks:
        for rings in ranks:
            rings._waits[[SPIN, SPIN_MIN, SPIN_MAX, YIELDS]] = 0
            rings._waits[SLEEP_S] = 10
        began_s = time.monotonic()
        found = _exchange(ranks, 16, 3000)
        assert time.monotonic() - began_s < 10
        assert found == [[FINISHED_OTHER] + [FINISHED] * 2999] * 2


def test_a_send_that_no_rank_takes_stays_announced():
    with joined(2) as (rings, _):
        x = np.ones(20_000)
        call = _prepare(rings, 1, x)
        assert _run(rings, call, x) == OPEN
        assert _step(call) == (AWAITS, DONE)


def test_short_sends_are_done_until_the_ring_is_full():
    with joined(2) as (rings, _):
        x = np.ones(120)
        nframes = rings.ring_nbytes // (layout.FRAME_NBYTES + x.nbytes)
        call = _prepare(rings, 1, x)
        results = [_run(rings, call, x) for _ in range(nframes + 1)]
        assert results == [FINISHED] * nframes + [OPEN]
        assert _step(call) == (TO_PUT, DONE)


def test_short_sends_beyond_the_limit_are_announced():
    with joined(2) as (rings, receiver):
        x = np.ones(8000)
        call = _prepare(rings, 1, x)
        for _ in range(16):  # of 64,000 bytes each, taken from the ring but by no receive
            assert _run(rings, call, x) == FINISHED
            receiver.pump(False)
            receiver.consume(0, x.nbytes)
        assert _run(rings, call, x) == OPEN
        assert _step(call) == (AWAITS, DONE)


@pytest.mark.parametrize("what", ["tag", "dtype", "size"])
def test_a_message_that_does_not_fit_stays_in_the_ring(what):
    with joined(2) as (sender, receiver):
        x, out = np.ones(10), np.zeros(9 if what == "size" else 10)
        assert _run(sender, _prepare(sender, 1, x, tag=4), x) == FINISHED
        call = _prepare(receiver, 0, out=out, recv_tag=5 if what == "tag" else 4)
        if what == "dtype":
            call.words[layout.CALL_RECV_DTYPE] = _F64 + 1
        assert _run(receiver, call, out=out) == OPEN
        assert _step(call) == (DONE, AWAITS)
        assert not out.any()
        out = np.zeros(10)
        call = _prepare(receiver, 0, out=out, recv_tag=4)
        assert _run(receiver, call, out=out) == FINISHED_OTHER
        assert (out == 1).all()
        assert call.words[layout.FOUND_TAG] == 4
        assert call.words[layout.FOUND_NBYTES] == 80


def test_arrays_of_another_form_are_not_sent():
    with joined(2) as (sender, receiver):
        x = np.ones(10)
        call = _prepare(sender, 1, x)
        for other in (np.ones(11), np.ones(10, np.float32), np.ones(20)[::2]):
            assert _run(sender, call, other) == CHANGED
        assert receiver.pump(False) == layout.IDLE
        assert _run(sender, call, np.ones((5, 2))) == FINISHED
        assert receiver.pump(False) == layout.FRAME

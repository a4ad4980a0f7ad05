"""Messages over rings: order, refusals, and calls that compiled code began."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from support.reading_programs import needs_reading
from support.ringpairs import joined

from r2ccl.errors import CommunicatorRevoked, InternalError
from r2ccl.kernels.arrays import DATA
from r2ccl.runtime.messages.local_driver import LocalDriver
from r2ccl.runtime.messages.matching import ANY, Message
from r2ccl.shm.layout import TOKEN
from r2ccl.shm.message_layout import FRAME_NBYTES, OPEN, ring_nbytes
from r2ccl.shm.rings import DirectCall, Operand

_F64 = 8
_NOTHING = np.empty(0, np.uint8)
#: Messages of 120 doubles that fill the ring between two ranks.
_NFRAMES = ring_nbytes(2) // (FRAME_NBYTES + 120 * 8)


_EAGER_NBYTES = 1 << 16


@contextmanager
def _drivers(nranks=2, *, can_read=False):
    with joined(nranks, can_read=can_read) as ranks:
        members = range(10, 10 + nranks)
        yield [
            LocalDriver(rings, rank=rank, members=members, eager_nbytes=_EAGER_NBYTES)
            for rank, rings in enumerate(ranks)
        ]


def _advance(*drivers):
    while any(driver.advance(False) for driver in drivers):
        pass


def _bytes(array):
    return memoryview(array.reshape(-1).view(np.uint8))


def test_messages_keep_their_order_beyond_the_ring():
    with _drivers() as (sender, receiver):
        arrays = [np.full(size, float(size)) for size in (5000, 200_000, 3, 0, 8000) * 20]
        sent = [sender.send(_bytes(x), _F64, 1, 7) for x in arrays]
        outs = [np.zeros(200_000) for _ in arrays]
        received = [receiver.receive(_bytes(out), _F64, 0, ANY) for out in outs]
        _advance(sender, receiver)
        for x, out, one, other in zip(arrays, outs, sent, received, strict=True):
            assert one.is_done
            assert other.result == Message(0, 7, x.size)
            assert np.array_equal(out[: x.size], x)
            assert not out[x.size :].any()
        assert sender.is_quiet
        assert receiver.is_quiet
        assert sender.nmoving == receiver.nmoving == 0


class _Transfers:
    """Replacement of `Rings.choose` that reads messages, or not, as given, in turn."""

    def __init__(self, *are_read):
        self._are_read = are_read
        self._ncalls = 0

    def __call__(self, peer, readable_at, nbytes):
        is_read = self._are_read[self._ncalls % len(self._are_read)]
        self._ncalls += 1
        return readable_at if is_read else 0


@needs_reading
@pytest.mark.parametrize("can_be_read", [True, False])
def test_messages_are_read_between_others(can_be_read):
    with _drivers(can_read=True) as (sender, receiver):
        receiver.rings.choose = _Transfers(True, False, True, True, False)
        if not can_be_read:
            sender.rings._own.words[TOKEN // 8] += 1
        sizes = (20_000, 200_000, 30_000, 5) * 15
        arrays = [np.full(size, float(number)) for number, size in enumerate(sizes)]
        sent = [sender.send(_bytes(x), _F64, 1, 7) for x in arrays]
        outs = [np.zeros(200_000) for _ in arrays]
        received = [receiver.receive(_bytes(out), _F64, 0, ANY) for out in outs]
        _advance(sender, receiver)
        for x, out, one, other in zip(arrays, outs, sent, received, strict=True):
            assert one.is_done
            assert other.is_done
            assert np.array_equal(out[: x.size], x)
        assert sender.is_quiet
        assert receiver.is_quiet
        assert sender.nmoving == receiver.nmoving == 0


@needs_reading
def test_a_message_that_will_be_read_counts_as_moving():
    """So its sender waits for it in close()."""
    with _drivers(can_read=True) as (sender, receiver):
        receiver.rings.choose = _Transfers(True)
        x, out = np.ones(20_000), np.zeros(20_000)
        sent = sender.send(_bytes(x), _F64, 1, 7)
        receiver.advance(False)
        assert sender.nmoving == 0
        receiver.receive(_bytes(out), _F64, 0, 7)
        assert sender.nmoving == receiver.nmoving == 1
        receiver.advance(False)
        sender.advance(False)
        assert sent.is_done
        assert sender.nmoving == receiver.nmoving == 0


@needs_reading
@pytest.mark.parametrize("can_be_read", [True, False])
def test_a_message_moves_until_its_sender_is_told(can_be_read):
    with _drivers(can_read=True) as (sender, receiver):
        receiver.rings.choose = _Transfers(True)
        if not can_be_read:
            sender.rings._own.words[TOKEN // 8] += 1
        sent = sender.send(_bytes(np.ones(20_000)), _F64, 1, 7)
        receiver.advance(False)
        for _ in range(_NFRAMES + 1):  # the answer has no room
            receiver.send(_bytes(np.ones(120)), _F64, 0, 7)
        received = receiver.receive(_bytes(np.zeros(20_000)), _F64, 0, 7)
        receiver.advance(False)
        assert sender.nmoving > 0
        assert receiver.nmoving > 0
        assert not received.is_done
        _advance(sender, receiver)
        assert sent.is_done
        assert received.is_done
        assert sender.nmoving == receiver.nmoving == 0


def test_frames_after_the_awaited_one_stay_in_the_ring():
    with _drivers() as (sender, receiver):
        outs = [np.zeros(3) for _ in range(2)]
        first = receiver.receive(_bytes(outs[0]), _F64, 0, 7)
        for number in (1.0, 2.0):
            sender.send(_bytes(np.full(3, number)), _F64, 1, 7)
        receiver.advance(False, lambda: first.is_done)
        assert receiver.is_quiet
        receiver.receive(_bytes(outs[1]), _F64, 0, 7)
        receiver.advance(False)
        assert [out[0] for out in outs] == [1, 2]


def test_a_message_of_eager_nbytes_is_short():
    """As over links."""
    with _drivers() as (sender, receiver):
        sent = [sender.send(memoryview(bytes(_EAGER_NBYTES + more)), 0, 1, 0) for more in (0, 1)]
        _advance(sender, receiver)
        assert [each.is_done for each in sent] == [True, False]


def test_a_synchronous_send_is_done_once_it_is_received():
    with _drivers() as (sender, receiver):
        sent = [
            sender.send(_bytes(np.ones(size)), _F64, 1, 0, is_synchronous=True) for size in (0, 3)
        ]
        _advance(sender, receiver)
        assert not any(each.is_done for each in sent)
        for each in sent:
            receiver.receive(_bytes(np.zeros(3)), _F64, 0, 0)
            _advance(sender, receiver)
            assert each.is_done


@pytest.mark.parametrize("dtype", [_F64, 0])
def test_a_receive_is_done_once_its_answer_is_in_the_ring(dtype):
    """The communicator may be closed afterwards, which drops frames that wait for room.

    The receiver grants an empty message, or refuses it because of its dtype.
    """
    with _drivers() as (sender, receiver):
        sent = sender.send(memoryview(b""), dtype, 1, 0, is_synchronous=True)
        _advance(receiver)
        for _ in range(_NFRAMES):
            assert receiver.send(_bytes(np.ones(120)), _F64, 0, 5).is_done
        received = receiver.receive(_bytes(np.zeros(3)), _F64, 0, 0)
        assert not received.is_done
        _advance(sender, receiver)
        assert received.is_done
        assert sent.is_done
        assert str(sent.error) == str(received.error)


def test_a_message_that_does_not_fit_is_refused_and_not_lost():
    with _drivers() as (sender, receiver):
        short = sender.send(_bytes(np.ones(3)), _F64, 1, 0)
        long = sender.send(_bytes(np.ones(10_000)), _F64, 1, 1)
        small = [receiver.receive(_bytes(np.zeros(2)), _F64, 0, tag) for tag in (0, 1)]
        _advance(sender, receiver)
        assert short.is_done
        assert short.error is None
        assert str(long.error) == str(small[1].error)
        assert "rank 10 sent 3 elements" in str(small[0].error)
        assert "rank 11 receives up to 2 of float64" in str(small[0].error)
        out = np.zeros(3)
        assert receiver.receive(_bytes(out), _F64, 0, 0).is_done
        assert (out == 1).all()
        assert sender.is_quiet


@pytest.mark.parametrize(("nbefore", "count"), [(_NFRAMES, 120), (0, 100_000)])
def test_late_sends_of_direct_calls_go_on(nbefore, count):
    """The ring is full, or no receive has taken the message."""
    with _drivers() as (sender, receiver):
        x, out = np.arange(float(count)), np.zeros(count)
        for _ in range(nbefore):
            sender.send(_bytes(x), _F64, 1, 5)
        operand = Operand(x, 1, _F64, 2)
        call = DirectCall(sender.rings, operand, None, is_short=nbefore > 0, has_form=True)
        assert _run(sender.rings, call, x) == OPEN
        request = sender.take_over_send(call, _bytes(x), _F64)
        assert not request.is_done
        received = receiver.receive(_bytes(out), _F64, 0, 2)
        _advance(sender, receiver)
        assert request.is_done
        assert received.result == Message(0, 2, count)
        assert np.array_equal(out, x)
        assert sender.is_quiet


def _run(rings, call, x=_NOTHING, out=_NOTHING):
    return rings.direct(rings.state, rings.table, call.at, id(x) + DATA, id(out) + DATA)


@pytest.mark.parametrize("count", [3, 100_000])
@pytest.mark.parametrize("is_announced", [False, True])
def test_late_receives_of_direct_calls_go_on(count, is_announced):
    with _drivers() as (sender, receiver):
        x, out = np.arange(float(count)), np.zeros(count)
        if is_announced:
            sender.send(_bytes(x), _F64, 1, 4, is_synchronous=True)
        received = Operand(out, 0, _F64, ANY)
        call = DirectCall(receiver.rings, None, received, is_short=False, has_form=True)
        assert _run(receiver.rings, call, out=out) == OPEN
        request = receiver.take_over_receive(call, _bytes(out), _F64)
        assert not request.is_done
        if not is_announced:
            sender.send(_bytes(x), _F64, 1, 4)
        _advance(sender, receiver)
        assert request.is_done
        assert request.result == Message(0, 4, count)
        assert np.array_equal(out, x)
        assert receiver.is_quiet
        assert sender.is_quiet


def test_data_that_was_not_granted_is_an_error():
    with _drivers() as (sender, receiver):
        sender.rings.allocate(1)
        sender.rings.send_data(1, memoryview(bytes(100)))
        sender.rings.pump(False)
        with pytest.raises(InternalError, match="rank 10 sends data that was not granted"):
            receiver.advance(False)


def test_a_forgotten_message_is_not_written():
    with _drivers() as (sender, receiver):
        out = np.zeros(100_000)
        sender.send(_bytes(np.ones(100_000)), _F64, 1, 0)
        receiver.receive(_bytes(out), _F64, 0, 0)
        receiver.advance(False)
        sender.advance(False)
        receiver.forget(is_closing=False)
        assert receiver.is_quiet
        _advance(sender, receiver)
        assert not out.any()
        assert receiver.nmoving == 0


@pytest.mark.parametrize("is_granted", [False, True])
def test_a_receive_ends_if_its_sender_closes(is_granted: bool):
    with _drivers() as (sender, receiver):
        out = np.zeros(100_000)
        sender.send(_bytes(np.ones(100_000)), _F64, 1, 3)
        if is_granted:
            request = receiver.receive(_bytes(out), _F64, 0, 3)
            receiver.advance(False)
        sender.forget(is_closing=True)
        if not is_granted:
            request = receiver.receive(_bytes(out), _F64, 0, 3)
        _advance(receiver)
        assert request.is_done
        assert receiver.nmoving == 0
        assert isinstance(request.error, CommunicatorRevoked)
        assert str(request.error) == (
            "rank 11: rank 10 closed the communicator before its message with tag 3 was received: "
            "wait for all sends before close()"
        )

"""Frames of other communicators that arrive during a compiled call."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from r2ccl.kernels.native import callable_of
from r2ccl.runtime.compiled import layout as at
from r2ccl.runtime.compiled.loop import make_loop

#: Contexts of the call and of another communicator, and channels of their links.
CONTEXT, OTHER = 3, 4
CHANNEL, OTHER_CHANNEL = CONTEXT << 16, OTHER << 16
PEER = 1
SLEEP_NS = 200_000_000


class Call:
    """State of a call with one link, whose slices never come; the peer is a socket."""

    def __init__(self) -> None:
        self.loop = callable_of(f"{make_loop.__module__}:{make_loop.__name__}")
        self.own, self.peer = socket.socketpair()
        self.wakeup = socket.socketpair()
        self.own.setblocking(False)
        self.state, self.conn, self.pair = (
            np.zeros(size, np.int64) for size in (at.STATE_NWORDS, at.CONN_NWORDS, at.PAIR_NWORDS)
        )
        self.log, self.buffer = np.zeros((8, at.EVENT_NWORDS), np.int64), np.zeros(4096, np.uint8)
        self.polls, self.arrived = np.zeros(2, np.int64), np.zeros(1, np.int64)
        self.polls[1] = self.wakeup[0].fileno() | select.POLLIN << 32
        self.time, self.operands = np.zeros(2, np.int64), np.zeros(2, np.int64)
        state, conn, pair = self.state, self.conn, self.pair
        state[[at.NCONNS, at.NPAIRS, at.REMAINING, at.HOME]] = 1, 1, 1, -1
        state[[at.CONTEXT, at.OP, at.OP_STEP]] = CONTEXT, 7, 1
        state[[at.LIMIT, at.MOST_LOGGED]] = 100, 4
        state[[at.SLEEP_NS, at.BUSY_NS]] = SLEEP_NS, 10 * SLEEP_NS
        for word, table in (
            (at.CONNS, conn), (at.PAIRS, pair), (at.LOG, self.log), (at.POLLS, self.polls),
            (at.TIME, self.time), (at.OPERANDS, self.operands),
        ):  # fmt: skip
            state[word] = table.ctypes.data
        conn[[at.FD, at.PEER, at.IS_READABLE]] = self.own.fileno(), PEER, 1
        conn[[at.BUFFER, at.BUFFER_NBYTES]] = self.buffer.ctypes.data, self.buffer.nbytes
        conn[[at.SENDING_PAIR, at.TARGET_PAIR]] = -1, -1
        pair[[at.CHANNEL, at.PAIR_PEER, at.ARRIVED]] = CHANNEL, PEER, self.arrived.ctypes.data

    def send(self, kind: int, channel: int, *, ack: int = 0) -> None:
        """Send the header of a frame without data from the peer."""
        frame = np.array([kind, channel, 0, 0, ack, 1, 0, 0], np.int64)
        self.peer.sendall(frame.tobytes())

    def run(self) -> int:
        """Run the call until it ends, or leaves compiled code; return the result."""
        return self.loop(self.state.ctypes.data)

    def close(self) -> None:
        """Close the sockets."""
        for each in (self.own, self.peer, *self.wakeup):
            each.close()


@pytest.fixture
def call() -> Iterator[Call]:
    made = Call()
    yield made
    made.close()


@pytest.mark.parametrize("spin_ns", [0, SLEEP_NS])
def test_a_slice_waits_for_the_end_of_the_call(call: Call, spin_ns: int) -> None:
    call.state[at.SPIN_NS] = spin_ns
    call.send(at.DATA_FRAME, OTHER_CHANNEL)
    began_ns = time.monotonic_ns()
    assert call.run() == at.LEFT  # the peer may need the call to which the slice belongs
    assert 1_000_000 <= time.monotonic_ns() - began_ns < SLEEP_NS
    assert call.state[at.IS_DELAYING]
    assert call.conn[at.IS_STALLED] == at.OTHER
    assert (call.conn[at.PARSED], call.conn[at.FILLED]) == (0, at.HEADER_NBYTES)
    call.state[at.REMAINING] = 0
    assert call.run() == at.HAS_OTHERS


def test_a_slice_before_awaited_frames_ends_the_compiled_call(call: Call) -> None:
    call.pair[[at.NRECEIVES, at.ASKED]] = 1, 1
    call.send(at.DATA_FRAME, OTHER_CHANNEL)
    assert call.run() == at.LEFT
    assert not call.state[at.IS_DELAYING]
    assert call.conn[at.PARSED] == 0


def test_a_confirmation_is_logged(call: Call) -> None:
    call.send(at.CONFIRM_FRAME, OTHER_CHANNEL, ack=5)
    assert call.run() == at.LEFT  # after SLEEP_NS
    assert (call.state[at.NFOREIGN], call.state[at.NLOGGED]) == (1, 1)
    event = call.log[0, [at.EVENT, at.EVENT_CHANNEL, at.EVENT_ACK, at.EVENT_PAIR]]
    assert event.tolist() == [at.CONFIRMED_EVENT, OTHER_CHANNEL, 5, -1]
    assert call.conn[at.PARSED] == at.HEADER_NBYTES
    call.state[at.REMAINING] = 0
    assert call.run() == at.HAS_OTHERS


def test_frames_of_the_call_are_no_frames_of_others(call: Call) -> None:
    call.send(at.CONFIRM_FRAME, CHANNEL)
    assert call.run() == at.LEFT
    assert call.state[at.NFOREIGN] == 0
    call.state[at.REMAINING] = 0
    assert call.run() == at.FINISHED

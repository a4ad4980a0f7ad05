"""Messages of one rank: what its driver does with envelopes that arrive."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from support.still import make_engine

from r2ccl.clock import monotonic
from r2ccl.config import ENVELOPE_NBYTES
from r2ccl.errors import CommunicatorRevoked, TransportTimeout
from r2ccl.failover.health.table import Health
from r2ccl.failover.migration.calls import first_channel, message_context
from r2ccl.failover.migration.path import PathState
from r2ccl.runtime.arrays.buffers import Buffer
from r2ccl.runtime.messages.driver import GRANT_NBYTES, MessageDriver
from r2ccl.types import MOST_UNREPORTED, MOST_UNTAKEN_ON_LINKS, PathKey

_ENVELOPE = struct.Struct("<BBxxIqQQQ")
_MESSAGE, _REQUEST, _GRANT = 1, 2, 3


def test_the_room_for_an_envelope_is_its_size() -> None:
    assert _ENVELOPE.size == ENVELOPE_NBYTES


def test_many_envelopes_may_have_arrived_at_once() -> None:
    """As after a repair, or for a communicator that this rank has just made."""
    engine, _ = make_engine(eager_slots=2000)
    link = engine._links.receiver(1, first_channel(message_context(0)))
    for seq in range(2000):
        link.arrived(seq, _ENVELOPE.pack(_MESSAGE, 0, 1, seq, seq, 0, 0))
    engine._links.deliver(link)
    assert link.consumed == 2000
    assert engine.messenger.probe(1, 1999, is_blocking=False) is not None


def test_paths_that_a_message_waits_for_are_not_idle() -> None:
    """A receive that takes it later has an answer to send."""
    engine, _ = make_engine(eager_nbytes=64)
    links = engine._links
    for peer in (1, 2):
        links.paths[PathKey(peer, 0)].state = PathState.UP
    assert links.idle_peers() == [1, 2]
    link = links.receiver(1, first_channel(message_context(0)))
    link.arrived(0, _ENVELOPE.pack(_REQUEST, 0, 1, 7, 1, 1000, 0))
    links.deliver(link)
    link.acked = link.consumed  # as the next tick confirms it
    assert links.idle_peers() == [2]
    sent = engine.messenger.way.driver.send(memoryview(bytes(1000)), 0, 2, 7)
    for each in links.senders.values():
        each.outstanding.clear()
        each.confirmed = each.posted
    assert links.idle_peers() == []
    assert not sent.is_done


def test_an_empty_synchronous_message_leaves_no_peer_busy() -> None:
    engine, _ = make_engine()
    driver, busy = engine.messenger.way.driver, engine._links.calls_of(message_context(0)).busy
    sent = driver.send(memoryview(b""), 0, 2, 7, is_synchronous=True)
    link = engine._links.receiver(1, first_channel(message_context(0)))
    link.arrived(0, _ENVELOPE.pack(_REQUEST, 0, 1, 7, 1, 0, 0))
    engine._links.deliver(link)
    assert busy == {1: 1, 2: 1}
    assert driver.receive(memoryview(bytearray(8)), 0, 1, 7).is_done
    answer = engine._links.receiver(2, first_channel(message_context(0)))
    answer.arrived(0, _ENVELOPE.pack(_GRANT, 0, 1, 0, sent.ident, 0, 0) + bytes(8))
    engine._links.deliver(answer)
    assert sent.is_done
    assert busy == {}


@pytest.mark.parametrize("dtype", [0, 1])
def test_a_receive_is_done_once_its_answer_is_posted(dtype: int) -> None:
    """The communicator may be closed afterwards, which drops envelopes that wait for a slot."""
    engine, _ = make_engine(eager_slots=2)
    driver, channel = engine.messenger.way.driver, first_channel(message_context(0))
    link = engine._links.receiver(1, channel)
    link.arrived(0, _ENVELOPE.pack(_REQUEST, dtype, 1, 7, 1, 0, 0))
    engine._links.deliver(link)
    back = engine._links.sender(1, channel)
    while back.can_post(True):
        assert driver.send(memoryview(b""), 0, 1, 5).is_done
    received = driver.receive(memoryview(bytearray(8)), 0, 1, 7)
    assert not received.is_done
    back.outstanding.clear()
    back.confirmed = back.posted
    driver.advance()
    assert received.is_done


def test_a_long_message_avoids_its_own_home_rails_that_are_down() -> None:
    """The home rails are not the first ones if there are TCP rails beside RDMA rails."""
    engine, _ = make_engine()
    health = Health(0, 4, bytes([8, 8, 8, 8, 8, 0, 8, 8, 8, 8, 8, 8]))
    driver = MessageDriver(
        engine._links,
        engine._links.calls_of(message_context(5)),
        rank=0,
        members=(0, 1, 2),
        first_op=1,
        homes=[1, 2],
        nwires=2,
        eager_nbytes=64,
        slice_nbytes=1 << 10,
        depth=4,
        health=lambda: health,
    )
    assert driver._cut(1, 8 << 20) == [0, 8 << 20]
    assert driver._cut(2, 8 << 20) == [4 << 20, 4 << 20]


def test_a_blocked_send_waits_for_a_receive() -> None:
    engine, _ = make_engine(0, monotonic, timeout_s=0.05, eager_nbytes=64)
    x = np.zeros(1000, np.uint8)
    request = engine.messenger.send(Buffer(x, 0, 1000, 1, 1000, x), 1, 7)
    with pytest.raises(TransportTimeout, match="matching receive from rank 1"):
        request.wait()


@pytest.mark.parametrize("in_step", [False, True])
def test_only_wait_raises_the_error_of_a_message(in_step: bool) -> None:
    """The error ends the communicator before `is_done` is called, or within it."""
    engine, _ = make_engine()
    out = np.zeros(1, np.uint8)
    request = engine.messenger.receive(Buffer(out, 0, 1, 1, 1, out), 1, 7)
    assert not request.is_done()
    error = TransportTimeout("the first error", rank=0, status="TIMEOUT")

    def step(*args: object) -> None:
        raise error

    if in_step:
        engine._loop.progress.step = step  # type: ignore[method-assign]
    else:
        engine._loop.fail(error)
    assert request.is_done()
    assert request.is_done()
    with pytest.raises(TransportTimeout, match="the first error"):
        request.wait()


def test_no_wait_for_a_message_continues_after_the_end() -> None:
    """Otherwise a program that polls with waits of 0 s would never end."""
    engine, _ = make_engine()
    out = np.zeros(1, np.uint8)
    request = engine.messenger.receive(Buffer(out, 0, 1, 1, 1, out), 1, 7)
    with pytest.raises(TransportTimeout, match="continues: wait again"):
        request.wait(0)
    engine._loop.fail(TransportTimeout("the first error", rank=0, status="TIMEOUT"))
    with pytest.raises(TransportTimeout, match="the first error"):
        request.wait(0)
    with pytest.raises(CommunicatorRevoked):
        request.wait(0)


def test_a_send_is_refused_if_a_close_comes_before_its_turn(monkeypatch) -> None:
    engine, _ = make_engine()
    messenger, x = engine.messenger, np.zeros(1000, np.uint8)
    own = messenger.way.own

    def close_first(fn, *, is_step):
        messenger.refuse(lambda: CommunicatorRevoked("closed"))
        return own(fn, is_step=is_step)

    monkeypatch.setattr(messenger.way, "own", close_first)
    with pytest.raises(CommunicatorRevoked, match="closed"):
        messenger.send(Buffer(x, 0, 1000, 1, 1000, x), 1, 7, is_synchronous=True)
    assert not messenger.way.driver._announced


def test_a_call_that_does_not_run_reports_nothing_as_taken() -> None:
    engine, _ = make_engine(eager_nbytes=1 << 16)
    driver, links = engine.messenger.way.driver, engine._links
    link = links.receiver(1, first_channel(message_context(0)))
    envelope = memoryview(bytearray(GRANT_NBYTES))
    for seq in range(MOST_UNREPORTED >> 16):
        driver.pack_grant(envelope, 1, 1 << 20)
        driver.pack(envelope, _REQUEST, 0, 1, 7, 1 << 20)
        link.arrived(seq, _ENVELOPE.pack(_MESSAGE, 0, 1, 7, seq, 1 << 16, 0) + bytes(1 << 16))
        links.deliver(link)
        driver.receive(memoryview(bytearray(1 << 16)), 0, 1, 7)
    assert _ENVELOPE.unpack_from(envelope)[-1] == MOST_UNREPORTED - (1 << 16)
    sender = links.sender(1, first_channel(message_context(0)))
    (report,) = sender.outstanding
    assert _ENVELOPE.unpack_from(report.view)[-1] == MOST_UNREPORTED


def test_an_older_envelope_does_not_lower_the_count_of_taken() -> None:
    """Compiled code receives the request of the peer before its grant."""
    engine, _ = make_engine(eager_nbytes=1 << 16)
    driver = engine.messenger.way.driver
    assert driver.send(memoryview(bytes(1 << 16)), 0, 1, 7).is_done
    driver.note_long(1, memoryview(_ENVELOPE.pack(_GRANT, 0, 1, 0, 1, 1 << 20, 1 << 16)))
    driver.take_long(memoryview(_ENVELOPE.pack(_REQUEST, 0, 1, 7, 1, 1 << 20, 0)), 1)
    for _ in range(MOST_UNTAKEN_ON_LINKS >> 16):
        driver.note_short(1, 1 << 16)
        assert driver.has_room(1, 0)
    assert not driver.has_room(1, 1)


def test_compiled_code_receives_nothing_while_a_message_is_ahead() -> None:
    """Nobody would pass on the one that is ahead once the missing one has come."""
    engine, _ = make_engine(eager_nbytes=64)
    driver, links = engine.messenger.way.driver, engine._links
    assert driver.may_receive(1, 7)
    link = links.receiver(1, first_channel(message_context(0)))
    link.arrived(1, _ENVELOPE.pack(_REQUEST, 0, 1, 7, 2, 1000, 0))
    assert not driver.may_receive(1, 7)
    assert driver.may_receive(2, 7)

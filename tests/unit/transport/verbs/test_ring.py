"""Credits: places never overlap, and come back with the count a message leaves with."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from r2ccl.errors import InternalError
from r2ccl.transport.base import Frame
from r2ccl.transport.verbs import messages
from r2ccl.transport.verbs.messages import CLEAR, CONFIRM, EAGER, HEADER_NBYTES, Token, VerbsMessage
from r2ccl.transport.verbs.ring import ALIGN, COUNT_MODULUS, SendRing


@given(st.lists(st.one_of(st.integers(1, 700), st.just(None)), max_size=120), st.integers(1, 9))
def test_unconsumed_places_never_overlap(steps: list[int | None], nmessages: int) -> None:
    """A number sends a message of that size; None lets the reader consume the oldest."""
    ring = SendRing(1024, nmessages, 64)
    live: list[tuple[int, int]] = []
    consumed = 0
    for step in steps:
        if step is None:
            if live:
                live.pop(0)
                consumed += 1
                ring.credit(consumed % COUNT_MODULUS)
            continue
        offset = ring.take(step)
        if offset is None:
            assert live, "an empty ring takes any message"
            continue
        assert offset % 64 == 0
        assert offset + step <= 1024
        assert all(offset + step <= lo or offset >= lo + size for lo, size in live)
        live.append((offset, step))


def test_an_empty_ring_takes_the_largest_message_anywhere() -> None:
    ring = SendRing(1024, 4, 64)
    ring.take(100)
    ring.credit(1)
    assert ring.take(1024) == 0


def test_counts_wrap_and_old_ones_change_nothing() -> None:
    ring = SendRing(128, 2, 64)
    for count in range(1, 3 * 1000):
        assert ring.take(64) is not None
        ring.credit(count % COUNT_MODULUS)
    ring.credit(5)
    assert ring.take(64) is not None


def test_the_modulus_is_crossed() -> None:
    ring = SendRing(128, 2, 64)
    ring._consumed = COUNT_MODULUS - 1
    assert ring.take(64) is not None
    assert ring.take(64) is not None
    ring.credit(COUNT_MODULUS - 1)
    assert ring.take(64) is None
    ring.credit(1)
    assert ring.take(128) is not None


def test_what_cannot_be() -> None:
    ring = SendRing(128, 2, 64)
    with pytest.raises(InternalError, match="ring of 128"):
        ring.take(129)
    with pytest.raises(InternalError, match="1 messages were consumed, but only 0"):
        ring.credit(1)


@pytest.mark.parametrize("kind", [EAGER, CLEAR, CONFIRM])
def test_a_header_carries_the_credit_it_was_stamped_with_last(kind: int) -> None:
    frame = Frame(2**16 - 1, 2**64 - 1, 2**64 - 2, 2**64 - 3, 2**64 - 4)
    token: Token = (2**32 - 1, 2**64 - 5, 2**32 - 2)
    header = messages.write(kind, frame, 64, token)
    for credit in (7, 2**32 - 3, 5):
        messages.stamp(header, credit)
        ring = bytes(ALIGN) + bytes(header) + bytes(ALIGN)
        size = 2 * ALIGN if kind == EAGER else ALIGN
        assert len(header) == HEADER_NBYTES
        read = VerbsMessage.read(memoryview(ring), ALIGN, 64)
        assert read == VerbsMessage(kind, frame, 64, credit, token, size)


def test_what_a_header_says_of_credits_wraps() -> None:
    header = messages.write(CONFIRM, Frame(0, 0, 1, 0, 0), 0, (0, 0, 0))
    messages.stamp(header, 2**32 + 9)
    read = VerbsMessage.read(memoryview(header), 0, 64)
    assert read is not None
    assert read.credit == 9

"""Dials that fail and what is reported about them; messages with a length before them."""

from __future__ import annotations

import asyncio
import socket
import struct
import time

import pytest

from r2ccl.bootstrap import dialing, wire
from r2ccl.bootstrap.auth import COMMUNICATOR_ID_NBYTES, SECRET_NBYTES, Claim, Purpose, Secret


def test_a_listener_that_never_answers_is_told_from_no_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dialing, "HANDSHAKE_TIMEOUT_S", 0.6)
    claim = Claim(Purpose.CONTROL, bytes(COMMUNICATOR_ID_NBYTES), 0, 1)
    with wire.listen("127.0.0.1") as listener:
        target = listener.getsockname()[:2]
        begin_s = time.monotonic()
        with pytest.raises(TimeoutError) as caught:
            asyncio.run(dialing.dial(Secret(bytes(SECRET_NBYTES)), claim, target, timeout_s=0.5))
        assert time.monotonic() - begin_s < 1.0  # not both times, one after the other
    why, advice = dialing.explain_failure(caught.value, target, 0.5)
    assert why.endswith("accepted the connection but did not authenticate it within 0.6 s")
    assert "hangs" in advice

    why, advice = dialing.explain_failure(TimeoutError(), target, 0.5)
    assert (why[-27:], advice) == ("did not answer within 0.5 s", "check firewalls and routes")


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that do not block."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return ends


async def read_until_end(sent: bytes) -> tuple[list[bytes], str]:
    """Return the messages in `sent`, which arrives byte by byte, and the error after them."""
    ended = asyncio.get_running_loop().create_future()
    messages: list[bytes] = []
    ours, theirs = pair()
    reader = wire.MessageReader(ours, messages.append, ended.set_result)
    for byte in sent:
        theirs.send(bytes([byte]))
        await asyncio.sleep(0)
    theirs.close()
    error = await ended
    reader.stop()
    ours.close()
    return messages, str(error)


def test_messages_are_read_whole_and_in_order() -> None:
    packed = b"".join(struct.pack("!I", len(each)) + each for each in (b"one", b"", b"three"))
    messages, error = asyncio.run(read_until_end(packed + b"\0\0"))
    assert messages == [b"one", b"", b"three"]
    assert error == "the other side closed the connection"


def test_a_message_that_is_too_long_ends_the_stream() -> None:
    messages, error = asyncio.run(read_until_end(struct.pack("!I", (16 << 20) + 1)))
    assert messages == []
    assert error.endswith("at most 16 MiB are allowed")


def test_a_stopped_reader_delivers_no_more() -> None:
    async def main() -> list[bytes]:
        ours, theirs = pair()
        messages: list[bytes] = []

        def take(body: bytes) -> None:
            messages.append(body)
            reader.stop()

        reader = wire.MessageReader(ours, take, pytest.fail)
        theirs.send(2 * (struct.pack("!I", 3) + b"one"))
        while not messages:
            await asyncio.sleep(0)
        with ours, theirs:
            return messages

    assert asyncio.run(main()) == [b"one"]


def test_all_get_a_message_that_exceeds_the_buffers() -> None:
    body = bytes(range(256)) * 16_000

    async def main() -> list[bytes]:
        pairs = [pair() for _ in range(3)]
        gone, _ = pairs[2]
        gone.close()
        sending = wire.send_messages((theirs, body) for _, theirs in pairs)
        received = (wire.receive_message(ours) for ours, _ in pairs[:2])
        *got, _ = await asyncio.gather(*received, sending)
        for sock in (each for ends in pairs for each in ends):
            sock.close()
        return got

    assert asyncio.run(main()) == [body, body]

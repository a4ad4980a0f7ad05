"""The dialer's side of the handshake on a real connection."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from r2ccl.bootstrap import dialing, wire
from r2ccl.bootstrap.auth import (
    NONCE_NBYTES,
    PROOF_NBYTES,
    SECRET_NBYTES,
    Acceptor,
    Claim,
    Purpose,
    Secret,
)

SECRET = Secret(bytes(SECRET_NBYTES))
CLAIM = Claim(Purpose.RENDEZVOUS, bytes(16), 1, 0)


def test_first_bytes_arrive_with_the_proof() -> None:
    """The acceptor reads both before it answers, so it wakes up once for both."""
    seen: list[tuple[str, int]] = []

    def first_bytes(sock: socket.socket) -> bytes:
        seen.append(sock.getsockname())
        return b"first"

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            target = ("127.0.0.1", int(listener.getsockname()[1]))
            work = dialing.dial(SECRET, CLAIM, target, first_bytes=first_bytes)
            dialed = loop.create_task(work)
            accepted, address = await loop.sock_accept(listener)
            with accepted:
                acceptor = Acceptor(SECRET, os.urandom(NONCE_NBYTES))
                await loop.sock_sendall(accepted, acceptor.opening())
                received = await loop.sock_recv(accepted, 4096)
                assert acceptor.verify(received[:PROOF_NBYTES]) == CLAIM
                assert received[PROOF_NBYTES:] == b"first"
                await loop.sock_sendall(accepted, acceptor.answer())
                with await dialed:
                    assert seen == [address]

    async def bounded() -> None:
        async with asyncio.timeout(10.0):
            await main()

    asyncio.run(bounded())


def test_a_socket_connected_to_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may choose the port of a rank 0 that does not listen yet for the dialer's end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = ("127.0.0.1", int(listener.getsockname()[1]))

    def open_at_target(host: str, source: str = "") -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        sock.bind(target)
        return sock

    async def main() -> None:
        async with asyncio.timeout(10.0):
            await dialing.dial(SECRET, CLAIM, target, timeout_s=10.0)

    with monkeypatch.context() as patch:
        patch.setattr(wire, "open_socket", open_at_target)
        with pytest.raises(ConnectionRefusedError):
            asyncio.run(main())
    wire.listen(*target).close()

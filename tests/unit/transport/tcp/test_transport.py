"""The TCP transport when the kernel breaks its word: nothing stays open."""

from __future__ import annotations

import socket

import pytest

from r2ccl.errors import InternalError
from r2ccl.transport.tcp.connection import Connection, NamedPlace
from r2ccl.transport.tcp.transport import TcpTransport
from r2ccl.types import BYPASS, PathKey


def open_path(transport: TcpTransport, path: PathKey) -> tuple[socket.socket, Connection]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    transport.open(path, near)
    return far, transport._by_path[path]


def lose_bytes(conn: Connection) -> None:
    """Make the connection believe that the kernel holds bytes of a confirmed slice."""
    region = memoryview(bytearray(8))
    conn.place = NamedPlace(region[8:], 0)
    conn.place.is_confirmed = True
    conn.target = region


@pytest.fixture
def transport() -> TcpTransport:
    return TcpTransport(0, 2, eager_nbytes=64, sources={}, targets={}, probe_timeout_s=1.0)


@pytest.mark.parametrize(("rail", "name"), [(1, "on rail 1 that"), (BYPASS, "on the bypass that")])
def test_a_fence_that_finds_bytes_lost_closes_the_socket(
    transport: TcpTransport, rail: int, name: str
) -> None:
    far, conn = open_path(transport, PathKey(1, rail))
    lose_bytes(conn)
    with pytest.raises(InternalError, match=f"from rank 1 {name}"):
        transport.fence(conn.path)
    assert conn.sock.fileno() == -1
    transport.close()
    far.close()


def test_close_closes_all_even_if_bytes_are_lost(transport: TcpTransport) -> None:
    opened = [open_path(transport, PathKey(peer, 0)) for peer in (1, 2, 3)]
    for _, conn in opened:
        lose_bytes(conn)
    with pytest.raises(InternalError, match="the kernel lost bytes"):
        transport.close()
    assert [conn.sock.fileno() for _, conn in opened] == [-1, -1, -1]
    assert transport.descriptors() == []
    for far, _ in opened:
        far.close()

"""The TCP transport: memory of slices, and the end when the kernel breaks its word."""

from __future__ import annotations

import logging
import signal
import socket
import sys

import numpy as np
import pytest

from r2ccl.errors import InternalError
from r2ccl.transport.base import Arrived, Failed, Frame
from r2ccl.transport.tcp.connection import Connection, NamedPlace, pack_data
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


def test_no_reference_to_the_memory_of_a_slice_is_kept(transport: TcpTransport) -> None:
    path, frame = PathKey(1, 0), Frame(0, 0, 0, 1, 0)
    found: list[Arrived] = []
    far, _ = open_path(transport, path)
    memory = np.zeros(4096, np.uint8)
    nreferences = sys.getrefcount(memory)
    transport.irecv(path, frame, memoryview(memory))  # type: ignore[arg-type]
    far.sendall(pack_data(frame, memory.nbytes) + bytes([7]) * memory.nbytes)
    for _ in range(100):
        found += [event for event in transport.poll(0.1) if isinstance(event, Arrived)]
        if found:
            break
    assert (memory == 7).all()
    assert sys.getrefcount(memory) == nreferences
    transport.close()
    far.close()


@pytest.mark.parametrize(("chosen", "level"), [("nosuch", "WARNING"), ("auto", "INFO")])
def test_a_congestion_control_that_is_missing_is_told_once(
    chosen: str, level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("r2ccl.transport.tcp.transport._LOOPBACK_CONGESTION", "nosuch")
    caplog.set_level(logging.INFO)
    transport = TcpTransport(
        0, 2, eager_nbytes=64, congestion=chosen, sources={}, targets={}, probe_timeout_s=1.0
    )
    far = [open_path(transport, PathKey(1, rail))[0] for rail in (0, 1)]
    (record,) = caplog.records
    assert record.levelname == level
    assert "TCP congestion control nosuch cannot be set" in record.message
    transport.close()
    for each in far:
        each.close()


@pytest.mark.parametrize("nbytes", [0, 8])
def test_a_broken_connection_raises_no_signal(transport: TcpTransport, nbytes: int) -> None:
    """A program may have set SIGPIPE to its default action, which ends the process."""
    raised: list[int] = []
    before = signal.signal(signal.SIGPIPE, lambda number, _: raised.append(number))
    try:
        far, conn = open_path(transport, PathKey(1, 0))
        far.close()
        for seq in range(2):  # the kernel answers the first by a reset
            frame = Frame(0, seq, 0, 1, 0)
            transport.isend(conn.path, frame, memoryview(bytes(nbytes)), None)
            transport.flush()
        assert [event for event in transport.poll(0.0) if isinstance(event, Failed)] == [
            Failed(conn.path, "EPIPE", "[Errno 32] Broken pipe")
        ]
        assert raised == []
    finally:
        signal.signal(signal.SIGPIPE, before)
        transport.close()

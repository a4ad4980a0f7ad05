"""Tests of `r2ccl.transport.aligned`: memory and frames whose copies are not slow."""

from __future__ import annotations

import socket

import pytest

from r2ccl.runtime.compiled import layout
from r2ccl.transport.aligned import LINE_NBYTES, aligned_memory
from r2ccl.transport.preconnected import PreconnectedTransport
from r2ccl.transport.tcp.connection import HEADER_NBYTES, Connection
from r2ccl.types import PathKey


@pytest.mark.parametrize("nbytes", [1, 63, 64, 1 << 20])
def test_memory_begins_at_a_cache_line(nbytes: int) -> None:
    for memory in (aligned_memory(nbytes), PreconnectedTransport().allocate(nbytes)):
        assert memory.nbytes == nbytes
        assert memory.ctypes.data % LINE_NBYTES == 0
        memory.fill(7)


def test_receive_buffers_begin_at_a_cache_line() -> None:
    near, far = socket.socketpair()
    with near, far:
        conn = Connection(PathKey(1, 0), near, 1000, is_loopback=True)
        assert len(conn.buffer) == 1000
        assert conn.buffer_address % LINE_NBYTES == 0


def test_frame_headers_are_whole_cache_lines() -> None:
    assert HEADER_NBYTES == layout.HEADER_NBYTES
    assert HEADER_NBYTES % LINE_NBYTES == 0

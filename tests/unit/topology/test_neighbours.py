"""Neighbours of a machine that has used something up; tests/netlab has the kernel's own answers."""

import errno
import os
import socket
from typing import Any

import pytest
from support.limits import no_descriptor_left

from r2ccl.topology.neighbours import Neighbours

#: TEST-NET-1 (RFC 5737): nobody's address, so the kernel has to ask for it.
NOBODY = "192.0.2.1"


def test_a_neighbour_that_cannot_be_asked_for_is_not_known_yet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    index = socket.if_nametoindex("lo")
    neighbours = Neighbours(lambda: index)
    try:
        with no_descriptor_left():
            assert [neighbours.knows("127.0.0.1", NOBODY) for _ in range(3)] == [False] * 3
    finally:
        neighbours.close()
    (record,) = caplog.records
    assert NOBODY in record.getMessage()
    assert "EMFILE" in record.getMessage()


class FirewalledSocket(socket.socket):
    """A socket whose datagrams a firewall drops."""

    def sendmsg(self, *args: Any) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def test_a_neighbour_behind_a_firewall_is_left_to_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    index = socket.if_nametoindex("lo")
    neighbours = Neighbours(lambda: index)
    monkeypatch.setattr(socket, "socket", FirewalledSocket)
    try:
        assert [neighbours.knows("127.0.0.1", NOBODY) for _ in range(3)] == [True] * 3
    finally:
        neighbours.close()
    (record,) = caplog.records
    assert f"UDP datagram to port 9 of peer {NOBODY}" in record.getMessage()
    assert "EPERM" in record.getMessage()

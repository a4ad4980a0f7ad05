"""The control thread."""

from __future__ import annotations

import asyncio
import signal
import socket

import pytest

from r2ccl.bootstrap.loop import ControlLoop


def test_a_broken_control_connection_raises_no_signal() -> None:
    """A program may have set SIGPIPE to its default action, which ends the process."""
    raised: list[int] = []
    before = signal.signal(signal.SIGPIPE, lambda number, _: raised.append(number))
    control = ControlLoop("control")
    near, far = socket.socketpair()
    try:
        near.setblocking(False)
        far.close()

        async def send() -> None:
            await asyncio.get_running_loop().sock_sendall(near, b"to nobody")

        with pytest.raises(BrokenPipeError):
            control.run(send())
        assert raised == []
    finally:
        control.close(10.0)
        near.close()
        signal.signal(signal.SIGPIPE, before)

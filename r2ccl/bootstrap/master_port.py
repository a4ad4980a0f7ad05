"""MASTER_PORT of the ranks that a launcher of r2ccl starts: the port of torch's store.

r2ccl itself uses R2CC_PORT.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping


def reserve_port() -> socket.socket:
    """Return a socket that reserves a port, at all local addresses, for rank 0 to listen at.

    While the socket is open, the kernel does not assign the port to a process that binds port 0.
    The socket does not listen, so a process that sets SO_REUSEADDR, as torch's store does, can
    listen.

    Raises
    ------
    OSError
        If this process cannot open a socket.
    """
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
    except BaseException:
        held.close()
        raise
    return held


def master_port(port: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable MASTER_PORT for ranks whose launcher has the environment `env`.

    The value is the one that the user has set in `env`, otherwise `port`. If the launcher is itself
    a rank of a job, the value is `port`: rank 0 of that job listens at the port in `env`.
    """
    is_rank = "RANK" in env
    return {"MASTER_PORT": str(port) if is_rank else env.get("MASTER_PORT", str(port))}


__all__ = ["master_port", "reserve_port"]

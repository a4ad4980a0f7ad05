"""MASTER_PORT of the ranks that a launcher of r2ccl starts: the port of torch's store.

r2ccl itself uses R2CC_PORT.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping


def reserve_port() -> socket.socket:
    """Return a socket that reserves a port of all addresses, at which rank 0 can listen.

    The port is bound, so the kernel gives it to no other process. No socket listens at it, so a
    process that sets SO_REUSEADDR, as torch's store does, can.

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
    """Return MASTER_PORT for ranks whose launcher has the environment `env`.

    It is `port`, unless the user has set it in `env`. If `env` is that of a rank, MASTER_PORT there
    is the port of that rank's job, at which its rank 0 listens already.
    """
    is_rank = "RANK" in env
    return {"MASTER_PORT": str(port) if is_rank else env.get("MASTER_PORT", str(port))}


__all__ = ["master_port", "reserve_port"]

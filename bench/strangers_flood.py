"""Open connections to the given ports at a given rate, send nothing, and reset them.

Started by ``strangers.py`` in a node of a netlab. Arguments: connections per second, then
``address:port`` of each target. Ends when its stdin ends, and prints the connections begun per
second.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
import time
from collections import deque

#: SO_LINGER with a timeout of 0: closing resets the connection and leaves nothing in TIME_WAIT.
_RESET = struct.pack("ii", 1, 0)
#: Connections held before the oldest is reset: by then the kernels have set it up or refused it.
_HELD = 64
_LOOK_EVERY = 100


def probe_port(target: tuple[str, int]) -> socket.socket:
    """Begin a connection without waiting for it."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    with contextlib.suppress(OSError):  # in progress, or refused at once: both reach the port
        sock.connect(target)
    return sock


def main() -> None:
    """Open connections until stdin ends."""
    rate = float(sys.argv[1])
    targets = [(host, int(port)) for host, _, port in (arg.partition(":") for arg in sys.argv[2:])]
    begun_s = time.monotonic()
    held: deque[socket.socket] = deque()
    count = 0
    while count % _LOOK_EVERY or not select.select([sys.stdin], [], [], 0)[0]:
        held.append(probe_port(targets[count % len(targets)]))
        if len(held) > _HELD:
            held.popleft().close()
        count += 1
        time.sleep(max(0.0, begun_s + count / rate - time.monotonic()))
    print(count / (time.monotonic() - begun_s), flush=True)


if __name__ == "__main__":
    main()

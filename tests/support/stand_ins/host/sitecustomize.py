"""Resolver of the hosts of the stand-ins: Python imports this module in their processes.

The file in STAND_IN_HOSTS has the format of hosts(5): an address and a name on each line.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

_HOSTS = Path(os.environ["STAND_IN_HOSTS"])
_resolve = socket.getaddrinfo


def _getaddrinfo(host: Any, *args: Any, **options: Any) -> Any:
    for line in _HOSTS.read_text(encoding="utf-8").splitlines():
        address, name = line.split()
        if name == host:
            return _resolve(address, *args, **options)
    return _resolve(host, *args, **options)


socket.getaddrinfo = _getaddrinfo

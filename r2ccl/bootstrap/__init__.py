"""Meet, prove who you are, and stay in touch: rendezvous and the control plane.

For the data plane: `connect`, and then what `r2ccl.bootstrap.control` describes. For users:
`r2ccl.bootstrap.launch.launch`. This package imports no other of its level (topology is passed in),
and only it and the transports see sockets. Its parts, in the order a job meets them: ``launch``,
``identity`` and ``secretfile`` (who am I), ``startup`` and ``rendezvous`` (who are the others),
``wire`` and ``listener`` (authenticated connections), ``session``, ``peer``, ``paths`` and
``control``; ``succession`` (who goes on after a death, and how they meet).

Names are imported on first use: asyncio costs tens of milliseconds that ``import r2ccl`` does not
need to pay.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r2ccl.bootstrap.control import ControlHandler, ControlPlane
    from r2ccl.bootstrap.messages import Goodbye, PeerDown, PeerInfo
    from r2ccl.bootstrap.startup import connect

_HOMES = {
    "ControlHandler": "control",
    "ControlPlane": "control",
    "Goodbye": "messages",
    "PeerDown": "messages",
    "PeerInfo": "messages",
    "connect": "startup",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "ControlHandler",
    "ControlPlane",
    "Goodbye",
    "PeerDown",
    "PeerInfo",
    "connect",
]

"""Rendezvous, authentication and control plane: how ranks find and authenticate each other.

`r2ccl.factory` calls `connect`, and the data plane uses the `ControlPlane` that `connect` returns.
Users call `r2ccl.launch` and `r2ccl.launch_pool`.

Main modules, in the order a job uses them: ``launch`` and ``pool`` start ranks; ``identity`` and
``secretfile`` determine this process's rank and secret; ``startup``, ``rendezvous``, ``leader`` and
``branch`` find the other ranks; ``dialing`` and ``listener`` open authenticated connections;
``overlay`` chooses the pairs of ranks that have sessions from the start; ``session``, ``peer``,
``paths`` and ``control`` make the control plane; ``succession`` makes the control plane of the
survivors for a shrink.

Names are imported on first use, because asyncio would add tens of milliseconds to ``import
r2ccl``.
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

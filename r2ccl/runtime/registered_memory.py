"""Memory the user has prepared for slices to travel from and to without a copy.

Invariant: the transport is touched only by whoever owns the data loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from r2ccl.transport.base import Registered


class LoopOwner(Protocol):
    """Whoever may touch the transport."""

    def call(self, fn: Callable[[], Any]) -> Any:
        """Run ``fn()`` as the owner of the data loop."""
        ...


class RegisteredMemory:
    """What `Communicator.register` returns: a context manager, or `close` it by hand."""

    def __init__(self, owner: LoopOwner, registered: Registered) -> None:
        self._owner = owner
        self._registered: Registered | None = registered

    def close(self) -> None:
        """End the registration. Idempotent; the memory itself stays as it is."""
        registered, self._registered = self._registered, None
        if registered is not None:
            self._owner.call(registered.close)

    def __enter__(self) -> RegisteredMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


__all__ = ["LoopOwner", "RegisteredMemory"]

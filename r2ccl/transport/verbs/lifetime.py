"""Lifetime: which allocation a piece of memory belongs to, and when that allocation is gone.

Theory of operation
-------------------
A registration outlives the call it was made for, so it must end with its memory: an address that
is freed and mapped again names other pages, and the old registration would still reach the old
ones. An address alone cannot tell. What can:

* the *owner*, the object whose life keeps the memory alive. `allocation_of` walks from a NumPy view
  to the array or object at its root, so that every view of an allocation finds the same one;
* an *identity* that changes when an address is allocated anew (CUDA's buffer id), for memory no
  Python object stands for (`r2ccl.transport.verbs.dmabuf`).

An owner is watched with a weak reference: its death is reported before its memory is freed. An
object that could free or move its memory while it lives (``bytearray``, ``array.array``,
``mmap``) is held instead, by an export of its buffer, which forbids both. NumPy itself refuses to
resize an array that is watched. What is left to the caller: do not resize a tensor's storage, or
release a memoryview, while it is registered.

Sees no NIC and no thread. Invariant: a watched owner is never kept alive, a held one always.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from r2ccl.errors import InvalidArgument


class Allocation(msgspec.Struct, frozen=True):
    """Memory that is allocated and freed as one.

    Parameters
    ----------
    base : int
        Address of the first byte.
    nbytes : int
    owner : object
        Whose life keeps the memory alive; None: only ``identity`` tells that it was freed.
    identity : int
        Differs between two allocations at the same address; 0 where the owner tells.
    """

    base: int
    nbytes: int
    owner: Any
    identity: int = 0

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether all of ``[address, address + nbytes)`` belongs to it."""
        return self.base <= address and address + nbytes <= self.base + self.nbytes


def allocation_of(address: int, nbytes: int, owner: Any) -> Allocation:
    """Find the host allocation behind `nbytes` bytes at `address`.

    Parameters
    ----------
    address, nbytes : int
    owner : object
        What keeps the memory alive: a NumPy array or view of one gives the whole array at its
        root, anything else the bytes asked for.

    Raises
    ------
    InvalidArgument
        No bytes, no owner, or a NumPy array that does not hold these bytes.
    """
    if nbytes <= 0 or address <= 0 or owner is None:
        raise InvalidArgument(
            f"cannot register {nbytes} bytes at {address:#x} of {type(owner).__name__}: allowed "
            "are a number of bytes above 0 at an address, and the object that owns them"
        )
    if not isinstance(owner, np.ndarray):
        return Allocation(address, nbytes, owner)
    whole: Any = owner
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    low, high = np.lib.array_utils.byte_bounds(whole)
    # Over foreign memory (a tensor's, a memoryview's) the foreign object outlives the array.
    root = whole.base if whole.base is not None and _is_watchable(whole.base) else whole
    found = Allocation(low, high - low, root)
    if not found.covers(address, nbytes):
        raise InvalidArgument(
            f"{nbytes} bytes at {address:#x} are not part of the array given as their owner, which "
            f"has {found.nbytes} bytes at {found.base:#x}: pass the array the bytes belong to"
        )
    return found


class Lifetime:
    """The life of an owner: watched if it cannot lose its memory, held if it could.

    Parameters
    ----------
    owner : object
        None: nothing is watched, nothing held.
    on_death : callable
        Called once when a watched owner dies, in whatever thread that happens and possibly in the
        midst of other code: it must neither block nor take a lock.
    """

    __slots__ = ("_finalizer", "_held")

    def __init__(self, owner: Any, on_death: Callable[[], None]) -> None:
        self._held: Any = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        if owner is None:
            return
        if _is_watchable(owner):
            self._finalizer = weakref.finalize(owner, on_death)
            self._finalizer.atexit = False
        else:
            self._held = _hold(owner)

    @property
    def is_held(self) -> bool:
        """Whether the owner lives at least as long as this."""
        return self._held is not None

    def is_of(self, owner: Any) -> bool:
        """Whether this is the life of `owner`."""
        if owner is None:
            return self._finalizer is None and self._held is None
        held = self._held
        return self.owner() is owner or (isinstance(held, memoryview) and held.obj is owner)

    def owner(self) -> Any:
        """Return what keeps the memory alive; None: nothing does, or it is dead."""
        if self._finalizer is None:
            return self._held
        alive = self._finalizer.peek()
        return None if alive is None else alive[0]

    def end(self) -> None:
        """Stop watching, let go."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = None
        if isinstance(self._held, memoryview):
            self._held.release()
        self._held = None


def _is_watchable(owner: Any) -> bool:
    """Whether `owner` takes weak references and keeps its memory for as long as it lives."""
    if not isinstance(owner, np.ndarray | memoryview) and _export(owner) is not None:
        return False
    return type(owner).__weakrefoffset__ != 0


def _hold(owner: Any) -> Any:
    export = _export(owner)
    return owner if export is None else export


def _export(owner: Any) -> memoryview | None:
    """Return a view of the owner's buffer; while it lives the owner cannot move it."""
    try:
        return memoryview(owner)
    except TypeError:  # no buffer protocol
        return None


__all__ = ["Allocation", "Lifetime", "allocation_of"]

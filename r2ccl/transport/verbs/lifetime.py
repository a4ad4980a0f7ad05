"""Allocations of host memory, and detection of the moment when an allocation is freed.

Theory of operation
-------------------
A registration outlives the call it was made for, so it must end when its memory is freed. An
address that is freed and mapped again refers to other pages, but the old registration would still
access the old pages. The address alone does not show that this happened. Two values do:

* the *owner*, the object that keeps the memory alive. `allocation_of` follows a NumPy view to the
  array or object at its root, so all views of one array have the same owner;
* an *identity* that changes when an address is allocated again (CUDA's buffer id), for memory that
  no Python object owns (`r2ccl.transport.verbs.dmabuf`).

An owner is *watched* with a weak reference, which reports the owner's death before the memory is
freed. An object that might free or move its memory during its life (``bytearray``, ``array.array``,
``mmap``, and all others with a buffer except NumPy arrays and memoryviews) is *held* instead: an
export of its buffer keeps the object alive and stops it from freeing or moving the memory. An
object that accepts no weak reference is held too. NumPy refuses to resize an array that is watched.
Callers must not resize the storage of a registered tensor, nor release a registered memoryview.

Invariant: watching never keeps an owner alive; holding always does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from r2ccl.errors import InvalidArgument


class Allocation(msgspec.Struct, frozen=True):
    """Memory that is allocated and freed as a whole.

    Parameters
    ----------
    base : int
        Address of the first byte.
    nbytes : int
    owner : object
        Object that keeps the memory alive; None if only ``identity`` shows that it was freed.
    identity : int
        Number that differs between two allocations at the same address; 0 if there is an owner.
    """

    base: int
    nbytes: int
    owner: Any
    identity: int = 0

    def covers(self, address: int, nbytes: int) -> bool:
        """Return True if all of ``[address, address + nbytes)`` is in the allocation."""
        return self.base <= address and address + nbytes <= self.base + self.nbytes


def allocation_of(address: int, nbytes: int, owner: Any) -> Allocation:
    """Return the host allocation that contains `nbytes` bytes at `address`.

    If `owner` is a NumPy array or view, the allocation is the whole memory of the array that the
    view is based on. For any other object, it is exactly the `nbytes` bytes.

    Parameters
    ----------
    address, nbytes : int
    owner : object
        Object that keeps the memory alive.

    Raises
    ------
    InvalidArgument
        If `nbytes` or `address` is not positive, there is no owner, or the owner is a NumPy array
        or view whose allocation does not contain the bytes.
    """
    if nbytes <= 0 or address <= 0 or owner is None:
        raise InvalidArgument(
            f"cannot register {nbytes} bytes at address {address:#x} with an owner of type "
            f"{type(owner).__name__}: size and address must be above 0, and the owner must be the "
            "object that keeps the memory alive, not None"
        )
    if not isinstance(owner, np.ndarray):
        return Allocation(address, nbytes, owner)
    whole: Any = owner
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    low, high = np.lib.array_utils.byte_bounds(whole)
    # An array over memory of another object (a tensor, a memoryview) may die before that object,
    # which therefore is the owner.
    root = whole.base if whole.base is not None and _is_watchable(whole.base) else whole
    found = Allocation(low, high - low, root)
    if not found.covers(address, nbytes):
        raise InvalidArgument(
            f"{nbytes} bytes at {address:#x} are not part of the array given as their owner, which "
            f"has {found.nbytes} bytes at {found.base:#x}: pass the array the bytes belong to"
        )
    return found


class Lifetime:
    """Reference to the owner of memory.

    The reference is weak (the owner is *watched*) if the owner accepts weak references and cannot
    free or move its memory before it dies; otherwise it is strong (the owner is *held*).

    Parameters
    ----------
    owner : object
        Object that keeps the memory alive; None if there is none.
    on_death : callable
        Called once if a watched owner dies before `end`, in any thread and possibly in the middle
        of other code, so it must neither block nor take a lock.
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
        """True if this object keeps the owner alive."""
        return self._held is not None

    def is_of(self, owner: Any) -> bool:
        """Return True if this object watches or holds `owner`; None stands for no owner."""
        if owner is None:
            return self._finalizer is None and self._held is None
        held = self._held
        return self.owner() is owner or (isinstance(held, memoryview) and held.obj is owner)

    def owner(self) -> Any:
        """Return the owner, or the export of its buffer if the export is held instead.

        Return None if there is no owner or the owner has died.
        """
        if self._finalizer is None:
            return self._held
        alive = self._finalizer.peek()
        return None if alive is None else alive[0]

    def end(self) -> None:
        """Drop the reference: stop watching the owner, or release it if it is held."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = None
        if isinstance(self._held, memoryview):
            self._held.release()
        self._held = None


def _is_watchable(owner: Any) -> bool:
    """Return True if `owner` accepts weak references and keeps its memory until it dies.

    An object with a buffer is assumed to keep its memory only if it is a NumPy array or a
    memoryview.
    """
    if not isinstance(owner, np.ndarray | memoryview) and _export(owner) is not None:
        return False
    return type(owner).__weakrefoffset__ != 0


def _hold(owner: Any) -> Any:
    export = _export(owner)
    return owner if export is None else export


def _export(owner: Any) -> memoryview | None:
    """Return an export of the owner's buffer, which stops the owner from moving or freeing it.

    Return None if the owner has no buffer.
    """
    try:
        return memoryview(owner)
    except TypeError:  # no buffer protocol
        return None


__all__ = ["Allocation", "Lifetime", "allocation_of"]

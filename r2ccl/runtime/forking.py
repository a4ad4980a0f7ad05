"""Isolation of forked child processes from the communicators of their parent.

A forked child shares the open file descriptors of its parent. A child that outlives the parent
would hide the parent's death from the peers, and a child that closes a communicator would remove
its sockets from the epoll instance that both processes share. Therefore, before ``os.fork`` returns
in the child, every descriptor of every communicator is replaced by a descriptor of /dev/null, and
the communicators are disabled. The parent's descriptors and communicators are not changed.

A child made by fork and exec (`subprocess`) inherits no descriptors, because all of them are
close-on-exec. ``ibv_fork_init`` is not called: since Linux 5.12, a fork gives the child copies of
the pages that NICs use, and verbs reports ``IBV_FORK_UNNEEDED`` (docs/rdma.md).
`r2ccl.transport.verbs.mappings` removes mapped queues and doorbells of NICs from children.

The table of owners is global, because a fork affects the whole process. An owner leaves the table
when it is garbage-collected.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")


class _Part(NamedTuple):
    descriptors: Callable[[Any], Iterable[int]]
    disable: Callable[[Any], None]


_held: weakref.WeakKeyDictionary[Any, _Part] = weakref.WeakKeyDictionary()


def hold(
    owner: _T, descriptors: Callable[[_T], Iterable[int]], disable: Callable[[_T], None]
) -> None:
    """Register `owner` so that forked children lose its file descriptors and cannot use it.

    Parameters
    ----------
    owner : object
        Object that has the file descriptors; only a weak reference to it is kept.
    descriptors : callable
        ``descriptors(owner)`` returns the owner's file descriptors; negative ones are ignored.
    disable : callable
        ``disable(owner)`` is called in the child after the owner's descriptors were replaced.
    """
    _held[owner] = _Part(descriptors, disable)


def _let_go() -> None:
    """Replace the descriptors of all owners and disable the owners; runs in a forked child."""
    if not _held:
        return
    owners = list(_held.items())
    held = {each for owner, part in owners for each in part.descriptors(owner) if each >= 0}
    _held.clear()
    try:
        _replace(held)
    finally:
        for owner, part in owners:
            part.disable(owner)


def _replace(descriptors: set[int]) -> None:
    """Replace open file descriptors by descriptors of /dev/null."""
    if not descriptors:
        return
    try:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # no descriptor is free: close one of these first, and use its number
        os.close(min(descriptors))
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in descriptors - {null}:
        os.dup2(null, descriptor, inheritable=False)
    if null not in descriptors:
        os.close(null)


os.register_at_fork(after_in_child=_let_go)

__all__ = ["hold"]

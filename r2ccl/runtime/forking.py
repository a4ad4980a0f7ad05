"""Forks: a child gets none of what its parent's communicators hold.

A child shares its parent's open descriptors: one that lives on hides the parent's death from its
peers, and one that frees its copies takes the sockets out of the epoll both share. So before a
child's first line runs, every descriptor of every communicator is replaced by one of /dev/null in
it, and the communicators are disabled. The parent's are as they were.

Children made by fork and exec at once (`subprocess`) inherit nothing: all descriptors are
close-on-exec. ``ibv_fork_init`` is not called: since Linux 5.12 the kernel copies pages that NICs
use for the child when it forks, and says so (``IBV_FORK_UNNEEDED``). See docs/rdma.md. What is
mapped of the NICs themselves is kept from children by `r2ccl.transport.verbs.mappings`.

The table is one for the process, as forks are; owners leave it when nothing refers to them.
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
    """Keep children from what `owner` holds.

    Parameters
    ----------
    owner : object
        Not kept alive.
    descriptors : callable
        Takes the owner; returns its file descriptors, below 0: closed.
    disable : callable
        Takes the owner, in the child, when its descriptors are gone.
    """
    _held[owner] = _Part(descriptors, disable)


def _let_go() -> None:
    """Take everything from this process, which is a child."""
    if not _held:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for owner, part in list(_held.items()):
        for descriptor in part.descriptors(owner):
            if descriptor >= 0:
                os.dup2(null, descriptor, inheritable=False)
        part.disable(owner)
    os.close(null)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)

__all__ = ["hold"]

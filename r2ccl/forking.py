"""Forks: a child gets none of what its parent's communicators hold.

A child shares its parent's open descriptors: one that lives on hides the parent's death from its
peers, and one that frees its copies takes the sockets out of the epoll both share. So before a
child's first line runs, every descriptor of every communicator is replaced by one of /dev/null in
it, and the communicators are told. The parent's are as they were.

Children made by fork and exec at once (`subprocess`) inherit nothing: all descriptors are
close-on-exec. ``ibv_fork_init`` is not called: kernels copy pages that NICs use at the fork since
5.12 (``IBV_FORK_UNNEEDED``), and a child that touches none of them needs no more.

This is the one table of a process; communicators leave it when nothing refers to them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Protocol


class Forkable(Protocol):
    """What a child must leave alone."""

    def descriptors(self) -> Iterable[int]:
        """File descriptors that are this process's alone; below 0: closed."""
        ...

    def forked(self) -> None:
        """Be of no use any more, in the child; its descriptors are gone."""
        ...


_held: weakref.WeakSet[Forkable] = weakref.WeakSet()


def hold(owner: Forkable) -> None:
    """Keep `owner` from children."""
    _held.add(owner)


def _let_go() -> None:
    """Take everything from this process, which is a child."""
    if not _held:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for owner in list(_held):
        for descriptor in owner.descriptors():
            if descriptor >= 0:
                os.dup2(null, descriptor, inheritable=False)
        owner.forked()
    os.close(null)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)

__all__ = ["Forkable", "hold"]

"""Device memory that is mapped into this process is kept from children of forks.

A provider maps queues and doorbells of a device. A mapping keeps the device open as a descriptor
does: in a child that lives on, it would keep the queue pairs of a parent that was killed, and its
peers' NICs would go on writing to memory nobody reads. So before a child's first line runs, every
such mapping is replaced by zeros in it, other libraries' too: queue pairs are of no use in a child.
Not by a hole: a provider whose objects the child frees unmaps these addresses, which nothing else
may have by then.

The switch is one for the process, as forks are. Must not import pyverbs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

_DEVICES = " /dev/infiniband/"
#: Linux's <asm-generic/mman.h>; not in Python's module.
_MAP_FIXED = 0x10

_mmap = ctypes.CDLL(None).mmap
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_mmap.restype = ctypes.c_void_p

_registered: list[bool] = []


def keep_from_children() -> None:
    """Have no child that is forked from now on get device memory.

    Notes
    -----
    *Cost*: in each child, ``/proc/self/maps`` is read once.
    """
    if not _registered:
        _registered.append(True)
        os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Replace the mappings in this process, which is a child."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    for begin, end in list(_mapped()):
        _mmap(begin, end - begin, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)


def _mapped() -> Iterator[tuple[int, int]]:
    """Find the address ranges of device memory."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as file:
        for line in file:
            if _DEVICES in line:
                begin, end = line.split(maxsplit=1)[0].split("-")
                yield int(begin, 16), int(end, 16)


__all__ = ["keep_from_children"]

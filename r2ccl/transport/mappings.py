"""Device memory that is mapped into this process, and is kept from children of forks.

A provider maps queues and doorbells of a device. A mapping keeps the device open as a descriptor
does: in a child that lives on, it would keep the queue pairs of a parent that was killed, and its
peers' NICs would go on writing to memory nobody reads. So before a child's first line runs, what
was mapped under `kept_from_children` is replaced by zeros in it. Not by a hole: a provider whose
objects the child frees unmaps these addresses, which nothing else may have by then.

The table is one for the process, as in `r2ccl.forking`. Must not import pyverbs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

_DEVICES = " /dev/infiniband/"
#: Linux's <asm-generic/mman.h>; not in Python's module.
_MAP_FIXED = 0x10

_mmap = ctypes.CDLL(None).mmap
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_mmap.restype = ctypes.c_void_p

#: Address ranges that were mapped; some may have been unmapped since.
_made: set[tuple[int, int]] = set()


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Have no child get the device memory that is mapped meanwhile.

    Notes
    -----
    *Cost*: ``/proc/self/maps`` is read twice.
    """
    before = _mapped()
    yield
    after = _mapped()
    _made.intersection_update(after)
    _made.update(after - before)


def _mapped() -> set[tuple[int, int]]:
    """Find the address ranges of device memory."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as file:
        ranges = [line.split(maxsplit=1)[0] for line in file if _DEVICES in line]
    return {(int(begin, 16), int(end, 16)) for begin, end in (each.split("-") for each in ranges)}


def _let_go() -> None:
    """Replace the mappings in this process, which is a child."""
    if not _made:
        return
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    for begin, end in _made & _mapped():
        _mmap(begin, end - begin, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
    _made.clear()


os.register_at_fork(after_in_child=_let_go)

__all__ = ["kept_from_children"]

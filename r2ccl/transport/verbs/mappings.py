"""Removal of RDMA device mappings from the children of ``os.fork``.

A provider maps queues and doorbells of a device into the process. Such a mapping keeps the device
open, as a descriptor does. In a child that outlives a killed parent, it would keep the parent's
queue pairs alive, and the peers' NICs would continue to write to memory that nobody reads. So, in
each child, a fork handler replaces every such mapping with zeroed memory before ``os.fork``
returns. Mappings that other libraries made are replaced too: queue pairs do not work in a child
anyway. The addresses stay mapped, so that no other memory is mapped there: if the child frees the
provider's objects, the provider unmaps these addresses.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

_DEVICES = " /dev/infiniband/"
#: From Linux's <asm-generic/mman-common.h>; Python's ``mmap`` does not define it.
_MAP_FIXED = 0x10

_mmap = ctypes.CDLL(None).mmap
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_mmap.restype = ctypes.c_void_p

_registered: list[bool] = []


def keep_from_children() -> None:
    """Remove device mappings from the child of every later ``os.fork`` of this process.

    Applies to the whole process; a second call does nothing.

    Notes
    -----
    *Cost*: each child reads ``/proc/self/maps`` once.
    """
    if not _registered:
        _registered.append(True)
        os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Replace the device mappings of this process, the child of a fork, with zeroed memory."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    for begin, end in list(_mapped()):
        _mmap(begin, end - begin, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)


def _mapped() -> Iterator[tuple[int, int]]:
    """Yield the begin and end addresses of each mapping of an RDMA device."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as file:
        for line in file:
            if _DEVICES in line:
                begin, end = line.split(maxsplit=1)[0].split("-")
                yield int(begin, 16), int(end, 16)


__all__ = ["keep_from_children"]

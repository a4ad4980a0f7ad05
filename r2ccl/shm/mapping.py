"""Mappings of shared memory, made with libc.

Python's `mmap` is not used, because it keeps a descriptor open and cannot replace pages.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
_PAGE = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class Mapping:
    """Memory of a file descriptor, mapped until `close` or until the object is deleted.

    Arrays that `numpy.asarray` makes of the object keep the object alive, but `close` unmaps the
    memory of these arrays, too.

    Parameters
    ----------
    descriptor : int
        Descriptor of the memory; the caller may close it afterwards.
    nbytes : int
        Number of bytes to map, above 0.
    offset : int
        First byte to map, a multiple of the size of a page.
    is_populated : bool
        Allocate and map all pages now, instead of at their first use.

    Raises
    ------
    OSError
        If the memory cannot be mapped.
    """

    def __init__(
        self, descriptor: int, nbytes: int, offset: int = 0, *, is_populated: bool = True
    ) -> None:
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if is_populated else 0)
        self.nbytes = nbytes
        self.address = _map(None, nbytes, flags, descriptor, offset)
        self._end = weakref.finalize(self, _unmap, self.address, nbytes)
        self._end.atexit = False  # other threads may use it until the process has ended

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Description of the mapped bytes for NumPy's array interface."""
        place = (self.address, False)
        return {"data": place, "shape": (self.nbytes,), "typestr": "|u1", "version": 3}

    def close(self) -> None:
        """Unmap the memory, which no thread may use afterwards; idempotent."""
        self._end()

    def populate(self, start: int, nbytes: int) -> None:
        """Allocate and map the pages of `nbytes` bytes from offset `start` of the mapping on.

        `start` must be a multiple of the size of a page.

        Raises
        ------
        OSError
            If memory is exhausted, or Linux is older than 5.14 (EINVAL).
        """
        if _libc().madvise(self.address + start, nbytes, _MADV_POPULATE_WRITE) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def withdraw(self, start: int, end: int) -> None:
        """Make the bytes from address `start` to address `end` (exclusive) private to this process.

        Later writes of other processes do not change these bytes, which are zero afterwards. The
        other bytes of their pages become private too, but keep their values.

        Raises
        ------
        OSError
            If memory is exhausted.
        """
        first, last = start & -_PAGE, (end + _PAGE - 1) & -_PAGE
        edges = [(at, ctypes.string_at(at, size)) for at, size in (
            (first, start - first), (end, last - end)
        )]  # fmt: skip
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _map(first, last - first, flags, -1)
        for at, kept in edges:
            ctypes.memmove(at, kept, len(kept))


def bytes_of(memory: Any) -> npt.NDArray[np.uint8]:
    """Return an array of the bytes of `memory`, which keeps `memory` alive.

    `memory` is a `Mapping`, or another object with an ``__array_interface__`` of bytes.
    """
    return np.asarray(memory)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    )  # fmt: skip
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _map(address: int | None, nbytes: int, flags: int, descriptor: int, offset: int = 0) -> int:
    found = _libc().mmap(address, nbytes, _READ_WRITE, flags, descriptor, offset)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


def _unmap(address: int, nbytes: int) -> None:
    _libc().munmap(address, nbytes)


__all__ = ["Mapping", "bytes_of"]

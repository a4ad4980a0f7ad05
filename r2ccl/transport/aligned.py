"""Memory that begins at a cache line, for data that is sent or received.

The kernel and memcpy(3) copy large pieces with the instruction ``rep movsb``. On AMD's Zen 3 it
takes four to eight times as long if the target is ahead of the source by 1 to 31 bytes, modulo the
4096 bytes of a page. That cannot be between addresses that are multiples of 64 bytes. The headers
of frames have a multiple of 64 bytes, too, so that slices of such sizes stay at multiples of 64
bytes in the pages in which the kernel keeps them. It is then rare also for other arrays: malloc(3),
and so NumPy, allocates large ones 16 bytes behind the beginning of a page.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Size in bytes of a cache line.
LINE_NBYTES = 64


def aligned_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return `nbytes` bytes of new memory, not initialized, at a multiple of `LINE_NBYTES`."""
    memory = np.empty(nbytes + LINE_NBYTES, np.uint8)
    start = -memory.__array_interface__["data"][0] % LINE_NBYTES
    return memory[start : start + nbytes]


__all__ = ["LINE_NBYTES", "aligned_memory"]

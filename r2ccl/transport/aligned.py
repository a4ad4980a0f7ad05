"""Memory that begins at a cache line, for data that is sent or received.

The kernel and memcpy(3) copy large pieces with the instruction ``rep movsb``. On AMD's Zen 3 this
instruction takes four to eight times as long if the target is ahead of the source by 1 to 31 bytes,
modulo the 4096 bytes of a page. Two addresses that are multiples of 64 never differ by such an
amount. The size of a frame header is a multiple of 64 bytes too, so slices whose sizes are
multiples of 64 bytes also begin at such addresses in the pages in which the kernel keeps them. A
copy between these pages and an unaligned array is rarely slow: malloc(3), which NumPy uses,
allocates a large array 16 bytes after the beginning of a page.
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

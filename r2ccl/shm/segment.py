"""Memory that ranks of one host share: made by one rank, mapped by the others.

A segment is an anonymous file in memory (memfd), which has no name in any file system and is freed
with the last process that maps it. Its size is sealed, so no rank can make another one fault by
shrinking it, and its pages are allocated at once, so a full file system or memory cgroup is an
error before the first call.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl.errors import TransportError, describe_os_error, errno_name
from r2ccl.shm.layout import SEGMENT_NBYTES

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """One mapped segment of `SEGMENT_NBYTES` bytes.

    Parameters
    ----------
    descriptor : int
        Descriptor of the memfd; the segment owns it and closes it when it is no longer needed.

    Raises
    ------
    TransportError
        If the memory is not sealed or has another size, or cannot be mapped.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        try:
            _check(descriptor)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._map = mmap.mmap(descriptor, SEGMENT_NBYTES, flags)
        except OSError as exc:
            self.close_descriptor()
            raise _translated("map", exc) from exc
        except TransportError:
            self.close_descriptor()
            raise
        #: View as bytes; valid until `close`.
        self.data: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        #: View as 64-bit words; valid until `close`.
        self.words: npt.NDArray[np.int64] = self.data.view(np.int64)
        self.address = int(self.data.ctypes.data)

    @classmethod
    def create(cls) -> Segment:
        """Make a segment of zeros.

        Raises
        ------
        TransportError
            If there is no memory, or no descriptor is free.
        """
        try:
            descriptor = os.memfd_create("r2ccl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as exc:
            raise _translated("create", exc) from exc
        try:
            os.posix_fallocate(descriptor, 0, SEGMENT_NBYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as exc:
            os.close(descriptor)
            raise _translated("allocate", exc) from exc
        return cls(descriptor)

    def close_descriptor(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Unmap the memory. No thread may use it any more."""
        self.close_descriptor()
        nothing: Any = np.empty(0, np.uint8)
        self.data, self.words = nothing, nothing.view(np.int64)
        self._map.close()


def _check(descriptor: int) -> None:
    seals, nbytes = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS), os.fstat(descriptor).st_size
    if seals & _SEALS != _SEALS or nbytes != SEGMENT_NBYTES:
        raise TransportError(
            f"a peer passed memory of {nbytes} bytes with seals {seals:#x}, expected are "
            f"{SEGMENT_NBYTES} bytes with {_SEALS:#x}: run the same version of r2ccl on all ranks"
        )


def _translated(what: str, exc: OSError) -> TransportError:
    return TransportError(
        f"cannot {what} {SEGMENT_NBYTES} bytes of shared memory: {describe_os_error(exc)}; free "
        "memory, or use fewer ranks on this host",
        status=errno_name(exc),
    )


__all__ = ["Segment"]

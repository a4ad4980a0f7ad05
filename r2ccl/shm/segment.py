"""Memory that ranks of one host share: made by one rank, mapped by the others.

A segment is an anonymous file in memory (memfd), which has no name in any file system and is freed
with the last process that maps it. Its size is sealed, so no rank can make another one fault by
shrinking it, and its pages are allocated at once, so a full file system or memory cgroup is an
error before the first call.
"""

from __future__ import annotations

import fcntl
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl.errors import TransportError, describe_os_error, errno_name
from r2ccl.shm.layout import SEGMENT_NBYTES
from r2ccl.shm.mapping import Mapping, bytes_of

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """One mapped segment.

    Parameters
    ----------
    descriptor : int
        Descriptor of the memfd; the segment owns it and closes it when it is no longer needed.
    nbytes : int
        Size that the memory must have.

    Raises
    ------
    TransportError
        If the memory is not sealed or has another size, or cannot be mapped.
    """

    def __init__(self, descriptor: int, nbytes: int = SEGMENT_NBYTES) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        try:
            _check(descriptor, nbytes)
            #: Memory, which arrays may keep mapped for longer than this object lives.
            self.mapping = Mapping(descriptor, nbytes)
        except OSError as exc:
            self.close_descriptor()
            raise _translated("map", nbytes, exc) from exc
        except TransportError:
            self.close_descriptor()
            raise
        #: View as bytes; valid until `close`.
        self.data: npt.NDArray[np.uint8] = bytes_of(self.mapping)
        #: View as 64-bit words; valid until `close`.
        self.words: npt.NDArray[np.int64] = self.data.view(np.int64)
        self.address = self.mapping.address

    @classmethod
    def create(cls, nbytes: int = SEGMENT_NBYTES) -> Segment:
        """Make a segment of zeros; `nbytes` must be a multiple of the size of a page.

        Raises
        ------
        TransportError
            If there is no memory, or no descriptor is free.
        """
        try:
            descriptor = os.memfd_create("r2ccl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as exc:
            raise _translated("create", nbytes, exc) from exc
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as exc:
            os.close(descriptor)
            raise _translated("allocate", nbytes, exc) from exc
        return cls(descriptor, nbytes)

    def close_descriptor(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Unmap the memory. No thread may use it any more."""
        self.release()
        self.mapping.close()

    def release(self) -> None:
        """Unmap the memory once no array uses it any more."""
        self.close_descriptor()
        nothing: Any = np.empty(0, np.uint8)
        self.data, self.words = nothing, nothing.view(np.int64)


def _check(descriptor: int, nbytes: int) -> None:
    seals, found = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS), os.fstat(descriptor).st_size
    if seals & _SEALS != _SEALS or found != nbytes:
        raise TransportError(
            f"a peer passed memory of {found} bytes with seals {seals:#x}, expected are "
            f"{nbytes} bytes with {_SEALS:#x}: run the same version of r2ccl on all ranks"
        )


def _translated(what: str, nbytes: int, exc: OSError) -> TransportError:
    return TransportError(
        f"cannot {what} {nbytes} bytes of shared memory: {describe_os_error(exc)}; free "
        "memory, or use fewer ranks on this host",
        status=errno_name(exc),
    )


__all__ = ["Segment"]

"""Memory that ranks of one host share: made by one rank, mapped by the others.

A segment is an anonymous file in memory (memfd), which has no name in any file system and is freed
with the last process that maps it. Its size is sealed, so no rank can make another one fault by
shrinking it, and its pages are allocated at once, so a full file system or memory cgroup is an
error before the first call. Only the rings for messages are allocated when they are first used.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl.errors import TransportError, describe_os_error, errno_name
from r2ccl.shm.layout import SEGMENT_NBYTES
from r2ccl.shm.message_layout import memory_nbytes, ring_nbytes, rings_at

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE = 23


class Segment:
    """One mapped segment of `SEGMENT_NBYTES` bytes, and the memory for messages that follows it.

    Parameters
    ----------
    descriptor : int
        Descriptor of the memfd; the segment owns it and closes it when it is no longer needed.
    nranks : int
        Number of ranks, which determines the size of the memory for messages.

    Raises
    ------
    TransportError
        If the memory is not sealed or has another size, or cannot be mapped.
    """

    def __init__(self, descriptor: int, nranks: int) -> None:
        self.descriptor = descriptor
        self.nranks = nranks
        try:
            _check(descriptor, _nbytes_of(nranks))
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._map = mmap.mmap(descriptor, SEGMENT_NBYTES, flags)
            self._messages = mmap.mmap(
                descriptor, memory_nbytes(nranks), mmap.MAP_SHARED, offset=SEGMENT_NBYTES
            )
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
        #: View of the memory for messages as bytes, and its address; valid until `close`.
        self.messages: npt.NDArray[np.uint8] = np.frombuffer(self._messages, np.uint8)
        self.messages_address = int(self.messages.ctypes.data)

    @classmethod
    def create(cls, nranks: int) -> Segment:
        """Make a segment of zeros; the rings of its memory for messages take no memory yet.

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
            os.truncate(descriptor, _nbytes_of(nranks))
            os.posix_fallocate(descriptor, 0, SEGMENT_NBYTES + rings_at(nranks))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as exc:
            os.close(descriptor)
            raise _translated("allocate", exc) from exc
        return cls(descriptor, nranks)

    def allocate_ring(self, peer: int) -> None:
        """Allocate the memory of the owner's ring to `peer`.

        Raises
        ------
        TransportError
            If there is no memory.
        """
        nbytes = ring_nbytes(self.nranks)
        try:
            self._messages.madvise(
                _MADV_POPULATE_WRITE, rings_at(self.nranks) + peer * nbytes, nbytes
            )
        except OSError as exc:
            # Linux before 5.14 does not know the advice; the first write allocates.
            if exc.errno != errno.EINVAL:
                raise _translated("allocate", exc) from exc

    def close_descriptor(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Unmap the memory. No thread may use it any more."""
        self.close_descriptor()
        nothing: Any = np.empty(0, np.uint8)
        self.data, self.words, self.messages = nothing, nothing.view(np.int64), nothing
        self._map.close()
        self._messages.close()


def _nbytes_of(nranks: int) -> int:
    return SEGMENT_NBYTES + memory_nbytes(nranks)


def _check(descriptor: int, expected: int) -> None:
    seals, nbytes = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS), os.fstat(descriptor).st_size
    if seals & _SEALS != _SEALS or nbytes != expected:
        raise TransportError(
            f"a peer passed memory of {nbytes} bytes with seals {seals:#x}, expected are "
            f"{expected} bytes with {_SEALS:#x}: run the same version of r2ccl on all ranks"
        )


def _translated(what: str, exc: OSError) -> TransportError:
    return TransportError(
        f"cannot {what} {SEGMENT_NBYTES} bytes of shared memory: {describe_os_error(exc)}; free "
        "memory, or use fewer ranks on this host",
        status=errno_name(exc),
    )


__all__ = ["Segment"]

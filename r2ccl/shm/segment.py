"""Memory that ranks of one host share: made by one rank, mapped by the others.

A segment is an anonymous file in memory (memfd), which has no name in any file system and is freed
when the last process stops using it. Its size is sealed, so that no rank can shrink it and thereby
cause a fault in another rank. Its pages are allocated when it is made, so that a lack of memory is
an error at that time, and not in a later call. Only the rings for messages are allocated later,
when they are first used.
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl.errors import TransportError, decode_errno, errno_name, exhaustion_advice
from r2ccl.shm.layout import MUTEX, SEGMENT_NBYTES
from r2ccl.shm.mapping import Mapping, bytes_of
from r2ccl.shm.message_layout import memory_nbytes, ring_nbytes, rings_at
from r2ccl.shm.robust_mutex import HeldMutex

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """Memory that ranks of one host share, mapped into this process; see the module.

    Parameters
    ----------
    descriptor : int
        Descriptor of the memfd. The segment owns it: `close_descriptor`, `release` and `close`
        close it, and so does a constructor that fails.
    nbytes : int
        Size that the memory must have, in bytes.
    nranks : int
        If above 0, the memory consists of `SEGMENT_NBYTES` bytes for collectives, and of the memory
        for messages between `nranks` ranks.

    Raises
    ------
    TransportError
        If the memory is not sealed, has another size, or cannot be mapped.
    """

    def __init__(self, descriptor: int, nbytes: int, nranks: int = 0) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        self.nranks = nranks
        self._mutex: HeldMutex | None = None
        try:
            _check(descriptor, nbytes)
            #: Memory, which arrays may keep mapped for longer than this object lives.
            self.mapping = Mapping(descriptor, SEGMENT_NBYTES if nranks else nbytes)
            self._rings: Mapping | None = None
            if nranks:
                rest = memory_nbytes(nranks)
                self._rings = Mapping(descriptor, rest, SEGMENT_NBYTES, is_populated=False)
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
        #: View of the memory for messages as bytes, and its address; valid until `close`.
        self.messages: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.messages_address = 0
        if self._rings is not None:
            self.messages = bytes_of(self._rings)
            self.messages_address = self._rings.address

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Make a segment of `nbytes` zero bytes; `nbytes` must be a multiple of the page size.

        Raises
        ------
        TransportError
            If memory is exhausted, or no descriptor is free.
        """
        return cls(_make(nbytes, nbytes), nbytes)

    @classmethod
    def create_of_group(cls, nranks: int) -> Segment:
        """Make a segment of zeros for collectives and messages of `nranks` ranks.

        The process holds the mutex of the segment until `close`. The rings for messages take no
        memory before `allocate_ring`.

        Raises
        ------
        TransportError
            If memory is exhausted, no descriptor is free, or `HeldMutex` raises it.
        """
        nbytes = SEGMENT_NBYTES + memory_nbytes(nranks)
        made = cls(_make(nbytes, SEGMENT_NBYTES + rings_at(nranks)), nbytes, nranks)
        try:
            made._mutex = HeldMutex(made.mapping, MUTEX)
        except BaseException:
            made.release()  # the memory stays mapped for the thread of the mutex, if there is one
            raise
        return made

    def of_peer(self, descriptor: int) -> Segment:
        """Return the mapped segment of a peer, which has the same size and structure as this one.

        The result owns `descriptor`.

        Raises
        ------
        TransportError
            As for `Segment`.
        """
        return Segment(descriptor, self.nbytes, self.nranks)

    def allocate_ring(self, peer: int) -> None:
        """Allocate the memory of the ring from the owner of the segment to rank `peer`.

        Before Linux 5.14 this does nothing, and the first write to each page allocates the page.

        Raises
        ------
        TransportError
            If memory is exhausted.
        """
        nbytes = ring_nbytes(self.nranks)
        assert self._rings is not None
        try:
            self._rings.populate(rings_at(self.nranks) + peer * nbytes, nbytes)
        except OSError as exc:
            # Linux before 5.14 cannot allocate in advance; the first write to a page does.
            if exc.errno != errno.EINVAL:
                raise _translated("allocate", nbytes, exc) from exc

    def close_descriptor(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Close the descriptor and unmap the memory, which no thread may use afterwards.

        The memory for collectives stays mapped if `HeldMutex.release` returns False.
        """
        self.release()
        if self._mutex is None or self._mutex.release():
            self.mapping.close()
        if self._rings is not None:
            self._rings.close()

    def release(self) -> None:
        """Close the descriptor and drop the views `data`, `words` and `messages`.

        The memory stays mapped until this object and all arrays of the memory are deleted.
        """
        self.close_descriptor()
        nothing: Any = np.empty(0, np.uint8)
        self.data, self.words, self.messages = nothing, nothing.view(np.int64), nothing


def _make(nbytes: int, nallocated: int) -> int:
    """Return the descriptor of sealed memory of `nbytes` bytes.

    The first `nallocated` bytes are allocated now, the others when they are first used.
    """
    try:
        descriptor = os.memfd_create("r2ccl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as exc:
        raise _translated("create", nbytes, exc) from exc
    try:
        os.truncate(descriptor, nbytes)
        os.posix_fallocate(descriptor, 0, nallocated)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as exc:
        os.close(descriptor)
        raise _translated("allocate", nbytes, exc) from exc
    return descriptor


def _check(descriptor: int, nbytes: int) -> None:
    seals, found = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS), os.fstat(descriptor).st_size
    if seals & _SEALS != _SEALS or found != nbytes:
        raise TransportError(
            f"a peer passed shared memory of {found} bytes with seals {seals:#x}, not of {nbytes} "
            f"bytes with seals {_SEALS:#x}; run the same version of r2ccl on all ranks"
        )


def _translated(what: str, nbytes: int, exc: OSError) -> TransportError:
    code = exc.errno or 0
    advice = "free memory, or use fewer ranks per host"
    if code in (errno.EMFILE, errno.ENFILE):
        advice = exhaustion_advice(code)
    return TransportError(
        f"cannot {what} {nbytes} bytes of shared memory: {decode_errno(code)}; {advice}",
        status=errno_name(exc),
    )


__all__ = ["Segment"]

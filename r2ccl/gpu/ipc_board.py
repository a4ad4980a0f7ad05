"""Shared memory through which the ranks of a node exchange the locations of their arrays.

Every rank has a section: counters of its host, words that the streams of all ranks write, and a
ring of messages. A message is stored before its number, so a reader that sees the number reads the
complete message.

::

    posted   number of the newest message posted        written by the host
    taken    number of the newest message read          written by the host
    ready    for each rank, the newest round whose      written by that rank's stream
             input is complete there
    done     for each rank, the newest round that it    written by that rank's stream
             has finished
    mapped   for each rank and slot, the newest offer   written by the host
             of memory that this rank has mapped

Only this rank waits for the words ``ready`` and ``done`` of its section. After a failure its host
overwrites them, so that its stream continues; no other rank is affected.

The memory is a file, accessible only to its owner, whose name is removed after all ranks have
opened it. Invariant: a message is overwritten only after every rank has read it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from r2ccl.errors import InvalidArgument, TransportError

#: Directory for the file, on a file system in memory.
_DIRECTORY = Path("/dev/shm")
_PREFIX = "r2ccl-"
_NAME_NBYTES = 16

_LINE = 64
_POSTED, _TAKEN, _READY, _DONE = 0, 1 * _LINE, 2 * _LINE, 3 * _LINE
_MAPPED = 4 * _LINE
#: Largest number of ranks on a node; a kernel has one operand per rank.
MOST_RANKS = 8
#: Number of allocations of a rank that the others keep mapped.
NSLOTS = 32
_RING_AT = _MAPPED + 4 * MOST_RANKS * NSLOTS
_DEPTH = 64
MESSAGE_NBYTES = 192
_PAGE = 4096
#: Bytes of one rank's section, a multiple of the memory page size.
RANK_NBYTES = -(-(_RING_AT + _DEPTH * MESSAGE_NBYTES) // _PAGE) * _PAGE
_WORD = 0xFFFFFFFF


class IpcBoard:
    """One rank's access to the node's shared memory.

    Parameters
    ----------
    memory : ndarray of uint8, shape (nlocal * RANK_NBYTES,)
        Memory shared by the ranks of the node; initially zero.
    index, nlocal : int
        Index of this rank's section, and number of sections.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], index: int, nlocal: int) -> None:
        self.memory = memory
        self.index = index
        self.nlocal = nlocal
        self._words = memory.view(np.uint32).reshape(nlocal, -1)

    def may_post(self, number: int) -> bool:
        """Return whether every rank has read the message that message `number` overwrites."""
        taken = self._words[:, _TAKEN // 4].tolist()
        return all(_is_reached(word, number - _DEPTH) for word in taken)

    def post(self, number: int, message: bytes) -> None:
        """Post message `number`, after `may_post` returned True for it.

        Raises
        ------
        InvalidArgument
            If the message has more than `MESSAGE_NBYTES` bytes.
        """
        if len(message) > MESSAGE_NBYTES:
            raise InvalidArgument(
                f"a message of {len(message)} bytes was given; at most {MESSAGE_NBYTES} are allowed"
            )
        at = self._message_at(self.index, number)
        self.memory[at : at + len(message)] = np.frombuffer(message, np.uint8)
        # x86 keeps the order of one thread's stores. On other processors, taking and releasing a
        # lock is a memory fence.
        _FENCE()
        self._words[self.index, _POSTED // 4] = number & _WORD

    def read(self, peer: int, number: int) -> bytes | None:
        """Return message `number` of `peer`; None if `peer` has not posted it yet."""
        if not _is_reached(int(self._words[peer, _POSTED // 4]), number):
            return None
        _FENCE()
        at = self._message_at(peer, number)
        return self.memory[at : at + MESSAGE_NBYTES].tobytes()

    def take(self, number: int) -> None:
        """Mark the messages of all ranks up to `number` as read."""
        self._words[self.index, _TAKEN // 4] = number & _WORD

    def mark_mapped(self, peer: int, slot: int, number: int) -> None:
        """Tell `peer` that this rank has mapped its offer `number` for `slot`."""
        self._words[self.index, _mapped_at(peer, slot)] = number & _WORD

    def is_mapped(self, slot: int, number: int) -> bool:
        """Return whether all other ranks have mapped this rank's offer `number` for `slot`."""
        mapped = self._words[:, _mapped_at(self.index, slot)].tolist()
        del mapped[self.index]
        return all(word == number & _WORD for word in mapped)

    def ready_at(self, reader: int, writer: int) -> int:
        """Return the offset of the ``ready`` word of `writer` in the section of `reader`."""
        return reader * RANK_NBYTES + _READY + 4 * writer

    def done_at(self, reader: int, writer: int) -> int:
        """Return the offset of the ``done`` word of `writer` in the section of `reader`."""
        return reader * RANK_NBYTES + _DONE + 4 * writer

    def has_done(self, number: int) -> bool:
        """Return whether this rank's stream has finished its own part of round `number`."""
        return _is_reached(int(self._words[self.index, _DONE // 4 + self.index]), number)

    def is_complete(self, number: int) -> bool:
        """Return whether all ranks have finished round `number`, or `release` let it pass."""
        words = self._words[self.index, _DONE // 4 : _DONE // 4 + self.nlocal]
        return all(_is_reached(word, number) for word in words.tolist())

    def release(self, number: int) -> None:
        """Let this rank's stream pass round `number`, after a failure.

        The words of this rank's section that are below `number` are set to it. What other ranks
        write is not changed: their streams wait for words of their own sections.
        """
        page = self._words[self.index]
        for at in (_READY // 4, _DONE // 4):
            for where in range(at, at + self.nlocal):
                if not _is_reached(int(page[where]), number):
                    page[where] = number & _WORD

    def _message_at(self, peer: int, number: int) -> int:
        return peer * RANK_NBYTES + _RING_AT + number % _DEPTH * MESSAGE_NBYTES


class SharedFile:
    """Memory that several processes share through a file in `/dev/shm`.

    Parameters
    ----------
    descriptor : int
        Descriptor of the open file; borrowed during the call.
    nbytes : int
        Size of the file in bytes.

    Attributes
    ----------
    memory : ndarray of uint8, shape (nbytes,)
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._map = mmap.mmap(descriptor, nbytes)
        self.memory = np.frombuffer(self._map, np.uint8)

    @classmethod
    def create(cls, nbytes: int) -> tuple[SharedFile, bytes]:
        """Create a file; return it, and its name for `open`, which is valid until `forget`.

        Raises
        ------
        TransportError
            If the file cannot be created: the file system is full, for example.
        """
        name = secrets.token_bytes(_NAME_NBYTES)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(_path(name), flags, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, nbytes)
                return cls(descriptor, nbytes), name
            except OSError:
                cls.forget(name)
                raise
            finally:
                os.close(descriptor)
        except OSError as exc:
            raise TransportError(
                f"cannot create a file of {nbytes} bytes in {_DIRECTORY}: {exc}; enlarge that file "
                "system if it is full, otherwise let this user write to it, or set R2CC_IPC=0",
                status="NO_SHARED_MEMORY",
            ) from exc

    @classmethod
    def open(cls, name: bytes, nbytes: int) -> SharedFile:
        """Open the file that another process of the same user created.

        Raises
        ------
        InvalidArgument
            If `name` is not a name that `create` returns.
        TransportError
            If the file cannot be opened, belongs to another user or has another size.
        """
        if len(name) != _NAME_NBYTES:
            raise InvalidArgument(
                f"a name of {len(name)} bytes was given; it must have {_NAME_NBYTES}"
            )
        try:
            descriptor = os.open(_path(name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _check_owner(os.fstat(descriptor), nbytes)
                return cls(descriptor, nbytes)
            finally:
                os.close(descriptor)
        except OSError as exc:
            raise TransportError(
                f"cannot open the memory that the ranks of this host share: {exc}; let all of them "
                f"use the same {_DIRECTORY}",
                status="NO_SHARED_MEMORY",
            ) from exc

    @staticmethod
    def forget(name: bytes) -> None:
        """Remove the name of the file, if it exists; processes that have opened it keep it."""
        _path(name).unlink(missing_ok=True)


def _check_owner(found: os.stat_result, nbytes: int) -> None:
    if found.st_uid != os.geteuid() or found.st_size != nbytes:
        raise TransportError(
            f"the memory that the ranks of this host share belongs to user {found.st_uid} and has "
            f"{found.st_size} bytes; expected are user {os.geteuid()} and {nbytes} bytes: run all "
            "ranks as one user",
            status="NO_SHARED_MEMORY",
        )


def _path(name: bytes) -> Path:
    return _DIRECTORY / f"{_PREFIX}{name.hex()}"


def _mapped_at(peer: int, slot: int) -> int:
    """Return the index of the word of a rank's slot in a section."""
    return _MAPPED // 4 + peer * NSLOTS + slot


def _is_reached(word: int, number: int) -> bool:
    """Return whether a counter that wraps at 2**32 has reached `number`."""
    return (word - number) & _WORD < 1 << 31


def _make_fence() -> Callable[[], None]:
    lock = threading.Lock()

    def fence() -> None:
        with lock:
            return

    return fence


_FENCE = _make_fence()

__all__ = ["MESSAGE_NBYTES", "MOST_RANKS", "NSLOTS", "RANK_NBYTES", "IpcBoard", "SharedFile"]

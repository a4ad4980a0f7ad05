"""Shared memory through which the ranks of a node exchange the locations of their GPU arrays.

Each rank of the node has a *section*: counters, words, and a ring with its last 64 messages. A rank
posts one message for each call; messages are numbered from 1. A *round* is the work of all ranks of
the node on a call, or on a window of it, between two barriers (`r2ccl.gpu.peer`); rounds are
numbered from 1. Contents of a section:

::

    posted   newest message that the owner of the section has   written by the owner's CPU
             posted
    taken    newest message that the owner has read, from       written by the owner's CPU
             all ranks
    kept     newest round that the owner had finished when it   written by the owner's CPU
             failed
    ready    for each rank of the node, the newest round for    written by that rank's stream
             which its arrays are ready
    done     for each rank of the node, the newest round that   written by that rank's stream
             it has finished
    mapped   for each rank of the node and slot, the newest     written by the owner's CPU
             offer of memory that the owner has mapped

Slots and offers are explained in `r2ccl.gpu.peer_memory`.

Only the owner's stream waits for the words ``ready`` and ``done`` of a section. After a failure the
owner's CPU overwrites them, so that this stream continues; no other rank is affected.

A message is stored before its number, so a rank that has read the number reads the complete
message. A rank copies a message before it stores ``taken``. A rank that fails stores ``kept``
before a later round can end without its part. Memory fences enforce these orders on processors that
reorder such accesses.

The memory is a file that only the user who runs the ranks can access. Its name is removed after all
ranks of the node have opened it. Invariant: a message is overwritten only after every rank has read
it.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.kernels.native import callable_of
from r2ccl.shm.machine import MACHINE

#: Directory for the file, on a file system in memory.
_DIRECTORY = Path("/dev/shm")
_PREFIX = "r2ccl-"
_NAME_NBYTES = 16

_LINE = 64
_POSTED, _TAKEN, _READY, _DONE = 0, 1 * _LINE, 2 * _LINE, 3 * _LINE
#: Offset of ``kept``, a word of 64 bits: `_HAS_FAILED` and the number of the round; initially 0.
_KEPT, _HAS_FAILED = _TAKEN + 8, 1 << 32
_MAPPED = 4 * _LINE
#: Largest number of ranks on a node; a kernel has at most 8 inputs and 8 outputs, one per rank.
MOST_RANKS = 8
#: Largest number of allocations of a rank that the other ranks keep mapped at once.
NSLOTS = 32
_RING_AT = _MAPPED + 4 * MOST_RANKS * NSLOTS
_DEPTH = 64
MESSAGE_NBYTES = 192
#: Largest size of memory pages: 4 KiB on x86-64; 4, 16 or 64 KiB on arm64.
_PAGE = 1 << 16
#: Bytes of one rank's section, a multiple of the memory page size, because GPUs pin whole pages.
RANK_NBYTES = -(-(_RING_AT + _DEPTH * MESSAGE_NBYTES) // _PAGE) * _PAGE
_WORD = 0xFFFFFFFF

#: Function that orders all earlier memory accesses of the calling thread before all later ones.
Fence: TypeAlias = Callable[[], object]
#: Maker of a `Fence`, for `callable_of`.
_FENCE = "r2ccl.shm.atomics:make_fence"


class IpcBoard:
    """One rank's access to the shared memory of its node.

    The parameters `peer`, `reader` and `writer` of the methods are member indices: positions of
    ranks in the node, from 0 to `nlocal` - 1.

    Parameters
    ----------
    memory : ndarray of uint8, shape (nlocal * RANK_NBYTES,)
        Memory shared by the ranks of the node, with one section per rank; initially zero.
    index : int
        Member index of this rank.
    nlocal : int
        Number of ranks in the node.
    fence : callable
        See `load_fence`.
    """

    def __init__(
        self, memory: npt.NDArray[np.uint8], index: int, nlocal: int, fence: Fence
    ) -> None:
        self.memory = memory
        self.index = index
        self.nlocal = nlocal
        self._fence = fence
        self._words = memory.view(np.uint32).reshape(nlocal, -1)
        self._kept = memory.view(np.uint64).reshape(nlocal, -1)[:, _KEPT // 8]

    def may_post(self, number: int) -> bool:
        """Return whether message `number` can be posted now.

        Message `number` overwrites message ``number - 64``, which every rank of the node must have
        read.
        """
        taken = self._words[:, _TAKEN // 4].tolist()
        self._fence()
        return all(_is_reached(word, number - _DEPTH) for word in taken)

    def post(self, number: int, message: bytes) -> None:
        """Post a message to all ranks of the node.

        Parameters
        ----------
        number : int
            Number of the last message posted by this rank, plus 1; `may_post` must have returned
            True for it.
        message : bytes
            At most `MESSAGE_NBYTES` bytes.

        Raises
        ------
        InvalidArgument
            If the message has more than `MESSAGE_NBYTES` bytes.
        """
        if len(message) > MESSAGE_NBYTES:
            raise InvalidArgument(
                f"the message for the ranks of this node has {len(message)} bytes, but at most "
                f"{MESSAGE_NBYTES} are allowed; pass a shorter message"
            )
        at = self._message_at(self.index, number)
        self.memory[at : at + len(message)] = np.frombuffer(message, np.uint8)
        self._fence()
        self._words[self.index, _POSTED // 4] = number & _WORD

    def read(self, peer: int, number: int) -> bytes | None:
        """Return message `number` of `peer`; None if `peer` has not posted it yet.

        Call this method before `take`, which allows `peer` to overwrite the message. The result has
        `MESSAGE_NBYTES` bytes; the bytes after the end of a shorter message are undefined.
        """
        if not _is_reached(int(self._words[peer, _POSTED // 4]), number):
            return None
        self._fence()
        at = self._message_at(peer, number)
        return self.memory[at : at + MESSAGE_NBYTES].tobytes()

    def take(self, number: int) -> None:
        """Tell the other ranks that this rank has read message `number` of every rank.

        Earlier messages count as read too.
        """
        self._fence()
        self._words[self.index, _TAKEN // 4] = number & _WORD

    def mark_mapped(self, peer: int, slot: int, number: int) -> None:
        """Tell `peer` that this rank has mapped the allocation of offer `number` for `slot`.

        The slot and the offer are those of `peer`; see `r2ccl.gpu.peer_memory`.
        """
        self._words[self.index, _mapped_at(peer, slot)] = number & _WORD

    def is_mapped(self, slot: int, number: int) -> bool:
        """Return whether all other ranks of the node have mapped an allocation of this rank.

        Parameters
        ----------
        slot, number : int
            Slot of the allocation, and number of the offer.
        """
        mapped = self._words[:, _mapped_at(self.index, slot)].tolist()
        del mapped[self.index]
        return all(word == number & _WORD for word in mapped)

    def ready_at(self, reader: int, writer: int) -> int:
        """Return the offset in bytes of the ``ready`` word of `writer` in the section of `reader`.

        The offset is counted from the start of `memory`.
        """
        return reader * RANK_NBYTES + _READY + 4 * writer

    def done_at(self, reader: int, writer: int) -> int:
        """Return the offset in bytes of the ``done`` word of `writer` in the section of `reader`.

        The offset is counted from the start of `memory`.
        """
        return reader * RANK_NBYTES + _DONE + 4 * writer

    def has_done(self, number: int) -> bool:
        """Return whether this rank's stream has finished round `number`.

        Also return True if this rank called `release` with `number` or a higher number.
        """
        return _is_reached(int(self._words[self.index, _DONE // 4 + self.index]), number)

    def is_complete(self, number: int) -> bool:
        """Return whether all ranks of the node have finished round `number`.

        Also return True if this rank called `release` with `number` or a higher number. A rank that
        failed counts as finished once its last write has ended the waits of the other ranks; see
        `failed_before`.
        """
        words = self._words[self.index, _DONE // 4 : _DONE // 4 + self.nlocal]
        return all(_is_reached(word, number) for word in words.tolist())

    def fail(self) -> None:
        """Tell the other ranks that this rank fails, and which rounds it has finished.

        Later rounds end without this rank's part. Call this method once, before this rank lets any
        later round end.
        """
        done = int(self._words[self.index, _DONE // 4 + self.index])
        self._kept[self.index] = _HAS_FAILED | done
        self._fence()

    def failed_before(self, number: int) -> list[int]:
        """Return the member indices of the ranks that failed before they finished round `number`.

        Call this method after the round has ended. All ranks that are not in the result have then
        finished their parts of the round.
        """
        self._fence()
        words = enumerate(self._kept.tolist())
        return [at for at, word in words if word and not _is_reached(word & _WORD, number)]

    def release(self, number: int) -> None:
        """End the waits of this rank's stream for all rounds up to `number`, after a failure.

        All ``ready`` and ``done`` words of this rank's section that are below `number` are set to
        `number`. Other ranks are not affected, because their streams wait for words of their own
        sections.
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
        Descriptor of the open file. The caller closes it; the memory stays mapped.
    nbytes : int
        Size of the file in bytes.

    Attributes
    ----------
    memory : ndarray of uint8, shape (nbytes,)
        Contents of the file, readable and writable.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._map = mmap.mmap(descriptor, nbytes)
        self.memory = np.frombuffer(self._map, np.uint8)

    @classmethod
    def create(cls, nbytes: int) -> tuple[SharedFile, bytes]:
        """Create a file of `nbytes` bytes, all zero, that only this user can access.

        Returns
        -------
        SharedFile
        bytes
            Name of the file, for `open` in other processes. The caller removes it with `forget`.

        Raises
        ------
        TransportError
            If the file cannot be created, for example because the file system is full.
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
                "system if it is full, otherwise let this user write to it",
                status="NO_SHARED_MEMORY",
            ) from exc

    @classmethod
    def open(cls, name: bytes, nbytes: int) -> SharedFile:
        """Open the file that `create` made in another process of the same user.

        Parameters
        ----------
        name : bytes
            Name that `create` returned.
        nbytes : int
            Size of the file in bytes.

        Raises
        ------
        InvalidArgument
            If `name` does not have the length of a name from `create`.
        TransportError
            If the file cannot be opened, belongs to another user, or does not have `nbytes` bytes.
        """
        if len(name) != _NAME_NBYTES:
            raise InvalidArgument(
                f"a name of {len(name)} bytes was given: pass the {_NAME_NBYTES} bytes of create()"
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
                f"cannot open the shared memory of the ranks of one host: {exc}; if the ranks "
                f"run in containers, mount the same {_DIRECTORY} in all containers",
                status="NO_SHARED_MEMORY",
            ) from exc

    @staticmethod
    def forget(name: bytes) -> None:
        """Remove the name of a file, if it exists.

        The file stays usable in the processes that have opened it.
        """
        _path(name).unlink(missing_ok=True)


def _check_owner(found: os.stat_result, nbytes: int) -> None:
    if found.st_uid != os.geteuid() or found.st_size != nbytes:
        raise TransportError(
            f"the shared memory of the ranks of one host must belong to user {os.geteuid()} and "
            f"have {nbytes} bytes, but it belongs to user {found.st_uid} and has {found.st_size} "
            "bytes; run all ranks as one user, with the same version of r2ccl",
            status="NO_SHARED_MEMORY",
        )


def _path(name: bytes) -> Path:
    return _DIRECTORY / f"{_PREFIX}{name.hex()}"


def _mapped_at(peer: int, slot: int) -> int:
    """Return the index in a section of the ``mapped`` word for slot `slot` of member `peer`."""
    return _MAPPED // 4 + peer * NSLOTS + slot


def _is_reached(word: int, number: int) -> bool:
    """Return whether the counter `word`, which wraps around at 2**32, has reached `number`."""
    return (word - number) & _WORD < 1 << 31


def load_fence() -> Fence:
    """Return the fence of `IpcBoard` for this machine; compile it if the machine needs one.

    x86-64 processors need none, because the only accesses that they reorder are a store and a later
    load of another word, and the board does not depend on this order. For them, the result is a
    function that does nothing.

    Raises
    ------
    TransportError
        If the machine needs a compiled fence, and compiled code cannot be used.
    """
    if MACHINE == "x86_64":
        return _do_nothing
    try:
        return callable_of(_FENCE)
    except (ImportError, OSError, TransportError) as exc:
        raise TransportError(
            f"machine type {MACHINE} needs compiled code to order accesses to shared memory, "
            f"but compiled code cannot be used: {exc}"
        ) from exc


def _do_nothing() -> None:
    pass


__all__ = [
    "MESSAGE_NBYTES",
    "MOST_RANKS",
    "NSLOTS",
    "RANK_NBYTES",
    "Fence",
    "IpcBoard",
    "SharedFile",
    "load_fence",
]

"""Robust mutexes in shared memory, by which the ranks of a host notice that a process has ended.

Each rank locks a mutex in its segment for as long as it uses the segment. When a process ends, for
any reason, the kernel marks the robust mutexes of its threads (pthread_mutexattr_setrobust(3))
before it frees the memory of the process and closes its connections. For a process with 145 MiB, on
two busy cores, the mark usually came 8 to 35 ms before the peers could see the end of a connection.

A mutex belongs to a thread, so a thread that does nothing else locks it. The end of another thread
or of a forked child does not mark it. A call of execve(2) marks it: the process then no longer has
a communicator.

An owner that is about to unlock its mutex sets a flag. A process that examines a free mutex locks
it for a moment. If this process ends meanwhile, the kernel marks the mutex, and the flag shows that
the process that ended was not the owner.

Invariant: the memory of a mutex stays mapped as long as its thread may hold it, because libc keeps
the held mutexes of a thread in a linked list.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl.errors import TransportError, decode_errno
from r2ccl.shm import mapping
from r2ccl.shm.layout import set_sleep

_PROCESS_SHARED, _ROBUST = 1, 1
#: Offset in bytes from the mutex to the flag of `_left`.
_LEFT = 56
#: More than the size of ``pthread_mutexattr_t`` on all processors.
_ATTRIBUTES_NBYTES = 64
#: Time limit in seconds for the thread to lock and to unlock the mutex, which nobody else holds.
_THREAD_S = 5.0
#: Sleep of a wait, in nanoseconds, while the control thread ends the communicator.
_BRIEF_NS = 200_000


class HeldMutex:
    """Robust mutex that a dedicated thread holds until `release`.

    Parameters
    ----------
    memory : Mapping
        Shared memory with the mutex. The thread keeps a reference to this object until the mutex is
        unlocked; the caller must not close the object earlier.
    offset : int
        First byte of the mutex in `memory`.

    Raises
    ------
    TransportError
        If the mutex cannot be made or locked.
    """

    def __init__(self, memory: mapping.Mapping, offset: int) -> None:
        self._address = memory.address + offset
        _make(self._address)
        self._is_held, self._is_over = threading.Event(), threading.Event()
        #: Error of locking the mutex, if any.
        self._code = 0
        self._thread = threading.Thread(
            target=self._hold, args=(memory,), name="r2ccl-robust-mutex", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as exc:
            raise TransportError(f"cannot start a thread: {exc}; raise ulimit -u") from exc
        try:
            if not self._is_held.wait(_THREAD_S):
                raise TransportError(
                    f"a new thread did not lock a robust mutex within {_THREAD_S:g} s, because it "
                    "got too little CPU time; start fewer processes on this host"
                )
            _check("lock", self._code)
        except BaseException:
            self._is_over.set()
            raise

    def _hold(self, memory: mapping.Mapping) -> None:
        """Hold the mutex, which is in `memory`, until `release`; run by the thread."""
        self._code = _libc().pthread_mutex_lock(self._address)
        self._is_held.set()
        if not self._code:
            self._is_over.wait()
            _left(self._address).value = 1
            _check("unlock", _libc().pthread_mutex_unlock(self._address))

    def release(self) -> bool:
        """Unlock the mutex and end the thread. Idempotent.

        Return False if the thread has not ended after `_THREAD_S` seconds; it then still uses the
        memory of the mutex.
        """
        self._is_over.set()
        self._thread.join(_THREAD_S)
        return not self._thread.is_alive()


class ExitWatch:
    """Detector of peers whose processes have ended while they held the mutex in their segments.

    Parameters
    ----------
    mutexes : mapping of int to int
        Address of the mutex of each peer, by index.
    on_exit : callable
        ``on_exit(index)`` is called once for each peer whose process has ended.
    """

    def __init__(self, mutexes: Mapping[int, int], on_exit: Callable[[int], None]) -> None:
        self._mutexes = dict(mutexes)
        self._on_exit = on_exit
        self._has_exited = False

    def look(self, state: npt.NDArray[np.int64]) -> None:
        """Report each peer whose process has ended since the last call.

        After the first such peer, shorten the sleeps of waits that use `state`, because the
        communicator is about to end.

        Raises
        ------
        TransportError
            If a mutex is damaged.
        """
        for index, address in tuple(self._mutexes.items()):
            if is_abandoned(address) and self._mutexes.pop(index, None) is not None:
                self._has_exited = True
                self._on_exit(index)
        if self._has_exited:
            set_sleep(state, _BRIEF_NS)


def is_abandoned(address: int) -> bool:
    """Return whether the process that held the mutex at `address` has ended without unlocking it.

    Raises
    ------
    TransportError
        If the mutex is damaged.
    """
    found = _libc().pthread_mutex_trylock(address)
    if found == errno.EBUSY:
        return False
    if found == errno.ENOTRECOVERABLE:
        return not _left(address).value
    if found not in (0, errno.EOWNERDEAD):
        raise _translated("examine", found)
    # A mutex that is unlocked without being made consistent becomes unusable. Other ranks therefore
    # notice the exit, too.
    _check("unlock", _libc().pthread_mutex_unlock(address))
    return found == errno.EOWNERDEAD and not _left(address).value


def _left(address: int) -> ctypes.c_int32:
    """Return the flag after the mutex at `address`; the owner sets it to 1 before it unlocks."""
    return ctypes.c_int32.from_address(address + _LEFT)


def _make(address: int) -> None:
    libc = _libc()
    attributes = ctypes.create_string_buffer(_ATTRIBUTES_NBYTES)
    _check("make", libc.pthread_mutexattr_init(attributes))
    _check("make", libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
    _check("make", libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
    _check("make", libc.pthread_mutex_init(address, attributes))
    _check("make", libc.pthread_mutexattr_destroy(attributes))


def _check(what: str, code: int) -> None:
    if code:
        raise _translated(what, code)


def _translated(what: str, code: int) -> TransportError:
    return TransportError(
        f"cannot {what} a robust mutex: {decode_errno(code)}; if it happens again, report this bug "
        "with the version of libc, and set R2CC_SHM=0 to use the network meanwhile"
    )


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    for name in ("lock", "trylock", "unlock"):
        getattr(libc, f"pthread_mutex_{name}").argtypes = (ctypes.c_void_p,)
    libc.pthread_mutex_init.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return libc


__all__ = ["ExitWatch", "HeldMutex", "is_abandoned"]

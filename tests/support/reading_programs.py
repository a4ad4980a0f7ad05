"""Programs of ranks that read the memory of other ranks' processes, for `local_ranks`."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from support import local_programs
from support.local_ranks import Host

from r2ccl.dtypes import CODES
from r2ccl.errors import TransportError
from r2ccl.shm import group as group_module
from r2ccl.shm.group import LocalGroup
from r2ccl.shm.layout import CAN_READ, DIRECT, MODE, TOKEN, TRANSFER
from r2ccl.shm.reading import offer_word
from r2ccl.shm.segment import Segment
from r2ccl.shm.transfer import READ
from r2ccl.types import Collective

Array = np.ndarray[Any, np.dtype[Any]]
_U8 = CODES[np.dtype(np.uint8)]
_MEMFD_SECRET = 447


def check_matrix(host: Host, offender: int = -1) -> tuple[list[str], int]:
    """Run the matrix of collectives with arrays of processes that peers read.

    Return the wrong cases, and the number of calls in which this rank's array was read. Peers
    cannot read the memory of rank `offender`.
    """
    run, nread = LocalGroup.run, 0

    def counted(self: LocalGroup, *given: Any) -> bool:
        nonlocal nread
        found = run(self, *given)
        nread += _is_read(self)
        return found

    LocalGroup.run = counted  # type: ignore[method-assign]
    if host.index == offender:
        group_module.offer_word = _offer_wrong_word  # type: ignore[attr-defined]
    wrong = local_programs.check_matrix(host, ["float32", "uint8"], None, READ)
    return wrong, nread


def _is_read(group: LocalGroup) -> bool:
    """Return whether peers have read this rank's array in the last call, which uses no `empty`."""
    state = group._memory
    return bool(state[MODE] == DIRECT and state[TRANSFER] == READ)


def _offer_wrong_word(own: Segment) -> Array:
    word = offer_word(own)
    own.words[TOKEN // 8] ^= 1
    return word


def gather_secret_memory(host: Host) -> list[tuple[bool, bool]]:
    """Allgather memory that no other process can read, then ordinary memory.

    Return whether the results are right, and whether this rank's array was read.
    """
    local_programs.prefer(READ)
    group, nbytes, found = host.connect(), 1 << 20, []
    out = np.empty(host.nranks * nbytes, np.uint8)
    wanted = np.repeat(np.arange(host.nranks, dtype=np.uint8), nbytes)
    for x in (secret_memory(nbytes), np.empty(nbytes, np.uint8)):
        x[:] = host.index
        local_programs.call(group, Collective.ALLGATHER, x, out, _U8, out.size)
        found.append((bool((out == wanted).all()), _is_read(group)))
    group.close()
    return found


def stop_being_readable(host: Host) -> list[str]:
    """Rank 1 becomes unreadable between two allgathers; return what each rank raises."""

    def attend(resume: Callable[[], bool], call: int) -> None:
        until_s = time.monotonic() + 5
        while not resume():
            if time.monotonic() > until_s:
                raise TimeoutError

    local_programs.prefer(READ)
    group, size, raised = host.connect(attend=attend), 1 << 16, []
    x, out = np.ones(size, np.uint8), np.zeros(2 * size, np.uint8)
    for _ in range(2):
        try:
            local_programs.call(group, Collective.ALLGATHER, x, out, _U8, out.size)
        except (TimeoutError, TransportError) as exc:
            raised.append(f"{type(exc).__name__}: {exc}")
        if host.index == 1:
            group._own.words[TOKEN // 8] ^= 1  # as if another process had its number
        host.exchange(b"x")
    raised.append(str(group._own.words[CAN_READ // 8]))
    group.close()
    return raised


def secret_memory(nbytes: int) -> Array:
    """Return memory that only this process can read; OSError if the kernel has none."""
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(_MEMFD_SECRET, 0)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "memfd_secret")
    try:
        os.ftruncate(descriptor, nbytes)
        return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
    finally:
        os.close(descriptor)


_READ_PARENT = """
import ctypes, sys
vector = lambda address: (ctypes.c_size_t * 2)(address, 1)
own, at, parent = ctypes.create_string_buffer(1), int(sys.argv[1]), int(sys.argv[2])
read = ctypes.CDLL(None).process_vm_readv
sys.exit(read(parent, vector(ctypes.addressof(own)), 1, vector(at), 1, 0) != 1)
"""


@functools.cache
def can_read_processes() -> bool:
    """Return whether this host lets a process read the memory of one that it did not start."""
    word = np.zeros(1)
    command = [sys.executable, "-c", _READ_PARENT, str(word.ctypes.data), str(os.getpid())]
    return subprocess.run(command, check=False).returncode == 0


needs_reading = pytest.mark.skipif(
    not can_read_processes(), reason="processes cannot read each other's memory here"
)


def has_secret_memory() -> bool:
    """Return whether `secret_memory` works here."""
    with suppress(OSError):
        return secret_memory(4096).size > 0
    return False

"""Orphans: ranks that a launcher started end with it, however it ends.

Invariant: between the start of a child and its request to the kernel no death is missed.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1

#: Loaded here, as a child between fork and exec should load nothing.
_libc = ctypes.CDLL(None, use_errno=True)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it in `parent` ends.

    Parameters
    ----------
    parent : int
        Process number of who started it.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if os.getppid() != parent:  # it had ended before
        os.kill(os.getpid(), signal.SIGKILL)


__all__ = ["end_with"]

"""Termination of ranks when their launcher ends, even if it is killed.

Invariant: the end of the launcher is noticed even if it precedes the child's request to the kernel.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1

#: Loaded at import, because a child between fork and exec should load nothing.
_libc = ctypes.CDLL(None, use_errno=True)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it in `parent` ends.

    If `parent` has ended already, kill this process now.

    Parameters
    ----------
    parent : int
        Id of the process that started this one: the launcher or its rank server.

    Raises
    ------
    OSError
        If the kernel refuses the request.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if os.getppid() != parent:  # the launcher ended before prctl
        os.kill(os.getpid(), signal.SIGKILL)


__all__ = ["end_with"]

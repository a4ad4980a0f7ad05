"""Processor architectures on which ranks can share memory, and numbers of their system calls."""

from __future__ import annotations

import platform

MACHINE = platform.machine()
#: Numbers of futex(2), sched_setaffinity(2) and sched_getaffinity(2), by machine (asm/unistd.h).
_NUMBERS = {"x86_64": (202, 203, 204), "aarch64": (98, 122, 123)}
SYSTEM_CALLS = _NUMBERS.get(MACHINE, (0, 0, 0))
#: Reason why this machine cannot run the compiled functions; empty if it can.
UNSUPPORTED = ""
if MACHINE not in _NUMBERS:
    UNSUPPORTED = f"machine {MACHINE!r}: supported are {', '.join(sorted(_NUMBERS))}"

__all__ = ["MACHINE", "SYSTEM_CALLS", "UNSUPPORTED"]

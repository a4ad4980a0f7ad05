"""How this package compiles its loops with Numba.

Imports Numba (about 0.5 s). Invariant: a loop found in Numba's cache on disk is the one that the
sources say. Numba itself looks at the file of the function that Python calls and at no other.

Numba counts references to arrays, and would do so for all arrays of a `FlowState` at every call,
ten times the cost of what is called. Loops make no arrays and keep none, so it is told not to, with
``_nrt=False``.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import njit
from numba.extending import register_jitable

from r2ccl.flowsim.loops.state import FlowState

_log = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])

#: Runs until a time and returns whether it got there; False: the landings need more room.
Loop = Callable[[FlowState, float], bool]

#: Changes with any source of this package. A number that a function closes over is part of its key
#: in the cache.
STAMP = zlib.crc32(b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py"))))


def inlined(function: _F) -> _F:
    """Make `function` part of the compiled loops that call it; in Python it stays what it is.

    A call that is not inlined copies some hundred words: the addresses and shapes of a `FlowState`.
    """
    made: _F = register_jitable(forceinline=True, _nrt=False)(function)
    return made


def called(function: _F) -> _F:
    """As `inlined`, but called: for long functions that run once for many slices."""
    made: _F = register_jitable(_nrt=False)(function)
    return made


def compiled(function: _F) -> _F:
    """Compile what Python calls, when it is first called, or load it from the disk cache.

    `function` must close over `STAMP`.
    """
    try:
        made: _F = njit(nogil=True, error_model="numpy", cache=True, _nrt=False)(function)
    except RuntimeError as exc:  # Numba found no directory it may write its cache to
        _log.info("%s is compiled without a disk cache: %s", function.__name__, exc)
        made = njit(nogil=True, error_model="numpy", _nrt=False)(function)
    return made


__all__ = ["STAMP", "Loop", "called", "compiled", "inlined"]

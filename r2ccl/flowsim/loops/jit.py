"""Decorators that compile the loops of this package with Numba.

Importing this module imports Numba, which takes about 0.5 s.

Numba's disk cache checks only one file for changes: the file of the function called from Python.
`STAMP` makes the cache depend on all sources of this package.

By default Numba updates the reference count of every array of a `FlowState` at every call, which
costs ten times as much as the called functions. The loops neither create nor keep arrays, so
reference counting is disabled with ``_nrt=False``.

Only the entry points are called from outside of compiled code. Without ``no_cfunc_wrapper=True``,
Numba would compile a C wrapper of every other function, which takes a sixth of the compile time.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import njit, typeof
from numba.extending import register_jitable

from r2ccl.flowsim.loops.state import FlowState
from r2ccl.kernels.native import compile_lock

_log = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])

#: ``loop(state, until)`` runs the events up to and including `until`, in seconds of simulated time.
#: It returns True if no event is left up to then. It returns False if it stopped because
#: ``landings`` lacks room for one more slice of every link: enlarge ``landings`` and call the loop
#: again.
Loop = Callable[[FlowState, float], bool]

#: Checksum of all sources of this package. Numba's cache key of a function includes the values it
#: closes over, so each function passed to `compiled` closes over this one.
STAMP = zlib.crc32(b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py"))))


def inlined(function: _F) -> _F:
    """Compile `function` inline into the loops that call it, and return the Python function.

    A call that is not inlined copies about a hundred machine words: the addresses and shapes of the
    arrays of a `FlowState`.
    """
    made: _F = register_jitable(forceinline=True, _nrt=False, no_cfunc_wrapper=True)(function)
    return made


def called(function: _F) -> _F:
    """Compile `function` for calls from loops, not inline, and return the Python function.

    Use this decorator for long functions that handle many slices per call.
    """
    made: _F = register_jitable(_nrt=False, no_cfunc_wrapper=True)(function)
    return made


def compiled(function: _F) -> _F:
    """Compile an entry point at its first call, or load it from the disk cache.

    `function` must close over `STAMP`. All its calls must have arguments of the same types.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
    try:
        made = njit(cache=True, **options)(function)
    except RuntimeError as exc:  # Numba found no directory it may write its cache to
        _log.info("compiling %s without a disk cache: %s", function.__name__, exc)
        uncached: _F = njit(**options)(function)
        return uncached

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        if not made.signatures:
            with compile_lock("flowsim"):  # compiling takes 10 s
                made.compile(tuple(map(typeof, args)))
        return made(*args)

    return run  # type: ignore[return-value]


__all__ = ["STAMP", "Loop", "called", "compiled", "inlined"]

"""Compilation of functions by Numba, once per host: the disk cache is locked meanwhile."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from llvmlite import ir
from numba import extending, njit, types
from numba.core import cgutils

_log = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])

#: Lock file in the directory of Numba's cache.
_LOCK_NAME = "r2ccl.lock"


@contextmanager
def compile_lock(function: Callable[..., Any]) -> Iterator[bool]:
    """Hold the lock of the disk cache that `function` belongs to.

    While one process compiles, others wait, and then load the result from the cache.

    Yields
    ------
    bool
        Whether there is a disk cache: a directory that Numba can write to.
    """
    try:
        directory = njit(cache=True)(function).stats.cache_path
        os.makedirs(directory, exist_ok=True)
        descriptor = os.open(os.path.join(directory, _LOCK_NAME), os.O_CREAT | os.O_RDWR, 0o600)
    except (RuntimeError, OSError) as exc:
        _log.info(
            "compiled %s without a disk cache (%s): set NUMBA_CACHE_DIR to a writable directory",
            function.__name__,
            exc,
        )
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield True
    finally:
        os.close(descriptor)


def inlined(function: _F) -> _F:
    """Let compiled code call a function.

    As ``numba.extending.register_jitable``, with types. Functions compiled by ``njit`` will not do:
    one that closes over them has a different key in the disk cache in every process.
    """
    result: _F = extending.register_jitable(function)
    return result


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let compiled code use LLVM instructions: as ``numba.extending.intrinsic``, with types."""
    result: Callable[..., Any] = extending.intrinsic(function)
    return result


@intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Copy `nbytes` between addresses of separate memory: memcpy(3), in compiled code."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, at = (builder.inttoptr(each, ir.IntType(8).as_pointer()) for each in args[:2])
        cgutils.raw_memcpy(builder, to, at, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def compile_entry(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """Compile a function for one signature; return it without Numba's dispatch of types.

    The arguments must have exactly the types of `signature`. The function runs without the GIL.
    """
    with compile_lock(function) as is_cached:
        compiled = njit(signature, nogil=True, error_model="numpy", cache=is_cached)(function)
    [result] = compiled.overloads.values()
    entry: Callable[..., Any] = result.entry_point
    _KEPT.append(compiled)
    return entry


def digest_of(*modules: ModuleType) -> int:
    """Return a number that depends on the source of modules.

    Numba compiles a function anew if its own file has changed, but not if a file has changed whose
    functions are inlined. A function that uses this number is compiled anew in both cases.
    """
    digest = hashlib.sha256()
    for module in modules:
        digest.update(Path(str(module.__file__)).read_bytes())
    return 1 + int.from_bytes(digest.digest()[:4], "little")


#: Compiled functions, whose code must not be freed.
_KEPT: list[Any] = []

__all__ = ["compile_entry", "compile_lock", "copy_bytes", "digest_of", "inlined", "intrinsic"]

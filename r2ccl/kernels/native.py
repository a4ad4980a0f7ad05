"""Machine code of functions: compiled by Numba once per host, loaded without importing Numba.

Importing Numba and loading from its disk cache takes 0.4 s of CPU time and 80 MiB in every process.
This module stores the machine code in files of its own, and imports only llvmlite to load it: 30 ms
and 12 MiB. The files are in NUMBA_CACHE_DIR if it is set, otherwise in ``kernels/__pycache__`` of
the package or, if this user does not own it or cannot write there, in the user's cache directory. A
file is used only on the kind of processor for which it was made, and as long as llvmlite and the
modules from which it was made are unchanged. If no directory can be used, every process compiles.

The functions take and return 64-bit integers. A function is identified by its *maker*, a text
``module:function``, and by the maker's arguments. Called with these arguments, the maker returns
the Python function to compile. A maker is imported and called only to compile, so the maker and its
module may import Numba.

Invariant: a file is loaded only if this user owns it and nobody else can write to it.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import glob
import hashlib
import importlib
import logging
import os
import re
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from r2ccl.errors import TransportError

_log = logging.getLogger(__name__)

_LIBRARY = Path(__file__).resolve().parent.parent
_ROOT = str(_LIBRARY.parent)
_IMPORT = re.compile(rb"^from (r2ccl[.\w]+) import ", re.MULTILINE)
_CACHE_DIRECTORY_VARIABLE = "NUMBA_CACHE_DIR"


@functools.cache
def why_not_compiled() -> str:
    """Return the reason why compiled code cannot be used, with the remedy; "" if it can be used.

    The reason is that llvmlite or Numba is missing, or that llvmlite cannot be loaded. Both must be
    installed, even to load stored code. They are an optional dependency, because they would take
    three quarters of the disk space of r2ccl with its dependencies.
    """
    missing = [name for name in ("llvmlite", "numba") if find_spec(name) is None]
    if missing:
        names = f"{' and '.join(missing)} {'are' if missing[1:] else 'is'}"
        return f'{names} not installed: pip install "r2ccl[compiled]"'
    try:
        from llvmlite import binding

        binding.get_process_triple()  # loads the library
    except (ImportError, OSError, AttributeError, RuntimeError) as exc:
        return f"llvmlite cannot be loaded ({exc}): pip install --force-reinstall llvmlite"
    return ""


def _llvm() -> Any:
    """Return the module ``llvmlite.binding``, which is imported only if compiled code is used.

    Raises
    ------
    ImportError
        If llvmlite or Numba is not installed, or llvmlite cannot be loaded.
    """
    if why_not_compiled():
        raise ImportError(why_not_compiled())
    from llvmlite import binding

    return binding


class MachineCode(msgspec.Struct, frozen=True):
    """Object file with a function, for one kind of processor.

    ``entry`` is the symbol of the C function. ``wrapper`` is the symbol of a function that Python
    can call; it takes ``nargs`` integers and releases the GIL. ``externals`` are the symbols of
    Python and libc that the object may need.
    """

    object: bytes
    entry: str
    wrapper: str
    nargs: int
    externals: tuple[str, ...]


class _Stored(msgspec.Struct, frozen=True):
    """Contents of a file: machine code, and the digest of the modules from which it was made."""

    sources: bytes
    code: MachineCode


_stored_decoder = msgspec.msgpack.Decoder(_Stored)


def address_of(maker: str, *given: Any) -> int:
    """Return the address of the C function of a maker; compile it if no file has it.

    The address stays valid until the process ends.

    Parameters
    ----------
    maker : str
        Maker of the function, ``module:function``. It returns a Python function of integers that
        Numba can compile.
    given : hashable
        Arguments of the maker; each, as a text, becomes part of the name of the file.

    Raises
    ------
    ImportError
        If llvmlite or Numba is not installed, llvmlite cannot be loaded, or Numba is needed to
        compile and cannot be imported.
    TransportError
        If this process lacks a symbol that the function may need.
    """
    return _addresses_of(maker, given)[0]


@functools.cache
def callable_of(maker: str, *given: Any) -> Callable[..., int]:
    """Return a Python function that calls the C function of `maker` without the GIL.

    The arguments and the result of the returned function are 64-bit integers. Parameters and errors
    are those of `address_of`.
    """
    return _as_builtin(_addresses_of(maker, given)[1], maker)


def method_of(maker: str, owner: Any, *given: Any) -> Callable[..., Any]:
    """Return a Python function that calls the C function of `maker` with the GIL.

    The C function takes the address of the object `owner`, the address of a table with the
    addresses of the positional arguments, and the number of arguments. It returns the address of
    a new reference to the result, or 0 if it has set an exception.

    Parameters
    ----------
    maker, *given
        As for `address_of`.
    owner : object
        The returned function keeps it alive.

    Raises
    ------
    ImportError, TransportError
        As `address_of`.
    """
    return _as_builtin(_addresses_of(maker, given)[0], maker, owner)


@functools.cache
def _addresses_of(maker: str, given: tuple[Any, ...]) -> tuple[int, int]:
    """Return the addresses of the C function of `maker` and of its wrapper for Python."""
    code = _code_of(maker, given)
    engine = _Linker.shared().load(code)
    return engine.get_function_address(code.entry), engine.get_function_address(code.wrapper)


class _Linker:
    """Loader of machine code into LLVM's execution engine, one per process; thread-safe."""

    def __init__(self) -> None:
        binding = self._binding = _llvm()
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        # The module and the engine must live as long as the code.
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target_machine())
        self._loaded: set[str] = set()
        self._lock = threading.RLock()

    @staticmethod
    def shared() -> _Linker:
        """Return the linker of this process, which is made on first use."""
        # If two threads make one each, both use the first: code dies with its linker.
        return _linkers.get(0) or _linkers.setdefault(0, _Linker())

    def load(self, code: MachineCode) -> Any:
        """Load `code` unless it is already loaded; return the engine that contains its symbols.

        Raises
        ------
        TransportError
            If this process lacks a symbol that the object may need.
        """
        with self._lock:
            if code.entry not in self._loaded:
                for name in code.externals:
                    # LLVM ends the process if it does not find a symbol.
                    self._binding.add_symbol(name, _address_of_symbol(name))
                self._engine.add_object_file(self._binding.ObjectFileRef.from_data(code.object))
                self._engine.finalize_object()
                self._loaded.add(code.entry)
        return self._engine


#: Linker of this process, with key 0, once it is made.
_linkers: dict[int, _Linker] = {}


def target_machine() -> Any:
    """Return LLVM's target machine for this host's processor."""
    binding = _llvm()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
        reloc="default",
        codemodel="jitdefault",
    )


def _address_of_symbol(name: str) -> int:
    for library in (ctypes.pythonapi, _libc()):
        with suppress(AttributeError):
            return int(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0)
    raise TransportError(
        f"neither Python nor libc has {name}, which compiled code needs; please report "
        "this with the versions of Python and libc"
    )


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class _MethodDef(ctypes.Structure):
    """``PyMethodDef`` of Python's C API."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_METH_FASTCALL = 0x80


#: Python's C function that makes a function from its definition, its ``self`` and its module.
_make_function = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p
)(("PyCFunction_NewEx", ctypes.pythonapi))


@functools.cache
def _definition(address: int, name: str) -> _MethodDef:
    """Return the definition of a function; keep it in memory, because Python does not copy it."""
    return _MethodDef(name.encode(), address, _METH_FASTCALL, None)


def _as_builtin(address: int, name: str, owner: Any = None) -> Callable[..., Any]:
    """Return the C function at `address` as a Python function with the name `name`.

    The function must have the calling convention METH_FASTCALL; `owner` is its ``self``.
    """
    made: Callable[..., Any] = _make_function(
        ctypes.addressof(_definition(address, name)), owner, None
    )
    return made


# Files


def must_compile(maker: str, *given: Any) -> bool:
    """Return whether `callable_of` would compile the function of `maker`, because no file has it.

    The result is also True in two cases in which `callable_of` would not compile. In the first
    case, this process has already loaded the function, which has no file. In the second case,
    another process is compiling the function, and `callable_of` would wait for that process. The
    result is False if `why_not_compiled` returns a reason. The parameters are those of
    `address_of`.
    """
    if why_not_compiled():
        return False
    directory = _directory()
    if directory is None:
        return True
    file, sources = _place_of(maker, _name_of(maker, given), directory)
    return _read(file, sources) is None


def _name_of(maker: str, given: tuple[Any, ...]) -> str:
    return "-".join((maker.replace(":", "."), *map(str, given)))


def _place_of(maker: str, name: str, directory: Path) -> tuple[Path, bytes]:
    """Return the path of a function's file, and the digest of modules expected in the file."""
    return directory / f"{name}.{_processor()}.o", _sources(maker.partition(":")[0])


def _code_of(maker: str, given: tuple[Any, ...]) -> MachineCode:
    name = _name_of(maker, given)
    directory = _directory()
    if directory is None:
        return _compile(maker, given, name)
    file, sources = _place_of(maker, name, directory)
    found = _read(file, sources)
    if found is None:
        with compile_lock(maker.partition(":")[0]):
            found = _read(file, sources)
            if found is None:
                found = _compile(maker, given, name)
                _write(file, _Stored(sources, found))
    return found


def _compile(maker: str, given: tuple[Any, ...], name: str) -> MachineCode:
    _log.info("compiling %s for this host", name)
    module, _, function = maker.partition(":")
    source = getattr(importlib.import_module(module), function)(*given)
    compiling = importlib.import_module("r2ccl.kernels.compiling")  # imports Numba
    code: MachineCode = compiling.compile_function(source, name)
    return code


@functools.cache
def _processor() -> str:
    """Return a digest of the kind of this host's processor and the version of llvmlite."""
    binding = _llvm()
    from llvmlite import __version__ as llvmlite_version

    kind = (
        binding.get_process_triple(),
        binding.get_host_cpu_name(),
        binding.get_host_cpu_features().flatten(),
        llvmlite_version,
    )
    return hashlib.sha256(repr(kind).encode()).hexdigest()[:16]


@functools.cache
def _sources(module: str) -> bytes:
    """Return a digest of the modules on which the compiled code of a maker in `module` depends.

    These are all modules in the package of `module` and in the package of this module. They also
    include the modules of the library from which these modules import names, because compiled code
    contains the values of imported constants.
    """
    packages = {str(__package__), module.rpartition(".")[0]}
    paths = {path for package in packages for path in _modules_in(package)}
    paths.update(*[_source_of(path).imported for path in paths])
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(_source_of(path).digest)
    return digest.digest()


class _Source(NamedTuple):
    """Digest of a module, and the paths of the library's modules from which it imports names."""

    digest: bytes
    imported: list[str]


@functools.cache
def _source_of(path: str) -> _Source:
    with open(path, "rb") as opened:
        text = opened.read()
    named = [_path_of(name.decode()) + ".py" for name in _IMPORT.findall(text)]
    return _Source(hashlib.sha256(text).digest(), [each for each in named if os.path.exists(each)])


@functools.cache
def _modules_in(package: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(_path_of(package)), "*.py"))


def _path_of(module: str) -> str:
    return os.path.join(_ROOT, *module.split("."))


@functools.cache
def _directory() -> Path | None:
    """Return the directory of the files; None if no candidate belongs to this user and is writable.

    A missing directory is made.
    """
    chosen = os.environ.get(_CACHE_DIRECTORY_VARIABLE)
    places = [Path(chosen)] if chosen else [_LIBRARY / "kernels" / "__pycache__", _home_cache()]
    for place in places:
        with suppress(OSError):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(place, os.W_OK) and place.stat().st_uid == os.geteuid():
                return place
    _log.info(
        "compiled code is not stored, because no usable directory was found (tried %s): set %s to "
        "a directory that this user owns and can write to",
        ", ".join(map(str, places)),
        _CACHE_DIRECTORY_VARIABLE,
    )
    return None


def _home_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "r2ccl"


def _read(file: Path, sources: bytes) -> MachineCode | None:
    """Return the code in a file; None if the file is missing or was not made from `sources`.

    If the file cannot be read, or another user could have written it, log a warning and return
    None.
    """
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                _log.warning(
                    "the file %s with compiled code is not used, because it belongs to another "
                    "user or others can write to it; the code is compiled again and replaces it",
                    file,
                )
                return None
            stored = _stored_decoder.decode(opened.read())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as exc:
        _log.warning(
            "the file %s with compiled code cannot be read (%s); the code is compiled again",
            file, exc,
        )  # fmt: skip
        return None
    return stored.code if stored.sources == sources else None


def _write(file: Path, stored: _Stored) -> None:
    """Store code for later processes; if this fails, log why, and each process compiles."""
    try:
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as made:  # of mode 0600
            try:
                made.write(msgspec.msgpack.encode(stored))
                made.flush()
                os.replace(made.name, file)
            except BaseException:
                os.unlink(made.name)
                raise
    except OSError as exc:
        _log.warning(
            "cannot store compiled code in %s (%s), so every process compiles it again; free "
            "space, or set NUMBA_CACHE_DIR to another directory", file, exc,
        )  # fmt: skip


@contextmanager
def compile_lock(name: str) -> Iterator[None]:
    """Hold the lock `name` within the context, so that one process compiles and all others wait.

    The lock is a file in the directory of compiled code. If there is no such directory, or the file
    cannot be locked, no lock is held, and several processes may compile the same code.
    """
    directory = _directory()
    with ExitStack() as stack:
        if directory is not None:
            with suppress(OSError):
                opened = stack.enter_context(open(directory / f"{name}.lock", "w"))
                fcntl.flock(opened, fcntl.LOCK_EX)
                # Closing the file is not enough: a child that was forked meanwhile has it open.
                stack.callback(fcntl.flock, opened, fcntl.LOCK_UN)
        yield


__all__ = [
    "MachineCode",
    "address_of",
    "callable_of",
    "compile_lock",
    "method_of",
    "must_compile",
    "target_machine",
    "why_not_compiled",
]

"""PTX of the kernels: prebuilt, else from a disk cache, else compiled by Numba.

Collectives launch only forms with prebuilt kernels (`r2ccl.kernels.cuda.prebuilt`), so they do not
need Numba unless the sources of the kernels have changed. Numba is slow to import, so it is
imported only for a kernel that is neither prebuilt nor in the cache. No GPU is needed.

Invariant: the PTX was compiled from the present sources. A prebuilt kernel may have been compiled
by another version of the compiler than the installed one. The file name of a cache entry is a
digest of the form, the sources and the version of numba-cuda; the first line of the file is a
digest of the PTX.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.kernels.cuda.form import Form, canonical
from r2ccl.kernels.cuda.machine import TARGET
from r2ccl.kernels.cuda.prebuilt import digest_of_sources, prebuilt_ptx

_log = logging.getLogger(__name__)

#: Libraries of NVIDIA that Numba compiles with, by their names in `cuda.pathfinder`.
_LIBRARIES = ("nvrtc", "nvvm")


class Ptx(msgspec.Struct, frozen=True):
    """PTX of a kernel, and the name of its entry.

    ``origin`` is "prebuilt", "cached" or "compiled".
    """

    text: bytes
    entry: str
    origin: str


def check_capability(capability: tuple[int, int]) -> None:
    """Check that a GPU of this compute capability can run the kernels.

    Raises
    ------
    InvalidArgument
        If the GPU is too old.
    """
    if capability < TARGET:
        given, oldest = (".".join(map(str, each)) for each in (capability, TARGET))
        raise InvalidArgument(
            f"the GPU has compute capability {given}, but kernels need at least {oldest}; keep the "
            "data in host memory"
        )


def cache_directory(env: Mapping[str, str]) -> Path | None:
    """Return the directory of the disk cache of kernels; None if the home directory is unknown.

    The directory is in ``XDG_CACHE_HOME`` of the environment `env`, if this is an absolute path, or
    else in ``~/.cache``. Only ``~/.cache`` needs the home directory.
    """
    base = env.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # by the XDG specification, relative paths are ignored
        return Path(base, "r2ccl", "ptx")
    try:
        return Path.home() / ".cache" / "r2ccl" / "ptx"
    except RuntimeError as exc:
        _log.info(
            "GPU kernels that are not prebuilt are compiled without a disk cache (%s): set "
            "XDG_CACHE_HOME to the absolute path of a directory",
            exc,
        )
        return None


def ptx_of(form: Form, capability: tuple[int, int], directory: Path | None) -> Ptx:
    """Return the PTX of a form.

    Parameters
    ----------
    form : Form
        Form of the kernel. Forms with the same `canonical` form have the same PTX.
    capability : tuple of int
        Compute capability of the GPU, such as ``(9, 0)``.
    directory : Path or None
        Directory of the disk cache, see `cache_directory`; None: no cache.

    Raises
    ------
    InvalidArgument
        If the GPU is too old; see `check_capability`.
    TransportError
        In these cases:

        - The prebuilt kernels cannot be read (status ``NO_KERNELS``).
        - The kernel is not prebuilt, and numba-cuda is missing (status ``NO_CUDA``).
        - The kernel must be compiled, and NVIDIA's compiler is missing or damaged (status
          ``NO_CUDA``).
        - The compiler fails (no status).

    Notes
    -----
    *Cost*: up to 0.1 s to look for a prebuilt kernel. If there is none, reading the kernel from the
    cache takes 0.2 ms more, and compiling it 0.5 to 1 s more, plus 1 s the first time in a process.
    If a cache entry cannot be read or is damaged, the kernel is compiled. This case, and a failure
    to write the cache, are logged at INFO.
    """
    check_capability(capability)
    shared = canonical(form)
    text = prebuilt_ptx(shared)
    if text is not None:
        return Ptx(text, shared.name, "prebuilt")
    path = None if directory is None else directory / f"{_digest(shared)}.ptx"
    text = None if path is None else _read(path)
    if text is not None:
        return Ptx(text, shared.name, "cached")
    text = _compile(shared)
    if path is not None:
        _write(path, text)
    return Ptx(text, shared.name, "compiled")


def _digest(form: Form) -> str:
    told = f"{_compiler()} {digest_of_sources()} {form}"
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def _compiler() -> str:
    try:
        return importlib.metadata.version("numba-cuda")
    except importlib.metadata.PackageNotFoundError as exc:
        raise TransportError(
            "numba-cuda, which compiles GPU kernels that are not prebuilt, is not installed; "
            "run `pip install 'numba-cuda[cu13]'`, or 'numba-cuda[cu12]' with CUDA 12",
            status="NO_CUDA",
        ) from exc


def _read(path: Path) -> bytes | None:
    """Return the PTX of a cache entry; None if the entry is missing, unreadable or damaged."""
    try:
        head, _, text = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as exc:
        _log.info("cannot read cached kernel %s: %s; compiling it again", path, exc)
        return None
    if head == _seal(text):
        return text
    _log.info("cached kernel %s is damaged; compiling it again", path)
    return None


def _write(path: Path, text: bytes) -> None:
    """Write a cache entry, so that other processes see the whole entry or none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder, path.name)
            whole.write_bytes(_seal(text) + b"\n" + text)
            whole.replace(path)
    except OSError as exc:
        _log.info("cannot write kernel %s to the disk cache: %s", path, exc)


def _seal(text: bytes) -> bytes:
    return b"// sha256 " + hashlib.sha256(text).hexdigest().encode()


def _compile(form: Form) -> bytes:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        from r2ccl.kernels.cuda.compiling import compile_kernel  # imports Numba

        for name in _LIBRARIES:
            load_nvidia_dynamic_lib(name)
    except (ImportError, RuntimeError) as exc:  # RuntimeError: a library is missing or damaged
        raise TransportError(
            f"the compiler of the GPU kernel {form.name} cannot be loaded ({exc}); install it with "
            "`pip install 'numba-cuda[cu13]'`, or 'numba-cuda[cu12]' with CUDA 12",
            status="NO_CUDA",
        ) from exc
    try:
        return compile_kernel(form)
    except Exception as exc:  # any, of Numba or of NVIDIA's compiler
        raise TransportError(
            f"the GPU kernel {form.name} cannot be compiled ({type(exc).__name__}: {exc}); report "
            f"this with the version of numba-cuda, {_compiler()}"
        ) from exc


__all__ = ["Ptx", "cache_directory", "check_capability", "ptx_of"]

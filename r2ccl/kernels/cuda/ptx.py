"""PTX of the kernels: compiled by Numba once, then read from a disk cache.

Numba takes half a second to import and as long to compile a kernel, so it is imported only for a
kernel that the cache lacks. No GPU is needed.

Invariant: the cache returns exactly the PTX that compiling would give. The file name of an entry is
a digest of the form, the target, the sources of this package and the compiler's version; the first
line of the file is a digest of the PTX.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.kernels.cuda.form import Form, canonical

_log = logging.getLogger(__name__)

#: Threads per block.
NTHREADS = 256
#: Least number of resident blocks per multiprocessor. It leaves 64 registers per thread, so ptxas
#: does not spill registers to fit more threads.
NBLOCKS_AT_ONCE = 4

#: Compute capabilities that kernels are compiled for, and the oldest PTX ISA version that supports
#: each. Numba writes the newest version it knows, which drivers older than its compiler refuse.
#: The kernels themselves need only 7.0 (``cvt.rn.bf16x2.f32``, ``min.NaN``).
TARGETS: dict[tuple[int, int], str] = {(8, 0): "7.0", (9, 0): "7.8", (10, 0): "8.6"}


class Ptx(msgspec.Struct, frozen=True):
    """PTX of a kernel, and the name of its entry."""

    text: bytes
    entry: str


def target_of(capability: tuple[int, int]) -> tuple[int, int]:
    """Return the newest compute capability in `TARGETS` whose kernels a GPU can run.

    `capability` is the compute capability of the GPU.

    Raises
    ------
    InvalidArgument
        If the GPU is older than all targets.
    """
    fitting = [target for target in TARGETS if target <= capability]
    if not fitting:
        oldest = ".".join(map(str, min(TARGETS)))
        given = ".".join(map(str, capability))
        raise InvalidArgument(
            f"the GPU has compute capability {given}, but kernels need at least {oldest}; keep the "
            "data in host memory"
        )
    return max(fitting)


def cache_directory(env: Mapping[str, str]) -> Path | None:
    """Return the directory of the disk cache of kernels; None if there is no home directory.

    It is in ``XDG_CACHE_HOME`` of the environment `env`, or else in ``~/.cache``.
    """
    base = env.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # by the XDG specification, relative paths are ignored
        return Path(base, "r2ccl", "ptx")
    try:
        return Path.home() / ".cache" / "r2ccl" / "ptx"
    except RuntimeError as exc:
        _log.info("kernels are compiled without a disk cache (%s): set XDG_CACHE_HOME", exc)
        return None


def ptx_of(form: Form, capability: tuple[int, int], directory: Path | None) -> Ptx:
    """Return the PTX of a form: from the disk cache, or compiled if the cache lacks it.

    Parameters
    ----------
    form : Form
        Form of the kernel. Forms with the same `canonical` form have the same PTX.
    capability : tuple of int
        Compute capability of the GPU, such as ``(9, 0)``.
    directory : Path or None
        The disk cache, see `cache_directory`; None: always compile.

    Raises
    ------
    InvalidArgument
        If the GPU is too old; see `target_of`.
    TransportError
        If numba-cuda is missing or does not find NVIDIA's compiler; ``status`` is ``"NO_CUDA"``.

    Notes
    -----
    *Cost*: 0.2 ms from the cache; otherwise 0.2 to 0.5 s, plus 1 s the first time in a process.
    If an entry cannot be read or is damaged, the kernel is compiled. This, and a failure to write
    the cache, is logged at INFO.
    """
    target = target_of(capability)
    shared = canonical(form)
    path = None if directory is None else directory / f"{_digest(shared, target)}.ptx"
    text = None if path is None else _read(path)
    if text is None:
        text = _compile(shared, target)
        if path is not None:
            _write(path, text)
    return Ptx(text, shared.name)


def _digest(form: Form, target: tuple[int, int]) -> str:
    told = f"{_compiler()} {_sources()} {form} {target}"
    return hashlib.sha256(told.encode()).hexdigest()[:32]


@functools.cache
def _sources() -> str:
    """Return a digest of the source files of this package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _compiler() -> str:
    try:
        return importlib.metadata.version("numba-cuda")
    except importlib.metadata.PackageNotFoundError as exc:
        raise TransportError(
            "numba-cuda, which compiles kernels for a GPU, is not installed; "
            "run `pip install r2ccl[gpu]`",
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


def _compile(form: Form, target: tuple[int, int]) -> bytes:
    try:
        from r2ccl.kernels.cuda.compiling import compile_kernel  # imports Numba

        text, entry = compile_kernel(form, target, (NTHREADS, NBLOCKS_AT_ONCE))
    except (ImportError, RuntimeError) as exc:  # a library of NVIDIA's compiler is not found
        raise TransportError(
            f"the GPU kernel {form.name} cannot be compiled ({exc}); install the compiler with "
            "`pip install r2ccl[gpu]`",
            status="NO_CUDA",
        ) from exc
    return _tidy(text, entry, form.name, TARGETS[target])


def _tidy(text: str, entry: str, name: str, version: str) -> bytes:
    """Rename the entry of Numba's PTX, lower its PTX version and drop unused declarations."""
    body = text[text.index(".version") :].replace(entry, name)
    body = re.sub(r"^\.version .*$", f".version {version}", body, count=1, flags=re.MULTILINE)
    return re.sub(r"^\.common .*NumbaEnv.*\n", "", body, flags=re.MULTILINE).encode()


__all__ = [
    "NBLOCKS_AT_ONCE",
    "NTHREADS",
    "TARGETS",
    "Ptx",
    "cache_directory",
    "ptx_of",
    "target_of",
]

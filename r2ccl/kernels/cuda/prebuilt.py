"""The prebuilt kernels: PTX of every kernel that collectives launch, in a file of this package.

Collectives therefore do not need Numba, unless the sources of the kernels have changed. Kernels of
other forms, which only benches and tests launch, are compiled at run time. ``make ptx`` compiles
the kernels of the file again.

The file is a zip archive with a member for each element size. The member holds the kernels of all
types of that size one after another, each after a line with its name. With a member for each
kernel, the file would be four times as large. Another member has the digest of the sources and the
versions of the compilers that made the kernels.

Invariant: a kernel is used only if it was compiled from the present sources of this package.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import os
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from r2ccl.errors import TransportError
from r2ccl.kernels.cuda.form import MOST, Form, canonical
from r2ccl.kernels.table import ON_GPU
from r2ccl.types import ReduceOp

_log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
#: Archive with the kernels.
ARCHIVE = _HERE / "prebuilt.zip"
#: Member with the origin of the kernels.
_ORIGIN = "origin.json"
#: Modules that determine the PTX of a form.
_SOURCES = ("arithmetic", "compiling", "form", "integers", "machine", "primitives", "template")
#: Packages that compile the kernels.
_COMPILERS = ("numba-cuda", "nvidia-nvvm")


class Origin(msgspec.Struct, frozen=True):
    """Digest of the sources of kernels, and the versions of the packages that compiled them."""

    sources: str
    compilers: dict[str, str]


_origin_decoder = msgspec.json.Decoder(Origin)


def forms() -> Iterator[Form]:
    """Yield the canonical forms of all kernels that collectives launch, each once."""
    found = dict.fromkeys(canonical(form) for form in _launched())
    yield from found


def _launched() -> Iterator[Form]:
    for code, ops in ON_GPU.items():
        for noutputs in range(1, MOST + 1):
            yield Form(
                dtype_code=code, op=ReduceOp.SUM, ninputs=1, noutputs=noutputs, has_table=True
            )
        for op in ops:
            is_divided = op is ReduceOp.AVG
            yield Form(dtype_code=code, op=op)
            if is_divided:
                yield Form(dtype_code=code, op=op, is_divided=True)
                yield Form(dtype_code=code, op=op, ninputs=1, is_divided=True)
            for number in range(2, MOST + 1):
                for noutputs in (1, number):
                    yield Form(
                        dtype_code=code, op=op, ninputs=number, noutputs=noutputs,
                        is_divided=is_divided, has_table=True,
                    )  # fmt: skip


@functools.cache
def digest_of_sources() -> str:
    """Return a digest of the modules that determine the PTX of a form."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((_HERE / f"{name}.py").read_bytes())
    return digest.hexdigest()


def prebuilt_ptx(form: Form, path: Path = ARCHIVE) -> bytes | None:
    """Return the PTX of a canonical form from the archive at `path`, or None.

    The result is None if the archive lacks the kernel, or if its kernels were made from other
    sources.

    Raises
    ------
    TransportError
        If the archive cannot be read (status ``NO_KERNELS``).
    """
    if origin_of(path).sources != digest_of_sources():
        _log.info("the prebuilt GPU kernels were compiled from other sources: run `make ptx`")
        return None
    kernels = _read(path, _member_of(form)) or b""
    return kernels.partition(_title(form))[2].partition(_MARK)[0] or None


def origin_of(path: Path) -> Origin:
    """Return the origin of the kernels in the archive at `path`.

    Raises
    ------
    TransportError
        If the archive cannot be read (status ``NO_KERNELS``).
    """
    told = _read(path, _ORIGIN) or b""
    try:
        return _origin_decoder.decode(told)
    except msgspec.DecodeError as exc:
        raise _unreadable(path, exc) from exc


def _read(path: Path, member: str) -> bytes | None:
    """Return a member of the archive; None if there is no such member."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(member) if member in archive.namelist() else None
    # If Python lacks lzma, the error is a RuntimeError. Otherwise damage may raise an LZMAError,
    # which cannot be imported without lzma.
    except Exception as exc:
        raise _unreadable(path, exc) from exc


def _unreadable(path: Path, exc: Exception) -> TransportError:
    return TransportError(
        f"the prebuilt GPU kernels in {path} cannot be read ({exc}): install r2ccl again, with a "
        "Python that has the module lzma",
        status="NO_KERNELS",
    )


def write(kernels: Mapping[Form, bytes], origin: Origin, path: Path) -> None:
    """Write an archive with the PTX of `kernels`; equal arguments give equal bytes."""
    members: dict[str, bytes] = {_ORIGIN: msgspec.json.encode(origin)}
    for form in sorted(kernels, key=lambda form: form.name):
        member = _member_of(form)
        members[member] = members.get(member, b"") + _title(form) + kernels[form]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for name in sorted(members):
            archive.writestr(zipfile.ZipInfo(name), members[name], zipfile.ZIP_LZMA)


def make() -> None:
    """Compile all kernels, in parallel on all CPU cores, and write the archive."""
    given = tuple(forms())
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        kernels = dict(zip(given, pool.map(_compiled, given, chunksize=4), strict=True))
    write(kernels, Origin(digest_of_sources(), compilers()), ARCHIVE)


def compilers() -> dict[str, str]:
    """Return the versions of the installed packages that compile kernels."""
    return {name: importlib.metadata.version(name) for name in _COMPILERS}


def _compiled(form: Form) -> bytes:
    from r2ccl.kernels.cuda.compiling import compile_kernel  # imports Numba

    return compile_kernel(form)


_MARK = b"// kernel "


def _title(form: Form) -> bytes:
    return _MARK + form.name.encode() + b"\n"


def _member_of(form: Form) -> str:
    return f"{form.itemsize}.ptx"


__all__ = [
    "ARCHIVE",
    "Origin",
    "compilers",
    "digest_of_sources",
    "forms",
    "make",
    "origin_of",
    "prebuilt_ptx",
    "write",
]

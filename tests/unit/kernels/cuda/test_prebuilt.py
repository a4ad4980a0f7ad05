"""The prebuilt kernels are those of the sources, and all that collectives launch."""

from __future__ import annotations

import importlib.metadata
import re
import zipfile
from pathlib import Path

import pytest
from support.slow import slow_but

from r2ccl.errors import TransportError
from r2ccl.kernels import ON_GPU
from r2ccl.kernels.cuda import Form, canonical, ptx_of
from r2ccl.kernels.cuda.machine import PTX_VERSION
from r2ccl.kernels.cuda.prebuilt import (
    ARCHIVE,
    Origin,
    digest_of_sources,
    forms,
    origin_of,
    prebuilt_ptx,
    write,
)
from r2ccl.types import ReduceOp

HOPPER = (9, 0)
FLOAT32 = 7
SUM = Form(dtype_code=FLOAT32, op=ReduceOp.SUM)
PROD = Form(dtype_code=FLOAT32, op=ReduceOp.PROD, ninputs=3, has_table=True)
#: Compiled anew by a test: a large form, a small one, and one with a division.
COMPARED = [
    SUM,
    Form(dtype_code=8, op=ReduceOp.MAX, ninputs=4, noutputs=4, has_table=True),
    Form(dtype_code=0, op=ReduceOp.SUM, ninputs=2, is_divided=True, has_table=True),
]


def test_the_archive_is_that_of_the_sources() -> None:
    """After a change of the kernels, `make ptx` compiles them anew."""
    assert origin_of(ARCHIVE).sources == digest_of_sources()


def test_every_form_of_a_collective_is_in_the_archive() -> None:
    with zipfile.ZipFile(ARCHIVE) as archive:
        texts = b"".join(archive.read(name) for name in archive.namelist())
    entries = re.findall(rb"\.visible \.entry (\w+)\(", texts)

    assert sorted(entries) == sorted(form.name.encode() for form in forms())
    assert texts.count(f".version {PTX_VERSION}\n.target sm_80\n".encode()) == len(entries)


def test_the_archive_is_small() -> None:
    assert ARCHIVE.stat().st_size < 1_000_000


@pytest.mark.parametrize("form", slow_but(COMPARED[2:], COMPARED), ids=lambda form: form.name)
def test_a_kernel_compiled_anew_is_the_same(form: Form) -> None:
    """The same compiler writes the same text; another one may not."""
    pytest.importorskip("numba_cuda", reason="numba-cuda, which compiles kernels, is missing")
    made_by = origin_of(ARCHIVE).compilers
    here = {name: importlib.metadata.version(name) for name in made_by}
    if here != made_by:
        pytest.skip(f"the archive was made by {made_by}, but here are {here}")
    from r2ccl.kernels.cuda.compiling import compile_kernel

    assert compile_kernel(form) == prebuilt_ptx(form)


@pytest.mark.parametrize("code", sorted(ON_GPU))
def test_forms_are_those_that_a_launcher_and_slices_use(code: int) -> None:
    known = set(forms())
    for op in ON_GPU[code]:
        is_divided = op is ReduceOp.AVG
        for number in range(2, 9):
            launched = Form(
                dtype_code=code, op=op, ninputs=number, noutputs=number, is_divided=is_divided,
                has_table=True,
            )  # fmt: skip
            assert canonical(launched) in known
        assert canonical(Form(dtype_code=code, op=op, is_divided=is_divided)) in known


def test_a_prebuilt_kernel_needs_neither_numba_nor_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str) -> str:
        raise AssertionError(f"the version of {name} was asked for")

    monkeypatch.setattr(importlib.metadata, "version", fail)

    found = ptx_of(SUM, HOPPER, None)

    assert (found.origin, found.entry) == ("prebuilt", SUM.name)
    assert found.text.count(b".entry") == 1


def test_kernels_are_found_by_their_forms(tmp_path: Path) -> None:
    path = tmp_path / "kernels.zip"
    texts = {SUM: b"sum\n", PROD: b"prod of 3\n"}
    wider = Form(dtype_code=FLOAT32, op=ReduceOp.PROD, ninputs=4, has_table=True)
    texts[wider] = b"prod of 4\n"
    write(texts, Origin(digest_of_sources(), {}), path)

    assert {form: prebuilt_ptx(form, path) for form in texts} == texts
    assert prebuilt_ptx(Form(dtype_code=0, op=ReduceOp.SUM), path) is None
    assert prebuilt_ptx(Form(dtype_code=FLOAT32, op=ReduceOp.SUM, ninputs=8), path) is None


def test_equal_kernels_give_equal_archives(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    origin = Origin("digest", {"compiler": "1"})
    write({SUM: b"sum\n", PROD: b"prod\n"}, origin, first)
    write({PROD: b"prod\n", SUM: b"sum\n"}, origin, second)

    assert first.read_bytes() == second.read_bytes()


def test_kernels_of_other_sources_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "kernels.zip"
    write({SUM: b"of another source\n"}, Origin("another digest", {}), path)

    assert prebuilt_ptx(SUM, path) is None


@pytest.mark.parametrize("size", [None, 0, 100, -30])
def test_a_damaged_archive_is_an_error(tmp_path: Path, size: int | None) -> None:
    path = tmp_path / "kernels.zip"
    if size is not None:
        path.write_bytes(ARCHIVE.read_bytes()[:size])

    with pytest.raises(TransportError, match=r"cannot be read .*: install r2ccl again") as raised:
        prebuilt_ptx(SUM, path)
    assert raised.value.status == "NO_KERNELS"


def test_a_damaged_kernel_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "kernels.zip"
    whole = bytearray(ARCHIVE.read_bytes())
    with zipfile.ZipFile(ARCHIVE) as archive:
        member = archive.getinfo("4.ptx")
    middle = member.header_offset + member.compress_size // 2
    whole[middle : middle + 8] = bytes(each ^ 0xFF for each in whole[middle : middle + 8])
    path.write_bytes(whole)

    with pytest.raises(TransportError, match="cannot be read"):
        prebuilt_ptx(SUM, path)


def test_an_archive_with_no_origin_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "kernels.zip"
    zipfile.ZipFile(path, "w").close()

    with pytest.raises(TransportError, match="cannot be read"):
        prebuilt_ptx(SUM, path)

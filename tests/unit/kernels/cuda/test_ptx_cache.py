"""Kernels that are not prebuilt are kept on disk; a cache that fails costs only time."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from r2ccl.errors import TransportError
from r2ccl.kernels.cuda import Form, Ptx, cache_directory, ptx, ptx_of
from r2ccl.types import ReduceOp

FORM = Form(dtype_code=7, op=ReduceOp.SUM)
OTHER = Form(dtype_code=7, op=ReduceOp.PROD)
#: A form that no collective launches, so it is not prebuilt.
SPECIAL = Form(dtype_code=7, op=ReduceOp.SUM, is_scaled=True)
HOPPER = (9, 0)


class Compiler:
    """Stands for Numba, and counts."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.version = "1"

    def compile(self, form: Form) -> bytes:
        self.compiled.append(form.name)
        return b".version 7.0\n// kernel " + form.name.encode()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(ptx, "prebuilt_ptx", lambda form: None)
    monkeypatch.setattr(ptx, "_compile", made.compile)
    monkeypatch.setattr(ptx, "_compiler", lambda: made.version)
    return made


def test_a_kernel_is_compiled_once(compiler: Compiler, tmp_path: Path) -> None:
    first = ptx_of(FORM, HOPPER, tmp_path)
    second = ptx_of(FORM, HOPPER, tmp_path)

    text = b".version 7.0\n// kernel " + FORM.name.encode()
    assert first == Ptx(text, FORM.name, "compiled")
    assert second == Ptx(text, FORM.name, "cached")
    assert compiler.compiled == [FORM.name]


def test_forms_and_compilers_are_kept_apart(compiler: Compiler, tmp_path: Path) -> None:
    ptx_of(FORM, HOPPER, tmp_path)
    ptx_of(OTHER, HOPPER, tmp_path)
    compiler.version = "2"
    ptx_of(FORM, HOPPER, tmp_path)

    assert compiler.compiled == [FORM.name, OTHER.name, FORM.name]


def test_all_gpus_share_a_kernel(compiler: Compiler, tmp_path: Path) -> None:
    assert ptx_of(FORM, (8, 0), tmp_path).text == ptx_of(FORM, (10, 3), tmp_path).text

    assert compiler.compiled == [FORM.name]


@pytest.mark.parametrize("left", [0, 10, 60, 90])
def test_a_damaged_entry_is_compiled_again_and_mended(
    left: int, compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    whole = ptx_of(FORM, HOPPER, tmp_path)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(entry.read_bytes()[:left])

    assert ptx_of(FORM, HOPPER, tmp_path) == whole
    assert ptx_of(FORM, HOPPER, tmp_path).text == whole.text

    assert len(compiler.compiled) == 2
    assert "is damaged" in caplog.text


def test_an_entry_that_cannot_be_read_is_compiled(
    compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ptx_of(FORM, HOPPER, tmp_path)
    (entry,) = tmp_path.iterdir()
    entry.unlink()
    entry.mkdir()

    assert ptx_of(FORM, HOPPER, tmp_path).entry == FORM.name

    assert "cannot read cached kernel" in caplog.text
    assert "to the disk cache" in caplog.text
    assert list(tmp_path.iterdir()) == [entry]  # nothing half written stays


def test_a_cache_that_cannot_be_made_is_no_error(
    compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "file").touch()

    assert ptx_of(FORM, HOPPER, tmp_path / "file" / "ptx").entry == FORM.name

    assert "to the disk cache" in caplog.text


def test_the_cache_is_where_xdg_says() -> None:
    assert cache_directory({"XDG_CACHE_HOME": "/var/x"}) == Path("/var/x/r2ccl/ptx")
    home = Path.home() / ".cache" / "r2ccl" / "ptx"
    assert cache_directory({}) == cache_directory({"XDG_CACHE_HOME": "here"}) == home


def test_without_a_home_there_is_no_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)

    assert cache_directory({}) is None
    assert "without a disk cache" in caplog.text


def test_without_numba_cuda_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(name: str) -> str:
        raise ptx.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(ptx.importlib.metadata, "version", unknown)

    with pytest.raises(TransportError, match=r"numba-cuda.*pip install 'numba-cuda") as raised:
        ptx_of(SPECIAL, HOPPER, tmp_path)
    assert raised.value.status == "NO_CUDA"


def test_a_compiler_that_is_not_found_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ptx, "_compiler", lambda: "1")
    monkeypatch.setitem(sys.modules, "r2ccl.kernels.cuda.compiling", None)

    with pytest.raises(TransportError, match="sum_float32_2_1_scaled cannot be loaded") as raised:
        ptx_of(SPECIAL, HOPPER, tmp_path)
    assert raised.value.status == "NO_CUDA"


needs_numba_cuda = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None,
    reason="numba-cuda is not installed: `pip install numba-cuda[cu13]`, which needs no GPU",
)


def fail(*_: object) -> None:
    raise RuntimeError("no luck, for a test")


@needs_numba_cuda
def test_a_library_of_the_compiler_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("r2ccl.kernels.cuda.compiling")  # Numba keeps what it finds
    monkeypatch.setattr("cuda.pathfinder.load_nvidia_dynamic_lib", fail)

    with pytest.raises(TransportError, match=r"no luck.*pip install") as raised:
        ptx_of(SPECIAL, HOPPER, tmp_path)
    assert raised.value.status == "NO_CUDA"


@needs_numba_cuda
def test_nobody_is_told_to_install_a_compiler_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("r2ccl.kernels.cuda.compiling.compile_kernel", fail)

    with pytest.raises(TransportError, match=r"RuntimeError: no luck.*report") as raised:
        ptx_of(SPECIAL, HOPPER, tmp_path)
    assert "install" not in str(raised.value)
    assert raised.value.status == ""


@needs_numba_cuda
def test_a_warm_start_does_not_import_numba(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    assert ptx_of(SPECIAL, HOPPER, cache_directory(env)).origin == "compiled"
    script = (
        "import os, sys; from r2ccl.kernels.cuda import *; from r2ccl.types import ReduceOp\n"
        "form = Form(dtype_code=7, op=ReduceOp.SUM, is_scaled=True)\n"
        "made = ptx_of(form, (9, 0), cache_directory(os.environ))\n"
        "print(made.origin, 'numba' in sys.modules)"
    )
    second = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=60, env=env)
    assert second == "cached False\n"

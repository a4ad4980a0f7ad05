"""Tests of `r2ccl.kernels.native`: code that Numba compiled once is loaded without Numba."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from support.native_programs import MAKER

import r2ccl.runtime.compiled.call
import r2ccl.shm.group
from r2ccl import TransportError
from r2ccl.kernels import native
from r2ccl.kernels.compiling import compile_function

RIGHT = 10 + 5 + 15 + 5 + 15


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    """Make this process look for the directory and the functions again."""
    for each in (native._directory, native._addresses_of, native.callable_of):
        each.cache_clear()


def result_in_new_process() -> tuple[str, str]:
    """Return the result of the function in a new process, and whether that imported Numba."""
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "support.native_programs"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found, is_imported = done.stdout.split()
    return found, is_imported


def the_file(cache: Path) -> Path:
    [file] = cache.glob("*.o")
    return file


def stored(cache: Path) -> native._Stored:
    """Return what the file has."""
    return msgspec.msgpack.decode(the_file(cache).read_bytes(), type=native._Stored)


def test_later_processes_load_the_code_without_numba(cache: Path) -> None:
    assert result_in_new_process() == (str(RIGHT), "True")
    assert the_file(cache).stat().st_mode & 0o777 == 0o600
    assert result_in_new_process() == (str(RIGHT), "False")


def test_both_entries_compute_the_same() -> None:
    address = native.address_of(MAKER, 3)
    function = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(address)
    for given in ((10, 5, 4), (-1, 7, 0), (2**62, -3, 9)):
        assert native.callable_of(MAKER, 3)(*given) == function(*given)
    assert native.callable_of(MAKER, 3)(10, 5, 4) == RIGHT
    assert native.callable_of(MAKER, 2)(10, 5, 4) == RIGHT - 10, "another function"


@pytest.mark.parametrize(
    "given", [(), (1, 2), (1, 2, 3, 4), (1, 2, "3"), (1, 2, None), (1, 2, 3.0)]
)
def test_other_arguments_are_refused(given: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        native.callable_of(MAKER, 3)(*given)  # type: ignore[arg-type]


def test_too_large_an_argument_is_refused() -> None:
    with pytest.raises(OverflowError):
        native.callable_of(MAKER, 3)(2**63, 0, 0)


class Unequal:
    """An object that cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("no comparison")


def test_a_method_returns_objects_and_keeps_its_owner_alive() -> None:
    first, calls = object(), []
    method = native.method_of("support.native_programs:make_method", (first, calls.append))
    nreferences = sys.getrefcount(first)
    assert method((1, "x"), (1, "x")) is first
    assert method(7) is None
    assert calls == [7]
    assert sys.getrefcount(first) == nreferences
    found = weakref.ref(owned := Unequal())
    method = native.method_of("support.native_programs:make_method", (owned, calls.append))
    del owned
    assert found() is not None
    del method
    assert found() is None


def test_errors_of_a_method_are_raised() -> None:
    method = native.method_of("support.native_programs:make_method", (None, int))
    with pytest.raises(ValueError, match="invalid literal"):
        method("x")
    with pytest.raises(TypeError):  # raised by the call: a comparison that fails counts as unequal
        method(Unequal(), Unequal())


def test_other_threads_run_meanwhile() -> None:
    call = native.callable_of("support.native_programs:make_shuffle")
    worker = threading.Thread(target=call, args=(1 << 28,))  # some 0.4 s
    worker.start()
    nsteps = 0
    while worker.is_alive():
        nsteps += 1
        time.sleep(1e-3)
    assert nsteps > 10


def test_threads_may_ask_at_once() -> None:
    with ThreadPoolExecutor(4) as pool:
        calls = list(pool.map(lambda weight: native.callable_of(MAKER, weight % 3), range(12)))
    assert [call(0, 1, 2) for call in calls] == [1 + weight % 3 for weight in range(12)]


def test_a_broken_file_is_made_again(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    native.callable_of(MAKER, 3)
    whole = the_file(cache).read_bytes()
    the_file(cache).write_bytes(whole[: len(whole) // 2])
    forget()
    assert native.callable_of(MAKER, 3)(10, 5, 4) == RIGHT
    assert "cannot be read" in caplog.text
    assert stored(cache).sources in whole


def test_code_of_other_sources_is_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.callable_of(MAKER, 3)
    new = stored(cache)
    stale = msgspec.structs.replace(new, sources=b"older")
    the_file(cache).write_bytes(msgspec.msgpack.encode(stale))
    forget()
    assert native.callable_of(MAKER, 3)(10, 5, 4) == RIGHT
    assert stored(cache).sources == new.sources


def test_modules_whose_constants_are_compiled_count_as_sources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: set[str] = set()
    source_of = native._source_of

    def reading(path: str) -> native._Source:
        read.add(Path(path).name)
        return source_of(path)

    monkeypatch.setattr(native, "_source_of", reading)
    native._sources.__wrapped__("r2ccl.shm.one_message")
    assert {"one_message.py", "native.py", "types.py"} <= read


def test_a_changed_import_changes_the_digest_of_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "r2ccl" / "kernels"
    package.mkdir(parents=True)
    (package / "one.py").write_text("from r2ccl.types import WIDTH\n")
    (package / "two.py").write_text("from r2ccl.missing import NOTHING\n")
    monkeypatch.setattr(native, "_ROOT", str(tmp_path))

    def digest_with(types: str) -> bytes:
        (tmp_path / "r2ccl" / "types.py").write_text(types)
        native._source_of.cache_clear()
        native._modules_in.cache_clear()
        return native._sources.__wrapped__("r2ccl.kernels.one")

    try:
        before, after = digest_with("WIDTH = 1\n"), digest_with("WIDTH = 2\n")
        assert before != after
        assert before == digest_with("WIDTH = 1\n")
    finally:
        native._source_of.cache_clear()
        native._modules_in.cache_clear()


def test_a_file_that_others_can_write_is_not_loaded(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    native.callable_of(MAKER, 3)
    the_file(cache).chmod(0o666)
    forget()
    assert native.callable_of(MAKER, 3)(10, 5, 4) == RIGHT
    assert the_file(cache).stat().st_mode & 0o777 == 0o600, "replaced"


def test_without_a_directory_each_process_compiles(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(cache / "file"))
    (cache / "file").touch()
    forget()
    assert native.callable_of(MAKER, 3)(10, 5, 4) == RIGHT
    assert "set NUMBA_CACHE_DIR to a directory that this user owns" in caplog.text
    assert not list(cache.glob("*.o"))


def test_code_that_cannot_be_stored_leaves_no_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    assert native.callable_of(MAKER, 3)(10, 5, 4) == RIGHT
    assert "cannot store compiled code" in caplog.text
    assert [each.suffix for each in cache.iterdir()] == [".lock"]


def test_a_child_forked_meanwhile_does_not_keep_the_lock(cache: Path) -> None:
    with native.compile_lock("a"):
        inode = (cache / "a.lock").stat().st_ino
        opened = [int(each.name) for each in Path("/proc/self/fd").iterdir()]
        held = [fd for fd in opened if _inode(fd) == inode]
        inherited = os.dup(held[0])  # as a child has it
    try:
        with open(cache / "a.lock", "w") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(inherited)


def _inode(fd: int) -> int:
    try:
        return os.fstat(fd).st_ino
    except OSError:  # the descriptor with which the directory was read
        return -1


def test_a_missing_symbol_is_an_error() -> None:
    code = compile_function(lambda count: count + 1, "alone")
    lacking = msgspec.structs.replace(code, externals=("r2ccl_has_no_such_symbol",))
    with pytest.raises(TransportError, match="nor libc has r2ccl_has_no_such_symbol") as caught:
        native._Linker().load(lacking)
    assert caught.value.status == ""


def test_threads_that_load_code_at_once_share_a_linker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of a linker that is freed is gone."""
    monkeypatch.setattr(native, "_linkers", {})
    together = threading.Barrier(2)
    make = native._Linker.__init__

    def made(self: native._Linker) -> None:
        make(self)
        together.wait(30.0)

    monkeypatch.setattr(native._Linker, "__init__", made)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: native._Linker.shared(), range(2))
    assert first is second is native._Linker.shared()


def test_only_code_that_no_file_has_must_be_compiled(cache: Path) -> None:
    assert native.must_compile(MAKER, 3)
    assert native.callable_of(MAKER, 3)(10, 5, 4) > 0
    assert not native.must_compile(MAKER, 3)
    the_file(cache).unlink()
    assert native.must_compile(MAKER, 3)


@pytest.mark.parametrize("module", [r2ccl.shm.group, r2ccl.runtime.compiled.call])
def test_a_long_compilation_is_announced(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "r2ccl")
    module.announce_compilation()
    assert "once for this user on this host" in caplog.text
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    forget()
    module.preload()
    caplog.clear()
    module.announce_compilation()
    assert not caplog.text

"""Settings of every test: hypothesis examples have no deadline, because machines may be busy."""

import gc
import importlib
import os
import signal
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from support.tables import BENCH, quick_table

hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

# Most tests cut, slow down or watch rails, which shared memory does not use. Those of shared memory
# ask for it.
os.environ.setdefault("R2CC_SHM", "0")

# A shell starts programs in the background with SIGINT ignored, and so would all programs that the
# tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slice K/N``: run every test whose name's checksum modulo N is K."""
    parser.addoption("--slice", type=_parse_slice, help="run the K-th of N slices: K/N, K from 0")


def _parse_slice(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not 0 <= int(index) < int(count):
        raise ValueError(text)
    return int(index), int(count)


#: Place of each file in the order of the tests, in a worker that reads the files in another order.
_ORDER = pytest.StashKey[dict[str, int]]()


def pytest_configure(config: pytest.Config) -> None:
    """Let each worker start to read the files at another place.

    The first run rewrites the asserts of each file, which takes 8 s of CPU time for all files, and
    stores the result. Workers with the same order would all rewrite each file at the same time.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ or not all(map(os.path.isdir, config.args)):
        return
    folders = [Path(arg).resolve() for arg in config.args]
    files = [str(each) for folder in folders for each in sorted(folder.rglob("test_*.py"))]
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    first = len(files) * number // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    config.stash[_ORDER] = {file: place for place, file in enumerate(files)}
    config.args[:] = files[first:] + files[:first]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other slices; a checksum spreads the cases of each test."""
    if order := config.stash.get(_ORDER, None):
        items.sort(key=lambda item: order[str(item.path)])  # all workers must have the same order
    if (chosen := config.getoption("--slice")) is None:
        return
    index, count = chosen
    other = [each for each in items if zlib.crc32(each.nodeid.encode()) % count != index]
    config.hook.pytest_deselected(items=other)
    left_out = set(other)
    items[:] = [each for each in items if each not in left_out]


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over the tests themselves: it takes 0.5 s for 10,000."""
    gc.freeze()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a module of the benches, which are no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


@pytest.fixture
def quick(run_folder: Path) -> Callable[[str], Any]:
    """Return the rows that the quick form of a table of `bench/tables.py` saves; each runs once."""
    return partial(quick_table, run_folder)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new folder, the same one in all processes of this run."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    (folder / "shared").mkdir(exist_ok=True)
    return folder / "shared"

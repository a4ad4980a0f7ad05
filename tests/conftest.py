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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other slices; a checksum spreads the cases of each test."""
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

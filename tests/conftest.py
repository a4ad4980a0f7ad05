"""Settings of every test: hypothesis examples have no deadline, because machines may be busy."""

import gc
import os
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

# Most tests cut, slow down or watch rails, which shared memory does not use. Those of shared memory
# ask for it.
os.environ.setdefault("R2CC_SHM", "0")


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over the tests themselves: it takes 0.5 s for 10,000."""
    gc.freeze()


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new folder, the same one in all processes of this run."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    (folder / "shared").mkdir(exist_ok=True)
    return folder / "shared"

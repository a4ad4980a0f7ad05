"""The examples run as their first lines say, and the demo ends as it promises."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.mpi import find_mpiexec
from support.slow import slow_but

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
#: A busy machine takes long to start the ranks of two trainings.
TIMEOUT_S = 240
LAUNCH = (sys.executable, "-m", "r2ccl", "launch", "-n", "2", "--")


def run(*argv: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Run a command that must succeed; return what it wrote."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        list(map(str, argv)),
        cwd=cwd,
        env={**os.environ, **env, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def load(name: str) -> ModuleType:
    """Import one of the demo's modules from its file."""
    spec = importlib.util.spec_from_file_location(f"demo_{name}", EXAMPLES / f"digits/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("0*.py")), ids=lambda path: path.name)
def test_numbered_examples_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60


def test_allreduce_sums_over_all_ranks() -> None:
    assert "2 ranks: every element is 3, the last rank is 1" in run(
        *LAUNCH, sys.executable, EXAMPLES / "01_allreduce.py"
    )


def test_a_lost_rail_changes_no_sum_and_is_reported() -> None:
    written = run(sys.executable, EXAMPLES / "02_lose_a_rail.py")
    assert "every element is 6" in written
    assert "cut by the fault plan; moved channel" in written


def test_mpi_ranks_become_ranks() -> None:
    pytest.importorskip("mpi4py")
    written = run(find_mpiexec(), "-n", "2", sys.executable, EXAMPLES / "03_mpi.py")
    assert "2 ranks of MPI: the same sum" in written


#: Executes the notebook argv[1] in a kernel and writes it, with its outputs, to argv[2].
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=80, kernel_name="python3", record_timing=False).execute()
nbformat.write(notebook, sys.argv[2])
"""


def shown(path: Path) -> list[tuple[list[str], list[Any]]]:
    """Return the printed lines, sorted, and the results of each cell; not what is logged."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    found = []
    for outputs in (cell["outputs"] for cell in cells if cell["cell_type"] == "code"):
        printed = [each["text"] for each in outputs if each.get("name") == "stdout"]
        results = [each["data"] for each in outputs if each["output_type"] == "execute_result"]
        lines = "".join(text for texts in printed for text in texts).splitlines()
        found.append((sorted(lines), results))
    return found


def test_notebook_shows_what_happens_in_a_kernel(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook, executed = EXAMPLES / "notebook.ipynb", tmp_path / "executed.ipynb"
    # Jupyter and IPython write to the home directory else.
    homes = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    folders = {name: str(tmp_path / name) for name in homes}
    run(sys.executable, "-c", EXECUTE, notebook, executed, **folders)
    assert shown(executed) == shown(notebook)


#: Runs the demo in the folder argv[1] on argv[2] nodes, with the first argv[3] images.
SMALLER = """
import runpy, sys
folder, nnodes, nimages, *sys.argv[1:] = sys.argv[1:]
sys.path.insert(0, folder)
from demos import cluster
from sklearn import datasets
cluster.NODES = int(nnodes)
digits = datasets.load_digits()
digits.data, digits.target = digits.data[:int(nimages)], digits.target[:int(nimages)]
datasets.load_digits = lambda: digits
runpy.run_path(f"{folder}/train_digits.py", run_name="__main__")
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("nnodes", "nimages"), slow_but([(3, 216)], [(3, 216), (4, 1797)]))
def test_demo_on_loopback_loses_a_rail_and_no_bit(
    nnodes: int, nimages: int, tmp_path: Path
) -> None:
    size = (str(nnodes), str(nimages))
    options = ("--epochs", "1", "--loopback")
    written = run(sys.executable, "-c", SMALLER, EXAMPLES, *size, *options, cwd=tmp_path)
    # Whichever end is first to notice: the one that was cut, or its peer.
    assert re.search(r"evidence +(ENETDOWN|EOF|ECONNRESET|EPIPE): ", written), written
    assert written.rstrip().splitlines()[-1].startswith("OK: a NIC died during an allreduce")


def test_gradient_of_the_demo_is_that_of_its_loss() -> None:
    rank = load("rank")
    rank.LAYERS = (5, 7, 6, 3)
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(rank.nweights())
    x, labels = rng.standard_normal((4, 5)), np.array([0, 2, 1, 2])
    gradient, unused = np.empty_like(weights), np.empty_like(weights)
    rank.backpropagate(weights, gradient, x, labels)
    for index in range(0, len(weights), 5):
        step = np.zeros_like(weights)
        step[index] = 1e-6
        up = rank.backpropagate(weights + step, unused, x, labels)
        down = rank.backpropagate(weights - step, unused, x, labels)
        assert (up - down) / 2e-6 == pytest.approx(gradient[index], abs=1e-6)


def test_gradient_of_the_demo_is_as_large_as_promised() -> None:
    rank = load("rank")
    assert rank.initial_weights().nbytes >= 16 << 20

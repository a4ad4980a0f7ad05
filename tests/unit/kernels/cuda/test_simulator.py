"""Every kernel, run in Numba's CUDA simulator, gives the bits of the host's kernels."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cuda_cases import host_fuses, others, pairs, title
from support.once import once

from r2ccl.dtypes import dtype_name
from r2ccl.kernels.cuda import Form, canonical

TESTS = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba.cuda") is None,
    reason="this Numba has no CUDA simulator: `pip install numba-cuda`",
)


@pytest.fixture(scope="module")
def complaints(run_folder: Path) -> dict[str, list[str]]:
    """Run all forms in one process, which must be told of the simulator before it starts."""
    found: dict[str, list[str]] = once(run_folder, "simulator", simulated)
    return found


def simulated() -> Any:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", TESTS / "support/cuda_simulated.py"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={
            **os.environ,
            "NUMBA_ENABLE_CUDASIM": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        },
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize(
    "form", [pytest.param(each, id=title(each)) for each in (*pairs(), *others())]
)
def test_results_are_those_of_the_host_at_every_place(
    form: Form, complaints: dict[str, list[str]]
) -> None:
    if dtype_name(canonical(form).dtype_code).startswith("complex") and not host_fuses():
        pytest.skip("NumPy on this processor rounds complex products at other places")

    assert complaints[title(form)] == []
